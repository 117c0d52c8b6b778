"""The order of the data: complete, reproducible, the same for any number of processes and workers."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_documents import Documents, some_documents

from bertsmith.data.loader import BatchReader, SpecialTokens, load_batches
from bertsmith.data.plan import Cursor, Plan, SequenceConfig, pack
from bertsmith.data.sequences import SHORTEST, chunks, sentence_pairs
from bertsmith.data.shards import TokenCorpus
from bertsmith.errors import InputError


@pytest.mark.parametrize("length", [16, 37, 128])
def test_chunks_cover_each_document_once(length: int) -> None:
    documents = some_documents(50, seed=1)
    for epoch in range(3):
        cut = chunks(documents, np.arange(50), length, seed=3, epoch=epoch)
        assert cut.lengths.max() <= length
        assert len(set(cut.sample.tolist())) == len(cut.sample)
        for document in range(50):
            mine = cut.document == document
            covered = np.concatenate([np.arange(a, b) for a, b in zip(cut.start[mine], cut.stop[mine], strict=True)])
            assert len(covered) == len(set(covered.tolist()))
            # at most a short chunk is missing at each end
            assert documents.lengths[document] - len(covered) < 2 * SHORTEST


def test_chunk_offsets_change_with_the_epoch() -> None:
    documents = some_documents(20, seed=2)
    first, second = (chunks(documents, np.arange(20), 64, seed=0, epoch=epoch) for epoch in (0, 1))
    assert first.start.tolist() != second.start.tolist()


def test_sentence_pairs_follow_the_rules() -> None:
    documents = some_documents(300, seed=3)
    pairs = sentence_pairs(documents, np.arange(300), 64, seed=5, epoch=0)
    assert pairs.lengths.max() <= 64
    assert (pairs.stop > pairs.start).all()
    assert pairs.is_second.tolist() == [False, True] * len(pairs)
    is_next = pairs.is_next == 1
    document, start, stop = (array.reshape(-1, 2) for array in (pairs.document, pairs.start, pairs.stop))
    assert (document[is_next, 0] == document[is_next, 1]).all()
    assert (document[~is_next, 0] != document[~is_next, 1]).all()
    # segments of a true pair are adjacent unless one was truncated there
    assert (start[is_next, 1] >= stop[is_next, 0]).all()
    assert 0.3 < is_next.mean() < 0.55


def test_short_pairs_have_the_given_share() -> None:
    documents = Documents([[10] * 60 for _ in range(400)])
    full = sentence_pairs(documents, np.arange(400), 128, seed=1, epoch=0, short_share=0.0)
    mixed = sentence_pairs(documents, np.arange(400), 128, seed=1, epoch=0, short_share=1.0)
    assert np.median(full.lengths) > 115
    assert np.median(mixed.lengths) < 90


@pytest.mark.parametrize("capacity", [128, 1000])
def test_packing_is_tight_and_complete(capacity: int) -> None:
    lengths = np.random.default_rng(0).integers(5, 129, size=3000)
    bins = pack(lengths, capacity, most=10_000)
    assert sorted(np.concatenate(bins).tolist()) == list(range(3000))
    loads = np.array([lengths[members].sum() for members in bins])
    assert loads.max() <= capacity
    assert lengths.sum() / (len(bins) * capacity) > (0.93 if capacity == 128 else 0.985)


def test_packing_respects_the_maximum_number_of_sequences() -> None:
    bins = pack(np.full(100, 3), 1000, most=7)
    assert max(len(members) for members in bins) == 7


def test_packing_raises_for_sequences_that_do_not_fit() -> None:
    with pytest.raises(InputError, match="does not fit a micro-batch of 64"):
        pack(np.array([65]), 64, most=10)


def test_corpus_without_pairs_raises() -> None:
    one_sentence = Documents([[5]])
    plan = Plan(one_sentence, SequenceConfig(length=32, micro_tokens=64, cut="sentence_pairs"), seed=0)
    with pytest.raises(InputError, match=r"held_out split: it is too small .* sequences.cut = 'sentence_pairs'"):
        plan.check("held_out")
    assert len(next(Plan(one_sentence, SequenceConfig(), seed=0).from_cursor(Cursor())).sequences.sample) == 1


CONFIGS = [
    SequenceConfig(length=32, micro_tokens=128),
    SequenceConfig(length=32, micro_tokens=128, layout="padded"),
    SequenceConfig(length=32, micro_tokens=128, cut="sentence_pairs"),
    SequenceConfig(length=32, micro_tokens=96, cut="sentence_pairs", layout="padded"),
    SequenceConfig(length=32, micro_tokens=128, cut="segments"),
    SequenceConfig(length=32, micro_tokens=128, cut="segments", layout="padded"),
    SequenceConfig(length=32, micro_tokens=128, cut="convbert_segments"),
    SequenceConfig(length=32, micro_tokens=128, cut="windows"),
    SequenceConfig(length=32, micro_tokens=96, cut="windows", layout="padded"),
    SequenceConfig(length=32, micro_tokens=128, cut="windows", crosses_documents=False),
    SequenceConfig(length=32, micro_tokens=128, cut="full_sentences"),
    SequenceConfig(length=32, micro_tokens=96, cut="full_sentences", crosses_documents=False, layout="padded"),
]


def reader_of(folder: Path, config: SequenceConfig, slots: int | None = None) -> tuple[Plan, BatchReader]:
    corpus = TokenCorpus(folder)
    return Plan(corpus, config, seed=11, window_tokens=2000), BatchReader(corpus, config, SpecialTokens(0, 2, 3), slots)


@pytest.mark.parametrize("config", CONFIGS)
def test_processes_together_read_the_whole_stream(corpus_folder: Path, config: SequenceConfig) -> None:
    plan, reader = reader_of(corpus_folder, config)
    whole = [reader[item] for item in islice(plan.from_cursor(Cursor()), 60)]
    # each process has a plan of its own
    streams = [reader_of(corpus_folder, config)[0].from_cursor(Cursor(), skip=rank, every=3) for rank in range(3)]
    for number, expected in enumerate(whole):
        got = reader[next(streams[number % 3])]
        assert got.cursor == expected.cursor
        for name in ("tokens", "sample", "types", "is_next"):
            mine, theirs = getattr(got.batch, name), getattr(expected.batch, name)
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)


@pytest.mark.parametrize("config", CONFIGS)
def test_stream_resumes_from_a_cursor(corpus_folder: Path, config: SequenceConfig) -> None:
    plan, _ = reader_of(corpus_folder, config)
    whole = list(islice(plan.from_cursor(Cursor()), 400))
    assert whole[-1].cursor.epoch > 0
    assert max(item.cursor.window for item in whole) > 1
    for position in (0, 17, 80, 300):
        again = next(plan.from_cursor(whole[position].cursor, skip=1))
        assert again.cursor == whole[position + 1].cursor
        assert again.sequences.sample.tolist() == whole[position + 1].sequences.sample.tolist()


def test_epoch_contains_every_document(corpus_folder: Path) -> None:
    plan, _ = reader_of(corpus_folder, CONFIGS[0])
    seen = {document for batch in plan.one_epoch() for document in batch.sequences.document.tolist()}
    assert seen == set(range(TokenCorpus(corpus_folder).documents))


@pytest.mark.parametrize("config", CONFIGS)
def test_batches_have_the_text_between_special_tokens(corpus_folder: Path, config: SequenceConfig) -> None:
    plan, reader = reader_of(corpus_folder, config)
    corpus = TokenCorpus(corpus_folder)
    for item in islice(plan.one_epoch(), 12):
        batch = reader[item].batch
        rows, lengths = batch.layout.pad(batch.tokens)[0], batch.layout.lengths(batch.tokens.device)
        assert batch.real_tokens == int(item.sequences.lengths.sum())
        s = item.sequences
        for index in range(len(s)):
            segments: list[list[int]] = [[], []]
            for run in range(s.offsets[index], s.offsets[index + 1]):
                text = corpus.read(int(s.document[run]), int(s.start[run]), int(s.stop[run]))
                has_break = s.breaks is not None and s.breaks[run]
                segments[int(s.is_second[run])] += [*([3] if has_break else []), *text.tolist()]
            expected, types = [2, *segments[0], 3], [0] * (len(segments[0]) + 2)
            if segments[1]:
                expected, types = [*expected, *segments[1], 3], [*types, *([1] * (len(segments[1]) + 1))]
            assert rows[index][: lengths[index]].tolist() == expected
            if not config.has_types:
                assert batch.types is None
            else:
                assert batch.layout.pad(batch.types)[0][index, : len(types)].tolist() == types
        if batch.types is not None:
            assert not batch.types[~batch.is_real].any()


def test_batches_have_fixed_shapes(corpus_folder: Path) -> None:
    plan, _ = reader_of(corpus_folder, CONFIGS[0])
    _, reader = reader_of(corpus_folder, CONFIGS[0], plan.slots)
    shapes = {tuple(reader[item].batch.layout.starts.shape) for item in islice(plan.from_cursor(Cursor()), 40)}
    assert len(shapes) == 1


def test_workers_do_not_change_the_batches(corpus_folder: Path) -> None:
    plan, reader = reader_of(corpus_folder, CONFIGS[2])
    position = {"cursor": Cursor(0, 0, 1), "skip": 1, "every": 2}
    alone, helped = (list(islice(load_batches(reader, plan, **position, workers=workers), 12)) for workers in (0, 2))
    assert [item.cursor for item in alone] == [item.cursor for item in islice(plan.from_cursor(**position), 12)]
    assert [item.cursor for item in alone] == [item.cursor for item in helped]
    for first, second in zip(alone, helped, strict=True):
        assert torch.equal(first.batch.tokens, second.batch.tokens)
        assert torch.equal(first.batch.layout.starts, second.batch.layout.starts)
