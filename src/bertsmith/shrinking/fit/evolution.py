"""Evolutionary search among sub-networks with unequal layers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from bertsmith.layers.subnet import LayerCut, Subnet
from bertsmith.shrinking.fit.settings import SearchConfig

Genome = tuple[int, ...]
"""Index of every layer's cut in the space, from 1 in order of size; 0 for a dropped layer."""
DROPPED = 0
ATTEMPTS = 20  # per new child


@dataclass(frozen=True)
class Space:
    """The allowed cuts of each layer."""

    cuts: tuple[tuple[LayerCut, ...], ...]
    """Allowed cuts of each layer, smallest first."""
    min_layers: int
    """Minimum number of layers."""

    @classmethod
    def of(cls, grid: Sequence[Subnet], units: Sequence[LayerCut]) -> "Space":
        """Return all combinations of the layers of a grid's sub-networks; equal layers share their cuts."""
        by_unit: dict[LayerCut, set[LayerCut]] = {unit: {unit} for unit in units}
        for subnet in grid:
            for index, cut in subnet.cuts(units):
                by_unit[units[index]].add(cut)
        ordered = {
            unit: tuple(sorted(cuts, key=lambda cut: (cut.neurons, cut.heads))) for unit, cuts in by_unit.items()
        }
        min_layers = min(len(subnet.kept_layers(len(units))) for subnet in grid)
        return cls(tuple(ordered[unit] for unit in units), min_layers)

    def subnet(self, genome: Genome) -> Subnet:
        """Return the sub-network of a genome."""
        layers = [index for index, gene in enumerate(genome) if gene != DROPPED]
        cuts = [self.cuts[index][genome[index] - 1] for index in layers]
        return Subnet(
            layers=tuple(layers), heads=tuple(cut.heads for cut in cuts), neurons=tuple(cut.neurons for cut in cuts)
        )

    def genome(self, subnet: Subnet, units: Sequence[LayerCut]) -> Genome:
        """Return the genome of a sub-network."""
        genes = [DROPPED] * len(self.cuts)
        for index, cut in subnet.cuts(units):
            genes[index] = self.cuts[index].index(cut) + 1
        return tuple(genes)

    @property
    def whole(self) -> list[LayerCut]:
        """The units of the whole network."""
        return [cuts[-1] for cuts in self.cuts]

    def is_allowed(self, genome: Genome) -> bool:
        return sum(gene != DROPPED for gene in genome) >= self.min_layers


def evolve(
    space: Space,
    score: Callable[[Subnet], float],
    fits: Callable[[Subnet], bool],
    *,
    known: Mapping[Subnet, float],
    config: SearchConfig,
) -> dict[Subnet, float]:
    """Return sub-networks that fit, with their scores; the first generation starts from the known ones."""
    random = Random(config.seed)
    scores = {space.genome(subnet, space.whole): value for subnet, value in known.items() if fits(subnet)}
    subnets = {space.genome(subnet, space.whole): subnet for subnet in known}

    def add(genomes: Iterable[Genome]) -> None:
        for genome in genomes:
            subnets.setdefault(genome, space.subnet(genome))
            scores[genome] = score(subnets[genome])

    def shrink_to_fit(genome: Genome) -> Genome | None:
        """Shrink random layers until the genome fits; None if it cannot."""
        while not fits(space.subnet(genome)):
            smaller = [child for child in _next_smaller(genome) if space.is_allowed(child)]
            if not smaller:
                return None
            genome = random.choice(smaller)
        return genome

    def child(parents: Sequence[Genome]) -> Genome:
        if len(parents) > 1 and random.random() < 0.4:
            mother, father = random.sample(parents, 2)
            return tuple(random.choice(pair) for pair in zip(mother, father, strict=True))
        return _mutated(space, random.choice(parents), random)

    def children(parents: Sequence[Genome], count: int) -> list[Genome]:
        unique: dict[Genome, None] = {}
        for _ in range(ATTEMPTS * count):
            if len(unique) == count:
                break
            genome = child(parents)
            fitted = shrink_to_fit(genome) if space.is_allowed(genome) else None
            if fitted is not None and fitted not in scores:
                unique[fitted] = None
        return list(unique)

    whole = tuple(len(cuts) for cuts in space.cuts)
    add(children(list(scores) or [whole], max(0, config.population - len(scores))))
    for _ in range(config.generations):
        best = sorted(scores, key=lambda genome: -scores[genome])[: max(2, config.population // 2)]
        if not best:
            break
        add(children(best, config.population // 2))
    return {subnets[genome]: value for genome, value in scores.items()}


def _mutated(space: Space, genome: Genome, random: Random) -> Genome:
    """Change one or two layers; half of the time one grows and another shrinks by a step, which keeps the cost."""
    genes = list(genome)
    if len(genes) > 1 and random.random() < 0.5:
        up, down = random.sample(range(len(genes)), 2)
        genes[up], genes[down] = min(genes[up] + 1, len(space.cuts[up])), max(genes[down] - 1, DROPPED)
    else:
        for index in random.sample(range(len(genes)), min(len(genes), random.choice((1, 2)))):
            genes[index] = random.randint(DROPPED, len(space.cuts[index]))
    return tuple(genes)


def _next_smaller(genome: Genome) -> list[Genome]:
    """Return the genomes with one layer a step smaller."""
    return [(*genome[:index], gene - 1, *genome[index + 1 :]) for index, gene in enumerate(genome) if gene != DROPPED]
