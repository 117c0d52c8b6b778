"""The table of engines, and the folder that says which of them runs it: an artefact."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from bertsmith.checkpoint.files import read_json, write_json
from bertsmith.checkpoint.store import load, write_model
from bertsmith.engines.base import Artefact, Engine, Inputs, Precision, Runner
from bertsmith.engines.exit_runner import leaving_early
from bertsmith.engines.int8 import ACTIVATIONS, open_int8, write_int8
from bertsmith.engines.onnx_engine import OnnxEngine
from bertsmith.errors import InputError
from bertsmith.layers.block import Block
from bertsmith.models.model import Model

_SHAPES = 64  # of inputs that one process may compile for, before it says so and runs on uncompiled


class TorchEngine(Engine):
    """Runs the model's own folder, or one with 8-bit codes in the place of its matrices (engines/int8.py)."""

    name = "torch"
    precisions: ClassVar[tuple[Precision, ...]] = ("float32", "bfloat16", *ACTIVATIONS)

    def write(self, model: Model, folder: Path, precision: Precision, samples: Sequence[Inputs] = ()) -> None:
        if precision in ACTIVATIONS:
            write_int8(model, folder, precision, samples)
            return
        write_model(copy.deepcopy(model).bfloat16() if precision == "bfloat16" else model, folder)

    def open(self, folder: Path, precision: Precision, *, threads: int | None = None) -> Model:
        if threads is not None:
            torch.set_num_threads(threads)
        if precision in ACTIVATIONS:
            return open_int8(folder, precision)
        model = load(folder)
        return model.bfloat16() if precision == "bfloat16" else model


class CompiledEngine(TorchEngine):
    """Runs it with every layer compiled, once for each shape of input."""

    name = "compiled"

    def open(self, folder: Path, precision: Precision, *, threads: int | None = None) -> Model:
        model = super().open(folder, precision, threads=threads)
        torch._dynamo.config.recompile_limit = max(_SHAPES, torch._dynamo.config.recompile_limit)
        for module in model.modules():
            if isinstance(module, Block):
                module.forward = torch.compile(module.forward, dynamic=False)  # type: ignore[method-assign]
        return model


ARTEFACT_FILE = "artefact.json"

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (TorchEngine(), CompiledEngine(), OnnxEngine())}


def write_artefact(model: Model, folder: Path, artefact: Artefact, samples: Sequence[Inputs] = ()) -> None:
    """Puts a model into a folder that exists, for the engine and in the precision that are asked for."""
    check_artefact(artefact)
    ENGINES[artefact.engine].write(model, folder, artefact.precision, samples)
    write_json(folder / ARTEFACT_FILE, artefact.plain())


def check_artefact(artefact: Artefact) -> None:
    """Raises a sentence if an engine does not have the precision, or lacks something on this machine."""
    engine = ENGINES[artefact.engine]
    if artefact.precision not in engine.precisions:
        allowed = ", ".join(engine.precisions)
        raise InputError(f"precision is {artefact.precision!r} with the engine {engine.name}; allowed: {allowed}")
    missing = engine.missing()
    if missing is not None:
        raise InputError(f"engine is {engine.name!r}, which {missing}")


def read_artefact(folder: Path) -> Artefact:
    """How the model in a folder is run: as its artefact.json says, or by PyTorch as it is where there is none."""
    path = folder / ARTEFACT_FILE
    return Artefact.parse(read_json(path), source=str(path)) if path.is_file() else Artefact(engine="torch")


def open_runner(folder: Path, *, device: str = "cpu", threads: int | None = None) -> Runner:
    """What the folder of a model or of an artefact holds, ready to answer; "auto" takes a GPU for a model alone."""
    if not (folder / ARTEFACT_FILE).is_file():
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return leaving_early(load(folder, device=device))
    artefact = read_artefact(folder)
    engine = ENGINES[artefact.engine]
    missing = engine.missing()
    if missing is not None:
        raise InputError(f"{str(folder)!r} is run by {engine.name}, which {missing}")
    if device not in ("cpu", "auto"):
        raise InputError(f"--device is {device!r}; {str(folder)!r} was made for the CPU; allowed: auto, cpu")
    runner = engine.open(folder, artefact.precision, threads=threads)
    # compiled code is made for every shape of batch, and batches that shrink on the way have too many
    return leaving_early(runner) if artefact.engine == "torch" else runner
