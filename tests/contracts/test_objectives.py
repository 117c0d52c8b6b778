"""Contract of objectives, for every objective of the table."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from test_causal_objectives import KINDS as CAUSAL

from bertsmith.checkpoint.source import GeneratorSource, ModelSource
from bertsmith.data.batch import TokenBatch
from bertsmith.data.loader import BatchReader, SpecialTokens
from bertsmith.data.plan import Plan, SequenceConfig
from bertsmith.data.shards import TokenCorpus
from bertsmith.errors import InputError
from bertsmith.models.model import Model
from bertsmith.models.published import overridable
from bertsmith.objectives.base import Objective
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.pretraining import OBJECTIVES
from bertsmith.training.starting_model import pretraining_model

SIZE = {"width": 32, "heads": 4, "dropout": 0.0, "max_length": 32, "embedding_width": 16, "features": 16, "span": 8}


@dataclass(frozen=True)
class Case:
    """An objective, and the networks it is tested with, by number of layers."""

    kind: str
    models: dict[str, int]
    changes: dict[str, Any] = field(default_factory=dict)
    generator: GeneratorSource | None = None


# a plain model, one whose positions halt, one with a mask decoder
_MASKED = {"bert-tiny": 1, "universal-base": 3, "deberta-base": 1}
_DETECTING = {"bert-tiny": 1, "convbert-small": 1, "performer-small": 1}
CASES = {
    "masked_lm": Case("masked_lm", _MASKED),
    "masked_lm with pairs": Case("masked_lm", _MASKED, {"next_sentence": True}),
    "replaced_tokens": Case("replaced_tokens", _DETECTING, generator=GeneratorSource(width=0.5)),
    "replaced_tokens disentangled": Case(
        "replaced_tokens", {"deberta-v3-small": 1}, generator=GeneratorSource(sharing="gradient_disentangled")
    ),
}
PAIRS = [(case, name) for case in CASES for name in CASES[case].models]
every_layout = pytest.mark.parametrize("layout", ["packed", "padded"])
every_pair = pytest.mark.parametrize(("case", "name"), PAIRS)


def make(case: Case, name: str, corpus: Path) -> tuple[Model, Objective[TokenBatch, Any]]:
    """Build the network and its objective, as a run does."""
    tokenizer, config = Tokenizer.load(corpus), OBJECTIVES[case.kind](**case.changes)
    sizes = {key: value for key, value in SIZE.items() if key in overridable(name)}
    choice = ModelSource(preset=name, overrides={**sizes, "layers": case.models[name]})
    model, _ = pretraining_model(choice, case.generator, config.heads, tokenizer.size, tokenizer, seed=0)
    return model, config.build(tokenizer, model.config.encoder.ponder_weight)


def batches(corpus_folder: Path, seed: int = 0, **settings: Any) -> Iterator[TokenBatch]:
    """One epoch of the corpus."""
    tokenizer, corpus = Tokenizer.load(corpus_folder), TokenCorpus(corpus_folder)
    sequences = SequenceConfig(length=32, **settings)
    special = SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator)
    reader = BatchReader(corpus, sequences, special, None)
    return (reader[plan].batch for plan in Plan(corpus, sequences, seed).one_epoch())


def test_every_objective_has_a_case() -> None:
    # next-token objectives are tested in test_causal_objectives.py
    assert {case.kind for case in CASES.values()} | {*CAUSAL} == set(OBJECTIVES)


@every_layout
@every_pair
def test_objective_has_gradients_and_counts(case: str, name: str, layout: str, corpus_folder: Path) -> None:
    model, objective = make(CASES[case], name, corpus_folder)
    assert ("ponder" in objective.terms) == (name == "universal-base")
    batch = next(batches(corpus_folder, micro_tokens=512, cut="sentence_pairs", layout=layout))

    prepared = objective.prepare(batch, 5)
    counts, sums = objective.counts(prepared), objective(model, prepared)
    assert counts.keys() == sums.keys() == set(objective.terms)
    for term in objective.terms:
        assert int(counts[term]) > 0
        assert sums[term].metrics.keys() == set(objective.terms[term].metrics)
        assert all(0 <= int(part) <= int(whole) for part, whole in sums[term].metrics.values())
    again = objective(model, objective.prepare(batch, 5))
    assert all(torch.equal(sums[term].loss, again[term].loss) for term in objective.terms)
    other = objective(model, objective.prepare(batch, 6))
    assert any(not torch.equal(sums[term].loss, other[term].loss) for term in objective.terms)

    total(objective, model, prepared).backward()
    assert all(parameter.grad is not None for parameter in model.parameters()), "a head that is never trained"
    portions = [id(parameter) for portion in objective.portions(model) for parameter in portion.parameters]
    assert sorted(portions) == sorted(map(id, model.parameters()))
    first, guessing = total(objective, model, prepared), OBJECTIVES[CASES[case].kind]().token_term
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(30):
        optimizer.zero_grad()
        loss = total(objective, model, prepared)
        loss.backward()
        optimizer.step()
    assert objective(model, prepared)[guessing].loss < 0.75 * sums[guessing].loss
    assert loss < 0.7 * first


def total(objective: Objective[TokenBatch, Any], model: Model, prepared: Any) -> torch.Tensor:
    counts, sums = objective.counts(prepared), objective(model, prepared)
    return sum(term.weight * sums[name].loss / counts[name] for name, term in objective.terms.items())


@pytest.mark.parametrize("layout", ["packed", pytest.param("padded", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("case", "name"), [pair for pair in PAIRS if pair[0] != "masked_lm with pairs"])
def test_loss_does_not_depend_on_packing(case: str, name: str, layout: str, corpus_folder: Path) -> None:
    """The same sequences in other micro-batches have the same sum of losses and the same metrics."""
    model, objective = make(CASES[case], name, corpus_folder)
    model.double()
    found = []
    for micro_tokens in (128, 1024):
        sums: dict[str, float] = {}
        settings = {"micro_tokens": micro_tokens, "layout": layout, "cut": "sentence_pairs"}
        for batch in batches(corpus_folder, seed=3, **settings):
            prepared = objective.prepare(batch, 1)
            for term, count in objective.counts(prepared).items():
                sums[f"{term} count"] = sums.get(f"{term} count", 0) + int(count)
            for term, part in objective(model, prepared).items():
                sums[term] = sums.get(term, 0.0) + part.loss.item()
                for figure, share in part.metrics.items():
                    sums[f"{term} {figure}"] = sums.get(f"{term} {figure}", 0) + int(share.part)
        found.append(sums)
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_ponder_weight_requires_a_halting_encoder(corpus_folder: Path) -> None:
    batch = next(batches(corpus_folder, micro_tokens=128))
    for name, weight in (("bert-tiny", 0.01), ("universal-base", None)):
        model, _ = make(CASES["masked_lm"], name, corpus_folder)
        objective = OBJECTIVES["masked_lm"]().build(Tokenizer.load(corpus_folder), weight)
        with pytest.raises(InputError, match="only one of objective"):
            objective(model, objective.prepare(batch, 0))


def test_jacobian_weight_requires_an_equilibrium(corpus_folder: Path) -> None:
    batch = next(batches(corpus_folder, micro_tokens=128))
    model, _ = make(CASES["masked_lm"], "bert-tiny", corpus_folder)
    objective = OBJECTIVES["masked_lm"]().build(Tokenizer.load(corpus_folder), jacobian_weight=0.0)
    with pytest.raises(InputError, match=r"only one of objective \(jacobian_weight\)"):
        objective(model, objective.prepare(batch, 0))


def test_replaced_tokens_rejects_unsupported_models(corpus_folder: Path) -> None:
    case, tokenizer = CASES["replaced_tokens"], Tokenizer.load(corpus_folder)
    with pytest.raises(InputError, match=r"encoder.universal.halting is given; allowed with replaced_tokens"):
        make(Case(case.kind, {"universal-base": 2}, generator=case.generator), "universal-base", corpus_folder)
    with pytest.raises(InputError, match=r"encoder.equilibrium is given; allowed with replaced_tokens"):
        OBJECTIVES[case.kind]().build(tokenizer, jacobian_weight=0.0)
    model, _ = make(CASES["masked_lm"], "bert-tiny", corpus_folder)
    objective = OBJECTIVES["replaced_tokens"]().build(tokenizer)
    with pytest.raises(InputError, match="this model has no generator; replaced_tokens needs one"):
        objective(model, objective.prepare(next(batches(corpus_folder, micro_tokens=128)), 0))
