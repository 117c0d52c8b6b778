"""`bertsmith.export`: write a model for Hugging Face or ONNX Runtime."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from bertsmith.checkpoint.files import NewFolder, read_json, write_json
from bertsmith.checkpoint.hf.writing import NativeChoice, save_hf
from bertsmith.checkpoint.store import free_folder, read_config
from bertsmith.engines.artefact import ARTEFACT_FILE, check_artefact
from bertsmith.engines.base import Artefact, Inputs, Precision
from bertsmith.engines.onnx_engine import OnnxEngine
from bertsmith.engines.onnx_graph import HeadChoice
from bertsmith.errors import InputError, nearest
from bertsmith.exporting.card import Json, write_card
from bertsmith.models.generator import Part, part_of
from bertsmith.models.model import Model

ExportFormat = Literal["hf", "onnx"]
FORMATS = ("hf", "onnx")
_TASK_FILE = "task.json"


def export(
    model: Model,
    folder: str | Path,
    *,
    to: ExportFormat = "hf",
    precision: Precision = "float32",
    head: HeadChoice = "auto",
    samples: Sequence[Inputs] = (),
    task: str | Path | None = None,
    part: Part = "encoder",
    native: NativeChoice = "auto",
    force: bool = False,
) -> str | None:
    """Write a model for another program with a model card, complete or not at all.

    "hf" writes a folder for `transformers` and returns a remark on its form: it opens without our code if one of the
    classes there computes the same, else after `import bertsmith.hf`; `native` = "always" or "never" forces one. "onnx"
    writes a folder for ONNX Runtime, whose graph has the output of the task head, or the last hidden states, or, with
    `head` = "masked_tokens", the scores of tokens; `samples` are batches to compare the graph with the model and to
    calibrate activations. `task` is the folder of the fine-tuned model, for its task.json and score. `part` chooses the
    encoder or the generator of a model that was trained against a generator.
    """
    check_options(to, precision, head)
    chosen = part_of(model, part)
    final = free_folder(folder, force)
    with NewFolder(final) as new:
        if to == "hf":
            content = None if task is None else read_json(_task_file(task))
            remark = save_hf(chosen, new, native=native, task=content)
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
    model: Model, folder: Path, precision: Precision, samples: Sequence[Inputs] = (), head: HeadChoice = "auto"
) -> None:
    """Write a model into an existing folder for ONNX Runtime, without task and card."""
    artefact = Artefact(engine="onnxruntime", precision=precision)
    check_artefact(artefact)
    OnnxEngine().write(model, folder, precision, samples, head=head)
    write_json(folder / ARTEFACT_FILE, artefact.plain())


def read_result(folder: str | Path | None) -> Json | None:
    """Content of result.json in the folder of a model, for its card; None if there is none."""
    path = None if folder is None else Path(folder) / "result.json"
    return None if path is None or not path.is_file() else read_json(path)


def _own_result(task: str | Path | None, model: Model) -> Json | None:
    """The result of the folder, if its model is this one and not a part of it."""
    return read_result(task) if task is not None and read_config(Path(task)) == model.config else None


def check_options(to: str, precision: str, head: str = "auto") -> None:
    """Raise if the format does not exist, or has no precisions or heads to choose from."""
    if to not in FORMATS:
        raise InputError(f"to is {to!r}; {nearest(to, FORMATS)}")
    if to == "hf" and precision != "float32":
        raise InputError(f"precision is {precision!r} with to = 'hf'; allowed: float32, or to = 'onnx'")
    if to == "hf" and head != "auto":
        raise InputError(f"head is {head!r} with to = 'hf', which takes all heads; allowed: auto, or to = 'onnx'")
