"""Read the rows of one file of a task: .jsonl, .csv, .tsv (plain, .gz, .xz, .zst) or .parquet.

Fields of .csv and .tsv files stay strings: the task decides whether "3" is a label or a number.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError
from bertsmith.text.readers import COMPRESSIONS, MAX_LINE_BYTES, NumberedRows, numbered_lines, parquet_rows, read_rows
from bertsmith.text.rows import Row, Table

TABLE_FORMATS = (".jsonl", ".csv", ".tsv")
TABLE_ENDINGS = (*(format_ + compression for format_ in TABLE_FORMATS for compression in COMPRESSIONS), ".parquet")


def table_ending(file: Path) -> str:
    """Return the table ending of a file name, or an empty string."""
    name = file.name.lower()
    return next((ending for ending in sorted(TABLE_ENDINGS, key=len, reverse=True) if name.endswith(ending)), "")


def table_rows(file: Path) -> NumberedRows:
    """Read the rows of a file with their line numbers (row numbers in .parquet files)."""
    ending = table_ending(file)
    if not ending:
        raise InputError(
            f"file {str(file)!r} has no known ending; allowed: {', '.join(TABLE_FORMATS)} (also .gz, .xz, .zst), "
            ".parquet"
        )
    if ending == ".parquet":
        return parquet_rows(file)
    if ending.startswith(".jsonl"):
        return read_rows(file)
    return _named_fields(file, _comma_fields(file) if ending.startswith(".csv") else _tab_fields(file))


def _named_fields(file: Path, lines: Iterator[tuple[int, list[str]]]) -> NumberedRows:
    """Yield the fields of every line by column name; the first line names the columns."""
    _, first = next(lines, (0, None))
    if first is None:
        raise InputError(f"file {str(file)!r} is empty; its first line must name the columns")
    names = _column_names(file, first)
    for number, fields in lines:
        if len(fields) != len(names):
            raise InputError(
                f"file {str(file)!r} line {number} has {len(fields)} fields; its first line names {len(names)} columns"
                f" ({', '.join(names)})"
            )
        yield number, dict(zip(names, fields, strict=True))


def _column_names(file: Path, fields: list[str]) -> list[str]:
    names = [name.strip() for name in fields]
    if not names[0] and "index" not in names:
        names[0] = "index"  # pandas writes its index without a column name
    for position, name in enumerate(names):
        if not name:
            raise InputError(f"file {str(file)!r} line 1: column {position + 1} has no name; every column needs one")
        if name in names[:position]:
            raise InputError(f"file {str(file)!r} line 1 names the column {name!r} twice; column names must be unique")
    separator = next((mark for mark in ("\t", ";", ",") if len(names) == 1 and mark in names[0]), None)
    if separator is not None:
        raise InputError(
            f"file {str(file)!r} line 1 is one column, {names[0]!r}, with {separator!r} in its name; fields are "
            "separated by commas in .csv and by tabs in .tsv files"
        )
    return names


def _tab_fields(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Split lines at tabs; quotes have no meaning, as in the files of GLUE."""
    for number, line in numbered_lines(file):
        if line:
            yield number, _check_line(file, number, line).split("\t")


def _comma_fields(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Read the records of a .csv file with the number of their first line; quoted fields may contain line breaks."""
    reader = csv.reader(_with_line_ends(file, numbered_lines(file)), strict=True)
    begin = 1
    while True:
        # the limit is global, so it is set for one record at a time; allow fields as long as a line of any other file
        previous_limit = csv.field_size_limit(MAX_LINE_BYTES)
        try:
            fields = next(reader, None)
        except csv.Error as error:
            is_open = "unexpected end" in str(error)
            reason = "opens a quote that is never closed" if is_open else f"is not valid CSV ({error})"
            raise InputError(
                f"file {str(file)!r} line {begin} {reason}; put a field with quotes in quotes and double the inner ones"
            ) from None
        finally:
            csv.field_size_limit(previous_limit)
        if fields is None:
            return
        if fields:
            yield begin, fields
        begin = reader.line_num + 1


def _with_line_ends(file: Path, lines: Iterable[tuple[int, str]]) -> Iterator[str]:
    for number, line in lines:
        yield _check_line(file, number, line) + "\n"


def _check_line(file: Path, number: int, line: str) -> str:
    if "\0" in line:
        raise InputError(f"file {str(file)!r} line {number} contains a NUL byte; it must be a text file")
    return line


def is_squad(content: object) -> bool:
    """Whether the content of a JSON file has SQuAD's format."""
    articles = content.get("data") if isinstance(content, Mapping) else None
    return isinstance(articles, list) and all(
        isinstance(article, Mapping) and "paragraphs" in article for article in articles
    )


def json_table(file: Path) -> Table:
    """Read a .json file: an array of rows, or the questions of a SQuAD file, numbered from 1."""
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise InputError(f"file {str(file)!r} cannot be read as JSON: {error}") from None
    if isinstance(content, list):
        return _array_table(file, content)
    if not is_squad(content):
        raise InputError(
            f"file {str(file)!r} is neither an array of rows nor an object with a list 'data' of articles with "
            "'paragraphs', as in SQuAD files"
        )
    try:
        rows = list(_squad_rows(content["data"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"file {str(file)!r} is not in SQuAD format: {type(error).__name__} {error}") from None
    if not rows:
        raise InputError(f"file {str(file)!r} has no questions")
    return Table(f"file {str(file)!r}", rows, range(1, len(rows) + 1), "question")


def _array_table(file: Path, rows: list[Any]) -> Table:
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise InputError(f"file {str(file)!r} row {number} is {row!r:.60}; allowed: an object with named columns")
    if not rows:
        raise InputError(f"file {str(file)!r} has no rows")
    return Table(f"file {str(file)!r}", rows, range(1, len(rows) + 1), "row")


def _squad_rows(articles: list[Any]) -> Iterator[Row]:
    for article in articles:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                row = {
                    "id": question["id"],
                    "title": article.get("title", ""),
                    "context": paragraph["context"],
                    "question": question["question"],
                }
                if "answers" in question:
                    answers = question["answers"]
                    row["answers"] = {key: [answer[key] for answer in answers] for key in ("text", "answer_start")}
                if "is_impossible" in question:
                    row["is_impossible"] = question["is_impossible"]
                yield row
