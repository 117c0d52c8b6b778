"""Vocabulary cuts: texts of remaining tokens are tokenised as before, and every other text still can be."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from bertsmith.errors import InputError
from bertsmith.text.cut import changed_tokens, cut_tokenizer, needed_tokens, token_counts, used_tokens
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.tokenizer import Tokenizer

GENERAL = [
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "A lazy dog sleeps and the quick fox runs, jumps and runs again!",
    "Rivers flow quickly through brown hills; foxes sleep near banks (naïve über-foxes, 2019).",
    "Bankers quickly bring brownish rivers to the sleeping hills, running near the jumping dogs.",
]
KINDS = ["wordpiece", "bytes", "unigram"]


@pytest.fixture(scope="module", params=KINDS)
def base(request) -> Tokenizer:
    return learn_tokenizer(GENERAL * 5, request.param, 480, progress=False)


def words_of(number: int) -> list[str]:
    generator = random.Random(3)
    syllables = ["qu", "ick", "ly", "fox", "es", "riv", "er", "s", "bank", "jump", "ing", "ö", "東", "hill", "1", "!"]
    return ["".join(generator.choices(syllables, k=generator.randint(1, 6))) for _ in range(number)]


def test_texts_of_kept_tokens_are_split_as_before(base: Tokenizer) -> None:
    """A text whose tokens all remain has the same tokens and offsets."""
    texts = [*words_of(300), *GENERAL, *(" ".join(words_of(60)[index : index + 4]) for index in range(50))]
    rows = base.encode_offsets(texts)
    generator = random.Random(0)
    same = others = 0
    for _ in range(8):
        keep_ids = generator.sample([*base.vocabulary.values()], k=base.size // 2)
        cut = cut_tokenizer(base, keep_ids)
        assert set(keep_ids) <= set(cut.ids)
        assert cut.tokenizer.size < base.size
        for (old, positions), (new, new_positions) in zip(rows, cut.tokenizer.encode_offsets(texts), strict=True):
            if set(old.tolist()) <= set(cut.ids):
                assert cut.tokenizer.tokens(new) == base.tokens(old)
                assert [cut.new_ids[token] for token in old.tolist()] == new.tolist()
                np.testing.assert_array_equal(new_positions, positions)
                same += 1
            else:
                others += 1
    assert min(same, others) > 200


def test_every_text_can_still_be_tokenised(base: Tokenizer) -> None:
    cut = cut_tokenizer(base, [])
    assert set(cut.ids) == needed_tokens(base)
    assert cut.tokenizer.size < base.size
    known = 0
    for text in [*words_of(300), *GENERAL]:
        (old,), (new,) = (tokenizer.encode_plain([text]) for tokenizer in (base, cut.tokenizer))
        if base.unknown not in old:
            known += 1
            assert cut.tokenizer.unknown not in new
            assert cut.tokenizer.decode(new) == base.decode(old)
        else:
            assert cut.tokenizer.unknown in new
    assert known > 100


def test_special_tokens_come_first_and_templates_stay(base: Tokenizer) -> None:
    cut = cut_tokenizer(base, [*base.vocabulary.values()][::3])
    small = cut.tokenizer
    assert small.special_ids == (0, 1, 2, 3, 4)
    assert small.tokens(small.special_ids) == base.tokens(base.special_ids)
    assert sorted(small.vocabulary.values()) == [*range(len(cut.ids))]
    assert {small.tokens([new])[0]: old for new, old in enumerate(cut.ids)} == {
        token: token_id for token, token_id in base.vocabulary.items() if token_id in cut.new_ids
    }
    framed = cut_tokenizer(base, [*base.vocabulary.values()]).tokenizer
    for name, rows in base.encode(GENERAL[:2], GENERAL[2:]).items():
        other = framed.encode(GENERAL[:2], GENERAL[2:])[name]
        if name == "input_ids":
            assert [framed.tokens(row) for row in other] == [base.tokens(row) for row in rows]
        else:
            np.testing.assert_array_equal(other, rows)
    old, new = base.pair_frame(), small.pair_frame()
    assert new.types == old.types
    for was, now in zip(old[:3], new[:3], strict=True):
        assert [cut.new_ids[token] for token in was] == now


def test_save_and_load_round_trip(base: Tokenizer, tmp_path: Path) -> None:
    keep_ids = used_tokens(base, token_counts(base, GENERAL[:1]))
    first, again = (cut_tokenizer(base, order) for order in (keep_ids, keep_ids[::-1]))
    assert first.ids == again.ids
    assert first.tokenizer.hash == again.tokenizer.hash
    first.tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.hash == first.tokenizer.hash
    assert loaded.encode_plain(GENERAL) == first.tokenizer.encode_plain(GENERAL)
    # cutting again to all tokens changes nothing
    whole = cut_tokenizer(loaded, [*loaded.vocabulary.values()])
    assert whole.ids == tuple(range(loaded.size))
    assert whole.tokenizer.hash == loaded.hash


def test_counts_and_selection(base: Tokenizer) -> None:
    counts = token_counts(base, GENERAL)
    assert counts[base.start] == len(GENERAL)
    assert counts.sum() == sum(len(row) + 2 for row in base.encode_plain(GENERAL))
    needed = needed_tokens(base)
    frequent = used_tokens(base, counts, at_least=2)
    assert {*np.flatnonzero(counts >= 2).tolist()} | needed <= set(frequent)
    assert set(frequent) < set(used_tokens(base, counts)) | needed
    limited = used_tokens(base, counts, tokens=len(needed) + 10)
    assert len(needed) < len(limited) <= len(needed) + 10
    assert set(cut_tokenizer(base, limited).ids) == set(limited)
    best = max((token for token in range(base.size) if token not in needed), key=lambda token: counts[token])
    assert base.content["model"]["type"] == "BPE" or best in limited
    cut = cut_tokenizer(base, used_tokens(base, counts))
    assert changed_tokens(base, cut, GENERAL) == (0, counts.sum() - 2 * len(GENERAL))
    smallest = cut_tokenizer(base, [])
    removed = sum(token not in smallest.new_ids for row in base.encode_plain(GENERAL) for token in row)
    changed, total = changed_tokens(base, smallest, GENERAL)
    assert 0 < removed <= changed < total


def test_parts_of_a_merge_stay() -> None:
    """Both merges that result in "abc" remain, because words may use either."""
    table = {token: index for index, token in enumerate(["[UNK]", *"abcd", "ab", "bc", "abc", "cd", "abcd"])}
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc"), ("c", "d"), ("abc", "d")]
    base = Tokenizer(tokenizers.Tokenizer(models.BPE(table, merges)))
    cut = cut_tokenizer(base, [table["abc"]])
    assert set(cut.tokenizer.vocabulary) == {"[UNK]", *"abcd", "ab", "bc", "abc"}
    assert cut.tokenizer.content["model"]["merges"] == [list(merge) for merge in merges[:4]]
    assert cut.tokenizer.tokens(cut.tokenizer.encode_plain(["abcd"])[0]) == ["abc", "d"]
    # the most frequent token needs three more and exceeds the limit; the next one fits
    counts = np.zeros(base.size, dtype=np.int64)
    counts[table["abcd"]], counts[table["cd"]] = 9, 1
    assert set(base.tokens(used_tokens(base, counts, tokens=6))) == {"[UNK]", *"abcd", "cd"}


def test_score_of_unknown_characters_stays() -> None:
    """The score of an unknown character is the lowest score minus 10, so the lowest-scoring token must remain."""
    table = [("[UNK]", 0.0), ("a", -1.0), ("xy", -25.0), ("zzz", -30.0), ("aa", -1.5)]
    backend = tokenizers.Tokenizer(models.Unigram(table, unk_id=0))
    base = Tokenizer(backend)
    cut = cut_tokenizer(base, [2])
    assert set(cut.tokenizer.vocabulary) == {"[UNK]", "a", "xy", "zzz"}
    assert cut.tokenizer.tokens(cut.tokenizer.encode_plain(["axya"])[0]) == ["a", "xy", "a"]
    assert cut.tokenizer.content["model"]["unk_id"] == 0


def test_characters_without_a_token_keep_the_tokens_that_contain_them() -> None:
    table = {token: index for index, token in enumerate(["[UNK]", "a", "##a", "ab", "aa", "##aa"])}
    base = Tokenizer(tokenizers.Tokenizer(models.WordPiece(table, unk_token="[UNK]")))
    assert set(cut_tokenizer(base, []).tokenizer.vocabulary) == {"[UNK]", "a", "##a", "ab"}


@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens_stay(kind: str) -> None:
    """Some are part of the model's vocabulary, others, such as the mask of DeBERTa v3, come after it."""
    learned = learn_tokenizer(GENERAL * 5, kind, 480, progress=False)
    backend = tokenizers.Tokenizer.from_str(json.dumps(learned.content))
    backend.add_special_tokens(["[DRUG]"])
    backend.add_tokens([tokenizers.AddedToken("fox", single_word=True)])
    base = Tokenizer(backend)
    cut = cut_tokenizer(base, used_tokens(base, token_counts(base, GENERAL)))
    assert cut.ids[:5] == base.special_ids[:5]
    assert cut.tokenizer.vocabulary["[DRUG]"] == cut.new_ids[learned.size]
    assert cut.tokenizer.vocabulary["fox"] == cut.new_ids[base.vocabulary["fox"]]
    texts = ["[DRUG] fox foxes!", *GENERAL]
    for old, new in zip(base.encode_plain(texts), cut.tokenizer.encode_plain(texts), strict=True):
        if set(old) <= set(cut.ids):
            assert cut.tokenizer.tokens(new) == base.tokens(old)
    assert len(cut.tokenizer.special_ids) == 6


