"""Adapter for ModernBERT."""

from bertsmith.checkpoint.hf.adapter import (
    FamilyAdapter,
    HfConfig,
    HfSettings,
    check_heads,
    not_exportable,
    read_heads,
    write_activation,
)
from bertsmith.checkpoint.hf.names import Row, row
from bertsmith.checkpoint.hf.task_heads import prediction_heads
from bertsmith.errors import InputError
from bertsmith.layers.elementwise import NormConfig
from bertsmith.layers.embedding import EmbeddingConfig
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.models.config import EncoderConfig, LayerConfig, ModelConfig
from bertsmith.models.heads import HeadConfig, MaskedTokensConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"
_OLD_NAMES = {_FULL: "global_rope_theta", _SLIDING: "local_rope_theta"}
_THETAS = {_FULL: 160_000.0, _SLIDING: 10_000.0}
_NO_BIASES = dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias"), False)
_NO_DROPOUT = dict.fromkeys(("attention_dropout", "mlp_dropout"), 0.0)  # applied elsewhere than ours
_UNKNOWN_IDS = dict.fromkeys(f"{role}_token_id" for role in ("pad", "bos", "eos", "cls", "sep"))


def _rows(config: ModelConfig) -> list[Row]:
    ours, theirs = "encoder.blocks.{i}", "model.layers.{i}"
    normed = [index for index, layer in enumerate(config.encoder.layers) if layer.has_mixer_norm]
    return [
        row("encoder.embedding.token_table", "model.embeddings.tok_embeddings.weight"),
        row("encoder.embedding.norm.weight", "model.embeddings.norm.weight"),
        row(f"{ours}.mixer.project.weight", f"{theirs}.attn.Wqkv.weight"),
        row(f"{ours}.mixer.output.weight", f"{theirs}.attn.Wo.weight"),
        row(f"{ours}.feedforward.expand.weight", f"{theirs}.mlp.Wi.weight"),
        row(f"{ours}.feedforward.contract.weight", f"{theirs}.mlp.Wo.weight"),
        row(f"{ours}.feedforward_norm.weight", f"{theirs}.mlp_norm.weight"),
        *(row(f"encoder.blocks.{i}.mixer_norm.weight", f"model.layers.{i}.attn_norm.weight") for i in normed),
        row("encoder.final_norm.weight", "model.final_norm.weight"),
    ]


