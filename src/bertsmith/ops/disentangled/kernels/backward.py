"""The backward pass: by key tiles, then by query tiles, then the tables."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.disentangled.kernels.backward_keys import backward_keys
from bertsmith.ops.disentangled.kernels.backward_queries import backward_queries
from bertsmith.ops.disentangled.kernels.launch import Launch
from bertsmith.ops.disentangled.kernels.plan import Buffer, Expanded, Side, keys_tile, positions_tile, queries_tile
from bertsmith.ops.disentangled.kernels.positions import table_gradient

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@triton.jit(do_not_specialize=["rows"])
def _agreement(upstream, mixed, out, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Store the product of each row of the output with its gradient."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    where = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    is_row = row < rows
    left = tl.load(upstream + where, mask=is_row[:, None], other=0.0).to(tl.float32)
    right = tl.load(mixed + where, mask=is_row[:, None], other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(left * right, 1), mask=is_row)


def backward(launch: Launch, upstream: Tensor, mixed: Tensor, log_mass: Tensor, *saved_scores: Tensor) -> Gradients:
    """Return the gradients of query, key, value, position_key and position_query; empty tensors for missing tables.

    `saved_scores` are the position scores that the forward pass saved.
    """
    heads, width = launch.query.shape[1:]
    agreement = torch.empty_like(log_mass)
    rows = agreement.numel()
    _agreement[(triton.cdiv(rows, 64),)](upstream, mixed, agreement, rows, WIDTH=width, ROWS=64)
    if launch.saves_scores:
        by_query, by_key = (scores if scores.numel() else None for scores in saved_scores)
        far_query = far_key = None  # bands are never saved
        pairs_by_query, pairs_by_key = (
            None if scores is None else torch.empty_like(scores) for scores in (by_query, by_key)
        )
    else:
        by_query, by_key, far_query, far_key = launch.position_scores()
        pairs_by_query, pairs_by_key = by_query, by_key  # in place
    if pairs_by_key is not None and launch.positions is not None:
        pairs_by_key = torch.zeros_like(pairs_by_key)  # not every position has a query
    by_queries, by_keys, by_values = (launch.empty(tensor) for tensor in (launch.query, launch.key, launch.value))
    tile, chunk = keys_tile(launch.query), positions_tile(launch.query).columns
    query_ends = _ends(launch, far_query, launch.max_length, queries_tile(launch.query).rows)
    key_ends = _ends(launch, far_key, launch.max_key_length, tile.columns)
    tensors = (launch.query, launch.key, launch.value, upstream, log_mass, agreement)
    numbers = (*launch.numbers, launch.scale, *launch.strides)
    backward_keys[triton.cdiv(launch.max_key_length, tile.columns), heads, len(launch.first)](
        *tensors,
        by_keys,
        by_values,
        key_ends,
        pairs_by_query,
        pairs_by_key,
        by_query,
        by_key,
        far_query,
        far_key,
        *launch.where,
        *_table(launch.queries_by_offset),
        *numbers,
        heads * width,
        *launch.columns,
        **launch.constants,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        CHUNK=chunk,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    tile = queries_tile(launch.query)
    backward_queries[triton.cdiv(launch.max_length, tile.rows), heads, len(launch.first)](
        *tensors,
        by_queries,
        query_ends,
        pairs_by_query,
        pairs_by_key,
        far_query,
        far_key,
        *launch.where,
        *_table(launch.keys_by_offset),
        *numbers,
        heads * width,
        *launch.columns,
        **launch.constants,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        CHUNK=chunk,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    by_position_key = _by_table(
        launch, launch.query_side, launch.position_key, pairs_by_query, query_ends, launch.buffers[0]
    )
    by_position_query = _by_table(
        launch, launch.key_side, launch.position_query, pairs_by_key, key_ends, launch.buffers[1]
    )
    return by_queries, by_keys, by_values, by_position_key, by_position_query


def _table(table: Expanded | None) -> tuple[Tensor | None, int, int]:
    return (None, 0, 0) if table is None else (table.rows, table.least, len(table.rows))


def _ends(launch: Launch, far: Tensor | None, max_length: int, rows: int) -> Tensor | None:
    """Return memory for every tile's contribution to the gradient of the table's ends: (tiles, heads, 2, width)."""
    if far is None:
        return None
    _, heads, width = launch.query.shape
    return far.new_zeros(len(launch.first) * triton.cdiv(max_length, rows), heads, 2, width)


def _by_table(
    launch: Launch, side: Side, table: Tensor | None, by_pair: Tensor | None, ends: Tensor | None, buffer: Buffer
) -> Tensor:
    """Return the gradient of one table."""
    if table is None:
        return side.vectors.new_empty(0)
    assert by_pair is not None
    assert launch.slots is not None
    gradient = table_gradient(side, by_pair, launch.slots, table.shape[0], buffer, is_causal=launch.is_causal)
    if ends is not None:
        for end, slot in ((0, launch.slots[:1]), (1, launch.slots[-1:])):
            gradient = gradient.index_put((slot,), gradient[slot] + ends[:, :, end].sum(0))
    return gradient.to(table.dtype)
