"""What units are worth by the size of their weights alone."""

from torch import Tensor, nn

from bertsmith.layers.elastic import ElasticLinear
from bertsmith.models.model import Model
from bertsmith.shrinking.importance import Importance


def magnitude(model: Model) -> Importance:
    """The norm of all matrix weights that go with each head and neuron; no data is needed."""
    heads, neurons = [], []
    for block in model.encoder._blocks():
        heads.append(_heads(block.mixer, block.mixer.heads))
        feedforward = block.feedforward
        squares = feedforward.expand.squares("out") + feedforward.contract.squares("in")
        neurons.append(squares.sqrt().cpu())
    return Importance(tuple(heads), tuple(neurons))


def _heads(mixer: nn.Module, count: int) -> Tensor:
    total: Tensor | None = None
    for layer in mixer.modules():
        if not isinstance(layer, ElasticLinear):
            continue
        if layer.units_out == count:
            squares = layer.squares("out")
        elif layer.units_in == count:
            squares = layer.squares("in")
        else:
            continue
        total = squares if total is None else total + squares
    assert total is not None, "a mixer has an output with heads"
    return total.sqrt().cpu()
