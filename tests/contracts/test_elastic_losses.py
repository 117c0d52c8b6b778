"""The losses of elastic training against a plain transcription of DynaBERT's two stages, in float64.

Here students are extracted models, while training runs them as sub-networks: the two computations are independent.
"""

import pytest
import torch
from elastic_cases import HEADS, elastic_model, task_batch
from torch import Tensor
from torch.nn.functional import log_softmax, mse_loss, softmax

import bertsmith
from bertsmith import Subnet
from bertsmith.answers.sequences import IGNORED
from bertsmith.data.examples import TaskBatch
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.objectives.distillation.objective import Distillation, Grid, name_terms
from bertsmith.shrinking.elastic import ElasticSettings, Stage

SETTINGS = ElasticSettings.parse({"model": "somewhere", "task": {"kind": "regression"}})
LAYERS = 4


def soft_cross_entropy(student: Tensor, teacher: Tensor) -> Tensor:
    """Sum over classes, mean over the batch."""
    rows = []
    for own, target in zip(student, teacher, strict=True):
        rows.append(-sum(softmax(target, 0)[c] * log_softmax(own, 0)[c] for c in range(len(own))))
    return torch.stack(rows).mean()  # type: ignore[arg-type]


def by_sequence(outputs: Tensor, batch: TaskBatch) -> list[Tensor]:
    """Return the outputs of each sequence's tokens, without padding."""
    lengths = batch.layout.lengths().tolist()
    rows = list(outputs) if batch.layout.starts is None else list(outputs.split(lengths))
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def prediction_loss(task: str, student: Tensor, teacher: Tensor, batch: TaskBatch) -> Tensor:
    if task.startswith("classification"):
        return soft_cross_entropy(student, teacher)
    if task == "regression":
        return mse_loss(student, teacher)
    pairs = list(zip(by_sequence(student, batch), by_sequence(teacher, batch), strict=True))
    if task.startswith("tagging"):
        has_target = [tags != IGNORED for tags in by_sequence(batch.targets["tags"], batch)]
        chosen = [(own[is_target], like[is_target]) for (own, like), is_target in zip(pairs, has_target, strict=True)]
        return soft_cross_entropy(torch.cat([own for own, _ in chosen]), torch.cat([like for _, like in chosen]))
    # start and end of an answer: each a softmax over the tokens of its text, averaged
    ends = [soft_cross_entropy(own[:, end][None], target[:, end][None]) for own, target in pairs for end in (0, 1)]
    return torch.stack(ends).mean()


def hidden_states_of(model: Model, batch: TaskBatch) -> list[Tensor]:
    """Return the hidden states after the embedding and after each layer."""
    states = model.encoder.run(EncoderInputs(batch.tokens, batch.layout), Want(all_hidden_states=True)).hidden_states
    return [torch.cat(by_sequence(own, batch)) for own in states]


def teacher_layers(depth: float, rule: str) -> list[int]:
    """Return the indices of the teacher's hidden states (0 is the embedding) that match the student's."""
    kept = {
        ("drop_last", 1.0): [0, 1, 2, 3],
        ("drop_last", 0.75): [0, 1, 2],
        ("drop_last", 0.5): [0, 2],
        ("keep_last", 1.0): [0, 1, 2, 3],
        ("keep_last", 0.75): [0, 1, 3],
        ("keep_last", 0.5): [1, 3],
    }[rule, depth]
    return [*kept, LAYERS] if rule == "drop_last" else [0, *(layer + 1 for layer in kept)]


def expected_loss(
    task: str, student: Model, teacher: Model, batch: TaskBatch, pairs: list[int], weight: float
) -> Tensor:
    """1 · prediction + weight · (embedding + sum over layers)."""
    outputs = [model.outputs(batch.tokens, batch.layout) for model in (student, teacher)]
    own, theirs = hidden_states_of(student, batch), hidden_states_of(teacher, batch)
    assert len(own) == len(pairs)
    embedding = mse_loss(own[0], theirs[pairs[0]])
    hidden = sum(mse_loss(state, theirs[like]) for state, like in zip(own[1:], pairs[1:], strict=True))
    return prediction_loss(task, outputs[0], outputs[1], batch) + weight * (embedding + hidden)


