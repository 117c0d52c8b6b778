"""Indices of the kept heads and neurons, extraction of the pruned model, and gates on units."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bertsmith.errors import InputError
from bertsmith.files import read_json, write_json
from bertsmith.layers.elementwise import LayerGates
from bertsmith.layers.subnet import LayerCut, Subnet
from bertsmith.models.build import extract
from bertsmith.models.heads import GatesConfig
from bertsmith.models.model import Model
from bertsmith.objectives.gating import unit_gates
from bertsmith.settings import Record
from bertsmith.shrinking.importance import Importance


@dataclass(frozen=True)
class KeptUnits:
    """Indices of the kept units of every layer, ascending.

    Shape: heads[layer] (heads kept,), neurons[layer] (neurons kept,).
    """

    heads: tuple[Tensor, ...]
    neurons: tuple[Tensor, ...]

    @classmethod
    def all_of(cls, units: Sequence[LayerCut]) -> "KeptUnits":
        """Keep all units of every layer."""
        return cls(
            tuple(torch.arange(layer.heads) for layer in units), tuple(torch.arange(layer.neurons) for layer in units)
        )

    def within(self, earlier: "KeptUnits") -> "KeptUnits":
        """Map indices in a pruned model to indices in the model before that cut."""
        return KeptUnits(
            tuple(old[new] for old, new in zip(earlier.heads, self.heads, strict=True)),
            tuple(old[new] for old, new in zip(earlier.neurons, self.neurons, strict=True)),
        )

    @property
    def counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of kept heads and kept neurons per layer."""
        return tuple(map(len, self.heads)), tuple(map(len, self.neurons))

    @property
    def subnet(self) -> Subnet:
        """The sub-network of a model whose kept units come first."""
        heads, neurons = self.counts
        return Subnet(heads=heads, neurons=neurons)


def cut_down(model: Model, kept: KeptUnits) -> Model:
    """Return a new, smaller model with only the kept units, in their original order."""
    whole = copy.deepcopy(model)
    whole.encoder.reorder(
        [
            _kept_first(order, layer.heads).to(model.device)
            for order, layer in zip(kept.heads, model.encoder.units, strict=True)
        ],
        [
            _kept_first(order, layer.neurons).to(model.device)
            for order, layer in zip(kept.neurons, model.encoder.units, strict=True)
        ],
    )
    return extract(whole, kept.subnet)


def closed_gates(
    kept: KeptUnits, units: Sequence[LayerCut], gates: Sequence[LayerGates] | None = None
) -> list[LayerGates]:
    """Return gates that are 0 for removed units, and the value of `gates` (default 1) for kept ones."""
    return [
        LayerGates(
            heads=_masked_gates(heads, layer.heads, current.heads),
            neurons=_masked_gates(neurons, layer.neurons, current.neurons),
        )
        for heads, neurons, layer, current in zip(
            kept.heads, kept.neurons, units, gates or [LayerGates()] * len(units), strict=True
        )
    ]


@torch.no_grad()
def fold_gates(model: Model, gates: Sequence[LayerGates]) -> None:
    """Multiply the output weights of every unit by its gate, in place."""
    scaled = set()
    for block, layer_gates in zip(model.encoder._blocks(), gates, strict=True):
        heads = [(output, layer_gates.heads) for output in block.mixer.outputs]
        for linear, factors in (*heads, (block.feedforward.contract, layer_gates.neurons)):
            if factors is not None and linear not in scaled:  # shared layers are scaled once
                linear.scale(factors)
                scaled.add(linear)


def _kept_first(kept: Tensor, units: int) -> Tensor:
    """Return an order of all units in which the kept ones come first."""
    is_kept = torch.zeros(units, dtype=torch.bool)
    is_kept[kept] = True
    return torch.cat([kept, (~is_kept).nonzero().squeeze(1)])


def _masked_gates(kept: Tensor, units: int, gates: Tensor | None) -> Tensor:
    gates = torch.ones(units) if gates is None else gates.detach()
    is_kept = torch.zeros(units, dtype=torch.bool, device=gates.device)
    is_kept[kept.to(gates.device)] = True
    return torch.where(is_kept, gates, 0.0)


def with_gates(model: Model) -> Model:
    """Return a copy of a model with an open gate on every head and neuron."""
    encoder, units = model.config.encoder, model.encoder.units
    heads, neurons = tuple(layer.heads for layer in units), tuple(layer.neurons for layer in units)
    config = GatesConfig(
        heads=heads[:1] if encoder.shares_mixer else heads,
        neurons=neurons[:1] if encoder.shares_feedforward else neurons,
        layers=len(units),
    )
    gated = copy.deepcopy(model)
    gated.config = model.config.changed(heads=(*model.config.heads, config))
    gated.heads["gates"] = config.build(encoder.width, encoder.embedding_width, encoder.vocabulary).to(model.device)
    return gated


def without_gates(model: Model) -> Model:
    """Return a copy of a model without its gates; the weights are unchanged."""
    plain = copy.deepcopy(model)
    del plain.heads["gates"]
    plain.config = model.config.changed(heads=tuple(head for head in model.config.heads if head.kind != "gates"))
    return plain


def with_folded_gates(model: Model) -> Model:
    """Return a copy whose gates are folded into its weights."""
    plain = without_gates(model)
    fold_gates(plain, unit_gates(model).deterministic())
    return plain


def gate_locations(model: Model) -> Importance:
    """Return the scores of units by their trained gates: the location parameter of each."""
    heads, neurons = unit_gates(model).locations()
    # shared gates are repeated for every layer; summed over layers they rank the same
    return Importance(tuple(gate.detach().cpu() for gate in heads), tuple(gate.detach().cpu() for gate in neurons))


def cut_gated(model: Model, kept: KeptUnits) -> Model:
    """Return a new, smaller model with only the kept units, their gates folded into the weights."""
    plain = without_gates(model)
    fold_gates(plain, closed_gates(kept, model.encoder.units, unit_gates(model).deterministic()))
    return cut_down(plain, kept)


PRUNED_FILE = "pruned.json"


class PruningMetadata(Record):
    """Content of pruned.json: the kept units, by their indices in the unpruned model."""

    by: str
    """Score that units were selected by."""
    scope: str
    metric: str
    teacher_score: float
    """Score of the unpruned model on dev."""
    score: float
    heads_before: tuple[int, ...]
    """Number of heads of every layer of the unpruned model."""
    neurons_before: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...]
    """Indices of the kept heads of every layer, in their current order."""
    neurons: tuple[tuple[int, ...], ...]
    head_scores: tuple[tuple[float, ...], ...]
    """Score of every head before the first cut."""


def write_pruning_metadata(record: PruningMetadata, folder: Path) -> None:
    """Write pruned.json beside a pruned model."""
    write_json(folder / PRUNED_FILE, record.plain())


def read_pruning_metadata(folder: Path) -> PruningMetadata:
    """Read pruned.json from the folder of a pruned model."""
    path = folder / PRUNED_FILE
    if not path.is_file():
        raise InputError(
            f"{str(folder)!r} has no {PRUNED_FILE}, so its model was not pruned; prune it with bertsmith shrink"
        )
    return PruningMetadata.parse(read_json(path), source=str(path))
