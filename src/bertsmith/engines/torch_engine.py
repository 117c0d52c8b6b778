"""PyTorch engines: eager (float32, bfloat16 or int8) and compiled."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from bertsmith.checkpoint.store import load, write_model
from bertsmith.engines.base import Engine, Precision, Sample
from bertsmith.engines.int8 import ACTIVATIONS, open_int8, write_int8
from bertsmith.layers.block import Block
from bertsmith.layers.linear import ElasticLinear, GroupedLinear
from bertsmith.models.model import Model

RECOMPILE_LIMIT = 64  # input shapes per process; beyond it the model runs uncompiled


class TorchEngine(Engine):
    """Eager PyTorch; 8-bit models are written and opened by engines/int8.py."""

    name = "torch"
    precisions: ClassVar[tuple[Precision, ...]] = ("float32", "bfloat16", *ACTIVATIONS)

    def write(self, model: Model, folder: Path, precision: Precision, samples: Sequence[Sample] = ()) -> None:
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


def with_bfloat16_products(model: Model) -> Model:
    """Return a copy whose linear layers have bfloat16 weights, for autocast, which then has none to convert.

    Norms and embeddings stay in float32, so that under autocast the copy computes the same as the model.
    """
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if type(module) in (ElasticLinear, GroupedLinear):
            module.bfloat16()
    return copied


class CompiledEngine(TorchEngine):
    """PyTorch with every layer compiled, once per input shape."""

    name = "compiled"

    def open(self, folder: Path, precision: Precision, *, threads: int | None = None) -> Model:
        model = super().open(folder, precision, threads=threads)
        torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
        for module in model.modules():
            if isinstance(module, Block):
                module.forward = torch.compile(module.forward, dynamic=False)  # type: ignore[method-assign]
        return model
