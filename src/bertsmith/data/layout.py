"""Memory layout of the sequences of a batch: padded rows or packed tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertsmith.errors import InputError


def scatter_rows(tokens: Tensor, positions: Tensor, rows: int) -> Tensor:
    """Write tokens to distinct rows of a tensor of zeros.

    Shape: tokens (tokens, …), positions (tokens,), int64; the result (rows, …).
    """
    return _ScatterRows.apply(tokens, positions, rows)


def gather_rows(rows: Tensor, positions: Tensor) -> Tensor:
    """Read distinct rows, the inverse of `scatter_rows`.

    Shape: rows (rows, …), positions (tokens,), int64; the result (tokens, …).
    """
    return _GatherRows.apply(rows, positions)


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(tokens: Tensor, positions: Tensor, rows: int) -> Tensor:
        return tokens.new_zeros(rows, *tokens.shape[1:]).index_copy_(0, positions, tokens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (positions,) = ctx.saved_tensors
        return gather_rows(gradient, positions), None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(rows: Tensor, positions: Tensor) -> Tensor:
        return rows.index_select(0, positions)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        rows, positions = inputs
        ctx.save_for_backward(positions)
        ctx.rows = rows.shape[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (positions,) = ctx.saved_tensors
        return scatter_rows(gradient, positions, ctx.rows), None


_MIN_LENGTH_RATIO = 0.75  # relative to the longest of a group; a shorter sequence starts the next group
_MIN_SPLIT_LENGTH = 16  # splitting shorter groups does not pay off


@dataclass(frozen=True)
class LengthGroups:
    """Sequences grouped by similar length, each group padded to its longest."""

    sizes: tuple[tuple[int, int], ...]
    """Number of sequences and maximum length of each group."""
    is_token: tuple[Tensor | None, ...]
    """True at the real tokens of each group, (sequences, length); None if it has no padding."""
    positions: Tensor
    """Position of every real token in the flattened rows of all groups, (tokens,)."""
    rows: int
    """Number of tokens of all groups, including padding."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "LengthGroups":
        """Group sequences by their lengths."""
        sizes = np.asarray(lengths, dtype=np.int64)
        order = np.argsort(-sizes, kind="stable")
        order = order[: int((sizes > 0).sum())]
        groups: list[tuple[int, int]] = []
        is_token: list[Tensor | None] = []
        begins = np.zeros(len(sizes), dtype=np.int64)
        first = rows = 0
        while first < len(order):
            max_length = int(sizes[order[first]])
            near = sizes[order[first:]] >= (max_length * _MIN_LENGTH_RATIO if max_length > _MIN_SPLIT_LENGTH else 1)
            members = order[first : first + int(near.sum())]
            begins[members] = rows + max_length * np.arange(len(members))
            real = np.arange(max_length) < sizes[members, None]
            is_token.append(None if real.all() else torch.from_numpy(real))
            groups.append((len(members), max_length))
            first, rows = first + len(members), rows + max_length * len(members)
        offsets = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        positions = torch.from_numpy(np.repeat(begins, sizes) + offsets)
        return cls(tuple(groups), tuple(is_token), positions, rows)


