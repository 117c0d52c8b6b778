"""Adapters for DeBERTa (v1) and DeBERTa-v2 (v2, v3)."""

from collections.abc import Mapping

from bertsmith.checkpoint.hf.adapter import (
    FamilyAdapter,
    HeadAdapter,
    HfConfig,
    HfSettings,
    first_mixer,
    missing_head_remark,
    not_exportable,
    read_encoder,
    read_heads,
    write_activation,
    write_encoder,
)
from bertsmith.checkpoint.hf.names import Row, linear, reshaped, row
from bertsmith.checkpoint.hf.task_heads import (
    dropout_setting,
    hidden_classifier,
    layers_dropout,
    plain_classifier,
    pooled_classifier,
    span_finder,
    token_tagger,
)
from bertsmith.errors import InputError
from bertsmith.layers.block import BranchConfig
from bertsmith.layers.mixers.disentangled import DisentangledConfig
from bertsmith.layers.positions import RelativeConfig
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import (
    HeadConfig,
    MaskDecoderConfig,
    MaskedTokensConfig,
    PoolerConfig,
    ReplacedTokensConfig,
)

V1, V2 = "deberta", "deberta-v2"


def encoder_rows(config: ModelConfig) -> list[Row]:
    encoder, first = config.encoder, config.encoder.layers[0]
    assert isinstance(first.mixer, DisentangledConfig)
    ours, theirs = "encoder.blocks.{i}", "deberta.encoder.layer.{i}"
    rows = [
        row("encoder.embedding.token_table", "deberta.embeddings.word_embeddings.weight"),
        *linear("encoder.embedding.norm", "deberta.embeddings.LayerNorm"),
        *(_v1_mixer if config.family == V1 else _v2_mixer)(first.mixer, f"{theirs}.attention.self"),
        *linear(f"{ours}.mixer.output", f"{theirs}.attention.output.dense"),
        *linear(f"{ours}.mixer_norm", f"{theirs}.attention.output.LayerNorm"),
        *linear(f"{ours}.feedforward.expand", f"{theirs}.intermediate.dense"),
        *linear(f"{ours}.feedforward.contract", f"{theirs}.output.dense"),
        *linear(f"{ours}.feedforward_norm", f"{theirs}.output.LayerNorm"),
    ]
    if encoder.embedding.positions == "learned":
        rows.append(row("encoder.embedding.position.table", "deberta.embeddings.position_embeddings.weight"))
    if encoder.embedding.types:
        rows.append(row("encoder.embedding.type_table", "deberta.embeddings.token_type_embeddings.weight"))
    if encoder.relative is not None:
        rows.append(row("encoder.relative.table", "deberta.encoder.rel_embeddings.weight"))
        if encoder.relative.has_norm:
            rows += linear("encoder.relative.norm", "deberta.encoder.LayerNorm")
    if first.branch is not None:
        rows += _branch(first.branch.kernel_size)
    return rows


def _v1_mixer(mixer: DisentangledConfig, theirs: str) -> list[Row]:
    heads = mixer.heads
    # theirs: query, key and value of each head in turn; ours: all queries, all keys, all values
    by_part = reshaped(
        lambda weight: weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2),
        lambda weight: weight.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2),
    )
    rows = [
        row("encoder.blocks.{i}.mixer.project.weight", f"{theirs}.in_proj.weight", conversion=by_part),
        row("encoder.blocks.{i}.mixer.project.bias", f"{theirs}.q_bias", f"{theirs}.v_bias"),
    ]
    if mixer.content_to_position:
        rows.append(row("encoder.blocks.{i}.mixer.position_key.weight", f"{theirs}.pos_proj.weight"))
    if mixer.position_to_content:
        rows += linear("encoder.blocks.{i}.mixer.position_query", f"{theirs}.pos_q_proj")
    return rows


def _v2_mixer(mixer: DisentangledConfig, theirs: str) -> list[Row]:
    names = [f"{theirs}.{name}" for name in ("query_proj", "key_proj", "value_proj")]
    rows = linear("encoder.blocks.{i}.mixer.project", *names)
    if mixer.content_to_position and not mixer.shares_projections:
        rows += linear("encoder.blocks.{i}.mixer.position_key", f"{theirs}.pos_key_proj")
    if mixer.position_to_content and not mixer.shares_projections:
        rows += linear("encoder.blocks.{i}.mixer.position_query", f"{theirs}.pos_query_proj")
    return rows


def _branch(kernel_size: int) -> list[Row]:
    # (out, in, taps) there, (out, taps · in) here
    taps_first = reshaped(
        lambda weight: weight.transpose(1, 2).flatten(1),
        lambda weight: weight.unflatten(1, (kernel_size, -1)).transpose(1, 2).contiguous(),
    )
    return [
        row("encoder.blocks.0.branch.weight", "deberta.encoder.conv.conv.weight", conversion=taps_first),
        row("encoder.blocks.0.branch.bias", "deberta.encoder.conv.conv.bias"),
        *linear("encoder.blocks.0.branch.norm", "deberta.encoder.conv.LayerNorm"),
    ]


