"""The output folder of a run: check it, claim it, resume the run, write the result."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from bertsmith.errors import InputError
from bertsmith.files import SEAL, read_json, write_json, write_text
from bertsmith.recipes import recipe_path
from bertsmith.runs.output import RESULT, check_out, claim, lock, unlock, write_result
from bertsmith.runs.result import Result
from bertsmith.settings import Plain, Record, check_same
from bertsmith.toml import read_toml, to_toml
from bertsmith.training.interrupts import explain_fault
from bertsmith.training.run_config import process_state

RECIPE = "recipe.toml"

AnyResult = TypeVar("AnyResult", bound=Result)


class RunFolder:
    """The output folder of one run.

        with RunFolder(out, settings, inputs=inputs, resume=resume, force=force) as run:
            trainer = make_trainer(settings, run.path)  # bad input raises before anything is written
            run.claim()                                 # empties the folder, writes recipe.toml
            trainer.run(resume=run.is_resumed)
            return run.finish(result)                   # writes result.json, last

    The folder is locked while the run uses it. On exit, system errors such as a full disk become an InputError that
    explains how to resume. With several processes only the main process writes.
    """

    def __init__(
        self,
        out: Path | None,
        settings: Record | None = None,
        *,
        inputs: Sequence[Path] = (),
        resume: bool = False,
        force: bool = False,
        device: str = "auto",
        temporary: Sequence[str] = (),
    ) -> None:
        if out is None:
            raise InputError("--out is not given; give the folder to write to")
        self.path, self.settings, self.inputs = out, settings, inputs
        self.is_resumed, self.force = resume, force
        self.temporary = temporary
        """Patterns of files and folders that a finished run does not need, such as its checkpoints."""
        self.state = process_state(device)
        self.training = out
        """The folder with the checkpoints of the training in progress."""
        self._is_claimed = False

    @property
    def is_main(self) -> bool:
        return bool(self.state.is_main_process)

    def __enter__(self) -> "RunFolder":
        if self.is_resumed:
            self._check_resume()
            if self.is_main:
                lock(self.path)
                (self.path / SEAL).unlink(missing_ok=True)  # of a run that was killed before its result
        elif self.is_main:
            check_out(self.path, self.force, *self.inputs)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        unlock(self.path)
        if error is not None and self._is_claimed:
            fault = explain_fault(error, self.path, self.training)
            if fault is not None:
                raise fault from None

    def claim(self, settings: Record | None = None, *, files: Mapping[str, object] | None = None) -> None:
        """Empty the folder and write recipe.toml, unless the run is resumed; `settings` replace the initial ones.

        `files` are further JSON files by name, which exist whenever recipe.toml does.
        """
        self.settings = settings or self.settings
        if self.is_main and not self.is_resumed:
            claim(self.path, self.force, *self.inputs)
            for name, content in (files or {}).items():
                write_json(self.path / name, content)
            if self.settings is not None:
                write_text(self.path / RECIPE, to_toml(self.settings.plain()))
        self.state.wait_for_everyone()
        self._is_claimed = True

    def finish(self, result: AnyResult) -> AnyResult:
        """Write result.json, which marks the run as finished, and remove temporary files."""
        if self.is_main:
            write_result(self.path, result.to_json(), seals=True)
            self._remove_temporary()
        return result

    def _remove_temporary(self) -> None:
        for path in (path for pattern in self.temporary for path in self.path.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _check_resume(self) -> None:
        """Raise InputError if the run is finished or was started with different settings."""
        earlier = finished_result(self.path)
        if earlier is not None:
            if self.is_main:  # killed after its result
                self._remove_temporary()
            steps = f" ({earlier['steps']} steps)" if "steps" in earlier else ""
            raise InputError(f"the run in {str(self.path)!r} is finished{steps}; there is nothing to resume")
        if self.settings is not None:
            recipe = self.path / RECIPE
            check_same(type(self.settings).parse(read_toml(recipe), source=str(recipe)).plain(), self.settings.plain())


def read_recipe_file(recipe: str | Path | None, run: Path | None) -> Plain | None:
    """Return `recipe`, a file or a name, as plain data, else the recipe of `run`, the run to resume, else None."""
    if run is not None and not (run / RECIPE).exists():
        raise InputError(f"{str(run)!r} contains no run to resume ({RECIPE} is missing)")
    if recipe is None and run is not None:
        recipe = run / RECIPE
    return None if recipe is None else read_toml(recipe_path(recipe))


def finished_result(folder: Path) -> Plain | None:
    """Return the content of result.json if the run in `folder` is finished, else None."""
    if not (folder / RESULT).is_file():
        return None
    result: Plain = read_json(folder / RESULT)
    return result if result.get("is_finished") else None
