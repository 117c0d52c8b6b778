"""What a model costs: parameters, operations, memory. Estimates for planning; measure before you promise.

A config is counted with the heads it has. Where there is a generator, both networks run: the generator over the masked
text, its head at the masked places, the encoder over the guesses, its head at every token.
"""

import torch

from bertsmith.layers.mixers import MixerConfig
from bertsmith.models.build import assemble
from bertsmith.models.config import EncoderConfig, ModelConfig
from bertsmith.models.heads import DecoderExitsConfig, MaskDecoderConfig

# numbers that are saved per token and unit of width in one post-norm layer:
# mixer input, query/key/value, mixed, two sums, two norms, and twice the neurons at four times the width
_SAVED_PER_LAYER = 16


def parameters(config: ModelConfig) -> int:
    """The number of weights, those of a generator counted in."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in assemble(config).parameters())


def parameters_by_part(config: ModelConfig) -> dict[str, int]:
    """The weights of the encoder with its heads, which are used later, and those that only its generator has."""
    if config.generator is None:
        return {"parameters": parameters(config)}
    embedding = config.encoder.embedding.changed(table="own")
    alone = parameters(config.changed(encoder=config.encoder.changed(embedding=embedding), generator=None))
    return {"parameters": alone, "generator_parameters": parameters(config) - alone}


def training_flops(config: ModelConfig, length: int, targets_per_token: float) -> float:
    """Floating-point operations of one token's forward and backward pass.

    Multiply-adds count as two, the backward pass as twice the forward one; embeddings are look-ups, and only the share
    `targets_per_token` of the tokens goes through a head over the vocabulary. With a decoder, half of the tokens are
    read and half are written.
    """
    forward = _forward_flops(config, length, targets_per_token)
    if config.generator is not None:
        forward += _forward_flops(config.generator.model, length, targets_per_token)
    return 3 * forward


def training_memory(config: ModelConfig, micro_tokens: int, targets_per_token: float, *, half: bool) -> int:
    """Bytes that training takes on one device, roughly: weights, gradients, Adam's two moments, activations."""
    size, saved = 2 if half else 4, _saved(config, targets_per_token)
    per_score = 3 * size  # as it is, its logarithm, its gradient
    if config.generator is not None:
        saved += _saved(config.generator.model, targets_per_token)
        per_score += 2 * 4  # its softmax in float32, and the copy in runs that guesses are drawn from
    scores = int(micro_tokens * targets_per_token) * config.encoder.vocabulary
    return 16 * parameters(config) + int(micro_tokens * saved * size) + scores * per_score


def _forward_flops(config: ModelConfig, length: int, targets_per_token: float) -> float:
    """Of one token through one network and its heads; those that stand on whole sequences are left out."""
    encoder, decoder = config.encoder, config.decoder
    last = decoder or encoder  # heads stand on the last stack
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
    """What a mask decoder adds: its steps at the targets, each with keys and values of all tokens.

    It asks the last layer in the place of that layer's own pass, unless another head needs that, too.
    """
    encoder, steps = config.encoder, _steps(config)
    whole = encoder.changed(layers=encoder.layers[-1:], embedding=encoder.embedding.changed(width=None)).flops(length)
    looked_at = _key_value_flops(encoder.layers[-1].mixer, encoder)
    asked = steps * (targets_per_token * (whole - looked_at) + looked_at)
    return asked if _needs_last(config) else asked - whole


def _key_value_flops(mixer: MixerConfig, encoder: EncoderConfig) -> int:
    head_width = mixer.resolved_head_width(encoder.width)
    value_width: int = getattr(mixer, "value_width", None) or head_width
    return 2 * encoder.width * mixer.heads * (head_width + value_width)


def _saved(config: ModelConfig, targets_per_token: float) -> float:
    """Numbers that are saved of one token over all layers."""
    layers: float = len(config.encoder.layers)
    if _steps(config):
        layers += _steps(config) * targets_per_token - (0 if _needs_last(config) else 1)
    return layers * config.encoder.width * _SAVED_PER_LAYER


def _steps(config: ModelConfig) -> int:
    return sum(head.steps for head in config.heads if isinstance(head, MaskDecoderConfig))


def _needs_last(config: ModelConfig) -> bool:
    return any(head.kind == "pooler" for head in config.heads)
