"""Table files: all formats give equal rows, and errors name file and line."""

import csv
import gzip
import importlib
import json
import lzma
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import zstandard

from bertsmith.errors import InputError
from bertsmith.text.rows import Table, table_of
from bertsmith.text.tables import find_split_file, open_splits, read_split

ROWS = [{"text": 'a "b", c', "label": "1"}, {"text": "über\nzwei", "label": "0"}, {"text": "", "label": "1"}]


def write_compressed(path: Path, content: str) -> Path:
    compress = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}
    path.write_bytes(compress.get(path.suffix, bytes)(content.encode()))
    return path


def as_csv(rows: list[dict[str, str]], path: Path) -> str:
    with (path / "scratch").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return (path / "scratch").read_bytes().decode()


@pytest.mark.parametrize("compression", ["", ".gz", ".xz", ".zst"])
@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".tsv"])
def test_every_format_gives_the_same_rows(ending: str, compression: str, tmp_path: Path) -> None:
    rows = ROWS if ending != ".tsv" else [{**row, "text": row["text"].replace("\n", " ")} for row in ROWS]
    content = {
        ".jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        ".csv": as_csv(rows, tmp_path),
        ".tsv": "text\tlabel\n" + "".join(f"{row['text']}\t{row['label']}\n" for row in rows),
    }[ending]
    file = write_compressed(tmp_path / f"train{ending}{compression}", content)
    for data in (tmp_path, file):
        assert list(read_split(data, "train")) == rows
    # the text of the second row spans two lines in .csv
    assert read_split(file, "dev").numbers == {".jsonl": [1, 2, 3], ".csv": [2, 3, 5], ".tsv": [2, 3, 4]}[ending]


