"""The contract of a term: one loss between a student and its teacher over a batch."""

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
    """A student and its teacher after the same batch."""

    task: Supervised
    batch: TaskBatch
    student: EncoderOutput
    teacher: EncoderOutput | None
    """None where no term needs it."""
    counterparts: tuple[int, ...]
    """For each of the student's hidden states, embedding first, the index of the teacher's that it is compared with."""
    layers: tuple[int, ...] = ()
    """For each layer of the student the teacher's that it is to be like, counted from 0; empty for the layers that the
    counterparts leave."""
    widen: Callable[[Tensor], Tensor] | None = None
    """What makes the student's states as wide as the teacher's; None where they are."""

    @property
    def teacher_output(self) -> EncoderOutput:
        """The teacher, which a term needs that asks for it."""
        assert self.teacher is not None, "a term that needs a teacher has one"
        return self.teacher

    def layer_like(self, index: int) -> int:
        """The teacher's layer that one of the student's is to be like, both counted from 0."""
        return self.layers[index] if self.layers else self.counterparts[index + 1] - 1

    def states(self, number: int) -> tuple[Tensor, Tensor]:
        """State `number` of the student, as wide as the teacher's, and the one it is to be like, as they lie.

        Both past the final norm of their network, where it has one (norms first): raw ones would be compared by how
        far each layer's stream has grown, and the last layers would outweigh all other terms.
        """
        own = self.student.normalised(self._known(number, len(self.student.hidden_states) - 1))
        like = self.teacher_output.normalised(self.counterparts[number]).detach()
        if own.shape[-1] == like.shape[-1]:
            return wide(own), wide(like)
        if self.widen is None:
            widths = f"{own.shape[-1]} wide and the teacher's {like.shape[-1]}"
            raise InputError(f"the student's states are {widths}; give the student a teacher_width head")
        return wide(self.widen(own)), wide(like)

    def real_states(self, number: int) -> tuple[Tensor, Tensor]:
        """Likewise at real tokens only, (real tokens, width)."""
        own, like = self.states(number)
        return real_states(own, self.batch), real_states(like, self.batch)

    def first_states(self, number: int) -> tuple[Tensor, Tensor]:
        """Likewise at the first tokens of real sequences, (sequences, width)."""
        own, like = (self.batch.layout.first_tokens(states) for states in self.states(number))
        is_real = real_sequences(self.batch)
        return own[is_real], like[is_real]

    def _known(self, number: int, last: int) -> int:
        if not 0 <= number <= last:
            raise InputError(f"a term's layers name {number}; allowed: 0, the embedding, to {last}, the student's last")
        return number


class DistillationTerm(Record, ABC):
    """The settings of a loss and how it is computed; `kind` is its name in the table of terms."""

    kind: str
    weight: float = Field(default=1.0, gt=0)
    """How much its mean counts in the loss."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """What else is reported of it."""
    needs_teacher: ClassVar[bool] = True
    reads_outputs: ClassVar[bool] = False
    """Whether it looks at what the heads say, so that these learn from it."""
    compares_states: ClassVar[bool] = False
    """Whether the states of both must be of one width."""

    @abstractmethod
    def sums(self, pair: Pair) -> Sums:
        """The loss, summed over what `count` counts, in at least float32."""

    def count(self, task: Supervised, batch: TaskBatch) -> Tensor:
        """What the loss is a mean over: real tokens, unless a term says otherwise."""
        return torch.tensor(batch.real_tokens, device=batch.tokens.device)


def real_states(states: Tensor, batch: TaskBatch) -> Tensor:
    """The states of real tokens: (batch, length, width) or (tokens, width) -> (real tokens, width)."""
    is_token = batch.layout.is_token
    if batch.layout.is_packed:
        return states[: batch.real_tokens]  # filling stands at the end
    return states.flatten(0, 1) if is_token is None else states[is_token]


def real_sequences(batch: TaskBatch) -> Tensor:
    """Which sequences hold text, (batch,): a packed batch may end in filling or in empty sequences."""
    layout = batch.layout
    is_real = layout.lengths(batch.tokens.device) > 0
    return is_real if layout.starts is None else is_real & (layout.starts[:-1] < batch.real_tokens)


def real_rows(batch: TaskBatch) -> Tensor:
    """Which places of padded rows hold text, (batch, longest)."""
    layout = batch.layout
    lengths = torch.where(real_sequences(batch), layout.lengths(batch.tokens.device), 0)
    return torch.arange(layout.max_length, device=batch.tokens.device) < lengths[:, None]


def added(losses: list[Tensor]) -> Tensor:
    """The sum of some losses, of which there is at least one."""
    return torch.stack(losses).sum()


LayerMap = Literal["uniform", "skip", "last"] | tuple[int, ...]
"""A rule, or for each layer of the student the number of the teacher's, from 1.

"uniform": layer m is like m · L_T / L_S, rounded down (Jiao et al. 2020). "skip": every ⌊L_T / L_S⌋-th layer, the last
like the last (Sun et al. 2019, PKD-Skip). "last": the topmost layers (PKD-Last).
"""


def counterparts(layer_map: LayerMap, student: int, teacher: int) -> tuple[int, ...]:
    """For each state of a student of so many layers, embedding first, that of its teacher; raises InputError.

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
            f"the student has {student} layers and its teacher {teacher}; allowed: as many or fewer, or "
            "distillation.layers as a list"
        )
    if layer_map == "last":
        return (0, *range(teacher - student + 1, teacher + 1))
    if layer_map == "skip":
        return (*(number * (teacher // student) for number in range(student)), teacher)
    return tuple(number * teacher // student for number in range(student + 1))
