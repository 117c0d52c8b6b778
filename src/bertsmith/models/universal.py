"""The Universal Transformer (Dehghani et al. 2019): layers as steps, with step embeddings and adaptive halting.

    before step t:  hidden + sinusoid(position) + sinusoid(t)
    step t:         hidden = layer(…)
    with halting:   halted positions do not change; the output is the mixture described in layers/halting.py

With `sharing = "all"` every step is the same layer. A sub-network of less depth takes fewer steps, counted from 1.
"""

import copy
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.block import Block
from bertsmith.layers.embedding import Embedding
from bertsmith.layers.halting import Halting, HaltingConfig, Pondering
from bertsmith.layers.positions import RelativeTable, SinusoidPositions, position_vectors, sinusoids
from bertsmith.layers.subnet import Subnet
from bertsmith.models.encoder import BlockCall, Encoder
from bertsmith.settings import Record


class UniversalConfig(Record):
    """Layers as steps: sinusoids of the position and of the step are added before each."""

    halting: HaltingConfig | None = None
    """Adaptive halting per position; None runs all steps at every position."""


class StepSignal(nn.Module):
    """Sinusoidal position and step embeddings."""

    steps: Tensor

    def __init__(self, max_length: int, steps: int, width: int) -> None:
        super().__init__()
        self.max_length = max_length
        self.positions = SinusoidPositions(max_length, width)
        table = sinusoids(torch.arange(1, steps + 1, dtype=torch.float64), width)
        # not saved: computed from the config
        self.register_buffer("steps", table.to(torch.get_default_dtype()), persistent=False)

    def forward(self, hidden: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the position embeddings: (length, width) for padded rows, which broadcasts, or (tokens, width)."""
        if layout.max_length > self.max_length:
            raise InputError(
                f"a sequence may have {layout.max_length} tokens; this model takes at most {self.max_length}"
            )
        return position_vectors(self.positions.table, hidden, layout)


class UniversalEncoder(Encoder):
    """An encoder whose layers are steps (Dehghani et al. 2019)."""

    def __init__(
        self,
        embedding: Embedding,
        blocks: Sequence[Block],
        final_norm: nn.Module,
        relative: RelativeTable | None,
        *,
        signal: StepSignal,
        halting: Halting | None,
    ) -> None:
        super().__init__(embedding, blocks, final_norm, relative)
        self.signal, self.halting = signal, halting

    def _check_last_block(self) -> NoReturn:
        raise InputError("a universal encoder has no separate last layer; use another encoder")

    @torch.no_grad()
    def extract(self, subnet: Subnet) -> "UniversalEncoder":
        """Return a smaller encoder of its own that computes the same as this one with `subnet`."""
        plain = super().extract(subnet)
        signal = copy.deepcopy(self.signal)
        signal.steps = signal.steps[: len(plain.blocks)].clone()
        return UniversalEncoder(
            plain.embedding,
            plain._blocks(),
            plain.final_norm,
            plain.relative,
            signal=signal,
            halting=copy.deepcopy(self.halting),
        )

    def _through(
        self, blocks: Sequence[BlockCall], hidden: Tensor, collected: list[Tensor] | None = None
    ) -> tuple[Tensor, Pondering | None]:
        """Run all steps; the inputs in `collected` contain the signal.

        The last of `collected` is the output of the last step; the result is the mixture, where positions halt.
        """
        layout, memory = blocks[0][1].layout, blocks[0][1].memory
        if memory is not None:
            raise InputError("a universal stack cannot attend to a memory; use it as an encoder only")
        positions = self.signal(hidden, layout)
        pondering = None if self.halting is None else self.halting.start(hidden)
        for step, (block, context) in enumerate(blocks):
            entering = hidden + (positions + self.signal.steps[step]).to(hidden.dtype)
            output = block(entering, context)
            if self.halting is None or pondering is None:
                hidden = output
            else:
                hidden = torch.where(pondering.is_running[..., None], output, hidden)
                pondering = self.halting(entering, output, pondering, is_last=step + 1 == len(blocks))
            if collected is not None:
                collected.append(entering)
        if collected is not None:
            collected.append(hidden)
        return hidden if pondering is None else pondering.mixture.to(hidden.dtype), pondering
