"""Replace submodules of a model, such as plain linear layers by quantised or masked ones."""

from collections.abc import Callable

from torch import nn

from bertsmith.layers.mixers.kernels import DepthwiseKernel, FixedKernel
from bertsmith.layers.mixers.multi_linear import RankCore

Make = Callable[[str, nn.Module, nn.Module], nn.Module]
"""Function of a module's name, its parent and the module that returns the replacement, or the module to keep it."""


def swap(model: nn.Module, make: Make) -> None:
    """Replace submodules by the results of `make`, which is called once for a shared module."""
    made: dict[nn.Module, nn.Module] = {}
    for path, parent in list(model.named_modules()):
        for name, part in list(parent.named_children()):
            if part not in made:
                made[part] = make(f"{path}.{name}", parent, part)
            if made[part] is not part:
                setattr(parent, name, made[part])


def multiplies_no_states(parent: nn.Module, module: nn.Module) -> bool:
    """Return whether a matrix is never multiplied by hidden states: the taps of a convolution, the core of a rank."""
    return isinstance(parent, FixedKernel | DepthwiseKernel) or isinstance(module, RankCore)
