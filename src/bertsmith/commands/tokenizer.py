"""`bertsmith tokenizer`: a vocabulary learned from text files."""

from pathlib import Path
from typing import Any, Literal


def tokenizer(
    data: list[Path],
    *,
    out: Path,
    kind: Literal["wordpiece", "bytes", "unigram"] = "wordpiece",
    vocabulary: int = 30522,
    lowercase: bool = True,
    field: str = "text",
    force: bool = False,
) -> dict[str, Any]:
    """Learn a tokenizer from text and write it as tokenizer.json.

    Parameters
    ----------
    data
        Text files or folders of them: .txt, .jsonl (also .gz, .xz, .zst) or .parquet.
    out
        Folder for tokenizer.json and result.json.
    kind
        wordpiece (BERT), bytes (byte-level BPE, no unknown words) or unigram (sentencepiece style).
    vocabulary
        Pieces to learn, special tokens included.
    lowercase
        Treat upper and lower case as the same.
    field
        The field or column that holds the text in .jsonl and .parquet files.
    force
        Replace the content of an output folder that an earlier command left.
    """
    import time

    from rich.console import Console

    from bertsmith.commands.output import check_out, claim, write_result
    from bertsmith.text.learn import learn_tokenizer
    from bertsmith.text.readers import find_files, read_documents

    out = Path(out)
    files = find_files([data] if isinstance(data, str | Path) else data)
    check_out(out, force, *files)
    console = Console()
    started = time.perf_counter()
    read = {"documents": 0, "bytes": 0}

    def documents() -> Any:
        for document in read_documents(files, field):
            read["documents"] += 1
            read["bytes"] += len(document) if document.isascii() else len(document.encode())
            yield document

    learned = learn_tokenizer(documents(), kind, vocabulary, lowercase=lowercase, progress=console.is_terminal)
    claim(out, force, *files)
    learned.save(out)
    figures = {
        "kind": kind,
        "vocabulary": learned.size,
        "lowercase": lowercase,
        "documents": read["documents"],
        "megabytes": round(read["bytes"] / 1e6, 3),
        "seconds": round(time.perf_counter() - started, 3),
        "hash": learned.hash,
    }
    write_result(out, figures)
    console.print(
        f"[bold]{kind}[/bold] tokenizer with {figures['vocabulary']:,} pieces from {figures['documents']:,} documents "
        f"({figures['megabytes']:,} MB) in {figures['seconds']} s\n{out / 'tokenizer.json'}\nhash {figures['hash']}",
        highlight=False,
        soft_wrap=True,
    )
    if learned.size < vocabulary:
        console.print(f"the text is too short to fill the {vocabulary:,} pieces asked for", soft_wrap=True)
    return figures
