"""Shares and the gradient of scores, computed anew for one tile."""

import triton
import triton.language as tl

from bertsmith.ops.kernels.chance import is_kept


@triton.jit
def score_gradient(
    queries,
    keys,
    values,
    upstream,
    bias,
    log_mass,
    agreement,
    place,
    local,
    key_place,
    is_query,
    is_key,
    seed,
    stream,
    factor,
    rate,
    CAUSAL: tl.constexpr,
    DROPS: tl.constexpr,
):
    """The shares of a tile after dropout, and the gradient of its scores before the scale: (queries, keys), float32."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * factor + bias
    is_seen = is_query[:, None] & is_key[None, :]
    if CAUSAL:
        is_seen = is_seen & (place[:, None] >= key_place[None, :])
    shares = tl.exp2(tl.where(is_seen, scores - log_mass[:, None], float("-inf")))
    by_share = tl.dot(upstream, tl.trans(values), input_precision="ieee")
    kept_shares = shares
    if DROPS:
        kept = tl.where(is_kept(seed, stream, local[:, None], key_place[None, :], rate), 1.0 / (1.0 - rate), 0.0)
        by_share = by_share * kept
        kept_shares = shares * kept
    return kept_shares, shares * (by_share - agreement[:, None])
