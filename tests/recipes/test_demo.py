"""Both variants of the demo, with a few messages and fake latencies, to save time."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import bertsmith
from bertsmith.cli import main
from bertsmith.engines import onnx_engine
from bertsmith.engines.artefact import read_artefact
from bertsmith.errors import InputError
from bertsmith.models.generator import attach, generator_of
from bertsmith.runs import demo as demo_run
from bertsmith.runs.demo_look import find_neighbours
from bertsmith.shrinking.fit import measure
from bertsmith.text import support_desk
from bertsmith.text.learn import learn_tokenizer

SHARED = ("look", "baseline", "finetune", "shrink", "fit")
LATENCIES = {"torch": 1.0, "onnxruntime": 0.25}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # keeps fake latencies out of the user's cache

    def timed(folders: Sequence[Path], conditions: measure.Conditions, runs: int, seconds: float) -> measure.Timing:
        latencies = []
        for folder in folders:
            latency = LATENCIES[read_artefact(folder).engine]
            found = {"p50": latency, "p95": latency, "mean": latency, "runs": runs}
            latencies.append({load.name: found for load in conditions.workloads})
        return measure.Timing(latencies, 100.0, 10.0)

    few = {part: support_desk.support_desk(part)[:96] for part in ("train", "dev")}
    monkeypatch.setattr(support_desk, "support_desk", lambda part: few[part])
    monkeypatch.setattr(measure, "in_fresh_process", timed)


@pytest.fixture
def bundled(tmp_path: Path) -> Path:
    """A tiny model with the heads of the bundled one: it detects replaced tokens, and its generator fills masks."""
    texts = [row["text"] for row in support_desk.support_desk("train")[:200]]
    tokenizer = learn_tokenizer(texts, "wordpiece", 600, lowercase=True, progress=False)
    sizes = {
        "layers": 2,
        "width": 32,
        "heads": 4,
        "embedding_width": 16,
        "max_length": 64,
        "vocabulary": tokenizer.size,
    }
    config = bertsmith.preset("electra-small", **sizes)
    generator = bertsmith.build(generator_of(config, width=0.5, depth=0.5), seed=1)
    model = attach(bertsmith.build(config, seed=0), generator, "full").eval()
    model.tokenizer = tokenizer
    bertsmith.save(model, tmp_path / "bundled")
    return tmp_path / "bundled"


def test_demo_with_the_bundled_model(
    bundled: Path, tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    main(["demo", "--out", str(out), "--model", str(bundled), "--epochs", "1"])
    result = json.loads((out / "result.json").read_text())
    assert result["model"] == str(bundled)
    assert "pretrain" not in result
    assert result["fit"]["fits"]
    assert len(result["shrink"]["grid"]) == 6
    looked = result["look"]
    assert [one["text"] for one in looked["filled"]] == list(demo_run.FROM_BUNDLED.masks)
    assert looked["model"]["layers"] == 2
    assert looked["model"]["generator_parameters"] > 0
    page = (out / "report.html").read_text()
    assert all(f"<b>{name}</b>" in page for name in SHARED)
    assert page.count("report.html") == 3
    assert looked["near"][0]["near"][0]["label"] in page
    assert 'class="panel sizes"' in page
    # the fitted model, in the engine that is four times as fast, beside the fine-tuned one and the baseline
    chosen = result["fit"]["chosen"]
    assert chosen["engine"] == "onnxruntime"
    assert "4.0\u00a0× faster" in page
    for score in (result["baseline"], result["finetune"]["score"], chosen["score"]):
        assert f'<td class="number">{score:.1f}</td>' in page
    assert "1.00 ms" in page
    assert "0.25 ms" in page
    assert bertsmith.Predictor.load(out / "fitted").predict(["where is my parcel"])
    message = capsys.readouterr().out
    assert "4.0\u00a0× faster" in message
    assert f"bertsmith serve {out}/fitted" in message
    assert "bertsmith demo --from-scratch" in message


@pytest.mark.slow  # all steps of the other variant, and pre-training
def test_demo_from_scratch(tmp_path: Path, quick: None) -> None:
    out = tmp_path / "demo"
    main(["demo", "--from-scratch", "--out", str(out), "--steps", "3", "--epochs", "1"])
    result = json.loads((out / "result.json").read_text())
    assert result["pretrain"]["steps"] == 3
    assert result["fit"]["fits"]
    assert len(result["shrink"]["grid"]) == 6
    page = (out / "report.html").read_text()
    assert all(f"<b>{name}</b>" in page for name in ("pretrain", *SHARED))
    assert page.count("report.html") == 4
    assert bertsmith.Predictor.load(out / "fitted").predict(["where is my parcel"])


def test_neighbours_are_nearest_by_embedding(bundled: Path) -> None:
    """A training message is its own nearest neighbour and gets its own label."""
    model = bertsmith.load(bundled)
    known = support_desk.support_desk("train")[:20]
    near, alike = find_neighbours(model, [known[3]["text"]], known, known)
    assert alike == 100
    first, second, *_ = near[0].near
    assert (first.text, first.label) == (known[3]["text"], known[3]["label"])
    assert first.similarity == pytest.approx(1, abs=1e-3)
    assert second.similarity < 1
    wrong = [{**row, "label": "none of these"} for row in known]
    assert find_neighbours(model, ["where is it"], known, wrong)[1] == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "nonsense"}, "'nonsense'"),
        ({"model": "small", "from_scratch": True}, "--model is 'small', but --from-scratch trains its own model"),
        ({"steps": 3}, "--steps is 3, but nothing is pre-trained"),
    ],
)
def test_invalid_input_raises_and_writes_nothing(given: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        demo_run.demo(out=tmp_path / "demo", **given)  # type: ignore[arg-type]
    assert not (tmp_path / "demo").exists()


def test_missing_packages_are_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(onnx_engine, "find_spec", lambda name: None)
    needs = "onnxruntime needs onnxruntime and onnx and onnxscript: pip install 'bertsmith\\[onnx\\]'"
    with pytest.raises(InputError, match=needs):
        demo_run.demo(out=tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("options", [["--from-scratch"], ["--model", "bundled"]])
def test_existing_output_is_not_overwritten(
    options: list[str], bundled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    arguments = [str(bundled) if word == "bundled" else word for word in options]
    with pytest.raises(SystemExit):
        main(["demo", "--out", str(tmp_path / "mine"), *arguments])
    assert "is not empty" in capsys.readouterr().err
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"
