"""How good tags are: chunks by type and exact ends, as conlleval counts them, and single tags."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from bertsmith.answers.tagging import chunks
from bertsmith.tasks.base import Evaluation
from bertsmith.tasks.metrics.base import main_metric

_RATES = ("f1", "precision", "recall")


def evaluate_tags(
    said: Sequence[Sequence[str]], right: Sequence[Sequence[str]], metric: str | None, *, has_chunks: bool
) -> Evaluation:
    """The metrics of some sentences' tags; the main one is f1 where tags mark chunks and accuracy where not.

    f1, precision and recall are over all chunks together, then type by type, such as f1_PER; accuracy is of tags.
    """
    main = main_tag_metric(metric, has_chunks=has_chunks)
    hits = np.array([_hits(ours, theirs) for ours, theirs in zip(said, right, strict=True)])
    metrics: dict[str, float] = {}
    counts = np.zeros((len(hits), 3), dtype=np.int64)
    if has_chunks:
        counts, by_type = chunk_counts(said, right)
        metrics |= _rates(counts.sum(0))
        for kind, own in sorted(by_type.items()):
            metrics |= {f"{name}_{kind}": value for name, value in _rates(own).items() if kind}
    metrics["accuracy"] = _share(*hits.sum(0))

    def measure(chosen: np.ndarray) -> float:
        return _share(*hits[chosen].sum(0)) if main == "accuracy" else _rates(counts[chosen].sum(0))[main]

    return Evaluation(main, metrics, measure)


def main_tag_metric(metric: str | None, *, has_chunks: bool) -> str:
    """The name of the main figure, or a sentence if the one asked for is none of these tags."""
    return main_metric(metric, (*_RATES, "accuracy") if has_chunks else ("accuracy",))


def chunk_counts(
    said: Sequence[Sequence[str]], right: Sequence[Sequence[str]]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """How many chunks are right, were said, and are there: sentence by sentence, and type by type.

    Shape: (sentences, 3) and (3,) each.
    """
    counts = np.zeros((len(right), 3), dtype=np.int64)
    by_type: Counter[tuple[str, int]] = Counter()
    for index, (ours, theirs) in enumerate(zip(said, right, strict=True)):
        found, there = set(chunks(ours)), set(chunks(theirs))
        for place, group in enumerate((found & there, found, there)):
            counts[index, place] = len(group)
            by_type.update((chunk.type, place) for chunk in group)
    kinds = {kind for kind, _ in by_type}
    return counts, {kind: np.array([by_type[kind, place] for place in range(3)]) for kind in kinds}


def _hits(said: Sequence[str], right: Sequence[str]) -> tuple[int, int]:
    """How many tags are right, of how many."""
    return sum(ours == theirs for ours, theirs in zip(said, right, strict=True)), len(right)


def _rates(counts: np.ndarray) -> dict[str, float]:
    """F1, precision and recall from how many chunks are right, were said, and are there; 0 where there are none."""
    correct, found, there = counts.tolist()
    return {
        "f1": _share(2 * correct, found + there),
        "precision": _share(correct, found),
        "recall": _share(correct, there),
    }


def _share(part: float, whole: float) -> float:
    return 100.0 * float(part) / float(whole) if whole else 0.0
