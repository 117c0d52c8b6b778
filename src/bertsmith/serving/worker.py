"""Run the token sequences of one batch through the model: the only module of the service that handles tensors."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bertsmith.data.batch import packed, padded
from bertsmith.data.inference import to_device
from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.base import Runner
from bertsmith.engines.onnx_trace import max_input_length
from bertsmith.layers.subnet import Subnet
from bertsmith.models.encoder import EncoderInputs
from bertsmith.serving.requests import Operation, TokenSequence

Rows = Literal["packed", "padded", "fixed"]
"""Layout of a batch: packed, for PyTorch; padded to the longest row, for ONNX; padded to one of a few shapes, for
compiled models."""

_MIN_LENGTH_RATIO = 0.75  # a sequence shorter than this share of the longest one starts the next group
_MIN_GROUP_TOKENS = 192  # matrix products on a CPU reach full speed from this many tokens
_MIN_ROW_LENGTH = 16  # shorter sequences are not split into further groups


@torch.inference_mode()
def run_batch(
    runner: Runner,
    operation: Operation,
    sequences: Sequence[TokenSequence],
    *,
    rows: Rows = "packed",
    pad: int = 0,
    subnet: Subnet | None = None,
) -> list[np.ndarray]:
    """Return the float32 outputs of every sequence, in order (shapes: serving/requests.py)."""
    outputs: list[np.ndarray] = [np.empty(0)] * len(sequences)
    lengths = [len(sequence.tokens) for sequence in sequences]
    # a kernel for packed sequences computes all lengths together; other attention pads to the longest of a group
    device = runner.device.type
    pads = device == "cpu" or not (torch.is_autocast_enabled(device) or runner.has_early_exits)
    for indices in length_groups(lengths, rows, pads=pads):
        group = [sequences[index] for index in indices]
        for index, output in zip(indices, _run_group(runner, operation, group, rows, pad, subnet), strict=True):
            outputs[index] = output
    return outputs


def length_groups(lengths: Sequence[int], rows: Rows, *, pads: bool = True) -> list[list[int]]:
    """Group the indices of sequences of similar length, longest first; each group is one forward pass.

    A packed batch is one group unless attention pads to its longest sequence; then a group has at least
    `_MIN_GROUP_TOKENS` tokens.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    if rows == "packed" and not pads:
        return [order]
    groups: list[list[int]] = []
    tokens = 0
    for index in order:
        length, max_length = lengths[index], lengths[groups[-1][0]] if groups else 0
        is_similar = (
            _fixed_length(length) == _fixed_length(max_length)
            if rows == "fixed"
            else length >= _MIN_LENGTH_RATIO * max_length
        )
        if groups and (
            is_similar or max_length <= _MIN_ROW_LENGTH or (rows == "packed" and tokens < _MIN_GROUP_TOKENS)
        ):
            groups[-1].append(index)
            tokens += length
        else:
            groups.append([index])
            tokens = length
    return groups


def _run_group(
    runner: Runner, operation: Operation, group: Sequence[TokenSequence], rows: Rows, pad: int, subnet: Subnet | None
) -> list[np.ndarray]:
    """Return the outputs of sequences that are computed in one forward pass."""
    is_rounded = rows == "packed" and runner.device.type == "cpu" and not runner.has_early_exits
    filled = [*group, *padding_sequences([len(one.tokens) for one in group], pad)] if is_rounded else group
    tokens, layout, types = _tensors(filled, rows, pad, max_input_length(runner.config))
    tokens, layout = to_device(tokens, runner.device), to_device(layout, runner.device)
    inputs = EncoderInputs(tokens, layout, None if types is None else to_device(types, runner.device), subnet)
    if operation == "fill_mask":
        positions = [start + one.mask_positions for start, one in zip(_starts(group, layout), group, strict=True)]
        flat = to_device(torch.from_numpy(np.concatenate(positions)), runner.device)
        probabilities = _array(runner.mask_probabilities(inputs, flat))
        return np.split(probabilities, np.cumsum([len(one) for one in positions])[:-1])
    if operation == "vectors":
        return list(_array(runner.vectors(inputs)))[: len(group)]
    outputs = _array(runner.outputs(tokens, layout, inputs.types, subnet=subnet))
    if not runner.is_for_tokens:
        return list(outputs)[: len(group)]
    lengths = [len(one.tokens) for one in group]
    if layout.is_packed:
        return [output.copy() for output in np.split(outputs, np.cumsum(lengths))[: len(group)]]
    return [row[:length].copy() for row, length in zip(outputs, lengths, strict=False)]


def _tensors(
    group: Sequence[TokenSequence], rows: Rows, pad: int, max_length: int | None
) -> tuple[Tensor, SequenceLayout, Tensor | None]:
    """Return tokens, layout and token types (0 for sequences without types; None if no sequence has types)."""
    collate = packed if rows == "packed" else padded
    sequences = [one.tokens for one in group]
    has_types = any(one.types is not None for one in group)
    types = [np.zeros_like(one.tokens) if one.types is None else one.types for one in group] if has_types else None
    if rows == "fixed":  # add rows of one token, up to a power of two
        missing = 2 ** (len(group) - 1).bit_length() - len(group)
        sequences = sequences + [np.array([pad])] * missing
        types = None if types is None else types + [np.zeros(1, dtype=np.int64)] * missing
    tokens, layout = collate(sequences, pad)
    token_types = None if types is None else collate(types, 0)[0]
    if rows == "fixed" and layout.is_token is not None:
        length = _fixed_length(layout.max_length)
        extra = min(length, max_length or length) - layout.max_length
        tokens = torch.nn.functional.pad(tokens, (0, extra), value=pad)
        layout = SequenceLayout.padded(torch.nn.functional.pad(layout.is_token, (0, extra)))
        token_types = None if token_types is None else torch.nn.functional.pad(token_types, (0, extra))
    return tokens, layout, token_types


def padding_sequences(lengths: Sequence[int], pad: int) -> list[TokenSequence]:
    """Return sequences of padding that round the number of tokens of a forward pass up.

    On a CPU, PyTorch's matrix products cache some megabytes for every distinct number of rows. No sequence is longer
    than the longest of `lengths`, because a model may take no longer ones.
    """
    tokens, max_length = sum(lengths), max(lengths)
    missing = -tokens % min(64, max(8, 2 ** (tokens.bit_length() - 4)))
    sizes = (min(max_length, missing - start) for start in range(0, missing, max_length))
    return [TokenSequence(np.full(size, pad, dtype=np.int64)) for size in sizes]


def _fixed_length(length: int) -> int:
    """Round up to a power of two, because a model is compiled for each length."""
    return max(_MIN_ROW_LENGTH, 2 ** (length - 1).bit_length())


def _starts(group: Sequence[TokenSequence], layout: SequenceLayout) -> list[int]:
    """Return the index of the first token of every sequence among the flattened tokens."""
    if layout.is_packed:
        return [0, *np.cumsum([len(one.tokens) for one in group])[:-1].tolist()]
    return [index * layout.max_length for index in range(len(group))]


def _array(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.float().cpu().numpy()
    return array