def models(task: str) -> tuple[Model, Model]:
    return elastic_model("bert-tiny", task, layers=LAYERS), elastic_model("bert-tiny", task, seed=7, layers=LAYERS)


def losses(
    task: str, stage: Stage, grid: Grid, batch: TaskBatch, teacher_width: str = "full"
) -> tuple[list[Subnet], list[Tensor]]:
    """Return the sub-networks of a stage and the loss of each, computed by the objective."""
    student, teacher = models(task)
    terms = name_terms(SETTINGS.stage(stage).terms)
    objective = Distillation(HEADS[task][1], terms, teacher, grid, student.encoder.units, teacher_width).to("cpu")  # type: ignore[arg-type]
    lesson = objective.prepare(batch, 0)
    counts, found = objective.counts(lesson), []
    for part in objective.parts(lesson):
        sums = objective(student, part)
        found.append(sum(term.weight * sums[name].loss / counts[name] for name, term in objective.terms.items()))
    return list(lesson.subnets), found  # type: ignore[return-value]


@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_stage_one_loss(task: str, layout: str) -> None:
    """All widths learn from the fine-tuned model, with weights 1 and 0.1."""
    batch = task_batch(layout)
    grid = SETTINGS.stage_grid("width")
    subnets, found = losses(task, "width", grid, batch)
    assert [(subnet.width, subnet.depth) for subnet in subnets] == [(0.25, 1), (0.5, 1), (0.75, 1), (1, 1)]
    student, teacher = models(task)
    for subnet, loss in zip(subnets, found, strict=True):
        expected = expected_loss(task, bertsmith.extract(student, subnet), teacher, batch, [0, 1, 2, 3, 4], 0.1)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("rule", ["keep_last", "drop_last"])
@pytest.mark.parametrize("teacher_width", ["same", "full"])
def test_stage_two_loss(task: str, rule: str, teacher_width: str) -> None:
    """The whole grid learns from the first-stage model at full depth, with weights 1 and 1."""
    batch = task_batch("packed")
    grid = Grid.parse({"depth_rule": rule, "widths": [1.0, 0.5]})
    subnets, found = losses(task, "depth", grid, batch, teacher_width)
    assert len(subnets) == 6
    student, teacher = models(task)
    for subnet, loss in zip(subnets, found, strict=True):
        cut = bertsmith.extract(teacher, Subnet(width=subnet.width)) if teacher_width == "same" else teacher
        pairs = teacher_layers(subnet.depth, rule)
        assert list(subnet.counterparts(LAYERS)) == pairs
        expected = expected_loss(task, bertsmith.extract(student, subnet), cut, batch, pairs, 1.0)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("rule", "depth", "pairs"),
    [
        ("drop_last", 0.75, (0, 1, 2, 4, 5, 6, 8, 9, 10, 12)),
        ("drop_last", 0.5, (0, 2, 4, 6, 8, 10, 12)),
        ("keep_last", 0.75, (0, 1, 2, 4, 5, 6, 8, 9, 10, 12)),
        ("keep_last", 0.5, (0, 2, 4, 6, 8, 10, 12)),
    ],
)
def test_layer_pairs_of_twelve_layers(rule: str, depth: float, pairs: tuple[int, ...]) -> None:
    """Both rules match the same hidden states of the teacher: inputs of the kept layers are outputs of those before."""
    assert Subnet(depth=depth, depth_rule=rule).counterparts(12) == pairs


def test_third_stage_uses_labels_only() -> None:
    assert [term.kind for term in SETTINGS.stage("labels").terms] == ["labels"]
    assert SETTINGS.stage_grid("labels") == SETTINGS.grid


def test_regression_learns_from_its_teacher() -> None:
    """The released code has no prediction loss for regression and uses hidden states only."""
    batch = task_batch()
    _, (*_, loss) = losses("regression", "width", SETTINGS.stage_grid("width"), batch)
    student, teacher = models("regression")
    states = expected_loss("regression", student, teacher, batch, [0, 1, 2, 3, 4], 0.1) - mse_loss(
        student.outputs(batch.tokens, batch.layout), teacher.outputs(batch.tokens, batch.layout)
    )
    assert loss > states + 1e-3
