"""What kind of program a call becomes part of."""

import torch


def is_exporting() -> bool:
    """Whether a graph is exported for another program.

    PyTorch's own answer is True in code that it compiles as well (2.11), where it would keep kernels away.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
