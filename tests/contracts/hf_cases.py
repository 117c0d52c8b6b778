"""Task heads of every family, their Auto classes, and the outputs of bertsmith and transformers for one batch."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from cases import FAMILIES, SEQ2SEQ, tiny_model
from torch import Tensor
from torch.nn.functional import normalize

import bertsmith.hf  # noqa: F401 (registers the bertsmith classes)
from bertsmith.checkpoint.hf.wrapped import MODELLING
from bertsmith.checkpoint.hf.writing import HfExport
from bertsmith.data.layout import SequenceLayout
from bertsmith.hf import modeling_bertsmith
from bertsmith.models.attach_heads import with_task_head
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.models.heads.task import EmbedderConfig
from bertsmith.models.model import Model
from bertsmith.tasks.default_heads import classifier_head, spans_head, tagger_head

with warnings.catch_warnings():  # transformers' DeBERTa uses torch.jit.script on import
    warnings.simplefilter("ignore", DeprecationWarning)
    from transformers import DebertaModel, DebertaV2Model  # noqa: F401

LABELS = ("bad", "good", "so-so")
ENCODERS = [name for name in FAMILIES if name not in SEQ2SEQ and not name.endswith("-generator")]

TASK_HEADS: dict[str, Callable[[ModelConfig], HeadConfig]] = {
    "classification": lambda config: classifier_head(config, LABELS),
    "regression": lambda config: classifier_head(config, ("score",)),
    "choice": lambda config: classifier_head(config, ("choice",)),
    "tagging": lambda config: tagger_head(config, LABELS),
    "spans": spans_head,
    "embedding": lambda config: EmbedderConfig(),
}

_BY_FAMILY = {
    "classification": {"bert", "albert", "deberta", "deberta-v2", "mpnet"},
    "choice": {"bert", "albert", "electra", "convbert", "deberta-v2", "mpnet"},
    "tagging": {"bert", "albert", "electra", "convbert", "deberta", "deberta-v2", "mpnet"},
}
# transformers' classification heads of ELECTRA and ConvBERT have an additional layer
NATIVE = {**_BY_FAMILY, "regression": _BY_FAMILY["classification"], "spans": _BY_FAMILY["tagging"]}
NATIVE["embedding"] = _BY_FAMILY["tagging"]
NATIVE = {task: {*families, "modern"} for task, families in NATIVE.items()}


def task_model(name: str, task: str, layers: int = 2) -> Model:
    """Build a tiny model of a family with a task head, in float64, with weights large enough to matter."""
    base = tiny_model(name, layers=layers)
    model = with_task_head(base, TASK_HEADS[task](base.config), seed=0).double().eval()
    with torch.no_grad():
        for parameter in model.heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.3)
    return model


def is_native(model: Model, name: str, task: str) -> bool:
    """Return whether a transformers class computes the same; it has no classes for variants of a preset."""
    return " " not in name and model.config.family in NATIVE[task]


def inputs(task: str, *, has_pads: bool = True) -> dict[str, Tensor]:
    """Return three sequences without RoBERTa's padding token 1; `theirs` adds an axis for multiple choice."""
    ids = torch.randint(2, 50, (3, 9), generator=torch.Generator().manual_seed(4))
    lengths = torch.tensor([9, 1, 5] if has_pads else [9, 9, 9])
    mask = (torch.arange(9) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}


def ours(model: Model, inputs: dict[str, Tensor]) -> Tensor:
    """Return the outputs of the bertsmith model, 0 at padding."""
    layout = SequenceLayout.rows(inputs["input_ids"], inputs["attention_mask"])
    return _without_padding(model.outputs(inputs["input_ids"], layout), inputs)


def auto_class(plan: HfExport) -> type:
    """Return the Auto class of an export."""
    name = plan.architecture.partition("For")[2]
    return getattr(transformers, f"AutoModelFor{name}" if name else "AutoModel")


def opened(plan: HfExport, folder: Path, **settings: Any) -> transformers.PreTrainedModel:
    """Load an exported model with `transformers`, in float64."""
    return auto_class(plan).from_pretrained(folder, dtype=torch.float64, **settings).eval()


def opened_alone(plan: HfExport, folder: Path, **settings: Any) -> transformers.PreTrainedModel:
    """Load an exported model with the classes of the file in its folder, in float64; the tests compare its bytes."""
    assert (folder / MODELLING.name).read_bytes() == MODELLING.read_bytes()
    kind = getattr(modeling_bertsmith, plan.architecture)
    return kind.from_pretrained(folder, dtype=torch.float64, **settings).eval()


def theirs(model: transformers.PreTrainedModel, task: str, inputs: dict[str, Tensor]) -> Tensor:
    """Return the outputs of the transformers model in the shape of `ours`, 0 at padding."""
    if task == "choice":
        output = model(**{name: tensor[None] for name, tensor in inputs.items()})
        return output.logits[0, :, None]  # (1, choices) -> (sequences, 1)
    output = model(**inputs)
    if task == "embedding" and model.config.model_type == "bertsmith":
        return output.pooler_output
    if task == "embedding":  # mean pooling, as in sentence-transformers
        is_token = inputs["attention_mask"][..., None]
        return normalize((output.last_hidden_state * is_token).sum(1) / is_token.sum(1), dim=-1)
    logits = torch.stack([output.start_logits, output.end_logits], dim=-1) if task == "spans" else output.logits
    return _without_padding(logits, inputs)


def _without_padding(output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return output * inputs["attention_mask"][..., None] if output.dim() == 3 else output
