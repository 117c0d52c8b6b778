"""The encoder-decoder model (Vaswani et al. 2017): reads one sequence, writes another by beam search or sampling."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertsmith.data.layout import SequenceLayout
from bertsmith.data.random import bits, key, uniform
from bertsmith.layers.context import Memory
from bertsmith.layers.subnet import Subnet
from bertsmith.models.config import ModelConfig
from bertsmith.models.encoder import Encoder, EncoderInputs, Want
from bertsmith.models.heads.pretraining import NextToken
from bertsmith.models.model import Model, check_texts
from bertsmith.settings import Record


class GenerationConfig(Record):
    """How the next tokens are chosen and when a sequence ends."""

    method: Literal["beam", "greedy", "sample"] = "beam"
    beam: int = Field(default=4, gt=0)
    """Hypotheses that are followed side by side, for method = "beam"."""
    length_penalty: float = Field(default=0.6, ge=0)
    """α of log P / ((5 + length) / 6)^α, by which finished hypotheses are compared; 0 for none."""
    extra_length: int = Field(default=50, ge=0)
    """A sequence ends at the latest when it has this many tokens more than its source."""
    temperature: float = Field(default=1.0, gt=0)
    """Below 1 likely tokens become likelier, for method = "sample"."""
    top_k: int | None = Field(default=None, gt=0)
    """Sample among this many likeliest tokens only."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample among the fewest tokens that have this much probability together."""
    seed: int = Field(default=0, ge=0)


class Steps:
    """A decoder that is fed one token of every row at a time and keeps what its mixers have seen."""

    def __init__(
        self,
        stack: Encoder,
        score: Callable[[Tensor], Tensor],
        memory: Memory,
        *,
        table: Tensor | None = None,
        subnet: Subnet | None = None,
        backend: str = "auto",
    ) -> None:
        self.stack, self.score, self.table = stack, score, table
        self.rows, self.position = memory.layout.batch, 0
        context = stack.context(memory.hidden_states, SequenceLayout.full(self.rows, 1), backend, memory)
        self.blocks = stack.active_blocks(context, subnet)
        self.states = [block.start(context) for block, context in self.blocks]

    def next(self, tokens: Tensor) -> Tensor:
        """The log-probabilities of what follows these tokens: (rows,) -> (rows, vocabulary)."""
        hidden = self.stack.embedding.at(tokens, self.position, self.table)
        for index, (block, context) in enumerate(self.blocks):
            hidden, self.states[index] = block.step(hidden, self.states[index], context)
        self.position += 1
        return self.score(self.stack.final_norm(hidden)).float().log_softmax(-1)

    def repeat(self, times: int) -> None:
        """Makes every row `times` rows, one after the other."""
        self.rows *= times

        def repeated(tensor: Tensor) -> Tensor:
            return tensor.repeat_interleave(times, dim=0)

        self.states = [(tuple(map(repeated, own)), tuple(map(repeated, cross))) for own, cross in self.states]
        blocks = []
        for block, context in self.blocks:
            assert context.memory is not None
            is_token = context.memory.layout.is_token
            layout = (
                SequenceLayout.full(self.rows, context.memory.layout.max_length)
                if is_token is None
                else SequenceLayout.padded(repeated(is_token))
            )
            # the cross mixers have projected the memory; its states are not read again
            blocks.append((block, context.with_memory(Memory(context.memory.hidden_states, layout))))
        self.blocks = blocks

    def skip(self, rows: Tensor) -> None:
        """Mark the rows, (rows,) bool, whose scores are not read any more; all rows are computed here."""

    def select(self, rows: Tensor) -> None:
        """Goes on with these rows; each must look at the memory of the row whose place it takes."""
        self.states = [(tuple(part[rows] for part in own), cross) for own, cross in self.states]


def write(steps: Steps, config: GenerationConfig, start: int, end: int, limits: Tensor) -> list[list[int]]:
    """One sequence per row, without start and end, each token the likeliest or drawn by chance.

    Shape: limits (rows,), the most tokens of each sequence.
    """
    tokens = torch.full((steps.rows,), start, device=limits.device)
    is_done = limits <= 0
    written: list[Tensor] = []
    streams = bits(config.seed, torch.arange(steps.rows, device=limits.device))
    while not is_done.all():
        steps.skip(is_done)
        scores = steps.next(tokens)
        if config.method == "sample":
            tokens = _drawn(scores, config, uniform(streams, torch.full_like(streams, len(written))))
        else:
            tokens = scores.argmax(-1)
        is_done = is_done | (tokens == end)
        written.append(torch.where(is_done, end, tokens))
        is_done = is_done | (len(written) >= limits)
    rows = torch.stack(written, dim=1).tolist() if written else [[] for _ in range(steps.rows)]
    return [until(row, end) for row in rows]


def until(tokens: list[int], end: int) -> list[int]:
    """The tokens before the first `end`."""
    return tokens[: tokens.index(end)] if end in tokens else tokens


def _drawn(scores: Tensor, config: GenerationConfig, chance: Tensor) -> Tensor:
    """One token of each row, drawn by its probability among those that are let in: (rows, vocabulary) -> (rows,)."""
    ordered, tokens = (scores / config.temperature).softmax(-1).sort(descending=True, dim=-1)
    before = ordered.cumsum(-1) - ordered  # the probability of the likelier ones
    is_let_in = before < config.top_p
    if config.top_k is not None:
        is_let_in[:, config.top_k :] = False
    shares = (ordered * is_let_in).cumsum(-1)
    position = torch.searchsorted(shares, (chance[:, None] * shares[:, -1:]).contiguous(), right=True)
    last = is_let_in.sum(-1, keepdim=True) - 1  # rounding must not reach past the last one
    return tokens.gather(-1, torch.minimum(position, last)).squeeze(-1)


