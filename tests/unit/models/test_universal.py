"""The Universal Transformer against a plain loop written from its formulas."""

import math

import pytest
import torch
from torch import Tensor

import bertsmith
from bertsmith import InputError, SequenceLayout, Subnet
from bertsmith.layers.halting import HaltingConfig
from bertsmith.models.config import ModelConfig
from bertsmith.models.encoder import Encoder, EncoderInputs, Want
from bertsmith.models.model import Model

WIDTH, STEPS = 12, 5


def tiny(halting: HaltingConfig | None = None, **changes: object) -> Model:
    sizes = {"width": WIDTH, "layers": STEPS, "heads": 3, "vocabulary": 30, "max_length": 16, "dropout": 0.0}
    config = bertsmith.preset("universal-base", **{**sizes, "init_std": 0.4, "is_halting": False, **changes})
    if halting is not None:
        universal = config.encoder.universal.model_copy(update={"halting": halting})
        config = config.model_copy(update={"encoder": config.encoder.model_copy(update={"universal": universal})})
    return bertsmith.build(config, seed=3).double().eval()


def sinusoid(position: int, width: int) -> Tensor:
    """Return interleaved sin and cos of position / 10000^(2j / width)."""
    angles = [position / 10000 ** (2 * (unit // 2) / width) for unit in range(width)]
    return torch.tensor([math.cos(a) if unit % 2 else math.sin(a) for unit, a in enumerate(angles)])


def signal(length: int, step: int) -> Tensor:
    return torch.stack([sinusoid(position, WIDTH) + sinusoid(step, WIDTH) for position in range(length)])


def first_states(model: Model, ids: Tensor) -> tuple[Tensor, SequenceLayout]:
    layout = SequenceLayout.full(1, len(ids))
    return model.encoder.embedding(ids[None], layout)[0], layout


@torch.no_grad()
def test_steps_without_halting_equal_the_formula() -> None:
    model, ids = tiny(), torch.randint(0, 30, (7,))
    hidden, layout = first_states(model, ids)
    block = model.encoder.blocks[0]
    for step in range(1, STEPS + 1):
        hidden = block((hidden + signal(7, step))[None], model.encoder.context(ids, layout))[0]
    # sinusoids are stored in float32
    torch.testing.assert_close(model(ids[None])[0], hidden, rtol=0, atol=1e-5)
    assert model.encoder.run(EncoderInputs(ids[None], layout)).pondering is None


@torch.no_grad()
@pytest.mark.parametrize("bias", [-3.0, -1.0, 0.5, 6.0])
def test_halting_equals_the_formula(bias: float) -> None:
    model, ids = tiny(HaltingConfig(bias=bias, threshold=0.9)), torch.randint(0, 30, (9,))
    hidden, layout = first_states(model, ids)
    block, weights = model.encoder.blocks[0], model.encoder.halting.chance
    probabilities, after = [[] for _ in ids], [[] for _ in ids]
    has_halted = [False] * len(ids)
    for step in range(1, STEPS + 1):
        entering = hidden + signal(len(ids), step)
        left = block(entering[None], model.encoder.context(ids, layout))[0]
        for position in range(len(ids)):
            if has_halted[position]:
                continue
            after[position].append(left[position])
            hidden[position] = left[position]
            probabilities[position].append(
                torch.sigmoid(weights.weight[0] @ entering[position] + weights.bias[0]).item()
            )
            has_halted[position] = sum(probabilities[position]) >= 0.9
    steps, remainders, mixtures = [], [], []
    for position in range(len(ids)):
        remainder = 1 - sum(probabilities[position][:-1])
        shares = [*probabilities[position][:-1], remainder]
        mixtures.append(sum(share * states for share, states in zip(shares, after[position], strict=True)))
        steps.append(len(shares))
        remainders.append(remainder)
    encoded = model.encoder.run(EncoderInputs(ids[None], layout))
    torch.testing.assert_close(encoded.last[0], torch.stack(mixtures), rtol=0, atol=1e-5)
    assert encoded.pondering.steps[0].tolist() == steps
    torch.testing.assert_close(encoded.pondering.remainder[0], torch.tensor(remainders).double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(encoded.pondering.spent, torch.ones(1, 9).double())
    assert not encoded.pondering.is_running.any()
    mean = encoded.pondering.steps.mean().item()
    assert {-3.0: mean == STEPS, 6.0: mean == 1}.get(bias, 1 < mean < STEPS)


def test_positions_halt_at_different_steps() -> None:
    model = tiny(HaltingConfig(bias=-0.5))
    steps = model.encoder.run(EncoderInputs(torch.randint(0, 30, (4, 9)), SequenceLayout.full(4, 9))).pondering.steps
    assert len(steps.unique()) > 2


@torch.no_grad()
def test_lower_depth_runs_fewer_steps() -> None:
    model, ids = tiny(HaltingConfig(bias=-2.0)), torch.randint(0, 30, (2, 6))
    small = bertsmith.build(tiny(HaltingConfig(bias=-2.0), layers=2).config).double().eval()
    weights = model.state_dict()
    small.load_state_dict({name: weights[name] for name in small.state_dict()})
    expected = model(ids, subnet=Subnet(layers=(2, 4)))
    torch.testing.assert_close(small(ids), expected, rtol=0, atol=1e-12)
    cut = bertsmith.extract(model, Subnet(layers=(2, 4)))
    assert cut.config.encoder.universal == model.config.encoder.universal
    torch.testing.assert_close(cut(ids), expected, rtol=0, atol=1e-12)


def test_ponder_cost_has_gradients_for_halting_weights() -> None:
    model = tiny(HaltingConfig(bias=-1.0))
    layout = SequenceLayout.full(2, 8)
    cost = model.encoder.run(EncoderInputs(torch.randint(0, 30, (2, 8)), layout)).pondering.cost
    cost.sum().backward()
    gradient = model.encoder.halting.chance.bias.grad
    assert gradient.item() < 0  # a higher halting probability leaves a smaller remainder
    assert model.encoder.blocks[0].feedforward.expand.weight.grad.abs().max() > 0


def test_maps_use_the_inputs_of_each_step() -> None:
    model, ids = tiny(HaltingConfig(bias=-1.0)), torch.randint(0, 30, (2, 8))
    layout = SequenceLayout.full(2, 8)
    maps = model.encoder.run(EncoderInputs(ids, layout), Want(maps=True)).maps
    assert len(maps) == STEPS
    first = model.encoder.embedding(ids, layout)
    entering = first + signal(8, 1)
    expected = model.encoder.blocks[0].maps(entering, model.encoder.context(ids, layout))["attention"]
    torch.testing.assert_close(maps[0]["attention"], expected, rtol=0, atol=1e-6)


def test_fresh_network_halts_after_about_two_steps() -> None:
    model = bertsmith.build(bertsmith.preset("universal-base", width=32, heads=4, vocabulary=50), seed=0).eval()
    steps = model.encoder.run(EncoderInputs(torch.randint(0, 50, (4, 20)), SequenceLayout.full(4, 20))).pondering.steps
    assert 1.9 < steps.mean().item() < 2.1


def test_unsupported_settings_raise() -> None:
    with pytest.raises(InputError, match="a sequence may have 17 tokens; this model takes at most 16"):
        tiny()(torch.zeros(1, 17, dtype=torch.long))
    base = bertsmith.preset("bert-tiny", layers=1)
    causal = base.encoder.plain()
    causal["layers"][0] |= {"cross": causal["layers"][0]["mixer"]}
    causal["layers"][0]["mixer"] = {**causal["layers"][0]["mixer"], "is_causal": True}
    data = {**base.plain(), "heads": [], "decoder": causal}
    ModelConfig.parse(data)
    with pytest.raises(InputError, match=r"decoder\.universal is given; allowed in an encoder only"):
        ModelConfig.parse({**data, "decoder": {**causal, "universal": {}}})
    with pytest.raises(InputError, match=r"encoder\.universal\.halting is given; allowed in a model without a dec"):
        ModelConfig.parse({**data, "encoder": {**data["encoder"], "universal": {"halting": {}}}})


def test_plain_encoder_has_no_ponder_cost() -> None:
    model = bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=30, max_length=8), seed=0).eval()
    assert type(model.encoder) is Encoder
    ids, layout = torch.randint(0, 30, (1, 8)), SequenceLayout.full(1, 8)
    encoded = model.encoder.run(EncoderInputs(ids, layout))
    assert encoded.pondering is None
    assert torch.equal(encoded.last, model(ids))


def test_skipping_the_last_block_raises() -> None:
    model = tiny()
    inputs = EncoderInputs(torch.zeros(1, 8, dtype=torch.long), SequenceLayout.full(1, 8))
    with pytest.raises(InputError, match="a universal encoder has no separate last layer"):
        model.encoder.run(inputs, Want(last_block=False))
