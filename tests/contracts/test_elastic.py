"""Contract of elastic models, for every family and random sub-networks with different widths in every layer."""

import copy
from pathlib import Path
from random import Random

import pytest
import torch
from cases import HEADS as HEAD_COUNT
from cases import MIXER_CASES, WIDTH, forward_context, orders_of, packed_layout
from elastic_cases import ENCODERS, HEADS, elastic_model, random_subnet, step_gradients, task_batch
from torch import Tensor

import bertsmith
from bertsmith import Subnet
from bertsmith.layers.elementwise import LayerGates
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.mixers.kernels import PredictedKernel
from bertsmith.layers.subnet import LayerCut
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.build import initialise
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads.base import FeaturesConfig
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective
from bertsmith.objectives.distillation.objective import Distillation, Grid, name_terms
from bertsmith.objectives.distillation.terms import HiddenStateTerm, LabelTerm, OutputTerm
from bertsmith.shrinking.importance import Orders, rewire

FEEDFORWARDS = {
    "dense": FeedForwardConfig(neurons=12),
    "grouped": FeedForwardConfig(neurons=12, groups=3),
    "gated": FeedForwardConfig(neurons=12, is_gated=True, activation="silu"),
    "gated without biases": FeedForwardConfig(neurons=12, is_gated=True, has_bias=False),
}
TERMS = name_terms([OutputTerm(), HiddenStateTerm(weight=0.1), LabelTerm(weight=0.3)])


def outputs_of(model: Model, layout: str = "packed", **options: object) -> Tensor:
    batch = task_batch(layout)
    inputs = EncoderInputs(batch.tokens, batch.layout, batch.types, **options)  # type: ignore[arg-type]
    return model.run(inputs, Want(task=True)).outputs