def beam_search(steps: Steps, config: GenerationConfig, start: int, end: int, limits: Tensor) -> list[list[int]]:
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
        steps.skip(is_done.repeat_interleave(beam))
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


class Seq2Seq(Model):
    """A model whose decoder looks at its encoder's states; calling it gives the encoder's states, as for any model."""

    def __init__(self, config: ModelConfig, encoder: Encoder, decoder: Encoder, heads: dict[str, nn.Module]) -> None:
        super().__init__(config, encoder, heads)
        self.decoder = decoder

    def decode(
        self,
        tokens: Tensor,
        layout: SequenceLayout,
        memory: Memory,
        *,
        subnet: Subnet | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """The decoder's states for whole target sequences, each token seeing those before it.

        Shape: tokens (batch, length), or (tokens,) when packed; the result has one more axis, the width.
        """
        return self.decoder(tokens, layout, subnet=subnet, backend=backend, memory=memory, table=self.borrowed_table)

    def scores(self, states: Tensor) -> Tensor:
        """The scores of every token of the target vocabulary: (…, width) -> (…, vocabulary)."""
        head = self.head("next_token")
        assert isinstance(head, NextToken)
        return self._table_scores(states, head.bias)

    def exit_scores(self, layer: int, states: Tensor) -> Tensor:
        """Return the scores of the exit after so many decoder blocks: (…, width) -> (…, vocabulary)."""
        return self.head("decoder_exits")(layer, states, self._table_scores)

    def _table_scores(self, states: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product with the token vectors that the decoder reads, by their rows: int8 ones multiply codes."""
        embedding = (self.decoder if self.owns_target_table else self.encoder).embedding
        return embedding.rows.scores(states, embedding.token_table, bias)

    @property
    def owns_target_table(self) -> bool:
        """Whether the decoder has token vectors of its own, not the encoder's."""
        assert self.config.decoder is not None
        return self.config.decoder.embedding.table != "given"

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        config: GenerationConfig | None = None,
        *,
        start: int | None = None,
        end: int | None = None,
        subnet: Subnet | None = None,
        begin: Callable[[Memory], Steps] | None = None,
    ) -> list[list[int]]:
        """The sequence written for each row, without its start and end; these default to the tokenizer's.

        `begin` makes the decoder of a batch from the encoder's output; None for all blocks (models/adaptive_depth.py).
        Shape: input_ids, attention_mask (batch, length).
        """
        config = config or GenerationConfig()
        start = self.require_tokenizer().start if start is None else start
        end = self.require_tokenizer().separator if end is None else end
        with self.evaluating():
            states = self(input_ids, attention_mask, subnet=subnet)
            layout = SequenceLayout.rows(input_ids, attention_mask)
            limits = layout.lengths(input_ids.device) + config.extra_length
            if self.decoder.embedding.position is not None:
                limits = limits.clamp(max=self.decoder.embedding.max_length)
            memory, table = Memory(states, layout), self.borrowed_table
            steps = (
                Steps(self.decoder, self.scores, memory, table=table, subnet=subnet) if begin is None else begin(memory)
            )
            make = beam_search if config.method == "beam" else write
            return make(steps, config, start, end, limits)

    def translate(
        self,
        texts: Sequence[str],
        config: GenerationConfig | None = None,
        *,
        batch_size: int = 32,
        progress: Callable[[int], None] = lambda texts: None,
        begin: Callable[[Memory], Steps] | None = None,
    ) -> list[str]:
        """One text for each text; `progress` gets the number of texts just done, `begin` is that of `generate`."""
        check_texts("translate", texts, batch_size)
        tokenizer = self.require_tokenizer()
        # texts of like length together: rows that are done wait for the longest
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        results = [""] * len(texts)
        for first in range(0, len(order), batch_size):
            positions = order[first : first + batch_size]
            batch = self._batch([texts[position] for position in positions])
            written = self.generate(batch["input_ids"], batch["attention_mask"], config, begin=begin)
            for position, tokens in zip(positions, written, strict=True):
                results[position] = tokenizer.decode(tokens)
            progress(len(positions))
        return results

    def attention_maps(self, source: Tensor, target: Tensor) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """The maps of the encoder's layers and of the decoder's, where "cross_attention" aligns target and source.

        Shape: source and target (batch, length), rows without pads; maps (batch, heads, length, length looked at).
        """
        layout, target_layout = SequenceLayout.full(*source.shape), SequenceLayout.full(*target.shape)
        read = self.encoder.run(EncoderInputs(source, layout), Want(maps=True))
        memory, table = Memory(read.last, layout), self.borrowed_table
        written = self.decoder.run(EncoderInputs(target, target_layout, memory=memory, table=table), Want(maps=True))
        return list(read.maps), list(written.maps)

    def redraw_features(self, step: int, seed: int) -> None:
        super().redraw_features(step, seed)
        self.decoder.redraw_features(step, key(seed, 1))  # draws of its own

    @property
    def decoder_vocabulary(self) -> int:
        """Number of tokens of the target vocabulary."""
        assert self.config.decoder is not None
        return self.config.decoder.vocabulary

    @property
    def borrowed_table(self) -> Tensor | None:
        """The encoder's token vectors, if the decoder has none of its own."""
        return None if self.owns_target_table else self.token_table
