"""Selection of the cases that run in every test run."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_unless(quick: Collection[str], names: Iterable[str]) -> list[Any]:
    """Return the names as parameters; names that are not quick run only in `make test-slow`."""
    names = list(names)
    assert set(quick) <= set(names)
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
