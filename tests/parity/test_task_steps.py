"""One fine-tuning step against the task classes of `transformers`, in float64: logits, loss and every gradient."""

from pathlib import Path

import pytest
import torch
from theirs import TINY, batch, make, ours
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from transformers import BertForSequenceClassification, BertForTokenClassification, PreTrainedModel

from bertsmith import SequenceLayout
from bertsmith.answers.sequences import IGNORED
from bertsmith.checkpoint.hf.names import to_theirs
from bertsmith.checkpoint.hf.reading import adapter_for
from bertsmith.data.examples import TaskBatch
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.heads import HeadConfig
from bertsmith.models.heads.task import ClassifierConfig, TaggerConfig
from bertsmith.models.model import Model
from bertsmith.objectives.supervised import Classes, Supervised, Tags, Values

LABELS = ("a", "b", "c")
LENGTHS = [9, 1, 4]


def ours_for_task(theirs: PreTrainedModel, head: HeadConfig, folder: Path) -> Model:
    """Return our model with the same weights, including the head's."""
    model = with_task_head(ours(theirs.bert, folder), head, seed=0).double()
    score = model.heads[head.kind].score
    with torch.no_grad():
        score.weight.copy_(theirs.classifier.weight)
        score.bias.copy_(theirs.classifier.bias)
    return model


def task_batch(inputs: dict[str, Tensor], targets: dict[str, Tensor], layout: str) -> TaskBatch:
    """Return the same sequences as our batch, padded or packed."""
    is_token, starts = inputs["attention_mask"].bool(), torch.tensor([0, *LENGTHS]).cumsum(0).int()
    lies = SequenceLayout.padded(is_token) if layout == "padded" else SequenceLayout.packed(starts, max(LENGTHS))
    by_token = {"tokens": inputs["input_ids"], "types": inputs["token_type_ids"]}
    by_token |= {name: value for name, value in targets.items() if value.shape == is_token.shape}
    if layout == "packed":
        by_token = {name: value[is_token] for name, value in by_token.items()}
    tokens, types = by_token.pop("tokens"), by_token.pop("types")
    return TaskBatch(tokens, lies, types, torch.arange(len(LENGTHS)), {**targets, **by_token}, sum(LENGTHS))


def assert_all_equal(
    model: Model, theirs: PreTrainedModel, objective: Supervised, given: TaskBatch, loss: Tensor
) -> None:
    found = objective(model, given)["task"].loss / objective.count(given)
    torch.testing.assert_close(found, loss, rtol=0, atol=1e-10)
    found.backward()
    loss.backward()
    mine = {name: parameter.grad for name, parameter in model.named_parameters()}
    kind = model.config.heads[-1].kind
    for name in ("weight", "bias"):
        gradient = mine.pop(f"heads.{kind}.score.{name}")
        torch.testing.assert_close(gradient, getattr(theirs.classifier, name).grad, rtol=0, atol=1e-10)
    adapter = adapter_for(model)
    rows = [row for row in adapter.rows(model.config, adapter.parts(mine)) if row.ours in mine]
    assert len(rows) == len(mine)
    reference = {f"bert.{name}": parameter.grad for name, parameter in theirs.bert.named_parameters()}
    converted = to_theirs(rows, mine)
    assert converted.keys() == reference.keys()
    for name, gradient in converted.items():
        torch.testing.assert_close(gradient, reference[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("labels", [LABELS, ("score",)])
def test_classification_and_regression_equal_theirs(labels: tuple[str, ...], layout: str, tmp_path: Path) -> None:
    """Classification and regression on the pooler."""
    theirs = make(BertForSequenceClassification, 11, TINY | {"num_labels": len(labels)})
    model = ours_for_task(theirs, ClassifierConfig(labels=labels, pooling="pooler", dropout=0.0), tmp_path)
    inputs = batch(LENGTHS, max(LENGTHS))
    targets = {"label": torch.tensor([2, 0, 1]), "value": torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)}
    scores, given = theirs(**inputs).logits, task_batch(inputs, targets, layout)
    if labels == LABELS:
        assert_all_equal(model, theirs, Classes(), given, cross_entropy(scores, targets["label"]))
    else:
        assert_all_equal(model, theirs, Values(), given, mse_loss(scores.squeeze(-1), targets["value"]))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_tagging_equals_theirs(layout: str, tmp_path: Path) -> None:
    theirs = make(BertForTokenClassification, 12, TINY | {"num_labels": 3})
    model = ours_for_task(theirs, TaggerConfig(labels=LABELS, dropout=0.0), tmp_path)
    inputs = batch(LENGTHS, max(LENGTHS))
    tags = torch.randint(0, 3, inputs["input_ids"].shape)
    tags = tags.where(inputs["attention_mask"].bool() & (torch.rand(tags.shape) < 0.7), IGNORED)
    result = theirs(**inputs, labels=tags)
    loss = cross_entropy(result.logits.flatten(0, 1), tags.flatten(), ignore_index=IGNORED)
    assert result.loss.item() == pytest.approx(loss.item(), abs=1e-6)
    assert_all_equal(model, theirs, Tags(), task_batch(inputs, {"tags": tags}, layout), loss)
