"""Cross-entropy over the vocabulary that computes its gradients in the forward pass, a chunk of rows at a time.

scores     hidden · tableᵀ + bias in the dtype of the products                 one matrix product
gradient   softmax(scores) − target distribution, in place of the scores       one kernel, which reads them in float32
gradientᵀ · hidden and gradient · table                                        two matrix products

The loss is a sum, so its upstream gradient is a scalar: the backward pass multiplies the finished gradients by it.
No scores or gradients exist in float32, and at most one chunk of them exists at a time.
"""

import torch
from torch import Tensor

from bertsmith.answers.sequences import IGNORED
from bertsmith.ops import kernel_support as support
from bertsmith.ops.token_loss.reference import (
    Sampling,
    TargetWeights,
    TokenLoss,
    TokenLossInputs,
    row_results,
    sample,
    wide_log_softmax,
)

MAX_SCORES = {"cpu": 2**24, "cuda": 2**29}
"""Scores of one chunk, which bound its memory; smaller chunks add up the gradient of the table more often."""
_ALIGNMENT = 64  # matrix units want aligned rows, and the kernel wide loads


def unsupported(inputs: TokenLossInputs) -> str | None:
    return support.unsupported(inputs.hidden) or support.unsupported(inputs.table)


def preferred(inputs: TokenLossInputs) -> bool:
    return support.is_preferred(inputs.hidden)


def token_loss(inputs: TokenLossInputs) -> TokenLoss:
    return _compute(inputs, has_kernel=True)


def chunked(inputs: TokenLossInputs) -> TokenLoss:
    """The same computation without a kernel: any device and dtype."""
    return _compute(inputs, has_kernel=False)


def _compute(inputs: TokenLossInputs, *, has_kernel: bool) -> TokenLoss:
    hidden, table, bias, sampling = inputs.hidden, inputs.table, inputs.bias, inputs.sampling
    device = hidden.device.type
    dtype = torch.promote_types(hidden.dtype, table.dtype)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype
    needs_gradients = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (hidden, table, bias)
    )
    sums, samples, *_ = _token_loss(
        hidden,
        table,
        bias,
        inputs.targets,
        None if sampling is None else sampling.draw,
        0 if sampling is None else sampling.vocabulary,
        1.0 if sampling is None else sampling.temperature,
        inputs.smoothing,
        dtype,
        has_kernel,
        needs_gradients,
    )
    _, nll, hits, targets = sums.detach()
    return TokenLoss(sums[0], nll, hits, targets, None if sampling is None else samples)


