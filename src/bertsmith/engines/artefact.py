"""Artefacts: model folders for one engine and precision, named in artefact.json."""

from collections.abc import Sequence
from pathlib import Path

from bertsmith.checkpoint.store import load
from bertsmith.data.devices import device_type
from bertsmith.engines.base import Artefact, Engine, Runner, Sample
from bertsmith.engines.exit_runner import with_exits
from bertsmith.engines.onnx_engine import OnnxEngine
from bertsmith.engines.torch_engine import CompiledEngine, TorchEngine
from bertsmith.errors import InputError
from bertsmith.files import read_json, write_json
from bertsmith.models.model import Model

ARTEFACT_FILE = "artefact.json"

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (TorchEngine(), CompiledEngine(), OnnxEngine())}


def write_artefact(model: Model, folder: Path, artefact: Artefact, samples: Sequence[Sample] = ()) -> None:
    """Write a model into an existing folder for an engine and a precision."""
    check_artefact(artefact)
    ENGINES[artefact.engine].write(model, folder, artefact.precision, samples)
    write_json(folder / ARTEFACT_FILE, artefact.plain())


def check_artefact(artefact: Artefact) -> None:
    """Raise InputError if the engine does not support the precision or is not installed."""
    engine = ENGINES[artefact.engine]
    if artefact.precision not in engine.precisions:
        allowed = ", ".join(engine.precisions)
        raise InputError(f"precision is {artefact.precision!r} with the engine {engine.name}; allowed: {allowed}")
    missing = engine.missing()
    if missing is not None:
        raise InputError(f"engine is {engine.name!r}, which {missing}")


def read_artefact(folder: Path) -> Artefact:
    """Read the artefact.json of a folder; without one, the engine is PyTorch in float32."""
    path = folder / ARTEFACT_FILE
    return Artefact.parse(read_json(path), source=str(path)) if path.is_file() else Artefact(engine="torch")


def open_runner(folder: Path, *, device: str = "cpu", threads: int | None = None) -> Runner:
    """Open the folder of a model or an artefact; device "auto" uses a GPU for models only."""
    if not (folder / ARTEFACT_FILE).is_file():
        if device == "auto":
            device = device_type("auto")
        return with_exits(load(folder, device=device))
    artefact = read_artefact(folder)
    engine = ENGINES[artefact.engine]
    missing = engine.missing()
    if missing is not None:
        raise InputError(f"{str(folder)!r} needs the engine {engine.name}, which {missing}")
    if device not in ("cpu", "auto"):
        raise InputError(
            f"--device is {device!r}, but the artefact {str(folder)!r} runs on the CPU; allowed: auto, cpu"
        )
    runner = engine.open(folder, artefact.precision, threads=threads)
    # compiled models do not exit early: shrinking batches would compile for too many shapes
    model = runner.torch_model if artefact.engine == "torch" else None
    return runner if model is None else with_exits(model)
