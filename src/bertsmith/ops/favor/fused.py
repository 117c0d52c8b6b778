"""Linear attention by Triton kernels: features are computed where they are used and never written to memory.

In half precision the random matrix is rounded to the precision of the inputs, like any weight under autocast, and so
are features and their sums as inputs of tensor cores; all sums, exponents and row sums are float32.
"""

import torch
from torch import Tensor

from bertsmith.ops import kernel_support as support
from bertsmith.ops.dispatch import is_exporting
from bertsmith.ops.favor.reference import FavorInputs
from bertsmith.ops.kernel_support import SequenceRows, from_rows, to_rows

_HEAD_WIDTHS = (16, 32, 64, 128)
_MAX_FEATURES = 512
_CHUNKS = {2: 64, 4: 32}
"""Positions of one causal chunk by bytes per element: the rows of a warp-group product, and what fits into registers
without tensor cores."""
_MIN_WIDTH = 32
"""Warp-group products of 16 columns read a buffer that the next chunk overwrites; narrower ones have chunks of 32."""


def unsupported(inputs: FavorInputs) -> str | None:
    if is_exporting():
        return "a graph is exported, which cannot contain the kernel"
    features, width, value_width = inputs.features, inputs.query.shape[-1], inputs.value.shape[-1]
    if features.map.curve is not None and features.feature_map != "relu":
        return f"feature_map is {features.feature_map!r}, but the kernel supports exponential maps and relu"
    if width not in _HEAD_WIDTHS:
        return f"the head width is {width}, but the kernel supports {', '.join(map(str, _HEAD_WIDTHS))}"
    if value_width != width:
        return f"values have head width {value_width} and keys {width}, but must have the same"
    if not 1 <= features.width <= _MAX_FEATURES:
        return f"there are {features.width} features, but the kernel supports 1 to {_MAX_FEATURES}"
    return support.unsupported(inputs.query)


def preferred(inputs: FavorInputs) -> bool:
    return support.is_preferred(inputs.query)


def favor(inputs: FavorInputs) -> Tensor:
    """Return the attention output in the shape of the query; 0 at padding."""
    layout, key_layout, feature_map = inputs.layout, inputs.key_layout, inputs.features.map
    query = _rows(to_rows(inputs.query, layout), inputs.query.dtype)
    key, value = (_rows(to_rows(tensor, key_layout), query.dtype) for tensor in (inputs.key, inputs.value))
    rows = SequenceRows.of(layout, query.device)
    key_rows = rows if key_layout is layout else SequenceRows.of(key_layout, query.device)
    # the scale head_width^(-1/4) of queries and keys is part of the matrix
    matrix = inputs.features.rows(query.new_empty(0, query.shape[-1], dtype=torch.float32)) * query.shape[-1] ** -0.25
    matrix = matrix.to(query.dtype).contiguous()
    curve = (feature_map.curve is None, feature_map.norm, inputs.features.added_epsilon)
    if inputs.is_causal:
        # the kernels have a fixed chunk; `inputs.chunk` would change nothing but rounding
        sizes = padded(matrix.shape[0]), _chunk(query, padded(matrix.shape[0]))
        mixed = _favor_causal(
            query, key, value, matrix, rows.first, rows.length, rows.max_length, rows.has_padding, *sizes, *curve
        )[0]
        return from_rows(mixed.to(inputs.value.dtype), layout)
    mixed = _favor(
        query,
        key,
        value,
        matrix,
        rows.first,
        rows.length,
        key_rows.first,
        key_rows.length,
        rows.max_length,
        key_rows.max_length,
        rows.has_padding,
        key_rows.has_padding,
        *curve,
    )[0]
    return from_rows(mixed.to(inputs.value.dtype), layout)


def _chunk(query: Tensor, features: int) -> int:
    """Return the positions of one causal chunk."""
    is_narrow = min(query.shape[-1], features) < _MIN_WIDTH
    return min(_CHUNKS.values()) if is_narrow else _CHUNKS[query.dtype.itemsize]


def _rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast, and make the last axis contiguous; other strides are free."""
    tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def padded(features: int) -> int:
    """Return the padded number of features: a power of two up to 256, then a multiple of 128."""
    if features <= 256:
        return max(16, 1 << (features - 1).bit_length())
    return -(-features // 128) * 128


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    first: Tensor,
    length: Tensor,
    key_first: Tensor,
    key_length: Tensor,
    max_length: int,
    max_key_length: int,
    has_padding: bool,
    key_has_padding: bool,
    is_exponential: bool,
    norm: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Reading` and of `KeyMemory`."""
    from bertsmith.ops.favor.kernels.features import Curve
    from bertsmith.ops.favor.kernels.memory import build_memory
    from bertsmith.ops.favor.kernels.reading import read

    curve, key_rows = Curve(is_exponential, norm, epsilon), SequenceRows(key_first, key_length, max_key_length)
    memory = build_memory(key, value, matrix, key_rows, curve, padded(matrix.shape[0]))
    return *read(query, matrix, SequenceRows(first, length, max_length, has_padding), memory, curve), *memory


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, matrix: Tensor, first: Tensor, *_: object
) -> tuple[Tensor, ...]:
    (tokens, heads, width), batch = query.shape, first.shape[0]
    features = padded(matrix.shape[0])
    return (
        query.new_empty(tokens, heads, width),
        *(query.new_empty(tokens, heads, dtype=torch.float32) for _ in range(2)),
        query.new_empty(batch, heads, features, width),
        *(query.new_empty(batch, heads, features, dtype=torch.float32) for _ in range(2)),
        query.new_empty(batch, heads, width + 1, dtype=torch.float32),
    )


