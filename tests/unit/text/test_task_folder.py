"""Task folders: parts and columns are found, and what is wrong is named with file, line and column."""

import json
import lzma
from pathlib import Path

import pytest

from bertsmith.errors import InputError
from bertsmith.text.tables import find_split_file, pair_columns, read_pairs


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path.parent


def test_plain_and_packed_parts_are_found(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"en": "a", "de": "b"})
    with lzma.open(tmp_path / "dev.jsonl.xz", "wt", encoding="utf-8") as file:
        file.write(json.dumps({"en": "Käse", "de": "Öl"}) + "\n")
    assert read_pairs(tmp_path, "train", "en", "de").sources == ["a"]
    assert read_pairs(tmp_path, "dev", "en", "de").targets == ["Öl"]
    with pytest.raises(InputError, match=r"has no test.jsonl .*; allowed: dev, train"):
        find_split_file(tmp_path, "test")
    with pytest.raises(InputError, match=r"is not a folder"):
        find_split_file(tmp_path / "train.jsonl", "train")


@pytest.mark.parametrize(
    ("given", "found"), [((None, None), ("en", "de")), (("de", None), ("de", "en")), ((None, "en"), ("de", "en"))]
)
def test_two_text_columns_are_the_pair(tmp_path: Path, given: tuple, found: tuple) -> None:
    assert pair_columns(write(tmp_path / "train.jsonl", {"idx": 3, "en": "a", "de": "b"}), "train", *given) == found


def test_other_tasks_are_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = write(tmp_path / "train.jsonl", {"idx": 0, "sentence1": "a", "sentence2": "b", "label": 1})
    with pytest.raises(InputError, match=r"sentence1, sentence2, label; a MODEL with a decoder learns pairs"):
        pair_columns(folder, "train", None, None)
    assert pair_columns(folder, "train", "sentence1", "sentence2") == ("sentence1", "sentence2")
    with pytest.raises(InputError, match=r"--source is 'sentense1' .* did you mean 'sentence1'\?"):
        pair_columns(folder, "train", "sentense1", "sentence2")
    with pytest.raises(InputError, match=r"--source and --target are both 'sentence1'"):
        pair_columns(folder, "train", "sentence1", "sentence1")


def test_problems_name_file_line_and_column(tmp_path: Path) -> None:
    folder = write(tmp_path / "train.jsonl", {"en": "a", "de": "b"}, "", {"en": "c"})
    with pytest.raises(InputError, match=r"train.jsonl' line 3 has no field 'de'"):
        read_pairs(folder, "train", "en", "de")
    write(tmp_path / "train.jsonl", {"en": "a", "de": "b"}, {"en": "c", "de": 4})
    with pytest.raises(InputError, match=r"line 2: field 'de' is int; it must be a string"):
        read_pairs(folder, "train", "en", "de")
    write(tmp_path / "train.jsonl", {"en": "a", "de": "b"}, '{"en": ')
    with pytest.raises(InputError, match=r"line 2 is not valid JSON"):
        read_pairs(folder, "train", "en", "de")


def test_empty_texts_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = write(tmp_path / "train.jsonl", {"en": " ", "de": "b"}, {"en": "a", "de": "b"})
    pairs = read_pairs(folder, "train", "en", "de")
    assert (len(pairs), pairs.empty) == (1, 1)
    write(tmp_path / "dev.jsonl", {"en": "", "de": "b"})
    with pytest.raises(InputError, match=r"has no row with a text in both 'en' and 'de'"):
        read_pairs(folder, "dev", "en", "de")
    write(tmp_path / "test.jsonl", "")
    with pytest.raises(InputError, match=r"has no rows"):
        pair_columns(folder, "test", None, None)
