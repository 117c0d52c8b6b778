"""`bertsmith tokenizer`: learn a vocabulary from text files, or add tokens to an existing one."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape

from bertsmith.bundled import model_folder
from bertsmith.errors import InputError
from bertsmith.runs.flags import ForceFlag, OutFlag
from bertsmith.runs.output import check_out, claim, write_result
from bertsmith.runs.result import OneShotResult, count_of, print_plain, spread
from bertsmith.text.extend import Extension, extend_tokenizer
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.readers import find_files, read_documents
from bertsmith.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class AddedToken:
    """A new token, its former split into subwords, and the number of tokens it saves in the text."""

    token: str
    subwords: tuple[str, ...]
    tokens_saved: int


@dataclass(frozen=True, kw_only=True)
class ExtensionSummary:
    """The effect of the added tokens on the text."""

    tokens_added: int
    words: int
    tokens_per_word_before: float
    tokens_per_word_after: float
    words_unchanged: float
    """Share of words whose split does not change."""
    best: tuple[AddedToken, ...]

    @classmethod
    def of(cls, extension: Extension) -> "ExtensionSummary":
        words = extension.words
        return cls(
            tokens_added=len(extension.tokens),
            words=words,
            tokens_per_word_before=round(extension.tokens_before / words, 4),
            tokens_per_word_after=round(extension.tokens_after / words, 4),
            words_unchanged=round(extension.words_unchanged / words, 4),
            best=tuple(AddedToken(gain.token, tuple(gain.parts), gain.tokens_saved) for gain in extension.best),
        )


@dataclass(frozen=True, kw_only=True)
class TokenizerResult(OneShotResult):
    """A learned or extended tokenizer and the text it was learned from."""

    kind: str | None = None
    lowercase: bool | None = None
    unknown_letters: int | None = None
    """With a given alphabet: letters of the text that are not in it."""
    extension: ExtensionSummary | None = spread()
    vocabulary: int
    documents: int
    megabytes: float
    seconds: float
    hash: str


def tokenizer(
    data: list[Path],
    *,
    out: OutFlag[Path],
    kind: Literal["wordpiece", "bytes", "unigram", "characters"] | None = None,
    vocabulary: int | None = None,
    lowercase: bool | None = None,
    alphabet: str | None = None,
    marks_words: bool | None = None,
    extend: str | Path | None = None,
    tokens: int | None = None,
    field: str = "text",
    force: ForceFlag = False,
) -> TokenizerResult:
    """Learn a tokenizer from text files, or add tokens to an existing one with --extend.

    The result is written as tokenizer.json, which Hugging Face tokenizers can read.

    Parameters
    ----------
    data
        Text files or folders: .txt, .jsonl (also .gz, .xz, .zst) or .parquet.
    out
        Output folder for tokenizer.json and result.json.
    kind
        wordpiece (as in BERT; the default), bytes (byte-level BPE, no unknown tokens), unigram (as in SentencePiece) or
        characters (one token per character, for proteins and other strings of letters).
    vocabulary
        Vocabulary size, including special tokens; 30522 by default.
    lowercase
        Lowercase the text; on by default, except for characters.
    alphabet
        With --kind characters: the letters, such as ACDEFGHIKLMNPQRSTVWYBOUXZ, instead of those of the text. Other
        letters become [UNK].
    marks_words
        With --kind characters: a space begins a word, for whole-word masking of written text. Otherwise every letter is
        a word of its own.
    extend
        Extend this tokenizer: a bundled model (small), or a model or tokenizer folder. Its tokens keep their ids, and
        new tokens learned from the text are added.
    tokens
        With --extend: number of tokens to add; 1000 by default.
    field
        Field or column with the text in .jsonl and .parquet files.
    force
        Replace the contents of --out.
    """
    out = Path(out)
    files = find_files([data] if isinstance(data, str | Path) else data)
    if extend is None and tokens is not None:
        raise InputError(f"--tokens is {tokens} without --extend; set the size of a new tokenizer with --vocabulary")
    for name, value in (("kind", kind), ("vocabulary", vocabulary), ("lowercase", lowercase)):
        if extend is not None and value is not None:
            raise InputError(f"--{name} is {value!r} with --extend, which does not change the {name}; omit --{name}")
    for flag, given in (("alphabet", alphabet), ("marks-words", marks_words)):
        if kind != "characters" and given is not None:
            raise InputError(f"--{flag} is {given!r} without --kind characters; add it, or omit --{flag}")
    extended = None if extend is None else model_folder(extend)
    base = None if extended is None else Tokenizer.load(extended)
    inputs = [*files, *([] if extended is None else [extended])]
    check_out(out, force, *inputs)
    console, start, count = Console(), time.perf_counter(), _TextCount()
    documents = _count_documents(files, field, count)
    unknown: int | None = None
    extension = None
    requested = 30522 if vocabulary is None else vocabulary
    if base is not None:
        requested = 1000 if tokens is None else tokens
        with console.status("learning new tokens"):
            extension = extend_tokenizer(base, documents, requested)
        new = extension.tokenizer
    else:
        kind = kind or "wordpiece"
        lowercase = kind != "characters" if lowercase is None else lowercase
        letters: Counter[str] = Counter()
        if alphabet is not None:
            # with a given alphabet the text is only counted
            for document in documents:
                letters.update(document.lower() if lowercase else document)
        new = learn_tokenizer(
            documents,
            kind,
            requested,
            lowercase=lowercase,
            progress=console.is_terminal,
            alphabet=alphabet,
            marks_words=bool(marks_words),
        )
        if alphabet is not None:
            unknown = letters.total() - sum(letters[letter] for letter in new.vocabulary)
    claim(out, force, *inputs)
    new.save(out)
    result = TokenizerResult(
        kind=kind,
        lowercase=lowercase,
        unknown_letters=unknown,
        extension=None if extension is None else ExtensionSummary.of(extension),
        vocabulary=new.size,
        documents=count.documents,
        megabytes=round(count.text_bytes / 1e6, 3),
        seconds=round(time.perf_counter() - start, 3),
        hash=new.hash,
    )
    write_result(out, result.to_json(), seals=True)
    if result.extension is not None:
        _print_extension(result, result.extension, out, requested)
        return result
    console.print(
        f"[bold]{kind}[/bold] tokenizer with {result.vocabulary:,} tokens from "
        f"{count_of(result.documents, 'document')} ({result.megabytes:,} MB) in {result.seconds} s\n"
        f"{escape(str(out / 'tokenizer.json'))}\nhash {result.hash}",
        highlight=False,
        soft_wrap=True,
    )
    if unknown:
        print_plain(f"{unknown:,} of {letters.total():,} letters of the text are not in the alphabet and become [UNK]")
    if new.size < requested and kind != "characters":
        print_plain(f"the text is too short for the requested vocabulary of {requested:,} tokens")
    return result


@dataclass
class _TextCount:
    documents: int = 0
    text_bytes: int = 0


def _count_documents(files: list[Path], field: str, count: _TextCount) -> Iterator[str]:
    """Yield the documents and count them."""
    for document in read_documents(files, field):
        count.documents += 1
        count.text_bytes += len(document) if document.isascii() else len(document.encode())
        yield document


def _print_extension(result: TokenizerResult, extension: ExtensionSummary, out: Path, requested: int) -> None:
    before, after = extension.tokens_per_word_before, extension.tokens_per_word_after
    lines = [
        f"{extension.tokens_added:,} tokens added, {result.vocabulary:,} in all, from "
        f"{count_of(result.documents, 'document')} ({result.megabytes:,} MB) in {result.seconds} s",
        f"tokens per word {before} → {after} ({after / before - 1:+.1%}); "
        f"the split of {extension.words_unchanged:.1%} of the words is unchanged",
        "tokens that save most:",
        *(f"  {gain.token}  {gain.tokens_saved:,} tokens ({' '.join(gain.subwords)})" for gain in extension.best),
        str(out / "tokenizer.json"),
    ]
    if extension.tokens_added < requested:
        lines.append(f"{requested:,} tokens were requested, but the text contains no further candidates")
    print_plain("\n".join(lines))
