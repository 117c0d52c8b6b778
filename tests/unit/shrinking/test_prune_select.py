"""Selection of units: exact counts, brute-force optimum, invalid settings."""

import itertools
import math

import pytest
import torch

import bertsmith
from bertsmith.errors import InputError
from bertsmith.layers.subnet import LayerCut
from bertsmith.models.config import EncoderConfig
from bertsmith.models.cost import parameters
from bertsmith.shrinking.importance import Importance
from bertsmith.shrinking.prune_selection import PruneConfig, Selector, Shares, schedule
from bertsmith.shrinking.pruned_units import KeptUnits, cut_down

SIZES = {"width": 24, "layers": 3, "heads": 4, "vocabulary": 50, "max_length": 16}


def selector(config: PruneConfig, preset: str = "bert-tiny", **sizes: int) -> Selector:
    model = bertsmith.build(bertsmith.preset(preset, **{**SIZES, **sizes}), seed=0)
    return Selector(config, model.config.encoder, model.encoder.units)


def scores_of(units: tuple[LayerCut, ...], seed: int = 0) -> Importance:
    """Return random scores whose scale differs between layers."""
    draw = torch.Generator().manual_seed(seed)
    heads = tuple(10.0**position * torch.rand(u.heads, generator=draw) for position, u in enumerate(units))
    return Importance(
        heads, tuple(0.1**position * torch.rand(u.neurons, generator=draw) for position, u in enumerate(units))
    )


def best(scores: tuple[torch.Tensor, ...], block: int, blocks: int, groups: int = 1) -> list[int]:
    """Return the numbers of units per layer with the largest sum of normalised scores, by brute force."""
    tops = []
    for layer in scores:
        layer = (layer.double() / layer.double().norm()).view(groups, -1).sort(descending=True).values
        tops.append(layer.T.flatten())
    counts = itertools.product(*(range(1, len(top) // block + 1) for top in tops))
    fitting = [one for one in counts if sum(one) == blocks]
    optimum = max(fitting, key=lambda one: sum(float(top[: n * block].sum()) for top, n in zip(tops, one, strict=True)))
    return [n * block for n in optimum]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("preset", "groups"), [("bert-tiny", 1), ("convbert-medium-small", 2)])
def test_global_ranking_equals_brute_force(preset: str, groups: int, seed: int) -> None:
    sizes = {"embedding_width": 12} if groups == 2 else {}
    chooser = selector(PruneConfig(), preset, **sizes)
    scores = scores_of(chooser.units, seed)
    for share in (0.9, 0.5, 0.34):
        kept = chooser.select(scores, Shares(share, share))
        heads, neurons = kept.counts
        every = sum(u.heads for u in chooser.units)
        assert sum(heads) == max(3, math.floor(share * every + 0.5))
        assert sum(neurons) == 8 * math.floor(share * 3 * 96 / 8 + 0.5)
        assert list(heads) == best(scores.heads, 1, sum(heads))
        assert list(neurons) == best(scores.neurons, 8, sum(neurons) // 8, groups)
        for own, layer in zip(kept.neurons, scores.neurons, strict=True):
            size = len(layer) // groups
            for group in range(groups):
                inside = own[(own >= group * size) & (own < (group + 1) * size)] - group * size
                expected = layer.view(groups, -1)[group].topk(len(own) // groups).indices
                assert inside.tolist() == sorted(expected.tolist())


@pytest.mark.parametrize("keep", [0.1, 0.25, 0.5, 0.77, 1.0])
def test_every_layer_keeps_its_share(keep: float) -> None:
    chooser = selector(PruneConfig(scope="layer"))
    kept = chooser.select(scores_of(chooser.units), Shares(keep, keep))
    assert kept.counts == (
        (max(1, math.floor(4 * keep + 0.5)),) * 3,
        (max(8, 8 * math.floor(96 * keep / 8 + 0.5)),) * 3,
    )


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("keep", [0.2, 0.5, 0.8])
def test_keep_as_a_share_of_the_parameters(scope: str, keep: float) -> None:
    model = bertsmith.build(bertsmith.preset("bert-tiny", **SIZES), seed=0)
    chooser = Selector(
        PruneConfig(keep=keep, scope=scope, counts="parameters"), model.config.encoder, model.encoder.units
    )
    kept = chooser.select(scores_of(chooser.units), Shares(keep, keep))
    counted = chooser.parameters(kept)
    # one more block of neurons would exceed the limit; with equal shares, one more block in every layer
    block = 8 * (2 * 24 + 1) * (1 if scope == "global" else 3)
    assert keep * chooser.whole - block < counted <= keep * chooser.whole
    small = cut_down(model, kept)
    removed = parameters(model.config) - parameters(small.config)
    assert removed == chooser.whole - counted


def test_layers_that_share_their_units_stay_shared() -> None:
    model = bertsmith.build(bertsmith.preset("albert-base", **SIZES, embedding_width=12), seed=0)
    chooser = Selector(PruneConfig(), model.config.encoder, model.encoder.units)
    scores = scores_of(chooser.units)
    kept = chooser.select(scores, Shares(0.5, 0.25))
    assert kept.counts == ((2, 2, 2), (24, 24, 24))
    assert kept.heads[0].tolist() == sorted(torch.stack(scores.heads).sum(0).topk(2).indices.tolist())
    small = cut_down(model, kept)
    assert small.config.encoder.sharing == "all"
    shared = model.config.encoder.model_copy(update={"sharing": "mixer"})
    with pytest.raises(InputError, match=r"^prune.scope is 'global', but the layers of this model share their mixer"):
        Selector(PruneConfig(), EncoderConfig.model_validate(shared), model.encoder.units)


def test_shares_of_a_second_cut_refer_to_the_unpruned_model() -> None:
    chooser = selector(PruneConfig())
    first = chooser.select(scores_of(chooser.units), Shares(0.75, 0.75))
    left = Importance(
        tuple(torch.rand(len(own)) for own in first.heads), tuple(torch.rand(len(own)) for own in first.neurons)
    )
    second = chooser.select(left, Shares(0.5, 0.5))
    assert [sum(counts) for counts in second.counts] == [6, 144]
    together = second.within(first)
    for now, new, old in zip(together.neurons, second.neurons, first.neurons, strict=True):
        assert now.tolist() == [old.tolist()[position] for position in new.tolist()]
    assert KeptUnits.all_of(chooser.units).within(KeptUnits.all_of(chooser.units)).counts == ((4,) * 3, (96,) * 3)


def test_schedule_of_cuts() -> None:
    shares = schedule(PruneConfig(keep=0.5))
    assert [share.heads for share in shares] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5])
    uneven = schedule(PruneConfig(keep_heads=0.9, keep_neurons=0.25, step=0.4))
    assert [(share.heads, share.neurons) for share in uneven] == [(0.95, 0.625), (0.9, 0.25)]
    assert len(schedule(PruneConfig(keep=0.1, step=1.0))) == len(schedule(PruneConfig(keep=0.1, by="l0"))) == 1
    assert schedule(PruneConfig(keep=1.0)) == (Shares(1.0, 1.0),)


def test_invalid_settings_raise() -> None:
    with pytest.raises(InputError, match=r"^prune.keep is 0\.01 of the parameters; allowed: at least 0\.\d+, which is"):
        selector(PruneConfig(keep=0.01, counts="parameters"))
    with pytest.raises(InputError, match=r"^counts is 'parameters' with keep_heads or keep_neurons; set only keep$"):
        PruneConfig().changed(counts="parameters", keep_heads=0.5)