@dataclass(frozen=True)
class SequenceLayout:
    """Positions of the sequences in a batch; create one with `padded`, `full`, `rows` or `packed`.

    Padded: tensors are (batch, length, …), real tokens first in each row; `is_token` is True at them, or None without
    padding. Packed: tensors are (tokens, …), sequence i is starts[i]:starts[i + 1], at most `max_length` long. Trailing
    empty sequences are allowed, so that `starts` can have the same size in every batch.
    """

    batch: int
    max_length: int
    is_token: Tensor | None = None
    starts: Tensor | None = None

    @classmethod
    def padded(cls, is_token: Tensor) -> "SequenceLayout":
        """Return the layout of rows with padding at their ends.

        Shape: is_token (batch, length), bool.
        """
        return cls(batch=is_token.shape[0], max_length=is_token.shape[1], is_token=is_token)

    @classmethod
    def full(cls, batch: int, length: int) -> "SequenceLayout":
        """Return the layout of rows without padding."""
        return cls(batch=batch, max_length=length)

    @classmethod
    def rows(cls, tokens: Tensor, mask: Tensor | None) -> "SequenceLayout":
        """Return the layout of rows with padding where the mask is 0; no mask means no padding.

        Padding before a token raises InputError: attention, convolutions and positions assume it at the end of a row.
        Compiled code, which cannot look at values, skips the check.
        Shape: tokens and mask (batch, length).
        """
        if mask is None:
            return cls.full(*tokens.shape)
        is_token = mask.bool()
        if not torch.compiler.is_compiling():
            is_wrong = (is_token[:, 1:] & ~is_token[:, :-1]).any(-1)
            if is_wrong.any():
                raise InputError(
                    f"attention_mask has padding before a token in row {int(is_wrong.nonzero()[0])}; pad at the end of "
                    "rows (padding_side='right')"
                )
        return cls.padded(is_token)

    @classmethod
    def packed(cls, starts: Tensor, max_length: int) -> "SequenceLayout":
        """Return the layout of concatenated sequences.

        Shape: starts (sequences + 1,), int32, first 0, last the number of tokens.
        """
        return cls(batch=starts.shape[0] - 1, max_length=max_length, starts=starts)

    @property
    def is_packed(self) -> bool:
        return self.starts is not None

    @property
    def are_rows(self) -> bool:
        """Whether packed sequences have equal lengths, so that their tokens can be viewed as rows without padding.

        False on a GPU, where checking would synchronise, and in compiled code.
        """
        return not torch.compiler.is_compiling() and self._are_rows

    @cached_property
    def _are_rows(self) -> bool:
        if self.starts is None or self.starts.device.type != "cpu":
            return False
        return self.starts.tolist() == [self.max_length * index for index in range(self.batch + 1)]

    def to(self, device: torch.device | str) -> "SequenceLayout":
        """Return the layout with its tensors on another device."""
        return SequenceLayout(
            batch=self.batch,
            max_length=self.max_length,
            is_token=None if self.is_token is None else self.is_token.to(device, non_blocking=True),
            starts=None if self.starts is None else self.starts.to(device, non_blocking=True),
        )

    def pin_memory(self) -> "SequenceLayout":
        """Return the layout with its tensors in pinned memory."""
        return SequenceLayout(
            batch=self.batch,
            max_length=self.max_length,
            is_token=None if self.is_token is None else self.is_token.pin_memory(),
            starts=None if self.starts is None else self.starts.pin_memory(),
        )

    def lengths(self, device: torch.device | str | None = None) -> Tensor:
        """Return the number of tokens of each sequence, (batch,)."""
        if self.starts is not None:
            return self.starts.diff().long()
        if self.is_token is not None:
            return self.is_token.sum(-1)
        return torch.full((self.batch,), self.max_length, device=device)

    def positions(self, tokens: Tensor) -> Tensor:
        """Return the position of every token in its sequence, from 0: (batch, length) or (tokens,).

        `tokens` is any tensor in this layout; only its device and, when packed, its length are read.
        """
        if self.starts is None:
            row = torch.arange(self.max_length, device=tokens.device)
            return row.expand(self.batch, self.max_length)
        position = torch.arange(tokens.shape[0], device=tokens.device)
        return position - self.starts[self.sequence_index(tokens)]

    def sequence_index(self, tokens: Tensor) -> Tensor:
        """Return the index of every token's sequence: (batch, length) or (tokens,)."""
        if self.starts is None:
            rows = torch.arange(self.batch, device=tokens.device)
            return rows[:, None].expand(self.batch, self.max_length)
        position = torch.arange(tokens.shape[0], device=tokens.device, dtype=self.starts.dtype)
        # search all starts and subtract 1: a slice of them is a view, which compiled code cannot search
        return torch.searchsorted(self.starts, position, right=True) - 1

    def first_tokens(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of first tokens: (batch, width). Rows of empty sequences are arbitrary."""
        if self.starts is None:
            return hidden[:, 0]
        return hidden[self.starts[:-1].clamp(max=hidden.shape[0] - 1).long()]

    def last_tokens(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of the last token of each sequence, (batch, width); arbitrary for empty ones."""
        if self.starts is not None:
            return hidden[(self.starts[1:] - 1).clamp(min=0).long()]
        if self.is_token is None:
            return hidden[:, -1]
        last = (self.is_token.sum(-1) - 1).clamp(min=0)
        # (batch, length, width) -> (batch, width)
        return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[-1])).squeeze(1)

    def means(self, hidden: Tensor) -> Tensor:
        """Return the mean hidden state of each sequence: (batch, width), 0 for empty sequences.

        Sums are at least in float32: those of long sequences lose too much precision in bfloat16.
        """
        lengths = self.lengths(hidden.device).clamp(min=1)[:, None]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        if self.starts is None:
            masked = hidden if self.is_token is None else torch.where(self.is_token[..., None], hidden, 0)
            return (masked.sum(1, dtype=dtype) / lengths).to(hidden.dtype)
        sums = hidden.new_zeros(self.batch, hidden.shape[-1], dtype=dtype)
        return (sums.index_add(0, self.sequence_index(hidden), hidden.to(dtype)) / lengths).to(hidden.dtype)

    def maxima(self, hidden: Tensor) -> Tensor:
        """Return the maximum of every channel over each sequence: (batch, width), 0 for empty sequences."""
        if self.starts is None:
            masked = hidden if self.is_token is None else torch.where(self.is_token[..., None], hidden, -torch.inf)
            return masked.amax(1)
        sequence = self.sequence_index(hidden)[:, None].expand_as(hidden)
        empty = hidden.new_zeros(self.batch, hidden.shape[-1])
        return empty.scatter_reduce(0, sequence, hidden, "amax", include_self=False)

    def pad(self, hidden: Tensor) -> tuple[Tensor, "SequenceLayout"]:
        """Return packed tensors (tokens, …) as zero-padded rows (batch, max_length, …), and their layout."""
        if self.starts is None:
            return hidden, self
        if self.are_rows:
            return hidden.unflatten(0, (self.batch, self.max_length)), SequenceLayout.full(self.batch, self.max_length)
        is_token = torch.arange(self.max_length, device=hidden.device) < self.lengths()[:, None]
        rows = scatter_rows(hidden, self._padded_positions(hidden), self.batch * self.max_length)
        return rows.unflatten(0, (self.batch, self.max_length)), SequenceLayout.padded(is_token)

    def unpad(self, rows: Tensor, like: Tensor) -> Tensor:
        """Return padded rows (batch, max_length, …) in this packed layout, (tokens, …): the inverse of `pad`.

        `like` is any tensor in this layout.
        """
        if self.starts is None:
            return rows
        if self.are_rows:
            return rows.flatten(0, 1)
        return gather_rows(rows.flatten(0, 1), self._padded_positions(like))

    def select(self, sequences: Tensor) -> tuple["SequenceLayout", Tensor]:
        """Return the layout of some sequences, and their indices on the first axis of tensors in this layout.

        Packed, these are indices of tokens; padded, of rows, which the caller cuts to the new maximum length. On a GPU
        it synchronises.
        Shape: sequences (selected,), int64, in their new order; indices (tokens,) or (selected,).
        """
        if self.starts is None:
            if self.is_token is None:
                return SequenceLayout.full(len(sequences), self.max_length), sequences
            is_token = self.is_token[sequences]
            return SequenceLayout.padded(is_token[:, : int(is_token.sum(-1).max())]), sequences
        lengths = self.lengths()[sequences]
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        begins = self.starts[:-1].long()[sequences] - starts[:-1]
        positions = torch.arange(int(starts[-1]), device=starts.device) + torch.repeat_interleave(begins, lengths)
        return SequenceLayout.packed(starts.to(self.starts.dtype), int(lengths.max())), positions

    def _padded_positions(self, like: Tensor) -> Tensor:
        """Return the position of every packed token in flattened padded rows, (tokens,)."""
        if like.device.type == "cpu" and not torch.compiler.is_compiling():
            return self._cpu_positions
        return self.sequence_index(like) * self.max_length + self.positions(like)

    @cached_property
    def _cpu_positions(self) -> Tensor:
        """Padded positions on a CPU, computed once for all layers."""
        assert self.starts is not None
        starts = self.starts.numpy().astype(np.int64)
        begins = np.arange(self.batch) * self.max_length - starts[:-1]
        with torch.inference_mode(False):  # the layout may be used in training later
            return torch.from_numpy(np.arange(starts[-1]) + np.repeat(begins, np.diff(starts)))

    @cached_property
    def groups(self) -> LengthGroups:
        """Sequences grouped by similar length; on a GPU computing them synchronises."""
        return LengthGroups.of(self.lengths().tolist())
