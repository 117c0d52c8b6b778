"""The tokenizer against Hugging Face's, special tokens, the word cache, and trained tokenizers."""

import json
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from bertsmith.errors import InputError
from bertsmith.text.learn import MAX_WORD_LETTERS, learn_tokenizer
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.word_cache import WordCache

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCXYZ0123456789éß東京가α.,!?'-([@"
VOCABULARY = [
    *SPECIAL,
    *LETTERS,
    *(f"##{letter}" for letter in LETTERS[:46]),
    *["the", "The", "un", "##known", "##ing", "naive", "naïve", "Ünder", "under", "resume", "##e\u0301", "ss"],
]
TEXT = [
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "A lazy dog sleeps; the quick fox runs and jumps, runs and jumps again!",
    "Rivers flow quickly through the brown hills, and foxes sleep near banks.",
] * 5


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module", params=["wordpiece", "bytes", "unigram"])
def learned(request):
    return learn_tokenizer(TEXT, request.param, 400, minimum_frequency=1, progress=False)


def random_text(generator):
    parts = []
    for _ in range(generator.randint(1, 12)):
        kind = generator.randrange(9)
        if kind < 3:
            parts.append("".join(generator.choices(LETTERS, k=generator.randint(1, 9))))
        elif kind == 3:
            parts.append("".join(chr(generator.randint(0, 0x2FF)) for _ in range(3)))
        elif kind == 4:
            parts.append(chr(generator.choice([0x4E00, 0x3400, 0x20000, 0xF900, 0x2F800, 0x3042, 0xAC00])))
        elif kind == 5:
            parts.append("e\u0301n\u0303" + chr(generator.randint(0x300, 0x36F)))
        elif kind == 6:
            parts.append(
                generator.choice(["[MASK]", "[SEP]", "[mask]", "\u200b", "\ufffd", "\x00", "\u00ad", "\u0130", "Σ"])
            )
        elif kind == 7:
            parts.append(generator.choice("abc") * generator.choice([99, 100, 101, 230]))
        else:
            point = generator.randint(0x300, 0x1FFFF)
            parts.append("x" if 0xD800 <= point < 0xE000 else chr(point))
        parts.append(generator.choice(["", " ", "  ", "\t", "\n", "\u00a0", "\u3000", "\u2028", "\x1c"]))
    return "".join(parts)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": False, "strip_accents": True},
        {"do_lower_case": True, "strip_accents": False, "tokenize_chinese_chars": False},
    ],
)
def test_wordpiece_agrees_with_hugging_face(folder, settings):
    transformers = pytest.importorskip("transformers")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **settings}))
    theirs = transformers.BertTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    generator = random.Random(3)
    texts = [random_text(generator) for _ in range(400)]
    assert ours.encode_plain(texts) == theirs(texts, add_special_tokens=False)["input_ids"]
    pairs = [random_text(generator) for _ in texts]
    for second, limit in ((None, 20), (pairs, 24)):
        expected = theirs(texts, second, truncation=True, max_length=limit, padding=True, return_tensors="np")
        encoded = ours.encode(texts, second, max_length=limit)
        for name in ("input_ids", "attention_mask", "token_type_ids"):
            np.testing.assert_array_equal(encoded[name], expected[name], err_msg=name)
            assert encoded[name].dtype == np.int64


def test_word_cache_gives_the_same_tokens(folder):
    generator = random.Random(4)
    learned = [learn_tokenizer(TEXT, kind, 320, progress=False) for kind in ("wordpiece", "bytes", "unigram")]
    for tokenizer in (Tokenizer.load(folder), *learned):
        cache = WordCache(tokenizer)
        for _ in range(15):
            texts = [random_text(generator) for _ in range(20)]
            tokens, lengths = cache.encode([*texts, ""])
            expected = tokenizer.encode_plain([*texts, ""])
            assert tokens.tolist() == [token for row in expected for token in row]
            assert lengths.tolist() == [len(row) for row in expected]
            lines = [text.replace("\n", " ").replace("\r", " ") for text in texts]
            tokens, lengths = cache.encode(lines)
            expected = tokenizer.encode_plain(lines)
            assert tokens.tolist() == [token for row in expected for token in row]
            assert lengths.tolist() == [len(row) for row in expected]


