"""DeBERTa (v1) and DeBERTa-v2 (v2, v3) as Hugging Face configures them."""

from collections.abc import Mapping
from typing import Any

from bertsmith.checkpoint.hf.deberta_names import HEAD_ROWS, OFFICIAL_HEAD, V1, V2, encoder_rows
from bertsmith.checkpoint.hf.twin import Twin, check_heads, first_mixer, read_activation, write_activation
from bertsmith.errors import InputError
from bertsmith.layers.branch import BranchConfig
from bertsmith.layers.embedding import EmbeddingConfig
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.mixers.disentangled import DisentangledConfig
from bertsmith.layers.norm import NormConfig
from bertsmith.layers.relative import RelativeConfig
from bertsmith.models.config import EncoderConfig, LayerConfig, ModelConfig
from bertsmith.models.heads import (
    HeadConfig,
    MaskDecoderConfig,
    MaskedTokensConfig,
    PoolerConfig,
    ReplacedTokensConfig,
)

CLAMP = "relative_clamp"
"""A key of ours in their config.json: "hf" for Hugging Face's rows of far distances; they themselves ignore it."""


def _read(data: dict[str, Any], parts: frozenset[str], family: str) -> ModelConfig:
    try:
        width, layers, heads = data["hidden_size"], data["num_hidden_layers"], data["num_attention_heads"]
        vocabulary, neurons = data["vocab_size"], data["intermediate_size"]
    except KeyError as missing:
        raise InputError(f"config.json lacks {missing.args[0]!r}") from None
    for key, only in _fixed(data, family, width, heads).items():
        if data.get(key, only) not in (only, None):
            raise InputError(f"config.json: {key} is {data[key]!r}; allowed: {only!r}")
    terms, relative = _terms(data), _relative(data, family)
    norm, dropout = NormConfig(epsilon=data.get("layer_norm_eps", 1e-7)), float(data.get("hidden_dropout_prob", 0.1))
    has_positions = data.get("position_biased_input", True)
    embedding = EmbeddingConfig(
        positions="learned" if has_positions else "none",
        longest=data.get("max_position_embeddings", 512),
        types=data.get("type_vocab_size", 0),
        epsilon=norm.epsilon,
        dropout=dropout,
    )
    mixer = DisentangledConfig(
        heads=heads,
        content_to_position="c2p" in terms,
        position_to_content="p2c" in terms,
        shares_projections=family == V2 and bool(data.get("share_att_key", False)),
        has_key_bias=family == V2,
        dropout=float(data.get("attention_probs_dropout_prob", 0.1)),
        position_dropout=dropout,
    )
    activation = read_activation(data.get("hidden_act", "gelu"), "config.json")
    feedforward = FeedForwardConfig(neurons=neurons, activation=activation)
    layer = LayerConfig(mixer=mixer, feedforward=feedforward, norm=norm, dropout=dropout)
    first = layer.model_copy(update={"branch": _read_branch(data, dropout, norm.epsilon) if family == V2 else None})
    encoder = EncoderConfig(
        vocabulary=vocabulary,
        width=width,
        embedding=embedding,
        layers=(first, *(layer,) * (layers - 1)),
        relative=relative,
        deviation=data.get("initializer_range", 0.02),
    )
    made: dict[str, HeadConfig] = {
        "heads.pooler": PoolerConfig(activation=read_activation(data.get("pooler_hidden_act", "gelu"), "config.json")),
        "heads.masked_tokens": MaskedTokensConfig(activation=activation, epsilon=norm.epsilon),
        "heads.replaced_tokens": ReplacedTokensConfig(activation=activation, adds_first=True, epsilon=norm.epsilon),
        "heads.mask_decoder": MaskDecoderConfig(longest=embedding.longest),
    }
    if has_positions:
        del made["heads.mask_decoder"]  # then the table is the embedding's
    return ModelConfig(family=family, encoder=encoder, heads=tuple(made[part] for part in sorted(parts & made.keys())))


