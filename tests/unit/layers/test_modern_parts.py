"""Parts of modern encoders: rotary embedding, windows, gated feed-forwards, RMSNorm, no biases."""

import pytest
import torch

import bertsmith
from bertsmith import InputError, SequenceLayout
from bertsmith.layers.context import ForwardContext, Memory
from bertsmith.layers.elementwise import Norm
from bertsmith.layers.feedforward import FeedForwardConfig
from bertsmith.layers.linear import ElasticLinear
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.layers.positions import Rotary
from bertsmith.models.config import ModelConfig
from bertsmith.models.published import preset

TINY = {"width": 32, "layers": 4, "heads": 2, "vocabulary": 60, "neurons": 48}


def test_rotations_match_the_formula() -> None:
    rotary, vectors = Rotary(50.0, 6), torch.randn(4, 2, 6, dtype=torch.float64)
    rotated = rotary.rotations(torch.tensor([0, 1, 7, 300]))(vectors)
    for token, position in enumerate([0, 1, 7, 300]):
        for pair in range(3):
            # a pair of channels is a complex number, a rotation a factor of modulus 1
            number = torch.complex(vectors[token, :, pair], vectors[token, :, pair + 3])
            angle = torch.tensor(position / 50 ** (2 * pair / 6), dtype=torch.float64)
            expected = number * torch.polar(torch.ones_like(angle), angle)
            torch.testing.assert_close(rotated[token, :, pair], expected.real, rtol=0, atol=1e-4)
            torch.testing.assert_close(rotated[token, :, pair + 3], expected.imag, rtol=0, atol=1e-4)
    assert torch.equal(rotated[0], vectors[0])


