"""A model from a folder made ready to go on: the corpus's tokenizer, the objective's heads, its generator's vectors."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from bertsmith.checkpoint.store import load
from bertsmith.errors import InputError
from bertsmith.models.build import build, rebuild
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model
from bertsmith.models.vocabulary import add_tokens
from bertsmith.text.extend import first_difference, new_pieces
from bertsmith.text.tokenizer import Tokenizer

OF_A_FOLDER = ("dropout", "layer_drop")
"""What can be overridden of a model that has weights: how it is trained, not what it is."""


def read_folder(folder: str, overrides: Mapping[str, Any]) -> Model:
    """The encoder in a folder, in the precision that is trained in, dropping more or less if that is asked for."""
    model = load(folder).float()
    check_encoder(model.config, folder)
    plain = model.config.plain()
    if "dropout" in overrides:
        plain = _with_dropout(plain, overrides["dropout"])
    if "layer_drop" in overrides:
        plain["encoder"]["layer_drop"] = overrides["layer_drop"]
    config = ModelConfig.parse(plain, source=f"overrides of {folder!r}")
    return model if config == model.config else rebuild(model, config)


def check_encoder(config: ModelConfig, name: str) -> None:
    """Raises a sentence if this is no encoder alone."""
    if config.decoder is not None:
        raise InputError(f"model {name!r} has a decoder; allowed: encoders (bertsmith finetune trains it on pairs)")


def _with_dropout(data: Any, rate: float) -> Any:
    """Plain settings with one rate wherever there is a dropout."""
    if isinstance(data, list):
        return [_with_dropout(item, rate) for item in data]
    if not isinstance(data, dict):
        return data
    return {name: rate if name.endswith("dropout") else _with_dropout(value, rate) for name, value in data.items()}


def fit_tokenizer(model: Model, tokenizer: Tokenizer, folder: str) -> list[str]:
    """Gives the model rows for what the corpus's tokenizer has more than its own; returns what to say about it."""
    own, rows = model.tokenizer, model.config.encoder.vocabulary
    if own is None:
        if tokenizer.size > rows:
            raise InputError(
                f"the corpus has {tokenizer.size} pieces and {folder!r}, which holds no tokenizer, {rows} rows; "
                "put its tokenizer.json there and make the corpus with it"
            )
        return [f"{folder!r} holds no tokenizer: the corpus's {tokenizer.size:,} pieces are taken to be its own"]
    difference = first_difference(own, tokenizer)
    if difference is not None:
        raise InputError(
            f"the corpus's tokenizer is not that of {folder!r}: {difference}; make the corpus with "
            f"`bertsmith corpus --tokenizer {folder}`, or with an extension of it"
        )
    parts = new_pieces(own, tokenizer)
    if not parts:
        return []
    add_tokens(model, parts)
    grown = model.config.encoder.vocabulary - rows
    return [
        f"{len(parts):,} pieces of the corpus's tokenizer are new to {folder!r}: each begins as the mean of its parts "
        f"({grown:,} rows added, {rows:,} there before)"
    ]


def fit_heads(model: Model, config: ModelConfig, folder: str, *, seed: int) -> tuple[Model, list[str]]:
    """The model with the heads of a config, those it has with their weights; and what to say about the others."""
    fresh = build(config.changed(generator=None), seed=seed)
    lacking = [kind for kind in fresh.heads if kind not in model.heads]
    unused = [kind for kind in model.heads if kind not in fresh.heads]
    for kind in fresh.heads:
        if kind in model.heads:
            fresh.heads[kind] = copy.deepcopy(model.heads[kind])
    fresh.encoder, fresh.generator, fresh.config = model.encoder, model.generator, config
    fresh.tokenizer = model.tokenizer
    notices = [f"{folder!r} lacks the head {kind}: it begins with fresh weights" for kind in lacking]
    if unused:
        notices.append(f"heads of {folder!r} that the objective does not train are left out: {', '.join(unused)}")
    return fresh, notices


@torch.no_grad()
def agree(model: Model, generator: Model, sharing: str, *, fresh: tuple[bool, bool]) -> None:
    """Makes the vectors equal that a model and its generator will share, where one of the two is fresh.

    Trained on both sides, whole embeddings can be shared only if they are equal; a difference is possible in any case.
    """
    if sharing == "none" or all(fresh):
        return
    both = [part.encoder.embedding for part in (model, generator)]
    starts = ("token_table",) if sharing == "gradient_disentangled" else ("token_table", "type_", "position.", "norm.")
    own, others = (
        {name: tensor for name, tensor in part.state_dict().items() if name.startswith(starts)} for part in both
    )
    for name in [name for name in own if name in others]:
        if own[name].shape != others[name].shape:
            return  # their configs do not fit, which is said where they are put together
        if fresh[1]:
            others[name].copy_(own[name])
        elif fresh[0]:
            own[name].copy_(others[name])
        elif sharing == "full" and not torch.allclose(own[name], others[name], rtol=0, atol=1e-6):
            raise InputError(
                f"generator.sharing is 'full', and the model's {name} is not the generator's; "
                "allowed here: 'gradient_disentangled', 'none'"
            )
