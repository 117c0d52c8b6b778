"""The latency table: estimates for networks that were not measured."""

import pytest

import bertsmith
from bertsmith.layers.subnet import Subnet
from bertsmith.models.build import extract
from bertsmith.shrinking.fit.table import (
    CostTable,
    LayerShape,
    ModeTables,
    first_alike,
    layer_shapes,
    stack_config,
    table_stacks,
)

NARROW, MIDDLE, WIDE = LayerShape(0, 1, 16), LayerShape(0, 2, 32), LayerShape(0, 4, 64)
COSTS = {NARROW: 0.4, MIDDLE: 0.9, WIDE: 1.7}


def true_cost(stack: tuple[LayerShape, ...]) -> float:
    return 2.5 + sum(COSTS[kind] for kind in stack)


def test_additive_costs_are_recovered() -> None:
    stacks = table_stacks([WIDE, NARROW, MIDDLE, NARROW])
    assert sorted({kind for stack in stacks for kind in stack}) == [NARROW, MIDDLE, WIDE]
    table = CostTable.of(stacks, [true_cost(stack) for stack in stacks])
    assert table.constant == pytest.approx(2.5)
    mixed = (WIDE, NARROW, MIDDLE, MIDDLE)
    assert table.estimate(mixed) == pytest.approx(true_cost(mixed))


def test_layer_costs_are_not_negative() -> None:
    stacks = table_stacks([NARROW, WIDE])
    table = CostTable.of(stacks, [3.0, 2.0, 2.9, 2.0])  # noise: three layers faster than one
    assert min(table.constant, *table.layers.values()) >= 0


def test_estimate_uses_the_tail_and_the_slowest_length() -> None:
    stacks = table_stacks([WIDE])
    found = [
        {name: {"p50": factor * true_cost(stack), "p95": 1.5 * factor * true_cost(stack)} for name, factor in scales}
        for stack in stacks
        for scales in [(("32", 1.0), ("128", 4.0))]
    ]
    tables = ModeTables.of(stacks, found, [100 + 10 * len(stack) for stack in stacks])
    assert tables.latency_ms((WIDE, WIDE), 50) == pytest.approx(4 * (2.5 + 3.4))
    assert tables.latency_ms((WIDE, WIDE), 95) == pytest.approx(6 * (2.5 + 3.4))
    assert tables.size.estimate((WIDE,) * 6) == pytest.approx(160)


@pytest.mark.parametrize("name", ["bert-tiny", "convbert-small", "albert-base"])
def test_stack_config_equals_the_extracted_network(name: str) -> None:
    config = bertsmith.preset(name, vocabulary=50, width=32, heads=4, layers=3, max_length=32)
    model = bertsmith.build(config, seed=0)
    for subnet in (Subnet(layers=(0, 2), heads=(1, 2)), Subnet(width=0.5)):
        shapes = layer_shapes(first_alike(config.encoder), model.encoder.units, subnet)
        assert stack_config(config, shapes) == extract(model, subnet).config


def test_equal_layers_share_a_table_entry() -> None:
    config = bertsmith.preset("bert-tiny", vocabulary=50, width=32, heads=4, layers=3, max_length=32)
    assert first_alike(config.encoder) == (0, 0, 0)
    other = config.encoder.layers[0].changed(dropout=0.5)
    mixed = config.encoder.changed(layers=(config.encoder.layers[0], other, other))
    assert first_alike(mixed) == (0, 1, 1)
