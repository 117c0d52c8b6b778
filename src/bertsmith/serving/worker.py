"""Sequences as one batch, and what a model says of each: the only place of the service that knows tensors."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bertsmith.answers.texts import softmax
from bertsmith.data.batch import packed, padded
from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.base import Runner
from bertsmith.engines.exit_runner import ModelRunner
from bertsmith.engines.onnx_graph import longest_input
from bertsmith.layers.subnet import Subnet
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.serving.requests import Operation, TokenSequence

Rows = Literal["packed", "padded", "fixed"]
"""How a batch lies: one sequence after the other; rows filled up to the longest, for programs that know nothing else;
rows of few shapes, for code that is compiled for each."""

_NEAR = 0.75  # of the longest of a group of rows: what is shorter begins the next group
_ENOUGH = 192  # tokens of a pass from which its products are about as fast as they get on a CPU
_SHORT = 16  # tokens below which nothing is gained by another group


@torch.inference_mode()
def answers(
    runner: Runner,
    work: Operation,
    asked: Sequence[TokenSequence],
    *,
    rows: Rows = "packed",
    pad: int = 0,
    subnet: Subnet | None = None,
) -> list[np.ndarray]:
    """What is said of every sequence, in the order they are given; float32."""
    found: list[np.ndarray] = [np.empty(0)] * len(asked)
    for group in groups([len(own.tokens) for own in asked], rows, is_cpu=runner.device.type == "cpu"):
        chosen = [asked[index] for index in group]
        for index, own in zip(group, _said(runner, work, chosen, rows, pad, subnet), strict=True):
            found[index] = own
    return found


def groups(lengths: Sequence[int], rows: Rows, *, is_cpu: bool = True) -> list[list[int]]:
    """The numbers of the sequences that are computed in one pass, those of about one length together, longest first.

    Packed sequences need that only for attention on a CPU, which works on rows as long as the longest; there a pass has
    enough tokens for its products first of all. On a GPU they are one pass.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    if rows == "packed" and not is_cpu:
        return [order]
    found: list[list[int]] = []
    tokens = 0
    for index in order:
        length, longest = lengths[index], lengths[found[-1][0]] if found else 0
        is_near = _shape(length) == _shape(longest) if rows == "fixed" else length >= _NEAR * longest
        if found and (is_near or longest <= _SHORT or (rows == "packed" and tokens < _ENOUGH)):
            found[-1].append(index)
            tokens += length
        else:
            found.append([index])
            tokens = length
    return found


def _said(
    runner: Runner, work: Operation, asked: Sequence[TokenSequence], rows: Rows, pad: int, subnet: Subnet | None
) -> list[np.ndarray]:
    """What is said of sequences that are computed in one pass, in their order."""
    is_rounded = rows == "packed" and runner.device.type == "cpu" and isinstance(runner, Model)
    filled = [*asked, *_filling(sum(len(own.tokens) for own in asked), pad)] if is_rounded else asked
    tokens, layout, types = _laid(filled, rows, pad, longest_input(runner.config))
    tokens, layout = tokens.to(runner.device), layout.to(runner.device)
    types = None if types is None else types.to(runner.device)
    model = runner if isinstance(runner, Model) else runner.model if isinstance(runner, ModelRunner) else None
    if work == "fill_mask":
        if model is not None:
            return _filled(model, tokens, layout, types, asked, subnet)
        scores = _by_sequence(_array(runner.outputs(tokens, layout, types)), asked, layout)
        return [softmax(own[_places(one)]).astype(np.float32) for own, one in zip(scores, asked, strict=True)]
    if work == "vectors" and not _is_embedder(runner):
        if model is not None:
            states = model.run(EncoderInputs(tokens, layout, types, subnet)).last
        else:
            states = runner.outputs(tokens, layout, types)
        return list(_array(layout.means(states)))[: len(asked)]
    if subnet is not None and model is not None:
        outputs = model.outputs(tokens, layout, types, subnet=subnet)
    elif isinstance(runner, Model):
        outputs = runner.outputs(tokens, layout, types)
    else:
        with runner.evaluating():  # where those who leave early forget what they counted
            outputs = runner.outputs(tokens, layout, types)
    if not runner.is_for_tokens:
        return list(_array(outputs))[: len(asked)]
    return _by_sequence(_array(outputs), asked, layout)