def test_flat_tokens_equal_encode(folder):
    generator = random.Random(5)
    learned = [learn_tokenizer(TEXT, kind, 320, progress=False) for kind in ("wordpiece", "bytes", "unigram")]
    for tokenizer in (Tokenizer.load(folder), *learned):
        for limit in (None, 3, 9, 40):
            texts = ["", "  ", "a\n \n b", *(random_text(generator) for _ in range(30)), "abc the " * 400]
            for pairs in (None, texts[::-1]):
                if limit == 3 and pairs is not None:
                    continue  # too short for the special tokens of a pair
                encoded = tokenizer.encode(texts, pairs, limit, padding=False)
                for has_types in (False, True):
                    flat = tokenizer.encode_flat(texts, pairs, limit, has_types=has_types)
                    assert flat.lengths.tolist() == [len(row) for row in encoded["input_ids"]]
                    np.testing.assert_array_equal(flat.ids, np.concatenate(encoded["input_ids"]))
                    if has_types:
                        np.testing.assert_array_equal(flat.types, np.concatenate(encoded["token_type_ids"]))
                    else:
                        assert flat.types is None
        assert tokenizer.encode_flat([], has_types=True).types.tolist() == []


def test_flat_tokens_of_many_threads(folder):
    tokenizer, generator = Tokenizer.load(folder), random.Random(6)
    batches = [[random_text(generator) for _ in range(20)] for _ in range(16)]
    with ThreadPoolExecutor(8) as pool:
        computed = list(pool.map(tokenizer.encode_flat, batches))
    for flat, texts in zip(computed, batches, strict=True):
        np.testing.assert_array_equal(flat.ids, np.concatenate(tokenizer.encode(texts, padding=False)["input_ids"]))


def test_word_cache_stays_correct_after_an_error(folder, monkeypatch):
    tokenizer = Tokenizer.load(folder)
    whole = tokenizer.encode_flat(["the un unknown abc"]).ids
    encode_words = Tokenizer.encode_words
    monkeypatch.setattr(Tokenizer, "encode_words", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tokenizer.encode_flat(["abc cab the"])
    monkeypatch.setattr(Tokenizer, "encode_words", encode_words)
    assert tokenizer.encode_flat(["the un unknown abc"]).ids.tolist() == whole.tolist()
    assert (
        tokenizer.encode_flat(["abc cab the"]).ids.tolist()
        == tokenizer.encode(["abc cab the"])["input_ids"][0].tolist()
    )


def test_word_cache_stays_correct_after_it_is_cleared(folder, monkeypatch):
    monkeypatch.setattr("bertsmith.text.word_cache.MAX_WORDS", 5)
    tokenizer = Tokenizer.load(folder)
    cache = WordCache(tokenizer)
    for text in ("the un unknown abc cab, bca.", "abc the un (unknown) bac"):
        assert cache.encode([text])[0].tolist() == tokenizer.encode_plain([text])[0]


def test_roles_and_size(folder):
    tokenizer = Tokenizer.load(folder / "vocab.txt")
    roles = (tokenizer.pad, tokenizer.unknown, tokenizer.start, tokenizer.separator, tokenizer.mask)
    assert roles == (0, 1, 2, 3, 4) == tokenizer.special_ids
    assert tokenizer.size == len(VOCABULARY)
    starts = tokenizer.starts_word
    assert starts.shape == (tokenizer.size,)
    assert not starts[VOCABULARY.index("##ing")]
    assert starts[VOCABULARY.index("the")]
    assert starts[:5].all()


def test_missing_special_token_raises_only_on_access(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "a": 5}, unk_token="<s>"))
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.start == 0
    assert tokenizer.size == 6
    with pytest.raises(InputError, match=r"no mask token; its vocabulary must contain \[MASK\] or <mask>"):
        _ = tokenizer.mask


