"""A causal forward pass equals a network with a causal config, for every mixer and one preset of each family."""

from dataclasses import replace

import pytest
import torch
from cases import FAMILIES, HEADS, MIXER_CASES, WIDTH, forward_context, packed_layout, padded_layout, tiny_model
from torch import Tensor

import bertsmith
from bertsmith.errors import InputError
from bertsmith.layers.context import Memory
from bertsmith.layers.mixers import Mixer, MixerConfig
from bertsmith.layers.subnet import LayerCut, Subnet
from bertsmith.models.build import build, rebuild
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads import MaskDecoderConfig
from bertsmith.models.model import Model

every_mixer = pytest.mark.parametrize("config", MIXER_CASES.values(), ids=list(MIXER_CASES))
every_family = pytest.mark.parametrize("name", FAMILIES)


def both(config: MixerConfig) -> tuple[Mixer, Mixer]:
    """Return the mixer of a config, and its causal version with the same weights."""
    mixer, causal = (form.build(WIDTH).double().eval() for form in (config, config.changed(is_causal=True)))
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.3)
    causal.load_state_dict(mixer.state_dict())
    return mixer, causal


@every_mixer
@pytest.mark.parametrize("cut", [None, LayerCut(2, 1)], ids=["whole", "cut"])
def test_causal_context_makes_a_mixer_causal(config: MixerConfig, cut: LayerCut | None) -> None:
    mixer, causal = both(config)
    for layout, shape in ((packed_layout([5, 12, 1]), (18,)), (padded_layout([7, 3], 2), (2, 9))):
        hidden = torch.randn(*shape, WIDTH, dtype=torch.float64)
        context = forward_context(layout, cut)
        expected = causal(hidden, context)
        assert torch.equal(mixer(hidden, replace(context, is_causal=True)), expected)
        assert torch.equal(mixer(hidden, context), expected) == config.is_causal
        maps, forms = mixer.maps(hidden, replace(context, is_causal=True)), causal.maps(hidden, context)
        assert maps.keys() == forms.keys()
        assert all(torch.equal(maps[kind], forms[kind]) for kind in maps)
        assert all((values.triu(1) == 0).all() for values in maps.values())


@every_mixer
def test_causal_mixer_ignores_future_tokens(config: MixerConfig) -> None:
    mixer, _ = both(config)
    context = replace(forward_context(packed_layout([9])), is_causal=True)
    hidden = torch.randn(9, WIDTH, dtype=torch.float64)
    changed = torch.cat([hidden[:5], torch.randn(4, WIDTH, dtype=torch.float64) * 10])
    before, after = mixer(hidden, context), mixer(changed, context)
    torch.testing.assert_close(after[:5], before[:5], rtol=0, atol=1e-12)
    assert not torch.allclose(after[5:], before[5:])


@every_mixer
def test_causal_context_can_decode_step_by_step(config: MixerConfig) -> None:
    mixer, _ = both(config)
    hidden = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    expected = mixer(hidden, replace(forward_context(padded_layout([7, 7])), is_causal=True))
    context = replace(forward_context(padded_layout([1, 1])), is_causal=True)
    state = mixer.start(context)
    for position in range(7):
        mixed, state = mixer.step(hidden[:, position], state, context)
        torch.testing.assert_close(mixed, expected[:, position], rtol=0, atol=1e-10)


def causal_copy(model: Model) -> Model:
    return rebuild(model, model.config.causal())


@every_family
def test_causal_call_makes_an_encoder_causal(name: str) -> None:
    model = tiny_model(name)
    twin = causal_copy(model)
    assert all(layer.mixer.is_causal for layer in twin.config.encoder.layers)
    tokens, layout = torch.randint(0, 50, (13,)), packed_layout([5, 1, 7])
    for subnet in (None, Subnet(width=0.5, depth=0.67)):
        expected = twin.encoder(tokens, layout, subnet=subnet)
        assert torch.equal(model.encoder(tokens, layout, subnet=subnet, is_causal=True), expected)
        assert torch.equal(
            model.encoder.run(EncoderInputs(tokens, layout, subnet=subnet, is_causal=True)).last, expected
        )
        assert not torch.allclose(model.encoder(tokens, layout, subnet=subnet), expected)
    rows, is_token = torch.randint(0, 50, (2, 9)), padded_layout([9, 4]).is_token
    states = model.encoder(rows, padded_layout([9, 4]), is_causal=True)
    assert torch.equal(states[is_token], twin(rows, is_token.long())[is_token])


