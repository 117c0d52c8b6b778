"""README.md of an exported folder, its model card: what it is, how good, how exact, how to run it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import bertsmith
from bertsmith.checkpoint.files import read_json
from bertsmith.engines.onnx_session import NOTES_FILE
from bertsmith.models.model import Model
from bertsmith.text.tokenizer import Tokenizer

CARD_FILE = "README.md"

_PIPELINES = {
    "classification": "text-classification",
    "multi_label": "text-classification",
    "regression": "text-classification",
    "choice": "multiple-choice",
    "tagging": "token-classification",
    "spans": "question-answering",
    "embedding": "sentence-similarity",
}
"""Hugging Face's names of what a model does, by the kind of the task …"""
_HEADS = {"classifier": "text-classification", "tagger": "token-classification", "spans": "question-answering"}
"""… and by the head, where the task is not known."""
_AUTO = {
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
    "QuestionAnswering": "question-answering",
    "MultipleChoice": "multiple-choice",
    "MaskedLM": "fill-mask",
    "Seq2SeqLM": "translation",
}
"""The classes that `transformers` has an Auto class for, by the end of their name."""
_SHOWN = 20  # labels of a task


def write_card(
    folder: Path,
    model: Model,
    name: str,
    *,
    result: Mapping[str, Any] | None = None,
    subnet: Mapping[str, float] | None = None,
    remark: str | None = None,
) -> None:
    """Puts the card into a folder that has all else already, for Hugging Face or for ONNX.

    `result` is what result.json of the model's own folder says, `subnet` the width and depth that were cut out of it,
    `remark` a sentence on the form of the folder.
    """
    notes = read_json(folder / NOTES_FILE) if (folder / NOTES_FILE).is_file() else None
    task = read_json(folder / "task.json").get("task", {}) if (folder / "task.json").is_file() else None
    if notes is not None:
        form = _onnx(name, notes, task, model.tokenizer)
    else:
        form = _hf(name, read_json(folder / "config.json"), has_tokenizer=model.tokenizer is not None)
        if (folder / "modules.json").is_file():
            form = _sentences(name, form)
    parts = "encoder" if model.config.decoder is None else "encoder and decoder"
    what = f"A {model.config.family} {parts} {form.what}."
    lines = [*_front(form, model.config.family), "", f"# {name}", "", what, ""]
    if remark is not None:
        lines += [f"{remark[0].upper()}{remark[1:].rstrip('.')}.", ""]
    lines += [
        "| | |",
        "|---|---|",
        *(f"| {key} | {_cell(value)} |" for key, value in _facts(model, task, notes).items()),
    ]
    score = None if result is None else _score(result, subnet)
    lines += [f"| score | {score} |"] * (score is not None)
    lines += ["", "## How exact it is", "", exactness(notes), ""] if notes else [""]
    lines += ["## Run it", "", "```python", *form.run, "```", "", "## Licence", ""]
    lines += [
        "None is stated: it is for whoever publishes this folder to state, with `license:` in the block above.",
        "",
    ]
    lines += [f"Made with Bertsmith {bertsmith.__version__}."]
    (folder / CARD_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def exactness(notes: Mapping[str, Any]) -> str:
    """The precision and opset of a graph, and its largest difference from the model, in sentences."""
    shortest, longest = notes["compared_lengths"]
    bits = " (weights of 7 bits, for x86 without VNNI)" if notes.get("weights_have_7_bits") else ""
    return (
        f"Precision {notes['precision']}{bits}, ONNX opset {notes['opset']}. As it was written the graph was compared "
        f"with the PyTorch model in float32 on {notes['compared_sequences']} sequences of {shortest} to {longest} "
        f"tokens ({notes['compared_on']}): the largest difference of an output is "
        f"{notes['largest_absolute_difference']:.1e}, at most {notes['largest_difference']:.1e} of the largest output "
        f"of its batch; the largest output of all is {notes['largest_output']:.3g}."
    )


class _Form(NamedTuple):
    """What the two kinds of folders say differently."""

    library: str
    pipeline: str
    what: str
    """The rest of the sentence that says what the folder is."""
    run: list[str]
    """The lines of Python that run it."""


def _onnx(name: str, notes: Mapping[str, Any], task: Mapping[str, Any] | None, tokenizer: Tokenizer | None) -> _Form:
    head = notes["head"]
    ends = "gives the last states" if head is None else f"ends with its {head} head"
    if task is not None:
        pipeline, call = _PIPELINES[task["kind"]], f"model.predict([{_example(task)}])"
    elif head == "masked_tokens":
        mask = "[MASK]" if tokenizer is None else tokenizer.pieces([tokenizer.mask])[0]
        pipeline, call = "fill-mask", f'model.fill_mask("a {mask} day")'
    elif head in (None, "embedder"):
        pipeline, call = "feature-extraction", 'model.encode(["a text", "another one"])'
    else:
        pipeline, call = _HEADS[head], "model.outputs([[1, 2, 3]])  # token ids"
    run = ["from bertsmith.runtime import load  # needs onnxruntime, tokenizers and numpy alone"]
    return _Form("onnx", pipeline, f"as an ONNX graph that {ends}", [*run, f"model = load({json.dumps(name)})", call])


def _hf(name: str, config: Mapping[str, Any], *, has_tokenizer: bool) -> _Form:
    architecture, is_ours = str(config["architectures"][0]), config["model_type"] == "bertsmith"
    ending = architecture.partition("For")[2]
    auto = f"AutoModelFor{ending}" if ending in _AUTO else "AutoModel"
    run = ["import bertsmith.hf  # registers the class"] if is_ours else []
    run += [f"from transformers import {auto}, AutoTokenizer", f"model = {auto}.from_pretrained({json.dumps(name)})"]
    run += [f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(name)})"] if has_tokenizer else []
    opens = "after `import bertsmith.hf`" if is_ours else "without Bertsmith"
    what = f"as a Hugging Face folder, {architecture}, which transformers opens {opens}"
    return _Form("bertsmith" if is_ours else "transformers", _AUTO.get(ending, "feature-extraction"), what, run)


