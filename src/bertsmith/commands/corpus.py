"""`bertsmith corpus`: text files turned into token shards for pre-training."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.data.build_corpus import Progress


def corpus(
    data: list[Path],
    *,
    tokenizer: str | Path,
    out: Path,
    field: str = "text",
    held_out: float = 0.005,
    workers: int | None = None,
    seed: int = 0,
    force: bool = False,
) -> dict[str, Any]:
    """Tokenise text into shards that pre-training reads; an interrupted run is continued by the same command.

    Parameters
    ----------
    data
        Text files or folders of them: .txt, .jsonl (also .gz, .xz, .zst) or .parquet.
    tokenizer
        A bundled model (small), or the folder or file of a tokenizer: tokenizer.json or vocab.txt.
    out
        Folder for the shards, manifest.json and result.json.
    field
        The field or column that holds the text in .jsonl and .parquet files.
    held_out
        Share of whole documents kept apart for evaluation.
    workers
        Processes that tokenise; by default one per core. The result does not depend on it.
    seed
        Chooses which documents are held out.
    force
        Replace the content of an output folder that an earlier command left.
    """
    import os
    import time

    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from bertsmith.bundled import model_folder
    from bertsmith.data.build_corpus import Progress, build_corpus, check_held_out
    from bertsmith.data.shards import JOURNAL, MANIFEST
    from bertsmith.errors import InputError
    from bertsmith.runs.folder import RESULT, claim, write_result
    from bertsmith.text.readers import find_files
    from bertsmith.text.tokenizer import Tokenizer

    out, tokenizer = Path(out), model_folder(tokenizer)
    files = find_files([data] if isinstance(data, str | Path) else data)
    loaded = Tokenizer.load(tokenizer)
    check_held_out(held_out)
    if workers is not None and workers < 1:
        raise InputError(f"--workers is {workers}; allowed: 1 or more")
    is_unfinished = (out / JOURNAL).is_file() or ((out / MANIFEST).is_file() and not (out / RESULT).is_file())
    if force or not is_unfinished:
        claim(out, force, tokenizer, *files)
    console = Console()
    started = time.perf_counter()
    state = Progress(0, 0, 0, 0, 0.0)
    columns = (TextColumn("tokenising"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"))
    with Bar(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1, rate="")

        def show(progress: "Progress") -> None:
            nonlocal state
            state = progress
            rate = progress.text_bytes / 1e6 / (time.perf_counter() - started)
            bar.update(task, completed=progress.source_bytes_read, total=progress.source_bytes, rate=f"{rate:.1f} MB/s")

        manifest = build_corpus(
            files,
            loaded,
            out,
            field=field,
            held_out=held_out,
            seed=seed,
            workers=workers or os.cpu_count() or 1,
            progress=show,
        )
    seconds = time.perf_counter() - started
    train, apart = manifest.parts["train"], manifest.parts["held_out"]
    figures = {
        "documents": train.documents + apart.documents,
        "sentences": train.sentences + apart.sentences,
        "tokens": train.tokens + apart.tokens,
        "held_out_documents": apart.documents,
        "held_out_tokens": apart.tokens,
        "megabytes": round((train.text_bytes + apart.text_bytes) / 1e6, 3),
        "seconds": round(seconds, 3),
        # of what this call tokenised: a continued run has found part of it done
        "megabytes_per_second": round(state.text_bytes / 1e6 / seconds, 3),
        "peak_memory_mb": round(state.peak_memory_mb, 1),
        "vocabulary": manifest.vocabulary,
        "tokenizer_hash": manifest.tokenizer_hash,
    }
    write_result(out, figures)
    console.print(
        f"[bold]{figures['tokens']:,} tokens[/bold] in {figures['sentences']:,} sentences of {figures['documents']:,} "
        f"documents ({figures['megabytes']:,} MB of text), {figures['held_out_documents']:,} documents "
        f"({figures['held_out_tokens']:,} tokens) held out\n"
        f"{figures['seconds']} s, {figures['megabytes_per_second']} MB/s, peak memory {figures['peak_memory_mb']} MB\n"
        f"vocabulary {figures['vocabulary']:,}, tokenizer {figures['tokenizer_hash']}\n{out}",
        highlight=False,
        soft_wrap=True,
    )
    return figures
