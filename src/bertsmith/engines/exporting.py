"""A model for another program, as one call: `bertsmith.export`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from bertsmith.checkpoint.files import NewFolder, read_json
from bertsmith.checkpoint.hf import NativeChoice, save_hf
from bertsmith.checkpoint.store import free_folder
from bertsmith.engines.artefact import write_artefact
from bertsmith.engines.base import Artefact, Inputs, Precision
from bertsmith.errors import InputError, nearest
from bertsmith.models.generator import Part, part_of
from bertsmith.models.model import Model

Form = Literal["hf", "onnx"]
FORMS = ("hf", "onnx")


def export(
    model: Model,
    folder: str | Path,
    *,
    to: Form = "hf",
    precision: Precision = "float32",
    samples: Sequence[Inputs] = (),
    part: Part = "encoder",
    native: NativeChoice = "auto",
    task: str | Path | None = None,
    force: bool = False,
) -> str | None:
    """Writes the model for another program, whole or not at all.

    "hf" is a folder for `transformers`, and what comes back says in a sentence of which kind: it opens without our code
    where a class there computes the same, else after `import bertsmith.hf`; `native` = "always" or "never" decides it,
    and `task` is the folder of the fine-tuned model, whose task.json goes along. "onnx" is one that ONNX Runtime runs,
    in a precision of its own if asked for, with `samples` to measure the ranges of activations on. Of a model that was
    trained against a generator, `part` says which of the two.
    """
    check_form(to, precision)
    chosen = part_of(model, part)
    with NewFolder(free_folder(folder, force)) as new:
        if to == "hf":
            kept = None if task is None else read_json(Path(task) / "task.json")
            return save_hf(chosen, new, native=native, task=kept)
        write_artefact(chosen, new, Artefact(engine="onnxruntime", precision=precision), samples)
    return None


def check_form(to: str, precision: str) -> None:
    """Raises a sentence if there is no such form, or if it has no precisions."""
    if to not in FORMS:
        raise InputError(f"to is {to!r}; {nearest(to, FORMS)}")
    if to == "hf" and precision != "float32":
        raise InputError(f"precision is {precision!r} with to = 'hf'; allowed: float32, or to = 'onnx'")
