"""`bertsmith inspect`: one text, many texts, two models, invalid input."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import bertsmith
from bertsmith.cli import main
from bertsmith.models.encoder import Encoder, EncoderInputs, EncoderOutput, Want
from bertsmith.text.tokenizer import Tokenizer

TEXT = "The smith forges an iron gate."


@pytest.fixture(scope="module")
def models(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two model folders whose layers differ."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = Tokenizer.load(corpus_folder)
    for name, layers in (("small", 2), ("large", 3)):
        config = bertsmith.preset(
            "bert-tiny", vocabulary=tokenizer.size, width=16, heads=2, max_length=32, layers=layers
        )
        model = bertsmith.build(config, seed=0)
        model.tokenizer = tokenizer
        bertsmith.save(model, folder / name)
    return [str(folder / "small"), str(folder / "large")]


@pytest.fixture
def convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every model convolutions in its first layer, and other numbers of attention heads in the others."""
    run = Encoder.run

    def run_with_convolutions(self: Encoder, inputs: EncoderInputs, want: Want) -> EncoderOutput:
        output, (batch, length) = run(self, inputs, want), inputs.tokens.shape
        band = (torch.ones(length, length).tril(1).triu(-1) / 3).expand(batch, 3, length, length)
        scores = {"position_to_content": torch.randn(batch, 2, length, length)}
        others = [{**other, "convolution": band[:, :1], **scores} for other in output.maps[1:]]
        return replace(output, maps=({"convolution": band}, *others))

    monkeypatch.setattr(Encoder, "run", run_with_convolutions)


@pytest.fixture
def lines(tmp_path: Path) -> str:
    path = tmp_path / "lines.txt"
    path.write_text("the smith forges an iron gate\na traveller carries the letter\n\nthe old clerk\n")
    return str(path)


def test_inspect_one_text(models: list[str], tmp_path: Path) -> None:
    main(["inspect", models[0], "--text", TEXT, "--out", str(tmp_path / "out")])
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["layers"], result["heads"]) == (2, 2)
    assert list(result["maps"]) == ["attention"]
    assert result["metrics"] == result["maps"]["attention"]["metrics"]
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {*result["files"]}


def test_every_map_has_a_picture(models: list[str], convolutions: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    metrics = bertsmith.inspect(models[0], text=TEXT, out=tmp_path / "out")
    assert metrics["maps"]["attention"]["heads"] == [0, 2]
    assert metrics["maps"]["convolution"]["heads"] == [3, 1]
    pictures = {"attention.png", "convolution.png", "position_to_content.png"}
    assert {path.name for path in (tmp_path / "out").iterdir()} >= pictures
    assert "signed scores" in (tmp_path / "out" / "attention.html").read_text()


def test_two_models_on_many_texts(models: list[str], convolutions: None, lines: str, tmp_path: Path) -> None:
    main(["inspect", *models, "--texts", lines, "--length", "16", "--out", str(tmp_path / "out")])
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["texts"], result["length"]) == (3, 16)  # every line is a text
    assert list(result["models"]) == ["small", "large"]
    large = result["models"]["large"]
    assert large["layers"] == 3
    assert large["maps"]["convolution"]["kernels"]["by_layer"]["1"][2] == pytest.approx([1 / 3] * 3, abs=1e-6)
    assert sum(large["maps"]["attention"]["mass_by_distance"]) == pytest.approx(1, abs=1e-5)
    with np.load(tmp_path / "out" / "maps.npz") as maps:
        assert maps["large/attention"].shape == (3, 16, 16)  # all layers, and the two that have attention
    page = (tmp_path / "out" / "study.html").read_text()
    assert f"{100 * large['maps']['attention']['near']:.1f} %" in page
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {*result["files"]}


def test_rows_of_other_files_are_texts(models: list[str], tmp_path: Path) -> None:
    rows = [{"body": f"the smith\nforges {index}"} for index in range(5)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = bertsmith.inspect(
        models[0], texts=path, field="body", sentences=4, length=32, out=tmp_path / "out", without_special=True
    )
    assert metrics["texts"] == metrics["models"]["small"]["texts"] == 4
    assert metrics["models"]["small"]["maps"]["attention"]["mass"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["SMALL"], "neither --text nor --texts is given"),
        (["SMALL", "--text", "a", "--texts", "LINES"], "--text and --texts are both given"),
        (["SMALL", "LARGE", "--text", "a"], "--text needs exactly one model, not 2"),
        (["SMALL", "--text", "a", "--length", "8"], "--length is only allowed with --texts"),
        (["SMALL", "--text", "a", "--without-special"], "--without-special is only allowed with --texts"),
        (["SMALL", "--texts", "LINES", "--pair", "b"], "--pair is only allowed with --text"),
        (["SMALL", "--texts", "LINES"], "--length is 64; allowed: 3 to 32"),
        (["SMALL", "--texts", "LINES", "--sentences", "0"], "--sentences is 0; allowed: 1 or more"),
        (["SMALL", "SMALL", "--texts", "LINES", "--length", "8"], "is given twice"),
        (["SMALL", "--texts", "EMPTY"], "has no text"),
        (["SMALL", "--texts", "nowhere.txt"], "'nowhere.txt' does not exist"),
        (["SMALL", "--texts", "."], "is a folder; give a file"),
        (["nowhere", "--texts", "LINES"], "model folder 'nowhere' does not exist"),
    ],
)
def test_invalid_input_prints_one_line(
    arguments: list[str],
    message: str,
    models: list[str],
    lines: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n \n")
    names = {"SMALL": models[0], "LARGE": models[1], "LINES": lines, "EMPTY": "empty.txt"}
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *(names.get(word, word) for word in arguments), "--out", "out"])
    assert ended.value.code == 2
    output = capsys.readouterr().err
    assert message in output
    assert len(output.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_used_output_folder_raises_before_computing(
    models: list[str], lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    monkeypatch.setattr(Encoder, "run", None)
    with pytest.raises(bertsmith.InputError, match="is not empty"):
        bertsmith.inspect(models[0], texts=lines, length=8, out=tmp_path / "out")
