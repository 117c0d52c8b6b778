"""Random sequences for tests of masking, packed and padded, and a small vocabulary."""

import numpy as np
import torch

from bertsmith.data.batch import TokenBatch
from bertsmith.data.corruption import Corrupted, Vocabulary
from bertsmith.data.layout import SequenceLayout
from bertsmith.data.units import unit_numbers, word_begins

SIZE, PAD, START, END, MASK = 60, 0, 1, 2, 3


def vocabulary() -> Vocabulary:
    is_special = torch.zeros(SIZE, dtype=torch.bool)
    is_special[:5] = True
    starts_word = torch.ones(SIZE, dtype=torch.bool)
    starts_word[40:] = False
    return Vocabulary(SIZE, MASK, is_special, starts_word)


def sequences(count: int, max_length: int, seed: int) -> list[torch.Tensor]:
    draw = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        text = draw.integers(5, SIZE, size=int(draw.integers(1, max_length - 1)))
        result.append(torch.tensor([START, *text, END]))
    return result


def packed(items: list[torch.Tensor], samples: list[int]) -> TokenBatch:
    lengths = torch.tensor([len(item) for item in items])
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    layout = SequenceLayout.packed(starts, int(lengths.max()))
    return TokenBatch(torch.cat(items), layout, torch.tensor(samples), int(lengths.sum()))


def padded(items: list[torch.Tensor], samples: list[int]) -> TokenBatch:
    tokens = torch.nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=PAD)
    lengths = torch.tensor([len(item) for item in items])
    is_token = torch.arange(tokens.shape[1]) < lengths[:, None]
    return TokenBatch(tokens, SequenceLayout.padded(is_token), torch.tensor(samples), int(lengths.sum()))


def candidates(batch: TokenBatch) -> torch.Tensor:
    """Return True for tokens that are not special."""
    return ~vocabulary().is_special[batch.tokens]


def words_of(batch: TokenBatch) -> torch.Tensor:
    """Return the index of each token's word in a packed batch."""
    starts_word = vocabulary().starts_word[batch.tokens]
    return unit_numbers(word_begins(starts_word, candidates(batch), batch.layout.positions(batch.tokens)))


def chosen(result: Corrupted) -> torch.Tensor:
    """Return True for the tokens to predict."""
    is_chosen = torch.zeros(result.tokens.numel(), dtype=torch.bool)
    is_chosen[result.positions[result.targets >= 0]] = True
    return is_chosen
