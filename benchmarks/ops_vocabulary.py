"""The cross-entropy over a vocabulary that benchmarks/ops.py times: 30,522 tokens, targets at 15 % of the tokens."""

from argparse import Namespace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from bertsmith.ops import token_loss
from bertsmith.ops.kernel_support import Tile
from bertsmith.ops.token_loss.reference import TokenLossInputs
from ops_cases import Case, Tuned, numbers

VOCABULARY, RATE = 30_522, 0.15
TILES = [Tile(1, 2048, 4), Tile(1, 2048, 8), Tile(2, 1024, 4), Tile(2, 2048, 4)]
TILES += [Tile(2, 2048, 8), Tile(4, 1024, 4), Tile(4, 2048, 8), Tile(2, 4096, 16)]


def vocabulary_loss(options: Namespace, length: int, heads: int, head_width: int, *, samples: bool = False) -> Case:
    """Return the loss at width heads × head_width, with `samples` also one token per row; `length` has no effect."""
    rows, width = int(RATE * options.tokens), heads * head_width
    hidden, bias = numbers(options, rows, width), numbers(options, VOCABULARY)
    table = numbers(options, VOCABULARY, width) * width**-0.5
    targets = torch.randint(0, VOCABULARY, (rows,), device=options.device)
    sampling = token_loss.Sampling(torch.rand(rows, device=options.device), 1.0, VOCABULARY) if samples else None

    def op(hidden: Tensor, table: Tensor, bias: Tensor, *, backend: str) -> Tensor:
        return token_loss.token_loss(hidden, table, bias, targets, sampling=sampling, backend=backend).loss

    def plain(hidden: Tensor, table: Tensor, bias: Tensor) -> Tensor:
        return cross_entropy(linear(hidden, table, bias).float(), targets, reduction="sum")

    size = hidden.element_size()
    scores, weights = rows * VOCABULARY * size, (hidden.numel() + table.numel() + bias.numel()) * size
    lines = {"chunked": partial(op, backend="chunked"), "cross_entropy": plain}
    if options.device == "cuda":
        lines["cross_entropy compiled"] = torch.compile(plain, dynamic=False)
    return Case(
        op=op,
        tensors=[hidden, table, bias],
        backends=token_loss.BACKENDS,
        inputs=TokenLossInputs(hidden, table, bias, targets, sampling=sampling),
        compared=["reference"],
        # scores are written and read; their gradient is written and read by two products
        forward_bytes=2 * scores + weights,
        training_bytes=5 * scores + 3 * weights,
        kernels=partial(_kernels, rows, options, targets, sampling),
        lines=lines,
    )


def _kernels(rows: int, options: Namespace, targets: Tensor, sampling: token_loss.Sampling | None) -> dict[str, Tuned]:
    from bertsmith.ops.token_loss import kernels

    scores = numbers(options, rows, VOCABULARY + -VOCABULARY % 64)
    tries = [{"tiling": tiling} for tiling in TILES]
    return {
        name: Tuned(partial(kernels.losses, scores, targets, VOCABULARY, 0.0, sampling, needs_gradients), tries)
        for name, needs_gradients in (("training", True), ("evaluation", False))
    }
