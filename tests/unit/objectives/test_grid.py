"""The sub-networks of a grid, and the ones that a step trains."""

import pytest

from bertsmith.errors import InputError
from bertsmith.layers.subnet import LayerCut, Subnet
from bertsmith.objectives.distillation.objective import Grid

UNITS = [LayerCut(6, 96, groups=4)] * 8


@pytest.mark.parametrize(
    ("heads", "width", "kept"),
    [(6, 0.75, 5), (6, 0.25, 2), (12, 0.375, 5), (4, 0.375, 2), (2, 0.25, 1), (10, 0.25, 3), (3, 0.5, 2), (8, 0.05, 1)],
)
def test_widths_round_to_whole_heads(heads: int, width: float, kept: int) -> None:
    """Python's round() rounds half to even: 4.5 to 4, 2.5 to 2."""
    cut = Subnet(width=width).cuts([LayerCut(heads, 48 * heads)])[0][1]
    assert cut == LayerCut(kept, 48 * kept)


def test_depths_round_to_whole_layers() -> None:
    assert Subnet(depth=0.75).kept_layers(6) == (0, 1, 2, 3, 5)  # 4.5 of 6
    assert Subnet(depth=0.5, depth_rule="drop_last").kept_layers(5) == (0, 1, 3)  # 2.5 of 5
    assert Subnet(depth=0.1).kept_layers(4) == (3,)


def test_subnets_are_ordered_from_smallest_to_largest() -> None:
    grid = Grid(widths=(0.5, 1.0), depths=(1.0, 0.25))
    assert [(one.width, one.depth) for one in grid.subnets] == [(0.5, 0.25), (1.0, 0.25), (0.5, 1.0), (1.0, 1.0)]
    assert grid.sample_subnets(UNITS, 1) == grid.subnets
    assert len(Grid().subnets) == 12


@pytest.mark.parametrize("sample", [0, 1, 2, 5])
def test_every_sample_has_the_largest_and_the_smallest(sample: int) -> None:
    grid = Grid(sample=sample)
    chosen = set()
    for item in range(60):
        smallest, *between, largest = grid.sample_subnets(UNITS, 3, item)
        assert (smallest, largest) == (grid.subnets[0], grid.subnets[-1])
        assert len(between) == len(set(between)) == sample
        assert set(between) <= set(grid.subnets[1:-1])
        assert between == list(grid.sample_subnets(UNITS, 3, item)[1:-1])
        chosen |= set(between)
    assert len(chosen) == (10 if sample else 0)  # all others are sampled at some step


def test_sample_larger_than_the_grid_is_the_grid() -> None:
    assert Grid(sample=10).is_whole
    assert not Grid(sample=9).is_whole
    assert Grid(sample=10).sample_subnets(UNITS, 0) == Grid().subnets


@pytest.mark.parametrize("rule", ["keep_last", "drop_last"])
def test_per_layer_widths_are_sampled_independently(rule: str) -> None:
    grid = Grid(sample=3, per_layer=True, depth_rule=rule)  # type: ignore[arg-type]
    allowed = {Subnet(width=width).cuts(UNITS[:1])[0][1] for width in grid.widths}
    heads, neurons = ({getattr(cut, name) for cut in allowed} for name in ("heads", "neurons"))
    uneven = 0
    for item in range(30):
        drawn = grid.sample_subnets(UNITS, 0, item)
        assert (drawn[0], drawn[-1], len(drawn)) == (grid.subnets[0], grid.subnets[-1], 5)
        assert drawn == grid.sample_subnets(UNITS, 0, item)
        for subnet in drawn[1:-1]:
            cuts = subnet.cuts(UNITS)
            assert {cut.heads for _, cut in cuts} <= heads
            assert {cut.neurons for _, cut in cuts} <= neurons
            even = Subnet(depth=subnet.depth, depth_rule=rule)  # type: ignore[arg-type]
            assert [index for index, _ in cuts] == list(even.kept_layers(8))
            assert subnet.counterparts(8) == even.counterparts(8)
            assert not subnet.is_even
            uneven += len({cut for _, cut in cuts}) > 1
    assert uneven > 60


def test_grid_of_one_subnet() -> None:
    """As in the width stage, where only the depth varies."""
    grid = Grid(widths=(1.0,), depths=(1.0,), sample=2, per_layer=True)
    assert grid.sample_subnets(UNITS, 0) == (Subnet(),)


@pytest.mark.parametrize(
    ("plain", "match"),
    [
        ({"widths": [0.5, 0.25]}, r"widths is \[0.5, 0.25\]; allowed: distinct values above 0 up to 1, including 1"),
        ({"widths": [1.0, 0.0]}, "widths is"),
        ({"widths": [1.0, 1.5]}, "widths is"),
        ({"depths": [1.0, 0.5, 0.5]}, "depths is"),
        ({"depths": []}, "depths is"),
        ({"per_layer": True}, "per_layer is true, but sample is None; allowed: 1 or more"),
        ({"sample": -1}, "sample"),
        ({"depth_rule": "drop_first"}, "depth_rule"),
    ],
)
def test_invalid_grids_raise(plain: dict, match: str) -> None:
    with pytest.raises(InputError, match=match):
        Grid.parse(plain)
