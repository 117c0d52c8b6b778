"""`bertsmith convert`: conversion, recovery training, results and refusals."""

import json
from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith.cli import main
from bertsmith.errors import InputError
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.runs.convert import ConvertResult, convert_model

SMALL = ["sequences.length=32", "sequences.micro_tokens=256", "batch.tokens=512", "run.evaluate_batches=2"]
SMALL += ["run.checkpoint_every=2", "run.evaluate_every=2", "run.log_every=1"]


def saved_model(corpus: Path, folder: Path, name: str = "bert-tiny", **overrides: object) -> Path:
    """Save a tiny model with the tokenizer of a corpus."""
    tokenizer = bertsmith.Tokenizer.load(corpus)
    sizes = {"width": 16, "layers": 2, "heads": 2, "max_length": 32, "vocabulary": tokenizer.size, "init_std": 0.2}
    model = bertsmith.build(bertsmith.preset(name, **{**sizes, **overrides}), seed=0)
    model.tokenizer = tokenizer
    bertsmith.save(model, folder)
    return folder


def test_conversion_keeps_the_weights_and_reports_the_difference(
    corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = saved_model(corpus_folder, tmp_path / "bert"), tmp_path / "performer"
    main(["convert", str(folder), "--to", "favor", "--out", str(out), "--features", "64", "--device", "cpu"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "converted all 2 layers to favor; hidden states differ by" in printed
    content = json.loads((out / "result.json").read_text())
    assert content["family"] == "performer"
    assert content["layers"] == [1, 2]
    assert "recovery" not in content
    original, converted = bertsmith.load(folder), bertsmith.load(out)
    assert [layer.mixer.features for layer in converted.config.encoder.layers] == [64, 64]
    assert all(torch.equal(weight, converted.state_dict()[name]) for name, weight in original.state_dict().items())
    assert converted.tokenizer is not None
    tokens = torch.randint(0, 50, (2, 9))
    moved = (converted(tokens) - original(tokens)).norm() / original(tokens).norm()
    assert 0.1 * moved < content["difference"] < 10 * moved
    back = convert_model(out, to="full", out=tmp_path / "back", device="cpu")
    assert isinstance(back, ConvertResult)
    assert bertsmith.load(tmp_path / "back").config == original.config


def test_more_features_are_closer(corpus_folder: Path, tmp_path: Path) -> None:
    folder = saved_model(corpus_folder, tmp_path / "bert")
    few, many = (
        convert_model(folder, out=tmp_path / str(features), features=features, device="cpu")["difference"]
        for features in (8, 2048)
    )
    assert many < 0.3 * few


def test_some_layers_and_another_kernel(corpus_folder: Path, tmp_path: Path) -> None:
    folder = saved_model(corpus_folder, tmp_path / "bert")
    result = convert_model(
        folder, out=tmp_path / "hybrid", layers=[2], feature_map="relu", redraw_every=0, device="cpu"
    )
    assert result["layers"] == [2]
    first, second = bertsmith.load(tmp_path / "hybrid").config.encoder.layers
    assert (first.mixer.kind, second.mixer.kind) == ("full", "favor")
    assert (second.mixer.feature_map, second.mixer.redraw_every) == ("relu", 0)
    for layers in ([0], [3], []):
        with pytest.raises(InputError, match=r"layers is .*; allowed: some of 1 to 2"):
            bertsmith.convert(bertsmith.load(folder), "favor", layers=layers)
    shared = bertsmith.build(bertsmith.preset("albert-base", width=16, layers=2, heads=2, embedding_width=8))
    with pytest.raises(InputError, match="all layers share one mixer; leave it out"):
        bertsmith.convert(shared, "favor", layers=[1])


def test_recovery_training_continues_from_the_converted_weights(corpus_folder: Path, tmp_path: Path) -> None:
    folder, out = saved_model(corpus_folder, tmp_path / "bert"), tmp_path / "performer"
    result = convert_model(folder, out=out, features=32, data=corpus_folder, steps=4, set=SMALL, device="cpu")
    assert isinstance(result, ConvertResult)
    assert result.recovery is not None
    assert result.recovery.training.steps == 4
    assert "of " + str(corpus_folder) in result.compared_on
    start, trained = bertsmith.load(out / "converted"), bertsmith.load(out)
    assert start.config.family == trained.config.family == "performer"
    moved = trained.encoder.embedding.token_table - start.encoder.embedding.token_table
    assert 0 < moved.abs().max() < 0.1  # it began from the converted weights
    assert "masked_tokens" in trained.heads
    content = json.loads((out / "result.json").read_text())
    assert content["recovery"]["steps"] == 4
    assert (out / "recovery" / "report.html").is_file()
    assert not (out / "recovery" / "model.safetensors").exists()


def test_refusals_write_nothing(corpus_folder: Path, tmp_path: Path) -> None:
    folder, out = saved_model(corpus_folder, tmp_path / "bert"), tmp_path / "out"
    cases = [
        ({"data": corpus_folder}, "--data and --steps must be given together"),
        ({"set": ["run.seed=1"]}, "is a setting of the training; give --data and --steps"),
        ({"to": "full"}, "convert to 'full': this model has no attention to convert"),
        ({"to": "full", "features": 8}, "features is not a setting of the conversion to 'full'"),
        ({"features": 0}, "features is 0 and feature_map 'softmax' needs a random matrix"),
    ]
    for options, message in cases:
        with pytest.raises(InputError, match=message):
            convert_model(folder, out=out, device="cpu", **options)
    model = bertsmith.load(folder)
    model.config = model.config.changed(heads=(ClassifierConfig(labels=("a", "b")),))
    tuned = bertsmith.build(model.config, seed=0)
    tuned.tokenizer = model.tokenizer
    bertsmith.save(tuned, tmp_path / "tuned")
    with pytest.raises(InputError, match=r"the model was fine-tuned .*convert the pre-trained model and fine-tune"):
        convert_model(tmp_path / "tuned", out=out, data=corpus_folder, steps=2, device="cpu")
    with pytest.raises(InputError, match="neither a bundled model nor the folder of a model"):
        convert_model(tmp_path / "missing", out=out, device="cpu")
    assert not out.exists()


def test_task_record_of_a_finetuned_model_is_kept(tmp_path: Path) -> None:
    rows = [{"text": f"the {word} day", "label": label} for word, label in [("fine", "good"), ("sad", "bad")] * 20]
    small = ["model.overrides={width=16,layers=1,heads=2,max_length=32}", "tokenizer.vocabulary=300"]
    small += ["sequences.length=16", "batch.examples=16", "run.epochs=1"]
    bertsmith.finetune("bert-tiny", train=rows, dev=rows, out=tmp_path / "run", set=small, device="cpu")
    convert_model(tmp_path / "run", out=tmp_path / "performer", features=16, device="cpu")
    assert len(bertsmith.Predictor.load(tmp_path / "performer").predict(["the fine day"])) == 1
