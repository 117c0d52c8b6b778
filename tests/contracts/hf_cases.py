"""Heads of tasks as every family has them, their Auto classes, and what both sides say of one batch."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from cases import FAMILIES, tiny_model
from torch import Tensor
from torch.nn.functional import normalize

import bertsmith.hf  # noqa: F401 (our folders open from here on)
from bertsmith.checkpoint.hf.writing import HfExport
from bertsmith.data.layout import SequenceLayout
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.models.heads.task import EmbedderConfig, SpansConfig, TaggerConfig
from bertsmith.models.model import Model
from bertsmith.tasks.texts import classifier_head

with warnings.catch_warnings():  # of torch.jit.script, which their DeBERTa uses when it is first imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from transformers import DebertaModel, DebertaV2Model  # noqa: F401

LABELS = ("bad", "good", "so-so")
ENCODERS = [name for name in FAMILIES if name != "transformer-tiny" and not name.endswith("-generator")]

TASK_HEADS: dict[str, Callable[[ModelConfig], HeadConfig]] = {
    "classification": lambda config: classifier_head(config, LABELS),
    "regression": lambda config: classifier_head(config, ("score",)),
    "choice": lambda config: classifier_head(config, ("choice",)),
    "tagging": lambda config: TaggerConfig(labels=LABELS, dropout=config.encoder.embedding.dropout),
    "spans": lambda config: SpansConfig(),
    "embedding": lambda config: EmbedderConfig(),
}

_BY_FAMILY = {
    "classification": {"bert", "albert", "deberta", "deberta-v2"},
    "choice": {"bert", "albert", "electra", "convbert", "deberta-v2"},
    "tagging": {"bert", "albert", "electra", "convbert", "deberta", "deberta-v2"},
}
# theirs read ELECTRA and ConvBERT through a layer of the head's own, ModernBERT through a norm
NATIVE = {**_BY_FAMILY, "regression": _BY_FAMILY["classification"], "spans": _BY_FAMILY["tagging"]}
NATIVE["embedding"] = _BY_FAMILY["tagging"] | {"modern"}


def task_model(name: str, task: str, layers: int = 2) -> Model:
    """A tiny model of a family with the head of a task, in float64, with weights that all matter."""
    base = tiny_model(name, layers=layers)
    model = with_task_head(base, TASK_HEADS[task](base.config), seed=0).double().eval()
    with torch.no_grad():
        for parameter in model.heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.3)
    return model


def is_native(model: Model, name: str, task: str) -> bool:
    """Whether a class of theirs computes the same; variants of a preset are networks that they do not have."""
    return " " not in name and model.config.family in NATIVE[task]


def inputs(task: str, *, has_pads: bool = True) -> dict[str, Tensor]:
    """Three sequences for us; for choices of theirs an axis more is put in."""
    ids = torch.randint(1, 50, (3, 9), generator=torch.Generator().manual_seed(4))
    lengths = torch.tensor([9, 1, 5] if has_pads else [9, 9, 9])
    mask = (torch.arange(9) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}


def ours(model: Model, given: dict[str, Tensor]) -> Tensor:
    """What our head says, 0 at pads."""
    layout = SequenceLayout.rows(given["input_ids"], given["attention_mask"])
    return _without_pads(model.outputs(given["input_ids"], layout), given)


def auto_class(plan: HfExport) -> type:
    """The Auto class that opens what was written."""
    name = plan.architecture.partition("For")[2]
    return getattr(transformers, f"AutoModelFor{name}" if name else "AutoModel")


def opened(plan: HfExport, folder: Path, **settings: Any) -> transformers.PreTrainedModel:
    """The model as `transformers` opens it, in float64."""
    return auto_class(plan).from_pretrained(folder, dtype=torch.float64, **settings).eval()


def theirs(model: transformers.PreTrainedModel, task: str, given: dict[str, Tensor]) -> Tensor:
    """What they say, in the shape of ours, 0 at pads."""
    if task == "choice":
        said = model(**{name: tensor[None] for name, tensor in given.items()})
        return said.logits[0, :, None]  # (1, choices) -> (sequences, 1)
    said = model(**given)
    if task == "embedding" and model.config.model_type == "bertsmith":
        return said.pooler_output
    if task == "embedding":  # what sentence-transformers does with their states
        is_token = given["attention_mask"][..., None]
        return normalize((said.last_hidden_state * is_token).sum(1) / is_token.sum(1), dim=-1)
    made = torch.stack([said.start_logits, said.end_logits], dim=-1) if task == "spans" else said.logits
    return _without_pads(made, given)


def _without_pads(said: Tensor, given: dict[str, Tensor]) -> Tensor:
    return said * given["attention_mask"][..., None] if said.dim() == 3 else said
