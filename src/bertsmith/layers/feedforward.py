"""The position-wise feed-forward network of a block."""

from pydantic import Field
from torch import Tensor, nn

from bertsmith.layers.context import ForwardContext
from bertsmith.layers.elementwise import ACTIVATIONS, Activation, LayerGates, first_units
from bertsmith.layers.linear import ElasticLinear, GroupedLinear, WeightSlice
from bertsmith.layers.subnet import LayerCut
from bertsmith.settings import Record


class FeedForwardConfig(Record):
    """Two linear layers with an activation, or a gated linear unit, between them."""

    neurons: int = Field(gt=0)
    activation: Activation = "gelu"
    groups: int = Field(default=1, gt=0)
    """Groups of both linear layers, as in a grouped convolution; ConvBERT medium-small has 2."""
    is_gated: bool = False
    """Multiply each activation by a second linear function of the input: GeGLU with gelu, SwiGLU with silu (Shazeer
    2020). With two thirds of the neurons it has as many weights as an ungated feed-forward."""
    has_bias: bool = True
    """Biases in both layers."""

    def check(self, width: int) -> None:
        """Raise ValueError if groups do not divide width and neurons, or do not fit the other settings."""
        for name, count in (("width", width), ("neurons", self.neurons)):
            if count % self.groups:
                raise ValueError(f"{name} {count} is not a multiple of groups {self.groups}")
        if self.groups > 1 and (self.is_gated or not self.has_bias):
            raise ValueError(f"groups is {self.groups}; allowed with is_gated or without has_bias: 1")

    def build(self, width: int) -> "FeedForward":
        return FeedForward(
            width, self.neurons, self.activation, self.groups, is_gated=self.is_gated, has_bias=self.has_bias
        )

    def cut(self, cut: LayerCut) -> "FeedForwardConfig":
        """Return the config of the extracted feed-forward."""
        return self.model_copy(update={"neurons": cut.neurons})

    def flops(self, width: int) -> int:
        """Floating-point operations of one token's forward pass."""
        return 2 * (3 if self.is_gated else 2) * width * self.neurons // self.groups


class FeedForward(nn.Module):
    """width → neurons → width; each neuron is a unit that can be removed.

    If it is gated, the output of the first layer has two parts with all neurons each: pre-activations and factors.
    """

    expand: ElasticLinear | GroupedLinear
    contract: ElasticLinear | GroupedLinear

    def __init__(
        self, width: int, neurons: int, activation: Activation, groups: int = 1, *, is_gated: bool, has_bias: bool
    ) -> None:
        super().__init__()
        self.neurons, self.groups = neurons, groups
        self.is_gated, self.has_bias = is_gated, has_bias
        self.activation = activation
        if groups == 1:
            parts = 2 if is_gated else 1
            self.expand = ElasticLinear(width, parts * neurons, units_out=neurons, parts=parts, bias=has_bias)
            self.contract = ElasticLinear(neurons, width, units_in=neurons, bias=has_bias)
        else:
            self.expand = GroupedLinear(width, neurons, groups)
            self.contract = GroupedLinear(neurons, width, groups)

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        gates = context.gates or LayerGates()
        if isinstance(self.expand, ElasticLinear) and gates.inner is None and not self.is_gated:
            inner = self.expand.activated(
                hidden, self.activation, keep_out=context.keep_neurons, backend=context.backend
            )
            return self.contract(self._gated(inner, gates.neurons), WeightSlice(keep_in=context.keep_neurons))
        inner = self.expand(hidden, WeightSlice(keep_out=context.keep_neurons))
        if self.is_gated:
            inner, factor = (self._gated(part, gates.inner) for part in inner.chunk(2, dim=-1))
            inner = ACTIVATIONS[self.activation](inner) * factor
        else:
            inner = ACTIVATIONS[self.activation](self._gated(inner, gates.inner))
        return self.contract(self._gated(inner, gates.neurons), WeightSlice(keep_in=context.keep_neurons))

    def _gated(self, inner: Tensor, gate: Tensor | None) -> Tensor:
        """Multiply the kept neurons, (…, neurons), by their gates."""
        return inner if gate is None else inner * first_units(gate, inner.shape[-1], self.groups).to(inner.dtype)

    def reorder(self, neurons: Tensor) -> None:
        """Sort the neurons in place by the given order, most important first; the output does not change.

        Neurons stay in their group: each group is sorted by the rank of its neurons in the order.
        """
        self.expand.reorder(units_out=neurons)
        self.contract.reorder(units_in=neurons)

    def extract(self, cut: LayerCut) -> "FeedForward":
        """Return a new feed-forward with the first neurons only."""
        small = FeedForward(
            self.expand.inputs,
            cut.neurons,
            self.activation,
            self.groups,
            is_gated=self.is_gated,
            has_bias=self.has_bias,
        )
        small.expand = self.expand.extract(keep_out=cut.neurons)
        small.contract = self.contract.extract(keep_in=cut.neurons)
        return small
