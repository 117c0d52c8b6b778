"""Train a tokenizer on documents: WordPiece, byte-level BPE, Unigram or characters, with BERT's special tokens.

Training is deterministic, byte for byte. The WordPiece and Unigram trainers of the tokenizers library are not, because
they number some tokens in the random order of a hash table; so WordPiece is trained as BPE over words with a prefix,
and Unigram's scores are sorted afterwards.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Literal, get_args

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from bertsmith.errors import InputError, nearest
from bertsmith.text.tokenizer import SPECIAL_TOKENS, Tokenizer, bert_template

Kind = Literal["wordpiece", "bytes", "unigram", "characters"]

# the rarest characters of a large corpus (together one in ten thousand) would fill a vocabulary with letters of scripts
# that the text hardly uses
_COVERAGE = 0.9999
# alphabets up to this size contain every letter of the text, even the rarest
_WHOLE_ALPHABET = 1000
_SPACE_MARK = "▁"
MAX_WORD_LETTERS = 1000
"""Longest word that a learned WordPiece splits; longer ones become [UNK]. Published vocabularies stop at 100 letters,
too few for proteins. Longest-match search is cubic in the length of a word (about 0.2 s for 1,000 letters), so there is
a limit; "bytes" and "unigram" have none."""
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
# always in a Unigram vocabulary, so that a literal "<0x41>" in a text does not match a byte token
_BYTE_TOKEN_LETTERS = "<0x123456789ABCDEF>"


MAX_VOCABULARY = 2_000_000
"""Maximum size; the tokenizer library reserves memory for all tokens and aborts if there is too little."""


def learn_tokenizer(
    documents: Iterable[str],
    kind: Kind,
    vocabulary: int,
    *,
    lowercase: bool | None = None,
    minimum_frequency: int = 2,
    progress: bool = True,
    alphabet: str | None = None,
    marks_words: bool = False,
) -> Tokenizer:
    """Train a tokenizer with at most `vocabulary` tokens on documents.

    The vocabulary is smaller if the text is too short to fill it. Pairs of tokens with fewer than `minimum_frequency`
    occurrences are not merged ("unigram" and "characters" ignore this argument). Text is lowercased by default, except
    for "characters".

    "characters" makes one token of every code point and normalises nothing. `alphabet` gives its letters instead of
    the text's; with `marks_words` a space begins a word, else every letter is a word of its own, as in proteins.
    """
    if kind not in get_args(Kind):
        raise InputError(f"kind is {kind!r}; {nearest(str(kind), get_args(Kind))}")
    if not 1 <= vocabulary <= MAX_VOCABULARY:
        raise InputError(f"vocabulary is {vocabulary}; allowed: 1 to {MAX_VOCABULARY:,}")
    if minimum_frequency < 1:
        raise InputError(f"minimum_frequency is {minimum_frequency}; it must be at least 1")
    if kind != "characters" and (alphabet is not None or marks_words):
        name = "marks_words" if alphabet is None else "alphabet"
        raise InputError(f"{name} is given with kind {kind!r}; it needs kind 'characters'")
    lowercase = kind != "characters" if lowercase is None else lowercase
    if kind == "characters":
        backend = _learn_characters(documents, vocabulary, lowercase, alphabet, marks_words)
    else:
        learn = {"wordpiece": _learn_wordpiece, "bytes": _learn_bytes, "unigram": _learn_unigram}[kind]
        backend = learn(documents, vocabulary, lowercase, minimum_frequency, progress)
    backend.post_processor = bert_template(SPECIAL_TOKENS.index("[CLS]"), SPECIAL_TOKENS.index("[SEP]"))
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return Tokenizer(backend)


def _learn_wordpiece(
    documents: Iterable[str], vocabulary: int, lowercase: bool, minimum_frequency: int, progress: bool
) -> tokenizers.Tokenizer:
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    splitter = pre_tokenizers.BertPreTokenizer()
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.normalizer = normalizer
    bpe.pre_tokenizer = pre_tokenizers.Sequence([splitter, pre_tokenizers.Metaspace(_SPACE_MARK)])
    characters = _CharacterCounts()
    # room for merges of the prefix with first letters, which give no token, and for rare letters
    bpe_size = vocabulary + max(vocabulary, 10_000)
    trainer = trainers.BpeTrainer(vocab_size=bpe_size, min_frequency=minimum_frequency, show_progress=progress)
    bpe.train_from_iterator(characters.count(documents), trainer)
    letters = [letter for letter in characters.frequent(normalizer) if not letter.isspace()]
    inner = [letter for letter in letters if len(splitter.pre_tokenize_str(_normalize(normalizer, f"a{letter}a"))) == 1]
    tokens = dict.fromkeys([*SPECIAL_TOKENS, *letters, *(f"##{letter}" for letter in inner)])
    _check_size(vocabulary, len(tokens), len(letters))
    known = set(letters)
    for left, right in json.loads(bpe.to_str())["model"]["merges"]:
        if len(tokens) == vocabulary:
            break
        merged = left + right
        token = merged[1:] if merged.startswith(_SPACE_MARK) else f"##{merged}"
        if known.issuperset(merged.removeprefix(_SPACE_MARK)):
            tokens[token] = None
    table = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.WordPiece(table, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_LETTERS)
    )
    backend.normalizer = normalizer
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def _learn_bytes(
    documents: Iterable[str], vocabulary: int, lowercase: bool, minimum_frequency: int, progress: bool
) -> tokenizers.Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _check_size(vocabulary, len(SPECIAL_TOKENS) + len(alphabet), len(alphabet))
    backend = tokenizers.Tokenizer(models.BPE())
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    characters = _CharacterCounts()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=minimum_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=progress,
    )
    backend.train_from_iterator(characters.count(documents), trainer)
    characters.require_text()
    return backend


def _learn_unigram(
    documents: Iterable[str], vocabulary: int, lowercase: bool, minimum_frequency: int, progress: bool
) -> tokenizers.Tokenizer:
    steps: list[normalizers.Normalizer] = [normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(r"\s+"), " ")]
    normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps] if lowercase else steps)
    splitter = pre_tokenizers.Metaspace(_SPACE_MARK, prepend_scheme="always")
    characters = _CharacterCounts()
    with tempfile.TemporaryFile() as spool:
        # two passes: rare letters, which become bytes, must be known before training
        _write_spool(characters.count(documents), spool)
        letters = {*characters.frequent(normalizer), *_BYTE_TOKEN_LETTERS, " "} - {_SPACE_MARK}
        needed = len(SPECIAL_TOKENS) + len(_BYTE_TOKENS) + len(letters)
        _check_size(vocabulary, needed, len(letters))
        rare = {
            ord(letter): " "
            for letter in characters.letters()
            if not letters.issuperset(_normalize(normalizer, letter))
        }
        unigram = tokenizers.Tokenizer(models.Unigram())
        unigram.normalizer, unigram.pre_tokenizer = normalizer, splitter
        trainer = trainers.UnigramTrainer(
            vocab_size=vocabulary - len(SPECIAL_TOKENS) - len(_BYTE_TOKENS) + 1,
            special_tokens=["[UNK]"],
            initial_alphabet=list(_BYTE_TOKEN_LETTERS),
            unk_token="[UNK]",
            show_progress=progress,
        )
        unigram.train_from_iterator((text.translate(rare) for text in _read_spool(spool)), trainer)
    scored = _sort_by_score(json.loads(unigram.to_str())["model"]["vocab"])
    # byte tokens only replace letters without a token; with this score no text matches them
    lowest = min(score for _, score in scored) - 1000.0
    table = [*((token, 0.0) for token in SPECIAL_TOKENS), *((token, lowest) for token in _BYTE_TOKENS), *scored]
    unknown = SPECIAL_TOKENS.index("[UNK]")
    backend = tokenizers.Tokenizer(models.Unigram(table, unk_id=unknown, byte_fallback=True))
    backend.normalizer, backend.pre_tokenizer = normalizer, splitter
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def _learn_characters(
    documents: Iterable[str], vocabulary: int, lowercase: bool, alphabet: str | None, marks_words: bool
) -> tokenizers.Tokenizer:
    normalizer = normalizers.Lowercase() if lowercase else None
    if alphabet is None:
        characters = _CharacterCounts()
        for _ in characters.count(documents):
            pass
        letters = characters.frequent(normalizer, at_least=_WHOLE_ALPHABET)
    else:
        if not alphabet:
            raise InputError("alphabet is empty; give the letters, such as ACDEFGHIKLMNPQRSTVWY, or omit it")
        letters = sorted(set(_normalize(normalizer, alphabet)))
    table = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *letters])}
    _check_size(vocabulary, len(table), len(letters))
    # BPE without merges gives one token per code point with exact offsets, faster than a pre-tokenizer that splits
    backend = tokenizers.Tokenizer(models.BPE(table, [], unk_token="[UNK]", fuse_unk=False))
    if normalizer is not None:
        backend.normalizer = normalizer
    if marks_words:
        # it changes no token; Tokenizer.starts_word reads it
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    backend.decoder = decoders.Fuse()
    return backend


def _sort_by_score(scored: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Sort Unigram tokens by score; the trainer's order is random."""
    tokens = [(token, score) for token, score in scored if token not in SPECIAL_TOKENS]
    lowest = min(score for _, score in tokens)
    letters = sum(len(token) == 1 for token, _ in tokens)
    # letters without a sampled token get the lowest score plus 1e-4 each, in random order: make them equal
    limit = lowest + 1e-4 * (letters + 1)
    equalised = [(token, lowest if len(token) == 1 and score < limit else score) for token, score in tokens]
    # the last digits of float sums depend on the order
    rounded = [(token, round(score, 5)) for token, score in equalised]
    return sorted(rounded, key=lambda entry: (-entry[1], entry[0]))


