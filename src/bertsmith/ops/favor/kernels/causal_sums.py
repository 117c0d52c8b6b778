"""What the queries after every chunk leave behind for its keys: the causal twin of the sums in `memory_backward`.

With P_qm = φ_qm sum_m / Σ, sum_m being that of the keys before the query's chunk, U_m of a chunk is Σ P_qm · gradient_q
over all later queries, each P taken over to the sum after this chunk: a factor of at most 1 for each chunk between.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bertsmith.ops.favor.kernels.causal_states import chunk_tile, slot_of
from bertsmith.ops.favor.kernels.features import NONE, Curve, fitting, matrix_of, product, rows_of, weight
from bertsmith.ops.kernels.support import Tile


@triton.jit
def share_of(chunk, CHUNK: tl.constexpr):
    """What shares of keys are multiplied by, and sums over queries divided by, for the range of float16."""
    return tl.minimum((chunk + 1) * CHUNK, 1024).to(tl.float32)


@triton.jit
def _chunk_sums(
    query, upstream, matrix, first, length, size, level_before, by_row, query_level, by_total, sums, along,
    query_row, query_head, upstream_row, upstream_head, heads, blocks, features, epsilon,
    IS_EXPONENTIAL: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    chunk, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    head, sequence = tl.program_id(1), tl.program_id(2)
    count = tl.load(length + sequence)
    if chunk * CHUNK >= count:
        return
    slot = slot_of(first, sequence, chunk, CHUNK) * heads + head
    row = chunk * CHUNK + tl.arange(0, CHUNK)
    is_row = row < count
    row += tl.load(first + sequence)
    feature = block * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, WIDTH)
    at = row.to(tl.int64) * heads + head
    q = rows_of(query, row, head, query_row, query_head, is_row, WIDTH)
    given = rows_of(upstream, row, head, upstream_row, upstream_head, is_row, WIDTH)
    normaliser = tl.load(by_row + at, mask=is_row, other=-NONE)
    levels = tl.load(query_level + at, mask=is_row, other=0.0)
    delta = tl.load(by_total + at, mask=is_row, other=0.0)
    place = slot * PADDED + feature
    sizes = tl.load(size + place)
    u = product(matrix_of(matrix, feature, features, WIDTH), tl.trans(q))
    if IS_EXPONENTIAL:
        before = tl.load(level_before + slot)
        inverse = normaliser
        relative = tl.where(feature < features, tl.exp2(sizes - before), 0.0)
        share = epsilon * tl.exp2(tl.minimum(levels + before - normaliser, 120.0))
    else:
        inverse = tl.exp2(-normaliser)
        relative = sizes
        share = epsilon * inverse
    made = weight(u, sizes[:, None], inverse[None, :], IS_EXPONENTIAL)
    gathered = product(made.to(given.dtype), given)
    gathered += relative[:, None] * tl.sum(share[:, None] * given.to(tl.float32), 0)[None, :]
    gathered_along = tl.sum(made * delta[None, :], 1) + relative * tl.sum(share * delta, 0)
    # divided here and multiplied in the carry: the first chunk's are those of the least keys
    scale = share_of(chunk, CHUNK)
    tl.store(sums + place[:, None] * WIDTH + column[None, :], (gathered / scale).to(sums.dtype.element_ty))
    tl.store(along + place, gathered_along / scale)


@triton.jit
def _carry(
    sums, along, before_size, after_size, first, length, later, later_along, heads,
    IS_EXPONENTIAL: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2)
    chunks = tl.cdiv(tl.load(length + sequence), CHUNK)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, WIDTH)
    total = tl.zeros([FEATURES, WIDTH], tl.float32)
    total_along = tl.zeros([FEATURES], tl.float32)
    for step in range(chunks):
        chunk = chunks - 1 - step
        at = (slot_of(first, sequence, chunk, CHUNK) * heads + head) * PADDED + feature
        places = at[:, None] * WIDTH + column[None, :]
        new = tl.load(sums + places).to(tl.float32)
        new_along = tl.load(along + at)
        before = tl.load(before_size + at)
        after = tl.load(after_size + at)
        scale = share_of(chunk, CHUNK)
        tl.store(later + places, (total / scale).to(later.dtype.element_ty))
        tl.store(later_along + at, total_along / scale)
        factor = tl.exp2(before - after) if IS_EXPONENTIAL else before / tl.where(after > 0.0, after, 1.0)
        total = total * factor[:, None] + new * scale
        total_along = total_along * factor + new_along * scale


def sums_after(
    query: Tensor,
    upstream: Tensor,
    matrix: Tensor,
    first: Tensor,
    length: Tensor,
    longest: int,
    size: Tensor,
    size_after: Tensor,
    level_before: Tensor,
    by_row: Tensor,
    query_level: Tensor,
    by_total: Tensor,
    curve: Curve,
    chunk: int,
    asked: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """U of the output's gradient, and of its product with the output, over min(keys so far, 1024).

    Shape: (slots, heads, padded, head_width), and (slots, heads, padded).
    """
    (tokens, heads, width), (slots, _, padded) = query.shape, size.shape
    tile = fitting(asked or chunk_tile(query, chunk), padded)
    sums, later = (query.new_empty(slots, heads, padded, width) for _ in range(2))
    along, later_along = (query.new_empty(slots, heads, padded, dtype=torch.float32) for _ in range(2))
    batch, blocks = first.shape[0], padded // tile.columns
    if tokens * heads * longest:
        _chunk_sums[(triton.cdiv(longest, chunk) * blocks, heads, batch)](
            query, upstream, matrix, first, length, size, level_before, by_row, query_level, by_total, sums, along,
            query.stride(0), query.stride(1), upstream.stride(0), upstream.stride(1),
            heads, blocks, matrix.shape[0], curve.epsilon,
            IS_EXPONENTIAL=curve.is_exponential,
            PADDED=padded, WIDTH=width, CHUNK=chunk, FEATURES=tile.columns,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        _carry[(padded // 16, heads, batch)](
            sums, along, size, size_after, first, length, later, later_along, heads,
            IS_EXPONENTIAL=curve.is_exponential, PADDED=padded, WIDTH=width, CHUNK=chunk, FEATURES=16, num_warps=2,
        )  # fmt: skip
    return later, later_along
