"""Contract of scoring and cutting units, for one preset of each family: every mixer, gated and grouped neurons."""

import copy
from itertools import pairwise

import pytest
import torch
from cases import FAMILIES, SEQ2SEQ, packed_layout, tiny_model
from elastic_cases import NORMED
from torch import Tensor, nn

from bertsmith.data.examples import TaskBatch
from bertsmith.layers.elementwise import LayerGates
from bertsmith.layers.linear import ElasticLinear, GroupedLinear
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.models.model import Model
from bertsmith.objectives.supervised import Classes
from bertsmith.shrinking.importance import importance, summed_over_uses
from bertsmith.shrinking.pruned_units import KeptUnits, closed_gates, cut_down, fold_gates

ENCODERS = [name for name in FAMILIES if name not in SEQ2SEQ]
# kernels are predicted from all heads, so removing a head changes the kernels of the others
PREDICTED = ("convbert", "dynamicconv", "lite-bert")
LENGTHS = [6, 3, 9, 1]


def task_model(name: str) -> Model:
    """Build a tiny model of a family with a task head."""
    hidden = NORMED if name.startswith("modern") else None
    head = ClassifierConfig(labels=("a", "b", "c"), hidden=hidden, dropout=0.0)
    return with_task_head(tiny_model(name), head, seed=0).double().eval()


def batches(count: int) -> list[TaskBatch]:
    draw = torch.Generator().manual_seed(3)
    made = []
    for number in range(count):
        tokens = torch.randint(0, 50, (sum(LENGTHS),), generator=draw)
        targets = {"label": torch.randint(0, 3, (len(LENGTHS),), generator=draw)}
        layout, item = packed_layout(LENGTHS), torch.arange(len(LENGTHS)) + number
        made.append(TaskBatch(tokens, layout, None, item, targets, sum(LENGTHS)))
    return made


def _by_input(layer: ElasticLinear | GroupedLinear, tensor: Tensor, units: int) -> Tensor:
    """Sum a matrix over the weights of each input unit."""
    if isinstance(layer, GroupedLinear):
        return tensor.sum(2).flatten()
    return tensor.sum(0).view(layer.parts_in, units, -1).sum((0, 2))


def _by_output(layer: ElasticLinear | GroupedLinear, tensor: Tensor, units: int) -> Tensor:
    """Sum a matrix, or a bias, over the weights of each output unit."""
    if isinstance(layer, GroupedLinear):
        return tensor.sum(1).flatten() if tensor.dim() == 3 else tensor
    return tensor.view(layer.parts, units, -1).sum((0, 2))


def by_weights(model: Model, made: list[TaskBatch], *, is_zeroed: bool) -> list[list[Tensor]]:
    """Scores of the released code: absolute sums of weight times gradient; without zeroing, gradients accumulate."""
    scores: list[list[Tensor]] = []
    for batch in made:
        if is_zeroed:
            model.zero_grad()
        Classes().sums(model.outputs(batch.tokens, batch.layout), batch).loss.div(len(LENGTHS)).backward()
        of_batch = []
        for block in model.encoder.blocks:
            outputs, expand, contract = block.mixer.outputs, block.feedforward.expand, block.feedforward.contract
            heads = sum(_by_input(one, one.weight * one.weight.grad, block.mixer.heads) for one in outputs)
            neurons = block.feedforward.neurons
            before = _by_output(expand, expand.weight * expand.weight.grad, neurons)
            if expand.bias is not None:
                before = before + _by_output(expand, expand.bias * expand.bias.grad, neurons)
            after = _by_input(contract, contract.weight * contract.weight.grad, neurons)
            of_batch += [heads.abs().detach(), (before.abs() + after.abs()).detach()]
        scores.append(of_batch)
    sums = [torch.stack(own).sum(0) for own in zip(*scores, strict=True)]
    return [sums[0::2], sums[1::2]]


@pytest.mark.parametrize("gradients", ["per_batch", "cumulative"])
@pytest.mark.parametrize("name", ENCODERS)
def test_importance_is_weight_times_gradient(name: str, gradients: str) -> None:
    model, made = task_model(name), batches(3)
    found = importance(model, Classes(), made, gradients)
    alone = copy.deepcopy(model)
    # every use of a shared layer as a separate layer, whose gradients are not added
    alone.encoder.blocks = nn.ModuleList([copy.deepcopy(block) for block in alone.encoder.blocks])
    heads, neurons = by_weights(alone, made, is_zeroed=gradients == "per_batch")
    for own, expected in [*zip(found.heads, heads, strict=True), *zip(found.neurons, neurons, strict=True)]:
        torch.testing.assert_close(own.double(), expected, rtol=2e-5, atol=1e-7 * float(expected.max()))
    if model.config.encoder.shares_mixer:
        total = summed_over_uses(found.heads, is_shared=True)
        assert all(torch.equal(one, other) for one, other in pairwise(total))
        torch.testing.assert_close(total[0].double(), torch.stack(heads).sum(0), rtol=2e-5, atol=1e-7)


