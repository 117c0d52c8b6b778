"""The command line as people type it: listings, vectors, masks, short flags and hints."""

import json
from pathlib import Path

import numpy as np
import pytest

import bertsmith
from bertsmith.cli import main
from bertsmith.data.devices import device_type
from bertsmith.errors import InputError
from bertsmith.models.published import PRESETS
from bertsmith.runs.fit import _progress as fit_progress
from bertsmith.runs.result import print_explanation
from bertsmith.tasks import TASKS
from bertsmith.tasks.data_source import task_splits
from bertsmith.training.pretraining import PretrainSettings


def test_list_prints_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    main(["list"])
    names = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert names >= {"small", *PRESETS, *TASKS}
    main(["list", "tasks"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == sorted(TASKS)


def test_info_describes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", "small"])
    assert "12 layers of width 256" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit):
        main(["info", str(tmp_path / "empty")])
    assert "has no config.json, so it is not a model folder" in capsys.readouterr().err


def test_encode_prints_or_writes_the_vectors_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["a parcel", "a much longer text about\nthe weather", "third"]
    expected = bertsmith.load("small").encode(texts).numpy()
    file, out = tmp_path / "texts.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts), encoding="utf-8")
    main(["encode", "small", "-d", str(file), "--field", "body", "-o", str(out), "--device", "cpu"])
    np.testing.assert_allclose(np.load(out / "vectors.npy"), expected, atol=1e-6)
    capsys.readouterr()
    main(["encode", "small", "-t", texts[0], "--device", "cpu"])
    assert capsys.readouterr().out.startswith(f"{expected[0, 0]:.4g}"[:4])
    main(["encode", "small", "-d", str(file), "--field", "body", "-o", str(out), "-f", "--normalize"])
    np.testing.assert_allclose(np.linalg.norm(np.load(out / "vectors.npy"), axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_encode_writes_a_table_of_texts_and_vectors(tmp_path: Path, kind: str) -> None:
    texts = [f"text number {index} of a table" for index in range(20)]
    file, out = tmp_path / "texts.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    main(["encode", "small", "-d", str(file), "-o", str(out), "--format", kind, "--device", "cpu"])
    table = task_splits(out / f"vectors.{kind}").read("train")
    assert [row["text"] for row in table] == texts
    vectors = np.stack([table.vector(index, "vector") for index in range(len(table))])
    np.testing.assert_allclose(vectors, bertsmith.load("small").encode(texts).numpy(), atol=1e-3)


def test_fill_mask_prints_the_words_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    text = "the capital of france is [MASK]."
    main(["fill-mask", "small", "-t", text, "--top", "2", "--device", "cpu"])
    (first, _), (second, _) = bertsmith.load("small").fill_mask(text, top_k=2)[0]
    words = [part.split()[0] for part in capsys.readouterr().out.split(", ")]
    assert words == [first, second]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["finetune", "small", "--lr", "1"], "unknown option --lr; use --learning-rate"),
        (["pretrain", "bert-tiny", "--lr", "1"], "use --set optimizer.learning_rate=…"),
        (["finetune", "small", "--batch-size", "8"], "use --batch"),
        (["pretrain", "bert-tiny", "--batch-size", "8"], "use --set batch.tokens=…"),
        (["finetune", "small", "--output-dir", "x"], "use --out"),
        (["pretrain", "bert-tiny", "--set", "learning_rate=1"], "did you mean 'optimizer.learning_rate'?"),
        (["pretrain", "bert-tiny", "--set", "batch_size=1"], "did you mean 'batch.tokens'?"),
        (["predict", "x", "--text", "a", "--device", "gpu"], "device is 'gpu'; did you mean 'cuda'?"),
    ],
)
def test_usual_names_are_answered_with_ours(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_devices_in_python_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device_type("mps") == "mps"
    assert device_type("auto") == "cpu"
    with pytest.raises(InputError, match="allowed: auto, cpu, mps"):
        device_type("cuda")
    with pytest.raises(InputError, match="did you mean 'cuda'"):
        device_type("gpu")


def test_explain_names_allowed_values(capsys: pytest.CaptureFixture[str]) -> None:
    print_explanation(PretrainSettings.parse({"model": "bert-tiny"}), {})
    output = capsys.readouterr().out
    assert "allowed: masked_lm, replaced_tokens, causal_lm, masked_and_causal" in output
    assert "allowed: linear, cosine, noam, wsd, constant" in output


def test_help_groups_flags_by_method(capsys: pytest.CaptureFixture[str]) -> None:
    main(["shrink", "--help"])
    output = capsys.readouterr().out
    assert output.index("With --method prune") < output.index("--keep") < output.index("With --method vocabulary")


def test_export_in_python_and_on_the_command_line_share_folders(tmp_path: Path) -> None:
    rows = [("it works", "good"), ("it broke", "bad")] * 4
    network = "model.overrides={width=16,layers=1,heads=2}"
    bertsmith.finetune("bert-tiny", train=rows, dev=rows, out=tmp_path / "run", set=["run.epochs=1.0", network])
    bertsmith.export(tmp_path / "run", tmp_path / "hf")
    assert (tmp_path / "hf" / "task.json").is_file()
    main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "hf"), "-f"])


def test_corpus_of_one_document_holds_nothing_out_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text("A single document.\n")
    main(
        ["corpus", str(tmp_path / "one.txt"), "--tokenizer", "small", "-o", str(tmp_path / "corpus"), "--workers", "1"]
    )
    output = capsys.readouterr().out
    assert "in 1 sentence of 1 document" in output
    assert "nothing is held out" in output


def test_vocabulary_beyond_memory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("some words\n")
    with pytest.raises(SystemExit):
        main(["tokenizer", str(tmp_path / "text.txt"), "--vocabulary", "999999999", "-o", str(tmp_path / "out")])
    assert "vocabulary is 999999999; allowed: 1 to 2,000,000" in capsys.readouterr().err


def test_folder_with_a_bundled_name_is_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text("{}")
    main(["info", "small"])
    assert "'small' is the bundled model; the folder of that name is './small'" in capsys.readouterr().err


def test_json_arrays_are_data(tmp_path: Path) -> None:
    rows = [{"text": "it works", "label": "good"}, {"text": "it broke", "label": "bad"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert task_splits(tmp_path / "rows.json").read("train").rows == rows
    (tmp_path / "rows.json").write_text("[1]")
    with pytest.raises(InputError, match="row 1 is 1; allowed: an object with named columns"):
        task_splits(tmp_path / "rows.json").read("train")


def test_fit_prints_its_stages_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with fit_progress() as watch:
        for done in range(3):
            watch("scores of sub-networks", done, 3)
        watch("evolutionary search", 0, 9)
    assert capsys.readouterr().err.splitlines() == ["fit: scores of sub-networks 0/3", "fit: evolutionary search 0/9"]
