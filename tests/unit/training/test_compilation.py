"""The choice of run.compile, the fall-back to safer modes, and recorded passes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from bertsmith.data.nested import as_arrays, as_tensors, map_tensors, signature, tensors
from bertsmith.errors import InputError
from bertsmith.training import compilation, graphs, pretraining, step
from bertsmith.training.compilation import Circumstances, TrainingLoad, choose_mode
from bertsmith.training.display import Display
from bertsmith.training.graphs import Recording, RecordingError
from bertsmith.training.pretraining import PretrainSettings, make_trainer
from bertsmith.training.trainer import Trainer

LONG = TrainingLoad(has_one_shape=True, passes=100_000, flops=1e13)
GPU = Circumstances("cuda", processes=1, is_sharded=False, recomputes=False, load=LONG)


@pytest.mark.parametrize(
    ("given", "mode", "reason"),
    [
        (GPU, "graphs", "one shape"),
        (replace(GPU, device="cpu"), "off", "device is cpu"),
        (replace(GPU, recomputes=True), "off", "reversible"),
        (replace(GPU, load=replace(LONG, has_one_shape=False)), "off", "vary"),
        (replace(GPU, load=replace(LONG, passes=100)), "off", "100 passes"),
        (replace(GPU, processes=400), "off", "250 passes"),
        (replace(GPU, is_sharded=True, processes=2), "on", "sharded"),
        (replace(GPU, processes=2), "on", "exchange gradients"),
        (replace(GPU, load=replace(LONG, keeps_shapes=False)), "on", "objective"),
        (replace(GPU, load=replace(LONG, flops=1e15)), "on", "launches"),
    ],
)
def test_automatic_choice(given: Circumstances, mode: str, reason: str) -> None:
    chosen, why = choose_mode("auto", given)
    assert chosen == mode
    assert reason in why
    assert why in compilation.describe_choice(chosen, why)


@pytest.mark.parametrize(
    ("wanted", "given", "message"),
    [
        ("whole", replace(GPU, is_sharded=True), "sharded; allowed: auto, off, on"),
        ("on", replace(GPU, recomputes=True), "reversible or an equilibrium; allowed: auto, off"),
        ("graphs", replace(GPU, device="cpu"), "needs a GPU"),
        ("graphs", replace(GPU, processes=2), "with 2 processes"),
    ],
)
def test_unsupported_mode_raises(wanted: Any, given: Circumstances, message: str) -> None:
    with pytest.raises(InputError, match=message):
        choose_mode(wanted, given)
    assert choose_mode("off", given)[0] == "off"


class ReplayedFunction:
    """Stands for a CUDA graph on a CPU: computes again from the recorded inputs and overwrites the result."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], result: Any) -> None:
        self.function, self.inputs, self.result = function, inputs, result

    def replay(self) -> None:
        inputs = map_tensors(lambda tensor: tensor, self.inputs)  # new layouts: on a CPU they cache positions
        for own, new in zip(tensors(self.result), tensors(self.function(*inputs)), strict=True):
            own.copy_(new)


def record_on_cpu(function: Callable[..., Any], arguments: tuple[Any, ...], earlier: Recording | None) -> Recording:
    own = map_tensors(torch.clone, arguments)
    gradients = [(value.grad, value.grad.clone()) for value in PARAMETERS if value.grad is not None]
    random_state = torch.get_rng_state()
    result = map_tensors(lambda tensor: tensor.detach().clone(), function(*own))
    torch.set_rng_state(random_state)
    for gradient, before in gradients:  # recording computes nothing
        gradient.copy_(before)
    graph: Any = ReplayedFunction(function, own, result)
    return Recording(graph, tensors(own), result)


PARAMETERS: list[Tensor] = []


def trainer_of(corpus: Path, out: Path, **run: Any) -> Trainer:
    out.mkdir()
    overrides = {"layers": 2, "width": 16, "heads": 2, "max_length": 64, "dropout": 0.1, "embedding_width": 16}
    data = {
        "data": str(corpus),
        "model": {"preset": "electra-small", "overrides": overrides},
        "objective": {"kind": "replaced_tokens"},
        "sequences": {"length": 32, "micro_tokens": 128},
        "batch": {"tokens": 256},
        "run": {"steps": 5, "log_every": 1, "keep": 0, **run},
    }
    return make_trainer(PretrainSettings.parse(data), out, device="cpu", show=False)


