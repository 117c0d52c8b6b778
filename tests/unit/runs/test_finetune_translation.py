"""finetune, evaluate and predict on pairs of texts."""

import json
from pathlib import Path
from random import Random

import pytest
import torch

import bertsmith
from bertsmith.checkpoint.files import read_tensors
from bertsmith.cli import main
from bertsmith.errors import InputError
from bertsmith.tasks import translation

SMALL = ["model.overrides={width=32,layers=1,heads=2,neurons=64,max_length=64}", "tokenizer.vocabulary=300"]
SMALL += ["sequences.length=64", "sequences.micro_tokens=256", "batch.tokens=512", "run.log_every=1"]
SMALL += ["task.generation={method='greedy',extra_length=2}"]


def tune(data: Path, out: Path, *changes: str, **more: object) -> dict:
    return bertsmith.finetune("transformer-tiny", data=data, out=out, set=[*SMALL, *changes], device="cpu", **more)


@pytest.fixture(scope="module")
def run(pairs_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    tune(pairs_folder, out, "run.steps=3")
    return out


def test_run_writes_model_result_and_log(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    assert result["metric"] == "bleu"
    assert result["score"] == result["bleu"]
    assert "tok:13a" in result["signature"]
    assert result["perplexity"] == pytest.approx(torch.tensor(result["loss"]).exp().item(), rel=1e-4)
    assert result["data"]["dev"] == {"rows": 20, "dropped": 0, "cut": 0}
    assert result["data"]["train"]["rows"] == 160
    rows = [json.loads(line) for line in (run / "dev.predictions.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    assert set(rows[0]) == {"answer"}
    assert (run / "report.html").is_file()
    assert json.loads((run / "task.json").read_text())["task"]["source"] == "forth"
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    training = [row for row in log if row["kind"] == "training"]
    assert all(row["next_token_nll"] != row["next_token_loss"] for row in training)
    held_out = [row for row in log if row["kind"] == "held_out"]
    assert held_out[-1]["loss"] == pytest.approx(result["loss"], rel=1e-5)
    assert 'source = "forth"' in (run / "recipe.toml").read_text()


def test_evaluate_and_predict(run: Path, pairs_folder: Path, tmp_path: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    likeliest = bertsmith.evaluate(run, data=pairs_folder, out=tmp_path / "dev", beam=1, device="cpu")
    assert likeliest["search"] == result["search"] | {"method": "beam", "beam": 1}
    assert likeliest["bleu"] == pytest.approx(result["bleu"])  # beam 1 = greedy
    arguments = ["evaluate", str(run), "--data", str(pairs_folder), "--split", "test", "--out", str(tmp_path / "test")]
    main([*arguments, "--beam", "2", "--device", "cpu"])
    metrics = json.loads((tmp_path / "test" / "result.json").read_text())
    assert (metrics["examples"], metrics["source"], metrics["search"]["beam"]) == (10, "forth", 2)

    lines = tmp_path / "lines.txt"
    lines.write_text("the smith\n\na cold river\n", encoding="utf-8")
    main(["predict", str(run), "--data", str(lines), "--out", str(tmp_path / "lines"), "--beam", "1"])
    made = (tmp_path / "lines" / "predictions.txt").read_text().split("\n")
    assert len(made) == 4
    assert made[1] == ""
    output = bertsmith.predict(run, text=["the smith", "a cold river"], out=tmp_path / "output", beam=1, device="cpu")
    assert output["predictions"] == [made[0], made[2]]


def test_evaluate_reproduces_the_run_scores(pairs_folder: Path, tmp_path: Path) -> None:
    """Columns, maximum length and search come from the run; none of them is a default."""
    changes = ["run.steps=2", "sequences.length=6", "sequences.too_long=cut", "task.generation={beam=2,extra_length=1}"]
    measured = tune(pairs_folder, tmp_path / "run", *changes, source="back")
    again = bertsmith.evaluate(tmp_path / "run", data=pairs_folder, out=tmp_path / "dev", device="cpu")
    for name in ("loss", "perplexity", "accuracy", "target_tokens", "bleu", "exact_match", "search", "signature"):
        assert again[name] == measured[name]
    written = [tmp_path / "run" / "dev.predictions.jsonl", tmp_path / "dev" / "predictions.jsonl"]
    assert written[0].read_text() == written[1].read_text()


def test_direction_is_stored(pairs_folder: Path, tmp_path: Path) -> None:
    tune(pairs_folder, tmp_path / "run", "run.steps=1", source="back")
    metrics = bertsmith.evaluate(tmp_path / "run", data=pairs_folder, out=tmp_path / "dev", beam=1, device="cpu")
    assert (metrics["source"], metrics["target"]) == ("back", "forth")


def test_last_checkpoints_are_averaged(pairs_folder: Path, tmp_path: Path) -> None:
    changes = ["run.steps=6", "run.checkpoint_every=1", "run.evaluate_every=100", "run.average_last=3"]
    tune(pairs_folder, tmp_path / "run", *changes)
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000005", "step-00000006"]
    parts = [read_tensors(path / "model.safetensors") for path in sorted(folder.iterdir())]
    for name, tensor in read_tensors(tmp_path / "run" / "model.safetensors").items():
        torch.testing.assert_close(tensor, sum(part[name] for part in parts) / 3, rtol=1e-5, atol=1e-7)
        assert tensor.dtype == torch.float32
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row.get("averaged") for row in rows if row["kind"] == "held_out"] == [None, 3]


def test_run_starts_from_model_and_resumes_from_checkpoint(run: Path, pairs_folder: Path, tmp_path: Path) -> None:
    small = [change for change in SMALL if not change.startswith(("model", "tokenizer"))]
    more = bertsmith.finetune(
        str(run), data=pairs_folder, out=tmp_path / "more", set=[*small, "run.steps=2"], device="cpu"
    )
    assert more["training_loss"] < json.loads((run / "log.jsonl").read_text().splitlines()[0])["loss"]
    # an interrupted run: it has checkpoints, but no result
    whole = tune(pairs_folder, tmp_path / "whole", "run.steps=4", "run.checkpoint_every=2")
    lost = tmp_path / "whole" / "checkpoints" / "step-00000004"
    (lost / "seal.json").unlink()
    (tmp_path / "whole" / "result.json").unlink()
    again = bertsmith.finetune(out=tmp_path / "whole", resume=True, device="cpu")
    assert again["training_loss"] == whole["training_loss"]
    assert again["loss"] == whole["loss"]
    with pytest.raises(InputError, match="there is nothing to resume"):
        bertsmith.finetune(out=tmp_path / "whole", resume=True, device="cpu")


@pytest.mark.slow
def test_compiled_run_equals_eager_run(pairs_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    # aot_eager: the test checks the graphs, not the generated code
    monkeypatch.setattr(torch, "compile", lambda function, **settings: real(function, backend="aot_eager"))
    # two steps of one micro-batch each, of different shapes
    # compiled code draws other dropout masks
    small = "model.overrides={width=32,layers=1,heads=2,neurons=64,dropout=0.0}"
    changes = ("run.steps=2", "batch.tokens=256", small)
    plain = tune(pairs_folder, tmp_path / "plain", *changes)
    compiled = tune(pairs_folder, tmp_path / "compiled", *changes, "run.compile=whole")
    assert compiled["training_loss"] == pytest.approx(plain["training_loss"], rel=1e-4)


def test_padded_run_equals_packed_run(pairs_folder: Path, tmp_path: Path) -> None:
    """One step over all pairs must not depend on the layout."""
    changes = ["run.steps=2", "sequences.micro_tokens=2048", "batch.tokens=2048"]
    changes += ["model.overrides={width=32,layers=1,heads=2,neurons=64,dropout=0.0}"]
    packed = tune(pairs_folder, tmp_path / "packed", *changes)
    padded = tune(pairs_folder, tmp_path / "padded", *changes, "sequences.layout=padded")
    assert packed["loss"] == pytest.approx(padded["loss"], rel=1e-4)


def test_run_without_sacrebleu_prints_a_hint(
    pairs_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(translation, "find_spec", lambda name: None)
    metrics = tune(pairs_folder, tmp_path / "run", "run.steps=1")
    assert metrics["metric"] == "exact_match"
    assert "no BLEU: sacrebleu is not installed" in capsys.readouterr().err


def test_invalid_input_prints_one_line_and_writes_nothing(
    pairs_folder: Path, run: Path, tmp_path: Path, capsys
) -> None:
    task = tmp_path / "task"
    task.mkdir()
    row = {"idx": 0, "sentence": "a", "label": 1}
    for part in ("train", "dev"):
        (task / f"{part}.jsonl").write_text(json.dumps(row) + "\n")
    bert = tmp_path / "bert"
    bertsmith.save(bertsmith.build(bertsmith.preset("bert-tiny", layers=1, vocabulary=50)), bert)
    good, out = ["--data", str(pairs_folder)], tmp_path / "out"
    cases = {
        "a MODEL with a decoder supports only translation": [
            "finetune",
            "transformer-tiny",
            "--data",
            str(task),
        ],
        "which looks like translation; translation needs a MODEL with a decoder": ["finetune", "bert-tiny", *good],
        "MODEL is 'transformer-tinny', which is neither a bundled model": ["finetune", "transformer-tinny", *good],
        "MODEL is not given": ["finetune", *good],
        "data is not given": ["finetune", "transformer-tiny"],
        "has no column 'fort' for the source": ["finetune", "transformer-tiny", *good, "--source", "fort"],
        "overrides.layers belongs to the weights": ["finetune", str(run), *good, "--set", "model.overrides.layers=3"],
        "generation has moved; write task.generation": [
            "finetune",
            "transformer-tiny",
            *good,
            "--set",
            "generation.beam=2",
        ],
        "source has moved; write task.source": ["finetune", "transformer-tiny", *good, "--set", "source=forth"],
        "the model takes at most 1024": ["finetune", "transformer-tiny", *good, "--set", "sequences.length=2000"],
        'run.compile is "graphs"': ["finetune", "transformer-tiny", *good, "--set", "run.compile=graphs"],
        "so its model was not fine-tuned": ["evaluate", str(bert), *good],
        "has no dev2.jsonl": ["evaluate", str(run), *good, "--split", "dev2"],
        "beam is 0": ["evaluate", str(run), *good, "--beam", "0"],
        "give either --data with a file or --text": ["predict", str(run)],
        "has no field 'forth'": ["predict", str(run), "--data", str(task / "train.jsonl")],
    }
    for message, arguments in cases.items():
        with pytest.raises(SystemExit) as stopped:
            main([*arguments, "--out", str(out)])
        output = capsys.readouterr().err
        assert stopped.value.code == 2, message
        assert message in output
        assert output.count("\n") == 1, output
        assert not out.exists(), message


@pytest.mark.slow
def test_copy_task_is_learned(tmp_path: Path) -> None:
    draw = Random(0)
    lines = sorted({" ".join(draw.choices("abcdefgh", k=draw.randint(2, 5))) for _ in range(1200)})
    draw.shuffle(lines)
    for part, chosen in (("dev", lines[:50]), ("train", lines[50:])):
        rows = [json.dumps({"read": line, "write": line}) + "\n" for line in chosen]
        (tmp_path / f"{part}.jsonl").write_text("".join(rows))
    changes = [
        "model.overrides={width=48,layers=1,heads=4,neurons=96,max_length=16,dropout=0.0}",
        "tokenizer.vocabulary=40",
    ]
    changes += ["tokenizer.kind=wordpiece", "sequences.length=8", "sequences.micro_tokens=768", "batch.tokens=768"]
    changes += ["task.smoothing=0.0", "run.steps=260", "optimizer.learning_rate=4e-3", "schedule.kind=linear"]
    changes += ["run.evaluate_every=1000", "run.checkpoint_every=1000", "task.generation.method=greedy"]
    metrics = bertsmith.finetune("transformer-tiny", data=tmp_path, out=tmp_path / "run", set=changes, device="cpu")
    assert metrics["exact_match"] >= 90
