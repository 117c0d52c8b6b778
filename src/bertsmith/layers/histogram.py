"""Histogram of activations, and the clipping threshold that loses least of it (calibration of 8-bit models)."""

import numpy as np
from torch import Tensor


class Histogram:
    """Counts of |value| in equal bins; the range doubles when a larger value comes."""

    BINS = 2048
    SPARSE_BINS, SPARSE_SHARE = 0.01, 0.999

    def __init__(self) -> None:
        self.counts = np.zeros(self.BINS)
        self.limit = 0.0

    def add(self, values: Tensor) -> None:
        """Count some values."""
        sizes = values.float().abs().flatten().cpu().numpy()
        largest = float(sizes.max(initial=0.0))
        self.limit = self.limit or largest
        while largest > self.limit:
            merged = self.counts.reshape(-1, 2).sum(1)
            self.counts = np.concatenate([merged, np.zeros(self.BINS // 2)])
            self.limit *= 2
        if self.limit:
            self.counts += np.histogram(sizes, self.BINS, (0.0, self.limit))[0]

    @property
    def is_sparse(self) -> bool:
        """Whether nearly all values lie in very few bins and the rest far away, so that 8 bits would lose them."""
        used = int(self.SPARSE_BINS * self.BINS)
        return bool(np.sort(self.counts)[-used:].sum() > self.SPARSE_SHARE * self.counts.sum())

    def kl_threshold(self, levels: int) -> float:
        """Return the clipping threshold of least KL divergence between the values and their form of a few levels."""
        used = int(np.flatnonzero(self.counts).max(initial=0)) + 1
        candidates = range(min(levels, used), used + 1)
        losses = [_clipping_loss(self.counts, size, levels) for size in candidates]
        best = candidates[int(np.argmin(losses))]
        return float(min(best + 0.5, used) * self.limit / self.BINS)


def _clipping_loss(counts: np.ndarray, size: int, levels: int) -> float:
    """KL divergence between the first bins, which get all larger values, and the same bins merged to few levels."""
    inside = counts[:size]
    clipped = inside.copy()
    clipped[-1] += counts[size:].sum()
    starts = np.unique(np.arange(levels) * size // levels)
    widths = np.diff(np.append(starts, size))
    is_used = inside > 0
    mass = np.add.reduceat(inside, starts)
    filled = np.add.reduceat(is_used.astype(float), starts)
    spread = np.repeat(mass / np.maximum(filled, 1), widths) * is_used
    if not spread.any():
        return np.inf
    p, q = clipped / clipped.sum(), spread / spread.sum()
    is_missing = (q == 0) & (p > 0)
    smoothing = 1e-4
    q = np.where(is_missing, smoothing, np.where(q > 0, q - smoothing * is_missing.sum() / (q > 0).sum(), 0.0))
    is_there = p > 0
    if (q[is_there] <= 0).any():
        q = np.maximum(q, 1e-12)
    return float((p[is_there] * np.log(p[is_there] / q[is_there])).sum())
