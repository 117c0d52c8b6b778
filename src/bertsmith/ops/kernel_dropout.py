"""Dropout inside kernels: the mask is a function of seed and position, so the backward pass recomputes it."""

import triton
import triton.language as tl


@triton.jit
def mixed_bits(x):
    """Hash 32 bits (Wellons 2018, "lowbias32")."""
    x = x.to(tl.uint32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def is_kept(seed, stream, row, column, rate):
    """Return True with probability 1 − rate at each (row, column) of one stream; row and column broadcast.

    Rows and columns are hashed separately and then combined by one more hash, so each element costs few operations.
    """
    rows = mixed_bits(row.to(tl.uint32) ^ mixed_bits(seed.to(tl.uint32) + stream.to(tl.uint32) * 0x9E3779B9))
    columns = mixed_bits(column.to(tl.uint32) + 0x85EBCA6B)
    bits = mixed_bits(rows + columns * 0xC2B2AE35)
    return (bits >> 8).to(tl.int32) >= (tl.cast(rate, tl.float32) * 16777216.0).to(tl.int32)
