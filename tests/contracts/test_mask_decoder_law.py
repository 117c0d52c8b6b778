"""The enhanced mask decoder without positions equals the last layer, in pre-norm and in post-norm networks."""

import pytest
import torch
from torch import Tensor

import bertsmith
from bertsmith import SequenceLayout, Subnet
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.generator import generator_of
from bertsmith.models.model import Model

SIZE = {"width": 12, "layers": 3, "heads": 2, "vocabulary": 40, "max_length": 16, "span": 5, "init_std": 0.4}
LENGTHS = [9, 1, 12, 4]
NETWORKS = {
    "v1": ("deberta-base", {}),
    "v1 pre-norm": ("deberta-base", {"placement": "pre"}),
    "v2": ("deberta-v2-xlarge", {"max_distance": 9}),
    "v2 pre-norm": ("deberta-v2-xlarge", {"max_distance": 9, "placement": "pre"}),
    "generator": ("disentangled-small", {"max_distance": 9, "embedding_width": 12}),
    "generator without mixer norm": ("disentangled-small", {"max_distance": 9, "embedding_width": 12}),
}
PRE_NORM = [name for name in NETWORKS if name not in ("v1", "v2")]


def decoder_model(name: str, steps: int = 1, *, is_causal: bool = False, **changes: object) -> Model:
    """Build a random network in float64 whose position table is zero."""
    preset, extra = NETWORKS[name]
    config = bertsmith.preset(preset, **{**SIZE, **extra})
    if name.startswith("generator"):
        config = generator_of(config, width=1.0, depth=1.0)
    if name == "generator without mixer norm":
        layers = tuple(layer.changed(has_mixer_norm=False) for layer in config.encoder.layers)
        config = config.changed(encoder=config.encoder.changed(layers=layers))
    if is_causal:
        config = config.causal()
    heads = tuple(
        head.changed(steps=steps, **changes) if head.kind == "mask_decoder" else head for head in config.heads
    )
    model = bertsmith.build(config.changed(heads=heads), seed=2).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        model.head("mask_decoder").table.zero_()
    return model


def packed() -> SequenceLayout:
    return SequenceLayout.packed(torch.tensor([0, *LENGTHS]).cumsum(0).int(), max(LENGTHS))


def decoded(model: Model, tokens: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """Return the decoder's hidden states at all positions, and the final hidden states of the encoder."""
    want = Want(masked_positions=torch.arange(len(tokens)), final=True)
    output = model.run(EncoderInputs(tokens, packed(), **options), want)
    return output.masked_states, output.last


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("subnet", [None, Subnet(depth=0.67, width=0.5)], ids=str)
def test_decoder_without_positions_equals_the_last_layer(name: str, is_causal: bool, subnet: Subnet | None) -> None:
    torch.manual_seed(0)
    model, tokens = decoder_model(name), torch.randint(0, 40, (sum(LENGTHS),))
    states, last = decoded(model, tokens, is_causal=is_causal, subnet=subnet)
    torch.testing.assert_close(states, last, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_decoder_of_a_causal_network_equals_the_last_layer(name: str) -> None:
    torch.manual_seed(0)
    model, tokens = decoder_model(name, is_causal=True), torch.randint(0, 40, (sum(LENGTHS),))
    states, last = decoded(model, tokens)
    torch.testing.assert_close(states, last, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["v2", "v2 pre-norm"])
def test_branch_of_the_last_layer_is_not_part_of_the_decoder(name: str) -> None:
    """In a network of one layer the branch stands beside the layer that the decoder applies."""
    torch.manual_seed(0)
    preset, extra = NETWORKS[name]
    model = bertsmith.build(bertsmith.preset(preset, **{**SIZE, **extra, "layers": 1}), seed=2).double().eval()
    decoder = model.heads["mask_decoder"]
    decoder.config = decoder.config.changed(steps=1)
    with torch.no_grad():
        decoder.table.zero_()
    tokens = torch.randint(0, 40, (sum(LENGTHS),))
    states, last = decoded(model, tokens)
    assert (states - last).abs().max() > 0.1
    model.encoder.blocks[0].branch = None
    torch.testing.assert_close(states, decoded(model, tokens)[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", PRE_NORM)
def test_pre_norm_decoder_without_norm_differs(name: str) -> None:
    torch.manual_seed(0)
    model, tokens = decoder_model(name, normalises_memory=False), torch.randint(0, 40, (sum(LENGTHS),))
    states, last = decoded(model, tokens)
    differs = (states - last).abs().max() > 0.1
    assert differs == (name != "generator without mixer norm")  # there is no norm to apply


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_post_norm_decoder_is_the_same_with_and_without_norm(name: str) -> None:
    states = []
    for normalises in (False, True):
        torch.manual_seed(0)
        model, tokens = decoder_model(name, 2, normalises_memory=normalises), torch.randint(0, 40, (sum(LENGTHS),))
        states.append(decoded(model, tokens)[0])
    assert torch.equal(*states)


@pytest.mark.parametrize("name", NETWORKS)
def test_all_positions_at_once_equal_chosen_positions(name: str) -> None:
    torch.manual_seed(0)
    model = decoder_model(name, steps=2)
    with torch.no_grad():
        model.head("mask_decoder").table.normal_()
    is_token = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    inputs = EncoderInputs(torch.randint(0, 40, is_token.shape), SequenceLayout.padded(is_token))
    output = model.encoder.run(inputs, Want(last_block=False))
    below, (block, context) = output.hidden_states[-1], output.blocks[-1]
    decoder = model.heads["mask_decoder"]
    chosen = decoder(below, block, context, is_token.flatten().nonzero().squeeze(-1))
    torch.testing.assert_close(decoder.everywhere(below, block, context)[is_token], chosen)


@pytest.mark.parametrize("name", NETWORKS)
def test_position_only_queries_are_independent_of_the_text(name: str) -> None:
    """With queries as printed in the paper, a mixer that adds nothing gives the same hidden states for every text."""
    torch.manual_seed(0)
    model = decoder_model(name, steps=2, queries="positions")
    with torch.no_grad():
        model.head("mask_decoder").table.normal_()
        for block in model.encoder.blocks:
            block.mixer.output.weight.zero_()
    states = [decoded(model, torch.randint(0, 40, (sum(LENGTHS),)))[0] for _ in range(2)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=1e-12)
