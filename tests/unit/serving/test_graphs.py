"""Captured forward passes: outputs equal those of the model, for every task and size, under concurrent load.

The recorder of these tests calls the captured function on the static buffers; tests/kernels/test_serving_gpu.py repeats
them with CUDA graphs.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from scheduler_cases import LENGTH, sequences, tiny_folder
from torch import Tensor

import bertsmith
from bertsmith.engines.artefact import write_artefact
from bertsmith.engines.base import Artefact
from bertsmith.engines.torch_engine import with_bfloat16_products
from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.serving.graphs import CapturedModel, CaptureFailed, Replay, capture_graphs, why_not_captured
from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import Operation
from bertsmith.serving.scheduler import Scheduler
from bertsmith.serving.settings import SchedulerLimits


class NoEvent:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class CallingRecorder:
    """Calls the function at every replay, with the buffers of the capture."""

    device = torch.device("cpu")

    def capture(self, function: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        output = function().clone()

        def replay() -> None:
            output.copy_(function())

        return output, replay

    def launching(self) -> AbstractContextManager[object]:
        return nullcontext()

    def event(self) -> NoEvent:
        return NoEvent()


def opened(folder: Path, **options: float) -> ServedModel:
    return ServedModel.open(folder, precision="bfloat16", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task", "preset"),
    [
        (None, "bert-tiny"),
        ("classification", "bert-tiny"),
        ("tagging", "convbert-small"),
        ("tagging", "bert-tiny"),
        ("embedding", "bert-tiny"),
        ("embedding", "deberta-v3-small"),
        ("embedding", "performer-small"),
        ("classification", "albert-base"),
        ("classification", "electra-small"),
    ],
)
def test_outputs_equal_those_of_the_model(tmp_path: Path, task: str | None, preset: str) -> None:
    served = opened(tiny_folder(tmp_path / "model", task, preset=preset))
    captured = CapturedModel(served, 128, CallingRecorder())
    inputs = sequences(40)
    for operation in served.operations - {"fill_mask"}:
        assert captured.supports(operation, None)
        expected = served.run(operation, inputs)
        for output, own in zip(captured.run(operation, inputs, None), expected, strict=True):
            assert (output.dtype, output.shape) == (np.float32, own.shape)
            np.testing.assert_allclose(output, own, rtol=2e-2, atol=2e-2)
    assert not captured.supports("fill_mask", None)


def test_every_size_of_the_schedule_is_captured(tmp_path: Path) -> None:
    served = opened(tiny_folder(tmp_path / "model", "classification", is_elastic=True), floor=0.9)
    subnets = [size.subnet for size in served.schedule.sizes]
    assert len(subnets) == 3
    progress: list[tuple[int, int]] = []
    captured = CapturedModel(served, 64, CallingRecorder(), lambda done, total: progress.append((done, total)))
    # one shape of 64 tokens: the task in all sizes, the vectors without scores of their own in one
    assert progress == [(count, 4) for count in range(1, 5)]
    assert len(captured) == 4
    inputs = sequences(20)
    outputs = {}
    for subnet in subnets:
        outputs[subnet] = np.stack(captured.run("task", inputs, subnet))
        np.testing.assert_allclose(outputs[subnet], np.stack(served.run("task", inputs, subnet)), rtol=2e-2, atol=2e-2)
    assert not np.allclose(outputs[subnets[0]], outputs[subnets[2]], atol=0.1)
    assert not captured.supports("vectors", subnets[1])
    assert not captured.supports("task", Subnet(width=0.25))


@pytest.mark.parametrize("workers", [1, 4])
def test_answers_are_not_mixed_up_under_concurrent_load(tmp_path: Path, workers: int) -> None:
    served = opened(tiny_folder(tmp_path / "model", "tagging"))
    inputs = sequences(150, seed=1)
    expected = [served.run("task", [sequence])[0] for sequence in inputs]
    scheduler = Scheduler(served, SchedulerLimits(workers=workers, batch_tokens=256))
    scheduler.captured = CapturedModel(served, 256, CallingRecorder())
    scheduler.start()

    async def call(begin: int) -> None:
        chosen: list[int] = list(range(begin, min(begin + 1 + begin % 4, len(inputs))))
        operation: Operation = "task"
        answered = await scheduler.submit(operation, [inputs[index] for index in chosen])
        for index, output in zip(chosen, answered.outputs, strict=True):
            np.testing.assert_allclose(output, expected[index], rtol=3e-2, atol=3e-2)

    async def all_calls() -> None:
        await asyncio.gather(*(call(begin) for begin in range(len(inputs))))

    try:
        asyncio.run(all_calls())
    finally:
        scheduler.close()


def test_failed_capture_names_the_reason(tmp_path: Path) -> None:
    class FailingRecorder(CallingRecorder):
        def capture(self, function: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    served = opened(tiny_folder(tmp_path / "model"))
    with pytest.raises(CaptureFailed, match=r"^operation not permitted when stream is capturing$"):
        CapturedModel(served, 64, FailingRecorder())
    with pytest.raises(CaptureFailed, match="the model runs on cpu"):
        capture_graphs(served, 64)


def test_models_that_cannot_be_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder(tmp_path / "model")
    served = ServedModel.open(folder)
    assert not served.is_half
    device = property(lambda model: torch.device("cuda"))
    monkeypatch.setattr(type(served.runner), "device", device)
    assert why_not_captured(served) == "in float32, attention pads packed sequences"
    half = ServedModel(**{**vars(served), "is_half": True})
    assert why_not_captured(half) is None
    only_masks = ServedModel(**{**vars(half), "operations": frozenset({"fill_mask"})})
    assert why_not_captured(only_masks) == "it only fills masks, whose number varies"
    monkeypatch.setattr(type(served.runner), "has_early_exits", True)
    assert why_not_captured(half) == "the number of layers depends on the text, which may exit early"


def test_precision_of_a_served_model(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", "classification")
    plain, half = ServedModel.open(folder), opened(folder)
    assert (plain.precision, half.precision) == ("float32", "bfloat16")
    assert None not in plain.networks
    inputs = sequences(20, max_length=LENGTH)
    for output, expected in zip(half.run("task", inputs), plain.run("task", inputs), strict=True):
        assert not np.array_equal(output, expected)
        np.testing.assert_allclose(output, expected, rtol=5e-2, atol=5e-2)
    with pytest.raises(InputError, match="precision is 'half'; allowed: auto, float32, bfloat16"):
        ServedModel.open(folder, precision="half")  # type: ignore[arg-type]


def test_artefacts_keep_their_precision(tmp_path: Path) -> None:
    plain, folder = tiny_folder(tmp_path / "plain"), tmp_path / "int8"
    folder.mkdir()
    write_artefact(bertsmith.load(plain), folder, Artefact(engine="torch", precision="int8_weights"))
    served = ServedModel.open(folder)
    assert (served.precision, served.is_half) == ("int8_weights", False)
    with pytest.raises(InputError, match=r"precision is 'bfloat16', but .*int8.* was exported in int8_weights"):
        opened(folder)


def test_bfloat16_products_equal_those_of_autocast(tmp_path: Path) -> None:
    model = bertsmith.load(tiny_folder(tmp_path / "model", preset="convbert-small"))
    copied = with_bfloat16_products(model)
    tokens = torch.arange(20) % model.config.encoder.vocabulary
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(copied(tokens[None]), model(tokens[None]), rtol=0, atol=0)
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.float32, torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
