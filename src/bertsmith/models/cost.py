"""Estimate parameters, floating-point operations and training memory of a model, for planning.

All heads of the config count. With a generator both networks run: the generator on the masked text with its head at
the masked positions, then the encoder on the corrupted text with its head at every token.
"""

import torch

from bertsmith.layers.mixers import MixerConfig
from bertsmith.models.build import assemble
from bertsmith.models.config import EncoderConfig, ModelConfig
from bertsmith.models.heads import DecoderExitsConfig, MaskDecoderConfig

# activations saved per token and unit of width in one post-norm layer:
# mixer input, query/key/value, mixer output, two sums, two norms, and twice the neurons at four times the width
_SAVED_PER_LAYER = 16


def parameters(config: ModelConfig) -> int:
    """Return the number of parameters, including a generator's."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in assemble(config).parameters())


def parameters_by_part(config: ModelConfig) -> dict[str, int]:
    """Return the parameters of the encoder with its heads, and of its generator alone."""
    if config.generator is None:
        return {"parameters": parameters(config)}
    embedding = config.encoder.embedding.changed(table="own")
    alone = parameters(config.changed(encoder=config.encoder.changed(embedding=embedding), generator=None))
    return {"parameters": alone, "generator_parameters": parameters(config) - alone}


def training_flops(config: ModelConfig, length: int, targets_per_token: float) -> float:
    """Return the floating-point operations of one token's forward and backward pass.

    A multiply-add counts as two, the backward pass as twice the forward pass, an embedding lookup as none. Only the
    fraction `targets_per_token` of the tokens goes through a head over the vocabulary. With a decoder, half of the
    tokens are source and half target.
    """
    forward = _forward_flops(config, length, targets_per_token)
    if config.generator is not None:
        forward += _forward_flops(config.generator.model, length, targets_per_token)
    return 3 * forward


def training_memory(config: ModelConfig, micro_tokens: int, targets_per_token: float, *, half: bool) -> int:
    """Return the approximate bytes of training on one device: weights, gradients, Adam's moments, activations."""
    size, saved = 2 if half else 4, _saved(config, targets_per_token)
    per_score = 3 * size  # the logit, its log-probability, its gradient
    if config.generator is not None:
        saved += _saved(config.generator.model, targets_per_token)
        per_score += 2 * 4  # the float32 softmax and the copy that replacements are sampled from
    scores = int(micro_tokens * targets_per_token) * config.encoder.vocabulary
    return 16 * parameters(config) + int(micro_tokens * saved * size) + scores * per_score


def _forward_flops(config: ModelConfig, length: int, targets_per_token: float) -> float:
    """Return the operations of one token through one network and its token-level heads."""
    encoder, decoder = config.encoder, config.decoder
    last = decoder or encoder  # heads read the last stack
    scores = 2 * last.embedding_width * last.vocabulary
    heads = {
        "masked_tokens": targets_per_token * (2 * last.width * last.embedding_width + scores),
        "next_token": targets_per_token * scores,
        "replaced_tokens": 2 * last.width * (last.width + 1),
    }
    layers: float = encoder.flops(length)
    if decoder is not None:
        layers = (layers + decoder.flops(length)) / 2
    if _steps(config):
        layers += _mask_decoder_flops(config, length, targets_per_token)
    exits = sum(len(head.layers) for head in config.heads if isinstance(head, DecoderExitsConfig))
    return layers + exits * heads["next_token"] + sum(heads.get(head.kind, 0) for head in config.heads)


def _mask_decoder_flops(config: ModelConfig, length: int, targets_per_token: float) -> float:
    """Return the extra operations of a mask decoder: its steps at the targets, with keys and values of all tokens.

    It replaces the last layer's own forward pass, unless another head needs that as well.
    """
    encoder, steps = config.encoder, _steps(config)
    whole = encoder.changed(layers=encoder.layers[-1:], embedding=encoder.embedding.changed(width=None)).flops(length)
    key_value = _key_value_flops(encoder.layers[-1].mixer, encoder)
    added = steps * (targets_per_token * (whole - key_value) + key_value)
    return added if _needs_last(config) else added - whole


def _key_value_flops(mixer: MixerConfig, encoder: EncoderConfig) -> int:
    head_width = mixer.resolved_head_width(encoder.width)
    value_width: int = getattr(mixer, "value_width", None) or head_width
    return 2 * encoder.width * mixer.heads * (head_width + value_width)


def _saved(config: ModelConfig, targets_per_token: float) -> float:
    """Return the number of activations saved per token over all layers."""
    layers: float = 1 if config.encoder.reversible else len(config.encoder.layers)
    if _steps(config):
        layers += _steps(config) * targets_per_token - (0 if _needs_last(config) else 1)
    return layers * config.encoder.width * _SAVED_PER_LAYER


def _steps(config: ModelConfig) -> int:
    return sum(head.steps for head in config.heads if isinstance(head, MaskDecoderConfig))


def _needs_last(config: ModelConfig) -> bool:
    return any(head.kind == "pooler" for head in config.heads)
