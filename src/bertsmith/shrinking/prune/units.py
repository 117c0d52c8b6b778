"""Which heads and neurons of every layer stay, and the model with these alone."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bertsmith.checkpoint.files import read_json, write_json
from bertsmith.errors import InputError
from bertsmith.layers.elementwise import LayerGates
from bertsmith.layers.subnet import LayerCut, Subnet
from bertsmith.models.build import extract
from bertsmith.models.model import Model
from bertsmith.settings import Record


@dataclass(frozen=True)
class Kept:
    """The numbers of the units that stay, rising, layer by layer.

    Shape: heads[layer] (heads kept,), neurons[layer] (neurons kept,).
    """

    heads: tuple[Tensor, ...]
    neurons: tuple[Tensor, ...]

    @classmethod
    def all_of(cls, units: Sequence[LayerCut]) -> "Kept":
        """All units of every layer."""
        return cls(
            tuple(torch.arange(layer.heads) for layer in units), tuple(torch.arange(layer.neurons) for layer in units)
        )

    def within(self, earlier: "Kept") -> "Kept":
        """The numbers that these units, of a model that was cut before, had in the model it was cut from."""
        return Kept(
            tuple(old[new] for old, new in zip(earlier.heads, self.heads, strict=True)),
            tuple(old[new] for old, new in zip(earlier.neurons, self.neurons, strict=True)),
        )

    @property
    def counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How many heads and how many neurons stay, layer by layer."""
        return tuple(map(len, self.heads)), tuple(map(len, self.neurons))

    @property
    def subnet(self) -> Subnet:
        """The sub-network of a model whose kept units stand first."""
        heads, neurons = self.counts
        return Subnet(heads=heads, neurons=neurons)


def cut_down(model: Model, kept: Kept) -> Model:
    """An ordinary model with the kept units alone, in their old order; the given one stays as it is."""
    whole = copy.deepcopy(model)
    whole.encoder.reorder(
        [
            _first(order, layer.heads).to(model.device)
            for order, layer in zip(kept.heads, model.encoder.units, strict=True)
        ],
        [
            _first(order, layer.neurons).to(model.device)
            for order, layer in zip(kept.neurons, model.encoder.units, strict=True)
        ],
    )
    return extract(whole, kept.subnet)


def closed(kept: Kept, units: Sequence[LayerCut], gates: Sequence[LayerGates] | None = None) -> list[LayerGates]:
    """Gates that let through what stays and nothing else, or so much of it as other gates do."""
    found = []
    for heads, neurons, layer, own in zip(
        kept.heads, kept.neurons, units, gates or [LayerGates()] * len(units), strict=True
    ):
        found.append(
            LayerGates(
                heads=_ones_at(heads, layer.heads, own.heads), neurons=_ones_at(neurons, layer.neurons, own.neurons)
            )
        )
    return found


@torch.no_grad()
def fold(model: Model, gates: Sequence[LayerGates]) -> None:
    """Makes gates part of the weights, in place: what each unit hands on is multiplied by its gate for good."""
    done = set()
    for block, own in zip(model.encoder._blocks(), gates, strict=True):
        for part, factors in ((block.mixer.output, own.heads), (block.feedforward.contract, own.neurons)):
            if factors is not None and part not in done:  # a part that layers share is scaled once
                part.scale(factors)
                done.add(part)


def _first(kept: Tensor, units: int) -> Tensor:
    """An order of all units in which the kept ones stand first."""
    is_kept = torch.zeros(units, dtype=torch.bool)
    is_kept[kept] = True
    return torch.cat([kept, (~is_kept).nonzero().squeeze(1)])


def _ones_at(kept: Tensor, units: int, gates: Tensor | None) -> Tensor:
    gates = torch.ones(units) if gates is None else gates.detach()
    is_kept = torch.zeros(units, dtype=torch.bool, device=gates.device)
    is_kept[kept.to(gates.device)] = True
    return torch.where(is_kept, gates, 0.0)


PRUNED_FILE = "pruned.json"


class PrunedRecord(Record):
    """The units that stayed, by the numbers they had in the unpruned model."""

    by: str
    """What they were chosen by."""
    scope: str
    metric: str
    teacher_score: float
    """Of the unpruned model, on dev."""
    score: float
    heads_before: tuple[int, ...]
    """How many every layer had."""
    neurons_before: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...]
    """The numbers of those that stayed, layer by layer, in the order they stand in now."""
    neurons: tuple[tuple[int, ...], ...]
    head_scores: tuple[tuple[float, ...], ...]
    """What every head was worth before the first cut."""


def write_pruned(record: PrunedRecord, folder: Path) -> None:
    """Puts the record beside a pruned model."""
    write_json(folder / PRUNED_FILE, record.plain())


def read_pruned(folder: Path) -> PrunedRecord:
    """The record of the pruned model in a folder."""
    path = folder / PRUNED_FILE
    if not path.is_file():
        raise InputError(f"{str(folder)!r} has no {PRUNED_FILE}, so its model was not pruned; use bertsmith shrink")
    return PrunedRecord.parse(read_json(path), source=str(path))
