"""Regression on the frozen encoder, against scikit-learn."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

import bertsmith
from bertsmith.models.heads.task import ScoringHead
from bertsmith.tasks.data_source import recognise
from bertsmith.text.rows import table_of
from bertsmith.toml import override
from bertsmith.training import head_start
from bertsmith.training.finetuning import FinetuneSettings, Finetuning, make_finetuning, read_data
from bertsmith.training.head_start import INVERSE_PENALTY, fit_scores

WORDS = ("iron", "river", "clock", "lantern", "harbour", "gate", "smith", "old")
ROWS = [
    {"text": " ".join(WORDS[(i * k) % 8] for k in range(1, 2 + i % 5)), "label": "abc"[(i * i + i // 7) % 3]}
    for i in range(60)
]
SETTINGS = (
    "model={preset='bert-tiny', overrides={layers=1, width=16, heads=2, init_std=0.2}}",
    "tokenizer.vocabulary=300",
    "head.pooling='mean'",
    "head.hidden='none'",
)


def finetuning(out: Path, *settings: str) -> Finetuning:
    table = table_of(ROWS, "rows")
    plain = {**override({}, [*SETTINGS, *settings]), "task": recognise(table, None, [], {})}
    return make_finetuning(read_data(FinetuneSettings.parse(plain), table, table), out, device="cpu", show=False)


def test_scores_equal_those_of_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_start, "MAX_ITERATIONS", 2000)
    model = finetuning(tmp_path, "head.start='regression'").trainer.model
    vectors = model.encode([row["text"] for row in ROWS], convert_to="numpy")
    centred = vectors - vectors.mean(0)
    scaled = centred / np.sqrt((centred**2).sum(-1).mean())
    expected = LogisticRegression(C=INVERSE_PENALTY, max_iter=5000, tol=1e-8).fit(
        scaled, [row["label"] for row in ROWS]
    )
    head = model.task_head
    assert isinstance(head, ScoringHead)
    scores = head.score(torch.from_numpy(vectors)).detach()
    torch.testing.assert_close(
        scores.softmax(-1), torch.from_numpy(expected.predict_proba(scaled)).float(), rtol=0, atol=2e-3
    )


def test_random_start_is_the_default(tmp_path: Path) -> None:
    plain, chosen = (
        finetuning(tmp_path / name, *settings).trainer.model
        for name, settings in {"default": (), "random": ("head.start='random'",)}.items()
    )
    for weight, other in zip(plain.parameters(), chosen.parameters(), strict=True):
        assert torch.equal(weight, other)


def test_many_items_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finetuning(tmp_path)
    assert run.evaluator is not None
    seen: list[int] = []
    objective = run.evaluator.objective
    monkeypatch.setattr(head_start, "MAX_ITEMS", 7)
    monkeypatch.setattr(type(objective), "count", lambda _, batch: seen.append(len(batch.item)) or torch.tensor(1.0))
    fit_scores(run.trainer.model, objective, run.evaluator.features, run.evaluator.sequences, seed=0)
    assert sum(seen) == 7


def test_quantised_scores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(bertsmith.InputError, match=r"head\.start is 'regression'"):
        finetuning(tmp_path, "head.start='regression'", "quantisation={weight_bits=8}")
