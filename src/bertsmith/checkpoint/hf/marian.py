"""The Transformer (Vaswani et al. 2017) as Hugging Face's Marian."""

from bertsmith.checkpoint.hf.adapter import (
    FamilyAdapter,
    HfConfig,
    HfSettings,
    check_heads,
    first_mixer,
    not_exportable,
    write_activation,
)
from bertsmith.checkpoint.hf.names import Row, linear, reshaped, row
from bertsmith.layers.elementwise import NormConfig
from bertsmith.layers.embedding import EmbeddingConfig
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.mixers.full import FullConfig
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


def _read(data: HfConfig, parts: frozenset[str]) -> ModelConfig:
    data.allow_only(share_encoder_decoder_embeddings=True, tie_word_embeddings=True)
    data.allow_only(activation_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0)
    heads = (NextTokenConfig(has_bias="heads.next_token" in parts),)
    encoder, decoder = _read_stack(data, "encoder"), _read_stack(data, "decoder")
    return ModelConfig(family="transformer", encoder=encoder, decoder=decoder, heads=heads)


def _read_stack(data: HfConfig, stack: str) -> EncoderConfig:
    width, vocabulary = data.required("d_model"), data.required("vocab_size")
    heads, neurons = data.required(f"{stack}_attention_heads"), data.required(f"{stack}_ffn_dim")
    attention = FullConfig(heads=heads, dropout=float(data.get("attention_dropout", 0.0)))
    dropout = float(data.get("dropout", 0.1))
    activation = data.activation("activation_function")
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
        max_length=data.get("max_position_embeddings", 1024),
        types=0,
        is_scaled=bool(data.get("scale_embedding", False)),
        has_norm=False,
        dropout=dropout,
        table="given" if is_decoder else "own",
    )
    return EncoderConfig(
        vocabulary=vocabulary,
        width=width,
        embedding=embedding,
        layers=(layer,) * data.required(f"{stack}_layers"),
        init_std=data.get("init_std", 0.02),
    )


def _write(config: ModelConfig) -> HfSettings:
    encoder, decoder = config.encoder, config.decoder
    if decoder is None:
        raise not_exportable("marian", "it has no decoder")
    data: HfSettings = {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "is_encoder_decoder": True,
        "vocab_size": encoder.vocabulary,
        "decoder_vocab_size": encoder.vocabulary,
        "d_model": encoder.width,
        "activation_function": write_activation(encoder.layers[0].feedforward.activation),
        "dropout": encoder.layers[0].dropout,
        "attention_dropout": first_mixer(encoder, FullConfig, "marian").dropout,
        "activation_dropout": 0.0,
        "max_position_embeddings": encoder.embedding.max_length,
        "scale_embedding": encoder.embedding.is_scaled,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        "init_std": encoder.init_std,
        # unknown without a tokenizer; the defaults of the class would be outside the vocabulary
        **dict.fromkeys(("pad_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id"), 0),
    }
    for name, stack in (("encoder", encoder), ("decoder", decoder)):
        mixer = first_mixer(stack, FullConfig, "marian")
        check_heads(mixer.heads, mixer.head_width, stack.width, "marian")
        data[f"{name}_layers"] = len(stack.layers)
        data[f"{name}_attention_heads"] = mixer.heads
        data[f"{name}_ffn_dim"] = stack.layers[0].feedforward.neurons
    return data


MARIAN = FamilyAdapter(
    model_type="marian",
    family="transformer",
    prefix="model.",
    encoder_rows=_rows,
    optional_rows={
        "heads.next_token": (
            row(
                "heads.next_token.bias",
                "final_logits_bias",
                conversion=reshaped(lambda theirs: theirs.squeeze(0), lambda ours: ours.unsqueeze(0)),
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
