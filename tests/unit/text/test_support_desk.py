"""The bundled support desk data: clean, unique, with equal labels in both splits."""

import json
import re
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest

from bertsmith.errors import InputError
from bertsmith.tasks.data_source import recognise, task_splits
from bertsmith.text.support_desk import SPLITS, messages, support_desk

FILES = ("train.tsv", "dev.tsv", "desk.txt")


def _bytes(name: str) -> bytes:
    return files("bertsmith.text.support_desk").joinpath(name).read_bytes()


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9']+", text.lower()))


def _jaccard(first: frozenset[str], second: frozenset[str]) -> float:
    return len(first & second) / len(first | second)


def test_splits_have_the_same_labels() -> None:
    train, dev = support_desk("train"), support_desk("dev")
    assert {row["label"] for row in train} == {row["label"] for row in dev}
    assert all(row.keys() == {"text", "label"} for row in train + dev)


def test_unknown_split_raises() -> None:
    with pytest.raises(InputError, match="split is 'test'; allowed: train, dev"):
        support_desk("test")


def test_messages_are_unique() -> None:
    texts = [row["text"] for split in SPLITS for row in support_desk(split)] + _bytes("desk.txt").decode().splitlines()
    plain = Counter(" ".join(re.findall(r"[a-z0-9']+", text.lower())) for text in texts)
    assert [text for text, count in plain.items() if count > 1] == []


@pytest.mark.slow
def test_dev_has_no_near_duplicates_of_train() -> None:
    seen = [_words(text) for text in messages()]
    held_out = [row["text"] for row in support_desk("dev")]
    assert [text for text in held_out if any(_jaccard(_words(text), words) > 0.7 for words in seen)] == []


@pytest.mark.parametrize("name", FILES)
def test_files_are_clean(name: str) -> None:
    raw = _bytes(name)
    assert raw.isascii()
    assert raw.endswith(b"\n")
    assert not raw.endswith(b"\n\n")
    assert b"\r" not in raw
    assert b'"' not in raw  # read as .csv, a quote would open a field
    for line in raw.decode().splitlines():
        for field in line.split("\t"):
            assert field == " ".join(field.split())
            assert field


def test_splits_are_shuffled() -> None:
    """The first rows contain every label."""
    for split in SPLITS:
        rows = support_desk(split)
        assert {row["label"] for row in rows[:200]} == {row["label"] for row in rows}


def test_messages_contain_train_but_not_dev() -> None:
    train = [row["text"] for row in support_desk("train")]
    texts = list(messages())
    assert texts[: len(train)] == train
    assert len(texts) - len(train) >= 600
    assert not set(texts) & {row["text"] for row in support_desk("dev")}


def test_is_recognised_as_classification(tmp_path: Path) -> None:
    for split in SPLITS:
        lines = [json.dumps(row) for row in support_desk(split)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    table = task_splits(tmp_path).find("train")
    assert table is not None
    assert recognise(table, None, [], {}) == {"kind": "classification", "text": "text", "label": "label"}
