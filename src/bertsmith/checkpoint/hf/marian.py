"""The Transformer as Hugging Face's Marian: the one class there that is Vaswani's network and little else."""

from typing import Any

from bertsmith.checkpoint.hf.twin import Twin, read_activation, refuse, required, write_activation
from bertsmith.checkpoint.names import Row, linear, row, shaped
from bertsmith.errors import InputError
from bertsmith.layers.embedding import EmbeddingConfig
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.layers.norm import NormConfig
from bertsmith.models.config import EncoderConfig, LayerConfig, ModelConfig
from bertsmith.models.heads import NextTokenConfig

_EPSILON = 1e-5  # Marian's class has no setting for it


def _rows(config: ModelConfig) -> list[Row]:
    return [
        row("encoder.embedding.token_table", "model.shared.weight"),
        *_block_rows("encoder.blocks.{i}", "model.encoder.layers.{i}"),
        *_block_rows("decoder.blocks.{j}", "model.decoder.layers.{j}"),
        *_attention_rows("decoder.blocks.{j}.cross", "model.decoder.layers.{j}.encoder_attn"),
        *linear("decoder.blocks.{j}.cross_norm", "model.decoder.layers.{j}.encoder_attn_layer_norm"),
    ]


def _block_rows(ours: str, theirs: str) -> list[Row]:
    return [
        *_attention_rows(f"{ours}.mixer", f"{theirs}.self_attn"),
        *linear(f"{ours}.mixer_norm", f"{theirs}.self_attn_layer_norm"),
        *linear(f"{ours}.feedforward.expand", f"{theirs}.fc1"),
        *linear(f"{ours}.feedforward.contract", f"{theirs}.fc2"),
        *linear(f"{ours}.feedforward_norm", f"{theirs}.final_layer_norm"),
    ]


def _attention_rows(ours: str, theirs: str) -> list[Row]:
    return [
        *linear(f"{ours}.project", *(f"{theirs}.{part}_proj" for part in "qkv")),
        *linear(f"{ours}.output", f"{theirs}.out_proj"),
    ]


def _read(data: dict[str, Any], parts: frozenset[str]) -> ModelConfig:
    refuse(data, "share_encoder_decoder_embeddings", True)
    refuse(data, "tie_word_embeddings", True)
    refuse(data, "activation_dropout", 0.0)
    refuse(data, "encoder_layerdrop", 0.0)
    refuse(data, "decoder_layerdrop", 0.0)
    heads = (NextTokenConfig(has_bias="heads.next_token" in parts),)
    encoder, decoder = _read_stack(data, "encoder"), _read_stack(data, "decoder")
    return ModelConfig(family="transformer", encoder=encoder, decoder=decoder, heads=heads)


