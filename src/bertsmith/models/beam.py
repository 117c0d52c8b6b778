"""Beam search with a length penalty (Wu et al. 2016, as the Transformer's own code carries it out)."""

import torch
from torch import Tensor

from bertsmith.models.decoding import GenerationConfig, Steps, until


def search(steps: Steps, config: GenerationConfig, start: int, end: int, limits: Tensor) -> list[list[int]]:
    """The best hypothesis of every row, without start and end; a row's result does not depend on the others.

    Alive hypotheses are followed, finished ones wait. Each step looks at 2 · beam continuations, so that those which
    end cannot starve the alive ones. A row is done when no alive hypothesis can overtake its best finished one any
    more, even at the most favourable length. A single beam has no alternatives: its first end is the end.

    Shape: limits (rows,), the most tokens of each sequence.
    """
    rows, beam = steps.rows, config.beam
    device = limits.device
    candidates = 2 * beam if beam > 1 else 1
    steps.repeat(beam)
    first_row = torch.arange(rows, device=device)[:, None] * beam
    alive = torch.full((rows, beam), -torch.inf, device=device)
    alive[:, 0] = 0.0  # all beams begin alike: only one may spread
    finished = torch.full((rows, beam), -torch.inf, device=device)
    alive_tokens = torch.full((rows, beam, 1), start, device=device)
    finished_tokens = torch.full((rows, beam, 1), end, device=device)
    is_done = limits <= 0
    length = 0
    while not is_done.all():
        scores = steps.next(alive_tokens[:, :, -1].flatten()).unflatten(0, (rows, beam))
        length += 1
        sums = alive[:, :, None] + scores  # (rows, beam, vocabulary)
        best, index = sums.flatten(1).topk(candidates)  # (rows, candidates)
        origin, token = index // scores.shape[-1], index % scores.shape[-1]
        grown = _pick(alive_tokens, origin)
        grown = torch.cat([grown, token[:, :, None]], dim=2)  # (rows, candidates, 1 + length)

        is_end = token == end
        ended = torch.where(is_end, best / _penalty(length, config.length_penalty), -torch.inf)
        # a row that is done keeps what it has, whatever the others still do
        ended = torch.where(is_done[:, None], -torch.inf, ended)
        finished_tokens = torch.nn.functional.pad(finished_tokens, (0, 1), value=end)
        finished, kept = torch.cat([finished, ended], dim=1).topk(beam)
        finished_tokens = _pick(torch.cat([finished_tokens, grown], dim=1), kept)

        going_on = torch.where(is_end, -torch.inf, best)
        if candidates < beam + 1:
            alive, chosen = going_on, torch.zeros_like(index)
        else:
            alive, chosen = going_on.topk(beam)
        alive_tokens = _pick(grown, chosen)
        steps.select((first_row + origin.gather(1, chosen)).flatten())

        # the penalty grows with the length, so the limit gives an alive hypothesis its best chance
        bound = alive[:, 0] / _penalty(limits, config.length_penalty)
        is_done = is_done | (finished[:, 0] >= bound)
        is_at_limit = ~is_done & (length >= limits)
        unfinished = torch.where(is_at_limit & finished[:, 0].isneginf(), 0.0, -torch.inf)[:, None]
        finished, kept = torch.cat([finished, unfinished], dim=1).topk(beam)
        finished_tokens = _pick(torch.cat([finished_tokens, alive_tokens[:, :1]], dim=1), kept)
        is_done = is_done | is_at_limit
    return [until(row[1:], end) for row in finished_tokens[:, 0].tolist()]


def _penalty(length: int | Tensor, alpha: float) -> float | Tensor:
    """((5 + length) / 6)^α; the end counts as a token, the start does not."""
    return ((5 + length) / 6) ** alpha


def _pick(tokens: Tensor, index: Tensor) -> Tensor:
    """The hypotheses at some places of every row: (rows, n, length), (rows, m) -> (rows, m, length)."""
    return tokens.gather(1, index[:, :, None].expand(-1, -1, tokens.shape[2]))
