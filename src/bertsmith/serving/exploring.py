"""What a person is shown of one input: what the answer means, the maps a model made of it, and what there is to ask."""

from typing import Any

import numpy as np
import torch

from bertsmith.layers.subnet import Subnet
from bertsmith.models.cost import parameters
from bertsmith.report.attention import Explorer
from bertsmith.report.maps import sequence_maps
from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import Operation, TokenSequence
from bertsmith.serving.sizes import cut_model, described_sizes, parameters_of
from bertsmith.tasks.tagging import Tagging
from bertsmith.text.tokenizer import Tokenizer

LONGEST = 64  # tokens whose maps are shown: those of 144 heads take some 800 kB
CANDIDATES = 8  # for a mask
_ORDER: tuple[Operation, ...] = ("task", "fill_mask", "vectors")


def described(served: ServedModel) -> dict[str, Any]:
    """What a page must know of a model to ask it, as JSON-ready data."""
    encoder, model = served.runner.config.encoder, cut_model(served)
    works = [work for work in _ORDER if work in served.works]
    task = None if served.kept is None else served.kept.task
    if task is not None and task.kind == "embedding":
        works.remove("task")  # its answer is the vector, which says something in a comparison only
    return {
        "name": served.name,
        "works": works,
        "task": None if task is None else _described_task(task),
        "mask": served.tokenizer.pieces([served.tokenizer.mask])[0] if "fill_mask" in works else None,
        "sizes": described_sizes(served),
        "parameters": parameters_of(model, None) if model is not None else parameters(served.runner.config),
        "layers": len(encoder.layers),
        "heads": max(layer.mixer.heads for layer in encoder.layers),
        "length": served.encoding.length,
        "maps": served.model is not None,
    }


def similarities(vectors: list[np.ndarray]) -> dict[str, Any]:
    """The cosines of all pairs of vectors, and how many numbers each has."""
    stacked = np.stack(vectors).astype(np.float64)
    unit = stacked / np.maximum(np.linalg.norm(stacked, axis=-1, keepdims=True), 1e-12)
    return {"similarities": np.round(unit @ unit.T, 4).tolist(), "width": stacked.shape[-1]}


def candidates(tokenizer: Tokenizer, shares: np.ndarray) -> list[dict[str, Any]]:
    """The likeliest pieces at one place, each as it is written and whether a word begins with it.

    Shape: shares (vocabulary,)
    """
    best = np.argsort(-shares)[:CANDIDATES].tolist()
    pieces = tokenizer.pieces(best)
    return [
        {
            "piece": piece,
            "text": tokenizer.decode([token]).removeprefix("##").strip() or piece,
            "starts_word": bool(tokenizer.starts_word[token]) if token < tokenizer.size else True,
            "score": float(shares[token]),
        }
        for token, piece in zip(best, pieces, strict=True)
    ]


def maps_of(served: ServedModel, asked: TokenSequence, subnet: Subnet | None) -> dict[str, Any]:
    """The maps of one sequence as the explorer takes them in: its data and its markup."""
    model = served.model
    assert model is not None
    ids = torch.from_numpy(asked.tokens)[None].to(model.device)
    types = None if asked.types is None else torch.from_numpy(asked.types)[None].to(model.device)
    tokens = served.tokenizer.pieces(asked.tokens.tolist())
    explorer = Explorer.from_arrays(tokens, sequence_maps(model, ids, types, subnet=subnet))
    return {"data": explorer.data, "markup": str(explorer.markup)}


def why_no_maps(served: ServedModel, asked: TokenSequence) -> str | None:
    """The sentence that says why there are no maps of a sequence; None if there are."""
    if served.model is None:
        return f"{served.name!r} is not run by PyTorch, which draws the maps; serve the folder it was exported from"
    if len(asked.tokens) > LONGEST:
        return f"The text has {len(asked.tokens)} tokens; maps are shown for up to {LONGEST}."
    return None


def _described_task(task: Any) -> dict[str, Any]:
    described = {
        "kind": task.kind,
        "columns": [
            {"column": getattr(task, role), "role": role} for role in task.roles if getattr(task, role) is not None
        ],
    }
    for name in ("threshold", "lowest", "highest"):
        if hasattr(task, name):
            described[name] = getattr(task, name)
    if isinstance(task, Tagging):
        names = {label.split("-", 1)[-1] if task.has_chunks else label for label in task.labels}
        described["types"] = sorted(names - {"O"}) if task.has_chunks else sorted(names)
    return described
