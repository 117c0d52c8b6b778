"""Attention over packed sequences on a GPU, without any padding."""

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from bertsmith.ops.attention.inputs import AttentionInputs


def unsupported(inputs: AttentionInputs) -> str | None:
    if not inputs.layout.is_packed:
        return "the layout is padded and this form takes packed sequences"
    if not inputs.query.is_cuda:
        return f"the tensors are on {inputs.query.device.type} and the kernel runs on CUDA"
    if inputs.query.dtype not in (torch.bfloat16, torch.float16):
        return f"the tensors are {inputs.query.dtype} and the kernel takes bfloat16 or float16"
    if inputs.dropout > 0:
        return "the kernel has no attention dropout"
    return None


def attention(inputs: AttentionInputs) -> Tensor:
    """The attention output, (tokens, heads, head_width)."""
    starts, longest = inputs.layout.starts, inputs.layout.longest
    assert starts is not None
    # longest stays a Python number: as a tensor it would recompile the kernel at every step
    mixed = varlen_attn(
        inputs.query,
        inputs.key,
        inputs.value,
        starts,
        starts,
        longest,
        longest,
        window_size=(-1, 0) if inputs.is_causal else (-1, -1),
    )
    assert isinstance(mixed, Tensor)  # a pair comes back only where auxiliary outputs are asked for
    return mixed