@pytest.mark.parametrize("chain", [False, True])
def test_other_templates_are_renumbered(chain: bool) -> None:
    learned = learn_tokenizer(GENERAL * 5, "bytes", 480, progress=False)
    backend = tokenizers.Tokenizer.from_str(json.dumps(learned.content))
    frame = processors.RobertaProcessing(("[SEP]", learned.separator), ("[CLS]", learned.start))
    backend.post_processor = processors.Sequence([processors.ByteLevel(), frame]) if chain else frame
    # move a special token to the end of the old vocabulary
    content = json.loads(backend.to_str().replace("[CLS]", "<unused>"))
    content["model"]["vocab"]["[CLS]"] = learned.size
    content["added_tokens"][2] |= {"content": "[CLS]", "id": learned.size}
    text = json.dumps(content).replace(f'["<unused>", {learned.start}]', f'["[CLS]", {learned.size}]')
    base = Tokenizer.from_json(text)
    cut = cut_tokenizer(base, [])
    assert cut.tokenizer.encode(["x"])["input_ids"][0].tolist()[0] == cut.tokenizer.start == 4
    assert cut.tokenizer.tokens(cut.tokenizer.encode(["x"])["input_ids"][0][[0, -1]]) == ["[CLS]", "[SEP]"]


def test_invalid_cuts_raise(base: Tokenizer) -> None:
    plain = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(InputError, match="the tokenizer's model is WordLevel; a vocabulary cut supports BPE, Unigram"):
        cut_tokenizer(Tokenizer(plain), [0])
    with pytest.raises(InputError, match=f"keep_ids contains {base.size}, which is not an id of this tokenizer"):
        cut_tokenizer(base, [0, base.size])
    counts = token_counts(base, GENERAL)
    needed = len(needed_tokens(base))
    with pytest.raises(InputError, match=f"tokens is {needed - 1}; this tokenizer needs {needed} to encode any text"):
        used_tokens(base, counts, tokens=needed - 1)
    with pytest.raises(InputError, match="at_least is 0; it must be at least 1"):
        used_tokens(base, counts, at_least=0)
