"""A model for another program, as one call: `bertsmith.export`."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from bertsmith.checkpoint.files import NewFolder, read_json, write_json
from bertsmith.checkpoint.hf.writing import NativeChoice, save_hf
from bertsmith.checkpoint.store import free_folder, read_config
from bertsmith.engines.artefact import ARTEFACT_FILE, check_artefact
from bertsmith.engines.base import Artefact, Inputs, Precision
from bertsmith.engines.onnx_engine import OnnxEngine
from bertsmith.engines.onnx_graph import AskedHead
from bertsmith.errors import InputError, nearest
from bertsmith.exporting.card import write_card
from bertsmith.models.generator import Part, part_of
from bertsmith.models.model import Model

Form = Literal["hf", "onnx"]
FORMS = ("hf", "onnx")
_TASK_FILE = "task.json"


def export(
    model: Model,
    folder: str | Path,
    *,
    to: Form = "hf",
    precision: Precision = "float32",
    head: AskedHead = "auto",
    samples: Sequence[Inputs] = (),
    task: str | Path | None = None,
    part: Part = "encoder",
    native: NativeChoice = "auto",
    force: bool = False,
) -> str | None:
    """Writes the model for another program, whole or not at all, with a model card.

    "hf" is a folder for `transformers`, and what comes back says in a sentence of which kind: it opens without our code
    where a class there computes the same, else after `import bertsmith.hf`; `native` = "always" or "never" decides it.
    "onnx" is one that ONNX Runtime runs, in a precision of its own if asked for. Its graph ends with the task's head or
    the last states or, with `head` = "masked_tokens", with the scores of tokens; `samples` are batches to compare the
    graph with the model on, and to measure the ranges of activations. `task` is the folder of the fine-tuned model,
    whose task.json and score go along. Of a model that was trained against a generator, `part` says which of the two.
    """
    check_form(to, precision, head)
    chosen = part_of(model, part)
    final = free_folder(folder, force)
    with NewFolder(final) as new:
        if to == "hf":
            kept = None if task is None else read_json(_task_file(task))
            remark = save_hf(chosen, new, native=native, task=kept)
            write_card(new, chosen, final.name, result=_own_result(task, chosen), remark=remark)
            return remark
        write_onnx(chosen, new, precision, samples, head)
        if task is not None and head == "auto":
            shutil.copyfile(_task_file(task), new / _TASK_FILE)
        write_card(new, chosen, final.name, result=_own_result(task, chosen))
    return None


def _task_file(folder: str | Path) -> Path:
    path = Path(folder) / _TASK_FILE
    if not path.is_file():
        raise InputError(f"task is {str(folder)!r}, which has no {_TASK_FILE}; give a fine-tuned model's folder")
    return path


def write_onnx(
    model: Model, folder: Path, precision: Precision, samples: Sequence[Inputs] = (), head: AskedHead = "auto"
) -> None:
    """Puts a model into a folder that exists, as ONNX Runtime runs it; without a task and without a card."""
    artefact = Artefact(engine="onnxruntime", precision=precision)
    check_artefact(artefact)
    OnnxEngine().write(model, folder, precision, samples, head=head)
    write_json(folder / ARTEFACT_FILE, artefact.plain())


def read_result(folder: str | Path | None) -> Mapping[str, Any] | None:
    """What result.json in the folder of a model says, for its card; None where there is none."""
    path = None if folder is None else Path(folder) / "result.json"
    return None if path is None or not path.is_file() else read_json(path)


def _own_result(task: str | Path | None, model: Model) -> Mapping[str, Any] | None:
    """The same, where the model is the one in the folder, not a part that was cut out of it."""
    return read_result(task) if task is not None and read_config(Path(task)) == model.config else None


def check_form(to: str, precision: str, head: str = "auto") -> None:
    """Raises a sentence if there is no such form, or if it has no precisions or heads to choose."""
    if to not in FORMS:
        raise InputError(f"to is {to!r}; {nearest(to, FORMS)}")
    if to == "hf" and precision != "float32":
        raise InputError(f"precision is {precision!r} with to = 'hf'; allowed: float32, or to = 'onnx'")
    if to == "hf" and head != "auto":
        raise InputError(f"head is {head!r} with to = 'hf', which takes all heads; allowed: auto, or to = 'onnx'")
