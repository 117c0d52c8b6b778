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
    "v2": ("deberta-v2-xlarge", {"max_distance": 9}),
    "pre-norm": ("disentangled-small", {"max_distance": 9, "embedding_width": 12}),
}


def decoder_model(name: str, steps: int = 1, **changes: object) -> Model:
    """Build a random network in float64 whose position table is zero."""
    preset, extra = NETWORKS[name]
    config = bertsmith.preset(preset, **{**SIZE, **extra})
    if name == "pre-norm":
        config = generator_of(config, width=1.0, depth=1.0)
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
    # the convolution branch of the first layer is not part of the decoder
    torch.testing.assert_close(states, last, rtol=0, atol=1e-12)


def test_pre_norm_decoder_without_norm_differs() -> None:
    torch.manual_seed(0)
    model, tokens = decoder_model("pre-norm", normalises_memory=False), torch.randint(0, 40, (sum(LENGTHS),))
    states, last = decoded(model, tokens)
    assert (states - last).abs().max() > 0.1


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
