"""What a model costs: parameters, operations, memory. Estimates for planning; measure before you promise."""

import torch

from bertsmith.models.build import assemble
from bertsmith.models.config import ModelConfig

# bytes of saved activations per token and unit of width in one post-norm layer, for 2-byte numbers:
# mixer input, query/key/value, mixed, two sums, two norms, and twice the neurons at four times the width
_SAVED_PER_LAYER = 2 * 16


def parameters(config: ModelConfig) -> int:
    """The number of weights."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in assemble(config).parameters())


def training_flops(config: ModelConfig, length: int, targets_per_token: float) -> float:
    """Floating-point operations of one token's forward and backward pass.

    Multiply-adds count as two, the backward pass as twice the forward one; embeddings are look-ups, and only the share
    `targets_per_token` of the tokens goes through the head over the vocabulary. With a decoder, half of the tokens are
    read and half are written.
    """
    encoder = config.encoder
    if config.decoder is not None:
        head = 2 * config.decoder.embedding_width * config.decoder.vocabulary
        return 3 * ((encoder.flops(length) + config.decoder.flops(length)) / 2 + targets_per_token * head)
    head = 2 * encoder.embedding_width * (encoder.width + encoder.vocabulary)
    return 3 * (encoder.flops(length) + targets_per_token * head)


def training_memory(config: ModelConfig, micro_tokens: int, targets_per_token: float, *, half: bool) -> int:
    """Bytes that training takes on one device, roughly: weights, gradients, Adam's two moments, activations."""
    encoder = config.encoder
    saved = micro_tokens * encoder.width * len(encoder.layers) * _SAVED_PER_LAYER * (1 if half else 2)
    scores = int(micro_tokens * targets_per_token) * encoder.vocabulary * (2 if half else 4) * 3
    return 16 * parameters(config) + saved + scores