@pytest.mark.parametrize("name", ENCODERS)
def test_rewiring_preserves_outputs(name: str) -> None:
    model = elastic_model(name, "tagging")
    expected, half = outputs_of(model), outputs_of(model, subnet=Subnet(width=0.5))
    single = outputs_of(copy.deepcopy(model).float())
    rewire(model, Orders(*map(tuple, orders_of(model))))
    torch.testing.assert_close(outputs_of(model), expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(outputs_of(model.float()), single, rtol=0, atol=1e-5)
    assert not torch.allclose(outputs_of(model, subnet=Subnet(width=0.5)), half.float())


@pytest.mark.parametrize("name", ENCODERS)
def test_extracted_model_equals_subnet(name: str) -> None:
    draw = Random(name)
    for task in ("classification", "spans", "tagging after a normed layer"):
        model = elastic_model(name, task)
        subnet = random_subnet(model.encoder.units, draw)
        small = bertsmith.extract(model, subnet)
        for layout in ("packed", "padded"):
            expected = outputs_of(model, layout, subnet=subnet)
            torch.testing.assert_close(outputs_of(small, layout), expected, rtol=0, atol=1e-11)


def test_multi_layer_head_reads_the_kept_layers() -> None:
    model = elastic_model("bert-tiny")
    head = HEADS["tagging"][0].changed(features=FeaturesConfig(layers=2))
    model = with_task_head(model, head, seed=0).double().eval()
    subnet = Subnet(layers=(0, 2), heads=(1, 3), neurons=(5, 90))
    torch.testing.assert_close(
        outputs_of(bertsmith.extract(model, subnet)), outputs_of(model, subnet=subnet), rtol=0, atol=1e-11
    )


def gates_of(model: Model, value: float = 1.0) -> list[LayerGates]:
    """Return gates with one value for all units."""
    return [
        LayerGates(*(torch.full((count,), value) for count in (units.heads, units.neurons, units.neurons)))
        for units in model.encoder.units
    ]


@pytest.mark.parametrize("name", ENCODERS)
def test_gates_of_one_change_nothing(name: str) -> None:
    model = elastic_model(name)
    subnet = random_subnet(model.encoder.units, Random(name))
    for cut in (None, subnet):
        gated = outputs_of(model, gates=gates_of(model), subnet=cut)
        torch.testing.assert_close(gated, outputs_of(model, subnet=cut), rtol=0, atol=1e-12)
    assert not torch.allclose(outputs_of(model, gates=gates_of(model, 0.5)), outputs_of(model))


def prefix(count: int, keep: int, groups: int = 1) -> Tensor:
    """Return a gate that is 1 for the first units of every group and 0 for the others."""
    return (torch.arange(count // groups) < keep // groups).repeat(groups).double()


@pytest.mark.parametrize("name", MIXER_CASES)
def test_zero_gates_equal_cut_heads(name: str) -> None:
    torch.manual_seed(0)
    mixer = MIXER_CASES[name].build(WIDTH).double().eval()
    initialise(mixer, 0.3)
    hidden, layout = torch.randn(9, WIDTH, dtype=torch.float64), packed_layout([5, 1, 3])
    for keep in range(1, HEAD_COUNT):
        with torch.no_grad():
            for module in mixer.modules():
                if isinstance(module, PredictedKernel):
                    # kernels are predicted from all heads, so a cut changes the kernels of the remaining heads
                    table = module.table.weight.unflatten(1, (HEAD_COUNT, -1)).unflatten(0, (HEAD_COUNT, -1))
                    table[:keep, :, keep:] = 0
        context = forward_context(layout)
        gated = mixer(hidden, context.with_gates(LayerGates(heads=prefix(HEAD_COUNT, keep))))
        cut = mixer(hidden, context.with_cut(LayerCut(keep, 1)))
        torch.testing.assert_close(gated, cut, rtol=0, atol=1e-12)
        whole = mixer(hidden, context)
        assert not torch.allclose(gated, whole)
        # values in between scale the output of a head
        half = mixer(hidden, context.with_gates(LayerGates(heads=(1 + prefix(HEAD_COUNT, keep)) / 2)))
        torch.testing.assert_close(half, (gated + whole) / 2, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FEEDFORWARDS)
def test_zero_gates_equal_cut_neurons(name: str) -> None:
    torch.manual_seed(0)
    config = FEEDFORWARDS[name]
    part = config.build(WIDTH).double()
    initialise(part, 0.3)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    hidden, context = torch.randn(4, WIDTH, dtype=torch.float64), forward_context(packed_layout([4]))
    for keep in range(config.groups, config.neurons, config.groups):
        gate = prefix(config.neurons, keep, config.groups)
        cut = part(hidden, context.with_cut(LayerCut(1, keep, config.groups)))
        # gelu and silu are 0 at 0, so a zero pre-activation gives a zero activation
        for gates in (LayerGates(neurons=gate), LayerGates(inner=gate)):
            torch.testing.assert_close(part(hidden, context.with_gates(gates)), cut, rtol=0, atol=1e-12)
            both = context.with_cut(LayerCut(1, keep, config.groups)).with_gates(gates)
            torch.testing.assert_close(part(hidden, both), cut, rtol=0, atol=1e-12)
        whole = part(hidden, context)
        assert not torch.allclose(cut, whole)
        half = part(hidden, context.with_gates(LayerGates(neurons=(1 + gate) / 2)))
        torch.testing.assert_close(half, (cut + whole) / 2, rtol=0, atol=1e-12)


def student_and_objective(name: str, teacher_width: str = "same", **grid: object) -> tuple[Model, Distillation]:
    """Return a student and its distillation objective with a teacher of other weights."""
    model, teacher = elastic_model(name), elastic_model(name, seed=5)
    chosen = Grid.parse({"widths": [1.0, 0.5], "depths": [1.0, 0.67], **grid})
    units = model.encoder.units
    return model, Distillation(HEADS["classification"][1], TERMS, teacher, chosen, units, teacher_width)  # type: ignore[arg-type]


def separate_gradients(model: Model, objective: Distillation, layout: str, seed: int = 0) -> dict[str, Tensor]:
    """Return the sum of the gradients of all sub-networks' losses, computed one by one."""
    batch = task_batch(layout)
    lesson = objective.to("cpu").prepare(batch, seed)
    counts = objective.counts(lesson)
    total: dict[str, Tensor] = {}
    for part in objective.parts(lesson):
        model.zero_grad()
        sums = objective(model, part)
        loss = sum(term.weight * sums[name].loss / counts[name] for name, term in objective.terms.items())
        loss.backward()  # type: ignore[union-attr]
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, torch.zeros_like(parameter)) + parameter.grad
    model.zero_grad()
    return total


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("name", ENCODERS)
def test_step_sums_gradients_of_all_subnets(name: str, tmp_path: Path) -> None:
    """The step is the same with one padded batch and with two micro-batches, one of them packed."""
    model, objective = student_and_objective(name)
    expected = separate_gradients(model, objective, "packed")
    whole = objective.grid.subnets if objective.grid else ()
    assert len(whole) == 4
    assert_same_gradients(step_gradients(model, objective, [task_batch("padded")], tmp_path), expected)
    halves = [task_batch("packed", (7, 1)), task_batch("padded", (4, 6), first=2)]
    assert_same_gradients(step_gradients(model, objective, halves, tmp_path), expected)


@pytest.mark.parametrize("name", ["bert-tiny", "convbert-medium-small"])
def test_step_sums_gradients_of_sampled_subnets(name: str, tmp_path: Path) -> None:
    model, objective = student_and_objective(name, sample=1, per_layer=True, depth_rule="drop_last")
    expected = separate_gradients(model, objective, "packed", seed=3)
    assert_same_gradients(step_gradients(model, objective, [task_batch("packed")], tmp_path, seed=3), expected)


def test_subnet_updates_only_its_own_units(tmp_path: Path) -> None:
    """Heads, neurons and layers outside the sub-network get no gradient."""
    model, objective = student_and_objective("bert-tiny")
    model.zero_grad()
    lesson = objective.to("cpu").prepare(task_batch(), 0)
    part = objective.parts(lesson)[0]
    assert part.subnets[0] == Subnet(width=0.5, depth=0.67)
    sum(s.loss for s in objective(model, part).values()).backward()  # type: ignore[union-attr]
    kept = part.subnets[0].kept_layers(3)
    for index, block in enumerate(model.encoder.blocks):
        gradient = block.mixer.output.weight.grad
        assert (gradient is not None) == (index in kept)
        if gradient is not None:
            assert gradient[:, : WIDTH // 2].any()
            assert not gradient[:, WIDTH // 2 :].any()
            assert not block.feedforward.expand.weight.grad[48:].any()


def test_teacher_is_not_trained(tmp_path: Path) -> None:
    model, objective = student_and_objective("bert-tiny")
    assert objective.teacher is not None
    before = copy.deepcopy(objective.teacher.state_dict())
    found: Objective = objective.to("cpu")
    step_gradients(model, found, [task_batch()], tmp_path)
    assert not objective.teacher.training
    assert all(parameter.grad is None for parameter in objective.teacher.parameters())
    assert all(torch.equal(value, before[name]) for name, value in objective.teacher.state_dict().items())
