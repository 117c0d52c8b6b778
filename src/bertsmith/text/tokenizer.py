"""The tokenizer of all families: texts to ids and back, loaded from a tokenizer.json or a BERT vocab.txt."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple, Self, TypeAlias, cast, overload

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bertsmith.errors import InputError, first_line
from bertsmith.files import parse_json, read_json, read_text, write_text
from bertsmith.text.word_cache import WordCache, concatenated_ranges

TokenizerContent: TypeAlias = dict[str, Any]
"""The content of a tokenizer.json, or one of its sections."""
MAX_MISSING_IDS = 100_000
"""Ids without a token that a tokenizer.json may have; the library allocates memory for each."""
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer from a folder, a tokenizer.json or a vocab.txt."""
    if not path.exists():
        raise InputError(f"tokenizer {str(path)!r} does not exist")
    if path.is_dir():
        for name in ("tokenizer.json", "vocab.txt"):
            if (path / name).is_file():
                return read_backend(path / name)
        raise InputError(f"tokenizer folder {str(path)!r} has neither tokenizer.json nor vocab.txt")
    if path.suffix == ".json":
        return _read_json(path)
    if path.suffix == ".txt":
        return _read_vocabulary(path)
    raise InputError(f"tokenizer file {str(path)!r} has an unknown ending; allowed: tokenizer.json, vocab.txt")


def bert_template(start: int, separator: int) -> processors.TemplateProcessing:
    """Return the template [CLS] a [SEP] b [SEP] with type 0 up to the first [SEP] and 1 after it."""
    return processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", start), ("[SEP]", separator)],
    )


def _read_json(path: Path) -> tokenizers.Tokenizer:
    text = read_text(path)
    content = parse_json(text, str(path))
    if not isinstance(content, dict):
        raise InputError(f"tokenizer file {str(path)!r} is not a JSON object")
    defect = _defect(content)
    if defect is not None:
        raise InputError(f"tokenizer file {str(path)!r} is damaged: {defect}; restore the file")
    try:
        return tokenizers.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library raises bare exceptions, and Rust panics
        raise InputError(f"tokenizer file {str(path)!r} is not a usable tokenizer.json: {first_line(error)}") from None


def _defect(content: TokenizerContent) -> str | None:
    """Return an error of a tokenizer.json for which the library allocates too much memory or ends the process."""
    try:
        ids = _token_ids(content)
        if ids and max(ids) > len(ids) + MAX_MISSING_IDS:
            return f"it has {len(ids):,} tokens, but one has the id {max(ids):,}"
        return _template_defect(content.get("post_processor"), ids)
    except (AttributeError, KeyError, TypeError):  # sections of another shape, which the library describes
        return None


def _token_ids(content: TokenizerContent) -> set[int]:
    """Return the ids of the vocabulary, which is a list in a Unigram model, and of added tokens."""
    vocabulary = content["model"]["vocab"]
    own = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return {*own, *(token["id"] for token in content.get("added_tokens") or ())}


def _template_defect(processor: Any, ids: set[int]) -> str | None:
    """Return the first error in the templates of a post-processor, which may be a sequence of several."""
    if processor is None:
        return None
    if processor["type"] == "Sequence":
        return next(filter(None, (_template_defect(inner, ids) for inner in processor["processors"])), None)
    if processor["type"] != "TemplateProcessing":
        return None
    special = processor["special_tokens"]
    missing = sorted({token_id for token in special.values() for token_id in token["ids"]} - ids)
    if missing:
        return f"post_processor has the id {missing[0]}, which is not in the vocabulary"
    for kind in ("single", "pair"):
        for piece in processor[kind]:
            if "SpecialToken" in piece and piece["SpecialToken"]["id"] not in special:
                return f"post_processor names {piece['SpecialToken']['id']!r}, which is not one of its special_tokens"
            if kind == "single" and "Sequence" in piece and piece["Sequence"]["id"] == "B":
                return "post_processor has a second text in the template of a single one"
    return None


