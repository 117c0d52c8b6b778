"""Training of exits against a plain transcription; with a frozen encoder only the exits change."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from bertsmith.data.examples import TaskBatch
from bertsmith.data.layout import SequenceLayout
from bertsmith.models.build import build
from bertsmith.models.exiting import exit_outputs
from bertsmith.models.heads.exits import ExitsConfig
from bertsmith.models.heads.task import ClassifierConfig
from bertsmith.models.model import Model
from bertsmith.models.published import preset
from bertsmith.objectives.exits import ExitLearning, freeze_all_but_exits
from bertsmith.objectives.supervised import Classes

LAYERS = (1, 2, 3)


def _model(dropout: float = 0.0) -> Model:
    config = preset("bert-tiny", width=16, layers=3, heads=2, vocabulary=40, init_std=0.3, dropout=dropout)
    head = ClassifierConfig(labels=("a", "b"), dropout=dropout)
    exits = ExitsConfig(layers=LAYERS[:-1], outputs=2, answer="classes", hidden="tanh", dropout=0.0)
    return build(config.changed(heads=(head, exits)), seed=1).double().eval()


def _batch() -> TaskBatch:
    tokens = torch.randint(5, 40, (15,), generator=torch.Generator().manual_seed(0))
    layout = SequenceLayout.packed(torch.tensor([0, 4, 13, 15], dtype=torch.int32), 9)
    return TaskBatch(tokens, layout, None, torch.arange(3), {"label": torch.tensor([0, 1, 1])}, 15)


@pytest.mark.parametrize("weighting", ["even", "by_depth"])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_loss_is_the_mean_over_exits(is_frozen: bool, weighting: str) -> None:
    model, batch = _model(), _batch()
    *exits, last = exit_outputs(model, batch.tokens, batch.layout)
    weights = [1.0, 1.0, 1.0] if weighting == "even" else [1.0, 2.0, 3.0]
    for learn_from, temperature in (("answers", 1.0), ("answers", 2.0), ("labels", 1.0)):
        target = last.detach().div(temperature).softmax(-1) if learn_from == "answers" else batch.targets["label"]
        plain = [temperature**2 * cross_entropy(outputs / temperature, target) for outputs in exits]
        if not is_frozen:
            plain.append(cross_entropy(last, batch.targets["label"]))
        used = weights[: len(plain)]
        expected = sum(weight * loss for weight, loss in zip(used, plain, strict=True)) / sum(used)
        objective = ExitLearning(
            Classes(),
            LAYERS,
            is_frozen=is_frozen,
            learn_from=learn_from,  # type: ignore[arg-type]
            temperature=temperature,
            weighting=weighting,  # type: ignore[arg-type]
        )
        sums, counts = objective(model, batch), objective.counts(batch)
        loss = sum(term.weight * sums[name].loss / counts[name] for name, term in objective.terms.items())
        torch.testing.assert_close(loss, expected)


def test_frozen_encoder_does_not_change_while_exits_are_trained() -> None:
    model, batch = _model(dropout=0.5), _batch()
    freeze_all_but_exits(model)
    objective = ExitLearning(Classes(), LAYERS)
    (portion,) = objective.portions(model)
    assert {id(parameter) for parameter in portion.parameters} == set(map(id, model.heads["exits"].parameters()))
    expected = objective(model, batch)["exits"].loss
    model.train()
    learned = objective(model, batch)["exits"].loss
    assert torch.equal(learned, expected)  # only exits may have dropout, and here they have none
    assert model.encoder.training
    learned.backward()
    assert all(
        (parameter.grad is not None) == name.startswith("heads.exits") for name, parameter in model.named_parameters()
    )
