"""Which of many cases are part of every run of the tests."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_unless(quick: Collection[str], names: Iterable[str]) -> list[Any]:
    """The names as parameters: those that are not quick wait for `make test-slow`."""
    names = list(names)
    assert set(quick) <= set(names)
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
