"""bertsmith shrink --method exits of a translation model: what a run leaves, its rule in use, what is refused."""

import json
from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith.cli import main
from bertsmith.engines.exit_runner import AdaptiveTranslator
from bertsmith.errors import InputError
from bertsmith.models.adaptive_depth import decoder_exits_config
from bertsmith.models.heads.decoder_exits import DepthRule
from bertsmith.models.seq2seq import Seq2Seq
from bertsmith.tasks.predictor import Predictor
from bertsmith.training.trainer import Trainer

SMALL = ["model.overrides={width=32,layers=3,heads=2,neurons=64,max_length=64}", "tokenizer.vocabulary=300"]
SMALL += ["sequences.length=64", "sequences.micro_tokens=256", "batch.tokens=512", "run.log_every=1"]
SMALL += ["task.generation={method='greedy',extra_length=2}", "run.steps=3"]
QUICK = ["run.steps=4", "batch.tokens=512", "leave.candidates=50", "leave.examples=8"]


@pytest.fixture(scope="module")
def model(pairs_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("decoder_exits") / "model"
    bertsmith.finetune("transformer-tiny", data=pairs_folder, out=out, set=SMALL, device="cpu")
    return out


def exits(model: Path, data: Path, out: Path, *changes: str, **more: object) -> dict:
    return bertsmith.shrink(
        model, data=str(data), out=out, method="exits", set=[*QUICK, *changes], device="cpu", **more
    )


@pytest.fixture(scope="module")
def run(model: Path, pairs_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("decoder_exits") / "run"
    exits(model, pairs_folder, out, blocks=2.5)
    return out


def test_what_a_run_leaves(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    assert result["metric"] == "bleu"
    assert result["blocks"] == 3
    assert set(result["exit_scores"]) == {"1", "2"}
    assert result["mean_blocks"] <= 2.5
    assert result["examples"] == 8
    assert result["table"][0]["rule"]["thresholds"] == [0.0, 1.0]
    assert all(row["loss_bound"] >= result["full_score"] - row["score"] for row in result["table"])
    assert all(row["flops"] > 0 for row in result["table"])
    assert result["loss_bound"] in [row["loss_bound"] for row in result["table"]]
    assert result["confidence"] == 0.95
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert {"next_token_accuracy", "next_token_accuracy_1", "next_token_accuracy_2"} <= log[0].keys()
    assert not (run / "checkpoints").exists()
    stored = decoder_exits_config(bertsmith.load(run)).rule
    assert stored == DepthRule.parse(result["rule"])


def test_evaluate_and_predict_use_the_exits(run: Path, pairs_folder: Path, tmp_path: Path) -> None:
    result = bertsmith.evaluate(run, data=pairs_folder, out=tmp_path / "dev", device="cpu")
    assert result["layers"] == 3
    assert 1 <= result["mean_layers"] < 3
    assert "perplexity" in result.to_json()
    said = bertsmith.predict(run, text=["the smith", "a cold river"], out=tmp_path / "said", device="cpu")
    predictor = Predictor.load(run)
    assert isinstance(predictor.model, AdaptiveTranslator)
    assert predictor.predict(["the smith", "a cold river"]) == said["predictions"]
    assert said["mean_layers"] == predictor.mean_layers


@pytest.mark.parametrize("choose", ["sequence", "multinomial", "geometric"])
def test_trained_choosers(choose: str, model: Path, pairs_folder: Path, tmp_path: Path) -> None:
    result = exits(model, pairs_folder, tmp_path / "out", f"exits.choose={choose}", "leave.tolerance=100")
    assert result["choose"] == choose
    assert result["rule"] is not None
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert "chooser_oracle_blocks" in log[0]
    evaluated = bertsmith.evaluate(tmp_path / "out", data=pairs_folder, out=tmp_path / "dev", device="cpu")
    assert 1 <= evaluated["mean_layers"] <= 3


def test_no_rule_within_the_tolerance_computes_all_blocks(model: Path, pairs_folder: Path, tmp_path: Path) -> None:
    # below the first exit: no candidates
    exits(model, pairs_folder, tmp_path / "out", "exits.choose=sequence", "leave.budgets=[0.5]")
    assert decoder_exits_config(bertsmith.load(tmp_path / "out")).rule is None
    assert isinstance(Predictor.load(tmp_path / "out").model, Seq2Seq)


def test_resumed_run_equals_an_uninterrupted_one(
    model: Path, pairs_folder: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = Trainer._step, 0

    def step_or_interrupt(self: Trainer, *arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise KeyboardInterrupt
        step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", step_or_interrupt)
        with pytest.raises(KeyboardInterrupt):
            exits(model, pairs_folder, tmp_path / "out", "run.checkpoint_every=1", blocks=2.5)
    bertsmith.shrink(out=tmp_path / "out", resume=True, device="cpu")
    first, second = (bertsmith.load(folder).state_dict() for folder in (run, tmp_path / "out"))
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        (["exits.layers=[3]"], {}, "1 to 2"),
        (["exits.layers=[2]"], {"blocks": 1.0}, "first exit is after block 2"),
        ([], {"epochs": 2.0}, "run.steps"),
        ([], {"batch": 8}, "batch.tokens"),
        (["run.compile=whole"], {}, "run.compile"),
        (["oracle.extra_cost=-1"], {}, "extra_cost"),
    ],
)
def test_refusals(
    changes: list[str], more: dict[str, object], message: str, model: Path, pairs_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        exits(model, pairs_folder, tmp_path / "out", *changes, **more)


def test_other_methods_name_exits(model: Path, pairs_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--method exits"):
        bertsmith.shrink(model, data=str(pairs_folder), out=tmp_path / "out", method="prune", device="cpu")


def test_explain(model: Path, pairs_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["shrink", str(model), "--data", str(pairs_folder), "--method", "exits", "--out", str(tmp_path / "out")]
    main([*words, "--explain", "--device", "cpu"])
    assert "exits after decoder blocks" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
