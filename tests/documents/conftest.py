"""Run documented commands and examples quickly: a tiny bundled model, little data, and made-up latencies."""

from collections.abc import Sequence
from pathlib import Path

import pytest

import bertsmith
from bertsmith import bundled
from bertsmith.models.generator import attach, generator_of
from bertsmith.shrinking.fit import measure
from bertsmith.text import support_desk
from bertsmith.text.learn import learn_tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ELECTRA with a generator, tiny and untrained."""
    tokenizer = learn_tokenizer(support_desk.messages(), "wordpiece", 600, lowercase=True, progress=False)
    config = bertsmith.preset(
        "electra-small", layers=2, width=32, heads=4, embedding_width=16, max_length=128, vocabulary=tokenizer.size
    )
    generator = bertsmith.build(generator_of(config, width=0.5, depth=0.5), seed=1)
    model = attach(bertsmith.build(config, seed=0), generator, "full").eval()
    model.tokenizer = tokenizer
    folder = tmp_path_factory.mktemp("bundled") / "small"
    bertsmith.save(model, folder)
    return folder


@pytest.fixture
def workplace(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory in which "small" is the tiny model."""

    def timing(folders: Sequence[Path], conditions: measure.Conditions, runs: int, seconds: float) -> measure.Timing:
        quantiles = {"p50": 0.01, "p95": 0.01, "mean": 0.01, "runs": runs}
        return measure.Timing([{load.name: quantiles for load in conditions.workloads} for _ in folders], 100.0, 10.0)

    rows = {split: support_desk.support_desk(split)[:96] for split in ("train", "dev")}
    monkeypatch.setattr(support_desk, "support_desk", lambda split: rows[split])
    monkeypatch.setattr(measure, "in_fresh_process", timing)
    monkeypatch.setitem(bundled.FOLDERS, "small", tiny_model)
    monkeypatch.chdir(tmp_path)
    return tmp_path