def _read(data: HfConfig, parts: frozenset[str]) -> ModelConfig:
    data.allow_only(**_NO_BIASES, **_NO_DROPOUT, decoder_bias=True, tie_word_embeddings=True)
    if "heads.masked_tokens" in parts:
        data.allow_only(classifier_bias=False)
    width, layers = data.required("hidden_size"), data.required("num_hidden_layers")
    norm = NormConfig(placement="pre", epsilon=data.get("norm_eps", 1e-5), has_bias=False)
    neurons, activation = data.required("intermediate_size"), data.activation("hidden_activation")
    feedforward = FeedForwardConfig(neurons=neurons, activation=activation, is_gated=True, has_bias=False)
    full = FullConfig(
        heads=data.required("num_attention_heads"), dropout=0.0, rotary=_read_theta(data, _FULL), has_bias=False
    )
    sliding = full.changed(rotary=_read_theta(data, _SLIDING), window=data.get("local_attention", 128) // 2)
    mixers = {_FULL: full, _SLIDING: sliding}
    stack = tuple(
        LayerConfig(mixer=mixers[kind], feedforward=feedforward, norm=norm, has_mixer_norm=index > 0, dropout=0.0)
        for index, kind in enumerate(_read_kinds(data, layers))
    )
    embedding = EmbeddingConfig(
        positions="none",
        max_length=data.get("max_position_embeddings", 8192),
        types=0,
        epsilon=norm.epsilon,
        has_bias=False,
        dropout=float(data.get("embedding_dropout", 0.0)),
    )
    encoder = EncoderConfig(
        vocabulary=data.required("vocab_size"),
        width=width,
        embedding=embedding,
        layers=stack,
        final_norm=norm,
        init_std=data.get("initializer_range", 0.02),
        scales_outputs=True,
    )
    head = MaskedTokensConfig(activation=data.activation("classifier_activation"), epsilon=norm.epsilon, has_bias=False)
    heads: dict[str, HeadConfig] = {"heads.masked_tokens": head}
    return ModelConfig(family="modern", encoder=encoder, heads=read_heads(heads, parts))


def _read_kinds(data: HfConfig, layers: int) -> list[str]:
    """Kind of each layer, full or sliding attention; old files give the interval of full layers instead."""
    every = data.get("global_attn_every_n_layers") or 3
    kinds = data.get("layer_types") or [_SLIDING if index % every else _FULL for index in range(layers)]
    foreign = [kind for kind in kinds if kind not in _THETAS]
    if foreign or len(kinds) != layers:
        raise InputError(f"config.json: layer_types is {kinds}; allowed: {layers} times {_FULL!r} or {_SLIDING!r}")
    return list(kinds)


def _read_theta(data: HfConfig, kind: str) -> float:
    settings = (data.get("rope_parameters") or {}).get(kind) or {}
    HfConfig(settings).allow_only(rope_type="default")
    data.allow_only(rope_scaling=None)
    return float(settings.get("rope_theta") or data.get(_OLD_NAMES[kind]) or _THETAS[kind])


def _write(config: ModelConfig) -> HfSettings:
    encoder, layer = config.encoder, config.encoder.layers[0]
    mixers = [layer.mixer for layer in encoder.layers if isinstance(layer.mixer, FullConfig)]
    if len(mixers) < len(encoder.layers):
        raise not_exportable("modernbert", "not all of its mixers are full attention")
    check_heads(mixers[0].heads, mixers[0].head_width, encoder.width, "modernbert")
    if layer.has_mixer_norm:
        reason = "its first layer has a norm before the attention, as in a sub-network without the original first layer"
        raise not_exportable("modernbert", reason)
    kinds = [_FULL if mixer.window is None else _SLIDING for mixer in mixers]
    firsts = dict(reversed(list(zip(kinds, mixers, strict=True))))
    thetas = {kind: firsts[kind].rotary if kind in firsts else _THETAS[kind] for kind in _THETAS}
    sliding = firsts[_SLIDING].window if _SLIDING in firsts else None
    heads = {head.kind: head for head in config.heads}
    head = heads.get("masked_tokens", MaskedTokensConfig())
    assert isinstance(head, MaskedTokensConfig)
    return {
        "architectures": ["ModernBertForMaskedLM" if "masked_tokens" in heads else "ModernBertModel"],
        "model_type": "modernbert",
        "vocab_size": encoder.vocabulary,
        "hidden_size": encoder.width,
        "num_hidden_layers": len(encoder.layers),
        "num_attention_heads": mixers[0].heads,
        "intermediate_size": layer.feedforward.neurons,
        "hidden_activation": write_activation(layer.feedforward.activation),
        "classifier_activation": write_activation(head.activation),
        "max_position_embeddings": encoder.embedding.max_length,
        "layer_types": kinds,
        "local_attention": 2 * (sliding or 64),
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
        "norm_eps": layer.norm.epsilon,
        "initializer_range": encoder.init_std,
        "embedding_dropout": encoder.embedding.dropout,
        **_NO_BIASES,
        "classifier_bias": False,
        **_NO_DROPOUT,
        "decoder_bias": True,
        "tie_word_embeddings": True,
        **_UNKNOWN_IDS,  # the defaults of the class would be outside the vocabulary
    }


MODERNBERT = FamilyAdapter(
    model_type="modernbert",
    family="modern",
    prefix="model.",
    encoder_rows=_rows,
    optional_rows={
        "heads.masked_tokens": (
            row("heads.masked_tokens.bias", "decoder.bias"),  # the other two are in the task classes as well
            row("heads.masked_tokens.transform.weight", "head.dense.weight"),
            row("heads.masked_tokens.norm.weight", "head.norm.weight"),
        )
    },
    tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    unprefixed=("embeddings.", "layers.", "final_norm."),
    read_config=_read,
    write_config=_write,
    task_heads=prediction_heads("ModernBert"),
)