def _forward(
    hidden: Tensor,
    table: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    draw: Tensor | None,
    choices: int,
    temperature: float,
    smoothing: float,
    dtype: torch.dtype,
    has_kernel: bool,
    needs_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the sums of `row_results`, the samples and, if needed, the gradients of hidden states, table and bias."""
    losses = _kernel_losses if has_kernel else _losses
    vocabulary, rows = table.shape[0], hidden.shape[0]
    missing = -vocabulary % _ALIGNMENT if has_kernel else 0
    exact = torch.promote_types(dtype, torch.float32)
    sums, samples, by_hidden = hidden.new_zeros(4, dtype=exact), [], []
    by_table, by_bias = hidden.new_empty(0, dtype=exact), hidden.new_empty(0, dtype=exact)
    with torch.autocast(hidden.device.type, enabled=False):
        hidden, table = hidden.to(dtype), _padded(table, missing, dtype)
        bias = None if bias is None else _padded(bias, missing, dtype)
        size = max(1, MAX_SCORES["cuda" if hidden.is_cuda else "cpu"] // table.shape[0])
        buffer = hidden.new_empty(min(size, rows), table.shape[0])
        for begin in range(0, max(1, rows), size):
            chunk = slice(begin, begin + size)
            part = hidden[chunk]
            scores = _scores(part, table, bias, buffer[: part.shape[0]])
            sampling = None if draw is None else Sampling(draw[chunk], temperature, choices)
            results, drawn, gradient = losses(scores, targets[chunk], vocabulary, smoothing, sampling, needs_gradients)
            sums += results.sum(-1)
            samples.append(drawn)
            if needs_gradients:
                by_hidden.append(_product(gradient, table, exact))
                by_table = _add(by_table, _product(gradient.T, part, exact))
                by_bias = by_bias if bias is None else _add(by_bias, gradient.sum(0, dtype=exact))
    whole = torch.cat(by_hidden) if by_hidden else hidden.new_empty(0, dtype=exact)
    return sums, torch.cat(samples), whole, by_table[:vocabulary], by_bias[:vocabulary]


def _padded(tensor: Tensor, missing: int, dtype: torch.dtype) -> Tensor:
    """Return the tensor in a dtype, followed by rows of zeros; a change of dtype copies it anyway."""
    if not missing:
        return tensor.to(dtype)
    padded = tensor.new_zeros(tensor.shape[0] + missing, *tensor.shape[1:], dtype=dtype)
    padded[: tensor.shape[0]] = tensor
    return padded


def _scores(hidden: Tensor, table: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    return torch.mm(hidden, table.T, out=out) if bias is None else torch.addmm(bias, hidden, table.T, out=out)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return left · right in a dtype; on a GPU it is not rounded to the dtype of the factors before."""
    if left.is_cuda and left.dtype != dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.mm(left, right).to(dtype)


def _add(total: Tensor, part: Tensor) -> Tensor:
    """Return the sum, in place; the part itself if there is no total yet."""
    return total.add_(part) if total.numel() else part


def _kernel_losses(
    scores: Tensor,
    targets: Tensor,
    vocabulary: int,
    smoothing: float,
    sampling: Sampling | None,
    needs_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from bertsmith.ops.token_loss import kernels

    return kernels.losses(scores, targets, vocabulary, smoothing, sampling, needs_gradients)


def _losses(
    scores: Tensor,
    targets: Tensor,
    vocabulary: int,
    smoothing: float,
    sampling: Sampling | None,
    needs_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of rows, (4, rows), their samples and their gradients."""
    logs = wide_log_softmax(scores)
    results = row_results(scores, logs, targets, smoothing)
    samples = targets.new_empty(0)
    if sampling is not None:
        samples = sample(scores[:, : sampling.vocabulary], sampling.draw, sampling.temperature)
    if not needs_gradients:
        return results, samples, scores
    on, off = TargetWeights.of(smoothing, vocabulary)
    gradient = logs.exp_().sub_(off) if off else logs.exp_()
    gradient.scatter_add_(-1, targets.clamp(min=0)[:, None], gradient.new_full((), -on).expand(len(targets), 1))
    gradient.masked_fill_((targets == IGNORED)[:, None], 0.0)
    return results, samples, gradient.to(scores.dtype)


def _fake_forward(
    hidden: Tensor,
    table: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    draw: Tensor | None,
    choices: int,
    temperature: float,
    smoothing: float,
    dtype: torch.dtype,
    has_kernel: bool,
    needs_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    exact = torch.promote_types(dtype, torch.float32)
    none = [0]
    return (
        hidden.new_empty(4, dtype=exact),
        targets.new_empty(none if draw is None else targets.shape),
        hidden.new_empty(hidden.shape if needs_gradients else none, dtype=exact),
        hidden.new_empty(table.shape if needs_gradients else none, dtype=exact),
        hidden.new_empty(none if bias is None or not needs_gradients else bias.shape, dtype=exact),
    )


def _backward(
    upstream: Tensor,
    samples: Tensor,
    by_hidden: Tensor,
    by_table: Tensor,
    by_bias: Tensor,
    hidden: Tensor,
    table: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    draw: Tensor | None,
    choices: int,
    temperature: float,
    smoothing: float,
    dtype: torch.dtype,
    has_kernel: bool,
    needs_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the finished gradients times the upstream gradient of the loss, the first of the sums."""
    scale = upstream[0]
    return (
        (by_hidden * scale).to(hidden.dtype),
        (by_table * scale).to(table.dtype),
        (by_bias * scale).to(table.dtype if bias is None else bias.dtype),
    )


def _fake_backward(
    upstream: Tensor,
    samples: Tensor,
    by_hidden: Tensor,
    by_table: Tensor,
    by_bias: Tensor,
    hidden: Tensor,
    table: Tensor,
    bias: Tensor | None,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(by_hidden, dtype=hidden.dtype),
        torch.empty_like(by_table, dtype=table.dtype),
        torch.empty_like(by_bias, dtype=table.dtype if bias is None else bias.dtype),
    )


_token_loss = support.register_op(
    "token_loss",
    forward=_forward,
    fake_forward=_fake_forward,
    backward=_backward,
    fake_backward=_fake_backward,
    saves_result=False,
)