def _read_vocabulary(path: Path) -> tokenizers.Tokenizer:
    """Read BERT's WordPiece tokenizer from a vocabulary with one token per line."""
    lines = read_text(path).split("\n")
    if lines[-1] == "":
        lines.pop()
    vocabulary = {line.removesuffix("\r"): index for index, line in enumerate(lines)}
    missing = [token for token in ("[UNK]", "[CLS]", "[SEP]") if token not in vocabulary]
    if missing:
        raise InputError(f"tokenizer file {str(path)!r} lacks {', '.join(missing)}; it must have one token per line")
    settings = _bert_settings(path.parent / "tokenizer_config.json")
    backend = tokenizers.Tokenizer(
        models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100, continuing_subword_prefix="##")
    )
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(settings["tokenize_chinese_chars"]),
        strip_accents=settings["strip_accents"],
        lowercase=bool(settings["do_lower_case"]),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.post_processor = bert_template(vocabulary["[CLS]"], vocabulary["[SEP]"])
    backend.add_special_tokens([token for token in SPECIAL_TOKENS if token in vocabulary])
    return backend


def _bert_settings(path: Path) -> dict[str, bool | None]:
    """Return the settings of BERT's normalizer, read from tokenizer_config.json if it exists."""
    settings: dict[str, bool | None] = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}
    if not path.is_file():
        return settings
    config = read_json(path)
    for name in settings:
        if name in config:
            value = config[name]
            if not (isinstance(value, bool) or (name == "strip_accents" and value is None)):
                raise InputError(f"file {str(path)!r}: {name} is {value!r}; it must be true or false")
            settings[name] = value
    return settings


ROLES = {
    "pad": ("[PAD]", "<pad>"),
    "unknown": ("[UNK]", "<unk>"),
    "start": ("[CLS]", "<s>"),
    "separator": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}


class PairFrame(NamedTuple):
    """Special tokens around the two texts of a pair."""

    before: list[int]
    between: list[int]
    after: list[int]
    types: tuple[int, int, int, int, int]
    """Token type ids of prefix, first text, separator, second text, suffix."""


class TextFrame(NamedTuple):
    """Special tokens around a single text, and the token types of prefix, text and suffix."""

    before: list[int]
    after: list[int]
    types_before: list[int]
    type: int
    types_after: list[int]


class FlatTokens(NamedTuple):
    """The concatenated tokens of many texts.

    Shape: ids and types (tokens,), int32; lengths (texts,), int64.
    """

    ids: np.ndarray
    types: np.ndarray | None
    lengths: np.ndarray


_BATCH_TEXTS = 1024  # texts passed to the backend at a time, whose own records are large
_LONG = 32  # characters per wanted token from which a prefix of a text is tokenised first
_PREFIX = 8  # characters per wanted token of the first prefix
_PREFIX_GROWTH = 16
_MARGIN = 16  # words before the end of a prefix that may be split otherwise in the whole text
# anchors and unbounded lookarounds, with which a pattern could depend on the distant end of a text
_DISTANT_PATTERN = re.compile(r"\$|\\[zZ]|\(\?<?[=!][^)]*[*+{]")


