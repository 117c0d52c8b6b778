"""Long-short range attention: two mixers side by side, each on half of the channels."""

import pytest
import torch
from cases import SEQ2SEQ, WIDTH, forward_context, packed_layout, padded_layout

from bertsmith.layers.elementwise import LayerGates
from bertsmith.layers.mixers.long_short import LongShort, LongShortConfig
from bertsmith.layers.subnet import LayerCut
from bertsmith.models.build import build
from bertsmith.models.published import PRESETS, preset


def make(**settings: object) -> LongShort:
    mixer = LongShortConfig(heads=2, dropout=0.0, **settings).build(WIDTH).double().eval()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.3)
    return mixer


def test_halves_are_attention_and_convolution() -> None:
    mixer, hidden = make(), torch.randn(2, 7, WIDTH, dtype=torch.float64)
    context = forward_context(padded_layout([7, 4]))
    mixed, (far, near) = mixer(hidden, context), hidden.chunk(2, dim=-1)
    assert torch.equal(mixed[..., : WIDTH // 2], mixer.attention(far, context))
    assert torch.equal(mixed[..., WIDTH // 2 :], mixer.convolution(near, context))


def test_each_half_reads_only_its_own_channels() -> None:
    mixer, context = make(), forward_context(packed_layout([6]))
    hidden = torch.randn(6, WIDTH, dtype=torch.float64)
    changed = torch.cat([hidden[:, : WIDTH // 2], torch.randn(6, WIDTH // 2, dtype=torch.float64)], dim=-1)
    before, after = mixer(hidden, context), mixer(changed, context)
    assert torch.equal(after[:, : WIDTH // 2], before[:, : WIDTH // 2])
    assert not torch.allclose(after[:, WIDTH // 2 :], before[:, WIDTH // 2 :])


def test_kernel_of_one_tap_sees_its_own_token_only() -> None:
    mixer, context = make(kernel_size=1), forward_context(packed_layout([6]))
    hidden = torch.randn(6, WIDTH, dtype=torch.float64)
    changed = hidden.clone()
    changed[2] = torch.randn(WIDTH, dtype=torch.float64)
    others = torch.arange(6) != 2
    before, after = mixer(hidden, context), mixer(changed, context)
    assert torch.equal(after[others, WIDTH // 2 :], before[others, WIDTH // 2 :])
    assert not torch.allclose(after[others, : WIDTH // 2], before[others, : WIDTH // 2])


@pytest.mark.parametrize("kernel_from", ["fixed", "depthwise"])
def test_closed_gate_equals_extraction_without_the_head(kernel_from: str) -> None:
    # predicted kernels read all heads, so a removed head changes them
    mixer, layout = make(kernel_from=kernel_from), padded_layout([6, 3])
    hidden = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    gates = LayerGates(heads=torch.tensor([1.0, 0.0], dtype=torch.float64))
    gated = mixer(hidden, forward_context(layout).with_gates(gates))
    small = mixer.extract(LayerCut(1, 1))(hidden, forward_context(layout))
    torch.testing.assert_close(small, gated, rtol=0, atol=1e-12)


@pytest.mark.parametrize("width", [64, 200])
@pytest.mark.parametrize("kernel_size", [3, 31])
def test_parameters_and_flops_follow_the_formulas(width: int, kernel_size: int) -> None:
    length, heads, d = 50, 4, width
    dynamic = LongShortConfig(heads=heads, kernel_size=kernel_size)
    light = dynamic.changed(kernel_from="fixed", is_gated=False)
    half = d // 2
    # four matrices of the attention; of the convolution a gated projection, the kernels and the output
    weights = {
        dynamic: d**2 + 3 * d**2 // 4 + half * heads * kernel_size,
        light: d**2 + d**2 // 2 + heads * kernel_size,
    }
    biases = {dynamic: 4 * half + 3 * half, light: 4 * half + 2 * half}
    for config, count in weights.items():
        assert sum(parameter.numel() for parameter in config.build(d).parameters()) == count + biases[config]
    mixing = 2 * length * half + half * kernel_size  # scores and values; taps
    assert dynamic.flops(d, length) == 2 * (weights[dynamic] + mixing)
    assert light.flops(d, length) == 2 * (weights[light] - heads * kernel_size + mixing)


def test_scaled_outputs_count_sublayers() -> None:
    config = preset("lite-bert-small", width=16, heads=2, layers=3, vocabulary=50)
    plain = build(config, seed=0)
    scaled = build(config.changed(encoder=config.encoder.changed(scales_outputs=True)), seed=0)
    for own, other in zip(plain.encoder.blocks, scaled.encoder.blocks, strict=True):
        assert len(own.mixer.outputs) == 2
        for before, after in zip(own.mixer.outputs, other.mixer.outputs, strict=True):
            torch.testing.assert_close(after.weight * (2 * 3) ** 0.5, before.weight)
        torch.testing.assert_close(other.feedforward.contract.weight * (2 * 3) ** 0.5, own.feedforward.contract.weight)


def test_widths_that_do_not_divide_raise() -> None:
    with pytest.raises(ValueError, match="width 20 is not a multiple of twice the heads 4; set head_width"):
        LongShortConfig(heads=4).check(20)
    with pytest.raises(ValueError, match="width 21 is odd, but half of the channels attend; allowed: even widths"):
        LongShortConfig(heads=4, head_width=3).check(21)


def test_published_sizes() -> None:
    names = [name for name in PRESETS if name.startswith("lite-transformer-")]
    assert set(SEQ2SEQ) == {"lite-transformer-small", "transformer-tiny"}
    for name in names:
        config = preset(name)
        for stack in (config.encoder, config.decoder):
            assert [layer.mixer.kernel_size for layer in stack.layers] == [3, 7, 15, 31, 31, 31][: len(stack.layers)]
            assert {layer.feedforward.neurons for layer in stack.layers} == {stack.width}
        assert all(layer.mixer.is_causal and layer.cross.kind == "full" for layer in config.decoder.layers)
        is_iwslt = "iwslt" in name
        assert {(layer.mixer.kernel_from, layer.mixer.is_gated) for layer in config.encoder.layers} == {
            ("fixed", False) if is_iwslt else ("token", True)
        }