HEAD_ROWS: dict[str, tuple[Row, ...]] = {
    "heads.pooler": tuple(linear("heads.pooler.project", "pooler.dense")),
    "heads.masked_tokens": (
        *linear("heads.masked_tokens.transform", "cls.predictions.transform.dense"),
        *linear("heads.masked_tokens.norm", "cls.predictions.transform.LayerNorm"),
        row("heads.masked_tokens.bias", "cls.predictions.bias"),
    ),
    "heads.replaced_tokens": (
        *linear("heads.replaced_tokens.transform", "mask_predictions.dense"),
        *linear("heads.replaced_tokens.norm", "mask_predictions.LayerNorm"),
        *linear("heads.replaced_tokens.score", "mask_predictions.classifier"),
    ),
    "heads.mask_decoder": (row("heads.mask_decoder.table", "deberta.embeddings.position_embeddings.weight"),),
}
# official names of the masked-token head, which transformers reads with legacy = false
OFFICIAL_HEAD = {
    "lm_predictions.lm_head.dense.": "cls.predictions.transform.dense.",
    "lm_predictions.lm_head.LayerNorm.": "cls.predictions.transform.LayerNorm.",
    "lm_predictions.lm_head.bias": "cls.predictions.bias",
}


CLAMP = "relative_clamp"
"""Our key in their config.json: "hf" for Hugging Face's clamping of far distances; transformers ignores it."""


def _read(data: HfConfig, parts: frozenset[str], family: str) -> ModelConfig:
    data = data.with_defaults(layer_norm_eps=1e-7, type_vocab_size=0)
    data.allow_only(**_fixed(data, family))
    terms, dropout = _terms(data), float(data["hidden_dropout_prob"])
    mixer = DisentangledConfig(
        heads=data.required("num_attention_heads"),
        content_to_position="c2p" in terms,
        position_to_content="p2c" in terms,
        position_to_content_row="code",
        shares_projections=family == V2 and bool(data.get("share_att_key", False)),
        has_key_bias=family == V2,
        dropout=float(data["attention_probs_dropout_prob"]),
        position_dropout=dropout,
    )
    has_positions = data.get("position_biased_input", True)
    encoder = read_encoder(data, mixer, has_positions=has_positions, relative=_relative(data, family))
    first, *rest = encoder.layers
    activation, epsilon = first.feedforward.activation, first.norm.epsilon
    if family == V2 and data.get("conv_kernel_size", 0) > 0:
        inner = data.activation("conv_act", "tanh")
        branch = BranchConfig(kernel_size=data["conv_kernel_size"], activation=inner, dropout=dropout, epsilon=epsilon)
        layers = (first.model_copy(update={"branch": branch}), *rest)
        encoder = encoder.model_copy(update={"layers": layers})
    heads: dict[str, HeadConfig] = {
        "heads.pooler": PoolerConfig(activation=data.activation("pooler_hidden_act")),
        "heads.masked_tokens": MaskedTokensConfig(activation=activation, epsilon=epsilon),
        "heads.replaced_tokens": ReplacedTokensConfig(activation=activation, adds_first=True, epsilon=epsilon),
        "heads.mask_decoder": MaskDecoderConfig(max_length=encoder.embedding.max_length),
    }
    if has_positions:
        del heads["heads.mask_decoder"]  # then the table belongs to the embedding
    return ModelConfig(family=family, encoder=encoder, heads=read_heads(heads, parts))


