"""`bertsmith convert`: replace the full attention of a trained model by FAVOR+, or the other way round."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch

from bertsmith.bundled import model_folder
from bertsmith.checkpoint.source import check_name
from bertsmith.checkpoint.store import load, write_model
from bertsmith.data.batch import packed
from bertsmith.data.devices import Device, device_type
from bertsmith.data.shards import TokenCorpus, read_manifest
from bertsmith.errors import InputError
from bertsmith.files import write_seal
from bertsmith.models.config import ModelConfig
from bertsmith.models.convert import convert
from bertsmith.models.encoder import EncoderInputs
from bertsmith.models.heads import TaskHeadConfig
from bertsmith.models.model import Model
from bertsmith.ops.favor import FeatureMapName
from bertsmith.recipes import merge_settings
from bertsmith.runs.flags import DataFlag, ForceFlag, OutFlag, SetFlag, flag_group
from bertsmith.runs.folder import RunFolder
from bertsmith.runs.output import RESULT
from bertsmith.runs.pretrain import PretrainResult, run_pretraining
from bertsmith.runs.result import OneShotResult, StoppedRun, print_plain
from bertsmith.settings import Plain
from bertsmith.tasks.predictor import has_task_record, read_task_record, write_task_record
from bertsmith.text.extend import tokenizer_difference
from bertsmith.toml import override
from bertsmith.training.pretraining import PretrainSettings, corpus_tokenizer

START, RECOVERY = "converted", "recovery"
"""Folders in --out of a run with recovery: the model before the training, and the training."""
_COMPARED_SEQUENCES, _COMPARED_LENGTH = 8, 128
_MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

FAVOR, TRAINING = flag_group("With --to favor"), flag_group("Training after the conversion")


@dataclass(frozen=True, kw_only=True)
class ConvertResult(OneShotResult):
    """Result of `bertsmith convert`."""

    to: str
    family: str
    layers: list[int]
    """Converted layers of the encoder, counted from 1."""
    difference: float
    """Relative difference of the encoder's final hidden states from the original model's, before any training."""
    compared_on: str
    """Tokens that the difference was measured on."""
    recovery: PretrainResult | None = None
    """Result of the training after the conversion; None without one."""


def convert_model(
    model: str | Path,
    *,
    to: Literal["favor", "full"] = "favor",
    out: OutFlag[Path],
    features: Annotated[int | None, FAVOR] = None,
    feature_map: Annotated[FeatureMapName | None, FAVOR] = None,
    redraw_every: Annotated[int | None, FAVOR] = None,
    layers: list[int] | None = None,
    data: Annotated[DataFlag[Path | None], TRAINING] = None,
    steps: Annotated[int | None, TRAINING] = None,
    set: Annotated[SetFlag, TRAINING] = None,
    seed: int = 0,
    device: Device = "auto",
    force: ForceFlag = False,
) -> ConvertResult | StoppedRun:
    """Replace full attention by FAVOR+ (Performer), or back.

    The weights stay, so the conversion is immediate; the command prints the difference of the hidden states. A
    converted model needs further training: --data and --steps continue its pre-training on a corpus by masked language
    modelling.

    Parameters
    ----------
    model
        Folder of a model, Bertsmith's or Hugging Face's.
    to
        "favor" for FAVOR+, whose cost is linear in the length, or "full" for softmax attention.
    out
        Output folder: the model and result.json; with --data also converted/ (the model before the training) and
        recovery/ (log, report and recipe of the training).
    features
        With favor: number of random features; more approximate softmax better and cost more.
    feature_map
        With favor: kernel that the features estimate, such as softmax or relu.
    redraw_every
        With favor: optimiser steps between two draws of the random features; 0 for never.
    layers
        Layers of the encoder to convert, counted from 1; repeatable. All by default.
    data
        Corpus folder written by `bertsmith corpus --tokenizer MODEL`, to train on after the conversion.
    steps
        Optimiser steps of the training on --data.
    set
        Override a setting of the training, for example optimizer.learning_rate=2e-4; repeatable.
    seed
        Random seed of the random features and of the training.
    device
        Device to run on; "auto" uses a GPU if one is available.
    force
        Replace the contents of --out.
    """
    out, data = Path(out), None if data is None else Path(data)
    if (data is None) != (steps is None):
        raise InputError("--data and --steps must be given together: the corpus and the length of the training")
    if set and data is None:
        raise InputError(f"--set {set[0]} is a setting of the training; give --data and --steps")
    given = {"features": features, "feature_map": feature_map, "redraw_every": redraw_every}
    settings = {name: value for name, value in given.items() if value is not None}
    check_name(str(model))
    original = load(model)
    converted = convert(original, to, layers=layers, seed=seed, **settings)
    training = None if data is None else _recovery_settings(original, data, int(steps or 0), set or [], seed, out)
    folder = model_folder(model)
    with RunFolder(out, inputs=[folder, *([] if data is None else [data])], force=force, device=device) as run:
        difference, compared_on = _compare(original, converted, data, device_type(device))
        run.claim()
        changed = _converted_layers(original.config, converted.config)
        if run.is_main:
            print_plain(_describe(to, changed, len(original.config.encoder.layers), difference, compared_on))
        recovery = None if training is None else _recover(converted, training, run, device)
        if isinstance(recovery, StoppedRun):
            return recovery
        if training is None and run.is_main:
            write_model(converted, out)
            if has_task_record(folder):
                write_task_record(read_task_record(folder), out)
        result = ConvertResult(
            to=to,
            family=converted.config.family,
            layers=changed,
            difference=difference,
            compared_on=compared_on,
            recovery=recovery,
        )
        run.finish(result)
        if run.is_main:
            print_plain(f"written to {out}: model.safetensors, {RESULT}")
        return result


def _recovery_settings(
    model: Model, data: Path, steps: int, assignments: Sequence[str], seed: int, out: Path
) -> PretrainSettings:
    """Return the settings of the training after a conversion; raise InputError if the model cannot be trained so."""
    heads = [head.kind for head in model.config.heads if isinstance(head, TaskHeadConfig)]
    if heads:
        raise InputError(
            f"the model was fine-tuned (its head: {heads[0]}), and --data trains without that head; convert the "
            "pre-trained model and fine-tune it afterwards, or convert without --data and continue fine-tuning"
        )
    if model.config.decoder is not None:
        raise InputError("the model has a decoder, and --data trains encoders alone; convert without --data")
    tokenizer = corpus_tokenizer(data)
    difference = None if model.tokenizer is None else tokenizer_difference(model.tokenizer, tokenizer)
    if difference is not None:
        raise InputError(
            f"the tokenizer of --data {str(data)!r} is not the model's: {difference}; make the corpus with "
            "`bertsmith corpus --tokenizer MODEL`"
        )
    length = min(512, model.config.encoder.embedding.max_length)
    plain: Plain = {
        "data": str(data),
        "model": {"folder": str(out / START)},
        "sequences": {"length": length, "micro_tokens": 16384},
        "objective": {"kind": "masked_lm", "masking": {"rate": 0.15}},
        "batch": {"tokens": 32768},
        # below the rate of a fresh run, because all weights but the random features are trained
        "optimizer": {"learning_rate": 1e-4},
        "schedule": {"kind": "linear", "warmup": 0.06},
        "run": {"steps": steps, "seed": seed},
    }
    return PretrainSettings.parse(merge_settings(plain, override({}, list(assignments))), source="settings")


def _recover(converted: Model, settings: PretrainSettings, run: RunFolder, device: str) -> PretrainResult | StoppedRun:
    """Continue the pre-training of the converted model and move the trained model to the output folder."""
    start, recovery = run.path / START, run.path / RECOVERY
    if run.is_main:
        start.mkdir()
        write_model(converted, start)
    run.state.wait_for_everyone()
    run.training = recovery
    result = run_pretraining(settings, recovery, device=device)
    if isinstance(result, StoppedRun):
        if run.is_main:
            print_plain(f"resume the training with: bertsmith pretrain --out {recovery} --resume")
        return StoppedRun(steps=result.steps, stage=RECOVERY)
    if run.is_main:
        for name in _MODEL_FILES:
            if (recovery / name).is_file():
                os.replace(recovery / name, run.path / name)
        write_seal(recovery)
    return result


def _converted_layers(original: ModelConfig, converted: ModelConfig) -> list[int]:
    pairs = zip(original.encoder.layers, converted.encoder.layers, strict=True)
    return [number for number, (before, after) in enumerate(pairs, start=1) if before != after]


@torch.inference_mode()
def _compare(original: Model, converted: Model, data: Path | None, device: str) -> tuple[float, str]:
    """Return the relative difference of the final hidden states, and a description of the tokens."""
    length = min(_COMPARED_LENGTH, original.config.encoder.embedding.max_length)
    sequences = _random_sequences(original, length) if data is None else _corpus_sequences(data, length)
    tokens, layout = packed(sequences, 0)
    inputs = EncoderInputs(tokens.to(device), layout.to(device))
    states = []
    for model in (original, converted):
        states.append(model.to(device).encoder.run(inputs).last.float())
        model.to("cpu")
    count = sum(map(len, sequences))
    source = "random tokens" if data is None else f"tokens of {data}"
    return float((states[1] - states[0]).norm() / states[0].norm()), f"{count:,} {source}"


def _random_sequences(model: Model, length: int) -> list[np.ndarray]:
    vocabulary = model.config.encoder.vocabulary
    return list(np.random.default_rng(0).integers(0, vocabulary, (_COMPARED_SEQUENCES, length)))


def _corpus_sequences(data: Path, length: int) -> list[np.ndarray]:
    """Return the beginnings of the first documents, held-out ones if there are any."""
    has_held_out = read_manifest(data).splits["held_out"].tokens > 0
    corpus = TokenCorpus(data, "held_out" if has_held_out else "train")
    lengths = corpus.lengths
    count = min(_COMPARED_SEQUENCES, len(corpus))
    return [corpus.read(index, 0, min(length, int(lengths[index]))) for index in range(count)]


def _describe(to: str, changed: list[int], depth: int, difference: float, compared_on: str) -> str:
    which = f"all {depth} layers" if len(changed) == depth else f"layers {', '.join(map(str, changed))} of {depth}"
    return (
        f"converted {which} to {to}; hidden states differ by {difference:.1%} before training "
        f"(relative, on {compared_on})"
    )
