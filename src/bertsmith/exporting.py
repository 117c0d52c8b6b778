"""Export models: `bertsmith.export` writes Hugging Face and ONNX folders with a model card."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import bertsmith
from bertsmith.bundled import model_folder
from bertsmith.checkpoint.hf.wrapped import ALONE, WITH_PACKAGE
from bertsmith.checkpoint.hf.writing import NativeChoice, save_hf
from bertsmith.checkpoint.store import free_folder, load, read_config
from bertsmith.engines.artefact import ARTEFACT_FILE, check_artefact
from bertsmith.engines.base import Artefact, Inputs, Precision
from bertsmith.engines.onnx_engine import OnnxEngine
from bertsmith.engines.onnx_graph import HeadChoice
from bertsmith.engines.onnx_session import METADATA_FILE
from bertsmith.errors import InputError, nearest
from bertsmith.files import NewFolder, read_json, write_json, write_seal
from bertsmith.models.generator import Part, part_of
from bertsmith.models.model import Model
from bertsmith.text.tokenizer import Tokenizer

CARD_FILE = "README.md"
Json: TypeAlias = Mapping[str, Any]
"""Content of a JSON file: onnx.json, config.json, result.json or the task of task.json."""

_PIPELINES = {
    "classification": "text-classification",
    "multi_label": "text-classification",
    "regression": "text-classification",
    "choice": "multiple-choice",
    "tagging": "token-classification",
    "parsing": "token-classification",
    "spans": "question-answering",
    "embedding": "sentence-similarity",
}
"""Hugging Face pipeline by kind of task."""
_HEADS = {
    "classifier": "text-classification",
    "tagger": "token-classification",
    "spans": "question-answering",
    "chart": "token-classification",
}
"""Hugging Face pipeline by head, if the task is unknown."""
_AUTO = {
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
    "QuestionAnswering": "question-answering",
    "MultipleChoice": "multiple-choice",
    "MaskedLM": "fill-mask",
    "Seq2SeqLM": "translation",
}
"""Hugging Face pipeline by the suffix of a class name that has an Auto class in `transformers`."""
_MAX_LABELS = 20  # in the card


def write_card(
    folder: Path,
    model: Model,
    name: str,
    *,
    result: Json | None = None,
    subnet: Mapping[str, float] | None = None,
    remark: str | None = None,
) -> None:
    """Write the model card of a complete Hugging Face or ONNX folder.

    `result`: content of result.json in the source folder. `subnet`: width and depth if a sub-network was exported.
    `remark`: a sentence on the format of the folder.
    """
    metadata = read_json(folder / METADATA_FILE) if (folder / METADATA_FILE).is_file() else None
    task = read_json(folder / "task.json").get("task", {}) if (folder / "task.json").is_file() else None
    if metadata is not None:
        form = _onnx(name, metadata, task, model.tokenizer)
    else:
        form = _hf(name, read_json(folder / "config.json"), has_tokenizer=model.tokenizer is not None)
        if (folder / "modules.json").is_file():
            form = _sentences(name, form)
    parts = "encoder" if model.config.decoder is None else "encoder and decoder"
    summary = f"A {model.config.family} {parts} {form.description}."
    lines = [*_front_matter(form, model.config.family), "", f"# {name}", "", summary, ""]
    if remark is not None:
        lines += [f"{remark[0].upper()}{remark[1:].rstrip('.')}.", ""]
    lines += [
        "| | |",
        "|---|---|",
        *(f"| {key} | {_cell(value)} |" for key, value in _facts(model, task, metadata).items()),
    ]
    score = None if result is None else _score(result, subnet)
    lines += [f"| score | {score} |"] * (score is not None)
    lines += ["", "## Accuracy of the export", "", exactness(metadata), ""] if metadata else [""]
    lines += ["## Usage", "", "```python", *form.run, "```", "", "## Licence", ""]
    lines += [
        "No licence is stated. If you publish this folder, add `license:` to the block above.",
        "",
    ]
    lines += [f"Made with Bertsmith {bertsmith.__version__}."]
    (folder / CARD_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def exactness(metadata: Json) -> str:
    """Describe the precision and opset of a graph and its largest difference from the model."""
    shortest, max_length = metadata["compared_lengths"]
    bits = " (weights of 7 bits, for x86 without VNNI)" if metadata.get("weights_have_7_bits") else ""
    return (
        f"Precision {metadata['precision']}{bits}, ONNX opset {metadata['opset']}. When it was written, the graph was "
        f"compared with the PyTorch model in float32 on {metadata['compared_sequences']} sequences of {shortest} to "
        f"{max_length} tokens ({metadata['compared_on']}): the largest difference of an output is "
        f"{metadata['largest_absolute_difference']:.1e}, at most {metadata['largest_difference']:.1e} of the largest "
        f"output of its batch; the largest output of all is {metadata['largest_output']:.3g}."
    )


class _Format(NamedTuple):
    """The parts of a model card that depend on the format of the folder."""

    library: str
    pipeline: str
    description: str
    """End of the sentence that describes the folder."""
    run: list[str]
    """Lines of Python that run the model."""


def _onnx(name: str, metadata: Json, task: Json | None, tokenizer: Tokenizer | None) -> _Format:
    head = metadata["head"]
    ends = "returns the last hidden states" if head is None else f"ends with its {head} head"
    if task is not None:
        pipeline, call = _PIPELINES[task["kind"]], f"model.predict([{_example(task)}])"
    elif head == "masked_tokens":
        mask = "[MASK]" if tokenizer is None else tokenizer.tokens([tokenizer.mask])[0]
        pipeline, call = "fill-mask", f'model.fill_mask("a {mask} day")'
    elif head in (None, "embedder"):
        pipeline, call = "feature-extraction", 'model.encode(["a text", "another one"])'
    else:
        pipeline, call = _HEADS[head], "model.outputs([[1, 2, 3]])  # token ids"
    run = ["from bertsmith.runtime import load  # needs only onnxruntime, tokenizers and numpy"]
    return _Format("onnx", pipeline, f"as an ONNX graph that {ends}", [*run, f"model = load({json.dumps(name)})", call])


def _hf(name: str, config: Json, *, has_tokenizer: bool) -> _Format:
    architecture, is_ours = str(config["architectures"][0]), config["model_type"] == "bertsmith"
    ending = architecture.partition("For")[2]
    auto = f"AutoModelFor{ending}" if ending in _AUTO else "AutoModel"
    is_alone = is_ours and "not_standalone" not in config
    run = ["import bertsmith.hf  # registers the class"] if is_ours and not is_alone else []
    trust = ", trust_remote_code=True)  # or without it, after `import bertsmith.hf`" if is_alone else ")"
    run += [
        f"from transformers import {auto}, AutoTokenizer",
        f"model = {auto}.from_pretrained({json.dumps(name)}{trust}",
    ]
    run += [f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(name)})"] if has_tokenizer else []
    opens = (ALONE if is_alone else WITH_PACKAGE) if is_ours else "without Bertsmith"
    description = f"as a Hugging Face folder, {architecture}, which transformers opens {opens}"
    library = "bertsmith" if is_ours else "transformers"
    return _Format(library, _AUTO.get(ending, "feature-extraction"), description, run)


def _sentences(name: str, form: _Format) -> _Format:
    """The format of a folder for sentence-transformers."""
    run = [line for line in form.run if line.startswith("import bertsmith")]
    trust = ", trust_remote_code=True" if any("trust_remote_code" in line for line in form.run) else ""
    run += ["from sentence_transformers import SentenceTransformer"]
    run += [f"model = SentenceTransformer({json.dumps(name)}{trust})"]
    run += ['model.encode(["a text", "another one"])']
    return form._replace(library="sentence-transformers", pipeline="sentence-similarity", run=run)


def _front_matter(form: _Format, family: str) -> list[str]:
    """Return the YAML block for the Hugging Face hub."""
    tags = [f"- {tag}" for tag in dict.fromkeys(("bertsmith", family, form.library))]
    return ["---", f"library_name: {form.library}", f"pipeline_tag: {form.pipeline}", "tags:", *tags, "---"]


def _facts(model: Model, task: Json | None, metadata: Json | None) -> dict[str, str]:
    """Return the rows of the table of the network and its task."""
    encoder = model.config.encoder
    embedding = encoder.embedding
    max_length = embedding.max_length if embedding.positions != "none" else None
    if metadata is not None:
        max_length = metadata["max_length"]
    facts = {
        "family": model.config.family,
        "layers": f"{len(encoder.layers)} of width {encoder.width}",
        "parameters": f"{sum(parameter.numel() for parameter in model.parameters()):,}",
        "vocabulary": f"{encoder.vocabulary:,}" + ("" if model.tokenizer is not None else " (no tokenizer)"),
        "maximum length": "unlimited" if max_length is None else f"{max_length} tokens",
    }
    if model.config.decoder is not None:
        facts["decoder layers"] = str(len(model.config.decoder.layers))
    if task is None:
        heads = ", ".join(head.kind for head in model.config.heads)
        return facts | {"heads": heads or "none"}
    facts["task"] = str(task["kind"]) + (f" ({task['name']})" if task.get("name") else "")
    labels = list(task.get("labels") or ())
    if labels:
        shown = json.dumps(labels[:_MAX_LABELS], ensure_ascii=False)[1:-1]
        facts["labels"] = shown + (
            f" and {len(labels) - _MAX_LABELS} more in task.json" if len(labels) > _MAX_LABELS else ""
        )
    return facts


def _score(result: Json, subnet: Mapping[str, float] | None) -> str | None:
    """Return the score of the model after training; None if result.json has no score for this network."""
    if "metric" not in result or not isinstance(result.get("score"), float | int):
        return None
    metric, score = result["metric"], result["score"]
    split = result.get("split", "dev")
    size = subnet or {"width": 1.0, "depth": 1.0}
    if "grid" in result:
        # the score of an elastic model is a mean over its sub-networks: look up the exported one
        scores = [subnetwork["score"] for subnetwork in result["grid"] if {**subnetwork, **size} == subnetwork]
        return f"{metric} {scores[0]:.2f} on {split}, before the export" if scores else None
    interval = result.get("interval")
    spread = f" (95 % confidence interval {interval[0]:.1f} to {interval[1]:.1f})" if interval else ""
    whole = "" if subnet is None else ", for the whole network before it was cut"
    return f"{metric} {score:.2f} on {split}{spread}{whole}, before the export"


def _example(task: Json) -> str:
    """Return an example input of a task as Python code."""
    if task["kind"] == "spans":
        return '("who forged it?", "Anna forged the gate.")'
    if task["kind"] == "choice":
        texts = ["a text" for role in ("context", "question", "start") if task.get(role)]
        return repr((*texts, ["one choice", "another"]))
    if task["kind"] != "embedding" and task.get("pair"):
        return '("a text", "another one")'
    return '"a text"'


def _cell(value: str) -> str:
    """Escape a value for a table cell."""
    return " ".join(value.split()).replace("|", "\\|")


ExportFormat = Literal["hf", "onnx"]
FORMATS = ("hf", "onnx")
_TASK_FILE = "task.json"


def export(
    model: Model | str | Path,
    folder: str | Path,
    *,
    to: ExportFormat = "hf",
    precision: Precision = "float32",
    head: HeadChoice = "auto",
    samples: Sequence[Inputs] = (),
    task: str | Path | None = None,
    part: Part = "encoder",
    native: NativeChoice = "auto",
    force: bool = False,
) -> str | None:
    """Export a model, or the model of a folder with its task, with a model card; the folder is written atomically.

    "hf" writes a folder for `transformers` and returns a remark on its format: it opens without Bertsmith if a class
    there computes the same, else with `trust_remote_code=True` or after `import bertsmith.hf`; `native` = "always" or
    "never" forces one. "onnx" writes a folder for ONNX Runtime; its graph returns the output of the task head, or the
    last hidden states, or, with `head` = "masked_tokens", the masked-token logits. `samples` are batches that the graph
    is compared on and that calibrate activations. `task` is the folder of a fine-tuned model that is given as an
    object, for its task.json and score. `part` selects the encoder or the generator of a
    model that was trained with a generator.
    """
    check_options(to, precision, head)
    final = free_folder(folder, force)
    if not isinstance(model, Model):
        source = model_folder(model)
        task = source if task is None and (source / _TASK_FILE).is_file() else task
        model = load(source)
    chosen = part_of(model, part)
    with NewFolder(final) as new:
        if to == "hf":
            content = None if task is None else read_json(_task_file(task))
            remark = save_hf(chosen, new, native=native, task=content)
            write_card(new, chosen, final.name, result=_own_result(task, chosen), remark=remark)
            write_seal(new)
            return remark
        write_onnx(chosen, new, precision, samples, head)
        if task is not None and head == "auto":
            shutil.copyfile(_task_file(task), new / _TASK_FILE)
        write_card(new, chosen, final.name, result=_own_result(task, chosen))
        write_seal(new)
    return None


def _task_file(folder: str | Path) -> Path:
    path = Path(folder) / _TASK_FILE
    if not path.is_file():
        raise InputError(f"task is {str(folder)!r}, which has no {_TASK_FILE}; give the folder of a fine-tuned model")
    return path


def write_onnx(
    model: Model, folder: Path, precision: Precision, samples: Sequence[Inputs] = (), head: HeadChoice = "auto"
) -> None:
    """Write a model into an existing folder for ONNX Runtime, without task.json and model card."""
    artefact = Artefact(engine="onnxruntime", precision=precision)
    check_artefact(artefact)
    OnnxEngine().write(model, folder, precision, samples, head=head)
    write_json(folder / ARTEFACT_FILE, artefact.plain())


def read_result(folder: str | Path | None) -> Json | None:
    """Return the content of result.json in the folder of a model; None if the file does not exist."""
    path = None if folder is None else Path(folder) / "result.json"
    return None if path is None or not path.is_file() else read_json(path)


def _own_result(task: str | Path | None, model: Model) -> Json | None:
    """Return result.json of the folder if its model is this one, not a sub-network of it."""
    return read_result(task) if task is not None and read_config(Path(task)) == model.config else None


def check_options(to: str, precision: str, head: str = "auto") -> None:
    """Raise InputError if the format is unknown, or does not support the precision or the head."""
    if to not in FORMATS:
        raise InputError(f"to is {to!r}; {nearest(to, FORMATS)}")
    if to == "hf" and precision != "float32":
        raise InputError(f"precision is {precision!r} with to = 'hf'; allowed: float32, or to = 'onnx'")
    if to == "hf" and head != "auto":
        raise InputError(f"head is {head!r} with to = 'hf', which writes all heads; allowed: auto, or to = 'onnx'")
