"""The evolution among layers finds what trying everything finds."""

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
    """Layers matter more the later they are, except the third, which does harm."""
    worth = (1.0, 2.0, -1.0, 4.0)
    return sum(worth[index] * cut.heads**0.5 for index, cut in subnet.cuts(UNITS))


@pytest.mark.parametrize("limit", [6.0, 9.0, 12.0, 20.0])
def test_it_finds_the_best_of_all(limit: float) -> None:
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


def test_a_seed_gives_the_same_search() -> None:
    space = Space.of(GRID, UNITS)

    def run(seed: int) -> list[Subnet]:
        return list(evolve(space, score, lambda _: True, known={}, config=SearchConfig(population=6, seed=seed)))

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_nothing_fits_nothing_is_found() -> None:
    space = Space.of(GRID, UNITS)
    assert evolve(space, score, lambda _: False, known={Subnet(): 1.0}, config=SearchConfig()) == {}


def test_a_genome_is_a_subnet_and_back() -> None:
    space = Space.of(GRID, UNITS)
    assert [len(cuts) for cuts in space.cuts] == [3] * 4
    assert space.min_layers == 2
    subnet = Subnet(width=0.5, depth=0.5)
    genome = space.genome(subnet, UNITS)
    assert genome == (0, 2, 0, 2)
    assert space.subnet(genome).cuts(UNITS) == subnet.cuts(UNITS)
