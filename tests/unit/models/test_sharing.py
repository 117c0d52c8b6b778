"""Shared layers: stored once, loaded tied, trained once, cut and reordered together."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import bertsmith
from bertsmith import InputError, Subnet
from bertsmith.models.config import EncoderConfig, ModelConfig
from bertsmith.models.model import Model
from bertsmith.objectives.base import Portion
from bertsmith.training.checkpoint import Progress, RunConditions, load_checkpoint, save_checkpoint
from bertsmith.training.optimizer import OptimizerConfig

PARTS = ("mixer", "mixer_norm", "feedforward", "feedforward_norm")
SHARED = {"none": (), "mixer": PARTS[:2], "feedforward": PARTS[2:], "all": PARTS}


def config(sharing: str) -> ModelConfig:
    base = bertsmith.preset("bert-tiny", width=16, heads=2, layers=3, vocabulary=40, max_length=12, dropout=0.0)
    encoder = EncoderConfig.parse({**base.encoder.plain(), "sharing": sharing})
    return base.model_copy(update={"encoder": encoder, "heads": ()})


def shared_parts(model: Model) -> tuple[str, ...]:
    """Return the modules that are the same object in all layers; all others must be distinct."""
    layers = len(model.encoder.blocks)
    found = []
    for part in PARTS:
        objects = {id(getattr(block, part)) for block in model.encoder.blocks}
        weights = {id(next(getattr(block, part).parameters())) for block in model.encoder.blocks}
        assert len(objects) == len(weights)
        assert len(objects) in (1, layers)
        if len(objects) == 1:
            found.append(part)
    return tuple(found)


@pytest.mark.parametrize("sharing", SHARED)
def test_shared_modules_stay_shared(sharing: str, tmp_path: Path) -> None:
    model = bertsmith.build(config(sharing), seed=0).double()
    assert shared_parts(model) == SHARED[sharing]
    assert shared_parts(copy.deepcopy(model)) == SHARED[sharing]
    bertsmith.save(model, tmp_path / "model")
    assert shared_parts(bertsmith.load(tmp_path / "model")) == SHARED[sharing]
    stored = sum(tensor.numel() for tensor in load_file(tmp_path / "model" / "model.safetensors").values())
    assert stored == sum(parameter.numel() for parameter in model.parameters())
    layer = sum(parameter.numel() for parameter in model.encoder.blocks[0].parameters())
    half = sum(p.numel() for part in SHARED[sharing] for p in getattr(model.encoder.blocks[0], part).parameters())
    plain = sum(parameter.numel() for parameter in bertsmith.build(config("none")).parameters())
    assert stored == plain - 2 * half
    assert half == {"none": 0, "all": layer}.get(sharing, half)


@pytest.mark.parametrize("sharing", SHARED)
def test_even_cuts_preserve_sharing(sharing: str, tmp_path: Path) -> None:
    model = bertsmith.build(config(sharing), seed=0)
    even = bertsmith.extract(model, Subnet(width=0.5, depth=0.67))
    assert even.config.encoder.sharing == sharing
    assert shared_parts(even) == SHARED[sharing]
    uneven = bertsmith.extract(model, Subnet(heads=(1, 2, 2)))
    assert uneven.config.encoder.sharing == "none"
    assert shared_parts(uneven) == ()
    bertsmith.save(uneven, tmp_path / "uneven")
    assert shared_parts(bertsmith.load(tmp_path / "uneven")) == ()


def test_shared_gradient_is_the_sum_over_layers() -> None:
    shared = bertsmith.build(config("all"), seed=0).double()
    plain = bertsmith.build(config("none")).double()
    plain.load_state_dict(shared.state_dict())  # the same weights, copied to every layer
    ids = torch.randint(0, 40, (2, 7))
    for model in (shared, plain):
        model(ids).pow(3).sum().backward()
    weights = [block.feedforward.expand.weight for block in plain.encoder.blocks]
    expected = torch.stack([weight.grad for weight in weights]).sum(0)
    got = shared.encoder.blocks[1].feedforward.expand.weight.grad
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("sharing", ["all", "mixer", "feedforward"])
def test_conflicting_orders_raise_before_any_change(sharing: str) -> None:
    model = bertsmith.build(config(sharing), seed=0)
    before = copy.deepcopy(model.state_dict())
    same, other = torch.tensor([1, 0]), torch.tensor([0, 1])
    some, more = torch.arange(64).flip(0), torch.arange(64)
    with pytest.raises(InputError, match=r"layer 2 shares its .* with an earlier layer; both need the same order"):
        model.encoder.reorder([same, same, other], [some, some, more])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_shared_mixer_redraws_once() -> None:
    calls = []
    model = bertsmith.build(config("mixer"))
    model.encoder.blocks[0].mixer.redraw_features = lambda *when: calls.append(when)
    model.encoder.redraw_features(3, 7)
    assert calls == [(3, 7, 0)]


def test_sharing_requires_equal_layers() -> None:
    data = config("none").encoder.plain()
    data["layers"][1]["feedforward"]["neurons"] = 8
    for sharing in ("all", "feedforward"):
        with pytest.raises(InputError, match=f"sharing is '{sharing}', but the layers differ in their feedforward"):
            EncoderConfig.parse({**data, "sharing": sharing})
    EncoderConfig.parse({**data, "sharing": "mixer"})


@pytest.mark.parametrize("sharing", SHARED)
def test_optimizer_has_one_state_per_shared_weight(sharing: str, tmp_path: Path) -> None:
    def steps(model: Model, optimizer: torch.optim.Optimizer, count: int) -> None:
        for step in range(count):
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randint(0, 40, (2, 7))).pow(3).sum().backward()
            optimizer.step()

    model = bertsmith.build(config(sharing), seed=0)
    optimizer = OptimizerConfig().build([Portion.of(tuple(model.parameters()))])
    steps(model, optimizer, 2)
    path = save_checkpoint(tmp_path, model, optimizer, Progress(step=2), RunConditions("data"))
    names = {key.rpartition("/")[0] for key in load_file(path / "optimizer.safetensors")}
    assert names == {name for name, _ in model.named_parameters()}

    other = bertsmith.build(config(sharing), seed=1)
    resumed = OptimizerConfig().build([Portion.of(tuple(other.parameters()))])
    load_checkpoint(path, other, resumed, RunConditions("data"))
    assert shared_parts(other) == SHARED[sharing]
    for each, optimiser in ((model, optimizer), (other, resumed)):
        steps(each, optimiser, 3)
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name
