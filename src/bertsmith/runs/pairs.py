"""`bertsmith pairs`: make pairs of related passages from documents, to train text embeddings without labels."""

import gzip
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple, Self

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from bertsmith.data.executor import open_executor
from bertsmith.errors import InputError
from bertsmith.files import write_text
from bertsmith.runs.flags import ForceFlag, OutFlag, RayFlag
from bertsmith.runs.output import RESULT, claim, lock, write_result
from bertsmith.runs.result import OneShotResult, count_of
from bertsmith.settings import Plain, check_same
from bertsmith.text.passages import DEFAULT_KINDS, Lengths, Passages, pairs_of, parse_kinds
from bertsmith.text.readers import find_files, read_documents_with_titles

ROWS, JOURNAL = "train.jsonl.gz", "pairs.journal"
BLOCK_CHARACTERS = 1 << 21
"""Characters of the documents whose pairs are made, compressed and written together."""


@dataclass(frozen=True, kw_only=True)
class PairsResult(OneShotResult):
    """Number of documents and pairs, by kind of pair."""

    documents: int
    pairs: int
    kinds: dict[str, int]
    seconds: float


def pairs(
    data: list[Path],
    *,
    out: OutFlag[Path],
    kinds: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    min_words: int = 5,
    max_words: int = 40,
    documents: int | None = None,
    field: str = "text",
    title: str = "title",
    seed: int = 0,
    ray: RayFlag = None,
    resume: bool = False,
    force: ForceFlag = False,
) -> PairsResult:
    """Make pairs of related texts from documents, to train text embeddings without labels.

    Pass the output folder to finetune as --data.

    Parameters
    ----------
    data
        Text files or folders: .txt, .jsonl (also .gz, .xz, .zst) or .parquet.
    out
        Output folder: train.jsonl.gz, with the columns anchor, positive and kind, and result.json.
    kinds
        Kinds of pairs with the number per document, for example neighbours=5 same=4. title: the title and a sentence of
        the first paragraph; neighbours: adjacent sentences; together: sentences of a paragraph that are not adjacent;
        spans: overlapping or adjacent word spans; crop: a sentence and a span of it; altered: a sentence and a copy
        with words dropped or repeated; same: a sentence twice, which only dropout distinguishes. All kinds by default,
        20 pairs per document.
    min_words
        Minimum words of a sentence or span. Headings are always skipped.
    max_words
        Maximum words of a sentence or span.
    documents
        Maximum number of documents; the first ones are used.
    field
        Field or column with the text in .jsonl and .parquet files.
    title
        Field or column with the title, if there is one.
    seed
        Random seed. The pairs of a document depend only on the seed and the position of the document.
    ray
        Make pairs on a Ray cluster: its address, "auto", or "local" to start one on this machine. The file is the same
        byte for byte.
    resume
        Continue an interrupted run in --out, given the same arguments.
    force
        Replace the contents of --out.
    """
    out = Path(out)
    files = find_files([data] if isinstance(data, str | Path) else data)
    maker = PairMaker(DEFAULT_KINDS if kinds is None else parse_kinds(kinds), Lengths(min_words, max_words), seed)
    if documents is not None and documents < 1:
        raise InputError(f"--documents is {documents}; allowed: 1 or more")
    request = {"data": [str(file.resolve()) for file in files], "kinds": maker.kinds, "seed": seed, "field": field}
    request |= {"min_words": min_words, "max_words": max_words, "documents": documents, "title": title}
    if resume:
        journal = PairJournal.read(out, request)
    else:
        claim(out, force, *files)
        journal = PairJournal.begin(out, request)
    console, start = Console(), time.perf_counter()
    columns = TextColumn("making pairs"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[made]:,}")
    with (
        journal,
        open_executor(lambda: maker, ray=ray) as executor,
        Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress,
    ):
        total = sum(file.stat().st_size for file in files) if documents is None else None
        bar = progress.add_task("", total=total, made=journal.kinds.total())

        def advance(count: int) -> None:
            progress.advance(bar, count)

        read = islice(read_documents_with_titles(files, field, title, advance), documents)
        blocks = islice(_blocks(read), journal.blocks, None)
        for _, made in executor.results(blocks):
            journal.add(made)
            progress.update(bar, made=journal.kinds.total())
    counts = journal.kinds
    if not counts:
        journal.remove()
        raise InputError(
            f"none of the {journal.documents:,} documents has a sentence of {min_words} to {max_words} words; lower "
            "--min-words or raise --max-words"
        )
    seconds = round(time.perf_counter() - start, 3)
    result = PairsResult(documents=journal.documents, pairs=counts.total(), kinds=dict(counts), seconds=seconds)
    write_result(out, result.to_json())
    journal.path.unlink()
    by_kind = ", ".join(f"{kind} {count:,}" for kind, count in counts.items())
    console.print(
        f"[bold]{count_of(result.pairs, 'pair')}[/bold] from {count_of(result.documents, 'document')} in {seconds} s\n"
        f"{by_kind}\n{escape(str(out / ROWS))}",
        highlight=False,
        soft_wrap=True,
    )
    return result


