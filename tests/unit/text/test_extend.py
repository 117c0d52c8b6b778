"""Extended tokenizers: old ids stay, domain texts get shorter, and the gains are reported."""

import json
import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

import bertsmith
from bertsmith.data.build_corpus import build_corpus
from bertsmith.errors import InputError
from bertsmith.text.extend import extend_tokenizer, new_tokens, tokenizer_difference
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.tokenizer import Tokenizer

GENERAL = [
    "the quick brown fox jumps over the lazy dog near the river bank",
    "a lazy dog sleeps and the quick fox runs, jumps and runs again!",
    "rivers flow quickly through brown hills; foxes sleep near banks",
] * 5
DOMAIN = [
    "phosphatase inhibitors bind kinase receptors.",
    "The kinase phosphorylates its receptor; phosphatases undo it (kinase-receptor binding).",
    "Receptor kinases, receptors and phosphorylation: 2019 review, naïve über-study.",
] * 4


@pytest.fixture(scope="module", params=["wordpiece", "bytes", "unigram"])
def base(request) -> Tokenizer:
    return learn_tokenizer([*GENERAL, *DOMAIN[:1]], request.param, 380, minimum_frequency=4, progress=False)


def vocab_text(folder: Path, tokenizer: Tokenizer) -> Path:
    tokens = sorted(tokenizer.vocabulary, key=tokenizer.vocabulary.__getitem__)
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return folder


def test_ids_stay_and_domain_texts_get_shorter(base: Tokenizer) -> None:
    extension = extend_tokenizer(base, DOMAIN, 25)
    extended = extension.tokenizer
    assert len(extension.tokens) == 25
    assert extended.size == base.size + 25
    for token, token_id in base.vocabulary.items():
        assert extended.vocabulary[token] == token_id
    assert [extended.vocabulary[token] for token in extension.tokens] == [*range(base.size, extended.size)]
    assert extended.special_ids == base.special_ids
    for role in ("pad", "unknown", "start", "separator", "mask"):
        assert getattr(extended, role) == getattr(base, role)
    before, after = (sum(map(len, tokenizer.encode_plain(DOMAIN))) for tokenizer in (base, extended))
    assert after < 0.8 * before
    # the counts are of words separated by spaces, as these tokenizers split the text
    assert (extension.tokens_before, extension.tokens_after) == (before, after)
    assert extension.words == sum(len(text.split()) for text in DOMAIN)
    assert sum(gain.tokens_saved for gain in extension.best) <= before - after + 1
    assert [gain.tokens_saved for gain in extension.best] == sorted(
        (gain.tokens_saved for gain in extension.best), reverse=True
    )


def test_decoded_text_is_unchanged(base: Tokenizer) -> None:
    extended = extend_tokenizer(base, DOMAIN, 25).tokenizer
    for text in (*DOMAIN[:3], *GENERAL[:3]):
        old, new = base.encode_plain([text])[0], extended.encode_plain([text])[0]
        assert extended.decode(new) == base.decode(old)


def test_words_without_new_tokens_are_split_as_before(base: Tokenizer) -> None:
    extended = extend_tokenizer(base, DOMAIN, 25).tokenizer
    generator = random.Random(0)
    syllables = [
        "pho",
        "spha",
        "tase",
        "kin",
        "ase",
        "re",
        "cep",
        "tor",
        "fox",
        "qu",
        "ick",
        "x",
        "ing",
        "s",
        "ä",
        "東",
    ]
    words = ["".join(generator.choices(syllables, k=generator.randint(1, 6))) for _ in range(2000)]
    changed = 0
    for old, new in zip(base.encode_plain(words), extended.encode_plain(words), strict=True):
        if any(token >= base.size for token in new):
            changed += 1
            assert len(new) <= len(old)
        else:
            assert new == old
    assert 0 < changed < len(words)


def test_general_text_hardly_changes(base: Tokenizer) -> None:
    extended = extend_tokenizer(base, DOMAIN, 25).tokenizer
    old, new = (tokenizer.encode_plain([" ".join(GENERAL)])[0] for tokenizer in (base, extended))
    assert sum(token < base.size for token in new) > 0.9 * len(old)


def test_extension_is_deterministic(base: Tokenizer) -> None:
    assert extend_tokenizer(base, DOMAIN, 9).tokenizer.hash == extend_tokenizer(base, iter(DOMAIN), 9).tokenizer.hash


def test_punctuation_and_words_are_not_merged(base: Tokenizer) -> None:
    tokens = extend_tokenizer(base, ["(kinase) kinase, kinase. kinase-receptor"] * 9, 30).tokens
    assert tokens
    assert not any(set("(),.-") & set(token) and set("kinaserecpto") & set(token) for token in tokens)


def test_intermediate_tokens_are_dropped() -> None:
    """Intermediate tokens of a word make room for tokens that save more, except in BPE, which needs them."""
    letters = [*"abcdefgh", *(f"##{letter}" for letter in "abcdefgh")]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend = tokenizers.Tokenizer(
        models.WordPiece({token: index for index, token in enumerate([*special, *letters])}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    extension = extend_tokenizer(Tokenizer(backend), ["abc"] * 9 + ["def"] * 5, 2)
    assert extension.tokens == ("abc", "def")
    assert extension.best[0].parts == ("a", "##b", "##c")
    assert extension.best[0].tokens_saved == 18
    bpe = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate("abcd")}, []))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    assert extend_tokenizer(Tokenizer(bpe), ["abcd"] * 9, 3).tokens == ("ab", "abc", "abcd")


