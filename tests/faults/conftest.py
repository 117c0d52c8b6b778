"""What the tests of disturbed and divided runs share."""

from pathlib import Path

import pytest
from helpers_training import RECIPE


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the recipe they run."""
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(RECIPE)
    return path
