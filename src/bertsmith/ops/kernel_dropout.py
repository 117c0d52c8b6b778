"""Dropout inside kernels: what is kept follows from a seed and a place alone, so a backward pass draws it again."""

import triton
import triton.language as tl


@triton.jit
def mixed_bits(x):
    """32 well mixed bits of 32 bits: a finaliser of two multiplications (Wellons 2018, "lowbias32")."""
    x = x.to(tl.uint32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def is_kept(seed, stream, row, column, rate):
    """True with probability 1 − rate at each (row, column) of one stream; row and column broadcast to the shape.

    A place is hashed by row and by column and then once more together, which costs few operations per number.
    """
    rows = mixed_bits(row.to(tl.uint32) ^ mixed_bits(seed.to(tl.uint32) + stream.to(tl.uint32) * 0x9E3779B9))
    columns = mixed_bits(column.to(tl.uint32) + 0x85EBCA6B)
    bits = mixed_bits(rows + columns * 0xC2B2AE35)
    return (bits >> 8).to(tl.int32) >= (tl.cast(rate, tl.float32) * 16777216.0).to(tl.int32)
