"""Adversarial training against a transcription with hooks: losses and every gradient, in float64."""

from collections.abc import Callable

import pytest
import torch
from small_tasks import CLASSES, FAMILIES, assert_same, gradients, losses, make, make_batch
from torch import Tensor, nn

from bertsmith.answers.sequences import IGNORED
from bertsmith.data.examples import TaskBatch
from bertsmith.models.heads.task import ClassifierConfig, TaggerConfig
from bertsmith.models.model import Model
from bertsmith.objectives.adversarial import Adversarial, AdversarialConfig
from bertsmith.objectives.supervised import Classes, Labels, Tags, Values


def transcribed(
    model: Model,
    batch: TaskBatch,
    kind: str,
    first: Callable[[Tensor, Tensor], Tensor],
    second: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the clean scores, the adversarial loss and the change of the noise, step by step as in the paper.

    Hooks read the vectors before the embedding's norm; in the first pass no parameter requires a gradient.
    """
    noise_std, rate, state = 1e-2, 1e-4, {}

    def catch(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        (vectors,) = inputs
        if "noise" in state:
            return state["entered"].detach() + state["noise"]
        centred = vectors - vectors.mean(-1, keepdim=True)
        normalised = centred / (centred.square().mean(-1, keepdim=True) + 1e-7).sqrt()
        state["entered"] = normalised if kind == "sift" else vectors
        return state["entered"]

    def run() -> Tensor:
        return model.outputs(batch.tokens, batch.layout, batch.types)

    handle = model.encoder.embedding.norm.register_forward_pre_hook(catch)
    clean = run()
    torch.manual_seed(7)
    noise = torch.randn(state["entered"].shape, dtype=torch.float64) * noise_std
    state["noise"] = noise.clamp(-2 * noise_std, 2 * noise_std).requires_grad_()
    model.requires_grad_(False)
    first(run(), clean.detach()).backward()
    model.requires_grad_(True)
    before, gradient = state["noise"].detach(), state["noise"].grad
    state["noise"] = before + rate * gradient / (1e-6 + gradient.abs().max(-1, keepdim=True)[0])
    loss = second(run(), clean)
    handle.remove()
    return clean, loss, state["noise"] - before


def cross_entropy(teacher: Tensor, student: Tensor) -> Tensor:
    shares = teacher.detach().exp() / teacher.detach().exp().sum(-1, keepdim=True)
    return -(shares * (student - student.exp().sum(-1, keepdim=True).log())).sum(-1)


def both_ways(one: Tensor, other: Tensor) -> Tensor:
    return cross_entropy(one, other) + cross_entropy(other, one)


@pytest.mark.parametrize("kind", ["sift", "vat"])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_equals_a_transcription(name: str, kind: str) -> None:
    """Compare both terms and every gradient."""
    model, batch = make(name), make_batch()
    objective = Adversarial(Classes(), AdversarialConfig(kind=kind, weight=3.0))
    found = losses(objective, model, batch)
    loss = sum(term.weight * found[name] for name, term in objective.terms.items())

    clean, expected, change = transcribed(
        model, batch, kind, lambda a, b: both_ways(a, b).sum(), lambda a, b: both_ways(a, b).mean()
    )
    assert 0.5e-4 < change.abs().max() < 1.001e-4
    torch.testing.assert_close(found["adversarial"], expected, rtol=0, atol=1e-10)
    task = nn.functional.cross_entropy(clean, batch.targets["label"])
    assert_same(model, loss, task + 3.0 * expected)


KINDS = {
    "numbers": (Values(), ClassifierConfig(labels=("score",)), lambda a, b, _: (a - b).square().squeeze(-1)),
    "labels": (
        Labels(),
        CLASSES,
        lambda a, b, _: both_ways(torch.stack([a, 0 * a], -1), torch.stack([b, 0 * b], -1)).mean(-1),
    ),
    "tags": (
        Tags(),
        TaggerConfig(labels=("a", "b", "c")),
        lambda a, b, batch: both_ways(a, b)[batch.targets["tags"] != IGNORED],
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_task(name: str) -> None:
    """Squared error for numbers, in both directions; one divergence per label; tags at targets only."""
    task, head, divergence = KINDS[name]
    model, batch = make(head=head), make_batch()
    found = losses(Adversarial(task, AdversarialConfig(kind="sift")), model, batch)["adversarial"]

    def second(perturbed: Tensor, clean: Tensor) -> Tensor:
        if name == "numbers":  # each is the fixed target in turn
            return ((perturbed - clean.detach()).square() + (perturbed.detach() - clean).square()).mean()
        return divergence(perturbed, clean, batch).mean()

    _, expected, _ = transcribed(model, batch, "sift", lambda a, b: divergence(a, b, batch).sum(), second)
    assert_same(model, found, expected)
    assert found > 0
    assert max(gradient.abs().max() for gradient in gradients(model, found).values()) > 1e-4


@pytest.mark.parametrize(
    ("divergence", "first"),
    [
        ("kl", lambda a, b: cross_entropy(b, a).sum()),
        ("mse", lambda a, b: (a - b).square().mean(-1).sum()),
    ],
)
def test_other_divergences_in_the_first_pass(divergence: str, first: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, batch = make(), make_batch()
    config = AdversarialConfig(kind="sift", divergence=divergence)
    found = losses(Adversarial(Classes(), config), model, batch)["adversarial"]
    _, expected, _ = transcribed(model, batch, "sift", first, lambda a, b: both_ways(a, b).mean())
    assert_same(model, found, expected)