def test_padding_and_truncation_of_a_file_are_ignored(folder):
    backend = Tokenizer.load(folder)._backend
    backend.enable_padding(direction="left", length=50)
    backend.enable_truncation(3)
    (folder / "other").mkdir()
    backend.save(str(folder / "other" / "tokenizer.json"))
    loaded = Tokenizer.load(folder / "other")
    assert loaded.hash == Tokenizer.load(folder).hash
    encoded = loaded.encode(["the un", "the un abc cab"])
    assert encoded["attention_mask"][0].tolist() == [1] * 4 + [0] * (encoded["input_ids"].shape[1] - 4)
    assert encoded["input_ids"][0, -1] == loaded.pad


def test_encode_without_padding_and_with_invalid_arguments(folder):
    tokenizer = Tokenizer.load(folder)
    rows = tokenizer.encode(["the", "the un the"], padding=False)["input_ids"]
    assert [len(row) for row in rows] == [3, 5]
    assert tokenizer.encode([])["input_ids"].shape == (0, 0)
    for arguments, message in [
        (("the",), "texts is a string"),
        ((["the", 3],), r"texts\[1\] is int"),
        ((["the"], ["a", "b"]), "pairs has length 2 and texts 1"),
        ((["the"], ["a"], 3), "max_length is 3; at least 4"),
    ]:
        with pytest.raises(InputError, match=message):
            tokenizer.encode(*arguments)


