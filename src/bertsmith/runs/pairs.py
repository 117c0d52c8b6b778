"""`bertsmith pairs`: make pairs of related passages from documents, to train text embeddings without labels."""

import gzip
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from bertsmith.errors import InputError
from bertsmith.runs.flags import ForceFlag, OutFlag
from bertsmith.runs.output import claim, write_result
from bertsmith.runs.result import OneShotResult, count_of
from bertsmith.text.passages import DEFAULT_KINDS, Lengths, Passages, pairs_of, parse_kinds
from bertsmith.text.readers import find_files, read_documents_with_titles

ROWS = "train.jsonl.gz"


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
    force
        Replace the contents of --out.
    """
    out = Path(out)
    files = find_files([data] if isinstance(data, str | Path) else data)
    counts_by_kind, lengths = DEFAULT_KINDS if kinds is None else parse_kinds(kinds), Lengths(min_words, max_words)
    if documents is not None and documents < 1:
        raise InputError(f"--documents is {documents}; allowed: 1 or more")
    claim(out, force, *files)
    console, start = Console(), time.perf_counter()
    counts: Counter[str] = Counter()
    read = 0
    columns = TextColumn("making pairs"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[made]:,}")
    with (
        Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress,
        # without a time stamp, the same pairs give the same file
        gzip.GzipFile(out / ROWS, "wb", compresslevel=6, mtime=0) as file,
    ):
        total = sum(file.stat().st_size for file in files) if documents is None else None
        bar = progress.add_task("", total=total, made=0)

        def advance(count: int) -> None:
            progress.advance(bar, count)

        for rows in _make_pairs(files, field, title, lengths, counts_by_kind, seed, advance):
            read += 1
            for row in rows:
                counts[row["kind"]] += 1
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            progress.update(bar, made=counts.total())
            if read == documents:
                break
    if not counts:
        raise InputError(
            f"none of the {read:,} documents has a sentence of {min_words} to {max_words} words; lower --min-words or "
            "raise --max-words"
        )
    seconds = round(time.perf_counter() - start, 3)
    result = PairsResult(documents=read, pairs=counts.total(), kinds=dict(counts), seconds=seconds)
    write_result(out, result.to_json())
    by_kind = ", ".join(f"{kind} {count:,}" for kind, count in counts.items())
    console.print(
        f"[bold]{count_of(result.pairs, 'pair')}[/bold] from {count_of(read, 'document')} in {seconds} s\n"
        f"{by_kind}\n{escape(str(out / ROWS))}",
        highlight=False,
        soft_wrap=True,
    )
    return result


def _make_pairs(
    files: list[Path],
    field: str,
    title: str,
    lengths: Lengths,
    kinds: dict[str, int],
    seed: int,
    on_read: Callable[[int], None],
) -> Iterator[list[dict[str, str]]]:
    """Yield the rows of each document."""
    for index, (name, document) in enumerate(read_documents_with_titles(files, field, title, on_read)):
        passages, draw = Passages.of(document, lengths, name), Random(f"{seed} {index}")
        yield [
            {"anchor": anchor, "positive": positive, "kind": kind}
            for kind, (anchor, positive) in pairs_of(passages, kinds, draw)
        ]
