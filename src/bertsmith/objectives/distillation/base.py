"""The base of distillation terms: one loss between a student and its teacher over a batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from bertsmith.data.examples import TaskBatch
from bertsmith.errors import InputError
from bertsmith.models.encoder import EncoderOutput
from bertsmith.objectives.base import Sums, wide
from bertsmith.objectives.supervised import Supervised
from bertsmith.settings import Record


@dataclass(frozen=True)
class Pair:
    """Outputs of a student and its teacher for the same batch."""

    task: Supervised
    batch: TaskBatch
    student: EncoderOutput
    teacher: EncoderOutput | None
    """None if no term needs it."""
    counterparts: tuple[int, ...]
    """For each of the student's hidden states, embedding first, the index of the teacher's that it is compared with."""
    layers: tuple[int, ...] = ()
    """For each layer of the student the index of the teacher's layer it is compared with; empty to derive them from
    `counterparts`."""
    widen: Callable[[Tensor], Tensor] | None = None
    """Projects the student's hidden states to the teacher's width; None if they are equal."""

    @property
    def teacher_output(self) -> EncoderOutput:
        """The teacher's output, for terms with `needs_teacher`."""
        assert self.teacher is not None, "the term has needs_teacher"
        return self.teacher

    def teacher_layer(self, index: int) -> int:
        """Return the index of the teacher's layer that a student's layer is compared with."""
        return self.layers[index] if self.layers else self.counterparts[index + 1] - 1

    def states(self, number: int) -> tuple[Tensor, Tensor]:
        """Return hidden states `number` of the student, projected to the teacher's width, and the teacher's.

        Both pass the final norm of their network, if it has one: in pre-norm networks raw hidden states grow with
        depth, and the last layers would outweigh all other terms.
        """
        self._check_number(number)
        own = self.student.normalised(number)
        target = self.teacher_output.normalised(self.counterparts[number]).detach()
        if own.shape[-1] == target.shape[-1]:
            return wide(own), wide(target)
        if self.widen is None:
            widths = f"{own.shape[-1]} wide and the teacher's {target.shape[-1]}"
            raise InputError(f"the student's hidden states are {widths}; give the student a teacher_width head")
        return wide(self.widen(own)), wide(target)

    def real_states(self, number: int) -> tuple[Tensor, Tensor]:
        """Return `states` at real tokens only, (real tokens, width)."""
        own, target = self.states(number)
        return real_states(own, self.batch), real_states(target, self.batch)

    def first_states(self, number: int) -> tuple[Tensor, Tensor]:
        """Return `states` at the first tokens of real sequences, (sequences, width)."""
        own, target = (self.batch.layout.first_tokens(states) for states in self.states(number))
        is_real = real_sequences(self.batch)
        return own[is_real], target[is_real]

    def _check_number(self, number: int) -> None:
        last = len(self.student.hidden_states) - 1
        if not 0 <= number <= last:
            raise InputError(f"layers of a term has {number}; allowed: 0 (the embedding) to {last} (the last layer)")


class DistillationTerm(Record, ABC):
    """Settings and computation of one loss; `kind` is its name in the table of terms."""

    kind: str
    weight: float = Field(default=1.0, gt=0)
    """Weight of its mean in the total loss."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """Names of its metrics in the log."""
    needs_teacher: ClassVar[bool] = True
    reads_outputs: ClassVar[bool] = False
    """Whether it depends on the outputs of the heads, so that it trains them."""
    compares_states: ClassVar[bool] = False
    """Whether it needs hidden states of equal width."""

    @abstractmethod
    def sums(self, pair: Pair) -> Sums:
        """Return the loss, summed over the targets that `count` counts, in at least float32."""

    def count(self, task: Supervised, batch: TaskBatch) -> Tensor:
        """Return the number of targets that the loss is averaged over; by default real tokens."""
        return torch.full((), batch.real_tokens, device=batch.tokens.device)  # without synchronisation


def real_states(states: Tensor, batch: TaskBatch) -> Tensor:
    """Select the hidden states of real tokens: (batch, length, width) or (tokens, width) -> (real tokens, width)."""
    is_token = batch.layout.is_token
    if batch.layout.is_packed:
        return states[: batch.real_tokens]  # padding is at the end
    return states.flatten(0, 1) if is_token is None else states[is_token]


def real_sequences(batch: TaskBatch) -> Tensor:
    """Return True for sequences with text, (batch,): a packed batch may end in padding or empty sequences."""
    layout = batch.layout
    is_real = layout.lengths(batch.tokens.device) > 0
    return is_real if layout.starts is None else is_real & (layout.starts[:-1] < batch.real_tokens)


def real_rows(batch: TaskBatch) -> Tensor:
    """Return True at the real tokens of padded rows, (batch, max_length)."""
    layout = batch.layout
    lengths = torch.where(real_sequences(batch), layout.lengths(batch.tokens.device), 0)
    return torch.arange(layout.max_length, device=batch.tokens.device) < lengths[:, None]


def sum_losses(losses: list[Tensor]) -> Tensor:
    """Return the sum of one or more losses."""
    return torch.stack(losses).sum()


LayerMap = Literal["uniform", "skip", "last"] | tuple[int, ...]
"""A rule, or for each layer of the student the number of the teacher's layer, from 1.

"uniform": layer m learns from layer ⌊m · L_T / L_S⌋ (Jiao et al. 2020). "skip": every ⌊L_T / L_S⌋-th layer, and the
last from the last (Sun et al. 2019, PKD-Skip). "last": the topmost layers (PKD-Last).
"""


def counterparts(layer_map: LayerMap, student: int, teacher: int) -> tuple[int, ...]:
    """Return for each of the student's hidden states, embedding first, the index of the teacher's.

    `student` and `teacher` are numbers of layers.

    >>> counterparts("uniform", 4, 12)
    (0, 3, 6, 9, 12)
    >>> counterparts("last", 6, 12)
    (0, 7, 8, 9, 10, 11, 12)
    """
    if isinstance(layer_map, tuple):
        if len(layer_map) != student or not all(1 <= number <= teacher for number in layer_map):
            raise InputError(
                f"distillation.layers is {list(layer_map)}; allowed: a number from 1 to {teacher} for each of the "
                f"student's {student} layers"
            )
        return (0, *layer_map)
    if student > teacher:
        raise InputError(
            f"the student has {student} layers and its teacher {teacher}; allowed: at most as many, or "
            "distillation.layers as a list"
        )
    if layer_map == "last":
        return (0, *range(teacher - student + 1, teacher + 1))
    if layer_map == "skip":
        return (*(number * (teacher // student) for number in range(student)), teacher)
    return tuple(number * teacher // student for number in range(student + 1))