def _fixed(data: dict[str, Any], family: str, width: int, heads: int) -> dict[str, Any]:
    """The settings of theirs of which only one value has a place here."""
    fixed: dict[str, Any] = {"embedding_size": width, "pooler_hidden_size": width, "pooler_dropout": 0}
    if family == V1:
        fixed |= {"talking_head": False}
    elif width % heads == 0:
        fixed |= {"attention_head_size": width // heads}
    if data.get("conv_kernel_size", 0) > 0:
        fixed |= {"conv_groups": 1}
    return fixed


def _terms(data: dict[str, Any]) -> list[str]:
    given = data.get("pos_att_type") or []
    terms = [term.strip().lower() for term in (given.split("|") if isinstance(given, str) else given)]
    terms = [term for term in terms if term]
    if not set(terms) <= {"c2p", "p2c"}:
        raise InputError(f"config.json: pos_att_type is {given!r}; allowed: of c2p and p2c")
    if terms and not data.get("relative_attention", False):
        raise InputError(f"config.json: pos_att_type is {given!r}, which needs relative_attention = true")
    return terms


def _relative(data: dict[str, Any], family: str) -> RelativeConfig | None:
    if not data.get("relative_attention", False):
        return None
    farthest = data.get("max_relative_positions", -1)
    farthest = farthest if farthest >= 1 else data.get("max_position_embeddings", 512)
    buckets = data.get("position_buckets", -1) if family == V2 else -1
    norms = [name.strip() for name in str(data.get("norm_rel_ebd", "none")).lower().split("|")]
    return RelativeConfig(
        span=buckets if buckets > 0 else farthest,
        farthest=farthest if buckets > 0 else None,
        clamp=data.get(CLAMP, "official"),
        has_norm=family == V2 and "layer_norm" in norms,
        epsilon=data.get("layer_norm_eps", 1e-7),
    )


def _read_branch(data: dict[str, Any], dropout: float, epsilon: float) -> BranchConfig | None:
    taps = data.get("conv_kernel_size", 0)
    if taps <= 0:
        return None
    activation = read_activation(data.get("conv_act", "tanh"), "config.json")
    return BranchConfig(taps=taps, activation=activation, dropout=dropout, epsilon=epsilon)


def _write(config: ModelConfig) -> dict[str, Any]:
    encoder, layer = config.encoder, config.encoder.layers[-1]
    mixer, relative = first_mixer(encoder, DisentangledConfig, config.family), encoder.relative
    check_heads(mixer.heads, mixer.head_width, encoder.width, config.family)
    branch = encoder.layers[0].branch
    heads = {head.kind: head for head in config.heads}
    data = {
        "architectures": [_architecture(config)],
        "model_type": config.family,
        "vocab_size": encoder.vocabulary,
        "hidden_size": encoder.width,
        "num_hidden_layers": len(encoder.layers),
        "num_attention_heads": mixer.heads,
        "intermediate_size": layer.feedforward.neurons,
        "hidden_act": write_activation(layer.feedforward.activation),
        "hidden_dropout_prob": layer.dropout,
        "attention_probs_dropout_prob": mixer.dropout,
        "max_position_embeddings": encoder.embedding.longest,
        "type_vocab_size": encoder.embedding.types,
        "initializer_range": encoder.deviation,
        "layer_norm_eps": layer.norm.epsilon,
        "position_biased_input": encoder.embedding.positions == "learned",
        "relative_attention": relative is not None,
        "pos_att_type": ["c2p"] * mixer.content_to_position + ["p2c"] * mixer.position_to_content,
        "legacy": "mask_decoder" not in heads,
        "tie_word_embeddings": True,
    }
    if relative is not None:
        data |= {"max_relative_positions": relative.farthest or relative.span}
        data |= {CLAMP: relative.clamp} if relative.clamp != "official" else {}
        if config.family == V2:
            data |= {"position_buckets": relative.span if relative.farthest else -1}
            data |= {"norm_rel_ebd": "layer_norm" if relative.has_norm else "none"}
    if config.family == V2:
        data |= {"share_att_key": mixer.shares_projections}
    if branch is not None:
        data |= {"conv_kernel_size": branch.taps, "conv_act": write_activation(branch.activation)}
    if isinstance(pooler := heads.get("pooler"), PoolerConfig):
        data |= {"pooler_hidden_act": write_activation(pooler.activation)}
    return data


def _architecture(config: ModelConfig) -> str:
    kind = "ForMaskedLM" if any(head.kind == "masked_tokens" for head in config.heads) else "Model"
    return f"Deberta{'V2' if config.family == V2 else ''}{kind}"


def _written(config: ModelConfig) -> Mapping[str, str]:
    """A model with a mask decoder is written with the official names of its head, others as transformers' default."""
    if not any(head.kind == "mask_decoder" for head in config.heads):
        return {}
    return {legacy: official for official, legacy in OFFICIAL_HEAD.items()}


def _twin(family: str) -> Twin:
    return Twin(
        family=family,
        model_type=family,
        prefix="deberta.",
        bare=("embeddings.", "encoder."),  # the pooler stands beside the encoder
        encoder=encoder_rows,
        optional=HEAD_ROWS,
        tied={
            "cls.predictions.decoder.weight": "deberta.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        read_config=lambda data, parts: _read(data, parts, family),
        write_config=_write,
        aliases={"bert.": "deberta.", **OFFICIAL_HEAD},
        written=_written,
    )


DEBERTA, DEBERTA_V2 = _twin(V1), _twin(V2)
