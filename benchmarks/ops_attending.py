"""The attention ops that benchmarks/ops.py times beside the convolutions: short, disentangled and FAVOR+."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bertsmith.ops.attention import BACKENDS as ATTENTION_FORMS
from bertsmith.ops.attention import attention
from bertsmith.ops.attention.reference import AttentionInputs
from bertsmith.ops.disentangled import BACKENDS as DISENTANGLED_FORMS
from bertsmith.ops.disentangled import RelativePositions, bucket_slots
from bertsmith.ops.disentangled import disentangled as disentangled_attention
from bertsmith.ops.disentangled.reference import DisentangledInputs
from bertsmith.ops.favor import BACKENDS as FAVOR_FORMS
from bertsmith.ops.favor import RandomFeatures, draw
from bertsmith.ops.favor import favor as favor_attention
from bertsmith.ops.favor.reference import FavorInputs
from bertsmith.ops.kernel_support import Tile
from ops_cases import Case, Tuned, lying, numbers
from ops_timing import training

BUCKETS, FARTHEST = 256, 512
"""Buckets and maximum distance of the relative table of DeBERTa v3, which has 512 rows."""
PAIRS = [Tile(64, 64, 4, 1), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(64, 64, 4, 4), Tile(64, 64, 8, 2)]
PAIRS += [Tile(64, 64, 8, 3), Tile(64, 32, 4, 2), Tile(64, 32, 4, 3), Tile(32, 64, 4, 2), Tile(32, 64, 4, 3)]
READS = [Tile(64, 32, 4, 2), Tile(64, 32, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(64, 64, 8, 2)]
READS += [Tile(128, 32, 4, 3), Tile(128, 32, 8, 3), Tile(128, 64, 8, 2), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2)]
SUMS = [Tile(64, 256, 8, 1), Tile(64, 256, 8, 2), Tile(64, 256, 8, 3), Tile(64, 256, 8, 4), Tile(64, 128, 4, 1)]
SUMS += [Tile(64, 128, 4, 2), Tile(64, 128, 4, 3), Tile(32, 256, 8, 3), Tile(32, 128, 4, 3), Tile(128, 128, 8, 2)]

Table = dict[tuple[int, int], Tile]


def short(options: Namespace, length: int, heads: int, head_width: int) -> Case:
    layout, shape = lying(options, length)
    joint = numbers(options, *shape, 3, heads, head_width)  # one projection, as in a mixer
    moved = joint.numel() * joint.element_size() // 3

    def op(joint: Tensor, backend: str) -> Tensor:
        return attention(*joint.unbind(-3), layout, joint=joint, backend=backend)

    return Case(
        op=op,
        tensors=[joint],
        backends=ATTENTION_FORMS,
        inputs=AttentionInputs(*joint.unbind(-3), layout, layout, joint=joint),
        compared=["varlen", "sdpa"] if options.packed else ["sdpa"],
        forward_bytes=4 * moved,
        training_bytes=11 * moved,
        kernels=partial(_short_kernels, op, joint),
        is_compiled=False,
        kernel="short",
    )


def _short_kernels(op: Callable[..., Tensor], joint: Tensor) -> dict[str, Tuned]:
    from bertsmith.ops.attention import short_kernels

    train = training(partial(op, backend="short"), [joint])

    def launch(registers: int | None) -> tuple[Tensor | None, ...]:
        before, short_kernels.BACKWARD_REGISTERS = short_kernels.BACKWARD_REGISTERS, registers
        try:
            return train()
        finally:
            short_kernels.BACKWARD_REGISTERS = before

    tries = [{"registers": registers} for registers in (None, 128, 168)]
    return {"backward": Tuned(launch, tries, now={"registers": short_kernels.BACKWARD_REGISTERS})}


def disentangled(options: Namespace, length: int, heads: int, head_width: int) -> Case:
    layout, shape = lying(options, length)
    query, key, value = _states(options, shape, heads, head_width)
    tables = [numbers(options, 2 * BUCKETS, heads, head_width) for _ in range(2)]
    slots = bucket_slots(BUCKETS, FARTHEST, clamps_distance=True).to(options.device)
    # the vectors from which the tables were projected: no implementation reads them
    relative = RelativePositions(numbers(options, 2 * BUCKETS, heads * head_width), slots)
    op = partial(disentangled_attention, layout=layout, relative=relative)
    tensors = [query, key, value, *tables]
    moved, rows = query.numel() * query.element_size(), 2 * tables[0].numel() * query.element_size()
    return Case(
        op=op,
        tensors=tensors,
        backends=DISENTANGLED_FORMS,
        inputs=DisentangledInputs(
            query, key, value, layout, layout, position_key=tables[0], position_query=tables[1], relative=relative
        ),
        compared=["sdpa"],
        forward_bytes=4 * moved + rows,
        training_bytes=11 * moved + 3 * rows,
        kernels=partial(_disentangled_kernels, op, tensors),
        is_compiled=False,
        lines={"plain attention, SDPA": partial(_plain, length=length, is_causal=False)},
    )


def _disentangled_kernels(op: Callable[..., Tensor], tensors: list[Tensor]) -> dict[str, Tuned]:
    from bertsmith.ops.disentangled.kernels import plan

    chosen: dict[str, tuple[Any, Tile]] = {
        "forward": (plan.FORWARD, plan.forward_tile(tensors[0])),
        "keys": (plan.KEYS, plan.keys_tile(tensors[0])),
        "queries": (plan.QUERIES, plan.queries_tile(tensors[0])),
        "products": (plan.PRODUCTS, plan.products_tile(tensors[0])),
        "positions": (plan.POSITIONS, plan.positions_tile(tensors[0])),
    }
    return {name: _tuned(op, tensors, table, now, PAIRS) for name, (table, now) in chosen.items()}


def favor(options: Namespace, length: int, heads: int, head_width: int, *, is_causal: bool = False) -> Case:
    layout, shape = lying(options, length)
    tensors = list(_states(options, shape, heads, head_width))
    matrix = draw(options.features, head_width).float().to(options.device)
    features = RandomFeatures(matrix, "softmax")
    op = partial(favor_attention, features=features, layout=layout, is_causal=is_causal)
    moved = tensors[0].numel() * tensors[0].element_size()
    return Case(
        op=op,
        tensors=tensors,
        backends=FAVOR_FORMS,
        inputs=FavorInputs(*tensors, layout, layout, is_causal, features=features),
        compared=["linear"],
        forward_bytes=4 * moved,
        training_bytes=11 * moved,
        # the causal kernels have no tile tables
        kernels=dict if is_causal else partial(_favor_kernels, op, tensors),
        lines={"plain attention, SDPA": partial(_plain, length=length, is_causal=is_causal)},
    )


def _favor_kernels(op: Callable[..., Tensor], tensors: list[Tensor]) -> dict[str, Tuned]:
    from bertsmith.ops.favor.kernels import features as splits
    from bertsmith.ops.favor.kernels import memory_backward, reading

    kernels: dict[str, tuple[Any, Tile, list[Tile]]] = {
        "reading": (reading._READ, reading._DEFAULT, READS),
        "queries' gradient": (reading._BACKWARD, reading._DEFAULT, READS),
        "keys' gradient": (memory_backward._TUNED, memory_backward._DEFAULT, READS),
        "sums": (splits._TUNED, splits._DEFAULT, SUMS),
    }
    position = _place(tensors[0])
    return {
        name: _tuned(op, tensors, table, table.get(position, default), tries)
        for name, (table, default, tries) in kernels.items()
    }


def _tuned(op: Callable[..., Tensor], tensors: list[Tensor], table: Table, now: Tile, tries: list[Tile]) -> Tuned:
    """Return a forward and backward pass of the whole op with one entry of a tile table changed during the call."""
    train, position = training(partial(op, backend="triton"), tensors), _place(tensors[0])

    def launch(tiling: Tile) -> tuple[Tensor | None, ...]:
        before = dict(table)
        table[position] = tiling
        try:
            return train()
        finally:
            table.clear()
            table.update(before)

    return Tuned(launch, [{"tiling": tiling} for tiling in dict.fromkeys([now, *tries])], now={"tiling": now})


def _place(states: Tensor) -> tuple[int, int]:
    """Return the key of the tile tables for this dtype and head width."""
    return states.dtype.itemsize, states.shape[-1]


def _states(options: Namespace, shape: tuple[int, ...], heads: int, head_width: int) -> tuple[Tensor, ...]:
    """Return queries, keys and values as slices of one projection, as in a mixer."""
    return numbers(options, *shape, 3, heads, head_width).unbind(-3)


def _plain(query: Tensor, key: Tensor, value: Tensor, *_: Tensor, length: int, is_causal: bool) -> Tensor:
    """Compute softmax attention of sequences of one length, in the shape of the query."""
    # packed or padded, the memory is the same: (batch, heads, length, head_width) is a view
    rows = (states.reshape(-1, length, *states.shape[-2:]).transpose(1, 2) for states in (query, key, value))
    return scaled_dot_product_attention(*rows, is_causal=is_causal).transpose(1, 2).reshape(query.shape)