def _backward(
    upstream: Tensor,
    mixed: Tensor,
    normaliser: Tensor,
    epsilon_share: Tensor,
    mean: Tensor,
    bias: Tensor,
    shift: Tensor,
    feature_sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    first: Tensor,
    length: Tensor,
    key_first: Tensor,
    key_length: Tensor,
    max_length: int,
    max_key_length: int,
    has_padding: bool,
    key_has_padding: bool,
    is_exponential: bool,
    norm: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    from bertsmith.ops.favor.kernels.features import Curve
    from bertsmith.ops.favor.kernels.memory import KeyMemory
    from bertsmith.ops.favor.kernels.memory_backward import key_gradient, sum_queries
    from bertsmith.ops.favor.kernels.reading import Reading, query_gradient

    curve, upstream = Curve(is_exponential, norm, epsilon), _rows(upstream, query.dtype)
    memory, reading = KeyMemory(mean, bias, shift, feature_sums), Reading(mixed, normaliser, epsilon_share)
    rows = SequenceRows(first, length, max_length, has_padding)
    key_rows = SequenceRows(key_first, key_length, max_key_length, key_has_padding)
    by_query, by_total = query_gradient(query, upstream, matrix, rows, memory, reading, curve)
    sums = sum_queries(query, upstream, matrix, rows, key_length, memory, reading, by_total, curve)
    by_key, by_value = key_gradient(key, value, matrix, key_rows, shift, sums, curve)
    return by_query, by_key, by_value


def _fake_backward(
    upstream: Tensor,
    mixed: Tensor,
    normaliser: Tensor,
    epsilon_share: Tensor,
    mean: Tensor,
    bias: Tensor,
    shift: Tensor,
    feature_sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


_favor = support.register_op(
    "favor", forward=_forward, fake_forward=_fake_forward, backward=_backward, fake_backward=_fake_backward
)


def _causal_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    first: Tensor,
    length: Tensor,
    max_length: int,
    has_padding: bool,
    padded: int,
    chunk: int,
    is_exponential: bool,
    norm: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `ChunkReading` and of `ChunkStates`."""
    from bertsmith.ops.favor.kernels.causal import chunk_states, read
    from bertsmith.ops.favor.kernels.features import Curve

    curve, rows = Curve(is_exponential, norm, epsilon), SequenceRows(first, length, max_length, has_padding)
    states, feature_sums = chunk_states(key, value, matrix, rows, curve, padded, chunk)
    return *read(query, key, value, matrix, rows, states, feature_sums, curve, chunk), *states


def _fake_causal_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    first: Tensor,
    length: Tensor,
    max_length: int,
    has_padding: bool,
    padded: int,
    chunk: int,
    *_: object,
) -> tuple[Tensor, ...]:
    (tokens, heads, width), slots = query.shape, query.shape[0] // chunk + 2 * first.shape[0]
    return (
        query.new_empty(tokens, heads, width),
        *(query.new_empty(tokens, heads, dtype=torch.float32) for _ in range(2)),
        query.new_empty(tokens, heads, chunk),
        query.new_empty(slots, heads, padded, width),
        query.new_empty(slots, heads, padded, dtype=torch.float32),
        *(query.new_empty(tokens, heads, dtype=torch.float32) for _ in range(2)),
        query.new_empty(slots, heads, dtype=torch.float32),
    )


def _causal_backward(
    upstream: Tensor,
    mixed: Tensor,
    by_row: Tensor,
    query_level: Tensor,
    pair_weights: Tensor,
    mean: Tensor,
    size: Tensor,
    key_level: Tensor,
    level: Tensor,
    level_before: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    matrix: Tensor,
    first: Tensor,
    length: Tensor,
    max_length: int,
    has_padding: bool,
    padded: int,
    chunk: int,
    is_exponential: bool,
    norm: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    from bertsmith.ops.favor.kernels.causal import ChunkReading, ChunkStates
    from bertsmith.ops.favor.kernels.causal_backward import key_gradient, query_gradient, sums_after
    from bertsmith.ops.favor.kernels.features import Curve

    curve, rows = Curve(is_exponential, norm, epsilon), SequenceRows(first, length, max_length, has_padding)
    states, upstream = ChunkStates(mean, size, key_level, level, level_before), _rows(upstream, query.dtype)
    reading = ChunkReading(mixed, by_row, query_level, pair_weights)
    by_query, by_total = query_gradient(query, key, value, upstream, matrix, rows, states, reading, curve, chunk)
    later = sums_after(query, upstream, matrix, rows, states, reading, by_total, curve, chunk)
    by_key, by_value = key_gradient(
        query, key, value, upstream, matrix, rows, states, reading, later, by_total, curve, chunk
    )
    return by_query, by_key, by_value


def _fake_causal_backward(
    upstream: Tensor,
    mixed: Tensor,
    by_row: Tensor,
    query_level: Tensor,
    pair_weights: Tensor,
    mean: Tensor,
    size: Tensor,
    key_level: Tensor,
    level: Tensor,
    level_before: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


_favor_causal = support.register_op(
    "favor_causal",
    forward=_causal_forward,
    fake_forward=_fake_causal_forward,
    backward=_causal_backward,
    fake_backward=_fake_causal_backward,
)
