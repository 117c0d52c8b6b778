"""`bertsmith tokenizer`: learn a vocabulary from text files, or add tokens to one."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from bertsmith.bundled import model_folder
from bertsmith.errors import InputError
from bertsmith.runs.output import check_out, claim, write_result
from bertsmith.runs.result import OneShotResult, print_plain, spread
from bertsmith.text.extend import Extension, extend_tokenizer
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.readers import find_files, read_documents
from bertsmith.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class AddedToken:
    """A new token, the tokens it was split into before, and how many it saves in the text."""

    piece: str
    parts: tuple[str, ...]
    tokens_saved: int


@dataclass(frozen=True, kw_only=True)
class ExtensionSummary:
    """The effect of added tokens on the text."""

    tokens_added: int
    words: int
    tokens_per_word_before: float
    tokens_per_word_after: float
    words_unchanged: float
    """Share of words that are split as before."""
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
            best=tuple(AddedToken(gain.piece, tuple(gain.parts), gain.tokens_saved) for gain in extension.best),
        )


@dataclass(frozen=True, kw_only=True)
class TokenizerResult(OneShotResult):
    """A learned or extended tokenizer and the text it was learned from."""

    kind: str | None = None
    lowercase: bool | None = None
    extension: ExtensionSummary | None = spread()
    vocabulary: int
    documents: int
    megabytes: float
    seconds: float
    hash: str


def tokenizer(
    data: list[Path],
    *,
    out: Path,
    kind: Literal["wordpiece", "bytes", "unigram"] | None = None,
    vocabulary: int | None = None,
    lowercase: bool | None = None,
    extend: str | Path | None = None,
    tokens: int | None = None,
    field: str = "text",
    force: bool = False,
) -> TokenizerResult:
    """Learn a tokenizer from text, or add pieces to one with --extend, and write it as tokenizer.json.

    Parameters
    ----------
    data
        Text files or folders of them: .txt, .jsonl (also .gz, .xz, .zst) or .parquet.
    out
        Folder for tokenizer.json and result.json.
    kind
        wordpiece (BERT; the default), bytes (byte-level BPE, no unknown words) or unigram (sentencepiece style).
    vocabulary
        Pieces to learn, special tokens included; 30522 by default.
    lowercase
        Treat upper and lower case as the same, which is the default.
    extend
        A bundled model (small), or a model or tokenizer folder, whose tokenizer keeps all its pieces and gets new
        ones for this text.
    tokens
        With --extend: number of new tokens; 1000 by default.
    field
        The field or column that holds the text in .jsonl and .parquet files.
    force
        Replace the content of an output folder that an earlier command left.
    """
    out = Path(out)
    files = find_files([data] if isinstance(data, str | Path) else data)
    if extend is None and tokens is not None:
        raise InputError(f"--tokens is {tokens} without --extend; --vocabulary is the size of a new tokenizer")
    for name, value in (("kind", kind), ("vocabulary", vocabulary), ("lowercase", lowercase)):
        if extend is not None and value is not None:
            raise InputError(f"--{name} is {value!r} with --extend, which keeps that of {str(extend)!r}; leave it out")
    extended = None if extend is None else model_folder(extend)
    base = None if extended is None else Tokenizer.load(extended)
    inputs = [*files, *([] if extended is None else [extended])]
    check_out(out, force, *inputs)
    console, start, count = Console(), time.perf_counter(), _TextCount()
    documents = _count_documents(files, field, count)
    extension = None
    wanted = 30522 if vocabulary is None else vocabulary
    if base is not None:
        wanted = 1000 if tokens is None else tokens
        with console.status("looking for words that are split too much"):
            extension = extend_tokenizer(base, documents, wanted)
        made = extension.tokenizer
    else:
        kind, lowercase = kind or "wordpiece", lowercase is not False
        made = learn_tokenizer(documents, kind, wanted, lowercase=lowercase, progress=console.is_terminal)
    claim(out, force, *inputs)
    made.save(out)
    result = TokenizerResult(
        kind=kind,
        lowercase=lowercase,
        extension=None if extension is None else ExtensionSummary.of(extension),
        vocabulary=made.size,
        documents=count.documents,
        megabytes=round(count.text_bytes / 1e6, 3),
        seconds=round(time.perf_counter() - start, 3),
        hash=made.hash,
    )
    write_result(out, result.to_json())
    if result.extension is not None:
        _print_extension(result, result.extension, out, wanted)
        return result
    console.print(
        f"[bold]{kind}[/bold] tokenizer with {result.vocabulary:,} tokens from {result.documents:,} documents "
        f"({result.megabytes:,} MB) in {result.seconds} s\n{out / 'tokenizer.json'}\nhash {result.hash}",
        highlight=False,
        soft_wrap=True,
    )
    if made.size < wanted:
        print_plain(f"the text is too short to fill a vocabulary of {wanted:,} tokens")
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


def _print_extension(result: TokenizerResult, extension: ExtensionSummary, out: Path, wanted: int) -> None:
    before, after = extension.tokens_per_word_before, extension.tokens_per_word_after
    lines = [
        f"{extension.tokens_added:,} tokens added, {result.vocabulary:,} in all, from {result.documents:,} documents "
        f"({result.megabytes:,} MB) in {result.seconds} s",
        f"tokens per word {before} → {after} ({after / before - 1:+.1%}); "
        f"{extension.words_unchanged:.1%} of the words are split as before",
        "saving most:",
        *(f"  {gain.piece}  {gain.tokens_saved:,} tokens ({' '.join(gain.parts)})" for gain in extension.best),
        str(out / "tokenizer.json"),
    ]
    if extension.tokens_added < wanted:
        lines.append(f"the text offers no further tokens; {wanted:,} were requested")
    print_plain("\n".join(lines))