def test_parquet_keeps_lists_and_counts_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    rows = [{"tokens": ["a", "b"], "ner": ["O", "B-x"], "score": 1.5}, {"tokens": [], "ner": [], "score": None}]
    parquet = importlib.import_module("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    table = read_split(tmp_path, "test")
    assert list(table) == rows
    assert table.location(1).endswith("test.parquet' row 2")
    (tmp_path / "test.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match=r"cannot be read as parquet after row 0"):
        read_split(tmp_path, "test")


@pytest.mark.parametrize("name", ["dev", "valid", "validation"])
def test_dev_may_be_called_valid_or_validation(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.tsv").write_text("text\na\n")
    for split in ("dev", "valid", "validation"):
        assert list(read_split(tmp_path, split)) == [{"text": "a"}]


def test_byte_order_mark_and_windows_line_ends_are_removed(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_bytes(b"\xef\xbb\xbftext,label\r\na,b\r\n\r\nc,d\r\n")
    table = read_split(tmp_path, "train")
    assert list(table) == [{"text": "a", "label": "b"}, {"text": "c", "label": "d"}]
    assert table.numbers == [2, 4]


def test_unnamed_first_column_is_a_pandas_index(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(",text\n0,a\n")
    assert list(read_split(tmp_path, "train")) == [{"index": "0", "text": "a"}]


def test_long_csv_field_is_read_and_the_global_limit_restored(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    (tmp_path / "train.csv").write_text("text\n" + "a" * 200_000 + "\n")
    assert len(read_split(tmp_path, "train").text(0, "text")) == 200_000
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.csv", "text,label\na,b\nc\n", r"line 3 has 1 fields; its first line names 2 columns \(text, label\)"),
        ("train.tsv", "text\tlabel\na\tb\tc\n", r"line 2 has 3 fields"),
        ("train.csv", "text,text\na,b\n", r"line 1 names the column 'text' twice"),
        ("train.csv", "text,,label\na,b,c\n", r"line 1: column 2 has no name"),
        ("train.csv", "text;label\na;b\n", r"';' in its name; fields are separated by commas in .csv"),
        ("train.tsv", "text,label\na,b\n", r"',' in its name"),
        ("train.csv", 'text,label\na,b\n"c,d\ne,f\n', r"line 3 opens a quote that is never closed"),
        ("train.csv", 'text,label\n"a"b,c\n', r"line 2 is not valid CSV"),
        ("train.csv", "text,label\na\0,b\n", r"line 2 contains a NUL byte"),
        ("train.tsv", "text\tlabel\na\0\tb\n", r"line 2 contains a NUL byte"),
        ("train.csv", "", r"is empty; its first line must name the columns"),
        ("train.csv", "text,label\n", r"has no rows"),
        ("train.jsonl", "\n", r"has no rows"),
        ("train.jsonl", '{"a": 1}\n[1]\n', r"line 2 is a list; every line must be one JSON object"),
        ("train.jsonl", '{"a": 1}\n{"a": \n', r"line 2 is not valid JSON"),
        ("train.csv", b"text\n\xff\n", r"line 2 is not UTF-8"),
        ("train.csv.gz", b"text", r"broken .gz archive"),
        ("dev.csv", "text\na\n", r"has no train.jsonl .*; allowed: dev"),
        ("train.json", "{}", r"has no train.jsonl"),
    ],
)
def test_errors_name_file_and_line(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        read_split(tmp_path, "train")


def test_split_in_two_formats_raises(tmp_path: Path) -> None:
    for name in ("train.csv", "train.jsonl.gz"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=r"has train.jsonl.gz and train.csv for one split"):
        read_split(tmp_path, "train")


@pytest.mark.parametrize("data", ["nowhere", "missing.csv", "./a/b", "a b/c", "TMP/slip", "/no/such"])
def test_missing_path_is_not_looked_up_on_the_hub(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_: pytest.fail("loaded")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TMP").mkdir()
    with pytest.raises(InputError, match=r"does not exist; use a folder, a file, or a name on the hub"):
        open_splits(data)


def test_single_file_is_one_split_only(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("text\na\n")
    splits = open_splits(tmp_path / "mine.csv")
    assert splits.find("dev") is None
    assert len(splits.read("train")) == 1
    with pytest.raises(InputError, match=r"is a single file, the train split; it has no dev split"):
        splits.read("dev")


class _Split(list):
    @property
    def features(self) -> dict[str, object]:
        classes = SimpleNamespace(names=["no", "yes"])
        return {"text": SimpleNamespace(), "label": classes, "tags": SimpleNamespace(feature=classes)}


def test_hub_names_are_tried_as_name_and_config(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    rows = [{"text": "a", "label": 1, "tags": [0, 1]}, {"text": "b", "label": -1, "tags": []}]

    def load_dataset(name: str, config: str | None) -> dict[str, _Split]:
        calls.append((name, config))
        if name == "glue/mrpc":
            raise FileNotFoundError("no such dataset\ndetails")
        if name == "gone":
            raise ValueError("nothing")
        return {"train": _Split(rows), "validation": _Split(rows[:1]), "empty": _Split()}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    splits = open_splits("glue/mrpc")
    assert calls == [("glue/mrpc", None), ("glue", "mrpc")]
    assert list(splits.read("dev")) == [{"text": "a", "label": "yes", "tags": ["no", "yes"]}]
    assert list(splits.read("train"))[1] == {"text": "b", "label": None, "tags": []}
    assert splits.read("train").location(1) == "glue/mrpc (train) row 1"
    with pytest.raises(InputError, match=r"'glue/mrpc' has no split 'test'; allowed: empty, train, validation"):
        splits.read("test")
    with pytest.raises(InputError, match=r"has no rows"):
        splits.read("empty")
    calls.clear()
    open_splits("some/set:de"), open_splits("some/set/de"), open_splits("set:de")
    assert calls == [("some/set", "de"), ("some/set", "de"), ("set", "de")]
    with pytest.raises(InputError, match=r"'gone:x' is neither a local file .* nor available from the hub: nothing"):
        open_splits("gone:x")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"needs datasets, which is not installed: pip install 'bertsmith\[hf\]'"):
        open_splits("glue/mrpc")


def test_folder_in_hub_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set" / "data").mkdir(parents=True)
    for split, text in (("train", "a"), ("validation", "b")):
        (tmp_path / "set" / "data" / f"{split}-00000-of-00001.jsonl").write_text(json.dumps({"text": text, "label": 1}))
    assert list(read_split(tmp_path / "set", "dev")) == [{"text": "b", "label": 1}]


@pytest.mark.parametrize(("value", "number"), [(" 3.5 ", 3.5), ("1e-3", 0.001), (4, 4.0), (-0.5, -0.5)])
def test_numbers_may_be_strings_in_tables(value: object, number: float) -> None:
    assert table_of([{"score": value}], "rows").number(0, "score") == number


@pytest.mark.parametrize("value", ["nan", "inf", "", "three", "1_000", None, True, [1], float("nan"), 10**400])
def test_non_finite_number_raises(value: object) -> None:
    with pytest.raises(InputError, match=r"file 'x' line 9: field 'score' is .*; it must be a finite number"):
        Table("file 'x'", [{"score": value}], [9]).number(0, "score")


def test_unpaired_surrogate_raises() -> None:
    with pytest.raises(InputError, match=r"row 0: field 'text' has an unpaired surrogate"):
        table_of([{"text": "a\ud800"}], "rows").text(0, "text")


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path.parent


def test_plain_and_compressed_splits_are_found(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"en": "a", "de": "b"})
    with lzma.open(tmp_path / "dev.jsonl.xz", "wt", encoding="utf-8") as file:
        file.write(json.dumps({"en": "Käse", "de": "Öl"}) + "\n")
    assert read_split(tmp_path, "train").rows == [{"en": "a", "de": "b"}]
    assert read_split(tmp_path, "dev").rows == [{"en": "Käse", "de": "Öl"}]
    with pytest.raises(InputError, match=r"has no test.jsonl .*; allowed: dev, train"):
        find_split_file(tmp_path, "test")
    with pytest.raises(InputError, match=r"is not a folder"):
        find_split_file(tmp_path / "train.jsonl", "train")
