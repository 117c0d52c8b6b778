"""The evolutionary search finds the brute-force optimum."""

from itertools import product

import pytest

from bertsmith.layers.subnet import LayerCut, Subnet
from bertsmith.shrinking.fit.evolution import Space, evolve
from bertsmith.shrinking.fit.settings import SearchConfig

UNITS = [LayerCut(4, 64)] * 4
GRID = [Subnet(width=width, depth=depth) for depth in (1.0, 0.5) for width in (1.0, 0.5, 0.25)]


def cost(subnet: Subnet) -> float:
    return sum(1 + cut.heads for _, cut in subnet.cuts(UNITS))


def score(subnet: Subnet) -> float:
    """Synthetic score: later layers matter more, except the third, which lowers the score."""
    weights = (1.0, 2.0, -1.0, 4.0)
    return sum(weights[index] * cut.heads**0.5 for index, cut in subnet.cuts(UNITS))


@pytest.mark.parametrize("limit", [6.0, 9.0, 12.0, 20.0])
def test_evolution_finds_the_optimum(limit: float) -> None:
    space = Space.of(GRID, UNITS)
    genomes = [genome for genome in product(range(4), repeat=4) if space.is_allowed(genome)]
    every = [space.subnet(genome) for genome in genomes]
    best = max(score(subnet) for subnet in every if cost(subnet) <= limit)
    scored: list[Subnet] = []

    def counted(subnet: Subnet) -> float:
        scored.append(subnet)
        return score(subnet)

    known = {subnet: score(subnet) for subnet in GRID}
    config = SearchConfig(population=16, generations=8)
    found = evolve(space, counted, lambda subnet: cost(subnet) <= limit, known=known, config=config)
    assert max(found.values()) == pytest.approx(best)
    assert all(cost(subnet) <= limit for subnet in found)
    assert all(found[subnet] == score(subnet) for subnet in found)
    assert len(scored) <= 16 + 8 * 8 < len(every)


def test_search_is_deterministic_for_a_seed() -> None:
    space = Space.of(GRID, UNITS)

    def run(seed: int) -> list[Subnet]:
        return list(evolve(space, score, lambda _: True, known={}, config=SearchConfig(population=6, seed=seed)))

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_result_is_empty_if_nothing_fits() -> None:
    space = Space.of(GRID, UNITS)
    assert evolve(space, score, lambda _: False, known={Subnet(): 1.0}, config=SearchConfig()) == {}


def test_genome_round_trip() -> None:
    space = Space.of(GRID, UNITS)
    assert [len(cuts) for cuts in space.cuts] == [3] * 4
    assert space.min_layers == 2
    subnet = Subnet(width=0.5, depth=0.5)
    genome = space.genome(subnet, UNITS)
    assert genome == (0, 2, 0, 2)
    assert space.subnet(genome).cuts(UNITS) == subnet.cuts(UNITS)