class Tokenizer:
    """Encodes texts as token ids and finds special tokens by their role; padding is always on the right.

    It is thread-safe, and cheap to pickle.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # files may contain padding and truncation settings; here they are arguments of `encode`
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._text = backend.to_str(pretty=True)
        self._cache_lock = Lock()

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a folder (tokenizer.json, or vocab.txt with an optional tokenizer_config.json) or a file."""
        return cls(read_backend(Path(path)))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Create a tokenizer from the content of a tokenizer.json."""
        return cls(tokenizers.Tokenizer.from_str(text))

    def with_tokens(self, tokens: Sequence[str]) -> Self:
        """Return a copy with added tokens, which are never split and never normalised; old ids do not change."""
        backend = tokenizers.Tokenizer.from_str(self._text)
        backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in tokens])
        return type(self)(backend)

    def lowercasing(self) -> Self:
        """Return a copy that lower-cases texts first; the tokenizer itself if it does so already."""
        steps = json.dumps(self.content["normalizer"])
        if '"Lowercase"' in steps or '"lowercase": true' in steps:
            return self
        backend = tokenizers.Tokenizer.from_str(self._text)
        rest = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])
        return type(self)(backend)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).from_json, (self._text,)

    @property
    def pad(self) -> int:
        """Id of the padding token."""
        return self._role("pad")

    @property
    def unknown(self) -> int:
        """Id of the unknown token."""
        return self._role("unknown")

    @property
    def start(self) -> int:
        """Id of the token at the start of every sequence."""
        return self._role("start")

    @property
    def separator(self) -> int:
        """Id of the token after every segment."""
        return self._role("separator")

    @property
    def mask(self) -> int:
        """Id of the mask token."""
        return self._role("mask")

    def _role(self, role: str) -> int:
        token = self._roles.get(role)
        if token is None:
            names = " or ".join(ROLES[role])
            raise InputError(f"the tokenizer has no {role} token; its vocabulary must contain {names}")
        return token

    @cached_property
    def _roles(self) -> dict[str, int]:
        roles = {}
        for role, names in ROLES.items():
            ids = (self.vocabulary[name] for name in names if name in self.vocabulary)
            if (token_id := next(ids, None)) is not None:
                roles[role] = token_id
        return roles

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Id of every token, added tokens included."""
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary

    @property
    def normalizer(self) -> normalizers.Normalizer | None:
        """The backend's normalizer."""
        return self._backend.normalizer

    @cached_property
    def special_ids(self) -> tuple[int, ...]:
        """Sorted ids of special tokens: tokens with a role and added tokens marked as special."""
        added = self._backend.get_added_tokens_decoder()
        return tuple(sorted({*self._roles.values(), *(token for token, content in added.items() if content.special)}))

    @cached_property
    def size(self) -> int:
        """Number of embedding rows: the highest id plus one."""
        return max(self.vocabulary.values()) + 1

    @cached_property
    def content(self) -> TokenizerContent:
        """The content of tokenizer.json, without padding and truncation."""
        content: TokenizerContent = json.loads(self._text)
        return content

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the content, independent of the formatting of the file."""
        canonical = json.dumps(self.content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def single_texts_have_types(self) -> bool:
        """Whether the encoding of a single text has token types other than 0."""
        (row,) = self._encode(["a"])
        return any(row.type_ids)

    @cached_property
    def starts_word(self) -> np.ndarray:
        """Mask of tokens that begin a word; special tokens count as words.

        Shape: (size,), bool
        """
        starts = np.ones(self.size, dtype=bool)
        continuing, leading = self._word_marks()
        special = set(self.special_ids)
        for token, token_id in self.vocabulary.items():
            if token_id in special:
                continue
            if continuing:
                starts[token_id] = not token.startswith(continuing)
            elif leading:
                starts[token_id] = token.startswith(leading)
        return starts

    def _word_marks(self) -> tuple[str, str]:
        """Return the prefixes of tokens that continue a word and that begin a word; at most one is not empty."""
        model = self.content["model"]
        if model.get("continuing_subword_prefix"):
            return model["continuing_subword_prefix"], ""
        if model["type"] == "WordLevel":
            return "", ""
        # either the normalizer or the pre-tokenizer may add the prefix
        steps = json.dumps([self.content["normalizer"], self.content["pre_tokenizer"]], ensure_ascii=False)
        if '"ByteLevel"' in steps:
            return "", "Ġ"
        splitter = self.content["pre_tokenizer"] or {}
        if splitter.get("pattern") == {"String": " "} and splitter["behavior"] == "MergedWithNext":
            return "", " "
        return ("", "▁") if model["type"] == "Unigram" or "▁" in steps else ("", "")

    @overload
    def encode(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = ...,
        max_length: int | None = ...,
        *,
        padding: Literal[True] = ...,
    ) -> dict[str, np.ndarray]: ...
    @overload
    def encode(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = ...,
        max_length: int | None = ...,
        *,
        padding: Literal[False],
    ) -> dict[str, list[np.ndarray]]: ...
    def encode(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        max_length: int | None = None,
        *,
        padding: bool = True,
    ) -> dict[str, np.ndarray] | dict[str, list[np.ndarray]]:
        """Return input_ids, attention_mask and token_type_ids of texts, or of pairs of texts, with special tokens.

        Longer inputs are truncated to `max_length`, the longer text of a pair first. With `padding` every value is an
        array of shape (texts, length), else a list of arrays.
        """
        encodings = list(chain.from_iterable(self._encode_truncated(texts, pairs, max_length)))
        rows = [np.asarray(encoding.ids, dtype=np.int64)[kept] for encoding, kept in encodings]
        types = [np.asarray(encoding.type_ids, dtype=np.int64)[kept] for encoding, kept in encodings]
        if not padding:
            masks = [np.ones(len(row), dtype=np.int64) for row in rows]
            return {"input_ids": rows, "attention_mask": masks, "token_type_ids": types}
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        is_token = np.arange(lengths.max(initial=0)) < lengths[:, None]
        input_ids = np.full(is_token.shape, 0 if is_token.all() else self.pad, dtype=np.int64)
        token_type_ids = np.zeros(is_token.shape, dtype=np.int64)
        if rows:
            input_ids[is_token] = np.concatenate(rows)
            token_type_ids[is_token] = np.concatenate(types)
        return {
            "input_ids": input_ids,
            "attention_mask": is_token.astype(np.int64),
            "token_type_ids": token_type_ids,
        }

    def __len__(self) -> int:
        return self.size

    def __call__(
        self,
        texts: str | Sequence[str],
        pairs: str | Sequence[str] | None = None,
        *,
        max_length: int | None = None,
        padding: bool = False,
        return_tensors: Literal["np", "pt"] | None = None,
    ) -> dict[str, Any]:
        """Return input_ids, attention_mask and token_type_ids as `transformers`' tokenizers do.

        The values are lists of ids, one for a string or one per text of a list, or arrays or tensors of shape (texts,
        length) if `return_tensors` is given. `max_length` truncates.
        """
        if return_tensors not in (None, "np", "pt"):
            raise InputError(f"return_tensors is {return_tensors!r}; allowed: np, pt, or None for lists")
        is_one = isinstance(texts, str)
        rows = [texts] if isinstance(texts, str) else texts
        others = [pairs] if isinstance(pairs, str) else pairs
        if return_tensors is None and not padding:
            lists = self.encode(rows, others, max_length, padding=False)
            return {
                name: [row.tolist() for row in values][0 if is_one else slice(None)] for name, values in lists.items()
            }
        arrays = self.encode(rows, others, max_length)
        if return_tensors is None:
            return {name: values.tolist()[0 if is_one else slice(None)] for name, values in arrays.items()}
        if return_tensors == "np":
            return dict(arrays)
        import torch  # the rest of this module works without PyTorch

        return {name: torch.from_numpy(values) for name, values in arrays.items()}

    def encode_flat(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        max_length: int | None = None,
        *,
        has_types: bool = False,
    ) -> FlatTokens:
        """Return the tokens of many texts, or pairs of texts, as `encode` does, but concatenated.

        It takes a fraction of the time and memory of `encode`, because it makes no array for every text, and most
        tokenizers encode every distinct word of single texts once.
        """
        self._check(texts, pairs, max_length)
        by_words = pairs is None and self._word_cache.splits_words
        parts = [FlatTokens(np.empty(0, np.int32), np.empty(0, np.int32) if has_types else None, np.empty(0, np.int64))]
        for begin in range(0, len(texts), _BATCH_TEXTS):
            batch = slice(begin, begin + _BATCH_TEXTS)
            if by_words:
                parts.append(self._flat_by_words(texts[batch], max_length, has_types))
            else:
                others = None if pairs is None else pairs[batch]
                parts.append(self._flat(texts[batch], others, max_length, has_types))
        types = [part.types for part in parts if part.types is not None]
        return FlatTokens(
            np.concatenate([part.ids for part in parts]),
            np.concatenate(types) if has_types else None,
            np.concatenate([part.lengths for part in parts]),
        )

    def _flat(
        self, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int | None, has_types: bool
    ) -> FlatTokens:
        """Return the tokens of one batch by the backend."""
        encodings = self._encode_batch(texts, pairs, max_length)
        rows = [_select(encoding.ids, kept) for encoding, kept in encodings]
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        count = int(lengths.sum())
        ids = np.fromiter(chain.from_iterable(rows), np.int32, count)
        if not has_types:
            return FlatTokens(ids, None, lengths)
        rows = [_select(encoding.type_ids, kept) for encoding, kept in encodings]
        return FlatTokens(ids, np.fromiter(chain.from_iterable(rows), np.int32, count), lengths)

    def _flat_by_words(self, texts: Sequence[str], max_length: int | None, has_types: bool) -> FlatTokens:
        """Return the tokens of one batch of single texts by the word cache."""
        frame = self._text_frame
        specials = len(frame.before) + len(frame.after)
        prefixes = list(texts) if max_length is None else self._prefixes(texts, max_length)
        with self._cache_lock:
            tokens, counts = self._word_cache.encode(prefixes)
        kept = counts if max_length is None else np.minimum(counts, max_length - specials)
        lengths = kept + specials
        starts = np.cumsum(lengths) - lengths
        first, end = starts + len(frame.before), starts + len(frame.before) + kept
        ids = np.empty(int(lengths.sum()), dtype=np.int32)
        ids[concatenated_ranges(first, kept)] = tokens[concatenated_ranges(np.cumsum(counts) - counts, kept)]
        types = np.full_like(ids, frame.type)
        for begins, special, own_types in (
            (starts, frame.before, frame.types_before),
            (end, frame.after, frame.types_after),
        ):
            for offset, (token, own_type) in enumerate(zip(special, own_types, strict=True)):
                ids[begins + offset], types[begins + offset] = token, own_type
        return FlatTokens(ids, types if has_types else None, lengths)

    @cached_property
    def _word_cache(self) -> WordCache:
        return WordCache(self)

    @cached_property
    def _text_frame(self) -> TextFrame:
        (row,) = self._encode(["a"], has_words=True)
        ids, types, owners = row.ids, row.type_ids, row.sequence_ids
        begin, end = owners.index(0), len(owners) - owners[::-1].index(0)
        return TextFrame(ids[:begin], ids[end:], types[:begin], types[begin], types[end:])

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text without special tokens, not truncated."""
        _check_texts("texts", texts)
        return [encoding.ids for encoding in self._encode(list(texts), add_special_tokens=False)]

    def encode_offsets(
        self, texts: Sequence[str], max_tokens: int | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the token ids of each text without special tokens, at most `max_tokens`, and their character offsets.

        Shape: (tokens,) and (tokens, 2), int32.
        """
        _check_texts("texts", texts)
        prefixes = list(texts) if max_tokens is None else self._prefixes(texts, max_tokens)
        rows = self._encode(prefixes, has_words=True, add_special_tokens=False)
        return [
            (np.array(row.ids[:max_tokens], np.int32), np.array(row.offsets[:max_tokens], np.int32).reshape(-1, 2))
            for row in rows
        ]

    def pair_frame(self) -> PairFrame:
        """Return the special tokens and types of a pair of texts."""
        (row,) = self._encode([("a", "a")], has_words=True)
        texts, ids, types = row.sequence_ids, row.ids, row.type_ids
        if 0 not in texts or 1 not in texts or texts[0] is not None:
            raise InputError("the tokenizer adds no special token before a pair of texts; one such as [CLS] is needed")
        first, second = texts.index(0), texts.index(1)
        first_end = len(texts) - texts[::-1].index(0)
        second_end = len(texts) - texts[::-1].index(1)
        between, after = ids[first_end:second], ids[second_end:]
        type_ids = (types[0], types[first], types[second - 1], types[second], types[-1])
        return PairFrame(ids[:first], between, after, type_ids)

    def encode_words(self, words: list[str]) -> tuple[list[int], list[int]]:
        """Return the token ids of words, each encoded as a separate text, and the word index of every token."""
        (encoding,) = self._encode([words], has_words=True, add_special_tokens=False, is_pretokenized=True)
        return encoding.ids, cast(list[int], encoding.word_ids)  # only special tokens have no word

    def split_words(self, texts: Sequence[str]) -> list[list[list[str]]]:
        """Return the tokens of every word of each text; words are the units of the pre-tokenizer."""
        _check_texts("texts", texts)
        rows = self._encode(list(texts), has_words=True, add_special_tokens=False)
        pairs = (zip(row.word_ids, row.tokens, strict=True) for row in rows)
        return [[[token for _, token in word] for _, word in groupby(row, itemgetter(0))] for row in pairs]

    def spell(self, token: str) -> list[int]:
        """Encode a token of another vocabulary, prefix included; empty if its letters are unknown."""
        model = self.content["model"]
        if model["type"] != "WordPiece":
            return [part.id for part in self._backend.model.tokenize(token)]
        prefix = model["continuing_subword_prefix"]
        mark, letters = (prefix, token.removeprefix(prefix)) if token.startswith(prefix) else ("", token)
        ids: list[int] = []
        while letters:
            length = next((end for end in range(len(letters), 0, -1) if mark + letters[:end] in self.vocabulary), 0)
            if not length:
                return []
            ids.append(self.vocabulary[mark + letters[:length]])
            mark, letters = prefix, letters[length:]
        return ids

    def _check(self, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int | None) -> None:
        """Raise InputError if the arguments of an encoding are invalid."""
        _check_texts("texts", texts)
        if pairs is not None:
            _check_texts("pairs", pairs)
            if len(pairs) != len(texts):
                raise InputError(f"pairs has length {len(pairs)} and texts {len(texts)}; they must have equal lengths")
        if max_length is not None:
            needed = self._backend.num_special_tokens_to_add(pairs is not None) + 1
            if max_length < needed:
                raise InputError(f"max_length is {max_length}; at least {needed} is needed for the special tokens")

    def _encode_truncated(
        self, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int | None
    ) -> Iterator[list[tuple[tokenizers.Encoding, np.ndarray | slice]]]:
        """Yield the encodings of texts, or pairs of texts, in batches, with the positions that truncation keeps."""
        self._check(texts, pairs, max_length)
        for begin in range(0, len(texts), _BATCH_TEXTS):
            batch = slice(begin, begin + _BATCH_TEXTS)
            yield self._encode_batch(texts[batch], None if pairs is None else pairs[batch], max_length)

    def _encode_batch(
        self, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int | None
    ) -> list[tuple[tokenizers.Encoding, np.ndarray | slice]]:
        """Return the encodings of one batch."""
        columns = [texts] if pairs is None else [texts, pairs]
        prefixes = [list(column) if max_length is None else self._prefixes(column, max_length) for column in columns]
        encodings = self._encode(prefixes[0] if pairs is None else list(zip(*prefixes, strict=True)))
        if max_length is None:
            return [(encoding, slice(None)) for encoding in encodings]
        return [
            (encoding, _kept_positions(encoding, max_length, whole, shortened))
            for encoding, whole, shortened in zip(
                encodings, zip(*columns, strict=True), zip(*prefixes, strict=True), strict=True
            )
        ]

    def _prefixes(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """Replace every long text by a prefix that has the same first `max_tokens` tokens, and more of them.

        Only the last words of a prefix can be tokenised differently in the whole text. A prefix is therefore long
        enough if some words follow the word of the last wanted token.
        """
        prefixes = list(texts)
        pending = [index for index, text in enumerate(texts) if len(text) > _LONG * (max_tokens + self._margin)]
        characters = _PREFIX * (max_tokens + self._margin)
        while pending and self._is_local:
            rows = self._encode(
                [texts[index][:characters] for index in pending], has_words=True, add_special_tokens=False
            )
            for index, row in zip(pending, rows, strict=True):
                words = cast(list[int], row.word_ids)  # only special tokens have no word
                if len(words) > max_tokens and words[max_tokens] + self._margin <= words[-1]:
                    prefixes[index] = texts[index][:characters]
            characters *= _PREFIX_GROWTH
            pending = [index for index in pending if prefixes[index] is texts[index] and characters < len(texts[index])]
        return prefixes

    @cached_property
    def _margin(self) -> int:
        """Words at the end of a prefix that may be split otherwise in the whole text, such as half an added token."""
        return _MARGIN + max((len(token["content"]) for token in self.content["added_tokens"]), default=0)

    @cached_property
    def _is_local(self) -> bool:
        """Whether the words of a text depend only on the characters nearby, as in all published tokenizers."""
        steps = [self.content["normalizer"], self.content["pre_tokenizer"]]
        return not any(_DISTANT_PATTERN.search(pattern) for pattern in _patterns(steps))

    def _encode(
        self,
        inputs: Sequence[str | tuple[str, str] | list[str]],
        *,
        has_words: bool = False,
        add_special_tokens: bool = True,
        is_pretokenized: bool = False,
    ) -> list[tokenizers.Encoding]:
        # the fast method omits offsets and word indices
        fast = getattr(self._backend, "encode_batch_fast", self._backend.encode_batch)
        encode = self._backend.encode_batch if has_words else fast
        try:
            encodings: list[tokenizers.Encoding] = encode(
                inputs, add_special_tokens=add_special_tokens, is_pretokenized=is_pretokenized
            )
        except (TypeError, MemoryError):
            raise
        except Exception as error:  # the library raises bare exceptions, such as for a missing unknown token
            raise InputError(f"the tokenizer cannot encode a text: {first_line(error)}; restore its file") from None
        return encodings

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text, without special tokens."""
        text: str = self._backend.decode([int(token_id) for token_id in ids], skip_special_tokens=True)
        return text

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the token of each id; empty for an id outside the vocabulary."""
        return [self._backend.id_to_token(int(token_id)) or "" for token_id in ids]

    def save(self, folder: str | Path) -> Path:
        """Write tokenizer.json into `folder` atomically and return its path."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "tokenizer.json"
        write_text(path, self._text)
        return path


def _kept_positions(
    encoding: tokenizers.Encoding, max_length: int, texts: tuple[str, ...], prefixes: tuple[str, ...]
) -> np.ndarray | slice:
    """Return the positions that truncation keeps: special tokens, and the first tokens of each text.

    The longer text of a pair is truncated first; two long ones keep half of the room each, and the longer one the odd
    token. The backend has the same rule, but its truncation is a state that threads with different lengths would share,
    and it returns all overflowing parts of a pair, whose number is quadratic. `prefixes` are the tokenised parts of the
    texts; if they are not whole, the text with more characters gets the odd token.
    """
    if len(encoding) <= max_length:
        return slice(None)
    owners = np.array([-1 if text is None else text for text in encoding.sequence_ids])  # -1: a special token
    room = max_length - int((owners < 0).sum())
    lengths = [int((owners == index).sum()) for index in range(len(texts))]
    is_odd_by_characters = min(lengths) > room // 2 and texts != prefixes
    order = [len(text) for text in texts] if is_odd_by_characters else lengths
    short, long = (0, -1) if order[0] <= order[-1] else (-1, 0)
    counts = [room] * len(texts)
    if len(texts) > 1:
        counts[short] = min(lengths[short], room // 2)
        counts[long] = room - counts[short]
    kept = owners < 0
    for index, count in enumerate(counts):
        kept[np.flatnonzero(owners == index)[:count]] = True
    return np.flatnonzero(kept)


def _patterns(steps: Any) -> Iterator[str]:
    """Yield the regular expressions in a part of a tokenizer.json."""
    for key, value in steps.items() if isinstance(steps, dict) else enumerate(steps if isinstance(steps, list) else ()):
        if key == "Regex":
            yield value
        yield from _patterns(value)


def _select(ids: list[int], kept: np.ndarray | slice) -> Sequence[int]:
    """Return the ids at the kept positions."""
    selected: Sequence[int] = ids if isinstance(kept, slice) else [ids[index] for index in kept.tolist()]
    return selected


def _check_texts(name: str, texts: Sequence[str]) -> None:
    if isinstance(texts, str):
        raise InputError(f"{name} is a string; it must be a list of strings")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"{name}[{index}] is {type(text).__name__}; it must be a string")
