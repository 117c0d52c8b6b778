"""The parts of what --data names, the official files of GLUE and SQuAD among them."""

from pathlib import Path

from bertsmith.errors import InputError, nearest
from bertsmith.tasks.glue import GLUE, official_file, read_glue
from bertsmith.text.squad_file import squad_table
from bertsmith.text.tables import Parts, Table, parts_of
from bertsmith.text.task_folder import PART_NAMES, folder_parts


class GlueParts(Parts):
    """An official folder of GLUE."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, part: str) -> Table | None:
        file = official_file(self.folder, part)
        return None if file is None else read_glue(file, self.folder.name)

    def missing(self, part: str) -> InputError:
        there = sorted(path.stem for path in self.folder.glob("*.tsv"))
        return InputError(f"--data {str(self.folder)!r} has no {part}.tsv; {nearest(part, there)}")


class SquadParts(Parts):
    """SQuAD's own files, such as train-v1.1.json: those of a folder, or one of them."""

    def __init__(self, path: Path, file_is: str) -> None:
        self.path, self.file_is = path, file_is

    def find(self, part: str) -> Table | None:
        if self.path.is_file():
            return squad_table(self.path) if part == self.file_is else None
        names = PART_NAMES.get(part, (part,))
        found = sorted(file for name in names for file in self.path.glob(f"{name}*.json"))
        if len(found) > 1:
            listed = " and ".join(file.name for file in found)
            raise InputError(f"--data {str(self.path)!r} has {listed} for one part; keep one of them")
        return squad_table(found[0]) if found else None

    def missing(self, part: str) -> InputError:
        return InputError(f"--data {str(self.path)!r} has no {part} part, such as {part}-v1.1.json")


def task_parts(data: str | Path, *, file_is: str = "train") -> Parts:
    """The parts of what --data names; a single file is the part `file_is`."""
    path = Path(data)
    is_json = path.suffix.lower() == ".json" and path.is_file()
    if is_json or (path.is_dir() and not folder_parts(path) and any(path.glob("*.json"))):
        return SquadParts(path, file_is)
    is_glue = path.name in GLUE and path.is_dir()
    return GlueParts(path) if is_glue and any(path.glob("*.tsv")) else parts_of(data, file_is=file_is)
