"""`bertsmith corpus`: tokenise text files into shards for pre-training."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from bertsmith.bundled import model_folder
from bertsmith.data.build_corpus import BuildProgress, build_corpus, check_held_out
from bertsmith.data.shards import JOURNAL, MANIFEST
from bertsmith.errors import InputError
from bertsmith.files import write_seal
from bertsmith.runs.flags import ForceFlag, OutFlag, RayFlag
from bertsmith.runs.output import RESULT, claim, lock, write_result
from bertsmith.runs.result import OneShotResult, count_of, print_plain
from bertsmith.text.readers import find_files
from bertsmith.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class CorpusResult(OneShotResult):
    """Size of a tokenised corpus and the speed of this run."""

    documents: int
    sentences: int
    tokens: int
    held_out_documents: int
    held_out_tokens: int
    megabytes: float
    seconds: float
    megabytes_per_second: float
    """Tokenisation speed of this run; text that an interrupted run had finished is not counted."""
    peak_memory_mb: float
    vocabulary: int
    tokenizer_hash: str


def corpus(
    data: list[Path],
    *,
    tokenizer: str | Path,
    out: OutFlag[Path],
    field: str = "text",
    held_out: float = 0.005,
    workers: int | None = None,
    seed: int = 0,
    ray: RayFlag = None,
    force: ForceFlag = False,
) -> CorpusResult:
    """Tokenise text files into shards for pre-training.

    To resume an interrupted run, repeat the command.

    Parameters
    ----------
    data
        Text files or folders: .txt, .jsonl (also .gz, .xz, .zst) or .parquet.
    tokenizer
        A bundled model (small), or a tokenizer: a folder, tokenizer.json or vocab.txt.
    out
        Output folder for the shards, manifest.json and result.json.
    field
        Field or column with the text in .jsonl and .parquet files.
    held_out
        Fraction of the documents held out for evaluation.
    workers
        Number of processes; one per core by default. The result does not depend on it.
    seed
        Random seed that selects the held-out documents.
    ray
        Tokenise on a Ray cluster: its address, "auto", or "local" to start one on this machine. The corpus is the same
        byte for byte; --out must be a folder that all machines share, and --workers is ignored.
    force
        Replace the contents of --out.
    """
    out, tokenizer = Path(out), model_folder(tokenizer)
    files = find_files([data] if isinstance(data, str | Path) else data)
    loaded = Tokenizer.load(tokenizer)
    check_held_out(held_out)
    if workers is not None and workers < 1:
        raise InputError(f"--workers is {workers}; allowed: 1 or more")
    is_unfinished = (out / JOURNAL).is_file() or ((out / MANIFEST).is_file() and not (out / RESULT).is_file())
    if force or not is_unfinished:
        claim(out, force, tokenizer, *files)
    else:
        lock(out)
    console = Console()
    start = time.perf_counter()
    last = BuildProgress(0, 0, 0, 0, 0.0)
    columns = (TextColumn("tokenising"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"))
    with Bar(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1, rate="")

        def show(progress: BuildProgress) -> None:
            nonlocal last
            last = progress
            rate = progress.text_bytes / 1e6 / (time.perf_counter() - start)
            bar.update(task, completed=progress.source_bytes_read, total=progress.source_bytes, rate=f"{rate:.1f} MB/s")

        manifest = build_corpus(
            files,
            loaded,
            out,
            field=field,
            held_out=held_out,
            seed=seed,
            workers=workers or os.cpu_count() or 1,
            ray=ray,
            progress=show,
        )
    seconds = time.perf_counter() - start
    train, evaluation = manifest.splits["train"], manifest.splits["held_out"]
    result = CorpusResult(
        documents=train.documents + evaluation.documents,
        sentences=train.sentences + evaluation.sentences,
        tokens=train.tokens + evaluation.tokens,
        held_out_documents=evaluation.documents,
        held_out_tokens=evaluation.tokens,
        megabytes=round((train.text_bytes + evaluation.text_bytes) / 1e6, 3),
        seconds=round(seconds, 3),
        megabytes_per_second=round(last.text_bytes / 1e6 / seconds, 3),
        peak_memory_mb=round(last.peak_memory_mb, 1),
        vocabulary=manifest.vocabulary,
        tokenizer_hash=manifest.tokenizer_hash,
    )
    write_seal(out, (MANIFEST, "tokenizer.json"))  # the manifest has the hashes of the shards
    write_result(out, result.to_json())
    console.print(
        f"[bold]{count_of(result.tokens, 'token')}[/bold] in {count_of(result.sentences, 'sentence')} of "
        f"{count_of(result.documents, 'document')} ({result.megabytes:,} MB of text), "
        f"{count_of(result.held_out_documents, 'document')} ({count_of(result.held_out_tokens, 'token')}) held out\n"
        f"{result.seconds} s, {result.megabytes_per_second} MB/s, peak memory "
        f"{result.peak_memory_mb} MB\nvocabulary {result.vocabulary:,}, tokenizer {result.tokenizer_hash}\n"
        f"{escape(str(out))}",
        highlight=False,
        soft_wrap=True,
    )
    if held_out and not result.held_out_documents:
        print_plain(
            "nothing is held out: the text is one document, and whole documents are held out. In .txt files, blank "
            "lines separate documents"
        )
    return result
