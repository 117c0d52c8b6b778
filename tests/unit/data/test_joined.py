"""Cuts of joined documents: every token once, separators at borders, the same runs with and without crossing."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_documents import Documents, some_documents

import bertsmith
from bertsmith.data.batch import TokenBatch, packed
from bertsmith.data.corruption import MaskingConfig, corrupt
from bertsmith.data.joined import full_sentences, windows
from bertsmith.data.loader import BatchReader, SpecialTokens
from bertsmith.data.plan import Cursor, Plan, SequenceConfig
from bertsmith.data.sequences import SHORTEST, Sequences, chunks
from bertsmith.data.shards import TokenCorpus
from bertsmith.errors import InputError
from bertsmith.models.encoder import EncoderInputs
from bertsmith.objectives.causal_lm import next_tokens
from bertsmith.objectives.masked_lm import vocabulary_of
from bertsmith.text.tokenizer import Tokenizer

CUTS = {"windows": windows, "full_sentences": full_sentences}
LENGTHS = [16, 37, 128]


def covered(cut: Sequences) -> dict[int, list[tuple[int, int]]]:
    """The runs of each document, sorted."""
    runs: dict[int, list[tuple[int, int]]] = {}
    for document, start, stop in zip(cut.document.tolist(), cut.start.tolist(), cut.stop.tolist(), strict=True):
        runs.setdefault(document, []).append((start, stop))
    return {document: sorted(found) for document, found in runs.items()}


def runs_of(cut: Sequences) -> list[tuple[int, int, int]]:
    return list(zip(cut.document.tolist(), cut.start.tolist(), cut.stop.tolist(), strict=True))


def shuffled_documents(seed: int) -> tuple[Documents, np.ndarray]:
    return some_documents(50, seed), np.random.default_rng(seed).permutation(50)


@pytest.mark.parametrize("crosses", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", CUTS)
def test_every_token_is_in_one_sequence(name: str, length: int, crosses: bool) -> None:
    documents, order = shuffled_documents(1)
    cut = CUTS[name](documents, order, length, 0, 0, crosses_documents=crosses)
    assert cut.lengths.max() <= length
    assert len(set(cut.sample.tolist())) == len(cut)
    missing = 0
    found = covered(cut)
    for document, size in enumerate(documents.lengths.tolist()):
        runs = [(0, 0), *found.get(document, [])]
        assert all(stop == start for (_, stop), (start, _) in pairwise(runs))  # no gap, no overlap
        missing += size - runs[-1][1]
    assert missing < SHORTEST  # the rest of the stream


@pytest.mark.parametrize("length", LENGTHS)
def test_windows_have_the_length_but_for_borders_at_their_edges(length: int) -> None:
    documents, order = shuffled_documents(2)
    cut = windows(documents, order, length, 0, 0)
    shorter = length - cut.lengths[:-1]
    ends = set((np.cumsum(documents.lengths[order] + 1) - 1).tolist())  # positions of separators in the stream
    body = length - 2
    for index, missing in enumerate(shorter.tolist()):
        assert missing == (index * body in ends) + ((index + 1) * body - 1 in ends)
    assert shorter.sum() > 0 or length == 128


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", CUTS)
def test_breaks_are_the_documents_that_end_inside_a_sequence(name: str, length: int) -> None:
    documents, order = shuffled_documents(3)
    cut = CUTS[name](documents, order, length, 0, 0)
    is_last_run = np.append(np.diff(cut.owner) > 0, True)
    ends_here = cut.stop == documents.lengths[cut.document]
    assert cut.breaks.sum() == (ends_here & ~is_last_run).sum() > 0
    assert not cut.breaks[cut.offsets[:-1]].any()
    assert (cut.start[cut.breaks] == 0).all()
    assert (cut.lengths == np.bincount(cut.owner, cut.stop - cut.start + cut.breaks) + 2).all()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", CUTS)
def test_sequences_hold_the_same_runs_with_and_without_crossing(name: str, length: int) -> None:
    documents, order = shuffled_documents(4)
    joined, separate = (CUTS[name](documents, order, length, 0, 0, crosses_documents=value) for value in (True, False))
    assert runs_of(joined) == runs_of(separate)
    assert separate.breaks is None
    assert len(separate) == len(runs_of(separate))
    assert len(joined) < len(separate)


@pytest.mark.parametrize("name", CUTS)
def test_one_long_document_is_cut_as_chunks_without_a_shift(name: str) -> None:
    documents = Documents([[1000]])
    shifts = ((seed, chunks(documents, np.arange(1), 64, seed=seed, epoch=0)) for seed in range(100))
    expected = next(cut for _, cut in shifts if cut.stop[0] == 62)
    assert runs_of(CUTS[name](documents, np.arange(1), 64, 0, 0)) == runs_of(expected)


def test_full_sentences_end_with_sentences_unless_one_is_too_long() -> None:
    documents = Documents([[5, 9, 40, 3], [6, 6], [14, 2, 2]])
    cut = full_sentences(documents, np.arange(3), 18, 0, 0)  # 16 tokens of text
    assert runs_of(cut) == [(0, 0, 14), (0, 14, 30), (0, 30, 46), (0, 46, 57), (1, 0, 12), (2, 0, 16)]
    # 40 is cut in 16 + 16 + 8; 8 + 3, a separator and 6 would be 18; the last 2 tokens are too few
    assert cut.lengths.tolist() == [16, 18, 18, 13, 14, 18]


def test_full_sentences_are_as_many_as_fit() -> None:
    documents, order = shuffled_documents(5)
    cut = full_sentences(documents, order, 64, 0, 0)
    for index in range(len(cut) - 1):
        run = int(cut.offsets[index + 1])  # the first of the next sequence
        starts = documents.sentence_starts(int(cut.document[run]))
        first = int(starts[np.searchsorted(starts, cut.start[run], side="right")] - cut.start[run])
        border = int(cut.document[run] != cut.document[run - 1])
        assert cut.lengths[index] + border + first > 64


def test_order_of_documents_changes_with_the_epoch(corpus_folder: Path) -> None:
    config = SequenceConfig(length=32, micro_tokens=128, cut="windows")
    first, again = (Plan(TokenCorpus(corpus_folder), config, seed=3) for _ in range(2))
    epochs = [[runs_of(plan.window(epoch, 0)[1](0)) for plan in (first, again)] for epoch in (0, 1)]
    assert epochs[0][0] == epochs[0][1]
    assert epochs[0][0] != epochs[1][0]


def test_crossing_is_refused_for_cuts_of_single_documents() -> None:
    with pytest.raises(InputError, match="crosses_documents is false and cut 'chunks' never crosses documents"):
        SequenceConfig().changed(crosses_documents=False)


def first_batch(folder: Path, tokenizer: Tokenizer, **settings: object) -> tuple[Sequences, TokenBatch]:
    config = SequenceConfig(length=32, micro_tokens=256, **settings)
    corpus = TokenCorpus(folder)
    plan = next(Plan(corpus, config, 0).from_cursor(Cursor()))
    special = SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator)
    return plan.sequences, BatchReader(corpus, config, special, None)[plan].batch


def test_separators_between_documents_are_next_tokens_and_never_masked(corpus_folder: Path) -> None:
    tokenizer = Tokenizer.load(corpus_folder)
    sequences, batch = first_batch(corpus_folder, tokenizer, cut="windows")
    separators = int(sequences.breaks.sum()) + len(sequences)
    assert int((next_tokens(batch) == tokenizer.separator).sum()) == separators > len(sequences)
    assert batch.types is None
    masked = corrupt(batch, 0, MaskingConfig(rate=0.9), vocabulary_of(tokenizer))
    assert not (masked.targets == tokenizer.separator).any()
    assert int((masked.tokens == tokenizer.separator).sum()) >= separators


def test_documents_do_not_see_each_other_without_crossing(corpus_folder: Path) -> None:
    tokenizer = Tokenizer.load(corpus_folder)
    model = bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=tokenizer.size, width=32, heads=2), seed=0)
    model = model.double().eval()
    corpus = TokenCorpus(corpus_folder)
    sequences, batch = first_batch(corpus_folder, tokenizer, cut="windows", crosses_documents=False)
    hidden = model.run(EncoderInputs(batch.tokens, batch.layout, None)).last
    rows = batch.layout.pad(hidden)[0]
    for index, (document, start, stop) in enumerate(runs_of(sequences)):
        text = corpus.read(document, start, stop)
        tokens, layout = packed([np.array([tokenizer.start, *text, tokenizer.separator])], 0)
        alone = model.run(EncoderInputs(tokens, layout, None)).last
        torch.testing.assert_close(rows[index, : len(tokens)], alone, rtol=1e-10, atol=1e-10)
