"""The point-wise half of a block."""

from pydantic import Field
from torch import Tensor, nn

from bertsmith.layers.context import ForwardContext
from bertsmith.layers.elementwise import ACTIVATIONS, Activation, LayerGates, first_units
from bertsmith.layers.linear import ElasticLinear, GroupedLinear, WeightSlice
from bertsmith.layers.subnet import LayerCut
from bertsmith.settings import Record


class FeedForwardConfig(Record):
    """Two linear layers with an activation between them, or, gated, with a product between them."""

    neurons: int = Field(gt=0)
    activation: Activation = "gelu"
    groups: int = Field(default=1, gt=0)
    """Blocks of the width and of the neurons that speak only to each other; ConvBERT's medium-small has 2."""
    is_gated: bool = False
    """Give each neuron a second linear form of the input, by which its activation is multiplied: GeGLU with gelu,
    SwiGLU with silu (Shazeer 2020). Two thirds of the neurons have the weights of an ungated feed-forward then."""
    has_bias: bool = True
    """Of both layers."""

    def check(self, width: int) -> None:
        """Raises ValueError if width or neurons do not divide into the groups, or groups cannot be as asked."""
        for name, count in (("width", width), ("neurons", self.neurons)):
            if count % self.groups:
                raise ValueError(f"{name} {count} is not a multiple of groups {self.groups}")
        if self.groups > 1 and (self.is_gated or not self.has_bias):
            raise ValueError(f"groups is {self.groups}; allowed with is_gated or without biases: 1")

    def build(self, width: int) -> "FeedForward":
        return FeedForward(
            width, self.neurons, self.activation, self.groups, is_gated=self.is_gated, has_bias=self.has_bias
        )

    def cut(self, cut: LayerCut) -> "FeedForwardConfig":
        """The config of the extracted part."""
        return self.model_copy(update={"neurons": cut.neurons})

    def flops(self, width: int) -> int:
        """Floating-point operations of one token's forward pass."""
        return 2 * (3 if self.is_gated else 2) * width * self.neurons // self.groups


class FeedForward(nn.Module):
    """width → neurons → width; each neuron is a unit that can be left out.

    Gated, the first layer gives two parts, what is activated and what it is multiplied by, with all neurons in each.
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
            inner = self.expand.activated(hidden, self.activation, keep_out=context.keep_neurons)
            return self.contract(self._gated(inner, gates.neurons), WeightSlice(keep_in=context.keep_neurons))
        inner = self.expand(hidden, WeightSlice(keep_out=context.keep_neurons))
        if self.is_gated:
            inner, factor = (self._gated(part, gates.inner) for part in inner.chunk(2, dim=-1))
            inner = ACTIVATIONS[self.activation](inner) * factor
        else:
            inner = ACTIVATIONS[self.activation](self._gated(inner, gates.inner))
        return self.contract(self._gated(inner, gates.neurons), WeightSlice(keep_in=context.keep_neurons))

    def _gated(self, inner: Tensor, gate: Tensor | None) -> Tensor:
        """What neurons hold, times their gates: (…, neurons kept)."""
        return inner if gate is None else inner * first_units(gate, inner.shape[-1], self.groups).to(inner.dtype)

    def reorder(self, neurons: Tensor) -> None:
        """Puts the neurons in the given order, most important first; the output does not change.

        Neurons never leave their group: each group's own take the order they have among all.
        """
        self.expand.reorder(units_out=neurons)
        self.contract.reorder(units_in=neurons)

    def extract(self, cut: LayerCut) -> "FeedForward":
        """A part of its own with the first neurons only."""
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
