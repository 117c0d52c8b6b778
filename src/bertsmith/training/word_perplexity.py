"""Perplexity per word of a causal language model, which does not depend on the vocabulary.

    word perplexity = exp(−Σ ln P(text) / words)        bits per byte = −Σ ln P(text) / (ln 2 · bytes)

Words are counted by white space and bytes in UTF-8, both on the original text; ln P sums over whatever tokens the
vocabulary makes of it. Figures of two vocabularies are comparable only if both tokenizers are lossless on the text.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from bertsmith.data.batch import packed
from bertsmith.errors import InputError
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads import MaskDecoderConfig
from bertsmith.models.model import Model
from bertsmith.objectives.base import wide
from bertsmith.text.tokenizer import Tokenizer

MICRO_TOKENS = 4096
"""Tokens that the model reads at once; more if a window is longer."""
_MAX_NATS_PER_WORD = 700  # beyond it, exp overflows

Watch = Callable[[int, int], None]
"""Progress callback: tokens scored, and all tokens."""


class Window(NamedTuple):
    """Tokens begin:stop of a text, of which first:stop are scored."""

    begin: int
    first: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Negative log-likelihood of a text, and the counts to divide it by."""

    nats: float
    words: int
    bytes: int
    tokens: int
    line_ends: int = 0
    """Predicted line ends, each of which counts as a word."""

    @property
    def word_perplexity(self) -> float:
        nats_per_word = self.nats / (self.words + self.line_ends)
        if nats_per_word > _MAX_NATS_PER_WORD:
            raise InputError(
                f"the text has {self.words:,} words for {self.tokens:,} tokens, too few for a perplexity per word; "
                "give written text, or evaluate proteins with --metric residues"
            )
        return math.exp(nats_per_word)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / (math.log(2) * self.bytes)

    @property
    def token_perplexity(self) -> float:
        """Perplexity per token; not comparable between vocabularies."""
        return math.exp(self.nats / self.tokens)


def score_windows(tokens: int, length: int, stride: int) -> Iterator[Window]:
    """Yield windows of `length` tokens that begin every `stride` tokens and score every token once.

    A token is scored in the first window that has it, where its left context is longest.
    """
    begin = scored = 0
    while scored < tokens:
        stop = min(begin + length, tokens)
        yield Window(begin, scored, stop)
        begin, scored = begin + stride, stop


def max_context(model: Model) -> int:
    """Return the longest sequence that a model reads."""
    tables = [head.max_length for head in model.config.heads if isinstance(head, MaskDecoderConfig)]
    return min([model.config.encoder.embedding.max_length, *tables])


@torch.inference_mode()
def token_log_probabilities(
    model: Model,
    texts: Sequence[np.ndarray],
    *,
    start: int,
    length: int,
    stride: int,
    watch: Watch | None = None,
) -> list[np.ndarray]:
    """Return ln P of every token of every text, given the tokens before it in its window.

    A window begins with [CLS] (`start`), from which its first token is predicted; no [SEP] is read or predicted.

    Shape: texts (tokens,), int; the result (tokens,), float64.
    """
    if not 1 <= length <= max_context(model):
        raise InputError(f"length is {length}; allowed: 1 to {max_context(model)}, the model's maximum")
    if not 1 <= stride <= length:
        raise InputError(f"stride is {stride}; allowed: 1 to length, {length}")
    found = [np.empty(len(text), dtype=np.float64) for text in texts]
    total, done = sum(map(len, texts)), 0
    with model.evaluating():
        for group in _groups(texts, length, stride):
            values = _log_probabilities(model, [(texts[index], window) for index, window in group], start)
            for (index, window), scored in zip(group, values, strict=True):
                found[index][window.first : window.stop] = scored
                done += len(scored)
            if watch is not None:
                watch(done, total)
    return found


def _groups(texts: Sequence[np.ndarray], length: int, stride: int) -> Iterator[list[tuple[int, Window]]]:
    """Yield windows in groups of at most MICRO_TOKENS tokens."""
    group: list[tuple[int, Window]] = []
    size = 0
    for index, text in enumerate(texts):
        for window in score_windows(len(text), length, stride):
            tokens = window.stop - window.begin
            if group and size + tokens > MICRO_TOKENS:
                yield group
                group, size = [], 0
            group.append((index, window))
            size += tokens
    if group:
        yield group


def _log_probabilities(model: Model, group: list[tuple[np.ndarray, Window]], start: int) -> list[np.ndarray]:
    # the last token of a window is only predicted, so [CLS] takes its position
    rows = [np.concatenate([[start], text[window.begin : window.stop - 1]]) for text, window in group]
    tokens, layout = packed(rows, 0)
    offsets = np.cumsum([0, *map(len, rows)])
    positions = [
        offset + np.arange(window.first - window.begin, window.stop - window.begin)
        for offset, (_, window) in zip(offsets, group, strict=False)
    ]
    targets = [text[window.first : window.stop] for text, window in group]
    device = model.device
    inputs = EncoderInputs(tokens.to(device), layout.to(device), is_causal=True)
    wanted = torch.from_numpy(np.concatenate(positions)).to(device)
    hidden = model.run(inputs, Want(masked_positions=wanted)).masked_states
    scores = wide(model.head("masked_tokens")(hidden, model.token_table))  # (targets, vocabulary)
    chosen = torch.from_numpy(np.concatenate(targets).astype(np.int64)).to(device)
    values = scores.log_softmax(-1).gather(-1, chosen[:, None]).squeeze(-1)
    return np.split(values.double().cpu().numpy(), np.cumsum([len(target) for target in targets])[:-1])


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], *, allow_lossy: bool = False
) -> tuple[list[np.ndarray], bool]:
    """Return the tokens of texts, and whether decoding restores every text.

    Raise InputError if it does not and `allow_lossy` is false.
    """
    rows = [np.array(row, dtype=np.int64) for row in tokenizer.encode_plain(texts)]
    changed = sum(tokenizer.decode(row) != text for row, text in zip(rows, texts, strict=True))
    if changed and not allow_lossy:
        raise InputError(
            f"decoding does not restore {changed:,} of {len(texts):,} texts: the tokenizer lowercases, normalises or "
            "has unknown letters, so this would be the perplexity of another text; use a model with a bytes tokenizer "
            "that does not lowercase, or --allow-lossy to measure it anyway"
        )
    return rows, not changed


def measure(log_probabilities: Sequence[np.ndarray], originals: Sequence[str], *, line_ends: int = 0) -> Perplexity:
    """Divide the log-probabilities of all texts by the words and bytes of the original texts and their line ends.

    One sum over all tokens: a mean over windows or texts would give short ones the weight of long ones.
    """
    values = np.concatenate(log_probabilities)
    return Perplexity(
        nats=-math.fsum(values.tolist()),
        words=sum(len(text.split()) for text in originals),
        bytes=sum(len(text.encode()) for text in originals) + line_ends,
        tokens=len(values),
        line_ends=line_ends,
    )
