"""Every distillation term against a plain transcription of its formula, sequence by sequence, in float64."""

from collections.abc import Callable

import pytest
import torch
from pairs_of_models import LABELS, assert_same, mean_of, model_of, with_width
from small_tasks import LENGTHS, make_batch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads.task import ClassifierConfig, TaggerConfig
from bertsmith.models.model import Model
from bertsmith.objectives.distillation import TERMS
from bertsmith.objectives.distillation.terms import AttentionTerm, LabelTerm, OutputTerm, PatienceTerm, RelationTerm
from bertsmith.objectives.supervised import Tags, Values


def sentences() -> list[Tensor]:
    """Return the sequences of the batch."""
    return list(make_batch("packed").tokens.split(list(LENGTHS)))


def states(model: Model, tokens: Tensor) -> list[Tensor]:
    """Return the hidden states of the embedding and of every layer, (length, width) each."""
    found = model.encoder.run(
        EncoderInputs(tokens[None], SequenceLayout.full(1, len(tokens))), Want(all_hidden_states=True)
    ).hidden_states
    return [state[0] for state in found]


def widened(student: Model, state: Tensor) -> Tensor:
    """Return the hidden states projected to the teacher's width, written out."""
    if "teacher_width" not in student.heads:
        return state
    layer = student.heads["teacher_width"]
    return state @ layer.weight.T + layer.bias


