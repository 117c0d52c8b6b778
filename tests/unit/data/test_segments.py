"""ELECTRA's examples against a plain loop over sentences."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers_documents import Documents, some_documents

from bertsmith.data.random import bits, key, uniform
from bertsmith.data.segments import inverted_segments, segments
from bertsmith.data.sequences import Sequences

Position = tuple[int, int]  # document, token

SEED, EPOCH = 4, 2
RULES = {"electra": segments, "convbert": inverted_segments}


def built(
    documents: Documents, numbers: list[int], length: int, rule: str
) -> list[tuple[list[Position], list[Position]]]:
    """Return the examples of the official builders with our draws, sentence by sentence."""
    examples = []
    for document in numbers:
        stream = bits(key(SEED, EPOCH, 5), torch.tensor(document))
        starts = documents.sentence_starts(document).tolist()
        texts = [[(document, token) for token in range(*edges)] for edges in pairwise(starts)]
        waiting: list[int] = []
        for number in range(len(texts)):
            waiting.append(number)
            target = length
            if float(uniform(stream, torch.tensor(waiting[0] * 4))) < 0.05:
                target = 5 + int(bits(stream, torch.tensor(waiting[0] * 4 + 3))) % (length - 4)
            if sum(len(texts[each]) for each in waiting) >= target or number == len(texts) - 1:
                is_single = float(uniform(stream, torch.tensor(waiting[0] * 4 + 1))) < 0.1
                coins = [float(uniform(stream, torch.tensor(each * 4 + 2))) < 0.5 for each in waiting]
                half = 100_000 if is_single else (target - 3) // 2
                examples.append(split_segments([texts[each] for each in waiting], coins, half, length, rule))
                waiting = []
    return examples


def split_segments(
    texts: list[list[Position]], coins: list[bool], half: int, length: int, rule: str
) -> tuple[list[Position], list[Position]]:
    """Return the two segments of an example."""
    first: list[Position] = []
    second: list[Position] = []
    for text, coin in zip(texts, coins, strict=True):
        tests = (not first, not second) if rule == "electra" else (bool(first), bool(second))
        if tests[0] or len(first) + len(text) < half or (tests[1] and len(first) < half and coin):
            first += text
        else:
            second += text
    first = first[: length - 2]
    return first, second[: max(0, length - len(first) - 3)]


def positions(sequences: Sequences) -> list[tuple[list[Position], list[Position]]]:
    """Return the tokens of both segments of every sequence."""
    result: list[tuple[list[Position], list[Position]]] = [([], []) for _ in range(len(sequences))]
    runs = zip(sequences.owner, sequences.is_second, sequences.document, sequences.start, sequences.stop, strict=True)
    for owner, is_second, document, start, stop in runs:
        assert stop > start
        result[owner][int(is_second)].extend((int(document), token) for token in range(start, stop))
    return result


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [16, 37, 128])
def test_examples_equal_a_plain_loop(rule: str, length: int) -> None:
    documents = some_documents(60, seed=length)
    documents.sentences[7] = [200, 3, 90, 1]  # longer than an example
    documents.lengths[7] = 294
    numbers = np.random.default_rng(0).permutation(60)[:50]
    got = RULES[rule](documents, numbers, length, SEED, EPOCH)
    assert positions(got) == built(documents, numbers.tolist(), length, rule)
    assert got.lengths.tolist() == [len(a) + len(b) + 2 + bool(b) for a, b in positions(got)]
    assert got.lengths.max() <= length
    assert len(set(got.sample.tolist())) == len(got)


def test_example_depends_on_its_document_only() -> None:
    documents = some_documents(30, seed=1)
    whole = segments(documents, np.arange(30), 64, SEED, EPOCH)
    for number in (0, 11, 29):
        alone = segments(documents, np.array([number]), 64, SEED, EPOCH)
        mine = whole.take(np.flatnonzero(whole.document[whole.offsets[:-1]] == number))
        assert positions(alone) == positions(mine)
        assert alone.sample.tolist() == mine.sample.tolist()
    other = segments(documents, np.arange(30), 64, SEED, EPOCH + 1)
    assert positions(other) != positions(whole)
    assert not set(other.sample.tolist()) & set(whole.sample.tolist())


@pytest.mark.parametrize("rule", RULES)
def test_tokens_are_used_once_and_only_excess_is_dropped(rule: str) -> None:
    documents = some_documents(200, seed=5)
    examples = positions(RULES[rule](documents, np.arange(200), 64, SEED, EPOCH))
    seen = [position for first, second in examples for position in first + second]
    assert len(seen) == len(set(seen))
    # each example loses at most the end of the sentence that reached the length, and room for three special tokens
    assert documents.lengths.sum() - len(seen) <= len(examples) * (28 + 3)
    # documents that fit lose nothing
    short = Documents([[7, 9, 5], [20], [1, 1, 1, 40]])
    assert sum(len(a) + len(b) for a, b in positions(RULES[rule](short, np.arange(3), 64, SEED, EPOCH))) == 84


def test_shares_match_the_paper() -> None:
    documents = Documents([[10] * 60 for _ in range(600)])
    got = segments(documents, np.arange(600), 128, SEED, EPOCH)
    first, second = got.segment_lengths.T
    # full examples have 13 sentences, of which 12 and a part fit; the last one of a document has the remainder
    is_full = first + second >= 125
    assert abs((second[is_full] == 0).mean() - 0.1) < 0.02
    has_two = is_full & (second > 0)
    assert abs(first[has_two].mean() - 62) < 6
    inside = np.flatnonzero(got.document[got.offsets[:-1]] == np.append(got.document[got.offsets[1:-1]], -1))
    assert abs((~is_full)[inside].mean() - 0.05 * 115 / 124) < 0.012


def test_convbert_has_one_segment_unless_a_long_sentence_comes_first() -> None:
    documents = some_documents(300, seed=6)
    got = inverted_segments(documents, np.arange(300), 128, SEED, EPOCH)
    assert (got.segment_lengths[:, 1] > 0).mean() < 0.06
    long = inverted_segments(Documents([[100]] * 100 + [[100, 20, 20]] * 100), np.arange(200), 128, SEED, EPOCH)
    kinds = Counter(map(tuple, long.segment_lengths.tolist()))
    # about 90 %; the others are the 10 % with one segment, and examples with a short target
    assert kinds[0, 100] > 80
    assert kinds[40, 85] > 75
    assert kinds[100, 0] > 3


def test_empty_documents_have_no_examples() -> None:
    assert len(segments(Documents([[], []]), np.arange(2), 64, 0, 0)) == 0
    assert len(segments(Documents([[], [4], []]), np.arange(3), 64, 0, 0)) == 1
