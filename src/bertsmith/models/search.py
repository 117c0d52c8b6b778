"""Similarity of texts: compare vectors, rank texts, and search a corpus by meaning."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, overload

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from bertsmith.errors import InputError
from bertsmith.models.heads.task import Similarity

_CHUNK = 1 << 16  # corpus vectors that are compared at a time


@dataclass(frozen=True)
class Hit:
    """A text that was found."""

    index: int
    """Position in the corpus."""
    score: float
    text: str


class VectorModel(Protocol):
    """A model that embeds queries and documents, such as `bertsmith.Model`."""

    @property
    def similarity_kind(self) -> Similarity: ...
    def encode_query(self, texts: Iterable[str]) -> Tensor: ...
    def encode_document(self, texts: Iterable[str], *, show_progress: bool = False) -> Tensor: ...


def similarities(first: Tensor, second: Tensor, kind: Similarity) -> Tensor:
    """Return the similarity of every vector of `first` with every one of `second`.

    Shape: (n, width), (m, width) -> (n, m).
    """
    match kind:
        case "cosine":
            return normalize(first, dim=-1) @ normalize(second, dim=-1).T
        case "dot":
            return first @ second.T
        case "euclidean":
            return -torch.cdist(first, second)
        case "manhattan":
            return -torch.cdist(first, second, p=1)


def pairwise_similarities(first: Tensor, second: Tensor, kind: Similarity) -> Tensor:
    """Return the similarities of corresponding vectors: (n, width), (n, width) -> (n,)."""
    match kind:
        case "cosine":
            return cosine_similarity(first, second, dim=-1)
        case "dot":
            return (first * second).sum(-1)
        case "euclidean":
            return -(first - second).norm(dim=-1)
        case "manhattan":
            return -(first - second).norm(p=1, dim=-1)


class SearchIndex:
    """The vectors of a corpus, for exact search.

        index = bertsmith.SearchIndex(bertsmith.load("small"), texts)
        for hit in index.search("how do I get my money back", top_k=3):
            print(f"{hit.score:.2f}  {hit.text}")

    Prompts of the model for queries and documents are used if it has any.
    """

    def __init__(self, model: VectorModel, texts: Iterable[str], *, show_progress: bool = False) -> None:
        if isinstance(texts, str):
            raise InputError("the corpus is a string; it must be a list of strings")
        self.model, self.texts = model, list(texts)
        self.vectors = model.encode_document(self.texts, show_progress=show_progress)

    def __len__(self) -> int:
        return len(self.texts)

    @overload
    def search(  # type: ignore[overload-overlap]  # a string is an iterable of strings, too
        self, queries: str, *, top_k: int | None = ...
    ) -> list[Hit]: ...
    @overload
    def search(self, queries: Iterable[str], *, top_k: int | None = ...) -> list[list[Hit]]: ...
    def search(self, queries: str | Iterable[str], *, top_k: int | None = 10) -> list[Hit] | list[list[Hit]]:
        """Return the most similar texts of one query, or of each of several, best first; `top_k` = None for all."""
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k is {top_k}; allowed: 1 or more, or None for all")
        asked = [queries] if isinstance(queries, str) else list(queries)
        found = self._best(self.model.encode_query(asked), min(top_k or len(self), len(self))) if asked else []
        return found[0] if isinstance(queries, str) else found

    def _best(self, queries: Tensor, count: int) -> list[list[Hit]]:
        """Return the best texts of every query, comparing some vectors of the corpus at a time."""
        scores, indices = queries.new_empty(len(queries), 0), queries.new_empty(len(queries), 0, dtype=torch.long)
        for begin in range(0, len(self), _CHUNK):
            chunk = similarities(queries, self.vectors[begin : begin + _CHUNK], self.model.similarity_kind)
            places = torch.arange(begin, begin + chunk.shape[1], device=chunk.device).expand_as(chunk)
            scores, indices = torch.cat([scores, chunk], dim=1), torch.cat([indices, places], dim=1)
            scores, best = scores.topk(min(count, scores.shape[1]), dim=1)
            indices = indices.gather(1, best)
        rows = zip(indices.tolist(), scores.tolist(), strict=True)
        return [[Hit(i, score, self.texts[i]) for i, score in zip(*row, strict=True)] for row in rows]
