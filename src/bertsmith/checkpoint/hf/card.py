"""The card of an exported folder, README.md: what it is, what opens it, what it answers."""

from typing import Any

from bertsmith.checkpoint.hf.wrapped import MODEL_TYPE
from bertsmith.models.model import Model

_PIPELINES = {
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
    "QuestionAnswering": "question-answering",
    "MultipleChoice": "multiple-choice",
    "MaskedLM": "fill-mask",
    "Seq2SeqLM": "translation",
}


def card_text(model: Model, settings: dict[str, Any], remark: str) -> str:
    """The whole file; `settings` are those of config.json, `remark` says which form the folder has and why."""
    architecture, is_ours = str(settings["architectures"][0]), settings["model_type"] == MODEL_TYPE
    what = architecture.partition("For")[2]
    pipeline = _PIPELINES.get(what, "feature-extraction")
    library = "bertsmith" if is_ours else "transformers"
    auto = f"AutoModelFor{what}" if what in _PIPELINES else "AutoModel"
    encoder, labels = model.config.encoder, settings.get("id2label")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    lines = [
        "---",
        f"library_name: {library}",
        f"pipeline_tag: {pipeline}",
        "---",
        "",
        f"# {architecture}",
        "",
        f"{model.config.family}, {len(encoder.layers)} layers of width {encoder.width}, {parameters:,} parameters.",
        "",
        f"{remark[0].upper()}{remark[1:]}.",
        "",
        "```python",
        *(["import bertsmith.hf  # registers the class"] if is_ours else []),
        f"from transformers import {auto}{', AutoTokenizer' if model.tokenizer is not None else ''}",
        "",
        f'model = {auto}.from_pretrained("this folder")',
        *(['tokenizer = AutoTokenizer.from_pretrained("this folder")'] if model.tokenizer is not None else []),
        "```",
        "",
        *([f"Labels: {', '.join(labels.values())}."] if labels else []),
    ]
    return "\n".join(lines).rstrip() + "\n"
