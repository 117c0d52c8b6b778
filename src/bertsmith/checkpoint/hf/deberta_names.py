"""The tensors of DeBERTa (v1) and DeBERTa-v2 (v2, v3) as Hugging Face and the official files name them."""

from bertsmith.checkpoint.names import Row, linear, row, shaped
from bertsmith.layers.mixers.disentangled import DisentangledConfig
from bertsmith.models.config import ModelConfig

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
        rows += _branch(first.branch.taps)
    return rows


def _v1_mixer(mixer: DisentangledConfig, theirs: str) -> list[Row]:
    heads = mixer.heads
    # theirs go head by head, query, key and value of each in turn; ours part by part
    by_part = shaped(
        lambda weight: weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2),
        lambda weight: weight.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2),
    )
    rows = [
        row("encoder.blocks.{i}.mixer.project.weight", f"{theirs}.in_proj.weight", change=by_part),
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


def _branch(taps: int) -> list[Row]:
    # (out, in, taps) there, (out, taps · in) here
    taps_first = shaped(
        lambda weight: weight.transpose(1, 2).flatten(1),
        lambda weight: weight.unflatten(1, (taps, -1)).transpose(1, 2).contiguous(),
    )
    return [
        row("encoder.blocks.0.branch.weight", "deberta.encoder.conv.conv.weight", change=taps_first),
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
# the official names of the head over the vocabulary, which transformers reads with legacy = false
OFFICIAL_HEAD = {
    "lm_predictions.lm_head.dense.": "cls.predictions.transform.dense.",
    "lm_predictions.lm_head.LayerNorm.": "cls.predictions.transform.LayerNorm.",
    "lm_predictions.lm_head.bias": "cls.predictions.bias",
}
