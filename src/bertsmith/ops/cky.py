"""CKY on the device of the scores, for training; `answers.chart.best_trees` is the same without PyTorch."""

import torch
from torch import Tensor


@torch.no_grad()
def best_trees(scores: Tensor, words: Tensor) -> Tensor:
    """Return which spans are in the best binary tree of each sentence; of equal splits the leftmost wins.

    best(i, j) = score(i, j) + max over k of best(i, k) + best(k, j), for all sentences and starts at once.
    Shape: scores (batch, most + 1, most + 1) at [begin, end], words (batch,), 1 or more -> the same as scores, bool.
    """
    batch, edges, _ = scores.shape
    from_begin = scores.new_full(scores.shape, -torch.inf)  # at [begin, width]
    from_end = torch.full_like(from_begin, -torch.inf)  # at [end, edges − width]
    splits = torch.zeros(scores.shape, dtype=torch.long, device=scores.device)
    for width in range(1, edges):
        starts = edges - width
        best = scores.diagonal(width, 1, 2)  # (batch, starts)
        if width > 1:
            sums = from_begin[:, :starts, 1:width] + from_end[:, width:, starts + 1 :]  # (batch, starts, splits)
            top, split = sums.max(-1)
            splits[:, :starts, width] = split + 1
            best = best + top
        from_begin[:, :starts, width] = best
        from_end[:, width:, starts] = best
    chosen = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)  # at [begin, width], from the root down
    chosen[:, 0].scatter_(1, words[:, None], True)
    begin = torch.arange(edges, device=scores.device).expand(batch, edges)
    for width in range(edges - 1, 1, -1):
        # spans that are not chosen mark width 0, which no span has: selecting the chosen ones would synchronise
        left = torch.where(chosen[:, :, width], splits[:, :, width], 0)
        right = torch.where(chosen[:, :, width], width - left, 0)
        chosen.flatten(1).scatter_(1, begin * edges + left, True)
        chosen.flatten(1).scatter_(1, (begin + left) * edges + right, True)
    widths = begin[:, None, :] - begin[:, :, None]  # of the span at [begin, end]
    return chosen.gather(2, widths.clamp(min=0)) & (widths > 0)
