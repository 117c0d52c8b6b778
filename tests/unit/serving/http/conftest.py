"""One service for the tests that only ask: every kind of task, a pre-trained encoder, an elastic model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving_cases import engines, serving, write_encoder, write_task
from task_cases import TASK_CASES

from bertsmith.serving.model import ServedModel
from bertsmith.serving.scheduler import Scheduler

KINDS = ["classification", "classification of pairs", "tagging", "regression", "multi_label", "choice", "spans"]
KINDS += ["embedding of alike texts"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by the names they are served under; the first is a classifier."""
    home = tmp_path_factory.mktemp("served")
    assert {TASK_CASES[kind].kind for kind in KINDS} == {case.kind for case in TASK_CASES.values()}
    made = {kind.split()[-1]: write_task(home / kind, kind) for kind in KINDS}
    return {**made, "encoder": write_encoder(home / "encoder")}


@pytest.fixture(scope="session")
def models(folders: dict[str, Path]) -> Iterator[dict[str, tuple[ServedModel, Scheduler]]]:
    with engines(folders) as found:
        yield found


@pytest.fixture(scope="session")
def url(models: dict[str, tuple[ServedModel, Scheduler]]) -> Iterator[str]:
    with serving(models) as found:
        yield found
