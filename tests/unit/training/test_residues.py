"""Residue accuracy and perplexity: amino acids only, both directions, cropped and joined."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import bertsmith
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.residues import predict_residues

ALPHABET = "ACDEFGHIKLMNPQRSTVWYBOUXZ"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn_tokenizer([], "characters", 100, alphabet=ALPHABET, progress=False)


def config(**changes: object) -> ModelConfig:
    size = {"layers": 1, "width": 32, "heads": 2, "neurons": 64, "features": 16, "max_length": 128, **changes}
    return bertsmith.preset("performer-protein-small", **size)


def model_of(tokenizer: Tokenizer, found: ModelConfig) -> Model:
    model = bertsmith.build(found, seed=0).double()
    model.tokenizer = tokenizer
    return model


def some_proteins(count: int = 12) -> list[str]:
    draw = np.random.default_rng(3)
    return ["M" + "".join(draw.choice(list(ALPHABET[:20]), size=draw.integers(20, 90))) for _ in range(count)]


def rows_of(tokenizer: Tokenizer, proteins: list[str]) -> list[np.ndarray]:
    return [np.array(row) for row in tokenizer.encode_plain(proteins)]


def make_uniform(model: Model) -> Model:
    with torch.no_grad():
        model.encoder.embedding.token_table.zero_()
        for parameter in model.head("masked_tokens").parameters():
            parameter.zero_()
    return model


@pytest.mark.parametrize("joined", [False, True])
def test_causal_model_predicts_every_residue_and_no_special_token(tokenizer: Tokenizer, joined: bool) -> None:
    proteins = some_proteins()
    model = model_of(tokenizer, config().causal())
    found = predict_residues(model, rows_of(tokenizer, proteins), length=128, joined=joined)
    residues = sum(map(len, proteins))
    if joined:
        assert residues - 8 < found.scores.residues <= residues
    else:
        assert found.scores.residues == residues
        assert found.follows_special.sum() == len(proteins)
        assert found.scores_without_first.residues == residues - len(proteins)
    assert sum(scores.residues for scores in found.by_position(128)) == found.scores.residues


@pytest.mark.parametrize("is_causal", [True, False])
def test_uniform_model_has_the_perplexity_of_the_vocabulary(tokenizer: Tokenizer, is_causal: bool) -> None:
    network = config().causal() if is_causal else config()
    model = make_uniform(model_of(tokenizer, network))
    found = predict_residues(model, rows_of(tokenizer, some_proteins()), length=64)
    assert found.scores.perplexity == pytest.approx(30, rel=1e-12)
    assert found.scores_without_first.perplexity == pytest.approx(30, rel=1e-12)


def test_model_with_one_answer_has_its_frequency_as_accuracy(tokenizer: Tokenizer) -> None:
    model = make_uniform(model_of(tokenizer, config().causal()))
    with torch.no_grad():
        model.head("masked_tokens").bias[tokenizer.vocabulary["M"]] = 5.0
    proteins = some_proteins()
    found = predict_residues(model, rows_of(tokenizer, proteins), length=128)
    count, total = sum(protein.count("M") for protein in proteins), sum(map(len, proteins))
    assert found.scores.accuracy == pytest.approx(count / total)
    # every protein begins with M, so most of the hits are first residues
    assert found.scores_without_first.accuracy == pytest.approx((count - len(proteins)) / (total - len(proteins)))
    nats = math.log(math.exp(5) + 29) - 5 * count / total
    assert found.scores.perplexity == pytest.approx(math.exp(nats))


def test_masked_model_predicts_fifteen_percent(tokenizer: Tokenizer) -> None:
    proteins = some_proteins()
    found = predict_residues(model_of(tokenizer, config()), rows_of(tokenizer, proteins), length=128)
    assert found.scores.residues == pytest.approx(0.15 * sum(map(len, proteins)), rel=0.1)
    again = predict_residues(model_of(tokenizer, config()), rows_of(tokenizer, proteins), length=128)
    assert found.scores == again.scores


def test_proteins_are_cropped_to_the_length(tokenizer: Tokenizer) -> None:
    proteins = some_proteins()
    model = model_of(tokenizer, config().causal())
    found = predict_residues(model, rows_of(tokenizer, proteins), length=32)
    assert found.scores.residues == sum(min(len(protein), 30) for protein in proteins)
    with pytest.raises(InputError, match="length is 129; allowed: 16 to 128"):
        predict_residues(model, rows_of(tokenizer, proteins), length=129)


@pytest.mark.parametrize("is_causal", [True, False])
def test_command_writes_scores_by_position(tokenizer: Tokenizer, tmp_path: Path, is_causal: bool) -> None:
    network = config().causal() if is_causal else config()
    bertsmith.save(model_of(tokenizer, network).float(), tmp_path / "model")
    data = tmp_path / "proteins"
    data.mkdir()
    lines = (json.dumps({"id": "p", "sequence": protein}) for protein in some_proteins())
    (data / "test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    call = {"data": data, "split": "test", "metric": "residues", "device": "cpu"}
    result = bertsmith.evaluate(tmp_path / "model", out=tmp_path / "out", length=64, joined=True, **call)
    assert result.direction == ("causal" if is_causal else "masked")
    assert (result.proteins, result.unknown_letters, result.cut, result.length) == (12, 0, "joined", 64)
    written = json.loads((tmp_path / "out" / "result.json").read_text())
    assert written["residue_perplexity"] == result.score
    assert written["residue_accuracy"] == result.residue_accuracy
    assert sum(row["residues"] for row in written["by_position"]) == result.residues
    with pytest.raises(InputError, match="--stride is given with --metric residues"):
        bertsmith.evaluate(tmp_path / "model", out=tmp_path / "other", stride=3, **call)


def test_presets_have_the_published_sizes() -> None:
    sizes = {"performer-protein-small": (6, 2048), "performer-protein-deep": (36, 1024)}
    for name, (layers, neurons) in sizes.items():
        encoder = bertsmith.preset(name).encoder
        assert (len(encoder.layers), encoder.width, encoder.vocabulary) == (layers, 512, 30)
        assert {(layer.mixer.heads, layer.feedforward.neurons) for layer in encoder.layers} == {(8, neurons)}
        assert {layer.mixer.feature_map for layer in encoder.layers} == {"relu"}
        assert encoder.embedding.max_length == 8192
