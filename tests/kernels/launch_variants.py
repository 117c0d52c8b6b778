"""Print how many variants of every kernel Triton would compile for batches of many shapes, as JSON; needs no GPU.

Launches are recorded instead of compiled: a variant differs in a constant, in the dtype or alignment of a tensor, or in
an integer that is 1 or a multiple of 16. Run as a script without TRITON_INTERPRET.
"""

import json
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops.disentangled import fused as disentangled
from bertsmith.ops.disentangled.positions import RelativePositions
from bertsmith.ops.disentangled.reference import DisentangledInputs
from bertsmith.ops.favor import RandomFeatures
from bertsmith.ops.favor import fused as favor
from bertsmith.ops.favor.reference import FavorInputs

HEADS, WIDTH, REACH = 12, 64, 512
SHAPES = [[17] * 32, [33, 5] * 9, [64] * 16, [100, 97, 128], [129] * 7, [256] * 4, [300, 511, 2], [512], [1, 2], [1]]


def main() -> None:
    variants: dict[str, set[Hashable]] = defaultdict(set)

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = [parameter.name for parameter in self.params]
        values = dict(zip(names, args, strict=False)) | {name: options.pop(name) for name in names if name in options}
        key = [_specialised(parameter, values[parameter.name]) for parameter in self.params]
        variants[f"{self.fn.__module__}.{self.fn.__name__}"].add((*key, *sorted(options.items())))

    JITFunction.run = record
    for lengths in SHAPES:
        _run_disentangled(lengths)
        for is_causal in (False, True):
            _run_favor(lengths, is_causal)
    print(json.dumps({name: len(keys) for name, keys in variants.items()}))


def _specialised(parameter: Any, value: object) -> Hashable:
    """Return what a compiled kernel depends on."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if parameter.is_constexpr:
        return repr(value)
    if isinstance(value, int) and not isinstance(value, bool) and not parameter.do_not_specialize:
        return value == 1, value % 16 == 0
    return type(value)


def _layout(lengths: list[int]) -> SequenceLayout:
    return SequenceLayout.packed(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), max(lengths))


def _vectors(rows: int) -> Tensor:
    return torch.zeros(rows, HEADS, WIDTH, dtype=torch.bfloat16, requires_grad=True)


def _run_disentangled(lengths: list[int]) -> None:
    query, key, value = (_vectors(sum(lengths)) for _ in range(3))
    tables = [_vectors(512) for _ in range(2)]
    slots = torch.linspace(0, 511, 2 * REACH + 1).long()
    layout = _layout(lengths)
    relative = RelativePositions(torch.zeros(512, HEADS * WIDTH), slots)
    inputs = DisentangledInputs(
        query,
        key,
        value,
        layout,
        layout,
        position_key=tables[0],
        position_query=tables[1],
        relative=relative,
        dropout=0.1,
    )
    disentangled.disentangled(inputs).sum().backward()


def _run_favor(lengths: list[int], is_causal: bool) -> None:
    query, key, value = (_vectors(sum(lengths)) for _ in range(3))
    layout, features = _layout(lengths), RandomFeatures(torch.zeros(256, WIDTH))
    favor.favor(FavorInputs(query, key, value, layout, layout, is_causal, features=features)).sum().backward()


if __name__ == "__main__":
    main()