def _fixed(data: HfConfig, family: str) -> HfSettings:
    """Settings of which our network supports one value only."""
    width, heads = data.required("hidden_size"), data.required("num_attention_heads")
    fixed: HfSettings = {"embedding_size": width, "pooler_hidden_size": width, "pooler_dropout": 0}
    if family == V1:
        fixed |= {"talking_head": False}
    elif width % heads == 0:
        fixed |= {"attention_head_size": width // heads}
    if data.get("conv_kernel_size", 0) > 0:
        fixed |= {"conv_groups": 1}
    return fixed


def _terms(data: HfConfig) -> list[str]:
    given = data.get("pos_att_type") or []
    terms = [term.strip().lower() for term in (given.split("|") if isinstance(given, str) else given)]
    terms = [term for term in terms if term]
    if not set(terms) <= {"c2p", "p2c"}:
        raise InputError(f"config.json: pos_att_type is {given!r}; allowed: of c2p and p2c")
    if terms and not data.get("relative_attention", False):
        raise InputError(f"config.json: pos_att_type is {given!r}, which needs relative_attention = true")
    return terms


def _relative(data: HfConfig, family: str) -> RelativeConfig | None:
    if not data.get("relative_attention", False):
        return None
    max_distance = data.get("max_relative_positions", -1)
    max_distance = max_distance if max_distance >= 1 else data["max_position_embeddings"]
    buckets = data.get("position_buckets", -1) if family == V2 else -1
    norms = [name.strip() for name in str(data.get("norm_rel_ebd", "none")).lower().split("|")]
    return RelativeConfig(
        span=buckets if buckets > 0 else max_distance,
        max_distance=max_distance if buckets > 0 else None,
        clamp=data.get(CLAMP, "official"),
        has_norm=family == V2 and "layer_norm" in norms,
        epsilon=data["layer_norm_eps"],
    )


def _write(config: ModelConfig) -> HfSettings:
    encoder = config.encoder
    mixer = first_mixer(encoder, DisentangledConfig, config.family)
    if mixer.position_to_content_row != "code":
        row_name = mixer.position_to_content_row
        raise not_exportable(config.family, f"its position_to_content_row is {row_name!r}, not 'code'")
    relative, branch = encoder.relative, encoder.layers[0].branch
    heads = {head.kind: head for head in config.heads}
    data = {
        "architectures": [_architecture(config)],
        **write_encoder(encoder, mixer, config.family),
        "position_biased_input": encoder.embedding.positions == "learned",
        "relative_attention": relative is not None,
        "pos_att_type": ["c2p"] * mixer.content_to_position + ["p2c"] * mixer.position_to_content,
        "legacy": "mask_decoder" not in heads,
    }
    if relative is not None:
        data |= {"max_relative_positions": relative.max_distance or relative.span}
        data |= {CLAMP: relative.clamp} if relative.clamp != "official" else {}
        if config.family == V2:
            data |= {"position_buckets": relative.span if relative.max_distance else -1}
            data |= {"norm_rel_ebd": "layer_norm" if relative.has_norm else "none"}
    if config.family == V2:
        data |= {"share_att_key": mixer.shares_projections}
    if branch is not None:
        data |= {"conv_kernel_size": branch.kernel_size, "conv_act": write_activation(branch.activation)}
    if isinstance(pooler := heads.get("pooler"), PoolerConfig):
        data |= {"pooler_hidden_act": write_activation(pooler.activation)}
    return data


def _architecture(config: ModelConfig) -> str:
    kind = "ForMaskedLM" if any(head.kind == "masked_tokens" for head in config.heads) else "Model"
    return f"Deberta{'V2' if config.family == V2 else ''}{kind}"


def _written(config: ModelConfig) -> Mapping[str, str]:
    """Official names of the head for a model with a mask decoder; the default names otherwise."""
    if not any(head.kind == "mask_decoder" for head in config.heads):
        return {}
    return {legacy: official for official, legacy in OFFICIAL_HEAD.items()}


def _remark(config: ModelConfig) -> str | None:
    if not any(head.kind == "mask_decoder" for head in config.heads):
        return missing_head_remark(config)
    return "transformers has no mask decoder: hidden states are equal, but it fills masks differently"


def _lacks(config: ModelConfig) -> str | None:
    if not {"mask_decoder", "masked_tokens"} <= {head.kind for head in config.heads}:
        return None
    return "transformers has no mask decoder and would fill masks differently"


def _forms(name: str, *, has_choices: bool) -> tuple[HeadAdapter, ...]:
    """Adapters of the task heads: with equal dropouts the pooler belongs to the head, else to the model."""
    reading = dropout_setting("cls_dropout")[0]
    identity: HfSettings = {"pooler_hidden_act": "linear", "pooler_dropout": 0.0}
    plain = plain_classifier(
        f"{name}ForSequenceClassification",
        "pooler.dense",
        identity,
        excludes=frozenset({"heads.pooler"}),
        overrides={"pooler_hidden_act": "gelu"},
    )
    forms: list[HeadAdapter] = [plain]
    for what in ("SequenceClassification", *(["MultipleChoice"] if has_choices else [])):
        is_choice = what == "MultipleChoice"
        hidden = hidden_classifier(
            f"{name}For{what}",
            ("pooler.dense", "classifier"),
            (reading, lambda dropout: {"cls_dropout": dropout, "pooler_dropout": dropout}),
            "pooler_hidden_act",
            is_choice=is_choice,
            excludes=frozenset({"heads.pooler"}),
            overrides={"pooler_dropout": 0},
            matches=lambda data: data.get("pooler_dropout", 0) == reading(data),
        )
        forms += [hidden, pooled_classifier(f"{name}For{what}", dropout_setting("cls_dropout"), is_choice=is_choice)]
    tagging = token_tagger(f"{name}ForTokenClassification", (layers_dropout, lambda dropout: {}))
    return (*forms, tagging, span_finder(f"{name}ForQuestionAnswering"))


def _adapter(family: str) -> FamilyAdapter:
    return FamilyAdapter(
        family=family,
        model_type=family,
        prefix="deberta.",
        unprefixed=("embeddings.", "encoder."),  # the pooler has no prefix
        encoder_rows=encoder_rows,
        optional_rows=HEAD_ROWS,
        tied={
            "cls.predictions.decoder.weight": "deberta.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        read_config=lambda data, parts: _read(data, parts, family),
        write_config=_write,
        aliases={"bert.": "deberta.", **OFFICIAL_HEAD},
        output_aliases=_written,
        remark=_remark,
        missing=_lacks,
        task_heads=_forms("DebertaV2" if family == V2 else "Deberta", has_choices=family == V2),
    )


DEBERTA, DEBERTA_V2 = _adapter(V1), _adapter(V2)
