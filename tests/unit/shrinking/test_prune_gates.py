"""Trained gates: formulas against closed forms and samples, and folding them into the weights."""

import math
from itertools import pairwise

import pytest
import torch

import bertsmith
from bertsmith.data.examples import TaskBatch
from bertsmith.data.layout import SequenceLayout
from bertsmith.layers.linear import ElasticLinear
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads.gates import deterministic_gate, open_probability, sample_gate
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.models.model import Model
from bertsmith.objectives.gating import Gating, unit_gates
from bertsmith.objectives.supervised import Classes
from bertsmith.shrinking.prune_selection import magnitude
from bertsmith.shrinking.pruned_units import KeptUnits, cut_gated, with_folded_gates, with_gates, without_gates

LOCATIONS = torch.tensor([-3.0, -0.7, 0.0, 0.4, 2.5], dtype=torch.float64)
EVENLY = ((torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000)[
    :, None
]  # quantiles of the uniform distribution


def tiny(preset: str = "bert-tiny", **more: int) -> Model:
    sizes = {"width": 16, "layers": 2, "heads": 4, "vocabulary": 50, "max_length": 16, "dropout": 0.0, "init_std": 0.3}
    model = bertsmith.build(bertsmith.preset(preset, **sizes, **more), seed=0)
    return with_task_head(model, ClassifierConfig(labels=("a", "b"), dropout=0.0), seed=0).eval()


def batch() -> TaskBatch:
    tokens, layout = torch.randint(0, 50, (3, 6)), SequenceLayout.full(3, 6)
    return TaskBatch(tokens, layout, None, torch.arange(3), {"label": torch.tensor([0, 1, 1])}, 18)


def test_probability_of_an_open_gate() -> None:
    drawn = sample_gate(LOCATIONS, EVENLY)
    torch.testing.assert_close(open_probability(LOCATIONS), (drawn > 0).double().mean(0), rtol=0, atol=2e-5)
    # P(gate > 0) = 1 - P(s <= 1 / 12) by the distribution of s: sigmoid(log s/(1 - s) β - a) is P(s <= …)
    closing = torch.sigmoid(2 / 3 * math.log((1 / 12) / (11 / 12)) - LOCATIONS)
    torch.testing.assert_close(open_probability(LOCATIONS), 1 - closing, rtol=0, atol=1e-12)


def test_the_mean_of_a_gate() -> None:
    """E[gate] is the integral of P(gate > z) over z from 0 to 1, and P(s > x) has a closed form."""
    z = ((torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000)[:, None]
    x = (z + 0.1) / 1.2
    above = torch.sigmoid(LOCATIONS - 2 / 3 * torch.logit(x))
    torch.testing.assert_close(sample_gate(LOCATIONS, EVENLY).mean(0), above.mean(0), rtol=0, atol=2e-5)


def test_deterministic_gates_reach_0_and_1() -> None:
    ends = torch.tensor([-2.5, -2.3, 0.0, 2.3, 2.5])
    found = deterministic_gate(ends)
    assert found[0] == 0
    assert found[-1] == 1
    assert 0 < found[1] < found[2] < found[3] < 1
    assert found[2] == pytest.approx(0.5)


def test_size_loss_penalises_open_gates_above_the_target_share() -> None:
    model = with_gates(tiny())
    gates, objective = unit_gates(model), Gating(Classes(), heads=0.5, neurons=0.25, strength=2.0)
    sums = objective(model, batch())
    opened = float(torch.sigmoid(torch.tensor(2.5 - 2 / 3 * math.log(0.1 / 1.1))))
    expected = 2.0 * (8 * (opened - 0.5) ** 2 + 128 * (opened - 0.25) ** 2)
    assert float(sums["size"].loss.detach()) == pytest.approx(expected, rel=1e-5)
    sums["size"].loss.backward()
    assert all((location.grad > 0).all() for location in (*gates.heads, *gates.neurons))  # descent closes them


def test_all_weights_are_trained_and_gates_have_their_own_learning_rate() -> None:
    model = with_gates(tiny())
    objective = Gating(Classes(), heads=0.5, neurons=0.5, rate=7.0)
    first, second = objective.portions(model)
    gates = {id(parameter) for parameter in unit_gates(model).parameters()}
    assert {id(parameter) for parameter in second.parameters} == gates
    assert [group.rate for group in second.groups] == [7.0]
    assert len(first.parameters) + len(second.parameters) == len(list(model.parameters()))
    sum(sums.loss for sums in objective(model, batch()).values()).backward()
    unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert [name for name in unused if "pooler" not in name and "type_table" not in name] == []


def test_shared_layers_share_their_gates() -> None:
    model = with_gates(tiny("albert-base", embedding_width=8))
    gates = unit_gates(model)
    assert [len(gates.heads), len(gates.neurons)] == [1, 1]
    assert all(one.heads is other.heads for one, other in pairwise(gates.sample()))
    objective = Gating(Classes(), heads=0.5, neurons=0.5)
    objective(model, batch())["task"].loss.backward()
    assert gates.heads[0].grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("preset", "more"), [("bert-tiny", {}), ("albert-base", {"embedding_width": 8}), ("modern-small", {})]
)
def test_cut_model_equals_the_model_with_deterministic_gates(preset: str, more: dict[str, int]) -> None:
    model, inputs = with_gates(tiny(preset, **more)), batch()
    with torch.no_grad():
        for location in (*unit_gates(model).heads, *unit_gates(model).neurons):
            location.copy_(3 * torch.randn(len(location)))
            location[0] = 1.0
    gates = unit_gates(model).deterministic()
    kept = KeptUnits(
        *(tuple(getattr(own, kind).nonzero().squeeze(1) for own in gates) for kind in ("heads", "neurons"))
    )
    assert any(len(own) < layer.neurons for own, layer in zip(kept.neurons, model.encoder.units, strict=True))
    expected = model.run(EncoderInputs(inputs.tokens, inputs.layout, gates=gates), Want(task=True)).outputs
    small = cut_gated(model, kept)
    assert "gates" not in small.heads
    assert [head.kind for head in small.config.heads] == [head.kind for head in without_gates(model).config.heads]
    torch.testing.assert_close(small.outputs(inputs.tokens, inputs.layout), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        with_folded_gates(model).outputs(inputs.tokens, inputs.layout), expected, rtol=0, atol=1e-5
    )


@torch.no_grad()
def test_magnitude_is_the_weight_norm_of_a_unit() -> None:
    model = tiny()
    found = magnitude(model)
    block = model.encoder.blocks[1]
    project, output = block.mixer.project.weight, block.mixer.output.weight
    for head in range(4):
        rows = project.view(3, 4, 4, 16)[:, head]
        expected = torch.cat([rows.flatten(), output[:, 4 * head : 4 * head + 4].flatten()]).norm()
        assert float(found.heads[1][head]) == pytest.approx(float(expected), rel=1e-5)
    expand, contract = block.feedforward.expand.weight, block.feedforward.contract.weight
    expected = torch.cat([expand, contract.T], dim=1).norm(dim=1)
    torch.testing.assert_close(found.neurons[1], expected)
    grouped = tiny("convbert-medium-small", embedding_width=8)
    part = grouped.encoder.blocks[0].feedforward
    expected = (part.expand.weight[1, :, 3].square().sum() + part.contract.weight[1, 3].square().sum()).sqrt()
    assert float(magnitude(grouped).neurons[0][32 + 3]) == pytest.approx(float(expected), rel=1e-5)
    assert isinstance(grouped.encoder.blocks[0].mixer.output, ElasticLinear)