class NumberedDocument(NamedTuple):
    """A document, with its position among all documents."""

    number: int
    title: str | None
    text: str


class MadePairs(NamedTuple):
    """Pairs of some documents: compressed JSON lines, and their number by kind."""

    content: bytes
    documents: int
    kinds: dict[str, int]


@dataclass(frozen=True)
class PairMaker:
    """Makes the pairs of a block of documents, each with a random stream of its own."""

    kinds: dict[str, int]
    lengths: Lengths
    seed: int

    def __call__(self, block: Sequence[NumberedDocument]) -> MadePairs:
        counts: Counter[str] = Counter()
        lines = []
        for number, title, text in block:
            passages, draw = Passages.of(text, self.lengths, title), Random(f"{self.seed} {number}")
            for kind, (anchor, positive) in pairs_of(passages, self.kinds, draw):
                counts[kind] += 1
                row = {"anchor": anchor, "positive": positive, "kind": kind}
                lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        # without a time stamp, the same pairs give the same bytes
        content = gzip.compress("".join(lines).encode(), compresslevel=6, mtime=0) if lines else b""
        return MadePairs(content, len(block), dict(counts))


class PairJournal:
    """train.jsonl.gz, one gzip member per block, and a line with the size of every finished one, to resume from."""

    def __init__(self, out: Path) -> None:
        self.rows, self.path = out / ROWS, out / JOURNAL
        self.blocks = self.documents = self.bytes = 0
        self.kinds: Counter[str] = Counter()

    @classmethod
    def begin(cls, out: Path, request: Plain) -> "PairJournal":
        """Return the journal of a new folder."""
        journal = cls(out)
        journal.rows.touch()
        write_text(journal.path, json.dumps(request) + "\n")
        return journal

    @classmethod
    def read(cls, out: Path, request: Plain) -> "PairJournal":
        """Return the journal of an interrupted run, and cut off what its last line does not cover."""
        journal = cls(out)
        if not journal.path.is_file() or (out / RESULT).is_file():
            raise InputError(f"--resume: --out {str(out)!r} has no interrupted run of `bertsmith pairs`")
        first, *lines = journal.path.read_text(encoding="utf-8").split("\n")[:-1]  # a last line may be incomplete
        check_same(json.loads(first), request)
        lock(out)
        for line in lines:
            journal._count(**json.loads(line))
        write_text(journal.path, "".join(f"{line}\n" for line in (first, *lines)))
        os.truncate(journal.rows, journal.bytes)
        return journal

    def add(self, made: MadePairs) -> None:
        """Append the pairs of a block."""
        self._rows.write(made.content)
        self._rows.flush()
        entry: dict[str, Any] = {"bytes": len(made.content), "documents": made.documents, "kinds": made.kinds}
        self._lines.write(json.dumps(entry) + "\n")
        self._lines.flush()
        self._count(**entry)

    def remove(self) -> None:
        """Delete both files."""
        self.rows.unlink()
        self.path.unlink()

    def __enter__(self) -> Self:
        self._rows = self.rows.open("ab")
        self._lines = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        self._rows.close()
        self._lines.close()

    def _count(self, bytes: int, documents: int, kinds: dict[str, int]) -> None:
        self.blocks += 1
        self.bytes += bytes
        self.documents += documents
        self.kinds.update(kinds)


def _blocks(documents: Iterable[tuple[str | None, str]]) -> Iterator[list[NumberedDocument]]:
    """Yield the documents in lists of about BLOCK_CHARACTERS."""
    block: list[NumberedDocument] = []
    characters = 0
    for number, (title, text) in enumerate(documents):
        block.append(NumberedDocument(number, title, text))
        characters += len(text)
        if characters >= BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block