def _read_stack(data: dict[str, Any], stack: str) -> EncoderConfig:
    width, vocabulary = required(data, "d_model"), required(data, "vocab_size")
    heads, neurons = required(data, f"{stack}_attention_heads"), required(data, f"{stack}_ffn_dim")
    attention = FullConfig(heads=heads, dropout=float(data.get("attention_dropout", 0.0)))
    dropout = float(data.get("dropout", 0.1))
    activation = read_activation(data.get("activation_function", "gelu"), "config.json")
    is_decoder = stack == "decoder"
    layer = LayerConfig(
        mixer=attention.changed(is_causal=is_decoder),
        cross=attention if is_decoder else None,
        feedforward=FeedForwardConfig(neurons=neurons, activation=activation),
        norm=NormConfig(epsilon=_EPSILON),
        dropout=dropout,
    )
    embedding = EmbeddingConfig(
        positions="sinusoid_halves",
        longest=data.get("max_position_embeddings", 1024),
        types=0,
        is_scaled=bool(data.get("scale_embedding", False)),
        has_norm=False,
        dropout=dropout,
        owns_table=not is_decoder,
    )
    return EncoderConfig(
        vocabulary=vocabulary,
        width=width,
        embedding=embedding,
        layers=(layer,) * required(data, f"{stack}_layers"),
        deviation=data.get("init_std", 0.02),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    reason = _inexpressible(config)
    if reason:
        raise InputError(f"this model cannot be exported as a Hugging Face marian: {reason}")
    encoder, decoder = config.encoder, config.decoder
    assert decoder is not None
    data: dict[str, Any] = {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "is_encoder_decoder": True,
        "vocab_size": encoder.vocabulary,
        "decoder_vocab_size": encoder.vocabulary,
        "d_model": encoder.width,
        "activation_function": write_activation(encoder.layers[0].feedforward.activation),
        "dropout": encoder.layers[0].dropout,
        "attention_dropout": encoder.layers[0].mixer.dropout,  # type: ignore[attr-defined]
        "activation_dropout": 0.0,
        "max_position_embeddings": encoder.embedding.longest,
        "scale_embedding": encoder.embedding.is_scaled,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        "init_std": encoder.deviation,
        # without a tokenizer nobody knows; the class's own defaults would lie outside the vocabulary
        **dict.fromkeys(("pad_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id"), 0),
    }
    for name, stack in (("encoder", encoder), ("decoder", decoder)):
        data[f"{name}_layers"] = len(stack.layers)
        data[f"{name}_attention_heads"] = stack.layers[0].mixer.heads
        data[f"{name}_ffn_dim"] = stack.layers[0].feedforward.neurons
    return data


def _inexpressible(config: ModelConfig) -> str | None:
    """Why Marian cannot be this model, or None."""
    if config.decoder is None:
        return "it has no decoder"
    stacks = (config.encoder, config.decoder)
    layers = [layer for stack in stacks for layer in stack.layers]
    mixers = [mixer for layer in layers for mixer in (layer.mixer, layer.cross) if mixer is not None]
    width = config.encoder.width
    dropouts = {layer.dropout for layer in layers} | {stack.embedding.dropout for stack in stacks}
    positions = {stack.embedding.positions for stack in stacks}
    checks = {
        "its layers differ from each other": all(len(set(stack.layers)) == 1 for stack in stacks),
        "its mixers are not full attention": all(isinstance(mixer, FullConfig) for mixer in mixers),
        "its heads do not fill its width": all(
            mixer.heads * (mixer.head_width or 0) == width or (mixer.head_width is None and width % mixer.heads == 0)
            for mixer in mixers
            if isinstance(mixer, FullConfig)
        ),
        "the head widths of its values and keys differ": all(
            getattr(mixer, "value_width", None) in (None, getattr(mixer, "head_width", None)) for mixer in mixers
        ),
        "it is pre-norm": all(layer.norm.placement == "post" for layer in layers)
        and all(stack.final_norm is None for stack in stacks),
        f"the epsilon of its norms is not {_EPSILON}": {layer.norm.epsilon for layer in layers} == {_EPSILON},
        'its positions are not "sinusoid_halves"': positions == {"sinusoid_halves"},
        "its embeddings have norms or types": not any(s.embedding.has_norm or s.embedding.types for s in stacks),
        "its decoder has a table of its own": not config.decoder.embedding.owns_table,
        "its embedding is factorised": config.encoder.embedding_width == width,
        "its parts differ in dropout": len(dropouts) == 1,
        "its mixers differ in dropout": len({getattr(mixer, "dropout", None) for mixer in mixers}) == 1,
        "its feed-forwards differ in activation": len({layer.feedforward.activation for layer in layers}) == 1,
    }
    return next((reason for reason, holds in checks.items() if not holds), None)


MARIAN = Twin(
    model_type="marian",
    family="transformer",
    prefix="model.",
    encoder=_rows,
    optional={
        "heads.next_token": (
            row(
                "heads.next_token.bias",
                "final_logits_bias",
                change=shaped(lambda theirs: theirs.squeeze(0), lambda ours: ours.unsqueeze(0)),
            ),
        )
    },
    tied={
        "lm_head.weight": "model.shared.weight",
        "model.encoder.embed_tokens.weight": "model.shared.weight",
        "model.decoder.embed_tokens.weight": "model.shared.weight",
    },
    derived=("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"),
    read_config=_read,
    write_config=_write,
)
