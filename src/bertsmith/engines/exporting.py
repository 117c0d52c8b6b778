"""A model for another program, as one call: `bertsmith.export`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from bertsmith.checkpoint.files import NewFolder
from bertsmith.checkpoint.hf import save_hf
from bertsmith.checkpoint.store import free_folder
from bertsmith.engines.artefact import write_artefact
from bertsmith.engines.base import Artefact, Inputs, Precision
from bertsmith.errors import InputError, nearest
from bertsmith.models.generator import Part, part_of
from bertsmith.models.model import Model

Form = Literal["hf", "onnx"]
FORMS = ("hf", "onnx")


def export(
    model: Model,
    folder: str | Path,
    *,
    to: Form = "hf",
    precision: Precision = "float32",
    samples: Sequence[Inputs] = (),
    part: Part = "encoder",
    force: bool = False,
) -> None:
    """Writes the model for another program, whole or not at all.

    "hf" is a folder that `transformers` loads without our code; "onnx" one that ONNX Runtime runs, in a precision of
    its own if asked for, with `samples` to measure the ranges of activations on. Of a model that was trained against a
    generator, `part` says which of the two.
    """
    check_form(to, precision)
    chosen = part_of(model, part)
    with NewFolder(free_folder(folder, force)) as new:
        if to == "hf":
            save_hf(chosen, new)
        else:
            write_artefact(chosen, new, Artefact(engine="onnxruntime", precision=precision), samples)


def check_form(to: str, precision: str) -> None:
    """Raises a sentence if there is no such form, or if it has no precisions."""
    if to not in FORMS:
        raise InputError(f"to is {to!r}; {nearest(to, FORMS)}")
    if to == "hf" and precision != "float32":
        raise InputError(f"precision is {precision!r} with to = 'hf'; allowed: float32, or to = 'onnx'")