@every_family
def test_causal_encoder_ignores_future_tokens(name: str) -> None:
    model, layout = tiny_model(name), packed_layout([9, 4])
    tokens = torch.randint(0, 25, (13,))
    changed = tokens.clone()
    changed[5:9] += 25
    for form, is_causal in ((model, True), (causal_copy(model), False)):
        before, after = (form.encoder(given, layout, is_causal=is_causal) for given in (tokens, changed))
        torch.testing.assert_close(after[:5], before[:5], rtol=0, atol=1e-11)
        assert not torch.allclose(after[5:9], before[5:9])
        assert torch.equal(after[9:], before[9:])


@pytest.mark.parametrize("name", [name for name in FAMILIES if "universal" not in name and "transformer" not in name])
def test_masked_states_are_causal(name: str) -> None:
    """Includes both steps of the mask decoder, if the model has one."""
    model, tokens, layout = tiny_model(name), torch.randint(0, 50, (12,)), packed_layout([5, 7])
    positions = torch.randperm(12)
    states = model.run(EncoderInputs(tokens, layout, is_causal=True), Want(masked_positions=positions)).masked_states
    expected = causal_copy(model).run(EncoderInputs(tokens, layout), Want(masked_positions=positions)).masked_states
    assert torch.equal(states, expected)
    tokens[8:] = (tokens[8:] + 7) % 50
    after = model.run(EncoderInputs(tokens, layout, is_causal=True), Want(masked_positions=positions)).masked_states
    is_before = positions < 8
    torch.testing.assert_close(after[is_before], states[is_before], rtol=0, atol=1e-11)
    assert not torch.allclose(after[~is_before], states[~is_before])


@pytest.mark.slow
def test_causal_call_compiles_as_one_graph() -> None:
    torch.compiler.reset()
    model = tiny_model("deberta-v2-xlarge", layers=2)
    compiled = torch.compile(model.run, fullgraph=True, backend="aot_eager")
    tokens, layout, positions = torch.randint(0, 50, (12,)), packed_layout([5, 7]), torch.arange(12)
    inputs, want = EncoderInputs(tokens, layout, is_causal=True), Want(masked_positions=positions)
    states = compiled(inputs, want).masked_states
    torch.testing.assert_close(states, model.run(inputs, want).masked_states, rtol=0, atol=1e-11)


def test_decoder_attends_to_its_whole_memory() -> None:
    """Only self-attention is causal, never cross-attention."""
    model = tiny_model("transformer-base")
    tokens, layout = torch.randint(0, 50, (6,)), packed_layout([4, 2])
    memory = Memory(torch.randn(9, WIDTH, dtype=torch.float64), packed_layout([4, 5]))
    table: Tensor | None = model.encoder.embedding.token_table
    plain = model.decoder(tokens, layout, memory=memory, table=table)
    assert torch.equal(model.decoder(tokens, layout, memory=memory, table=table, is_causal=True), plain)


def test_impossible_causal_calls_raise() -> None:
    """Full attention to a memory does not know the positions of its queries."""
    full = bertsmith.preset("bert-tiny", width=WIDTH, heads=HEADS, vocabulary=50, max_length=16)
    model = build(full.changed(heads=(MaskDecoderConfig(max_length=16),)), seed=0)
    with pytest.raises(InputError, match=r"a causal mask_decoder needs a last mixer .*; this one is 'full'"):
        model.config.causal()
    with pytest.raises(InputError, match="is_causal is True, but key_layout differs from the queries' layout"):
        model.run(
            EncoderInputs(torch.zeros(3).long(), packed_layout([3]), is_causal=True),
            Want(masked_positions=torch.arange(3)),
        )