def random_units(model: Model, seed: int) -> KeptUnits:
    """Draw random units of every layer; the same units in layers that share them."""
    draw, encoder, units = torch.Generator().manual_seed(seed), model.config.encoder, model.encoder.units

    def some(count: int, groups: int, kept: int) -> Tensor:
        size = count // groups
        chosen = [torch.randperm(size, generator=draw)[:kept].sort().values + size * group for group in range(groups)]
        return torch.cat(chosen)

    def amount(count: int) -> int:
        return int(torch.randint(1, count + 1, (1,), generator=draw))

    heads = [some(layer.heads, 1, amount(layer.heads)) for layer in units]
    neurons = [some(layer.neurons, layer.groups, amount(layer.neurons // layer.groups)) for layer in units]
    if encoder.sharing in ("mixer", "feedforward"):  # the same number in every layer
        heads, neurons = [some(units[0].heads, 1, 2) for _ in units], [some(units[0].neurons, 1, 40) for _ in units]
    if encoder.shares_mixer:
        heads = heads[:1] * len(units)
    if encoder.shares_feedforward:
        neurons = neurons[:1] * len(units)
    return KeptUnits(tuple(heads), tuple(neurons))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ENCODERS)
def test_cutting_equals_zero_gates(name: str, seed: int) -> None:
    model, (batch,) = task_model(name), batches(1)
    kept = random_units(model, seed)
    if name.startswith(PREDICTED):
        kept = KeptUnits(KeptUnits.all_of(model.encoder.units).heads, kept.neurons)
    small = cut_down(model, kept)
    assert [(layer.heads, layer.neurons) for layer in small.encoder.units] == list(zip(*kept.counts, strict=True))
    assert small.config.encoder.sharing == model.config.encoder.sharing
    gates = closed_gates(kept, model.encoder.units)
    masked = model.run(EncoderInputs(batch.tokens, batch.layout, gates=gates), Want(task=True)).outputs
    torch.testing.assert_close(small.outputs(batch.tokens, batch.layout), masked, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ENCODERS)
def test_folded_gates_equal_gates(name: str) -> None:
    model, (batch,) = task_model(name), batches(1)
    encoder, units = model.config.encoder, model.encoder.units
    heads = [torch.rand(layer.heads, dtype=torch.float64) for layer in units]
    neurons = [torch.rand(layer.neurons, dtype=torch.float64) for layer in units]
    heads = heads[:1] * len(units) if encoder.shares_mixer else heads
    neurons = neurons[:1] * len(units) if encoder.shares_feedforward else neurons
    gates = [LayerGates(heads=own, neurons=others) for own, others in zip(heads, neurons, strict=True)]
    expected = model.run(EncoderInputs(batch.tokens, batch.layout, gates=gates), Want(task=True)).outputs
    assert not torch.allclose(model.outputs(batch.tokens, batch.layout), expected)
    fold_gates(model, gates)
    torch.testing.assert_close(model.outputs(batch.tokens, batch.layout), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in ENCODERS if name.startswith(PREDICTED)])
def test_cutting_heads_with_predicted_kernels_equals_subnet(name: str) -> None:
    model, (batch,) = task_model(name), batches(1)
    kept = random_units(model, 0)
    ordered = copy.deepcopy(model)
    heads = [
        torch.tensor([*own.tolist(), *(head for head in range(layer.heads) if head not in own)])
        for own, layer in zip(kept.heads, model.encoder.units, strict=True)
    ]
    ordered.encoder.reorder(heads, [torch.arange(layer.neurons) for layer in model.encoder.units])
    all_neurons = KeptUnits(kept.heads, KeptUnits.all_of(model.encoder.units).neurons)
    expected = ordered.outputs(batch.tokens, batch.layout, subnet=all_neurons.subnet)
    outputs = cut_down(model, all_neurons).outputs(batch.tokens, batch.layout)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-10)