def test_vocab_txt_is_extended_for_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    learned = learn_tokenizer(GENERAL, "wordpiece", 120, progress=False)
    base = Tokenizer.load(vocab_text(tmp_path, learned))
    extended = extend_tokenizer(base, DOMAIN, 10).tokenizer
    extended.save(tmp_path / "extended")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "extended" / "tokenizer.json"))
    for text in DOMAIN:
        assert theirs(text)["input_ids"] == extended.encode([text])["input_ids"][0].tolist()


@pytest.mark.parametrize("kind", ["wordpiece", "bytes", "unigram"])
def test_added_tokens_keep_their_ids(kind: str) -> None:
    """DeBERTa v3 has its mask token after all others, at the id of the first new token."""
    learned = learn_tokenizer(GENERAL, kind, 400, progress=False)
    backend = tokenizers.Tokenizer.from_str(json.dumps(learned.content))
    backend.add_special_tokens(["[DRUG]"])
    backend.add_tokens(["covid"])
    base = Tokenizer(backend)
    extended = extend_tokenizer(base, DOMAIN, 5).tokenizer
    assert extended.vocabulary["[DRUG]"] == learned.size
    assert extended.size == base.size + 5
    assert extended.encode_plain(["[DRUG] covid"]) == base.encode_plain(["[DRUG] covid"])
    assert set(extended.special_ids) == {*learned.special_ids, learned.size}


def test_tokenizer_difference(base: Tokenizer) -> None:
    extension = extend_tokenizer(base, DOMAIN, 25)
    extended = extension.tokenizer
    assert tokenizer_difference(base, base) is None
    assert tokenizer_difference(base, extended) is None
    assert f"id {base.size} is missing instead of {extension.tokens[0]!r}" == tokenizer_difference(extended, base)
    parts = new_tokens(base, extended)
    assert sorted(parts) == [*range(base.size, extended.size)]
    for gain in extension.best:
        assert base.tokens(parts[extended.vocabulary[gain.token]]) == [*gain.parts]
    other = learn_tokenizer(DOMAIN, "wordpiece", 300, progress=False)
    assert str(tokenizer_difference(base, other)).startswith("id ")
    cased = json.loads(json.dumps(base.content))
    cased["normalizer"] = None
    assert "normalizer differs" in str(tokenizer_difference(base, Tokenizer.from_json(json.dumps(cased))))


def test_new_added_tokens_are_encoded_as_text() -> None:
    base = learn_tokenizer(GENERAL, "wordpiece", 120, progress=False)
    backend = tokenizers.Tokenizer.from_str(json.dumps(base.content))
    backend.add_tokens(["brown fox", "東"])
    assert new_tokens(base, Tokenizer(backend)) == {
        base.size: base.encode_plain(["brown fox"])[0],
        base.size + 1: [],
    }


def test_command_writes_tokenizer_and_result(
    texts: Path, corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "domain.txt").write_text("\n\n".join(DOMAIN), encoding="utf-8")
    metrics = bertsmith.tokenizer([tmp_path / "domain.txt"], extend=corpus_folder, tokens=12, out=tmp_path / "out")
    assert "12 tokens added" in capsys.readouterr().out
    assert metrics["tokens_added"] == 12
    assert metrics["tokens_per_word_after"] < metrics["tokens_per_word_before"]
    assert len(metrics["best"]) == 10
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == metrics.to_json()
    extended = Tokenizer.load(tmp_path / "out")
    assert tokenizer_difference(Tokenizer.load(corpus_folder), extended) is None
    manifest = build_corpus([tmp_path / "domain.txt"], extended, tmp_path / "corpus", held_out=0.0, workers=1)
    assert manifest.vocabulary == extended.size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "tokens is 0; it must be at least 1"),
        ({"kind": "wordpiece"}, "--kind is 'wordpiece' with --extend"),
        ({"vocabulary": 300}, "--vocabulary is 300 with --extend"),
        ({"lowercase": True}, "--lowercase is True with --extend"),
        ({"extend": None, "tokens": 5}, "--tokens is 5 without --extend"),
        ({"extend": "nowhere"}, "tokenizer 'nowhere' does not exist"),
    ],
)
def test_invalid_settings_write_nothing(
    changes: dict, message: str, texts: Path, corpus_folder: Path, tmp_path
) -> None:
    with pytest.raises(InputError, match=message):
        bertsmith.tokenizer([texts], **{"extend": corpus_folder, "out": tmp_path / "out", **changes})
    assert not (tmp_path / "out").exists()


def test_unsupported_tokenizers_raise(base: Tokenizer) -> None:
    with pytest.raises(InputError, match="the tokenizer's model is WordLevel; an extension supports BPE, Unigram"):
        extend_tokenizer(Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))), DOMAIN, 5)
    with pytest.raises(InputError, match="needs no extension"):
        extend_tokenizer(base, ["kinase"], 5)
    with pytest.raises(InputError, match="has no text"):
        extend_tokenizer(base, [], 5)
