"""Supervised objectives: learning rates by depth, gradient clipping, class weights, a frozen encoder."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_tasks import CLASSES, make, make_batch
from torch import Tensor, nn

from bertsmith import SequenceLayout
from bertsmith.answers.sequences import IGNORED
from bertsmith.data.examples import TaskBatch
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.build import build
from bertsmith.models.heads.task import ClassifierConfig, TaggerConfig
from bertsmith.models.model import Model
from bertsmith.models.published import overridable, preset
from bertsmith.objectives.supervised import Classes, Supervised, Tags
from bertsmith.training.meter import Meter
from bertsmith.training.optimizer import OptimizerConfig
from bertsmith.training.run_config import RunConfig
from bertsmith.training.step import TrainStep

POOLED = ClassifierConfig(labels=("a", "b", "c"), pooling="pooler")


def twelve_layers(name: str, head: ClassifierConfig = CLASSES) -> Model:
    sizes = {
        "width": 16,
        "layers": 12,
        "heads": 2,
        "embedding_width": 8,
        "vocabulary": 20,
        "span": 4,
        "max_distance": 8,
    }
    config = preset(name, **{key: value for key, value in sizes.items() if key in overridable(name)})
    return with_task_head(build(config, seed=0), head, seed=0)


def rates(model: Model, objective: Supervised) -> dict[str, float]:
    """Return the optimiser's learning-rate factor of every weight, by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = OptimizerConfig().build(objective.portions(model))
    OptimizerConfig().set_rate(optimizer, 2.0)
    return {names[weight]: group["lr"] / 2 for group in optimizer.param_groups for weight in group["params"]}


def below(found: dict[str, float], prefix: str) -> list[float]:
    """Return the distinct rates of weights with this name prefix."""
    return sorted({round(rate, 12) for name, rate in found.items() if name.startswith(prefix)})


def depth_power(name: str) -> int:
    """Return the exponent of the decay in ELECTRA's code for twelve layers."""
    if name.startswith("encoder.embedding."):
        return 14
    if name.startswith("encoder.blocks."):
        return 13 - int(name.split(".")[2])
    return 0


@pytest.mark.parametrize(
    ("name", "head"), [("bert-tiny", POOLED), ("electra-small", CLASSES), ("convbert-small", CLASSES)]
)
def test_layer_decay_matches_electra(name: str, head: ClassifierConfig) -> None:
    model = twelve_layers(name, head)
    found = rates(model, Classes(layer_decay=0.8))
    assert found.keys() == dict(model.named_parameters()).keys()
    assert found == pytest.approx({own: 0.8 ** depth_power(own) for own in found}, rel=1e-12)
    assert found["encoder.embedding.token_table"] == pytest.approx(0.044, abs=1e-4)
    assert below(found, "encoder.blocks.11.") == [0.64]
    assert below(found, "heads.") == [1.0]
    assert below(found, "heads.pooler.") == ([1.0] if head is POOLED else [])
    assert ("encoder.embedding.widen.weight" in found) == (name != "bert-tiny")


def test_shared_layers_have_the_topmost_rate() -> None:
    found = rates(twelve_layers("albert-base"), Classes(layer_decay=0.8))
    assert below(found, "encoder.blocks.") == [0.64]
    assert found["encoder.embedding.widen.weight"] == pytest.approx(0.8**14)


def test_shared_tables_have_the_topmost_rate() -> None:
    found = rates(twelve_layers("deberta-v3-small"), Classes(layer_decay=0.8))
    assert below(found, "encoder.relative.") == [0.64]
    assert found["encoder.embedding.token_table"] == pytest.approx(0.8**14)


def test_without_decay_all_rates_are_equal() -> None:
    assert set(rates(twelve_layers("bert-tiny"), Classes()).values()) == {1.0}


def step_gradients(
    model: Model, objective: Supervised, batches: list[TaskBatch], out: Path, clip: float = 0.0
) -> dict[str, Tensor]:
    """Return the gradients that the optimiser gets in a step of several micro-batches."""
    method = SimpleNamespace(run=RunConfig(), optimizer=OptimizerConfig(clip=clip))  # the settings that an engine reads
    engine, seen = TrainStep(model, objective, method, out, device="cpu"), {}

    def look() -> None:
        seen.update({name: own.grad.clone() for name, own in model.named_parameters() if own.grad is not None})

    engine.optimizer.step = look
    engine.learn(batches, [(0, index) for index in range(len(batches))], 1e-3, Meter(objective.terms, engine.device))
    engine.close()
    return seen


