"""What every objective must keep, over the table of objectives."""

from itertools import islice
from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith.batches.loader import BatchReader, SpecialTokens
from bertsmith.batches.plan import Cursor, Plan, SequenceConfig
from bertsmith.batches.shards import TokenCorpus
from bertsmith.errors import InputError
from bertsmith.models.heads import HEADS
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.pretraining import OBJECTIVES

CASES = [
    (kind, changes, layout)
    for kind in OBJECTIVES
    for changes in ({}, {"next_sentence": True})
    for layout in ("packed", "padded")
]
# a plain model, one whose positions halt, one with a mask decoder
MODELS = {"bert-tiny": 1, "universal-base": 3, "deberta-base": 1}
SIZE = {"width": 32, "heads": 2, "dropout": 0.0, "longest": 32}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("kind", "changes", "layout"), CASES)
def test_objective_learns_and_counts(kind: str, changes: dict, layout: str, name: str, corpus_folder: Path) -> None:
    tokenizer = Tokenizer.load(corpus_folder)
    config = OBJECTIVES[kind](**changes)
    base = bertsmith.preset(name, vocabulary=tokenizer.size, layers=MODELS[name], **SIZE)
    objective = config.build(tokenizer, base.encoder.ponder_weight)
    assert ("ponder" in objective.terms) == (name == "universal-base")
    heads = tuple(head for head in base.heads if head.kind == "mask_decoder")
    heads += tuple(HEADS[head]() for head in config.heads)
    model = bertsmith.build(base.model_copy(update={"heads": heads}), seed=0)
    sequences = SequenceConfig(length=32, micro_tokens=512, cut="sentence_pairs", layout=layout)
    corpus = TokenCorpus(corpus_folder)
    reader = BatchReader(corpus, sequences, SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator), None)
    batch = reader[next(Plan(corpus, sequences, 0).from_cursor(Cursor()))].batch

    prepared = objective.prepare(batch, 5)
    counts, sums = objective.counts(prepared), objective(model, prepared)
    assert counts.keys() == sums.keys() == set(objective.terms)
    for term in objective.terms:
        assert int(counts[term]) > 0
        assert sums[term].figures.keys() == set(objective.terms[term].figures)
        assert all(0 <= int(part) <= int(whole) for part, whole in sums[term].figures.values())
    again = objective(model, objective.prepare(batch, 5))
    assert all(torch.equal(sums[term].loss, again[term].loss) for term in objective.terms)
    other = objective(model, objective.prepare(batch, 6))
    assert any(not torch.equal(sums[term].loss, other[term].loss) for term in objective.terms)

    total = sum(sums[term].loss / counts[term] for term in objective.terms)
    total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters()), "a head that is never trained"
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(30):
        optimizer.zero_grad()
        loss = objective(model, prepared)["masked_tokens"].loss / counts["masked_tokens"]
        loss.backward()
        optimizer.step()
    assert loss < 0.6 * sums["masked_tokens"].loss / counts["masked_tokens"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_the_loss_does_not_depend_on_the_packing(layout: str, name: str, corpus_folder: Path) -> None:
    """The same sequences in other micro-batches have the same sum of losses."""
    tokenizer = Tokenizer.load(corpus_folder)
    base = bertsmith.preset(name, vocabulary=tokenizer.size, layers=2, **SIZE)
    objective = OBJECTIVES["masked_lm"]().build(tokenizer, base.encoder.ponder_weight)
    model = bertsmith.build(base, seed=0).double()
    corpus = TokenCorpus(corpus_folder)
    special = SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator)
    sums, counts = [], []
    for micro_tokens in (128, 1024):
        sequences = SequenceConfig(length=32, micro_tokens=micro_tokens, layout=layout)
        reader = BatchReader(corpus, sequences, special, None)
        loss, count = 0.0, 0
        for plan in islice(Plan(corpus, sequences, 3).one_epoch(), None):
            prepared = objective.prepare(reader[plan].batch, 1)
            loss += sum(part.loss.item() for part in objective(model, prepared).values())
            count += sum(int(part) for part in objective.counts(prepared).values())
        sums.append(loss)
        counts.append(count)
    assert counts[0] == counts[1]
    assert sums[0] == pytest.approx(sums[1], rel=1e-9)


def test_a_ponder_weight_and_a_halting_encoder_belong_together(corpus_folder: Path) -> None:
    tokenizer = Tokenizer.load(corpus_folder)
    corpus, sequences = TokenCorpus(corpus_folder), SequenceConfig(length=32, micro_tokens=128)
    special = SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator)
    batch = BatchReader(corpus, sequences, special, None)[next(Plan(corpus, sequences, 0).one_epoch())].batch
    for name, weight in (("bert-tiny", 0.01), ("universal-base", None)):
        objective = OBJECTIVES["masked_lm"]().build(tokenizer, weight)
        model = bertsmith.build(bertsmith.preset(name, vocabulary=tokenizer.size, layers=1, **SIZE))
        with pytest.raises(InputError, match="a ponder weight was given to the objective or a halting encoder"):
            objective(model, objective.prepare(batch, 0))
