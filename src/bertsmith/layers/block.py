"""One layer: a mixer and a feed-forward, each with its residual sum and norm; in a decoder a cross mixer between."""

import copy
from collections.abc import Callable

from torch import Tensor, nn

from bertsmith.layers.branch import ConvolutionBranch
from bertsmith.layers.call import ForwardPass
from bertsmith.layers.feedforward import FeedForward
from bertsmith.layers.mixers import Mixer
from bertsmith.layers.mixers.base import State
from bertsmith.layers.norm import Norm
from bertsmith.layers.subnet import LayerCut


class Block(nn.Module):
    """mixer → (cross mixer →) feed-forward, normalised after each residual sum (post-norm) or before each part.

    The last mixer reads the call's memory: in a decoder that is the cross mixer, elsewhere the only one there is.
    """

    def __init__(
        self,
        mixer: Mixer,
        feedforward: FeedForward,
        mixer_norm: Norm,
        feedforward_norm: Norm,
        *,
        dropout: float,
        is_pre_norm: bool,
        cross: Mixer | None = None,
        cross_norm: Norm | None = None,
        branch: ConvolutionBranch | None = None,
    ) -> None:
        super().__init__()
        self.mixer, self.feedforward = mixer, feedforward
        self.mixer_norm, self.feedforward_norm = mixer_norm, feedforward_norm
        self.cross, self.cross_norm, self.branch = cross, cross_norm, branch
        self.dropout = nn.Dropout(dropout)
        self.is_pre_norm = is_pre_norm

    @property
    def units(self) -> LayerCut:
        """All the units this layer has."""
        return LayerCut(self.mixer.heads, self.feedforward.neurons, self.feedforward.groups)

    def forward(self, hidden: Tensor, call: ForwardPass) -> Tensor:
        entered = hidden
        own = call if self.cross is None else call.with_memory(None)
        hidden = self._around(hidden, self.mixer_norm, lambda states: self.mixer(states, own))
        if self.cross is not None and self.cross_norm is not None:
            cross = self.cross
            hidden = self._around(hidden, self.cross_norm, lambda states: cross(states, call))
        hidden = self._around(hidden, self.feedforward_norm, lambda states: self.feedforward(states, call))
        return hidden if self.branch is None else self.branch(entered, hidden, call)

    def start(self, call: ForwardPass) -> tuple[State, State]:
        """The states of the two mixers before the first token."""
        if self.cross is None:
            return self.mixer.start(call), ()
        return self.mixer.start(call.with_memory(None)), self.cross.start(call)

    def step(
        self, hidden: Tensor, states: tuple[State, State], call: ForwardPass
    ) -> tuple[Tensor, tuple[State, State]]:
        """The states of one more token of each sequence, (batch, width), and the mixers' next states."""
        kept: list[State] = list(states)

        def step(mixer: Mixer, place: int, call: ForwardPass) -> Callable[[Tensor], Tensor]:
            def take(entering: Tensor) -> Tensor:
                mixed, kept[place] = mixer.step(entering, kept[place], call)
                return mixed

            return take

        own = call if self.cross is None else call.with_memory(None)
        hidden = self._around(hidden, self.mixer_norm, step(self.mixer, 0, own))
        if self.cross is not None and self.cross_norm is not None:
            hidden = self._around(hidden, self.cross_norm, step(self.cross, 1, call))
        hidden = self._around(hidden, self.feedforward_norm, lambda entering: self.feedforward(entering, call))
        return hidden, (kept[0], kept[1])

    def maps(self, hidden: Tensor, call: ForwardPass) -> dict[str, Tensor]:
        """The mixer's maps for the states that enter this block."""
        return self.mixer.maps(self.mixer_norm(hidden) if self.is_pre_norm else hidden, call)

    def reorder(self, heads: Tensor, neurons: Tensor) -> None:
        """Puts heads and neurons in the given orders; the output does not change."""
        self.mixer.reorder(heads)
        if self.cross is not None:
            self.cross.reorder(heads)
        self.feedforward.reorder(neurons)

    def extract(self, cut: LayerCut) -> "Block":
        """A block of its own with the first units only."""
        return Block(
            self.mixer.extract(cut),
            self.feedforward.extract(cut),
            copy.deepcopy(self.mixer_norm),
            copy.deepcopy(self.feedforward_norm),
            dropout=self.dropout.p,
            is_pre_norm=self.is_pre_norm,
            cross=None if self.cross is None else self.cross.extract(cut),
            cross_norm=copy.deepcopy(self.cross_norm),
            branch=copy.deepcopy(self.branch),
        )

    def _around(self, hidden: Tensor, norm: Norm, part: Callable[[Tensor], Tensor]) -> Tensor:
        """The residual sum around a part, with its norm."""
        if self.is_pre_norm:
            return hidden + self.dropout(part(norm(hidden)))
        return norm(hidden + self.dropout(part(hidden)))
