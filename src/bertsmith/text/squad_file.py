"""SQuAD's own JSON files as rows: articles hold paragraphs, which hold questions."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError
from bertsmith.text.tables import Table


def is_squad(content: Any) -> bool:
    """Whether the content of a JSON file has the form of SQuAD's."""
    articles = content.get("data") if isinstance(content, Mapping) else None
    return isinstance(articles, list) and all(isinstance(one, Mapping) and "paragraphs" in one for one in articles)


def squad_table(file: Path) -> Table:
    """The questions of a SQuAD file, numbered from 1."""
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise InputError(f"file {str(file)!r} cannot be read as JSON: {error}") from None
    if not is_squad(content):
        raise InputError(f"file {str(file)!r} has no list 'data' of articles with 'paragraphs', as SQuAD's files have")
    try:
        rows = list(_rows(content["data"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"file {str(file)!r} is not of SQuAD's form: {type(error).__name__} {error}") from None
    if not rows:
        raise InputError(f"file {str(file)!r} has no questions")
    return Table(f"file {str(file)!r}", rows, range(1, len(rows) + 1), "question")


def _rows(articles: list[Any]) -> Iterator[dict[str, Any]]:
    for article in articles:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                row = {
                    "id": asked["id"],
                    "title": article.get("title", ""),
                    "context": paragraph["context"],
                    "question": asked["question"],
                }
                if "answers" in asked:
                    answers = asked["answers"]
                    row["answers"] = {key: [answer[key] for answer in answers] for key in ("text", "answer_start")}
                if "is_impossible" in asked:
                    row["is_impossible"] = asked["is_impossible"]
                yield row
