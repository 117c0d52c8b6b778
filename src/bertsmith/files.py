"""Files and folders: checked when read, written atomically, locked while a process uses them.

A sealed folder has a seal.json with the SHA-256 of its files. Every reader of this module compares the file it reads
with the seal, so that damaged files raise InputError instead of changing a model or its data silently.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError

SEAL = "seal.json"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # file systems without locks
_LEFTOVER = re.compile(r"\..+\.(partial|old|\d+)")  # of NewFolder and write_text
_is_verified: ContextVar[bool] = ContextVar("is_verified", default=True)


def check_file(path: Path) -> None:
    """Raise InputError unless `path` is a regular file that can be read; a FIFO or a device would block or not end."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{str(path)!r} does not exist") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{str(path)!r} cannot be read: {_reason(error)}") from None
    if not stat.S_ISREG(mode):
        raise InputError(f"{str(path)!r} is not a regular file")
    if not os.access(path, os.R_OK):
        raise InputError(f"{str(path)!r} cannot be read: {os.strerror(errno.EACCES)}")


def read_bytes(path: Path) -> bytes:
    """Return the content of a file; raise InputError if it differs from the seal of its folder."""
    check_file(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {_reason(error)}") from None
    expected = _expected_hash(path)
    if expected is not None and hashlib.sha256(content).hexdigest() != expected:
        raise InputError(_changed(path))
    return content


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file; raise InputError if it differs from the seal of its folder."""
    content = read_bytes(path)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{str(path)!r} is not UTF-8 (byte {error.start})") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise InputError if it differs from the seal of its folder."""
    data = parse_json(read_text(path), str(path))
    if not isinstance(data, dict):
        raise InputError(f"{str(path)!r} holds a {type(data).__name__}; allowed: an object")
    return data


def parse_json(text: str, source: str) -> Any:
    """Parse JSON from outside; `source` names it in the InputError."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(f"{source!r} is not valid JSON: {error}") from None
    except RecursionError:
        raise InputError(f"{source!r} is not valid JSON: it is nested too deeply") from None


def write_text(path: Path, text: str) -> None:
    """Write a file atomically and synced: after a crash it has its old content or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, data: object) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    check_file(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_seal(folder: Path, names: Iterable[str] | None = None) -> None:
    """Write the hashes of files in a folder to seal.json; by default of all visible files but result.json.

    result.json is written last, because it marks a run as finished.
    """
    names = sealed_files(folder) if names is None else names
    write_json(folder / SEAL, {name: hash_file(folder / name) for name in sorted(names)})


def sealed_files(folder: Path) -> set[str]:
    """Return the names of the files that a seal covers by default."""
    visible = {path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")}
    return visible - {SEAL, "result.json"}


def read_seal(folder: Path) -> dict[str, str]:
    """Return the hashes in the seal of a folder."""
    path = folder / SEAL
    check_file(path)
    seal = parse_json(path.read_text(encoding="utf-8", errors="replace"), str(path))
    is_valid = isinstance(seal, dict) and all(isinstance(value, str) for value in seal.values())
    if not is_valid or any(Path(name).name != name or name == SEAL for name in seal):
        raise InputError(f"{str(path)!r} is damaged; allowed: an object with one hash per file of the folder")
    return seal


def seal_defects(folder: Path) -> list[str]:
    """Compare all files with the seal of a folder; return a message for each one that is missing or has changed."""
    return [message for name, digest in read_seal(folder).items() if (message := _defect(folder / name, digest))]


def verify_file(path: Path) -> None:
    """Raise InputError if a file differs from the seal of its folder; for files that a library reads."""
    check_file(path)
    expected = _expected_hash(path)
    if expected is not None and hash_file(path) != expected:
        raise InputError(_changed(path))


@contextmanager
def verification(is_on: bool) -> Iterator[None]:
    """Switch the comparison with seals on or off in this context."""
    token = _is_verified.set(is_on)
    try:
        yield
    finally:
        _is_verified.reset(token)


class FolderLock:
    """Exclusive use of a folder by this process, by a lock on a file in it; the lock ends with the process.

    Locks are POSIX record locks: child processes do not inherit them, so an orphan does not keep a folder locked.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Create the file if needed and lock it; return False if another process holds the lock."""
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    return False
                raise
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class NewFolder:
    """A folder that appears complete or not at all: written under a temporary name, synced, renamed on success.

    An old folder of that name is replaced only when the new one is complete. The temporary folder of a killed process
    is emptied and used again.
    """

    def __init__(self, folder: Path) -> None:
        self.final = folder
        self.temporary = folder.with_name(f".{folder.name}.partial")
        self.old = folder.with_name(f".{folder.name}.old")
        self._lock = FolderLock(self.temporary / ".lock")

    def __enter__(self) -> Path:
        self.temporary.mkdir(parents=True, exist_ok=True)
        if not self._lock.acquire():
            raise InputError(f"{str(self.final)!r} is being written by another process; wait for it to end")
        clear(self.temporary, keep=(".lock",))
        self._restore_old()
        return self.temporary

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
            self._lock.release()
            return
        for path in self.temporary.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        (self.temporary / ".lock").unlink()
        if self.final.exists():
            self.final.rename(self.old)
        self.temporary.rename(self.final)
        shutil.rmtree(self.old, ignore_errors=True)
        self._lock.release()

    def _restore_old(self) -> None:
        """Undo the renaming of a process that was killed between the two renames."""
        if self.old.exists() and not self.final.exists():
            self.old.rename(self.final)
        shutil.rmtree(self.old, ignore_errors=True)


def is_leftover(path: Path) -> bool:
    """Whether a killed process left this file or folder half-written."""
    return _LEFTOVER.fullmatch(path.name) is not None


def remove_leftovers(folder: Path) -> None:
    """Remove half-written files and folders of a killed process anywhere in a folder that this process has locked."""
    for path in list(folder.rglob(".*")):
        if is_leftover(path):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder; if the process is killed, it is still whole or it is a left-over."""
    old = folder.rename(folder.with_name(f".{folder.name}.old"))
    shutil.rmtree(old)


def clear(folder: Path, keep: Iterable[str] = ()) -> None:
    """Remove everything in a folder except the names in `keep`; links are removed, not their targets."""
    kept = set(keep)
    for entry in folder.iterdir():
        if entry.name in kept:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _expected_hash(path: Path) -> str | None:
    """Return the hash of a file in the seal of its folder; None if it is not sealed or verification is off."""
    if not _is_verified.get() or not (path.parent / SEAL).is_file():
        return None
    return read_seal(path.parent).get(path.name)


def _defect(path: Path, digest: str) -> str | None:
    try:
        return None if hash_file(path) == digest else f"{path.name} has changed since it was written"
    except InputError as error:
        return str(error)


def _changed(path: Path) -> str:
    return (
        f"{str(path)!r} has changed since it was written: its checksum differs from {SEAL}; restore the file, or "
        f"remove {SEAL} if you changed it on purpose"
    )


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
