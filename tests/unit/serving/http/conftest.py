"""One service for read-only tests: every kind of task and a pre-trained encoder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving_cases import schedulers, serving, write_encoder, write_task
from task_cases import TASK_CASES

from bertsmith.serving.scheduler import Scheduler

KINDS = [
    "classification",
    "classification of pairs",
    "tagging",
    "parsing",
    "regression",
    "multi_label",
    "choice",
    "spans",
]
KINDS += ["embedding of alike texts"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders by served name; the first is a classifier."""
    home = tmp_path_factory.mktemp("served")
    assert {TASK_CASES[kind].kind for kind in KINDS} == {case.kind for case in TASK_CASES.values()}
    tasks = {kind.split()[-1]: write_task(home / kind, kind) for kind in KINDS}
    return {**tasks, "encoder": write_encoder(home / "encoder")}


@pytest.fixture(scope="session")
def running(folders: dict[str, Path]) -> Iterator[dict[str, Scheduler]]:
    with schedulers(folders) as started:
        yield started


@pytest.fixture(scope="session")
def url(running: dict[str, Scheduler]) -> Iterator[str]:
    with serving(running) as address:
        yield address
