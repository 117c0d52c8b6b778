"""Caches of computations on weights, valid as long as the weights do not change."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from bertsmith.layers.elementwise import Activation

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Entry(Generic[Result]):
    aliases: tuple[Tensor, ...]
    """The detached sources; they keep the memory alive, so that its address stays unique."""
    versions: tuple[int, ...]
    settings: Hashable
    result: Result

    def fits(self, sources: Sequence[Tensor], settings: Hashable) -> bool:
        return settings == self.settings and all(
            source.data_ptr() == alias.data_ptr() and source._version == version
            for source, alias, version in zip(sources, self.aliases, self.versions, strict=True)
        )


class WeightCache(nn.Module, Generic[Result]):
    """The last result computed in eval mode without gradients. It has no weights and is never saved.

    A write to a source invalidates the result (PyTorch counts all writes but those through `.data`), and so does a
    change of mode or device.
    """

    def __init__(self) -> None:
        super().__init__()
        self._entry: _Entry[Result] | None = None

    def forward(self, sources: Sequence[Tensor], settings: Hashable, compute: Callable[[], Result]) -> Result:
        """Return the result for these sources and settings: the cached one if nothing has changed, else a new one."""
        if torch.compiler.is_compiling():
            return compute()
        is_countable = not any(source.is_inference() or source.is_meta for source in sources)
        if self.training or torch.is_grad_enabled() or not is_countable:
            self._entry = None
            return compute()
        entry = self._entry
        if entry is not None and entry.fits(sources, settings):
            return entry.result
        # an ordinary tensor even under inference mode, so that its writes are counted when it is a source itself
        with torch.inference_mode(False), torch.no_grad():
            result = compute()
            aliases = tuple(source.detach() for source in sources)
        self._entry = _Entry(aliases, tuple(source._version for source in sources), settings, result)
        return result

    def train(self, mode: bool = True) -> "WeightCache[Result]":
        if mode != self.training:
            self._entry = None
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> "WeightCache[Result]":
        self._entry = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        # a copy has its own weights
        return {**self.__dict__, "_entry": None}


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return autocast's dtype on the tensor's device; None if autocast is off."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


MIN_PACKED_WEIGHTS = 128 * 128
"""Smallest number of weights for which a packed matrix is faster."""
MIN_PACKED_PRODUCTS = 2**19
"""Smallest number of multiplications for which it is: a call takes 10 µs, an ordinary product of one token 4 µs."""

_FUSED: dict[Activation | None, tuple[str, str]] = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
}
"""Names of the activations that oneDNN fuses."""


class PackedWeight(WeightCache[Tensor]):
    """A weight matrix in oneDNN's packed layout, for products in eval mode without gradients."""

    def serves(self, hidden: Tensor, weight: Tensor) -> bool:
        """Return whether this product can use the packed matrix."""
        return (
            not self.training
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and hidden.dtype == weight.dtype == torch.float32
            and hidden.device.type == weight.device.type == "cpu"
            and weight.numel() >= MIN_PACKED_WEIGHTS
            and hidden.numel() * weight.shape[0] >= MIN_PACKED_PRODUCTS
            and not weight.is_inference()  # its writes are not counted
            and not torch.is_autocast_enabled("cpu")
            and bool(torch.backends.mkldnn.enabled)
            and torch.backends.mkldnn.is_available()
        )

    def product(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None
    ) -> Tensor:
        """Return activation(hidden · weightᵀ + bias): (…, inputs) -> (…, outputs)."""
        mkldnn: Any = torch.ops.mkldnn
        packed = self([weight], None, lambda: mkldnn._reorder_linear_weight(weight.detach(), None))
        kind, variant = _FUSED[activation]
        product: Tensor = mkldnn._linear_pointwise(hidden, packed, bias, kind, [], variant)
        return product
