"""The service on a GPU: CUDA graphs give the outputs of the model, and no answer belongs to another request."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scheduler_cases import sequences, tiny_folder

from bertsmith.layers.subnet import Subnet
from bertsmith.serving.model import ServedModel
from bertsmith.serving.scheduler import Scheduler
from bertsmith.serving.settings import SchedulerLimits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("task", [None, "classification", "tagging", "embedding"])
@pytest.mark.parametrize(
    "preset", ["bert-tiny", "electra-small", "convbert-small", "deberta-v3-small", "performer-small", "albert-base"]
)
def test_graphs_give_the_outputs_of_the_model(tmp_path: Path, task: str | None, preset: str) -> None:
    folder = tiny_folder(tmp_path / "model", task, preset=preset)
    served, exact = ServedModel.open(folder, device="cuda"), ServedModel.open(folder, device="cpu")
    scheduler = Scheduler(served, SchedulerLimits(batch_tokens=256))
    scheduler.start()
    try:
        assert scheduler.captured is not None, scheduler.why_eager
        for seed in range(4):  # replays of the same graph, and of others between them
            inputs = sequences(5 * 4**seed, seed=seed, max_length=32 if task is None else 24)
            for operation in served.operations - {"fill_mask"}:
                assert scheduler.captured.supports(operation, None)
                outputs = scheduler.captured.run(operation, inputs, None)
                eager, expected = served.run(operation, inputs), exact.run(operation, inputs)
                for output, own, reference in zip(outputs, eager, expected, strict=True):
                    scale = max(1.0, float(np.abs(reference).max()))
                    np.testing.assert_allclose(output, own, rtol=0, atol=1e-2 * scale)
                    np.testing.assert_allclose(output, reference, rtol=0, atol=5e-2 * scale)
    finally:
        scheduler.close()


@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_answers_are_not_mixed_up_under_concurrent_load(tmp_path: Path, task: str) -> None:
    folder = tiny_folder(tmp_path / "model", task, is_elastic=True)
    served = ServedModel.open(folder, device="cuda", floor=0.9)
    inputs = sequences(400, seed=1)
    sizes = [size.subnet for size in served.schedule.sizes]
    alone: dict[Subnet | None, list[np.ndarray]] = {
        subnet: [served.run("task", [sequence], subnet)[0] for sequence in inputs] for subnet in sizes
    }
    scheduler = Scheduler(served, SchedulerLimits(batch_tokens=512, wait_target=1e-6, quiet_seconds=60.0))
    scheduler.start()
    used = set()

    async def call(begin: int) -> None:
        chosen = [(begin + 7 * offset) % len(inputs) for offset in range(1 + begin % 4)]
        answered = await scheduler.submit("task", [inputs[index] for index in chosen])
        used.add(answered.subnet)
        for index, output in zip(chosen, answered.outputs, strict=True):
            np.testing.assert_allclose(output, alone[answered.subnet][index], rtol=3e-2, atol=3e-2)

    async def waves() -> None:
        for _ in range(4):
            await asyncio.gather(*(call(begin) for begin in range(len(inputs))))

    try:
        assert scheduler.captured is not None, scheduler.why_eager
        asyncio.run(waves())
    finally:
        scheduler.close()
    assert len(used) > 1  # the smaller sizes answered as well


def test_a_model_without_graphs_is_served_eagerly(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", "classification")
    served = ServedModel.open(folder, device="cuda", precision="float32")
    scheduler = Scheduler(served)
    scheduler.start()
    try:
        assert scheduler.captured is None
        assert scheduler.why_eager == "in float32, attention pads packed sequences"
        inputs = sequences(50)
        outputs = asyncio.run(scheduler.submit("task", inputs)).outputs
        expected = ServedModel.open(folder, device="cpu").run("task", inputs)
        for output, own in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(output, own, rtol=1e-3, atol=1e-4)
    finally:
        scheduler.close()


def test_a_model_that_waits_for_the_gpu_is_served_eagerly(tmp_path: Path) -> None:
    served = ServedModel.open(tiny_folder(tmp_path / "model", "classification"), device="cuda")
    network = served.networks[None]
    outputs = network.outputs

    def synchronising(*arguments: Any, **options: Any) -> torch.Tensor:
        result = outputs(*arguments, **options)
        return result + 0 * result.sum().item()

    network.outputs = synchronising  # type: ignore[method-assign]
    scheduler = Scheduler(served, SchedulerLimits(batch_tokens=64))
    try:
        scheduler.start()
        assert scheduler.captured is None
        assert scheduler.why_eager is not None
        assert "synchroniz" in scheduler.why_eager
        network.outputs = outputs  # type: ignore[method-assign]
        inputs = sequences(20)
        answered = asyncio.run(scheduler.submit("task", inputs)).outputs
        for output, own in zip(answered, served.run("task", inputs), strict=True):
            np.testing.assert_allclose(output, own, rtol=3e-2, atol=3e-2)
    finally:
        scheduler.close()
