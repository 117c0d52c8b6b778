"""Files and folders: modes, atomic writes, locks, seals and hostile files."""

import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith.checkpoint.files import write_tensors
from bertsmith.errors import InputError
from bertsmith.files import (
    SEAL,
    NewFolder,
    read_json,
    read_text,
    remove_folder,
    remove_leftovers,
    seal_defects,
    verification,
    write_json,
    write_seal,
    write_text,
)
from bertsmith.runs.output import check_out, claim, unlock, write_result

HOLD = """
import sys
from pathlib import Path
from bertsmith.files import FolderLock
lock = FolderLock(Path(sys.argv[1]))
assert lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_by_another_process(file: Path) -> Iterator[None]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"held\n"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def tiny_model() -> bertsmith.Model:
    return bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=30, width=8, layers=1, heads=2, max_length=8))


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_modes_of_model_files_follow_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        bertsmith.save(tiny_model(), tmp_path / "model")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "model").iterdir()}
    assert set(modes.values()) == {0o666 & ~mask}, modes


def test_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.toml"
    write_text(path, "old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            write_text(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["recipe.toml"]


def test_full_disk_while_weights_are_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    """The exception of safetensors would be a traceback."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_tensors(tmp_path / "model.safetensors", {"weight": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(tmp_path / "model.safetensors")


def test_new_folder_replaces_the_old_one_only_when_complete(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for content in ("first", "second"):
        with NewFolder(folder) as new:
            (new / "file").write_text(content)
    with pytest.raises(FileNotFoundError), NewFolder(folder) as new:
        (new / "file").rename(new / "other")
    assert (folder / "file").read_text() == "second"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_new_folder_cleans_up_after_a_killed_process(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "half").touch()
    (tmp_path / ".model.old").mkdir()
    (tmp_path / ".model.old" / "file").write_text("old")  # killed between the two renames
    with pytest.raises(RuntimeError), NewFolder(folder):
        raise RuntimeError
    assert (folder / "file").read_text() == "old"
    with NewFolder(folder) as new:
        (new / "file").write_text("new")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "file"]


def test_new_folder_of_a_running_process_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / ".model.partial").mkdir()
    with (
        held_by_another_process(tmp_path / ".model.partial" / ".lock"),
        pytest.raises(InputError, match="is being written by another process"),
        NewFolder(tmp_path / "model"),
    ):
        pass
    assert (tmp_path / ".model.partial").exists()


def test_leftovers_are_removed_at_every_depth(tmp_path: Path) -> None:
    for name in (".step-00000005.partial", "stage/.model.old", "stage/.hidden"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / ".recipe.toml.4711").touch()
    (tmp_path / "log.jsonl").touch()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".hidden", "log.jsonl", "stage"]


def test_folder_is_whole_or_a_leftover_while_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / "file").touch()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_: None)  # killed here
        remove_folder(tmp_path / "step-5")
    assert not (tmp_path / "step-5").exists()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folder_with_only_half_written_files_of_a_run_is_empty(tmp_path: Path) -> None:
    out = tmp_path / "run"
    claim(out, force=False)
    unlock(out)
    (out / ".journal.jsonl.4711").touch()
    claim(out, force=False)
    assert [path.name for path in out.iterdir()] == [".bertsmith"]
    unlock(out)
    (tmp_path / ".mine.4711").touch()  # in a folder that no run created
    with pytest.raises(InputError, match="is not empty"):
        check_out(tmp_path, force=False)


def test_output_folder_in_use_is_refused_until_its_process_ends(tmp_path: Path) -> None:
    out = tmp_path / "run"
    claim(out, force=False)
    (out / "log.jsonl").touch()
    write_result(out, {})
    with held_by_another_process(out / ".bertsmith"):
        with pytest.raises(InputError, match="is in use by another bertsmith process"):
            check_out(out, force=True)
        with pytest.raises(InputError, match="is in use by another bertsmith process"):
            claim(out, force=True)
        assert (out / "log.jsonl").exists()
    claim(out, force=True)
    assert not (out / "log.jsonl").exists()
    write_result(out, {})


def test_sealed_file_that_changed_raises(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"width": 1})
    write_seal(tmp_path)
    assert read_json(tmp_path / "config.json") == {"width": 1}
    (tmp_path / "config.json").write_text(json.dumps({"width": 2}))
    with pytest.raises(InputError, match=r"config.json' has changed since it was written"):
        read_json(tmp_path / "config.json")
    assert seal_defects(tmp_path) == ["config.json has changed since it was written"]
    with verification(False):
        assert read_json(tmp_path / "config.json") == {"width": 2}


@pytest.mark.parametrize("seal", ["[]", '{"a": 1}', '{"../a": "0"}', "{", '{"seal.json": "0"}'])
def test_damaged_seal_raises(tmp_path: Path, seal: str) -> None:
    (tmp_path / "a").touch()
    (tmp_path / SEAL).write_text(seal)
    with pytest.raises(InputError, match=r"seal.json"):
        read_text(tmp_path / "a")


def test_unusual_files_raise(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "digits").write_text("9" * 10_000)
    (tmp_path / "latin").write_bytes(b'{"a": "\xe9"}')
    messages = {
        "pipe": "is not a regular file",
        "deep": "nested too deeply",
        "digits": "is not valid JSON",
        "latin": r"is not UTF-8 \(byte 7\)",
        "absent": "does not exist",
    }
    for name, message in messages.items():
        with pytest.raises(InputError, match=message):
            read_json(tmp_path / name)