def choose(mode: str, monkeypatch: pytest.MonkeyPatch, record: Callable[..., Recording] = record_on_cpu) -> None:
    """Make training steps run in a mode that needs a GPU."""
    monkeypatch.setattr(step, "choose_mode", lambda wanted, given: (mode, "it is a test"))
    monkeypatch.setattr(pretraining, "device_type", lambda device: "cuda")  # batches have one shape
    monkeypatch.setattr(graphs, "record", record)
    monkeypatch.setattr(step, "compile_layers", lambda model: None)


def weights_after(trainer: Trainer) -> list[Tensor]:
    PARAMETERS[:] = trainer.train_step.parameters
    trainer.run()
    trainer.close()
    return [value.detach().clone() for value in trainer.model.parameters()]


def assert_close(first: list[Tensor], second: list[Tensor]) -> None:
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.fixture
def eager(corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights of a run without compilation."""
    choose("off", monkeypatch)
    return weights_after(trainer_of(corpus_folder, tmp_path / "eager"))


def test_recorded_run_equals_eager_run(
    eager: list[Tensor], corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose("graphs", monkeypatch)
    trainer = trainer_of(corpus_folder, tmp_path / "graphs")
    recorded = trainer.train_step._recorded_pass
    assert_close(weights_after(trainer), eager)
    assert recorded is not None
    assert list(recorded.eager_calls.values()) == [graphs.EAGER_CALLS]
    assert len(recorded.recordings) == 1


def fail_to_record(function: Callable[..., Any], arguments: tuple[Any, ...], earlier: Recording | None) -> Recording:
    raise RecordingError("operation not permitted when stream is capturing")


def test_failed_recording_continues_with_compiled_layers(
    eager: list[Tensor],
    corpus_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose("graphs", monkeypatch, fail_to_record)
    trainer = trainer_of(corpus_folder, tmp_path / "graphs")
    shown: list[str] = []
    monkeypatch.setattr(Display, "notify", lambda display, text: shown.append(text))
    assert_close(weights_after(trainer), eager)
    assert trainer.train_step.mode == "on"
    assert [text.partition(",")[0] for text in shown] == [
        'run.compile is "auto": each layer is compiled and passes are replayed as CUDA graphs ("graphs")',
        'run.compile is "auto": each layer is compiled ("on")',
    ]
    assert shown[1].endswith('because "graphs" failed: operation not permitted when stream is capturing')


def test_runs_on_a_cpu_report_no_choice(corpus_folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(corpus_folder, tmp_path / "cpu")
    assert trainer.train_step.mode == "off"
    assert trainer.train_step.notices == []
    trainer.close()


def test_explicit_mode_raises_if_it_fails(corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose("graphs", monkeypatch, fail_to_record)
    trainer = trainer_of(corpus_folder, tmp_path / "graphs", compile="graphs")
    with pytest.raises(InputError, match=r"run.compile is 'graphs', .* not permitted .*; allowed: auto, off, on"):
        weights_after(trainer)
    trainer.close()


@pytest.mark.parametrize("compile", ["auto", "on"])
def test_failed_compilation(
    compile: str, eager: list[Tensor], corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    choose("on", monkeypatch)
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, backend=broken))
    monkeypatch.setattr(step, "compile_layers", compilation.compile_layers)
    trainer = trainer_of(corpus_folder, tmp_path / "compiled", compile=compile)
    if compile == "on":
        with pytest.raises(RuntimeError, match="no compiler here"):
            trainer.run()
        trainer.close()
        return
    assert_close(weights_after(trainer), eager)
    assert trainer.train_step.mode == "off"


class Item(NamedTuple):
    tensor: Tensor
    name: str


@dataclass(frozen=True)
class Group:
    items: tuple[Item, ...]
    sums: dict[str, Tensor | None]
    count: int


def test_nested_tensors() -> None:
    group = Group((Item(torch.ones(2), "a"), Item(torch.zeros(3), "b")), {"x": torch.ones(()), "y": None}, 4)
    assert [tensor.shape for tensor in tensors(group)] == [(2,), (3,), ()]
    doubled = map_tensors(lambda tensor: 2 * tensor, group)
    assert doubled.items[0].tensor.tolist() == [2, 2]
    assert (doubled.items[1].name, doubled.sums["y"], doubled.count) == ("b", None, 4)
    assert isinstance(as_arrays(group).items[0].tensor, np.ndarray)
    assert signature(as_tensors(as_arrays(group))) == signature(doubled)
    assert signature(replace(group, count=5)) != signature(group)
    assert signature(replace(group, sums={})) != signature(group)
    assert signature(map_tensors(torch.Tensor.double, group)) != signature(group)