def _check_size(vocabulary: int, needed: int, letters: int) -> None:
    if vocabulary < needed:
        raise InputError(
            f"vocabulary is {vocabulary}, too small for the {letters} letters of this text and the required tokens; it "
            f"must be at least {needed}"
        )


def _normalize(normalizer: normalizers.Normalizer | None, text: str) -> str:
    result: str = text if normalizer is None else normalizer.normalize_str(text)
    return result


class _CharacterCounts:
    """Character counts of a stream of documents."""

    def __init__(self) -> None:
        self.counts = np.zeros(0x110000, dtype=np.int64)

    def count(self, documents: Iterable[str]) -> Iterator[str]:
        """Yield the documents unchanged, and count their characters."""
        for document in documents:
            counts = np.bincount(np.frombuffer(document.encode("utf-32-le"), dtype=np.uint32))
            self.counts[: len(counts)] += counts
            yield document

    def letters(self) -> list[str]:
        return [chr(point) for point in np.flatnonzero(self.counts)]

    def require_text(self) -> None:
        if not self.counts.any():
            raise InputError("the data has no text to learn a tokenizer from")

    def frequent(self, normalizer: normalizers.Normalizer | None, *, at_least: int = 0) -> list[str]:
        """Return the normalised characters that cover nearly all of the text, sorted; the `at_least` most frequent."""
        self.require_text()
        totals: dict[str, int] = {}
        for letter in self.letters():
            for normal in _normalize(normalizer, letter):
                totals[normal] = totals.get(normal, 0) + int(self.counts[ord(letter)])
        target = sum(totals.values()) * _COVERAGE
        frequent: list[str] = []
        covered = 0
        for letter, count in sorted(totals.items(), key=lambda entry: (-entry[1], entry[0])):
            if covered >= target and len(frequent) >= at_least:
                break
            frequent.append(letter)
            covered += count
        return sorted(frequent)


def _write_spool(documents: Iterable[str], spool: IO[bytes]) -> None:
    for document in documents:
        content = document.encode()
        spool.write(len(content).to_bytes(8, "little") + content)


def _read_spool(spool: IO[bytes]) -> Iterator[str]:
    spool.seek(0)
    while head := spool.read(8):
        yield spool.read(int.from_bytes(head, "little")).decode()
