"""Memory and speed of training by depth: plain, checkpointed and reversible layers.

    python benchmarks/reversible.py                   # on a GPU if there is one, otherwise a smaller run on the CPU
    python benchmarks/reversible.py --preset performer-base --length 8192 --batch 1

Every row is a fresh pre-norm encoder of a preset. "Checkpointed" keeps the input of every layer and computes it again
in the backward pass (torch.utils.checkpoint). Memory on a GPU is the peak of allocated memory in one forward and
backward pass, without weights and gradients; on a CPU it is the size of the tensors that autograd keeps after the
forward pass. Speed is the median of --repeats forward and backward passes, bfloat16 autocast on a GPU.
"""

import argparse
import statistics
import time
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bertsmith.data.layout import SequenceLayout
from bertsmith.models.build import build
from bertsmith.models.encoder import Encoder
from bertsmith.models.published import preset

METHODS = ("plain", "checkpointed", "reversible")


def main() -> None:
    options = _options()
    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads")
    print(f"{options.preset}, width {options.width}, {options.batch} sequences of {options.length} tokens")
    print("| layers | method | memory, MiB | tokens/s |")
    print("|---|---|---|---|")
    for layers in options.layers:
        for method in METHODS:
            memory, speed = _measure(method, layers, options)
            print(f"| {layers} | {method} | {memory / 2**20:,.1f} | {speed:,.0f} |", flush=True)


def _measure(method: str, layers: int, options: argparse.Namespace) -> tuple[int, float]:
    """Return bytes and tokens per second of a training pass."""
    encoder = _encoder(method, layers, options)
    tokens = torch.randint(0, options.vocabulary, (options.batch, options.length), device=options.device)
    layout = SequenceLayout.full(options.batch, options.length)
    _train(encoder, tokens, layout)  # allocates the gradients
    memory, seconds = _memory(encoder, tokens, layout), []
    for _ in range(options.repeats):
        _synchronise(tokens)
        begin = time.perf_counter()
        _train(encoder, tokens, layout)
        _synchronise(tokens)
        seconds.append(time.perf_counter() - begin)
    return memory, tokens.numel() / statistics.median(seconds)


def _encoder(method: str, layers: int, options: argparse.Namespace) -> Encoder:
    config = preset(
        options.preset,
        width=options.width,
        heads=options.heads,
        layers=layers,
        vocabulary=options.vocabulary,
        max_length=options.length,
        placement="pre",
        reversible=method == "reversible",
    )
    encoder = build(config.changed(heads=()), seed=0).encoder.to(options.device).train()
    if method == "checkpointed":
        for block in encoder.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return encoder


def _train(encoder: Encoder, tokens: Tensor, layout: SequenceLayout) -> None:
    _forward(encoder, tokens, layout).float().square().mean().backward()


def _forward(encoder: Encoder, tokens: Tensor, layout: SequenceLayout) -> Tensor:
    is_gpu = tokens.device.type == "cuda"
    with torch.autocast("cuda", dtype=torch.bfloat16) if is_gpu else nullcontext():
        return encoder(tokens, layout)


def _memory(encoder: Encoder, tokens: Tensor, layout: SequenceLayout) -> int:
    if tokens.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _train(encoder, tokens, layout)
        return torch.cuda.max_memory_allocated() - before
    alive: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        alive.add(saved)
        return saved

    weights = {parameter.untyped_storage().data_ptr() for parameter in encoder.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        output = _forward(encoder, tokens, layout)
    storages = [saved.tensor.untyped_storage() for saved in alive]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr() not in weights}
    assert output.requires_grad
    return sum(sizes.values())


class _Saved:
    """A tensor that autograd keeps; detached, because a node that keeps its own output would be a reference cycle."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def _synchronise(tokens: Tensor) -> None:
    if tokens.device.type == "cuda":
        torch.cuda.synchronize()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    is_gpu = parser.parse_known_args()[0].device.startswith("cuda")
    sizes: dict[str, Any] = {"width": 768, "heads": 12, "batch": 16, "length": 1024, "vocabulary": 30000}
    small = {"width": 64, "heads": 2, "batch": 2, "length": 128, "vocabulary": 1000}
    parser.add_argument("--preset", default="bert-base")
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 24])
    for name, value in (sizes if is_gpu else small).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--repeats", type=int, default=10 if is_gpu else 3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