def states_loss(student: Model, teacher: Model, like: tuple[int, ...]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for tokens in sentences():
        mine, theirs = states(student, tokens), states(teacher, tokens)
        for number, other in enumerate(like):
            total = total + ((widened(student, mine[number]) - theirs[other]) ** 2).sum() / theirs[0].shape[-1]
    return total / sum(LENGTHS)


def cosine_loss(student: Model, teacher: Model, like: tuple[int, ...]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for tokens in sentences():
        own, other = widened(student, states(student, tokens)[-1]), states(teacher, tokens)[like[-1]]
        for mine, theirs in zip(own, other, strict=True):
            total = total + 1 - (mine @ theirs) / (mine @ mine).sqrt() / (theirs @ theirs).sqrt()
    return total / sum(LENGTHS)


def patience_loss(student: Model, teacher: Model, like: tuple[int, ...]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for tokens in sentences():
        mine, theirs = states(student, tokens), states(teacher, tokens)
        for number in range(1, len(mine) - 1):
            own, other = widened(student, mine[number])[0], theirs[like[number]][0]
            total = total + ((own / own.norm() - other / other.norm()) ** 2).sum()
    return total / len(LENGTHS)


def projections(model: Model, tokens: Tensor, index: int) -> list[Tensor]:
    """Return query, key and value of a BERT layer from its weights, each (length, heads · head width)."""
    weight, bias = model.encoder.blocks[index].mixer.project.weight, model.encoder.blocks[index].mixer.project.bias
    return list((states(model, tokens)[index] @ weight.T + bias).chunk(3, dim=-1))


def attention_loss(student: Model, teacher: Model, like: tuple[int, ...]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for tokens in sentences():
        for index in range(len(like) - 1):
            found = []
            for model, layer in ((student, index), (teacher, like[index + 1] - 1)):
                query, key, _ = projections(model, tokens, layer)
                heads = model.encoder.units[layer].heads
                split = [part.chunk(heads, dim=-1) for part in (query, key)]
                found.append([q @ k.T / q.shape[-1] ** 0.5 for q, k in zip(*split, strict=True)])
            for own, other in zip(*found, strict=True):
                total = total + ((own - other) ** 2).sum() / len(found[0])
    return total / sum(length**2 for length in LENGTHS)


def relation_loss(student: Model, teacher: Model, relation_heads: int) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for tokens in sentences():
        mine, theirs = (projections(model, tokens, len(model.encoder.blocks) - 1) for model in (student, teacher))
        for own, other in zip(mine, theirs, strict=True):
            split = (part.chunk(relation_heads, dim=-1) for part in (own, other))
            for a, b in zip(*split, strict=True):
                p, q = ((m @ m.T / m.shape[-1] ** 0.5).softmax(-1) for m in (b, a))
                total = total + (p * (p.log() - q.log())).sum() / relation_heads
    return total / sum(LENGTHS)


PLAIN: dict[str, Callable[[Model, Model, tuple[int, ...]], Tensor]] = {
    "hidden_states": states_loss,
    "cosine": cosine_loss,
    "patience": patience_loss,
    "attention": attention_loss,
}


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("kind", list(PLAIN))
def test_term_equals_its_formula(kind: str, layout: str) -> None:
    student, teacher = model_of(seed=0), model_of(seed=1, layers=4)
    assert_same(student, mean_of(TERMS[kind](), student, teacher, layout), PLAIN[kind](student, teacher, (0, 2, 4)))


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("kind", ["hidden_states", "cosine", "patience"])
def test_states_of_another_width_are_projected(kind: str, layout: str) -> None:
    teacher = model_of(seed=1, width=24, layers=4)
    student = with_width(model_of(seed=0), teacher)
    loss = mean_of(TERMS[kind](), student, teacher, layout)
    assert_same(student, loss, PLAIN[kind](student, teacher, (0, 2, 4)))


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("relation_heads", [1, 4, 8])
def test_relations_equal_their_formula_for_any_heads(relation_heads: int, layout: str) -> None:
    student, teacher = model_of(seed=0, heads=2), model_of(seed=1, width=24, heads=3, layers=3)
    loss = mean_of(RelationTerm(relation_heads=relation_heads), student, teacher, layout)
    assert_same(student, loss, relation_loss(student, teacher, relation_heads))


def test_first_minilm_relations() -> None:
    student, teacher = model_of(seed=0), model_of(seed=1)
    found = mean_of(RelationTerm(relations=("query_key",)), student, teacher, "packed")
    expected = torch.zeros((), dtype=torch.float64)
    for tokens in sentences():
        layout = SequenceLayout.full(1, len(tokens))
        own, other = (
            model.encoder.run(EncoderInputs(tokens[None], layout), Want(maps=True)).maps[-1]["attention"]
            for model in (student, teacher)
        )
        expected = expected + (other * (other.log() - own.log())).sum() / 2
    torch.testing.assert_close(found, expected / sum(LENGTHS), rtol=0, atol=1e-10)


def test_relations_with_a_selected_teacher_layer() -> None:
    student, teacher = model_of(seed=0), model_of(seed=1, layers=4)
    shallow = model_of(seed=1, layers=4)
    shallow.encoder.blocks = shallow.encoder.blocks[:3]
    found = mean_of(RelationTerm(teacher_layer=3, relation_heads=2), student, teacher, "packed")
    assert_same(student, found, relation_loss(student, shallow, 2))


def test_patience_mean_is_the_sum_divided_by_width_and_layers() -> None:
    student, teacher = model_of(seed=0, layers=3), model_of(seed=1, layers=3)
    mean, whole = (mean_of(PatienceTerm(reduction=r), student, teacher, "packed") for r in ("mean", "sum"))
    torch.testing.assert_close(mean * 16 * 2, whole)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_soft_cross_entropy_is_summed_over_classes(temperature: float) -> None:
    student, teacher = model_of(seed=0), model_of(seed=1)
    batch = make_batch("packed")
    own, other = (model.outputs(batch.tokens, batch.layout) for model in (student, teacher))
    shares, logs = (other.detach() / temperature).softmax(-1), (own / temperature).log_softmax(-1)
    expected = -(temperature**2) * sum(shares[i, c] * logs[i, c] for i in range(3) for c in range(3)) / 3
    assert_same(student, mean_of(OutputTerm(temperature=temperature), student, teacher, "packed"), expected)


def test_regression_output_term_uses_the_teacher() -> None:
    head = ClassifierConfig(labels=("value",))
    student, teacher = model_of(seed=0, head=head), model_of(seed=1, head=head)
    batch = make_batch("packed")
    own, other = (model.outputs(batch.tokens, batch.layout) for model in (student, teacher))
    expected = ((own - other.detach()) ** 2).sum() / 3
    assert_same(student, mean_of(OutputTerm(), student, teacher, "packed", Values()), expected)
    to_labels = ((own[:, 0] - batch.targets["value"]) ** 2).sum() / 3
    assert_same(student, mean_of(LabelTerm(), student, teacher, "packed", Values()), to_labels)


def test_tag_outputs_count_at_targets_only() -> None:
    head = TaggerConfig(labels=LABELS)
    student, teacher = model_of(seed=0, head=head), model_of(seed=1, head=head)
    packed, padded = (mean_of(OutputTerm(), student, teacher, layout, Tags()) for layout in ("packed", "padded"))
    assert_same(student, packed, padded)


def test_attention_term_excludes_padding_but_not_low_scores() -> None:
    """The released code sets scores of at most -100 to 0 to exclude padding, and real ones with it."""
    student, teacher = model_of(seed=0), model_of(seed=1)
    with torch.no_grad():  # every score of the teacher's first layer becomes about -150
        mixer = teacher.encoder.blocks[0].mixer
        mixer.project.weight.mul_(0.01)
        mixer.project.bias[:16], mixer.project.bias[16:32] = 8.66 * 2, -8.66
    scores = [(p[0] @ p[1].T).min() / 16**0.5 for p in (projections(teacher, tokens, 0) for tokens in sentences())]
    assert min(scores) < -100
    expected = attention_loss(student, teacher, (0, 1, 2))
    assert expected > 100**2
    for layout in ("packed", "padded"):
        assert_same(student, mean_of(AttentionTerm(), student, teacher, layout), expected)