def whole_truncated(tokenizer, texts, pairs, limit):
    """Encode whole texts, without their prefixes first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "_prefixes", lambda self, texts, max_tokens: list(texts))
        return [row.tolist() for row in tokenizer.encode(texts, pairs, limit, padding=False)["input_ids"]]


@pytest.mark.parametrize("kind", ["wordpiece", "bytes", "unigram", "characters"])
def test_long_texts_are_truncated_to_the_same_tokens(kind):
    tokenizer = learn_tokenizer(TEXT, kind, 330, progress=False)
    tokenizer = tokenizer.with_tokens(["a b.c d"])  # an added token that spans words
    generator = random.Random(7)
    alphabet = ["e\u0301", "\u0301", "中", ".", "  ", "\n", "[MASK]", "[MA", "7", "ᄀ", "ᅡ", "'s", "a b.c d", "\0"]
    texts = ["".join(generator.choices(generator.sample(alphabet, 3), k=4000)) for _ in range(8)]
    texts += ["".join(random_text(generator) for _ in range(30)) for _ in range(4)]
    shortened = tokenizer._prefixes(texts, 17)
    assert sum(len(prefix) < len(text) for prefix, text in zip(shortened, texts, strict=True)) >= 3
    for pairs in (None, texts[::-1]):
        rows = [row.tolist() for row in tokenizer.encode(texts, pairs, 17, padding=False)["input_ids"]]
        assert rows == whole_truncated(tokenizer, texts, pairs, 17)
    for (ids, offsets), whole in zip(tokenizer.encode_offsets(texts, 17), tokenizer.encode_offsets(texts), strict=True):
        assert ids.tolist() == whole[0][:17].tolist()
        assert offsets.tolist() == whole[1][:17].tolist()


def test_patterns_that_read_to_the_end_of_a_text_see_it_whole():
    tokenizer = learn_tokenizer(TEXT, "wordpiece", 330, progress=False)
    backend = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.content))
    backend.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex("a(?=[^z]*z)"), "b")
    changed = Tokenizer(backend)
    text = "a " * 5000 + "z"
    assert changed.encode([text], max_length=9)["input_ids"][0, 1] == changed.encode_plain(["b"])[0][0]


def test_ten_megabytes_are_truncated_without_reading_them(monkeypatch):
    tokenizer = learn_tokenizer(TEXT, "wordpiece", 330, progress=False)
    read = []
    encode = Tokenizer._encode
    monkeypatch.setattr(
        Tokenizer, "_encode", lambda self, inputs, **rest: read.append(inputs) or encode(self, inputs, **rest)
    )
    assert tokenizer.encode(["the cab " * 1_250_000], max_length=128)["input_ids"].shape == (1, 128)
    assert sum(len(text) for inputs in read for text in inputs) < 10_000


def test_threads_with_different_lengths_are_independent(folder):
    tokenizer = Tokenizer.load(folder)
    texts = ["the un " * 50] * 20
    wrong_shapes = []

    def work(limit):
        for _ in range(30):
            shape = tokenizer.encode(texts, max_length=limit)["input_ids"].shape
            if shape != (20, limit):
                wrong_shapes.append(shape)

    threads = [threading.Thread(target=work, args=(limit,)) for limit in (8, 16, 32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong_shapes == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "is not valid JSON"),
        ("tokenizer.json", "{}", "is not a usable tokenizer.json"),
        ("tokenizer.json", '{"model": {"type": "Strange"}}', "is not a usable tokenizer.json"),
        ("vocab.txt", "a\nb\n", r"lacks \[UNK\], \[CLS\], \[SEP\]"),
        ("vocab.bin", "", "unknown ending; allowed: tokenizer.json, vocab.txt"),
    ],
)
def test_broken_files_raise(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        Tokenizer.load(tmp_path / name)


def high_id(content):
    content["model"]["vocab"]["##s"] = 1 << 31


def unlisted_token(content):
    special = content["post_processor"]["special_tokens"]
    special["[OTHER]"] = special.pop("[SEP]")


def foreign_id(content):
    content["post_processor"]["special_tokens"]["[SEP]"]["ids"] = [12_345]


def second_text(content):
    content["post_processor"]["single"].append({"Sequence": {"id": "B", "type_id": 1}})
    content["post_processor"] = {"type": "Sequence", "processors": [content["post_processor"]]}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (high_id, "one has the id 2,147,483,648"),
        (unlisted_token, r"names '\[SEP\]', which is not one of its special_tokens"),
        (foreign_id, "has the id 12345, which is not in the vocabulary"),
        (second_text, "has a second text in the template of a single one"),
    ],
)
def test_file_that_would_end_the_process_raises(folder, tmp_path, damage, message):
    """The tokenizers library panics on it, or aborts because it allocates too much memory."""
    content = Tokenizer.load(folder).content
    damage(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        Tokenizer.load(tmp_path)


def test_text_that_the_library_cannot_encode_raises(folder, tmp_path):
    content = Tokenizer.load(folder).content
    content["model"]["unk_token"] = "[OTHER]"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="cannot encode a text: WordPiece error: Missing"):
        Tokenizer.load(tmp_path).encode(["\u2603"])


def test_missing_files_raise(tmp_path):
    with pytest.raises(InputError, match=r"has neither tokenizer\.json nor vocab\.txt"):
        Tokenizer.load(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        Tokenizer.load(tmp_path / "none")


def test_saved_and_pickled_tokenizers_are_equal(learned, tmp_path):
    learned.save(tmp_path)
    text = ["The lazy fox, again."]
    for other in (Tokenizer.load(tmp_path), pickle.loads(pickle.dumps(learned))):
        assert other.hash == learned.hash
        assert other.encode_plain(text) == learned.encode_plain(text)
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]


def test_trained_tokenizers_have_special_tokens_and_size(learned, tmp_path):
    assert learned.special_ids == (0, 1, 2, 3, 4)
    assert learned.tokens(range(5)) == SPECIAL
    assert learned.size <= 400
    encoded = learned.encode(["the fox"], ["a dog"])
    ids, types = encoded["input_ids"][0], encoded["token_type_ids"][0]
    assert ids[0] == learned.start
    (first, second) = np.flatnonzero(ids == learned.separator)
    assert second == len(ids) - 1
    assert types.tolist() == [0] * (first + 1) + [1] * (len(ids) - first - 1)
    assert learned.decode(ids) == "the fox a dog"
    starts = learned.starts_word[learned.encode_plain(["the lazy river"])[0]]
    assert starts.sum() == 3
    assert starts[0]
    transformers = pytest.importorskip("transformers")
    file = learned.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    assert theirs(["the fox"], ["a dog"])["input_ids"][0] == ids.tolist()


@pytest.mark.parametrize("kind", ["wordpiece", "bytes", "unigram"])
def test_training_twice_gives_the_same_hash(kind):
    first, second = (learn_tokenizer(iter(TEXT), kind, 380, progress=False).hash for _ in range(2))
    assert first == second


@pytest.mark.parametrize("kind", ["bytes", "unigram"])
def test_decoding_restores_unseen_characters(kind):
    tokenizer = learn_tokenizer(TEXT, kind, 400, lowercase=False, progress=False)
    text = "Ünseen 東京 😀 <0x41> text"
    assert tokenizer.decode(tokenizer.encode_plain([text])[0]) == text
    assert tokenizer.unknown not in tokenizer.encode_plain([text])[0]


def test_lowercase_is_optional():
    tokenizer = learn_tokenizer(TEXT, "wordpiece", 300, lowercase=False, progress=False)
    assert tokenizer.tokens(tokenizer.encode_plain(["The"])[0]) == ["The"]


@pytest.mark.parametrize(
    ("documents", "kind", "vocabulary", "message"),
    [
        (TEXT, "wordpiece", 40, "vocabulary is 40, too small for the .* letters"),
        (TEXT, "bytes", 260, "at least 261"),
        (TEXT, "unigram", 270, "vocabulary is 270, too small"),
        (TEXT, "wordpeice", 400, "kind is 'wordpeice'; did you mean 'wordpiece'"),
        ([], "bytes", 400, "has no text"),
    ],
)
def test_invalid_settings_raise(documents, kind, vocabulary, message):
    with pytest.raises(InputError, match=message):
        learn_tokenizer(documents, kind, vocabulary, progress=False)


def test_learned_wordpiece_splits_a_protein_of_300_letters() -> None:
    letters = "ACDEFGHIKLMNPQRSTVWY"
    draw = random.Random(0)
    proteins = ["".join(draw.choices(letters, k=300)) for _ in range(20)]
    tokenizer = learn_tokenizer(proteins, "wordpiece", 200, lowercase=False, progress=False)
    (ids,) = tokenizer.encode_plain(proteins[:1])
    tokens = tokenizer.tokens(ids)
    assert "[UNK]" not in tokens
    assert "".join(token.removeprefix("##") for token in tokens) == proteins[0]
    (too_long,) = tokenizer.encode_plain(["A" * (MAX_WORD_LETTERS + 1)])
    assert tokenizer.tokens(too_long) == ["[UNK]"]


def test_imported_vocabulary_keeps_the_published_limit(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##a"]) + "\n")
    tokenizer = Tokenizer.load(tmp_path)
    lengths = {100: ["a"] + ["##a"] * 99, 101: ["[UNK]"]}
    for length, expected in lengths.items():
        (ids,) = tokenizer.encode_plain(["a" * length])
        assert tokenizer.tokens(ids) == expected


def test_call_returns_what_transformers_returns(corpus_folder: Path) -> None:
    tokenizer, texts = Tokenizer.load(corpus_folder), ["the smith forges", "iron"]
    inputs = ["input_ids", "attention_mask", "token_type_ids"]
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(corpus_folder / "tokenizer.json"), pad_token="[PAD]", model_input_names=inputs
    )
    assert len(tokenizer) == tokenizer.size == len(theirs)
    for given in (texts[0], texts):
        assert tokenizer(given) == dict(theirs(given))
    assert tokenizer(texts, padding=True) == dict(theirs(texts, padding=True))
    assert tokenizer(texts[0], texts[1], max_length=4) == dict(
        theirs(texts[0], texts[1], max_length=4, truncation=True)
    )
    for kind in ("np", "pt"):
        expected = theirs(texts, padding=True, return_tensors=kind)
        for name, values in tokenizer(texts, return_tensors=kind).items():
            assert type(values) is type(expected[name])
            assert values.tolist() == expected[name].tolist()
    with pytest.raises(InputError, match="return_tensors is 'tf'; allowed: np, pt, or None for lists"):
        tokenizer(texts, return_tensors="tf")  # type: ignore[arg-type]


def test_lowercasing() -> None:
    cased = learn_tokenizer(["Iron iron GATE gate"] * 3, "bytes", 300, lowercase=False, progress=False)
    lower = cased.lowercasing()
    assert lower.encode_plain(["IRON Gate"]) == cased.encode_plain(["iron gate"])
    assert lower.lowercasing() is lower
