"""Measurements that are no training: errors of random features, costs of layers, held-out losses of given weights.

A measurement is a function of its settings, a seed and a device; it returns numbers, which result.json holds.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from bertsmith.data.devices import device_type
from bertsmith.data.layout import SequenceLayout
from bertsmith.layers.mixers.favor import FavorAttention
from bertsmith.models.build import build
from bertsmith.models.encoder import EncoderInputs
from bertsmith.models.model import Model
from bertsmith.models.published import preset
from bertsmith.ops.attention import attention
from bertsmith.ops.favor import FEATURE_MAPS, FeatureMapName, RandomFeatures, draw, favor
from bertsmith.recipes import merge_settings, resolve_base
from bertsmith.settings import Plain
from bertsmith.training.pretraining import PretrainSettings, make_trainer

LayerKind = Literal["attention", "recurrent", "convolution", "restricted"]
_KERNEL, _REACH = 3, 64


def favor_error(
    *,
    feature_map: FeatureMapName = "softmax",
    orthogonal: bool = True,
    features: int,
    head_width: int,
    std: float,
    length: int = 1024,
    draws: int = 20,
    seed: int,
    device: str,
) -> dict[str, float]:
    """Return the relative L2 error of FAVOR+ against softmax attention in float64: root mean square over draws.

    All rows of one seed see the same queries, keys and values, normal with standard deviation `std` (values: 1).
    """
    data, noise = (torch.Generator().manual_seed(number) for number in (seed, 1000 + seed))
    shape = (1, length, 1, head_width)
    query, key, value = (torch.randn(shape, dtype=torch.float64, generator=data) for _ in range(3))
    query, key = std * query, std * key
    layout, rule = SequenceLayout.full(1, length), FEATURE_MAPS[feature_map]
    exact = attention(query, key, value, layout)
    squares = []
    for _ in range(draws):
        matrix = draw(
            features // len(rule.copies),
            head_width,
            noise,
            is_orthogonal=orthogonal,
            has_constant_norms=rule.has_constant_norms,
        )
        estimate = favor(query, key, value, RandomFeatures(matrix, feature_map), layout)
        squares.append(float((estimate - exact).square().sum() / exact.square().sum()))
    error = math.sqrt(math.fsum(squares) / draws)
    return {"error": error, "log_error": math.log(error)}


def layer_cost(
    *,
    layer: LayerKind,
    lengths: list[int],
    widths: list[int],
    width: int = 64,
    length: int = 64,
    repeats: int = 5,
    seed: int,
    device: str,
) -> dict[str, Any]:
    """Return how the time of one layer grows with length and with width, and how many layers join both ends.

    `exponent_length` is the slope of log time in log length at `width`, `exponent_width` the slope in log width at
    `length`. Times are of the process on one thread, the minimum of several forward passes.
    """
    torch.manual_seed(seed)
    place = device_type(device)
    by_length = [_layer_seconds(_Layer(layer, width), count, width, repeats, place) for count in lengths]
    by_width = [_layer_seconds(_Layer(layer, each), length, each, repeats, place) for each in widths]
    return {
        "exponent_length": _exponent(lengths, by_length),
        "exponent_width": _exponent(widths, by_width),
        "layers_to_join": layers_to_join(layer, length),
        "sequential_steps": length if layer == "recurrent" else 1,
        "seconds_by_length": dict(zip(map(str, lengths), by_length, strict=True)),
        "seconds_by_width": dict(zip(map(str, widths), by_width, strict=True)),
    }


def layers_to_join(layer: LayerKind, length: int) -> int:
    """Return the number of layers after which the last output depends on the first input, by their gradient."""
    module = _Layer(layer, 8).double()
    for depth in range(1, length + 1):
        inputs = torch.randn(1, length, 8, dtype=torch.float64, requires_grad=True)
        hidden: Tensor = inputs
        for _ in range(depth):
            hidden = module(hidden)
        (gradient,) = torch.autograd.grad(hidden[0, -1].sum(), inputs)
        if gradient[0, 0].abs().sum() > 0:
            return depth
    raise AssertionError(f"{layer} never joins the ends of {length} positions")


def encoder_cost(
    *,
    preset_name: str,
    overrides: Plain,
    lengths: list[int],
    backend: str = "auto",
    has_attention: bool = True,
    tokens: int | None = None,
    repeats: int = 10,
    memory_limit_gib: float | None = None,
    seed: int,
    device: str,
) -> dict[str, Any]:
    """Return time and memory of training steps of an encoder against the length, and their exponents.

    `tokens` per step are constant if given; otherwise the batch is one sequence. Without attention, the mixers
    return their values. On a GPU, the peak memory is measured, and lengths that exceed the limit are left out.
    """
    place = device_type(device)
    model = build(preset(preset_name, **{**overrides, "max_length": max(lengths)}), seed=seed).to(place)
    if not has_attention:
        for block in model.encoder.blocks:
            block.mixer = _ValuesOnly(model.config.encoder.width).to(place)
    seconds: dict[str, float] = {}
    memory: dict[str, float] = {}
    for length in lengths:
        batch = 1 if tokens is None else max(1, tokens // length)
        ids = torch.randint(0, model.config.encoder.vocabulary, (batch, length), device=place)
        inputs = EncoderInputs(ids, SequenceLayout.full(batch, length).to(place), backend=backend)

        def step(inputs: EncoderInputs = inputs) -> None:
            with torch.autocast(place, torch.bfloat16, enabled=place == "cuda"):
                model.encoder.run(inputs).last.float().square().mean().backward()
            model.zero_grad(set_to_none=True)

        try:
            with _memory_limit(memory_limit_gib if place == "cuda" else None):
                seconds[str(length)], peak = _median_seconds(step, repeats, place)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            break
        if peak is not None:
            memory[str(length)] = peak / 2**20
    measured = [int(length) for length in seconds]
    result: dict[str, Any] = {
        "seconds": seconds,
        "megabytes": memory,
        "longest": max(measured, default=0),
        "exponent_time": _exponent(measured[-4:], list(seconds.values())[-4:]),
    }
    # not a number on a CPU, where memory is not measured
    result["exponent_memory"] = _exponent(measured[-4:], list(memory.values())[-4:]) if memory else math.nan
    return result


def held_out(*, recipe: Plain, redraw: bool = False, seed: int, device: str) -> dict[str, Any]:
    """Return the held-out metrics of a model as it is, by a pre-training recipe whose `model.folder` names it.

    With `redraw`, the random features of its FAVOR+ mixers are drawn anew first.
    """
    plain = merge_settings(resolve_base(recipe), {"run": {"seed": seed, "steps": 1, "compile": "off", "keep": 0}})
    settings = PretrainSettings.parse(plain, source="held_out")
    with TemporaryDirectory() as folder:
        trainer = make_trainer(settings, Path(folder), device=device, show=False)
        if redraw:
            _redraw(trainer.model, 10_000 + seed)
        metrics = trainer.evaluate()
        trainer.close()
    return {"held_out": metrics}


MEASUREMENTS: dict[str, Callable[..., Mapping[str, Any]]] = {
    "favor_error": favor_error,
    "layer_cost": layer_cost,
    "encoder_cost": encoder_cost,
    "held_out": held_out,
}


def _redraw(model: Model, seed: int) -> None:
    """Draw new random features in all FAVOR+ mixers, even if they never redraw in training."""
    generator = torch.Generator().manual_seed(seed)
    for mixer in model.modules():
        if isinstance(mixer, FavorAttention):
            mixer.initialise(0.0, generator)


@contextmanager
def _memory_limit(gib: float | None) -> Iterator[None]:
    """Limit the memory of this process on a GPU; lift the limit afterwards, for other runs of the process."""
    if gib is None:
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


class _ValuesOnly(nn.Module):
    """The line "X (OPT)" of the Performer's figure: projections as in attention, whose output is the values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.projections, self.output = 0, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        output: Tensor = self.output(self.projections(hidden).chunk(3, dim=-1)[2])
        return output


