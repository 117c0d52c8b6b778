"""The point-wise functions a config can name."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh"]

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,  # the exact, erf form
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),  # the form of Google's BERT code
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}
