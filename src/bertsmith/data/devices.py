"""Names of devices, and the choice of one."""

from typing import Literal, get_args

from bertsmith.errors import InputError, nearest

Device = Literal["auto", "cpu", "cuda", "mps"]
DEVICES: tuple[Device, ...] = get_args(Device)
OTHER_NAMES = {"gpu": "cuda", "nvidia": "cuda", "metal": "mps", "apple": "mps"}
"""Names that people use for a device, for the error message."""


def unknown_device(device: str) -> InputError:
    """Return the error for a name that is not a device."""
    known = OTHER_NAMES.get(device.lower())
    hint = nearest(device, DEVICES) if known is None else f"did you mean {known!r}?"
    return InputError(f"device is {device!r}; {hint} (all: {', '.join(DEVICES)})")


def device_type(device: str) -> str:
    """Return "cuda", "mps" or "cpu" for a requested device; "auto" is a CUDA GPU if there is one, else the CPU."""
    if device not in DEVICES:
        raise unknown_device(device)
    import torch  # takes seconds, and commands without a model never call this function

    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    is_available = {"auto": True, "cpu": True, "cuda": has_cuda, "mps": has_mps}
    if not is_available[device]:
        allowed = ", ".join(name for name, is_there in is_available.items() if is_there)
        raise InputError(
            f'device is "{device}" and this machine has no GPU that PyTorch can use by this name; allowed: {allowed}'
        )
    if device != "auto":
        return device
    return "cuda" if has_cuda else "cpu"


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware, about twice as fast as float32; other CPUs emulate it."""
    import torch

    # public as torch.cpu.get_capabilities only in newer versions than 2.11
    return bool(torch.cpu._is_avx512_bf16_supported())
