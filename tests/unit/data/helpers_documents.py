"""Documents that consist of sentence lengths only."""

import numpy as np


class Documents:
    """Documents with given sentence lengths."""

    def __init__(self, sentences: list[list[int]]) -> None:
        self.sentences = sentences
        self.lengths = np.array([sum(lengths) for lengths in sentences])

    def sentence_starts(self, document: int) -> np.ndarray:
        return np.cumsum([0, *self.sentences[document]])


def some_documents(count: int, seed: int) -> Documents:
    draw = np.random.default_rng(seed)
    return Documents([draw.integers(1, 30, size=int(draw.integers(1, 40))).tolist() for _ in range(count)])
