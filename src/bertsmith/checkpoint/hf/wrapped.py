"""Folders of ours that `transformers` opens after `import bertsmith.hf`: any model, any head."""

from pathlib import Path

from bertsmith.checkpoint.files import tensors_of, write_tensors
from bertsmith.checkpoint.hf.adapter import HfSettings
from bertsmith.checkpoint.hf.task_heads import is_choice, label_settings
from bertsmith.errors import InputError
from bertsmith.files import write_json
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig, TaskHeadConfig
from bertsmith.models.model import Model

MODEL_TYPE = "bertsmith"
FORMAT = 1
"""Version of our folders, under "bertsmith" in config.json."""
OPENING = "import bertsmith.hf; then AutoModel.from_pretrained and the other Auto classes of transformers open it"

_CLASSES = {"tagger": "TokenClassification", "spans": "QuestionAnswering", "chart": None, "embedder": None}


def architecture_of(config: ModelConfig, task_kind: str | None = None) -> str:
    """Name of the class of `bertsmith.hf` for a model."""
    prefix = "Bertsmith"
    if config.decoder is not None:
        return f"{prefix}ForSeq2SeqLM"
    head = task_head(config)
    if head is not None:
        what = _CLASSES.get(head.kind, "MultipleChoice" if is_choice(head, task_kind) else "SequenceClassification")
        return f"{prefix}Model" if what is None else f"{prefix}For{what}"
    kinds = {head.kind for head in config.heads}
    if "masked_tokens" in kinds or "next_token" in kinds:
        is_causal = "next_token" in kinds or config.encoder.layers[0].mixer.is_causal
        return f"{prefix}ForCausalLM" if is_causal else f"{prefix}ForMaskedLM"
    return f"{prefix}ForPreTraining" if "replaced_tokens" in kinds else f"{prefix}Model"


def task_head(config: ModelConfig) -> HeadConfig | None:
    """Config of the task head, or None."""
    return next((head for head in config.heads if isinstance(head, TaskHeadConfig)), None)


def wrapped_settings(config: ModelConfig, architecture: str) -> HfSettings:
    """Content of config.json: our config, and the settings that `transformers` expects of every model."""
    encoder, head = config.encoder, task_head(config)
    return {
        "architectures": [architecture],
        "model_type": MODEL_TYPE,
        "bertsmith": FORMAT,
        "model": config.plain(),
        "vocab_size": encoder.vocabulary,
        "hidden_size": encoder.width,
        "num_hidden_layers": len(encoder.layers),
        "max_position_embeddings": encoder.embedding.max_length,
        "is_encoder_decoder": config.decoder is not None,
        **({} if head is None else label_settings(head)),
    }


def check_wrappable(model: Model) -> None:
    """Raise if the model could not be restored from its config."""
    odd = sorted(set(model.heads) ^ {head.kind for head in model.config.heads})
    if odd:
        raise InputError(f"the heads of this model differ from its config: only one of them has {odd[0]!r}")


def write_wrapped(model: Model, folder: Path, settings: HfSettings) -> None:
    """Write config.json and the weights under our own names."""
    write_json(folder / "config.json", settings)
    write_tensors(folder / "model.safetensors", tensors_of(model))
