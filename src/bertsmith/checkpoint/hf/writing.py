"""A model of ours as a Hugging Face folder: in a class of theirs where one computes the same, else in ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bertsmith.checkpoint.files import tensors_of, write_json, write_tensors
from bertsmith.checkpoint.hf.native import Native, check_exportable
from bertsmith.checkpoint.hf.reading import renamed
from bertsmith.checkpoint.hf.sentences import write_sentences
from bertsmith.checkpoint.hf.task_heads import PROBLEMS
from bertsmith.checkpoint.hf.wrapped import OPENING, architecture_of, check_wrappable, wrapped_settings, write_wrapped
from bertsmith.checkpoint.names import to_theirs
from bertsmith.errors import InputError, nearest
from bertsmith.models.model import Model


def token_ids(model: Model) -> dict[str, Any]:
    """The numbers of the tokens that config.json names."""
    if model.tokenizer is None:
        return {}
    ids = {"pad_token_id": model.tokenizer.pad}
    if model.config.decoder is None:
        return ids
    start, end = model.tokenizer.start, model.tokenizer.separator
    return {**ids, "decoder_start_token_id": start, "eos_token_id": end, "forced_eos_token_id": end}


def tokenizer_config(model: Model) -> dict[str, Any]:
    """What tokenizer_config.json says beside tokenizer.json."""
    tokenizer = model.require_tokenizer()
    roles = {
        "pad_token": tokenizer.pad,
        "unk_token": tokenizer.unknown,
        "cls_token": tokenizer.start,
        "sep_token": tokenizer.separator,
        "mask_token": tokenizer.mask,
    }
    names = {role: tokenizer.pieces([index])[0] for role, index in roles.items()}
    longest = model.config.encoder.embedding.longest
    inputs = ["input_ids", *(["token_type_ids"] if model.config.encoder.embedding.types else []), "attention_mask"]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest, "padding_side": "right"}
    return {**settings, "model_input_names": inputs, **names}


NativeChoice = Literal["auto", "always", "never"]
"""Whether to write a class of theirs: where one computes the same, in any case, or not at all."""
NATIVE_CHOICES = ("auto", "always", "never")

Task = Mapping[str, Any]
"""What the task.json of a fine-tuned model holds."""


@dataclass(frozen=True)
class HfExport:
    """What will be written for a model, and why it is that."""

    model: Model
    native: Native | None
    """The class of theirs; None for a folder that `bertsmith.hf` opens."""
    settings: dict[str, Any]
    """The whole config.json."""
    remark: str
    """Which of the two forms it is and why, in sentences for a person."""
    task: Task | None

    @property
    def form(self) -> Literal["native", "bertsmith"]:
        return "bertsmith" if self.native is None else "native"

    @property
    def architecture(self) -> str:
        """The class that the folder names."""
        return str(self.settings["architectures"][0])

    def write(self, folder: Path) -> None:
        """Puts config.json, the weights, the tokenizer and the task into a folder that exists."""
        if self.native is None:
            write_wrapped(self.model, folder, self.settings)
        else:
            write_json(folder / "config.json", self.settings)
            _write_native(self.model, self.native, folder)
        if self.model.tokenizer is not None:
            self.model.tokenizer.save(folder)
            write_json(folder / "tokenizer_config.json", tokenizer_config(self.model))
        length = None if self.task is None else dict(self.task).get("sequences", {}).get("length")
        write_sentences(self.model.config, folder, length)
        if self.task is not None:
            write_json(folder / "task.json", dict(self.task))


def plan_hf(model: Model, *, native: NativeChoice = "auto", task: Task | None = None) -> HfExport:
    """What would be written for a model; a sentence if it cannot be. Nothing is written yet."""
    if native not in NATIVE_CHOICES:
        raise InputError(f"native is {native!r}; {nearest(str(native), NATIVE_CHOICES)}")
    kind = None if task is None else dict(task).get("task", {}).get("kind")
    tokens = token_ids(model) | ({"problem_type": PROBLEMS[kind]} if kind in PROBLEMS else {})
    reason = "native was given as 'never'"
    if native != "never":
        try:
            found = check_exportable(model, kind)
        except InputError as error:
            if native == "always":
                raise
            reason = str(error)
        else:
            lacking = found.twin.lacks(model.config) if native == "auto" else None
            if lacking is None:
                remark = _native_remark(model, found) + _scale_remark(task)
                return HfExport(model, found, found.settings | tokens, remark, task)
            reason = f"{lacking}; native = 'always' writes a {found.settings['architectures'][0]} all the same"
    check_wrappable(model)
    architecture = architecture_of(model.config, kind)
    settings = wrapped_settings(model.config, architecture) | tokens
    settings |= {"opened_by": OPENING, "why_not_native": reason}
    remark = f"written as {architecture}, which transformers opens after `import bertsmith.hf`, because {reason}"
    return HfExport(model, None, settings, remark + _scale_remark(task), task)


def save_hf(model: Model, folder: Path, *, native: NativeChoice = "auto", task: Task | None = None) -> str:
    """Writes a folder that `transformers` reads into one that exists; says which form it has and why."""
    plan = plan_hf(model, native=native, task=task)
    plan.write(folder)
    return plan.remark


def _native_remark(model: Model, native: Native) -> str:
    remark = native.twin.remark(model.config)
    said = f"written as {native.settings['architectures'][0]}, which transformers opens without Bertsmith"
    if native.form is not None and native.form.kind == "embedder":
        said += " for its states; sentence-transformers makes the vectors of them"
    return said if remark is None else f"{said}; {remark}"


def _scale_remark(task: Task | None) -> str:
    """How a regression's outputs become its numbers, where it learned them on another scale."""
    settings = {} if task is None else dict(task).get("task", {})
    if not settings.get("scale") or settings.get("lowest") is None or settings.get("highest") is None:
        return ""
    lowest, highest = float(settings["lowest"]), float(settings["highest"])
    return f"; its numbers are {lowest:g} + {highest - lowest:g} · the output, as it was trained from 0 to 1"


def _write_native(model: Model, native: Native, folder: Path) -> None:
    tensors = {name: tensor.detach() for name, tensor in tensors_of(model).items()}
    outward = native.twin.written(model.config)
    theirs = to_theirs(native.rows(model.config), tensors)
    write_tensors(folder / "model.safetensors", {renamed(name, outward): tensor for name, tensor in theirs.items()})
