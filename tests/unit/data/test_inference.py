"""Windows, background thread and precision of inference."""

from collections.abc import Iterator
from threading import current_thread
from types import SimpleNamespace

import pytest
import torch

from bertsmith.data.inference import (
    FIRST_WINDOW,
    MAX_WINDOW,
    in_background,
    inference_autocast,
    is_half,
    to_device,
    token_budget,
    windows,
)
from bertsmith.errors import InputError

CPU = torch.device("cpu")


def test_windows_grow_and_keep_the_order() -> None:
    rows = 3 * MAX_WINDOW
    parts = list(windows(iter(range(rows))))
    assert [row for part in parts for row in part] == list(range(rows))
    sizes = [len(part) for part in parts]
    assert sizes[0] == FIRST_WINDOW
    assert sizes[1] == 2 * FIRST_WINDOW
    assert max(sizes) == MAX_WINDOW
    assert list(windows([])) == []


@pytest.mark.parametrize(("gigabytes", "tokens"), [(4, 8192), (24, 24_576), (141, 65_536)])
def test_token_budget_grows_with_the_memory_of_a_gpu(
    gigabytes: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(total_memory=gigabytes << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert token_budget(torch.device("cuda")) == tokens
    assert token_budget(CPU) == 1024


def test_background_thread_computes_one_item_ahead() -> None:
    computed: list[int] = []
    threads = set()

    def items() -> Iterator[int]:
        for number in range(20):
            computed.append(number)
            threads.add(current_thread().name)
            yield number

    for number in in_background(items()):
        assert len(computed) <= number + 3  # this item, the next one, and one that was just started
    assert computed == list(range(20))
    assert threads == {"prefetch_0"}
    assert list(in_background([])) == []


def test_exception_of_the_background_thread_is_raised() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise InputError("a bad row")

    stream = in_background(items())
    assert next(stream) == 1
    with pytest.raises(InputError, match="a bad row"):
        next(stream)


def test_background_thread_ends_when_the_consumer_stops() -> None:
    computed: list[int] = []
    stream = in_background(computed.append(number) or number for number in range(1000))
    assert next(stream) == 0
    stream.close()
    assert len(computed) <= 3


def test_bfloat16_is_the_default_on_a_gpu_only() -> None:
    gpu = torch.device("cuda")
    assert [is_half(gpu, "auto"), is_half(gpu, "float32"), is_half(gpu, "bfloat16")] == [True, False, True]
    assert [is_half(CPU, "auto"), is_half(CPU, "float32"), is_half(CPU, "bfloat16")] == [False, False, True]
    with pytest.raises(InputError, match="precision is 'float16'; allowed: auto, float32, bfloat16"):
        is_half(CPU, "float16")  # type: ignore[arg-type]


def test_float32_overrides_an_outer_autocast() -> None:
    weights = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with inference_autocast(CPU, "float32"):
            assert (weights @ weights).dtype == torch.float32
        with inference_autocast(CPU, "auto"):
            assert (weights @ weights).dtype == torch.bfloat16


def test_tensors_of_the_cpu_are_not_copied() -> None:
    tensor = torch.ones(2)
    assert to_device(tensor, CPU) is tensor
