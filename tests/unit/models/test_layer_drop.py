"""LayerDrop: random layers are skipped in training, none in evaluation."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import bertsmith
from bertsmith import Subnet
from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model

LENGTHS = [5, 3, 6]


def small(layer_drop: float, layers: int = 4) -> Model:
    sizes = {"width": 16, "layers": layers, "heads": 2, "vocabulary": 50, "max_length": 16, "dropout": 0.0}
    return bertsmith.build(bertsmith.preset("bert-tiny", **sizes, init_std=0.3, layer_drop=layer_drop), seed=0)


def dropped(model: Model, tokens: Tensor, layout: SequenceLayout) -> list[bool]:
    """Return the layers that a forward pass skipped."""
    trail = model.encoder.run(EncoderInputs(tokens, layout), Want(all_hidden_states=True)).hidden_states
    return [torch.equal(entered, left) for entered, left in pairwise(trail)]


def test_layers_are_dropped_at_the_given_rate() -> None:
    model, tokens = small(0.3).train(), torch.randint(0, 50, (1, 4))
    seen = torch.tensor([dropped(model, tokens, SequenceLayout.full(1, 4)) for _ in range(600)]).double()
    # five standard deviations of a rate over 600 draws, and of the joint rate of two layers
    assert (seen.mean(0) - 0.3).abs().max() < 5 * (0.3 * 0.7 / 600) ** 0.5
    together = (seen[:, 0] * seen[:, 1]).mean()
    assert abs(together - 0.09) < 5 * (0.09 * 0.91 / 600) ** 0.5


def test_no_layer_is_dropped_in_evaluation() -> None:
    tokens = torch.randint(0, 50, (2, 6))
    assert torch.equal(small(0.9).eval()(tokens), small(0.0).eval()(tokens))
    assert not any(dropped(small(0.9).eval(), tokens, SequenceLayout.full(2, 6)))


def test_dropped_layer_has_zero_gradients() -> None:
    """A missing gradient would make distributed training wait."""
    model, layout, tokens = small(0.5).train(), SequenceLayout.full(2, 6), torch.randint(0, 50, (2, 6))
    seed = next(seed for seed in range(50) if torch.manual_seed(seed) and 0 < sum(dropped(model, tokens, layout)) < 4)
    torch.manual_seed(seed)
    left_out = dropped(model, tokens, layout)
    torch.manual_seed(seed)
    model.encoder.run(EncoderInputs(tokens, layout)).last.square().sum().backward()
    for block, was_dropped in zip(model.encoder.blocks, left_out, strict=True):
        gradients = [parameter.grad for parameter in block.parameters()]
        assert all(gradient is not None for gradient in gradients)
        assert all(gradient.abs().max() == 0 for gradient in gradients) == was_dropped


def test_packed_and_padded_drop_the_same_layers() -> None:
    model = small(0.5).double().train()
    items = [torch.randint(0, 50, (length,)) for length in LENGTHS]
    packed = SequenceLayout.packed(torch.tensor([0, *LENGTHS]).cumsum(0).int(), max(LENGTHS))
    padded = SequenceLayout.padded(torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None])
    rows = torch.zeros(len(items), max(LENGTHS), dtype=torch.long)
    for row, item in zip(rows, items, strict=True):
        row[: len(item)] = item
    for seed in range(5):
        torch.manual_seed(seed)
        one = model.encoder.run(EncoderInputs(torch.cat(items), packed)).last
        torch.manual_seed(seed)
        other = model.encoder.run(EncoderInputs(rows, padded)).last
        torch.testing.assert_close(other[padded.is_token], one, rtol=0, atol=1e-11)


def test_subnet_keeps_every_other_layer() -> None:
    """The paper's "every other" for half of the depth drops layers 0, 2, 4 …, whose index is divisible by ⌊1 / 0.5⌋."""
    model, tokens = small(0.5, layers=6).eval(), torch.randint(0, 50, (2, 6))
    kept = [layer for layer in range(6) if layer % 2]
    assert Subnet(depth=0.5).kept_layers(6) == tuple(kept)
    shallow = bertsmith.extract(model, Subnet(layers=tuple(kept)))
    assert torch.equal(shallow(tokens), model(tokens, subnet=Subnet(depth=0.5)))
    assert shallow.train().encoder.layer_drop == 0.5


def test_layer_drop_with_universal_steps_raises() -> None:
    with pytest.raises(InputError, match=r"layer_drop is 1\.0: "):
        small(1.0)
    with pytest.raises(InputError, match=r"layer_drop is 0\.2; allowed with universal steps: 0$"):
        bertsmith.preset("universal-base", layer_drop=0.2)
