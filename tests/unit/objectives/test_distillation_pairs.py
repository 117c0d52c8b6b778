"""Distillation terms for all families and layouts; incompatible pairs; layer maps."""

import pytest
import torch
from pairs_of_models import assert_same, mean_of, model_of
from small_tasks import LENGTHS, make_batch

from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.objectives.distillation import TERMS
from bertsmith.objectives.distillation.base import counterparts
from bertsmith.objectives.distillation.terms import (
    AttentionTerm,
    CosineTerm,
    HiddenStateTerm,
    PatienceTerm,
    RelationTerm,
)

FAMILIES = [
    "bert-tiny",
    "deberta-v3-small",
    "deberta-base",
    "convbert-small",
    "modern-base",
    "universal-base",
    "albert-base",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_map_is_the_softmax_of_the_scores(name: str) -> None:
    model = model_of(name, seed=0).eval()
    batch = make_batch("padded")
    encoded = model.run(EncoderInputs(batch.tokens, batch.layout), Want(task=True, all_hidden_states=True))
    maps = model.encoder.run(EncoderInputs(batch.tokens, batch.layout), Want(maps=True)).maps
    is_real = batch.layout.is_token
    for index, found in enumerate(maps):
        rows = encoded.attention_scores(index).softmax(-1).transpose(1, 2)[is_real]
        torch.testing.assert_close(rows, found["attention"].transpose(1, 2)[is_real], rtol=0, atol=1e-10)
        assert encoded.attention_scores(index).transpose(1, 2)[~is_real].isneginf().all()


CASES = [(name, kind) for name in (*FAMILIES, "performer-small") for kind in sorted(TERMS)]
CASES.remove(("performer-small", "attention"))  # it has no attention scores, which another test covers


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_packed_equals_padded_for_every_family(name: str, kind: str) -> None:
    student, teacher = model_of(name, seed=0), model_of(name, seed=1)
    packed, padded = (mean_of(TERMS[kind](), student, teacher, layout) for layout in ("packed", "padded"))
    assert packed > 0
    assert_same(student, packed, padded)


@pytest.mark.parametrize("kind", sorted(set(TERMS) - {"labels", "outputs"}))
def test_student_equal_to_its_teacher_has_no_loss(kind: str) -> None:
    student = model_of(seed=0)
    torch.testing.assert_close(mean_of(TERMS[kind](), student, student, "packed").item(), 0.0, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["hidden_states", "cosine", "patience"])
def test_pre_norm_states_are_compared_after_the_final_norm(kind: str) -> None:
    student, teacher = model_of("disentangled-small", seed=0), model_of("disentangled-small", seed=0)
    with torch.no_grad():  # twice all that is added to the stream: the same network, since every reader has a norm
        for name, parameter in student.named_parameters():
            parameter.mul_(2.0 if any(part in name for part in ("widen.", "mixer.output.", "contract.")) else 1.0)
    torch.testing.assert_close(mean_of(TERMS[kind](), student, teacher, "packed").item(), 0.0, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", sorted(set(TERMS) - {"labels"}))
def test_teacher_gets_no_gradient(kind: str) -> None:
    student, teacher = model_of(seed=0), model_of(seed=1)
    mean_of(TERMS[kind](), student, teacher, "packed").backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_state_losses_give_every_weight_a_gradient() -> None:
    student, teacher = model_of(seed=0), model_of(seed=1)
    mean_of(AttentionTerm(), student, teacher, "packed").backward()
    assert all(p.grad is not None for n, p in student.named_parameters() if not n.startswith("encoder.embedding.type"))
    assert float(student.heads["classifier"].score.weight.grad.abs().max()) == 0.0


def test_projections_of_a_subnet_layer() -> None:
    model, batch = model_of(seed=0, heads=4).eval(), make_batch("packed")
    cut = model.run(
        EncoderInputs(batch.tokens, batch.layout, subnet=Subnet(width=0.5)), Want(task=True, all_hidden_states=True)
    )
    for part in cut.projections(0):
        assert part.shape == (sum(LENGTHS), 2, 4)
    assert cut.attention_scores(1).shape == (3, 2, 7, 7)


def test_incompatible_pairs_raise() -> None:
    student = model_of(seed=0)
    with pytest.raises(
        InputError, match="layer 1 of the student has 2 heads and the teacher's 4; the term 'attention'"
    ):
        mean_of(AttentionTerm(), student, model_of(seed=1, heads=4), "packed")
    with pytest.raises(InputError, match=r"FavorAttention has no attention scores; allowed: .*full, disentangled"):
        mean_of(AttentionTerm(), student, model_of("performer-small", seed=1), "packed")
    with pytest.raises(InputError, match="DynamicConv has no query, key and value"):
        mean_of(RelationTerm(), student, model_of("dynamicconv-base", seed=1), "packed")
    with pytest.raises(InputError, match=r"relation_heads is 5; allowed: a divisor of 16, the width of the student's"):
        mean_of(RelationTerm(relation_heads=5), student, model_of(seed=1), "packed")
    with pytest.raises(InputError, match="states are 16 wide and the teacher's 24"):
        mean_of(HiddenStateTerm(), student, model_of(seed=1, width=24), "packed")
    with pytest.raises(InputError, match=r"layers of a term has 3; allowed: 0 \(the embedding\) to 2"):
        mean_of(CosineTerm(layers=(3,)), student, model_of(seed=1), "packed")
    with pytest.raises(InputError, match="teacher_layer is 3; allowed: 1 to 2, the layers of the teacher"):
        mean_of(RelationTerm(teacher_layer=3), student, model_of(seed=1), "packed")
    with pytest.raises(InputError, match="needs a layer below the student's last"):
        mean_of(PatienceTerm(), model_of(seed=0, layers=1), model_of(seed=1), "packed")
    with pytest.raises(InputError, match=r"relations is .*; allowed: each once"):
        RelationTerm.parse({"relations": ["key_key", "key_key"]})


@pytest.mark.parametrize(
    ("layer_map", "student", "teacher", "expected"),
    [
        ("uniform", 4, 12, (0, 3, 6, 9, 12)),  # TinyBERT-4
        ("uniform", 6, 12, (0, 2, 4, 6, 8, 10, 12)),  # TinyBERT-6
        ("uniform", 5, 12, (0, 2, 4, 7, 9, 12)),
        ("skip", 6, 12, (0, 2, 4, 6, 8, 10, 12)),  # PKD-Skip; outputs cover the last one
        ("skip", 3, 12, (0, 4, 8, 12)),
        ("skip", 5, 12, (0, 2, 4, 6, 8, 12)),
        ("last", 6, 12, (0, 7, 8, 9, 10, 11, 12)),  # PKD-Last
        ("last", 3, 12, (0, 10, 11, 12)),
        ((2, 2, 9), 3, 12, (0, 2, 2, 9)),
        *((rule, 3, 3, (0, 1, 2, 3)) for rule in ("uniform", "skip", "last")),
    ],
)
def test_layer_maps_match_the_papers(
    layer_map: str | tuple[int, ...], student: int, teacher: int, expected: tuple[int, ...]
) -> None:
    assert counterparts(layer_map, student, teacher) == expected


def test_invalid_layer_maps_raise() -> None:
    with pytest.raises(InputError, match="student has 6 layers and its teacher 4"):
        counterparts("uniform", 6, 4)
    with pytest.raises(InputError, match=r"distillation.layers is \[1, 13\]; allowed: a number from 1 to 12 for each"):
        counterparts((1, 13), 2, 12)
    with pytest.raises(InputError, match="for each of the student's 3 layers"):
        counterparts((1, 2), 3, 12)