def test_rotated_products_depend_on_relative_position_only() -> None:
    rotations, query, key = Rotary(10_000.0, 8).rotations(torch.arange(600)), torch.randn(1, 8), torch.randn(1, 8)
    products = (rotations(query.expand(600, 1, 8)) * rotations(key.expand(600, 1, 8).roll(0))).sum(-1)
    torch.testing.assert_close(products, products[:1].expand(600, 1), rtol=1e-4, atol=1e-4)
    apart = (rotations(query.expand(600, 1, 8))[5:] * rotations(key.expand(600, 1, 8))[:-5]).sum(-1)
    torch.testing.assert_close(apart, apart[:1].expand(595, 1), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(apart[0], products[0], atol=1e-3)


def test_rotations_distinguish_positions_in_half_precision() -> None:
    rotary, vectors = Rotary(10_000.0, 64), torch.randn(2, 3, 64)
    exact = rotary.rotations(torch.tensor([1000, 1001]))(vectors)
    half = rotary.rotations(torch.tensor([1000, 1001]))(vectors.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half - exact).norm() / exact.norm() < 4e-3


def test_rotations_are_computed_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, rotations = [], Rotary.rotations
    monkeypatch.setattr(
        Rotary, "rotations", lambda self, positions: computed.append(self) or rotations(self, positions)
    )
    model = bertsmith.build(preset("modern-small", **TINY), seed=0).eval()
    model(torch.randint(0, 60, (2, 9)))
    assert computed == [Rotary(160_000.0, 16), Rotary(10_000.0, 16)]


def test_positions_matter_and_tokens_outside_the_window_do_not() -> None:
    mixer = FullConfig(heads=2, window=2, dropout=0.0).build(16).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_()
    hidden, context = torch.randn(1, 9, 16, dtype=torch.float64), ForwardContext(SequenceLayout.full(1, 9))
    (shares,) = mixer.maps(hidden, context).values()
    distance = (torch.arange(9)[:, None] - torch.arange(9)).abs()
    assert ((shares > 0) == (distance <= 2)).all()
    changed = torch.cat([hidden[:, :8], torch.randn(1, 1, 16, dtype=torch.float64)], dim=1)
    assert torch.equal(mixer(changed, context)[:, :6], mixer(hidden, context)[:, :6])
    assert not torch.equal(mixer(changed, context)[:, 6], mixer(hidden, context)[:, 6])


def test_windows_reduce_flops() -> None:
    plain, near = FullConfig(heads=2), FullConfig(heads=2, window=8)
    assert near.flops(16, 17) == plain.flops(16, 17)
    assert near.flops(16, 1000) == plain.flops(16, 17)
    assert near.changed(is_causal=True).flops(16, 1000) == plain.flops(16, 9)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_gated_feedforward_multiplies_activation_by_gate(activation: str) -> None:
    config = FeedForwardConfig(neurons=5, activation=activation, is_gated=True, has_bias=False)
    layer = config.build(4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    hidden = torch.randn(3, 4)
    inner = getattr(torch.nn.functional, activation)(hidden @ layer.expand.weight[:5].T)
    expected = (inner * (hidden @ layer.expand.weight[5:].T)) @ layer.contract.weight.T
    torch.testing.assert_close(layer(hidden, ForwardContext(SequenceLayout.full(1, 3))), expected)
    assert sum(parameter.numel() for parameter in layer.parameters()) * 2 == config.flops(4)


def test_rms_norm_matches_the_formula_and_preserves_half_precision() -> None:
    norm = Norm(64, 1e-5, "rms")
    with torch.no_grad():
        norm.weight.normal_(1, 0.2)
        norm.bias.normal_(0, 0.2)
    hidden = torch.randn(10, 64) * 3 + 1
    exact = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias
    torch.testing.assert_close(norm(hidden), exact)
    with torch.autocast("cpu", torch.bfloat16):
        half = norm(hidden.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).norm() / exact.norm() < 8e-3


def test_only_the_output_layer_has_a_bias() -> None:
    model = bertsmith.build(preset("modern-small", **TINY), seed=0)
    assert [name for name, _ in model.named_parameters() if name.endswith("bias")] == ["heads.masked_tokens.bias"]


def test_initial_output_weights_are_scaled_by_depth() -> None:
    model = bertsmith.build(preset("modern-small", vocabulary=100), seed=0)
    block = model.encoder.blocks[3]
    for output in (block.mixer.output, block.feedforward.contract):
        assert output.weight.abs().max() <= 0.04 / 24**0.5  # 12 layers add twice each
        assert output.weight.std().item() == pytest.approx(0.0176 / 24**0.5, rel=0.02)
    assert block.mixer.project.weight.std().item() == pytest.approx(0.0176, rel=0.02)


def test_shared_outputs_are_scaled_once() -> None:
    config = preset("bert-tiny", layers=4, vocabulary=100)
    config = config.changed(encoder=config.encoder.changed(sharing="all", scales_outputs=True))
    weight = bertsmith.build(config, seed=0).encoder.blocks[0].mixer.output.weight
    assert weight.std().item() == pytest.approx(0.0176 / 8**0.5, rel=0.03)


def test_memory_is_rejected_with_rotary_or_window() -> None:
    mixer = FullConfig(heads=2, rotary=10.0).build(16)
    assert isinstance(mixer.output, ElasticLinear)
    memory = Memory(torch.randn(1, 3, 16), SequenceLayout.full(1, 3))
    with pytest.raises(
        InputError, match=r"cannot attend to a memory; allowed: .* without rotary, window and relative bias"
    ):
        mixer(torch.randn(1, 2, 16), ForwardContext(SequenceLayout.full(1, 2), memory=memory))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixer": {"kind": "full", "heads": 2, "head_width": 5, "rotary": 10.0}}, "head_width is 5, but rotary"),
        ({"feedforward": {"neurons": 8, "groups": 2, "is_gated": True}}, "groups is 2; allowed with is_gated or"),
        ({"feedforward": {"neurons": 8, "groups": 2, "has_bias": False}}, "groups is 2; allowed with is_gated or"),
    ],
)
def test_invalid_settings_raise(changes: dict, message: str) -> None:
    data = preset("bert-tiny").plain()
    data["encoder"]["layers"][0] |= changes
    with pytest.raises(InputError, match=message):
        ModelConfig.parse(data)


def test_mask_decoder_is_rejected() -> None:
    data = preset("modern-small").plain()
    data["heads"].append({"kind": "mask_decoder"})
    with pytest.raises(InputError, match="a mask_decoder needs an encoder whose last mixer supports cross attention"):
        ModelConfig.parse(data)


def test_linear_attention_has_neither_rotary_nor_window() -> None:
    model = bertsmith.build(preset("modern-small", **TINY), seed=0)
    with pytest.raises(InputError, match=r"convert to 'favor': rotary is 160000\.0, which favor does not support"):
        bertsmith.convert(model, "favor")


def test_sharing_rejects_a_missing_norm() -> None:
    data = preset("modern-small", **TINY, global_every=1).plain()
    data["encoder"]["sharing"] = "mixer"
    with pytest.raises(InputError, match="the layers differ in their has_mixer_norm"):
        ModelConfig.parse(data)
