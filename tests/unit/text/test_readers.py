"""Document readers for all file formats; errors name the file and line."""

import gzip
import json
import lzma

import numpy as np
import pytest
import zstandard

from bertsmith.errors import InputError
from bertsmith.text import readers
from bertsmith.text.readers import find_files, parquet_rows, read_documents

DOCUMENTS = ["First line.\nSecond line.", "Ünïcode 東京 text", "last"]
COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}


def as_text(documents):
    return "\n\n".join(documents).encode()


def as_json(documents):
    return b"".join(json.dumps({"text": document}).encode() + b"\n" for document in documents)


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize(("ending", "content"), [(".txt", as_text(DOCUMENTS)), (".jsonl", as_json(DOCUMENTS))])
def test_every_compression_gives_the_same_documents(tmp_path, ending, content, compression):
    file = tmp_path / f"data{ending}{compression}"
    file.write_bytes(COMPRESS[compression](content))
    assert list(read_documents([file])) == DOCUMENTS


def test_chunks_may_end_inside_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "READ_BYTES", 32)
    file = tmp_path / "data.jsonl.zst"
    content = as_json(DOCUMENTS)
    # a file may consist of several frames
    file.write_bytes(COMPRESS[".zst"](content) + COMPRESS[".zst"](content))
    assert list(read_documents([file])) == DOCUMENTS * 2


def test_text_keeps_lines_and_skips_empty_documents(tmp_path):
    file = tmp_path / "data.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\n  \r\n\xe2\x80\x8b\n\nthree")
    assert list(read_documents([file])) == ["one\ntwo", "three"]


def test_text_without_blank_lines_is_split_at_a_line_end(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_TEXT_DOCUMENT", 10)
    file = tmp_path / "data.txt"
    file.write_text("aaaaaa\nbbbbbb\ncc\n")
    assert list(read_documents([file])) == ["aaaaaa\nbbbbbb", "cc"]


def test_empty_json_documents_are_skipped(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes(as_json(["", " \n ", "x"]))
    assert list(read_documents([file])) == ["x"]


def test_parquet_rows_are_documents(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"body": [*DOCUMENTS, ""]}), file)
    assert list(read_documents([file], "body")) == DOCUMENTS
    with pytest.raises(InputError, match=r"data\.parquet.*no column 'bodi'; did you mean 'body'"):
        list(read_documents([file], "bodi"))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"data\.parquet.*cannot be read as parquet"):
        list(read_documents([file], "body"))


def test_parquet_vectors_are_arrays(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "data.parquet"
    vectors = pyarrow.array([[1.0, 2.0], None], pyarrow.list_(pyarrow.float32()))
    parquet.write_table(pyarrow.table({"vector": vectors, "labels": [[1], [2]]}), file)
    first, second = (row for _, row in parquet_rows(file))
    assert isinstance(first["vector"], np.ndarray)
    assert (first["vector"].tolist(), first["labels"], second["vector"]) == ([1.0, 2.0], [1], None)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    file = tmp_path / "data.parquet"
    file.write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"pip install 'bertsmith\[parquet\]'"):
        list(read_documents([file]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"{not json}", r"line 2 is not valid JSON"),
        (b"[1]", r"line 2 is a list"),
        (b'{"txt": "x"}', r"line 2 has no field 'text'; did you mean 'txt'"),
        (b'{"text": null}', r"line 2: field 'text' is null; it must be a string"),
        (b'{"text": 3}', r"line 2: field 'text' is int"),
        (b'{"text": "\\ud800"}', r"line 2: field 'text' has an unpaired surrogate"),
        (b'{"text": "\xff"}', r"line 2 is not UTF-8 \(byte 0xff at position 10\)"),
    ],
)
def test_broken_json_rows_raise_with_their_line(tmp_path, row, message):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"text": "fine"}\n' + row + b"\n")
    with pytest.raises(InputError, match=rf"data\.jsonl' {message}"):
        list(read_documents([file]))


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
def test_truncated_and_broken_archives_raise(tmp_path, compression):
    content = COMPRESS[compression](b"".join(f'{{"text": "row {number**3}"}}\n'.encode() for number in range(2000)))
    file = tmp_path / f"data.jsonl{compression}"
    file.write_bytes(content[:-30])
    with pytest.raises(InputError, match=r"data\.jsonl.*is a truncated archive"):
        list(read_documents([file]))
    file.write_bytes(b"this is no archive at all")
    with pytest.raises(InputError, match=r"data\.jsonl.*is a broken"):
        list(read_documents([file]))


def test_overlong_line_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 1 << 20)
    file = tmp_path / "data.txt"
    file.write_bytes(b"x" * (3 << 20))
    with pytest.raises(InputError, match="line 1 is longer than 1 MB"):
        list(read_documents([file]))


def test_files_are_sorted_without_duplicates(tmp_path):
    for name in ("b.txt", "a.jsonl.xz", "notes.md", ".hidden.txt", "deep/c.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    files = find_files([tmp_path / "b.txt", tmp_path])
    assert [file.relative_to(tmp_path).as_posix() for file in files] == ["a.jsonl.xz", "b.txt", "deep/c.parquet"]


def test_unusable_paths_raise(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.md").write_text("x")
    for path, message in [
        (tmp_path / "none", "none' does not exist"),
        (tmp_path / "empty", "has no text file; allowed endings: .txt"),
        (tmp_path / "notes.md", "no known ending; allowed: .txt"),
    ]:
        with pytest.raises(InputError, match=message):
            find_files([path])


def test_watch_counts_the_bytes_on_disk(tmp_path):
    file = tmp_path / "data.jsonl.xz"
    file.write_bytes(COMPRESS[".xz"](as_json(DOCUMENTS)))
    seen = []
    list(read_documents([file], watch=seen.append))
    assert sum(seen) == file.stat().st_size
