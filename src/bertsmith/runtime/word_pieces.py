"""The pieces of words that are given one by one, as running text has them."""

from collections.abc import Sequence

import numpy as np

from bertsmith.runtime.tokenizer import Tokenizer


def word_pieces(tokenizer: Tokenizer, sentences: Sequence[Sequence[str]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each sentence the ids of its words as running text has them, and for every id the index of its word.

    A word that gives no id, such as a control character, has that of the unknown token.
    Shape: (ids,) both, the word indices never falling.
    """
    rows = tokenizer.encode_offsets([" ".join(words) for words in sentences])
    return [_owned(tokenizer, words, *row) for words, row in zip(sentences, rows, strict=True)]


def _owned(
    tokenizer: Tokenizer, words: Sequence[str], ids: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a sentence and the word that each belongs to: the one its last character stands in.

    Shape: ids (ids,), offsets (ids, 2).
    """
    ends = np.cumsum([len(word) + 1 for word in words])
    last = np.maximum(offsets[:, 1] - 1, offsets[:, 0])
    # the space before a word belongs to it, as in the marks of pieces that begin one
    owners = np.maximum.accumulate(np.searchsorted(ends[:-1] - 1, last, side="right"))
    ids = ids.astype(np.int64)
    missing = np.setdiff1d(np.arange(len(words)), owners)
    if not len(missing):
        return ids, owners
    places = np.searchsorted(owners, missing)
    return np.insert(ids, places, tokenizer.unknown), np.insert(owners, places, missing)