def _sentences(name: str, form: _Form) -> _Form:
    """The form of a folder whose vectors sentence-transformers makes."""
    run = [line for line in form.run if line.startswith("import bertsmith")]
    run += ["from sentence_transformers import SentenceTransformer", f"model = SentenceTransformer({json.dumps(name)})"]
    run += ['model.encode(["a text", "another one"])']
    return form._replace(library="sentence-transformers", pipeline="sentence-similarity", run=run)


def _front(form: _Form, family: str) -> list[str]:
    """The block that Hugging Face's hub reads."""
    tags = [f"- {tag}" for tag in dict.fromkeys(("bertsmith", family, form.library))]
    return ["---", f"library_name: {form.library}", f"pipeline_tag: {form.pipeline}", "tags:", *tags, "---"]


def _facts(model: Model, task: Mapping[str, Any] | None, notes: Mapping[str, Any] | None) -> dict[str, str]:
    """What the table says of the network and its task."""
    encoder = model.config.encoder
    embedding = encoder.embedding
    longest = embedding.longest if embedding.positions != "none" else None
    if notes is not None:
        longest = notes["longest"]
    facts = {
        "family": model.config.family,
        "layers": f"{len(encoder.layers)} of width {encoder.width}",
        "parameters": f"{sum(parameter.numel() for parameter in model.parameters()):,}",
        "vocabulary": f"{encoder.vocabulary:,}" + ("" if model.tokenizer is not None else " (no tokenizer)"),
        "longest input": "any number of tokens" if longest is None else f"{longest} tokens",
    }
    if model.config.decoder is not None:
        facts["layers of the decoder"] = str(len(model.config.decoder.layers))
    if task is None:
        heads = ", ".join(head.kind for head in model.config.heads)
        return facts | {"heads": heads or "none"}
    facts["task"] = str(task["kind"]) + (f" ({task['name']})" if task.get("name") else "")
    labels = list(task.get("labels") or ())
    if labels:
        shown = json.dumps(labels[:_SHOWN], ensure_ascii=False)[1:-1]
        facts["labels"] = shown + (f" and {len(labels) - _SHOWN} more in task.json" if len(labels) > _SHOWN else "")
    return facts


def _score(result: Mapping[str, Any], subnet: Mapping[str, float] | None) -> str | None:
    """How good the model was where it was trained; None where its folder does not say it of this network."""
    if "metric" not in result or not isinstance(result.get("score"), float | int):
        return None
    metric, score = result["metric"], result["score"]
    part = result.get("part", "dev")
    size = subnet or {"width": 1.0, "depth": 1.0}
    if "grid" in result:
        # the score of an elastic model is the mean of its sizes, so that of this one is looked up
        own = [member["score"] for member in result["grid"] if {**member, **size} == member]
        return f"{metric} {own[0]:.2f} on {part}, before the export" if own else None
    low_high = result.get("interval")
    spread = f" (95 % interval {low_high[0]:.1f} to {low_high[1]:.1f})" if low_high else ""
    whole = "" if subnet is None else ", of the whole network before it was cut"
    return f"{metric} {score:.2f} on {part}{spread}{whole}, before the export"


def _example(task: Mapping[str, Any]) -> str:
    """An input of a task, as Python writes it."""
    if task["kind"] == "spans":
        return '("who forged it?", "Anna forged the gate.")'
    if task["kind"] == "choice":
        texts = ["a text" for role in ("context", "question", "start") if task.get(role)]
        return repr((*texts, ["one choice", "another"]))
    if task["kind"] != "embedding" and task.get("pair"):
        return '("a text", "another one")'
    return '"a text"'


def _cell(value: str) -> str:
    """A value as a cell of a table."""
    return " ".join(value.split()).replace("|", "\\|")
