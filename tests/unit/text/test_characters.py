"""Character tokenizers: one token per code point, nothing normalised, nothing lost inside the alphabet."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

import bertsmith
from bertsmith.data.build_corpus import build_corpus
from bertsmith.data.shards import TokenCorpus
from bertsmith.errors import InputError
from bertsmith.text.cut import cut_tokenizer
from bertsmith.text.extend import extend_tokenizer
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from bertsmith.text.word_cache import WordCache

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWYBOUXZ"
WRITTEN = ["Ein  Satz,\tmit Zeichen: é e\u0301 ß ﬁ İ 東京 👩‍🔬 Ⅷ.", " a b", "AbC xyz"]


def learn(texts: list[str], **settings: object) -> Tokenizer:
    return learn_tokenizer(texts, "characters", 30522, progress=False, **settings)


def test_every_code_point_is_one_token_and_decoding_restores_the_text() -> None:
    tokenizer = learn(WRITTEN)
    for text in WRITTEN:
        ((ids, offsets),) = tokenizer.encode_offsets([text])
        assert offsets.tolist() == [[place, place + 1] for place in range(len(text))]
        assert tokenizer.tokens(ids) == list(text)  # no lowercasing, no NFKC, white space kept
        assert tokenizer.decode(ids) == text
    letters = sorted(set("".join(WRITTEN)))
    assert tokenizer.tokens(range(tokenizer.size)) == [*SPECIAL_TOKENS, *letters]


def test_ids_depend_on_the_alphabet_only() -> None:
    first, second = learn(["MKV", "ACD"]), learn(["DCA", "VKM", "MMMM"])
    assert first.hash == second.hash
    given = learn([], alphabet=AMINO_ACIDS)
    assert given.hash == learn(["anything"], alphabet=AMINO_ACIDS[::-1]).hash
    assert given.size == 30
    assert given.encode_plain(["AZ"]) == [[5, 29]]


def test_each_unknown_letter_is_one_unknown_token() -> None:
    tokenizer = learn([], alphabet=AMINO_ACIDS)
    (ids,) = tokenizer.encode_plain(["AjjA*"])
    assert ids == [5, tokenizer.unknown, tokenizer.unknown, 5, tokenizer.unknown]
    encoded = tokenizer.encode(["MK", "V"])
    assert encoded["input_ids"][:, 0].tolist() == [tokenizer.start] * 2
    assert encoded["input_ids"][1, 2:].tolist() == [tokenizer.separator, tokenizer.pad]


def test_rare_letters_stay_unless_there_are_more_than_a_thousand() -> None:
    common = "a" * 200_000
    few = learn([common, "z"])
    assert "z" in few.vocabulary
    many = "".join(chr(0x4E00 + index) for index in range(1500))
    assert learn([common, many]).size == len(SPECIAL_TOKENS) + 1481  # 99.99 % of the text


def test_every_letter_is_a_word_unless_spaces_begin_words() -> None:
    assert learn([], alphabet=AMINO_ACIDS).starts_word.all()
    plain, marked = learn(WRITTEN), learn(WRITTEN, marks_words=True)
    assert plain.starts_word.all()
    starts = {token for token, token_id in marked.vocabulary.items() if marked.starts_word[token_id]}
    assert starts == {" ", *SPECIAL_TOKENS}
    assert marked.encode_plain(WRITTEN) == plain.encode_plain(WRITTEN)
    assert [marked.decode(ids) for ids in marked.encode_plain(WRITTEN)] == WRITTEN
    assert Tokenizer.from_json(json.dumps(marked.content)).starts_word.tolist() == marked.starts_word.tolist()


def test_word_cache_encodes_whole_sentences() -> None:
    generator = random.Random(0)
    texts = ["".join(generator.choices("ab c\t\nd", k=generator.randint(1, 40))) for _ in range(50)]
    for tokenizer in (learn(["ab cd"]), learn(["ab cd"], marks_words=True)):
        tokens, counts = WordCache(tokenizer).encode(texts)
        expected = tokenizer.encode_plain(texts)
        assert counts.tolist() == list(map(len, expected))
        assert tokens.tolist() == [token for row in expected for token in row]


def test_vocabulary_cut_and_extension_keep_the_letters() -> None:
    tokenizer = learn(WRITTEN, marks_words=True)
    cut = cut_tokenizer(tokenizer, [])
    assert cut.ids == tuple(range(tokenizer.size))  # every token is a letter that any text may need
    extended = extend_tokenizer(tokenizer, ["abab abab abab"] * 5, 2).tokenizer
    assert extended.size > tokenizer.size
    assert all(extended.vocabulary[token] == token_id for token, token_id in tokenizer.vocabulary.items())
    (ids,) = extended.encode_plain(["abab C"])
    assert len(ids) < 6
    assert extended.decode(ids) == "abab C"


def test_file_loads_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = learn([], alphabet=AMINO_ACIDS)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer.save(tmp_path)))
    assert theirs("MKVJ")["input_ids"] == tokenizer.encode(["MKVJ"])["input_ids"][0].tolist()
    assert Tokenizer.load(tmp_path).hash == tokenizer.hash


def test_lowercase_is_off_by_default_and_possible() -> None:
    assert learn(["Ab"]).size == learn(["Ab"], lowercase=True).size
    assert learn(["Ab"], lowercase=True).encode_plain(["aB"]) == [[5, 6]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "bytes", "alphabet": "AB"}, "alphabet is given with kind 'bytes'; it needs kind 'characters'"),
        ({"kind": "bytes", "marks_words": True}, "marks_words is given with kind 'bytes'"),
        ({"kind": "characters", "alphabet": ""}, "alphabet is empty"),
        ({"kind": "characters", "vocabulary": 6}, "too small for the 2 letters"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        learn_tokenizer(["ab"], **{"vocabulary": 300, **settings})


def test_command_counts_letters_outside_the_alphabet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "proteins.jsonl"
    data.write_text('{"sequence": "MKV*"}\n{"sequence": "ACDJ"}\n', encoding="utf-8")
    result = bertsmith.tokenizer(
        [data], out=tmp_path / "tokenizer", kind="characters", alphabet=AMINO_ACIDS, field="sequence"
    )
    assert (result.vocabulary, result.documents, result.unknown_letters) == (30, 2, 2)
    assert "2 of 8 letters of the text are not in the alphabet" in capsys.readouterr().out
    with pytest.raises(InputError, match="--alphabet is 'AB' without --kind characters"):
        bertsmith.tokenizer([data], out=tmp_path / "other", alphabet="AB")


def test_corpus_has_every_residue_of_a_protein(tmp_path: Path) -> None:
    generator = random.Random(1)
    proteins = ["".join(generator.choices(AMINO_ACIDS, k=generator.randint(30, 3000))) for _ in range(20)]
    data = tmp_path / "proteins.jsonl"
    data.write_text("".join(json.dumps({"sequence": protein}) + "\n" for protein in proteins), encoding="utf-8")
    tokenizer = learn([], alphabet=AMINO_ACIDS)
    build_corpus([data], tokenizer, tmp_path / "corpus", field="sequence", held_out=0.0, workers=1)
    corpus = TokenCorpus(tmp_path / "corpus")
    assert corpus.lengths.tolist() == list(map(len, proteins))
    for document, protein in enumerate(proteins):
        assert corpus.sentence_starts(document).tolist() == [0, len(protein)]
        assert tokenizer.decode(np.asarray(corpus.read(document, 0, len(protein)))) == protein
