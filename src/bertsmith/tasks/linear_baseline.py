"""Logistic regression on tf-idf of words and characters: the baseline that a fine-tuned classifier should beat."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding_bag

WORD_LENGTHS = (1, 2)
CHARACTER_LENGTHS = (2, 3, 4, 5)
INVERSE_PENALTY = 10.0
"""Weight of the loss beside the L2 penalty: the C of scikit-learn."""
MAX_ITERATIONS = 100


def word_ngrams(text: str) -> list[str]:
    """Return single words and pairs of words.

    >>> word_ngrams("Hi you")
    ['hi', 'you', 'hi you']
    """
    words = _words(text)
    return [" ".join(words[i : i + n]) for n in WORD_LENGTHS for i in range(len(words) - n + 1)]


def character_ngrams(text: str) -> list[str]:
    """Return the n-grams of characters inside words, which begin and end with a "#".

    >>> character_ngrams("Hi")
    ['#h', 'hi', 'i#', '#hi', 'hi#', '#hi#']
    """
    words = [f"#{word}#" for word in _words(text)]
    return [word[i : i + n] for word in words for n in CHARACTER_LENGTHS for i in range(len(word) - n + 1)]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class Bags(NamedTuple):
    """Sparse rows: row i has the entries from offsets[i] up to offsets[i + 1]."""

    indices: Tensor
    weights: Tensor
    offsets: Tensor

    def times(self, matrix: Tensor) -> Tensor:
        """Return the product with a dense matrix, (rows, columns)."""
        return embedding_bag(self.indices, matrix, self.offsets, mode="sum", per_sample_weights=self.weights)


class LinearBaseline:
    """A linear classifier of texts, trained in a second or two on some thousand texts."""

    def __init__(self, texts: Sequence[str], labels: Sequence[str]) -> None:
        """Minimise INVERSE_PENALTY · Σ cross-entropy + ½ ‖matrix‖² by L-BFGS."""
        documents = Counter(gram for text in texts for grams in _ngrams(text) for gram in set(grams))
        self.index = {gram: index for index, gram in enumerate(documents)}
        self.rarity = [math.log((1 + len(texts)) / (1 + count)) + 1 for count in documents.values()]
        self.labels = sorted(set(labels))
        bags, targets = self.bags(texts), torch.tensor([self.labels.index(label) for label in labels])
        matrix = torch.zeros(len(self.index), len(self.labels), requires_grad=True)
        bias = torch.zeros(len(self.labels), requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [matrix, bias], max_iter=MAX_ITERATIONS, history_size=10, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            optimizer.zero_grad()
            error = cross_entropy(bags.times(matrix) + bias, targets, reduction="sum")
            total = (INVERSE_PENALTY * error + 0.5 * matrix.square().sum()) / len(texts)
            total.backward()
            return total

        optimizer.step(loss)
        self.matrix, self.bias = matrix.detach(), bias.detach()

    def predict(self, texts: Sequence[str]) -> list[str]:
        """Return the most probable label of each text."""
        scores = self.bags(texts).times(self.matrix) + self.bias
        return [self.labels[index] for index in scores.argmax(-1).tolist()]

    def bags(self, texts: Sequence[str]) -> Bags:
        """Return the tf-idf weights of texts; words and characters each have length 1."""
        indices, weights, offsets = list[int](), list[float](), list[int]()
        for text in texts:
            offsets.append(len(indices))
            for grams in _ngrams(text):
                counts = Counter(self.index[gram] for gram in grams if gram in self.index)
                values = [(1 + math.log(count)) * self.rarity[index] for index, count in counts.items()]
                length = math.hypot(*values) if values else 1.0
                indices += counts
                weights += [value / length for value in values]
        return Bags(torch.tensor(indices, dtype=torch.long), torch.tensor(weights), torch.tensor(offsets))


def _ngrams(text: str) -> Iterator[list[str]]:
    """Yield the n-grams of words and those of characters, which are never equal."""
    yield [f"word:{gram}" for gram in word_ngrams(text)]
    yield character_ngrams(text)
