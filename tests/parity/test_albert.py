"""ALBERT against `transformers`, in float64, on tiny random models: states, losses, gradients, weights."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AlbertConfig, AlbertForMaskedLM, AlbertModel, PreTrainedModel

import bertsmith
from bertsmith import SequenceLayout, Subnet
from bertsmith.batches.corruption import IGNORED, Corrupted, Vocabulary
from bertsmith.checkpoint.hf import TWINS
from bertsmith.checkpoint.names import to_theirs
from bertsmith.errors import InputError
from bertsmith.models.model import Model
from bertsmith.objectives.masked_lm import MaskedBatch, MaskedLM, MaskedLMConfig

TINY = {
    "vocab_size": 67,
    "embedding_size": 12,
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
    model = kind(AlbertConfig(**{**TINY, **changes})).double().eval()
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


@pytest.mark.parametrize(("lengths", "length"), SHAPES)
@pytest.mark.parametrize("changes", [{}, {"hidden_act": "gelu", "layer_norm_eps": 1e-5}, {"num_hidden_layers": 1}])
def test_states(changes: dict, lengths: list[int], length: int, tmp_path: Path) -> None:
    theirs = make(AlbertModel, 0, **changes)
    model = ours(theirs, tmp_path)
    ids, mask, types = batch(lengths, length)
    expected = theirs(input_ids=ids, attention_mask=mask, token_type_ids=types, output_hidden_states=True)
    real = mask.bool()
    states = model(ids, mask, types)
    torch.testing.assert_close(states[real], expected.last_hidden_state[real], rtol=0, atol=1e-10)
    layers = model.encoder.layer_states(ids, SequenceLayout.padded(real), types)
    for mine, reference in zip(layers, expected.hidden_states, strict=True):
        torch.testing.assert_close(mine[real], reference[real], rtol=0, atol=1e-10)
    pooled = model.head("pooler")(states[:, 0])
    torch.testing.assert_close(pooled, expected.pooler_output, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("lengths", "length"), SHAPES)
def test_loss_and_every_gradient(lengths: list[int], length: int, tmp_path: Path) -> None:
    theirs = make(AlbertForMaskedLM, 1)
    model = ours(theirs, tmp_path)
    ids, mask, types = batch(lengths, length)
    chosen = (torch.rand(ids.shape) < 0.4) & mask.bool()
    chosen[:, 0] = True
    labels = torch.where(chosen, torch.randint(0, 67, ids.shape), IGNORED)
    places = chosen.flatten().nonzero().squeeze(-1)
    table = torch.zeros(67, dtype=torch.bool)
    objective = MaskedLM(MaskedLMConfig(), Vocabulary(67, 3, table, ~table))
    corrupted = Corrupted(ids, places, labels.flatten()[places])
    prepared = MaskedBatch(corrupted, SequenceLayout.padded(mask.bool()), types, None)
    expected = theirs(input_ids=ids, attention_mask=mask, token_type_ids=types, labels=labels).loss
    loss = objective(model, prepared)["masked_tokens"].loss / chosen.sum()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    expected.backward()
    loss.backward()

    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    mine = to_theirs(TWINS["albert"].rows(model.config, frozenset({"heads.masked_tokens"})), gradients)
    reference = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert reference.keys() <= mine.keys() | TWINS["albert"].tied.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, reference[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", [AlbertModel, AlbertForMaskedLM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_there_and_back(kind: type, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = make(kind, 2).to(dtype)
    model = ours(theirs, tmp_path / "theirs")
    bertsmith.save(model, tmp_path / "ours")
    bertsmith.export(bertsmith.load(tmp_path / "ours"), tmp_path / "back")
    back = kind.from_pretrained(tmp_path / "back", dtype=dtype)
    assert back.config.architectures == [kind.__name__]
    state = back.state_dict()
    assert state.keys() == theirs.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in theirs.state_dict().items())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_groups": 3}, "num_hidden_groups is 3; allowed: 1, because all layers share one group"),
        ({"inner_group_num": 2}, "inner_group_num is 2; allowed: 1, because a group is one layer"),
        ({"embedding_size": 24}, "embedding_size is 24, as hidden_size; allowed: another"),
    ],
)
def test_what_has_no_place_here_is_refused(change: dict, reason: str, tmp_path: Path) -> None:
    make(AlbertModel, 3).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=reason):
        bertsmith.load(tmp_path)


def test_what_has_no_place_there_is_refused(tmp_path: Path) -> None:
    model = ours(make(AlbertModel, 4), tmp_path / "theirs")
    uneven = bertsmith.extract(model, Subnet(heads=(4, 4, 2)))
    with pytest.raises(InputError, match=r"encoder\.layers\.2\.mixer\.heads is 2 and would be read back as 4"):
        bertsmith.export(uneven, tmp_path / "uneven")
    shared = bertsmith.preset("bert-tiny", vocabulary=67)
    encoder = shared.encoder.model_copy(update={"sharing": "mixer"})
    with pytest.raises(InputError, match=r"encoder\.sharing is 'mixer' and would be read back as 'none'"):
        bertsmith.export(bertsmith.build(shared.model_copy(update={"encoder": encoder})), tmp_path / "shared")
    fewer = bertsmith.extract(model, Subnet(depth=0.67))
    bertsmith.export(fewer, tmp_path / "fewer")
    assert AlbertModel.from_pretrained(tmp_path / "fewer").config.num_hidden_layers == 2
