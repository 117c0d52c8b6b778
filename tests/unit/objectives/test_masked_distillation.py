"""Pre-training with a teacher: the formula in float64, equal masks for both, layouts, invalid settings."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pairs_of_models import assert_same
from torch import Tensor

import bertsmith
from bertsmith.answers.sequences import IGNORED
from bertsmith.data.batch import TokenBatch
from bertsmith.data.layout import SequenceLayout
from bertsmith.data.loader import BatchReader, SpecialTokens
from bertsmith.data.plan import Plan, SequenceConfig
from bertsmith.data.shards import TokenCorpus
from bertsmith.errors import InputError
from bertsmith.models.attach_heads import with_heads
from bertsmith.models.model import Model
from bertsmith.objectives.distillation.base import DistillationTerm
from bertsmith.objectives.distillation.masked import MaskedDistillation
from bertsmith.objectives.distillation.terms import (
    AttentionTerm,
    CosineTerm,
    HiddenStateTerm,
    LabelTerm,
    OutputTerm,
    PatienceTerm,
    RelationTerm,
)
from bertsmith.objectives.masked_lm import MaskedLM, MaskedLMConfig
from bertsmith.recipes import FILES
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.tokenizer import Tokenizer

DISTILBERT = (OutputTerm(weight=5.0, temperature=2.0), LabelTerm(weight=2.0), CosineTerm())
OTHERS = (HiddenStateTerm(), PatienceTerm(), AttentionTerm(), RelationTerm())


def network(corpus: Path, seed: int, name: str = "bert-tiny", layers: int = 2, rows: int = 0) -> Model:
    sizes = {"width": 16, "layers": layers, "heads": 4, "dropout": 0.0, "max_length": 32, "init_std": 0.3}
    config = bertsmith.preset(name, vocabulary=Tokenizer.load(corpus).size + rows, **sizes)
    return bertsmith.build(with_heads(config, ("masked_tokens",)), seed=seed).double()


def batch_of(corpus: Path, layout: str) -> TokenBatch:
    """Return the same text in either layout; the packed batch ends in padding."""
    tokenizer = Tokenizer.load(corpus)
    special = SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator)
    config, text = SequenceConfig(length=32, micro_tokens=128, layout="padded"), TokenCorpus(corpus, "train")
    rows = BatchReader(text, config, special, None)[next(Plan(text, config, 0).one_epoch())].batch
    if layout == "padded":
        return rows
    tokens = torch.cat([rows.tokens[rows.layout.is_token], torch.full((5,), tokenizer.pad)])
    starts = torch.tensor([0, *rows.layout.lengths().tolist(), 5]).cumsum(0).int()
    sample = torch.cat([rows.sample, torch.zeros_like(rows.sample[:1])])
    return replace(rows, tokens=tokens, layout=SequenceLayout.packed(starts, 32), sample=sample)


def objective(corpus: Path, teacher: Model, terms: tuple[DistillationTerm, ...]) -> MaskedDistillation:
    masked = MaskedLMConfig().build(Tokenizer.load(corpus))
    return MaskedDistillation.of(masked, terms, teacher, "uniform")


def means(distillation: MaskedDistillation, student: Model, batch: TokenBatch) -> dict[str, Tensor]:
    prepared = distillation.prepare(batch, 3)
    (part,) = distillation.parts(prepared)
    sums, counts = distillation(student, part), distillation.counts(prepared)
    return {name: sums[name].loss / counts[name] for name in distillation.terms}


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_output_loss_counts_masked_positions_only(corpus_folder: Path, layout: str) -> None:
    student, teacher = network(corpus_folder, 0), network(corpus_folder, 1, layers=4)
    batch, distillation = batch_of(corpus_folder, layout), objective(corpus_folder, teacher, DISTILBERT)
    corrupted = distillation.masked.prepare(batch, 3).corrupted
    is_target = corrupted.targets != IGNORED
    positions, right = corrupted.positions[is_target], corrupted.targets[is_target]
    soft = hard = cosine = torch.zeros((), dtype=torch.float64)
    states, scores = [], []
    for model in (student, teacher):
        last = model.encoder(corrupted.tokens, batch.layout, batch.types).flatten(0, -2)
        states.append(last)
        scores.append(model.head("masked_tokens")(last[positions], model.token_table))
    for mine, theirs, token in zip(*scores, right.tolist(), strict=True):
        shares, logs = (theirs.detach() / 2).softmax(-1), (mine / 2).log_softmax(-1)
        soft = soft - 4 * (shares * logs).sum() / len(right)
        hard = hard - mine.log_softmax(-1)[token] / len(right)
    real = batch.is_real.flatten()
    for mine, theirs in zip(states[0][real], states[1][real].detach(), strict=True):
        cosine = cosine + (1 - mine @ theirs / mine.norm() / theirs.norm()) / int(real.sum())
    found = means(distillation, student, batch)
    for name, expected in (("outputs", soft), ("masked_tokens", hard), ("cosine", cosine)):
        assert_same(student, found[name], expected)
    assert {name: term.weight for name, term in distillation.terms.items()} == {
        "masked_tokens": 2,
        "outputs": 5,
        "cosine": 1,
    }


@pytest.mark.parametrize("name", ["bert-tiny", "deberta-base"])
def test_packed_equals_padded_with_padding_sequences(corpus_folder: Path, name: str) -> None:
    """The second family predicts tokens with its mask decoder."""
    student, teacher = (network(corpus_folder, seed, name) for seed in (0, 1))
    distillation = objective(corpus_folder, teacher, (*DISTILBERT, *OTHERS))
    packed, padded = (batch_of(corpus_folder, layout) for layout in ("packed", "padded"))
    assert packed.real_tokens == padded.real_tokens
    assert packed.tokens.numel() > packed.real_tokens
    found, others = means(distillation, student, packed), means(distillation, student, padded)
    for term in found:
        assert_same(student, found[term], others[term])


def test_token_tables_may_have_extra_rows(corpus_folder: Path) -> None:
    student, teacher = network(corpus_folder, 0), network(corpus_folder, 1, rows=7)
    batch = batch_of(corpus_folder, "packed")
    assert means(objective(corpus_folder, teacher, DISTILBERT), student, batch)["outputs"] > 0


def test_without_labels_the_head_is_logged_but_not_trained(corpus_folder: Path) -> None:
    student, teacher = network(corpus_folder, 0), network(corpus_folder, 1)
    del teacher.heads["masked_tokens"]  # its scores are not needed
    distillation = objective(corpus_folder, teacher, OTHERS)
    assert distillation.terms["masked_tokens"].weight == 0
    found = means(distillation, student, batch_of(corpus_folder, "packed"))
    sum(distillation.terms[name].weight * loss for name, loss in found.items()).backward()
    assert float(student.heads["masked_tokens"].transform.weight.grad.abs().max()) == 0.0
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert isinstance(distillation.for_evaluation(), MaskedLM)


def test_invalid_inputs_raise(corpus_folder: Path, tmp_path: Path) -> None:
    teacher = network(corpus_folder, 1).float()
    teacher.tokenizer = Tokenizer.load(corpus_folder)
    bertsmith.save(teacher, tmp_path / "teacher")
    del teacher.heads["masked_tokens"]
    teacher.config = teacher.config.changed(heads=())
    bertsmith.save(teacher, tmp_path / "headless")
    teacher.tokenizer = learn_tokenizer(["other words than those of the stories"], "wordpiece", 60, progress=False)
    bertsmith.save(teacher, tmp_path / "other")
    small = ["sequences.length=32", "sequences.micro_tokens=256", "batch.tokens=512", "run.steps=2"]
    small += ["model.preset=bert-tiny", "model.overrides={width=16,layers=2,heads=4,max_length=32}"]
    recipe = FILES["bert-tiny-cpu"]
    for changes, words in (
        (["distillation.teacher=headless"], "has no 'masked_tokens' head"),
        (["distillation.teacher=other"], "the student's tokenizer differs from the teacher's"),
        (["distillation.teacher=teacher", "objective.kind=causal_lm"], "distillation is given with objective.kind"),
        (
            ["distillation.teacher=teacher", "run.compile=whole"],
            "run.compile is 'whole'; allowed with it: auto, off, on",
        ),
        (["distillation.teacher=teacher", "model.subnet.depth=0.5"], "subnet takes a part of the model of a folder"),
        (["distillation.teacher=teacher", "model.overrides.layers=3"], "student has 3 layers and its teacher 2"),
    ):
        changes[0] = changes[0].replace("teacher=", f"teacher={tmp_path}/")
        with pytest.raises(InputError, match=words):
            bertsmith.pretrain(recipe, data=corpus_folder, out=tmp_path / "run", set=[*small, *changes], device="cpu")
    assert not (tmp_path / "run").exists()
