"""Whether Triton's kernels can run on given tensors.

Triton comes with PyTorch's builds for CUDA. Its interpreter runs the same kernels on a CPU, slowly, for tests: set
TRITON_INTERPRET=1 before anything imports Triton.
"""

import importlib.util
import os

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unsupported(tensor: Tensor) -> str | None:
    """Why no kernel can take this tensor; None if it can."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if not tensor.is_cuda and not is_interpreting():
        return f"the tensors are on {tensor.device.type} and the kernel runs on CUDA"
    if tensor.dtype not in DTYPES:
        return f"the tensors are {tensor.dtype} and the kernel takes float16, bfloat16 or float32"
    return None


def is_interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def is_wanted(tensor: Tensor) -> bool:
    """Whether a kernel is the way to go where it can serve: on a GPU; the interpreter is for tests."""
    return tensor.is_cuda
