"""Replace the heads of a model by pre-training heads or by the head of a task."""

import copy

from bertsmith.models.build import build
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HEADS, HeadConfig, SequenceHeadConfig, TaskHeadConfig
from bertsmith.models.heads.task import EmbedderConfig
from bertsmith.models.model import Model
from bertsmith.models.published import PRESETS
from bertsmith.models.seq2seq import Seq2Seq


def with_heads(config: ModelConfig, kinds: tuple[str, ...]) -> ModelConfig:
    """Return the config with exactly these heads; existing ones keep their settings, as does a mask decoder."""
    given = {head.kind: head for head in config.heads}
    required = [*kinds, *(["mask_decoder"] if "masked_tokens" in kinds and "mask_decoder" in given else [])]
    return config.changed(heads=tuple(given.get(kind) or default_head(config, kind) for kind in required))


def default_head(config: ModelConfig, kind: str) -> HeadConfig:
    """Return the head's settings from the published sizes of the same family, or else its defaults."""
    published = (architecture(size) for architecture, size in PRESETS.values())
    known = (head for other in published if other.family == config.family for head in other.heads)
    fresh: dict[str, type[HeadConfig]] = HEADS
    return next((head for head in known if head.kind == kind), None) or fresh[kind]()  # type: ignore[call-arg]


def fit_heads(model: Model, config: ModelConfig, name: str, *, seed: int) -> tuple[Model, list[str]]:
    """Return the model with the heads of a config, and notices about fresh and dropped heads.

    Heads that the model already has keep their weights; `name` is the model's name in the notices.
    """
    fresh = build(config.changed(generator=None), seed=seed)
    missing = [kind for kind in fresh.heads if kind not in model.heads]
    unused = [kind for kind in model.heads if kind not in fresh.heads]
    for kind in fresh.heads:
        if kind in model.heads:
            fresh.heads[kind] = copy.deepcopy(model.heads[kind])
    fresh.encoder, fresh.generator, fresh.config = model.encoder, model.generator, config
    if isinstance(fresh, Seq2Seq) and isinstance(model, Seq2Seq):
        fresh.decoder = model.decoder
    fresh.tokenizer = model.tokenizer
    notices = [f"{name!r} lacks the head {kind}: it starts with fresh weights" for kind in missing]
    if unused:
        notices.append(f"heads of {name!r} that the objective does not train are left out: {', '.join(unused)}")
    return fresh, notices


def with_task_head(model: Model, head: HeadConfig, *, seed: int) -> Model:
    """Return the model with a task head, the pooler if that head reads it, and no pre-training heads.

    A head with the same network keeps its weights, so that fine-tuning can be continued.
    """
    needs_pooler = isinstance(head, SequenceHeadConfig) and head.pooling == "pooler"
    poolers = [own for own in model.config.heads if own.kind == "pooler" and needs_pooler]
    for own in model.config.heads:
        if isinstance(own, TaskHeadConfig) and not _have_same_network(own, head):
            del model.heads[own.kind]
    fitted, _ = fit_heads(model, model.config.changed(heads=(*poolers, head)), "the model", seed=seed)
    fitted.config, fitted.generator = fitted.config.changed(generator=None), None
    return fitted


def _have_same_network(own: HeadConfig, head: HeadConfig) -> bool:
    """Whether two heads compute the same; embedders may differ in the texts that they take."""
    if isinstance(own, EmbedderConfig) and isinstance(head, EmbedderConfig):
        return own.changed(texts=head.texts) == head
    return own == head
