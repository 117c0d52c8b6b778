"""Flags that several commands share, with their short names; and groups of flags in --help. Imports no PyTorch."""

from pathlib import Path
from typing import Annotated, TypeVar

from cyclopts import Group, Parameter

Value = TypeVar("Value")

OutFlag = Annotated[Value, Parameter(alias="-o")]
DataFlag = Annotated[Value, Parameter(alias="-d")]
TextFlag = Annotated[list[str] | None, Parameter(alias="-t")]
SetFlag = Annotated[list[str] | None, Parameter(alias="-s")]
RecipeFlag = Annotated[str | Path | None, Parameter(alias="-r")]
RayFlag = Annotated[str | None, Parameter(group=Group("Cluster", sort_key=1))]
ForceFlag = Annotated[bool, Parameter(alias="-f", negative=())]


def flag_group(title: str) -> Parameter:
    """Return the annotation of a flag that --help lists under a title of its own, after the other flags."""
    return Parameter(group=Group(title, sort_key=1))


TRANSLATION = flag_group("Translation")