def _filled(
    model: Model,
    tokens: Tensor,
    layout: SequenceLayout,
    types: Tensor | None,
    asked: Sequence[TokenSequence],
    subnet: Subnet | None,
) -> list[np.ndarray]:
    """Of every sequence the probabilities of all pieces at its places, (places, vocabulary)."""
    if "masked_tokens" not in model.heads and model.generator is not None:
        model, subnet = model.generator, None
    begins = _begins(asked, layout)
    own = [begin + _places(one) for begin, one in zip(begins, asked, strict=True)]
    places = torch.from_numpy(np.concatenate(own)).to(tokens.device)
    inputs = EncoderInputs(tokens, layout, types, subnet)
    output = model.run(inputs, Want(masked_positions=places))
    shares = _array(model.heads["masked_tokens"](output.masked_states, model.token_table).float().softmax(-1))
    return np.split(shares, np.cumsum([len(part) for part in own])[:-1])


def _laid(
    asked: Sequence[TokenSequence], rows: Rows, pad: int, longest: int | None
) -> tuple[Tensor, SequenceLayout, Tensor | None]:
    """Tokens, their layout and types, which are 0 where none are given."""
    lie = packed if rows == "packed" else padded
    sequences = [own.tokens for own in asked]
    has_types = any(own.types is not None for own in asked)
    types = [np.zeros_like(own.tokens) if own.types is None else own.types for own in asked] if has_types else None
    if rows == "fixed":  # rows of one token each fill a batch up to the next shape
        missing = 2 ** (len(asked) - 1).bit_length() - len(asked)
        sequences = sequences + [np.array([pad])] * missing
        types = None if types is None else types + [np.zeros(1, dtype=np.int64)] * missing
    tokens, layout = lie(sequences, pad)
    kinds = None if types is None else lie(types, 0)[0]
    if rows == "fixed" and layout.is_token is not None:
        extra = min(_shape(layout.longest), longest or _shape(layout.longest)) - layout.longest
        tokens = torch.nn.functional.pad(tokens, (0, extra), value=pad)
        layout = SequenceLayout.padded(torch.nn.functional.pad(layout.is_token, (0, extra)))
        kinds = None if kinds is None else torch.nn.functional.pad(kinds, (0, extra))
    return tokens, layout, kinds


def _filling(tokens: int, pad: int) -> list[TokenSequence]:
    """A sequence of pads, or none, that rounds the tokens of a pass up to one of few numbers.

    PyTorch's products on a CPU keep some megabytes for each number of rows they have met, a thousand of them.
    """
    step = min(64, max(8, 2 ** (tokens.bit_length() - 4)))
    missing = -tokens % step
    return [TokenSequence(np.full(missing, pad, dtype=np.int64))] if missing else []


def _shape(length: int) -> int:
    """The next power of two, from 16 up: compiled code is made for each."""
    return max(_SHORT, 2 ** (length - 1).bit_length())


def _begins(asked: Sequence[TokenSequence], layout: SequenceLayout) -> list[int]:
    """Where every sequence begins among the flattened tokens."""
    if layout.is_packed:
        return [0, *np.cumsum([len(own.tokens) for own in asked])[:-1].tolist()]
    return [index * layout.longest for index in range(len(asked))]


def _by_sequence(values: np.ndarray, asked: Sequence[TokenSequence], layout: SequenceLayout) -> list[np.ndarray]:
    """What was said of tokens, sequence by sequence: (length, outputs) each."""
    lengths = [len(own.tokens) for own in asked]
    if layout.is_packed:
        return [part.copy() for part in np.split(values, np.cumsum(lengths))[: len(asked)]]
    return [row[:length].copy() for row, length in zip(values, lengths, strict=False)]


def _places(asked: TokenSequence) -> np.ndarray:
    return np.empty(0, dtype=np.int64) if asked.places is None else asked.places


def _is_embedder(runner: Runner) -> bool:
    return any(head.kind == "embedder" for head in runner.config.heads)


def _array(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.float().cpu().numpy()
    return array
