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
from bertsmith.ops.activation import fused as activation
from bertsmith.ops.activation.reference import ActivationInputs
from bertsmith.ops.conv import fused as conv
from bertsmith.ops.conv.reference import DepthwiseInputs, LightConvInputs
from bertsmith.ops.disentangled import fused as disentangled
from bertsmith.ops.disentangled.positions import RelativePositions
from bertsmith.ops.disentangled.reference import DisentangledInputs
from bertsmith.ops.favor import RandomFeatures
from bertsmith.ops.favor import fused as favor
from bertsmith.ops.favor.reference import FavorInputs
from bertsmith.ops.token_loss import Sampling
from bertsmith.ops.token_loss import fused as token_loss
from bertsmith.ops.token_loss.reference import TokenLossInputs

HEADS, WIDTH, REACH, VOCABULARY = 12, 64, 512, 300
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
        _run_convolutions(lengths)
        _run_activation(sum(lengths))
        _run_token_loss(sum(lengths))
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


def _run_convolutions(lengths: list[int]) -> None:
    layout, rows = _layout(lengths), sum(lengths)
    kernel = torch.zeros(rows, HEADS, 9, dtype=torch.bfloat16, requires_grad=True)
    conv.light_conv(LightConvInputs(_vectors(rows), kernel, layout, dropout=0.1)).sum().backward()
    taps = torch.zeros(HEADS * WIDTH, 9, dtype=torch.bfloat16, requires_grad=True)
    conv.depthwise(DepthwiseInputs(_vectors(rows).flatten(1), taps, layout)).sum().backward()


def _run_activation(rows: int) -> None:
    product = _vectors(rows).flatten(1)
    activation.biased_activation(ActivationInputs(product, torch.zeros(product.shape[1]), "gelu")).sum().backward()


def _run_token_loss(rows: int) -> None:
    hidden, table = _vectors(rows).flatten(1), torch.zeros(VOCABULARY, HEADS * WIDTH, dtype=torch.bfloat16)
    sampling = Sampling(torch.zeros(rows), 1.0, VOCABULARY)
    targets = torch.zeros(rows, dtype=torch.int64)
    token_loss.token_loss(TokenLossInputs(hidden, table, None, targets, sampling=sampling)).loss.backward()


if __name__ == "__main__":
    main()
