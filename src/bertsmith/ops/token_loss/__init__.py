"""Cross-entropy of hidden states over the vocabulary, without scores in float32 (linear and cross-entropy in one op).

It returns what pre-training needs of the scores: loss, accuracy and, for ELECTRA's generator, one sample per row.
"""

from torch import Tensor

from bertsmith.ops.dispatch import Implementation, Implementations, choose
from bertsmith.ops.token_loss import fused, reference
from bertsmith.ops.token_loss.reference import Sampling, TokenLoss, TokenLossInputs, from_scores, sample

__all__ = ["BACKENDS", "Sampling", "TokenLoss", "from_scores", "sample", "token_loss"]

BACKENDS: Implementations[TokenLossInputs, TokenLoss] = {
    "triton": Implementation(fused.token_loss, fused.unsupported, fused.preferred),
    "chunked": Implementation(fused.chunked, reference.unsupported),
    "reference": Implementation(reference.token_loss, reference.unsupported),
}


def token_loss(
    hidden: Tensor,
    table: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    smoothing: float = 0.0,
    sampling: Sampling | None = None,
    backend: str = "auto",
) -> TokenLoss:
    """Return the summed cross-entropy of softmax(hidden · tableᵀ + bias), with label smoothing, and its metrics.

    Only the loss has a gradient, and only "reference" has second derivatives. Under autocast products are computed in
    its dtype; exponentials and sums are computed in float32 or wider.
    Shape: hidden (rows, width), table (vocabulary, width), bias (vocabulary,), targets (rows,).
    """
    inputs = TokenLossInputs(hidden, table, bias, targets, smoothing, sampling)
    return choose(BACKENDS, backend, inputs).compute(inputs)
