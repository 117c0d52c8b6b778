"""Attention over packed sequences on a GPU, without any padding."""

import torch
from torch import Tensor

from bertsmith.ops.attention.bias import NO_BIAS
from bertsmith.ops.attention.reference import AttentionInputs
from bertsmith.ops.rounded_softmax import FUSED
from bertsmith.ops.sparse import SOFTMAX_ONLY


def unsupported(inputs: AttentionInputs) -> str | None:
    if inputs.rounding is not None:
        return FUSED
    if inputs.sparse is not None:
        return SOFTMAX_ONLY
    if inputs.bias is not None:
        return NO_BIAS
    if not (inputs.layout.is_packed and inputs.key_layout.is_packed):
        return "the layout is padded, but this backend requires packed sequences"
    if not inputs.query.is_cuda:
        return f"the tensors are on {inputs.query.device.type}, but the kernel requires CUDA"
    if inputs.query.dtype not in (torch.bfloat16, torch.float16):
        return f"the tensors are {inputs.query.dtype}, but the kernel supports bfloat16 and float16"
    if inputs.value.shape[-1] != inputs.key.shape[-1]:
        return (
            f"values have head width {inputs.value.shape[-1]} and keys {inputs.key.shape[-1]}, but must have the same"
        )
    return None


def attention(inputs: AttentionInputs) -> Tensor:
    """Return the attention output, (tokens, heads, head_width)."""
    starts, key_starts = inputs.layout.starts, inputs.key_layout.starts
    assert starts is not None
    assert key_starts is not None
    side = -1 if inputs.window is None else inputs.window
    if inputs.dropout > 0:
        return _with_dropout(inputs, starts, key_starts, (side, 0 if inputs.is_causal else side))
    from torch.nn.attention.varlen import varlen_attn  # imports torch.compile, which takes a second

    # max_length stays a Python number: as a tensor it would recompile the kernel at every step
    mixed = varlen_attn(
        inputs.query,
        inputs.key,
        inputs.value,
        starts,
        key_starts,
        inputs.layout.max_length,
        inputs.key_layout.max_length,
        window_size=(side, 0 if inputs.is_causal else side),
    )
    assert isinstance(mixed, Tensor)  # a tuple is returned only with auxiliary outputs
    return mixed


def _with_dropout(inputs: AttentionInputs, starts: Tensor, key_starts: Tensor, window: tuple[int, int]) -> Tensor:
    """Return the attention output with dropout on the probabilities.

    PyTorch's public function has no dropout argument (2.13); the operator below it has, and its backward pass
    recomputes the mask.
    """
    mixed: Tensor = torch.ops.aten._flash_attention_forward(
        inputs.query,
        inputs.key,
        inputs.value,
        starts,
        key_starts,
        inputs.layout.max_length,
        inputs.key_layout.max_length,
        inputs.dropout,
        inputs.is_causal,
        False,  # no debug mask
        window_size_left=window[0],
        window_size_right=window[1],
    )[0]
    return mixed
