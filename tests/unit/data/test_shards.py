"""A built corpus contains exactly the tokenizer's output, by document and sentence."""

import itertools
import json
import os
import pickle
import shutil

import numpy as np
import pytest

from bertsmith.data import shards
from bertsmith.data.build_corpus import build_corpus
from bertsmith.data.shards import TokenCorpus, read_manifest, token_dtype
from bertsmith.errors import InputError
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.sentences import split_sentences

WORDS = ["river", "stone", "bird", "winter", "garden", "window", "letter", "morning", "silver", "bridge"]


def make_documents(count):
    generator = np.random.default_rng(7)
    documents = []
    for number in range(count):
        sentences = [
            " ".join(generator.choice(WORDS, size=generator.integers(2, 9))) + "." for _ in range(1 + number % 5)
        ]
        documents.append(f"Number {number}. " + " ".join(sentence.capitalize() for sentence in sentences))
    return documents


DOCUMENTS = make_documents(60)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    tokenizer = learn_tokenizer(DOCUMENTS, "wordpiece", 200, progress=False)
    out = folder / "out"
    manifest = build_corpus([folder / "data.jsonl"], tokenizer, out, held_out=0.2, workers=1, shard_megabytes=0.002)
    return out, tokenizer, manifest


def test_documents_round_trip(built):
    out, tokenizer, manifest = built
    assert len(manifest.shards["train"]) > 2
    found = {}
    for split in ("train", "held_out"):
        corpus = TokenCorpus(out, split)
        assert corpus.vocabulary == tokenizer.size
        assert corpus.lengths.dtype == np.int64
        assert corpus.documents == len(corpus) == len(corpus.lengths) == manifest.splits[split].documents
        assert corpus.tokens == corpus.lengths.sum()
        sentences = 0
        for document, length in enumerate(corpus.lengths):
            tokens = corpus.read(document, 0, length)
            assert tokens.dtype == np.uint16
            starts = corpus.sentence_starts(document)
            assert starts[0] == 0
            assert starts[-1] == length
            chunks = tuple(
                tuple(corpus.read(document, start, stop).tolist()) for start, stop in itertools.pairwise(starts)
            )
            assert sum(chunks, ()) == tuple(tokens.tolist())
            found[chunks] = split
            sentences += len(chunks)
        assert sentences == manifest.splits[split].sentences
    expected = [tuple(map(tuple, tokenizer.encode_plain(split_sentences(text)))) for text in DOCUMENTS]
    assert set(found) == set(expected)
    assert found[expected[0]] == "train"
    assert found[expected[1]] == "held_out"
    assert 5 <= sum(split == "held_out" for split in found.values()) <= 25


def test_text_counts_add_up(built):
    _, _, manifest = built
    total = sum(counts.text_bytes for counts in manifest.splits.values())
    assert total == sum(len(text.encode()) for text in DOCUMENTS)


def test_pickled_corpus_is_small_and_reopens(built):
    corpus = TokenCorpus(built[0])
    expected = corpus.read(3, 0, 5).tolist()
    packed = pickle.dumps(corpus)
    assert len(packed) < 1000
    assert pickle.loads(packed).read(3, 0, 5).tolist() == expected


def test_open_shards_are_limited(built, monkeypatch):
    expected = TokenCorpus(built[0])
    monkeypatch.setattr(shards, "_MAX_OPEN_SHARDS", 2)
    corpus = TokenCorpus(built[0])
    for document in (*range(len(corpus)), 0, len(corpus) - 1):
        assert corpus.read(document, 0, 4).tolist() == expected.read(document, 0, 4).tolist()
        assert len(corpus._opened) <= 2


def test_shard_that_is_cut_while_it_is_read_raises(built, tmp_path):
    """A memory map would end the process by SIGBUS."""
    folder = tmp_path / "corpus"
    shutil.copytree(built[0], folder)
    corpus = TokenCorpus(folder)
    corpus.read(0, 0, 2)
    shard = folder / corpus.manifest.shards["train"][0].file
    os.truncate(shard, 8 * (corpus.manifest.shards["train"][0].documents + 1))
    for read in (lambda: corpus.read(0, 0, 2), lambda: corpus.sentence_starts(0)):
        with pytest.raises(InputError, match=r"train-000000.shard' was cut while it was read: .* restore it"):
            read()


def test_long_reads_in_parts_are_complete(built, monkeypatch):
    corpus = TokenCorpus(built[0])
    whole, pread = corpus.read(1, 0, 6), os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, position: pread(file, min(size, 5), position))
    assert (corpus.read(1, 0, 6) == whole).all()


def test_document_out_of_range_raises_index_error(built):
    corpus = TokenCorpus(built[0])
    for document in (-1, len(corpus)):
        with pytest.raises(IndexError):
            corpus.read(document, 0, 1)


def test_token_dtype():
    assert token_dtype(65536) == "uint16"
    assert token_dtype(65537) == "uint32"


def test_each_split_has_at_least_one_document(built, tmp_path):
    _, tokenizer, _ = built
    for count, held_out, expected in ((2, 0.001, (1, 1)), (2, 0.999, (1, 1)), (1, 0.5, (1, 0)), (3, 0.0, (3, 0))):
        file = tmp_path / f"{count}-{held_out}.txt"
        file.write_text("\n\n".join(DOCUMENTS[:count]))
        manifest = build_corpus([file], tokenizer, tmp_path / f"{file.stem}-out", held_out=held_out, workers=1)
        assert (manifest.splits["train"].documents, manifest.splits["held_out"].documents) == expected
    with pytest.raises(InputError, match=r"has no held_out documents \(held_out was 0.0\)"):
        TokenCorpus(tmp_path / "3-0.0-out", "held_out")


def test_unusable_folders_raise(built, tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        TokenCorpus(tmp_path / "none")
    with pytest.raises(InputError, match="contains no corpus"):
        TokenCorpus(tmp_path)
    (tmp_path / "journal.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="is unfinished"):
        TokenCorpus(tmp_path)
    manifest = read_manifest(built[0]).plain()
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(InputError, match="has format 99; this version reads format 2"):
        TokenCorpus(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"dtype": "float"}))
    with pytest.raises(InputError, match=r"manifest\.json.*dtype is 'float'"):
        TokenCorpus(tmp_path)
    with pytest.raises(InputError, match="split is 'dev'; allowed: train, held_out"):
        TokenCorpus(built[0], "dev")