def test_gradients_of_all_depths_are_clipped_together(tmp_path: Path) -> None:
    model, batch, objective = make(), make_batch(), Classes(layer_decay=0.5)
    free = step_gradients(model, objective, [batch], tmp_path)
    clipped = step_gradients(model, objective, [batch], tmp_path, clip=1e-2)
    norm = torch.stack([gradient.norm() for gradient in free.values()]).norm()
    assert norm > 1e-2
    for name, gradient in clipped.items():
        torch.testing.assert_close(gradient, free[name] * (1e-2 / norm), rtol=1e-4, atol=1e-12)


def part(batch: TaskBatch, begin: int, end: int) -> TaskBatch:
    """Return some sequences of a packed batch."""
    starts = batch.layout.starts
    tokens = slice(int(starts[begin]), int(starts[end]))
    targets = {name: own[tokens] if name == "tags" else own[begin:end] for name, own in batch.targets.items()}
    layout = SequenceLayout.packed(starts[begin : end + 1] - starts[begin], batch.layout.max_length)
    return replace(
        batch,
        tokens=batch.tokens[tokens],
        layout=layout,
        item=batch.item[begin:end],
        targets=targets,
        real_tokens=len(batch.tokens[tokens]),
    )


@pytest.mark.parametrize("weights", [(), (0.5, 3.0, 1.0), (0.01, 0.02, 0.05), (2.0, 0.0, 1.0)])
@pytest.mark.parametrize("cuts", [(0, 3), pytest.param((0, 1, 3), marks=pytest.mark.slow), (0, 1, 2, 3)])
@pytest.mark.parametrize("kind", ["classes", "tags"])
def test_class_weights_match_torch(
    kind: str, cuts: tuple[int, ...], weights: tuple[float, ...], tmp_path: Path
) -> None:
    """Over a whole step, for any split into micro-batches and any scale of the weights."""
    model = make(head=CLASSES if kind == "classes" else TaggerConfig(labels=("a", "b", "c")))
    batch, objective = make_batch(), Classes(weights=weights) if kind == "classes" else Tags(weights=weights)
    batches = [part(batch, begin, end) for begin, end in pairwise(cuts)]
    found = step_gradients(model, objective, batches, tmp_path)

    weight = torch.tensor(weights, dtype=torch.float64) if weights else None
    targets = batch.targets["label" if kind == "classes" else "tags"]
    assert (targets == IGNORED).any() == (kind == "tags")
    loss = nn.CrossEntropyLoss(weight, ignore_index=IGNORED)(model.outputs(batch.tokens, batch.layout), targets)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    for name, gradient in zip(found, expected, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-7 if weights else 1e-10)


def test_frozen_embedding_keeps_dropout(tmp_path: Path) -> None:
    model, batch = make(), make_batch()
    states: list[bool] = []
    handle = model.encoder.embedding.register_forward_pre_hook(lambda own, _: states.append(own.training))
    found = step_gradients(model, Classes(frozen="embedding", layer_decay=0.8), [batch], tmp_path)
    handle.remove()
    kept = {name for name, _ in model.named_parameters() if not name.startswith("encoder.embedding.")}
    assert found.keys() == kept
    assert states == [True]


def test_frozen_encoder_is_in_eval_mode(tmp_path: Path) -> None:
    model, batch = make(), make_batch()
    objective = Classes(frozen="all", layer_decay=0.8)
    states: list[bool] = []
    handles = [
        module.register_forward_pre_hook(lambda own, _: states.append(own.training))
        for module in (model.encoder.embedding, model.heads["classifier"])
    ]
    found = step_gradients(model, objective, [batch], tmp_path)
    for handle in handles:
        handle.remove()
    assert found.keys() == {f"heads.{name}" for name, _ in model.heads.named_parameters()}
    assert states == [False, True]
    assert model.encoder.training
    assert {id(own) for own in objective.portions(model)[0].parameters} == set(map(id, model.heads.parameters()))
