"""`bertsmith tokenizer`: a vocabulary learned from text files, or one that gets more pieces for them."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console

    from bertsmith.text.extend import Extension


def tokenizer(
    data: list[Path],
    *,
    out: Path,
    kind: Literal["wordpiece", "bytes", "unigram"] | None = None,
    vocabulary: int | None = None,
    lowercase: bool | None = None,
    extend: str | Path | None = None,
    pieces: int | None = None,
    field: str = "text",
    force: bool = False,
) -> dict[str, Any]:
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
    pieces
        With --extend: how many; 1000 by default.
    field
        The field or column that holds the text in .jsonl and .parquet files.
    force
        Replace the content of an output folder that an earlier command left.
    """
    import time

    from rich.console import Console

    from bertsmith.bundled import model_folder
    from bertsmith.errors import InputError
    from bertsmith.runs.folder import check_out, claim, write_result
    from bertsmith.text.extend import extend_tokenizer
    from bertsmith.text.learn import learn_tokenizer
    from bertsmith.text.readers import find_files
    from bertsmith.text.tokenizer import Tokenizer

    out = Path(out)
    files = find_files([data] if isinstance(data, str | Path) else data)
    if extend is None and pieces is not None:
        raise InputError(f"--pieces is {pieces} without --extend; --vocabulary is the size of a new tokenizer")
    for name, value in (("kind", kind), ("vocabulary", vocabulary), ("lowercase", lowercase)):
        if extend is not None and value is not None:
            raise InputError(f"--{name} is {value!r} with --extend, which keeps that of {str(extend)!r}; leave it out")
    extended = None if extend is None else model_folder(extend)
    base = None if extended is None else Tokenizer.load(extended)
    inputs = [*files, *([] if extended is None else [extended])]
    check_out(out, force, *inputs)
    console, started, read = Console(), time.perf_counter(), {"documents": 0, "bytes": 0}
    documents = _counted(files, field, read)
    if base is not None:
        with console.status("looking for words that are split too much"):
            extension = extend_tokenizer(base, documents, 1000 if pieces is None else pieces)
        made, figures = extension.tokenizer, _extension_figures(extension)
    else:
        kind, lowercase = kind or "wordpiece", lowercase is not False
        wanted = 30522 if vocabulary is None else vocabulary
        made = learn_tokenizer(documents, kind, wanted, lowercase=lowercase, progress=console.is_terminal)
        figures = {"kind": kind, "vocabulary": made.size, "lowercase": lowercase}
    claim(out, force, *inputs)
    made.save(out)
    figures |= {
        "documents": read["documents"],
        "megabytes": round(read["bytes"] / 1e6, 3),
        "seconds": round(time.perf_counter() - started, 3),
        "hash": made.hash,
    }
    write_result(out, figures)
    if base is not None:
        _print_extension(figures, console, out, pieces or 1000)
        return figures
    console.print(
        f"[bold]{kind}[/bold] tokenizer with {figures['vocabulary']:,} pieces from {figures['documents']:,} documents "
        f"({figures['megabytes']:,} MB) in {figures['seconds']} s\n{out / 'tokenizer.json'}\nhash {figures['hash']}",
        highlight=False,
        soft_wrap=True,
    )
    if made.size < wanted:
        console.print(f"the text is too short to fill the {wanted:,} pieces asked for", soft_wrap=True)
    return figures


def _counted(files: list[Path], field: str, read: dict[str, int]) -> Iterator[str]:
    """The documents, counted on their way."""
    from bertsmith.text.readers import read_documents

    for document in read_documents(files, field):
        read["documents"] += 1
        read["bytes"] += len(document) if document.isascii() else len(document.encode())
        yield document


def _extension_figures(extension: "Extension") -> dict[str, Any]:
    words = extension.words
    return {
        "pieces_added": len(extension.pieces),
        "vocabulary": extension.tokenizer.size,
        "words": words,
        "tokens_per_word_before": round(extension.tokens_before / words, 4),
        "tokens_per_word_after": round(extension.tokens_after / words, 4),
        "words_unchanged": round(extension.words_unchanged / words, 4),
        "best": [
            {"piece": gain.piece, "parts": list(gain.parts), "tokens_saved": gain.tokens_saved}
            for gain in extension.best
        ],
    }


def _print_extension(figures: dict[str, Any], console: "Console", out: Path, asked: int) -> None:
    before, after = figures["tokens_per_word_before"], figures["tokens_per_word_after"]
    best = [(gain["piece"], gain["tokens_saved"], " ".join(gain["parts"])) for gain in figures["best"]]
    lines = [
        f"{figures['pieces_added']:,} pieces added, {figures['vocabulary']:,} in all, from {figures['documents']:,} "
        f"documents ({figures['megabytes']:,} MB) in {figures['seconds']} s",
        f"tokens per word {before} → {after} ({after / before - 1:+.1%}); "
        f"{figures['words_unchanged']:.1%} of the words are split as before",
        "saving most:",
        *(f"  {piece}  {saved:,} tokens ({parts})" for piece, saved, parts in best),
        str(out / "tokenizer.json"),
    ]
    if figures["pieces_added"] < asked:
        lines.append(f"the text has no more to join; {asked:,} pieces were asked for")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
