"""The sizes of a served model that a person may ask for one by one: those its record has, or any it can be cut to."""

from functools import lru_cache
from typing import Any

from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.models.cost import parameters
from bertsmith.models.model import Model
from bertsmith.serving.model import ServedModel
from bertsmith.shrinking.fit.table import layer_kinds, stack_config


def cut_model(served: ServedModel) -> Model | None:
    """The model, if sub-networks of it can be asked for: not where exits, codes or compiled layers answer for it."""
    is_plain = isinstance(served.runner, Model) and served.runner.config.quantisation is None
    return served.model if is_plain and served.rows != "fixed" else None


def described_sizes(served: ServedModel) -> dict[str, Any]:
    """What can be asked for, as JSON-ready data: `kind` is "recorded", "free", or "one" for a model of one size."""
    model, record = cut_model(served), served.record
    if model is None:
        return {"kind": "one"}
    if record is None:
        heads, layers = min(unit.heads for unit in model.encoder.units), len(model.encoder.units)
        return {
            "kind": "free",
            "widths": [(count + 1) / heads for count in range(heads)],
            "depths": [(count + 1) / layers for count in range(layers)],
        }
    fields = ("width", "depth", "score", "parameters", "latency_ms")
    return {
        "kind": "recorded",
        "widths": sorted({member.width for member in record.grid}),
        "depths": sorted({member.depth for member in record.grid}),
        "grid": [{name: getattr(member, name) for name in fields} for member in record.grid],
        "metric": record.metric,
    }


def size_of(served: ServedModel, width: float, depth: float) -> Subnet | None:
    """The sub-network of a width and a depth; None leaves it to a model that has one size.

    The whole model is asked for as a sub-network, too: an engine keeps those apart from what may be of any size, so
    that what is asked here runs alone.
    """
    is_whole = width == 1 and depth == 1
    if cut_model(served) is None:
        if not is_whole:
            raise InputError(f"width is {width:g} and depth {depth:g}; {served.name!r} has one size, 1 and 1")
        return None
    record = served.record
    if record is None:
        return Subnet(width=width, depth=depth)
    if not is_whole and not any((member.width, member.depth) == (width, depth) for member in record.grid):
        told = ", ".join(f"{member.width:g} × {member.depth:g}" for member in record.grid)
        raise InputError(f"width × depth is {width:g} × {depth:g}; {served.name!r} was trained for {told}")
    return Subnet(width=width, depth=depth, depth_rule=record.depth_rule)


@lru_cache(maxsize=256)
def parameters_of(model: Model, subnet: Subnet | None) -> int:
    """The weights of a sub-network as a model of its own; a generator, which it leaves behind, does not count."""
    units = model.encoder.units
    kinds = layer_kinds(range(len(units)), units, subnet or Subnet())
    return parameters(stack_config(model.config, kinds))
