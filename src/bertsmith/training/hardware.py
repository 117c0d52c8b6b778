"""Which device a run computes on, and the speed it could reach at best, to say what share of it a run reaches."""

import torch

from bertsmith.errors import InputError

# dense bfloat16 multiply-add rates from the vendors' data sheets, in operations a second
_PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}


def device_type(device: str) -> str:
    """ "cuda" or "cpu" for what was asked for: "auto", "cpu" or "cuda"."""
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise InputError('device is "cuda" and this machine has no GPU that PyTorch can use; allowed: auto, cpu')
    return "cuda" if device != "cpu" and has_cuda else "cpu"


def peak_flops(device: torch.device) -> float | None:
    """The device's peak rate in bfloat16, or None where it is not known."""
    if device.type != "cuda":
        return None
    words = f" {torch.cuda.get_device_name(device).replace('-', ' ')} "
    return next((rate for mark, rate in _PEAKS.items() if f" {mark} " in words), None)