class _Layer(nn.Module):
    """One layer of the Transformer's table of complexities, with inputs and outputs (batch, length, width)."""

    def __init__(self, kind: LayerKind, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "recurrent":
            self.recurrent = nn.LSTM(width, width, batch_first=True)
        elif kind == "convolution":
            self.convolution = nn.Conv1d(width, width, _KERNEL, padding=_KERNEL // 2)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.kind == "recurrent":
            output: Tensor = self.recurrent(hidden)[0]
            return output
        if self.kind == "convolution":
            mixed: Tensor = self.convolution(hidden.transpose(1, 2))
            return mixed.transpose(1, 2)
        if self.kind == "attention":
            return scaled_dot_product_attention(hidden, hidden, hidden)
        return _restricted_attention(hidden, min(_REACH, hidden.shape[1] // 4))


def _restricted_attention(hidden: Tensor, reach: int) -> Tensor:
    """Attend to the own block of `reach` positions and to its two neighbours, without computing other scores."""
    batch, length, width = hidden.shape
    blocks = -(-length // reach)
    padded = pad(hidden, (0, 0, reach, blocks * reach - length + reach))  # (batch, (blocks + 2) reach, width)
    is_real = pad(torch.ones(length, dtype=torch.bool, device=hidden.device), (reach, blocks * reach - length + reach))
    queries = padded[:, reach:-reach].reshape(batch, blocks, reach, width)
    keys = padded.unfold(1, 3 * reach, reach).transpose(2, 3)  # (batch, blocks, 3 reach, width)
    mask = is_real.unfold(0, 3 * reach, reach)[:, None, :]  # (blocks, 1, 3 reach)
    mixed = scaled_dot_product_attention(queries, keys, keys, attn_mask=mask)
    return mixed.reshape(batch, blocks * reach, width)[:, :length]


@torch.no_grad()
def _layer_seconds(layer: nn.Module, length: int, width: int, repeats: int, device: str) -> float:
    layer, hidden = layer.to(device), torch.randn(1, length, width, device=device)
    return _minimum_seconds(lambda: layer(hidden), repeats, device)


def _minimum_seconds(step: Callable[[], object], repeats: int, device: str) -> float:
    """Return the minimum over repeats; every repeat runs for at least a few milliseconds."""
    step()
    times = []
    for _ in range(repeats):
        count, begin = 0, _clock(device)
        while count == 0 or _clock(device) - begin < 0.02:
            step()
            count += 1
        times.append((_clock(device) - begin) / count)
    return min(times)


def _median_seconds(step: Callable[[], object], repeats: int, device: str) -> tuple[float, float | None]:
    """Return the median time of a step, and its peak memory in bytes on a GPU."""
    step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        begin = _clock(device)
        step()
        times.append(_clock(device) - begin)
    return float(np.median(times)), float(torch.cuda.max_memory_allocated()) if device == "cuda" else None


def _clock(device: str) -> float:
    """Return the time in seconds: of the process on a CPU, which other programs do not disturb, else of the device."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _exponent(positions: Sequence[int], values: Sequence[float]) -> float:
    if len(positions) < 2:
        return math.nan
    return float(np.polyfit(np.log(positions), np.log(values), 1)[0])
