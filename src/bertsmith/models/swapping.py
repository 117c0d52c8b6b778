"""Replace submodules of a model, such as plain linear layers by quantised or masked ones."""

from collections.abc import Callable

from torch import nn

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
