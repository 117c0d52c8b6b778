"""Contract of next-token objectives, for all layouts and a plain, a halting and a mask-decoder model."""

from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith.data.batch import TokenBatch
from bertsmith.data.loader import BatchReader, SpecialTokens
from bertsmith.data.plan import Cursor, Plan, SequenceConfig
from bertsmith.data.shards import TokenCorpus
from bertsmith.errors import InputError
from bertsmith.models.heads import HEADS
from bertsmith.models.model import Model
from bertsmith.objectives.base import Objective
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.pretraining import OBJECTIVES

KINDS = ["causal_lm", "masked_and_causal"]
# a plain model, one whose positions halt, one with a mask decoder
MODELS = {"bert-tiny": {}, "universal-base": {"layers": 3}, "deberta-base": {"span": 32}}
CASES = [(kind, name) for kind in KINDS for name in MODELS if (kind, name) != ("masked_and_causal", "universal-base")]
SIZE = {"layers": 1, "width": 32, "heads": 2, "dropout": 0.0, "max_length": 32}


def build_case(kind: str, name: str, tokenizer: Tokenizer) -> tuple[Model, Objective]:
    base = bertsmith.preset(name, vocabulary=tokenizer.size, **{**SIZE, **MODELS[name]})
    objective = OBJECTIVES[kind]()
    heads = tuple(head for head in base.heads if head.kind == "mask_decoder")
    heads += tuple(HEADS[head]() for head in objective.heads)
    config = objective.network(base.changed(heads=heads))
    return bertsmith.build(config, seed=0), objective.build(tokenizer, base.encoder.ponder_weight)


def special(tokenizer: Tokenizer) -> SpecialTokens:
    return SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator)


def first_batch(folder: Path, tokenizer: Tokenizer, layout: str, cut: str = "chunks") -> TokenBatch:
    sequences = SequenceConfig(length=32, micro_tokens=512, cut=cut, layout=layout)
    corpus = TokenCorpus(folder)
    reader = BatchReader(corpus, sequences, special(tokenizer), None)
    return reader[next(Plan(corpus, sequences, 0).from_cursor(Cursor()))].batch


def loss_of(objective: Objective, model: Model, prepared: object) -> torch.Tensor:
    counts, sums = objective.counts(prepared), objective(model, prepared)
    return sum(term.weight * sums[name].loss / counts[name] for name, term in objective.terms.items())


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_causal_objective_has_gradients_and_counts(kind: str, name: str, layout: str, corpus_folder: Path) -> None:
    tokenizer = Tokenizer.load(corpus_folder)
    model, objective = build_case(kind, name, tokenizer)
    batch = first_batch(corpus_folder, tokenizer, layout, "sentence_pairs" if name == "bert-tiny" else "chunks")
    prepared = objective.prepare(batch, 5)
    counts, sums = objective.counts(prepared), objective(model, prepared)
    assert counts.keys() == sums.keys() == objective.terms.keys()
    assert ("ponder" in objective.terms) == (name == "universal-base")
    # every token except the first of its sequence is predicted
    firsts = int((batch.layout.positions(batch.tokens) == 0)[batch.is_real].sum())
    assert int(counts["next_token"]) == batch.real_tokens - firsts
    for term in objective.terms:
        assert sums[term].metrics.keys() == set(objective.terms[term].metrics)
        assert all(0 <= int(part) <= int(whole) for part, whole in sums[term].metrics.values())
    again = objective(model, objective.prepare(batch, 5))
    assert all(torch.equal(sums[term].loss, again[term].loss) for term in objective.terms)

    first = loss_of(objective, model, prepared)
    first.backward()
    assert all(parameter.grad is not None for parameter in model.parameters()), "a part that is never trained"
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(objective, model, prepared)
        loss.backward()
        optimizer.step()
    assert loss < 0.8 * first


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_loss_is_the_same_packed_padded_and_alone(kind: str, name: str, corpus_folder: Path) -> None:
    """The sum of losses does not depend on the size and layout of micro-batches."""
    tokenizer = Tokenizer.load(corpus_folder)
    model, objective = build_case(kind, name, tokenizer)
    model, corpus = model.double(), TokenCorpus(corpus_folder, "held_out")
    found = {}
    for layout, micro_tokens in (("padded", 32), ("padded", 256), ("packed", 32), ("packed", 256)):
        sequences = SequenceConfig(length=32, micro_tokens=micro_tokens, layout=layout)
        reader = BatchReader(corpus, sequences, special(tokenizer), None)
        totals = dict.fromkeys([f"{name} {what}" for name in objective.terms for what in ("loss", "count")], 0.0)
        for plan in Plan(corpus, sequences, 3).one_epoch():
            prepared = objective.prepare(reader[plan].batch, 1)
            counts, sums = objective.counts(prepared), objective(model, prepared)
            for term in objective.terms:
                totals[f"{term} loss"] += sums[term].loss.item()
                totals[f"{term} count"] += int(counts[term])
        found[layout, micro_tokens] = totals
    alone, *others = found.values()
    assert alone["next_token count"] > 100
    for other in others:
        assert other == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_config_round_trips_and_flops_are_positive(kind: str) -> None:
    config = OBJECTIVES[kind]()
    assert type(config).parse(config.plain()) == config
    scored = {"causal_lm": 1.0, "masked_and_causal": 1.15}[kind]
    assert config.passes * config.targets_per_token == pytest.approx(scored)


def test_unsupported_models_raise(corpus_folder: Path) -> None:
    tokenizer, both = Tokenizer.load(corpus_folder), OBJECTIVES["masked_and_causal"]()
    halting = bertsmith.preset("universal-base", layers=1)
    for refused in (lambda: both.network(halting), lambda: both.build(tokenizer, 0.01)):
        with pytest.raises(InputError, match="halting is given; allowed with masked_and_causal: an encoder without"):
            refused()
    with pytest.raises(InputError, match=r"mixer\.is_causal is true; allowed with masked_and_causal: false"):
        both.network(bertsmith.preset("bert-tiny").causal())
