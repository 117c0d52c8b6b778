"""The files a tokenizer is loaded from: tokenizer.json, or a BERT vocab.txt with its tokenizer_config.json."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bertsmith.errors import InputError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer that a folder or one of the two kinds of file describes."""
    if not path.exists():
        raise InputError(f"tokenizer {str(path)!r} does not exist")
    if path.is_dir():
        for name in ("tokenizer.json", "vocab.txt"):
            if (path / name).is_file():
                return read_backend(path / name)
        raise InputError(f"tokenizer folder {str(path)!r} holds neither tokenizer.json nor vocab.txt")
    if path.suffix == ".json":
        return _read_json(path)
    if path.suffix == ".txt":
        return _read_vocabulary(path)
    raise InputError(f"tokenizer file {str(path)!r} has an unknown ending; allowed: tokenizer.json, vocab.txt")


def bert_template(start: int, separator: int) -> processors.TemplateProcessing:
    """The layout [CLS] a [SEP] b [SEP] with type 0 up to the first [SEP] and 1 after it."""
    return processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", start), ("[SEP]", separator)],
    )


def _read_json(path: Path) -> tokenizers.Tokenizer:
    try:
        text = path.read_text(encoding="utf-8")
        if not isinstance(json.loads(text), dict):
            raise ValueError("it holds no JSON object")
        return tokenizers.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library raises bare exceptions, and panics that are not even those
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"tokenizer file {str(path)!r} is not a usable tokenizer.json: {reason}") from None


def _read_vocabulary(path: Path) -> tokenizers.Tokenizer:
    """BERT's WordPiece tokenizer over a vocabulary with one piece per line."""
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"tokenizer file {str(path)!r} is not UTF-8 (byte {error.start})") from None
    if lines[-1] == "":
        lines.pop()
    vocabulary = {line.removesuffix("\r"): index for index, line in enumerate(lines)}
    missing = [token for token in ("[UNK]", "[CLS]", "[SEP]") if token not in vocabulary]
    if missing:
        raise InputError(f"tokenizer file {str(path)!r} lacks {', '.join(missing)}; it must hold one piece per line")
    settings = _bert_settings(path.parent / "tokenizer_config.json")
    backend = tokenizers.Tokenizer(
        models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100, continuing_subword_prefix="##")
    )
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings["tokenize_chinese_chars"],
        strip_accents=settings["strip_accents"],
        lowercase=settings["do_lower_case"],
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.post_processor = bert_template(vocabulary["[CLS]"], vocabulary["[SEP]"])
    backend.add_special_tokens([token for token in SPECIAL_TOKENS if token in vocabulary])
    return backend


def _bert_settings(path: Path) -> dict[str, Any]:
    """The three settings of BERT's normalizer, from a tokenizer_config.json where there is one."""
    settings: dict[str, Any] = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}
    if not path.is_file():
        return settings
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"file {str(path)!r} is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise InputError(f"file {str(path)!r} must hold one JSON object")
    for name in settings:
        if name in given:
            value = given[name]
            if not (isinstance(value, bool) or (name == "strip_accents" and value is None)):
                raise InputError(f"file {str(path)!r}: {name} is {value!r}; it must be true or false")
            settings[name] = value
    return settings
