"""Runs with several phases: resuming, costs, checks and compilation."""

from pathlib import Path

import pytest
import torch
from helpers_runs import RECIPE, SMALL, assert_same, interrupted, rows, run
from torch._dynamo.testing import CompileCounter

import bertsmith
from bertsmith.data.loader import BatchReader
from bertsmith.errors import InputError
from bertsmith.training.pretraining import PretrainSettings

TWO = ["phases=[{begin=0.5,length=64,micro_tokens=512,batch_tokens=1024}]", "run.steps=10"]
TWO += ["run.log_every=4", "run.evaluate_every=5", "run.checkpoint_every=3"]


@pytest.fixture(scope="module")
def uninterrupted(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run with a loader worker, which ends with its phase."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    run(corpus_folder, out, *TWO, "run.workers=1")
    return out


@pytest.mark.parametrize("at", [4, 5, 8])
def test_resumed_run_equals_uninterrupted_run_across_phases(
    at: int, uninterrupted: Path, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 4 and 8 are between two rows of the log: the meter's sums must be restored."""
    interrupted(monkeypatch, corpus_folder, tmp_path / "run", at, *TWO)
    assert_same(tmp_path / "run", uninterrupted)


def test_sequences_change_with_the_phase(corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = BatchReader.__getitem__

    def record_call(self: BatchReader, plan: object) -> object:
        if self.corpus.split == "train":
            seen.append((self.config.length, self.config.micro_tokens))
        return real(self, plan)

    monkeypatch.setattr(BatchReader, "__getitem__", record_call)
    metrics = run(corpus_folder, tmp_path / "run", *TWO)
    assert seen == [(32, 256)] * 10 + [(64, 512)] * 10
    flops = [row["flops"] for row in rows(tmp_path / "run") if row["kind"] == "training"]
    assert flops[-1] == metrics["training_flops"] > metrics["tokens"] * metrics["training_flops_per_token"]


def test_explain_lists_every_phase(capsys: pytest.CaptureFixture) -> None:
    facts = bertsmith.pretrain(RECIPE, set=[*SMALL, *TWO], explain=True)
    assert facts["tokens"] == "7,680 in 10 steps"
    assert facts["phase 1, length 32"].startswith("steps 0 to 5: 2,560 tokens, ")
    assert facts["phase 2, length 64"].startswith("steps 5 to 10: 5,120 tokens, ")
    each = [float(facts[f"phase {n}, length {32 * n}"].split(", ")[1].split(" ")[0]) for n in (1, 2)]
    assert float(facts["training FLOPs in all"]) == pytest.approx(sum(each), rel=1e-3)


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([{"begin": 0.9, "length": 512}], "phases.0: micro_tokens 256 is less than length 512"),
        ([{"begin": 0.5, "length": 32}, {"begin": 0.5, "length": 64}], "phases.1.begin is 0.5; allowed: more than"),
        ([{"begin": 1.0, "length": 32}], "phases.0.begin is 1.0"),
        ([{"begin": 0.5, "lenght": 32}], "phases.0.lenght is not a known setting; did you mean 'length'?"),
    ],
)
def test_invalid_phases_raise(phases: list, message: str) -> None:
    plain = {"model": {"preset": "bert-tiny"}, "sequences": {"micro_tokens": 256}, "phases": phases}
    with pytest.raises(InputError) as caught:
        PretrainSettings.parse(plain)
    assert message in str(caught.value)


def test_phases_that_do_not_fit_model_or_batch_raise(corpus_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"phases\.0\.length is 128; the model takes at most 64 tokens"):
        run(corpus_folder, tmp_path / "run", "phases=[{begin=0.5,length=128}]")
    with pytest.raises(
        InputError, match=r"phases\.0: batch_tokens is 512, which is not a multiple of micro_tokens 384"
    ):
        run(corpus_folder, tmp_path / "run", "phases=[{begin=0.5,length=64,micro_tokens=384}]")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_many_layer_shapes_stay_compiled(corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A modern network has four kinds of layers; three phases make twelve, more than PyTorch's default limit."""
    dynamo = torch._dynamo
    dynamo.reset()
    counter, compile_it = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_it(function, backend=counter, **options))
    size = "model.overrides={width=16,layers=5,heads=2,max_length=64,neurons=32,window=8}"
    phases = "phases=[{begin=0.3,length=48},{begin=0.6,length=64}]"
    changes = ["model.preset=modern-small", size, phases, "run.compile=on", "run.steps=3", "batch.tokens=256"]
    with dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        run(corpus_folder, tmp_path / "run", *changes)
    assert counter.frame_count > 8
    dynamo.reset()
