"""Sub-networks: published layer lists, rounding, invalid settings."""

import pytest

from bertsmith.errors import InputError
from bertsmith.layers.subnet import LayerCut, Subnet

BASE = [LayerCut(12, 3072)] * 12


@pytest.mark.parametrize(
    ("rule", "depth", "layers"),
    [
        ("drop_last", 0.75, (0, 1, 2, 4, 5, 6, 8, 9, 10)),
        ("drop_last", 0.5, (0, 2, 4, 6, 8, 10)),
        ("keep_last", 0.75, (0, 1, 3, 4, 5, 7, 8, 9, 11)),
        ("keep_last", 0.5, (1, 3, 5, 7, 9, 11)),
        ("keep_last", 1.0, tuple(range(12))),
    ],
)
def test_depth_rules_match_published_layers(rule: str, depth: float, layers: tuple[int, ...]) -> None:
    assert Subnet(depth=depth, depth_rule=rule).kept_layers(12) == layers


@pytest.mark.parametrize(("width", "cut"), [(1, (12, 3072)), (0.75, (9, 2304)), (0.5, (6, 1536)), (0.25, (3, 768))])
def test_widths_match_the_paper(width: float, cut: tuple[int, int]) -> None:
    assert {cut for _, cut in Subnet(width=width).cuts(BASE)} == {LayerCut(*cut)}


def test_shares_round_half_up() -> None:
    # Python's round() would give 4 and 2
    assert Subnet(width=0.375).cuts([LayerCut(12, 48)])[0][1].heads == 5
    assert Subnet(width=0.5).cuts([LayerCut(5, 20)])[0][1].heads == 3
    assert Subnet(width=0.01).cuts([LayerCut(4, 16)])[0][1] == LayerCut(1, 4)


def test_cuts_layer_by_layer() -> None:
    subnet = Subnet(layers=(1, 3), heads=(2, 12), neurons=(10, 20))
    assert subnet.cuts(BASE) == [(1, LayerCut(2, 10)), (3, LayerCut(12, 20))]


def test_grouped_neurons_are_cut_evenly() -> None:
    full = [LayerCut(8, 36, groups=4)]
    assert Subnet(width=0.375).cuts(full)[0][1] == LayerCut(3, 12, groups=4)  # 13, rounded down to a multiple
    assert Subnet(width=0.01).cuts([LayerCut(8, 16, groups=4)])[0][1] == LayerCut(1, 4, groups=4)
    assert Subnet(neurons=(8,)).cuts(full)[0][1].neurons == 8
    with pytest.raises(InputError, match=r"subnet.neurons is 10 for layer 0; allowed: multiples of 4"):
        Subnet(neurons=(10,)).cuts(full)


@pytest.mark.parametrize(
    ("subnet", "match"),
    [
        (Subnet(layers=(3, 1)), "subnet.layers is"),
        (Subnet(layers=(0, 12)), "allowed: ascending indices from 0 to 11"),
        (Subnet(heads=(1,)), "lists 1 layers but 12 layers are kept"),
        (Subnet(layers=(0,), heads=(13,)), "subnet.heads is 13 for layer 0; allowed: 1 to 12"),
    ],
)
def test_invalid_subnets_raise(subnet: Subnet, match: str) -> None:
    with pytest.raises(InputError, match=match):
        subnet.cuts(BASE)
