"""Folders of ours for networks that no class of `transformers` computes: any model, any head.

`bertsmith.hf` opens them, and so does the file `modeling_bertsmith.py` in the folder (`trust_remote_code=True`), which
needs nothing of ours, except for the networks that `standalone_refusal` names.
"""

import shutil
from pathlib import Path

import bertsmith
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
WITH_PACKAGE = "after `import bertsmith.hf`"
ALONE = f"with trust_remote_code=True, or {WITH_PACKAGE}"
MODELLING = Path(bertsmith.__file__).parent / "hf" / "modeling_bertsmith.py"
"""The file that opens a folder without our package; transformers imports it from there."""
_AUTO_CLASSES = {
    "AutoModel": "Model",
    **{
        f"AutoModelFor{task}": f"For{task}"
        for task in (
            *("CausalLM", "MaskedLM", "PreTraining"),
            *("MultipleChoice", "QuestionAnswering", "SequenceClassification", "TokenClassification"),
        )
    },
}

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


def standalone_refusal(config: ModelConfig) -> str | None:
    """Describe the part of a network that modeling_bertsmith.py does not compute, or return None."""
    encoder = config.encoder
    if config.decoder is not None:
        return "a decoder"
    if config.quantisation is not None:
        return "simulated quantisation"
    if encoder.equilibrium is not None:
        return "an equilibrium"
    if encoder.embedding.table != "own":
        return f"an embedding whose table is {encoder.embedding.table!r}"
    if any(head.kind == "chart" for head in config.heads):
        return "a chart head"
    for layer in encoder.layers:
        if layer.mixer.kind == "multi_linear":
            return "a mixer of kind 'multi_linear'"
        if getattr(layer.mixer, "sparse", None) is not None:
            return "sparse attention"
    return None


def opening(config: ModelConfig) -> str:
    """Explain how transformers opens the folder of a network."""
    return ALONE if standalone_refusal(config) is None else WITH_PACKAGE


def wrapped_settings(config: ModelConfig, architecture: str) -> HfSettings:
    """Content of config.json: our config, and the settings that `transformers` expects of every model."""
    encoder, head, refusal = config.encoder, task_head(config), standalone_refusal(config)
    classes = {auto: f"{MODELLING.stem}.Bertsmith{name}" for auto, name in _AUTO_CLASSES.items()}
    return {
        "architectures": [architecture],
        "model_type": MODEL_TYPE,
        "auto_map": {"AutoConfig": f"{MODELLING.stem}.BertsmithConfig", **classes},
        "bertsmith": FORMAT,
        "model": config.plain(),
        "vocab_size": encoder.vocabulary,
        "hidden_size": encoder.width,
        "num_hidden_layers": len(encoder.layers),
        "max_position_embeddings": encoder.embedding.max_length,
        "is_encoder_decoder": config.decoder is not None,
        **({} if refusal is None else {"not_standalone": refusal}),
        **({} if head is None else label_settings(head)),
    }


def check_wrappable(model: Model) -> None:
    """Raise if the model could not be restored from its config."""
    odd = sorted(set(model.heads) ^ {head.kind for head in model.config.heads})
    if odd:
        raise InputError(f"the heads of this model differ from its config: only one of them has {odd[0]!r}")


def write_wrapped(model: Model, folder: Path, settings: HfSettings) -> None:
    """Write config.json, the weights under our own names, and the file that opens them without our package."""
    write_json(folder / "config.json", settings)
    shutil.copyfile(MODELLING, folder / MODELLING.name)
    write_tensors(folder / "model.safetensors", tensors_of(model))
