"""Shared fixtures of tests that interrupt runs or use several processes."""

from pathlib import Path

import pytest
from helpers_training import RECIPE


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File of the pre-training recipe."""
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(RECIPE)
    return path
