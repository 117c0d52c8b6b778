"""Next-token losses against a plain loop over prefixes, and the joint objective against its terms."""

import pytest
import torch
from torch import Tensor

import bertsmith
from bertsmith import SequenceLayout
from bertsmith.answers.sequences import IGNORED
from bertsmith.data.batch import TokenBatch
from bertsmith.data.corruption import MaskingConfig, Vocabulary
from bertsmith.models.attach_heads import with_heads
from bertsmith.models.build import rebuild
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.objectives.causal_lm import CausalLM, MaskedAndCausal, next_tokens
from bertsmith.objectives.masked_lm import MaskedLM, MaskedLMConfig

PAD, START, END = 0, 1, 2
SIZE = {"width": 12, "layers": 2, "heads": 2, "vocabulary": 30, "max_length": 16, "init_std": 0.4, "dropout": 0.0}
MODELS = {"bert-tiny": {}, "deberta-v2-xlarge": {"span": 5, "max_distance": 9}, "convbert-small": {"heads": 4}}
TEXTS = [[5, 9, 7], [], [11, 12, 13, 14, 15, 16]]


def make(name: str) -> Model:
    config = with_heads(bertsmith.preset(name, **{**SIZE, **MODELS[name]}), ("masked_tokens",))
    return bertsmith.build(config, seed=4).double().eval()


def sequences() -> list[Tensor]:
    return [torch.tensor([START, *text, END]) for text in TEXTS]


def packed(padding: int = 3) -> TokenBatch:
    lengths = [*map(len, sequences()), padding]
    tokens = torch.cat([*sequences(), torch.full((padding,), PAD)])
    layout = SequenceLayout.packed(torch.tensor([0, *lengths, 0]).cumsum(0).int(), 9)
    return TokenBatch(tokens, layout, torch.arange(5), real_tokens=sum(lengths) - padding)


def padded() -> TokenBatch:
    rows = torch.full((4, 9), PAD)
    for row, sequence in zip(rows, sequences(), strict=False):
        row[: len(sequence)] = sequence
    is_token = torch.arange(9) < torch.tensor([*map(len, sequences()), 0])[:, None]
    return TokenBatch(rows, SequenceLayout.padded(is_token), torch.arange(4), real_tokens=int(is_token.sum()))


def both_ways() -> MaskedLM:
    is_special = torch.arange(30) < 4
    config = MaskedLMConfig(masking=MaskingConfig(rate=0.4))
    return MaskedLM(config, Vocabulary(30, 3, is_special, torch.ones(30, dtype=torch.bool)))


def gradients(model: Model, loss: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found, strict=True)]


def test_targets_by_hand() -> None:
    expected = [5, 9, 7, END, IGNORED, END, IGNORED, 11, 12, 13, 14, 15, 16, END, IGNORED, *[IGNORED] * 3]
    assert next_tokens(packed()).tolist() == expected
    rows = [[5, 9, 7, END], [END], [11, 12, 13, 14, 15, 16, END], []]
    assert next_tokens(padded()).tolist() == [token for row in rows for token in row + [IGNORED] * (9 - len(row))]
    # rows without padding
    full = TokenBatch(torch.arange(6).view(2, 3), SequenceLayout.full(2, 3), torch.arange(2), real_tokens=6)
    assert next_tokens(full).tolist() == [1, 2, IGNORED, 4, 5, IGNORED]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [packed(), packed(padding=0), padded()], ids=["filled", "packed", "padded"])
def test_loss_and_gradients_equal_a_plain_loop(name: str, batch: TokenBatch) -> None:
    """Run every prefix alone through the causal network to predict its next token."""
    model = make(name)
    twin = rebuild(model, model.config.causal())
    expected, hits, count = torch.zeros((), dtype=torch.float64), 0, 0
    for sequence in sequences():
        for length in range(1, len(sequence)):
            prefix, last = sequence[None, :length], torch.tensor([length - 1])
            states = twin.run(
                EncoderInputs(prefix, SequenceLayout.full(1, length)), Want(masked_positions=last)
            ).masked_states
            scores = twin.head("masked_tokens")(states, twin.token_table)[0]
            expected = expected - scores.log_softmax(-1)[sequence[length]]
            hits, count = hits + int(scores.argmax() == sequence[length]), count + 1
    expected_gradients = gradients(twin, expected)
    objective = CausalLM()
    prepared = objective.prepare(batch, 0)
    assert int(objective.counts(prepared)["next_token"]) == count == 12
    # a causal forward pass of the network, and a network with a causal config
    for form in (model, twin):
        sums = objective(form, prepared)["next_token"]
        torch.testing.assert_close(sums.loss, expected, rtol=1e-11, atol=0)
        assert tuple(map(int, sums.metrics["accuracy"])) == (hits, count)
        for found, grad in zip(gradients(form, sums.loss), expected_gradients, strict=True):
            torch.testing.assert_close(found, grad, rtol=1e-9, atol=1e-11)
    assert sum(grad.abs().sum() > 0 for grad in expected_gradients) > 20


@pytest.mark.parametrize("name", MODELS)
def test_joint_loss_is_the_weighted_sum(name: str) -> None:
    model, masked, causal, batch = make(name), both_ways(), CausalLM(), packed()
    joint = MaskedAndCausal(masked, causal, weight=0.3)
    prepared = joint.prepare(batch, 6)
    counts, sums = joint.counts(prepared), joint(model, prepared)
    assert sums.keys() == counts.keys() == joint.terms.keys() == {"masked_tokens", "next_token"}

    def total(sums: dict, counts: dict, weights: dict[str, float]) -> Tensor:
        return sum(weight * sums[term].loss / counts[term] for term, weight in weights.items())

    loss = total(sums, counts, {term: joint.terms[term].weight for term in joint.terms})
    alone = [objective.prepare(batch, 6) for objective in (masked, causal)]
    first = total(masked(model, alone[0]), masked.counts(alone[0]), {"masked_tokens": 1.0})
    second = total(causal(model, alone[1]), causal.counts(alone[1]), {"next_token": 1.0})
    torch.testing.assert_close(loss, first + 0.3 * second, rtol=1e-12, atol=0)
    parts = zip(gradients(model, first), gradients(model, second), strict=True)
    for found, (grad, other) in zip(gradients(model, loss), parts, strict=True):
        torch.testing.assert_close(found, grad + 0.3 * other, rtol=1e-10, atol=1e-12)
    # masked prediction is bidirectional: a later token changes it
    tokens = batch.tokens.clone()
    tokens[13] = 20
    other = TokenBatch(tokens, batch.layout, batch.sample, batch.real_tokens)
    assert not torch.equal(masked(model, masked.prepare(other, 6))["masked_tokens"].loss, sums["masked_tokens"].loss)


def test_evaluation_uses_the_default_masking_rate() -> None:
    joint = MaskedAndCausal(both_ways(), CausalLM(), weight=0.3)
    plain = joint.for_evaluation()
    assert plain.masked.config.masking == MaskingConfig()
    assert plain.terms == joint.terms
    prepared = plain.prepare(packed(), 0)
    assert torch.equal(prepared.causal.tokens, packed().tokens)
