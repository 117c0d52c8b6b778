"""One layer of an encoder: a mixer and a feed-forward, each with its residual sum and norm."""

import copy

from torch import Tensor, nn

from bertsmith.layers.call import ForwardPass
from bertsmith.layers.feedforward import FeedForward
from bertsmith.layers.mixers import Mixer
from bertsmith.layers.norm import Norm
from bertsmith.layers.subnet import LayerCut


class Block(nn.Module):
    """mixer → feed-forward, normalised after each residual sum (post-norm) or before each part (pre-norm)."""

    def __init__(
        self,
        mixer: Mixer,
        feedforward: FeedForward,
        mixer_norm: Norm,
        feedforward_norm: Norm,
        *,
        dropout: float,
        is_pre_norm: bool,
    ) -> None:
        super().__init__()
        self.mixer, self.feedforward = mixer, feedforward
        self.mixer_norm, self.feedforward_norm = mixer_norm, feedforward_norm
        self.dropout = nn.Dropout(dropout)
        self.is_pre_norm = is_pre_norm

    @property
    def units(self) -> LayerCut:
        """All the units this layer has."""
        return LayerCut(self.mixer.heads, self.feedforward.neurons, self.feedforward.groups)

    def forward(self, hidden: Tensor, call: ForwardPass) -> Tensor:
        if self.is_pre_norm:
            hidden = hidden + self.dropout(self.mixer(self.mixer_norm(hidden), call))
            return hidden + self.dropout(self.feedforward(self.feedforward_norm(hidden), call))
        hidden = self.mixer_norm(hidden + self.dropout(self.mixer(hidden, call)))
        return self.feedforward_norm(hidden + self.dropout(self.feedforward(hidden, call)))

    def maps(self, hidden: Tensor, call: ForwardPass) -> Tensor:
        """The mixer's maps for the states that enter this block."""
        return self.mixer.maps(self.mixer_norm(hidden) if self.is_pre_norm else hidden, call)

    def extract(self, cut: LayerCut) -> "Block":
        """A block of its own with the first units only."""
        return Block(
            self.mixer.extract(cut),
            self.feedforward.extract(cut),
            copy.deepcopy(self.mixer_norm),
            copy.deepcopy(self.feedforward_norm),
            dropout=self.dropout.p,
            is_pre_norm=self.is_pre_norm,
        )
