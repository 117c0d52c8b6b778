"""Texts on which the bundled model learned the vectors of all-MiniLM-L6-v2.

    python benchmarks/teacher_texts.py DATA --out texts.jsonl

DATA has the folders squad/v1.1, squad/v2.0, squad/shifts, boolq, commonsenseqa, hellaswag, pairs/snli and
corpus/wikipedia-en with .jsonl.xz files. Writes 401,310 distinct questions, sentences and titles of 3 to 40 words in
random order, each with its kind: 55 % from Wikipedia, the others from the training splits of the tasks.
"""

import argparse
import json
import lzma
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SENTENCE_END = re.compile(r'(?<=[.!?])\s+(?=[A-Z"“])')


def rows(path: Path) -> Iterator[dict[str, Any]]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def train_rows(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*train*.jsonl.xz")):
        yield from rows(path)


def sample(texts: Iterable[str], limit: int | None = None) -> list[str]:
    """Return distinct texts of 3 to 40 words in random order, at most `limit`."""
    cleaned = [" ".join(text.split()) for text in texts]
    kept = [text for text in dict.fromkeys(cleaned) if 3 <= len(text.split()) <= 40 and len(text) < 300]
    random.shuffle(kept)
    return kept[:limit]


def squad_questions(data: Path) -> list[str]:
    return [row["question"] for part in ("v1.1", "v2.0", "shifts") for row in train_rows(data / "squad" / part)]


def squad_sentences(data: Path) -> list[str]:
    parts = ("shifts", "v1.1")
    contexts = dict.fromkeys(row["context"] for part in parts for row in train_rows(data / "squad" / part))
    return [sentence for context in contexts for sentence in SENTENCE_END.split(context)]


def hellaswag_sentences(data: Path) -> list[str]:
    sentences = []
    for row in train_rows(data / "hellaswag"):
        context = row["context"].split(": ", 1)[-1]  # without the name of the activity
        sentences += [*SENTENCE_END.split(context), row["choices"][row["label"]]]
    return sentences


def wikipedia_sentences(data: Path) -> list[str]:
    """Return up to ten sentences of half of the first articles, five of a quarter of the others, and some titles."""
    sentences: list[str] = []
    for number, path in enumerate(sorted((data / "corpus" / "wikipedia-en").glob("train-*.jsonl.xz"))):
        share, count = (0.5, 10) if number < 6 else (0.25, 5)
        for row in rows(path):
            if random.random() >= share:
                continue
            split = (sentence for line in row["text"].split("\n") for sentence in SENTENCE_END.split(line))
            whole = [sentence for sentence in split if len(sentence) > 25 and sentence[-1] in ".!?"]
            sentences += random.sample(whole, min(len(whole), count))
            if random.random() < 0.3:
                sentences.append(row["title"])
    return sentences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    data = arguments.data
    random.seed(0)
    kinds = {
        "squad questions": sample(squad_questions(data)),
        "squad passages": sample(squad_sentences(data), 60_000),
        "boolq": sample(row["question"] + "?" for row in train_rows(data / "boolq")),
        "csqa": sample(row["question"] for row in train_rows(data / "commonsenseqa")),
        "hellaswag": sample(hellaswag_sentences(data), 60_000),
        "snli": sample(row[name] for row in train_rows(data / "pairs" / "snli") for name in ("sentence1", "sentence2")),
        "wikipedia": sample(wikipedia_sentences(data), 220_000),
    }
    texts = [(kind, text) for kind, chosen in kinds.items() for text in chosen]
    random.shuffle(texts)
    with arguments.out.open("w", encoding="utf-8") as file:
        for kind, text in texts:
            file.write(json.dumps({"kind": kind, "text": text}) + "\n")
    print(json.dumps({"texts": len(texts), **{kind: len(chosen) for kind, chosen in kinds.items()}}))


if __name__ == "__main__":
    main()
