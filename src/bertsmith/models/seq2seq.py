"""The encoder-decoder model (Vaswani et al. 2017), with beam search, greedy decoding and sampling."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bertsmith.data.layout import SequenceLayout
from bertsmith.data.random import bits, key, uniform
from bertsmith.errors import InputError
from bertsmith.layers.context import Memory
from bertsmith.layers.embedding import Embedding
from bertsmith.layers.subnet import Subnet
from bertsmith.models.config import ModelConfig
from bertsmith.models.constraints import Constraint
from bertsmith.models.encoder import Encoder, EncoderInputs, Want
from bertsmith.models.heads.pretraining import NextToken
from bertsmith.models.model import Model, check_texts
from bertsmith.ops.cumulative_sum import cumulative_sum
from bertsmith.ops.token_loss import TokenLoss
from bertsmith.settings import Record


class GenerationConfig(Record):
    """Decoding method and stopping criteria."""

    method: Literal["beam", "greedy", "sample"] = "beam"
    beam: int = Field(default=4, gt=0)
    """Beam size, for method = "beam"; 1 is greedy search."""
    length_penalty: float = Field(default=0.6, ge=0)
    """α of log P / ((5 + length) / 6)^α, by which finished hypotheses are ranked; 0 for none."""
    extra_length: int = Field(default=50, ge=0)
    """Maximum number of tokens beyond the length of the source."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits, for method = "sample"; values below 1 sharpen the distribution."""
    top_k: int | None = Field(default=None, gt=0)
    """Sample from this many most probable tokens only."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this total probability (nucleus sampling)."""
    seed: int = Field(default=0, ge=0)


class Steps:
    """Incremental decoder: takes one token per row at a time and caches the states of its mixers."""

    def __init__(
        self,
        stack: Encoder,
        score: Callable[[Tensor], Tensor],
        memory: Memory,
        *,
        table: Tensor | None = None,
        subnet: Subnet | None = None,
        backend: str = "auto",
        constraint: Constraint | None = None,
    ) -> None:
        self.stack, self.score, self.table, self.constraint = stack, score, table, constraint
        self.rows, self.position = memory.layout.batch, 0
        context = stack.context(memory.hidden_states, SequenceLayout.full(self.rows, 1), backend, memory)
        self.blocks = stack.active_blocks(context, subnet)
        self.states = [block.start(context) for block, context in self.blocks]

    def next(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities of the next token: (rows,) -> (rows, vocabulary)."""
        hidden = self.stack.embedding.at(tokens, self.position, self.table)
        for index, (block, context) in enumerate(self.blocks):
            hidden, self.states[index] = block.step(hidden, self.states[index], context)
        self.position += 1
        scores = self.score(self.stack.final_norm(hidden)).float().log_softmax(-1)
        return scores if self.constraint is None else self.constraint.restrict(tokens, scores)

    def repeat(self, times: int) -> None:
        """Repeat every row `times` times, copies adjacent."""
        self.rows *= times
        if self.constraint is not None:
            self.constraint.repeat(times)

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
            # the cross mixers have cached their projections of the memory; its hidden states are not read again
            blocks.append((block, context.with_memory(Memory(context.memory.hidden_states, layout))))
        self.blocks = blocks

    def skip(self, rows: Tensor) -> None:
        """Mark the rows, (rows,) bool, whose scores are not read any more; all rows are computed here."""

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; each must read the same memory as the row it replaces."""
        self.states = [(tuple(part[rows] for part in own), cross) for own, cross in self.states]
        if self.constraint is not None:
            self.constraint.select(rows)


def write(steps: Steps, config: GenerationConfig, start: int, end: int, limits: Tensor) -> list[list[int]]:
    """Return one greedy or sampled sequence per row, without start and end tokens.

    Shape: limits (rows,), the maximum number of tokens of each sequence.
    """
    tokens = torch.full((steps.rows,), start, device=limits.device)
    is_done = limits <= 0
    written: list[Tensor] = []
    streams = bits(config.seed, torch.arange(steps.rows, device=limits.device))
    while not is_done.all():
        steps.skip(is_done)
        scores = steps.next(tokens)
        if config.method == "sample":
            tokens = _sample(scores, config, uniform(streams, torch.full_like(streams, len(written))))
        else:
            tokens = scores.argmax(-1)
        is_done = is_done | (tokens == end)
        written.append(torch.where(is_done, end, tokens))
        is_done = is_done | (len(written) >= limits)
    rows = torch.stack(written, dim=1).tolist() if written else [[] for _ in range(steps.rows)]
    return [until(row, end) for row in rows]


def until(tokens: list[int], end: int) -> list[int]:
    """Return the tokens before the first `end`."""
    return tokens[: tokens.index(end)] if end in tokens else tokens


def _sample(scores: Tensor, config: GenerationConfig, draws: Tensor) -> Tensor:
    """Sample one token per row after top-k and top-p filtering: (rows, vocabulary) -> (rows,)."""
    ordered, tokens = (scores / config.temperature).softmax(-1).sort(descending=True, dim=-1)
    before = cumulative_sum(ordered, -1) - ordered  # total probability of the more probable tokens
    is_allowed = before < config.top_p
    if config.top_k is not None:
        is_allowed[:, config.top_k :] = False
    cumulative = cumulative_sum(ordered * is_allowed, -1)
    position = torch.searchsorted(cumulative, (draws[:, None] * cumulative[:, -1:]).contiguous(), right=True)
    last = is_allowed.sum(-1, keepdim=True) - 1  # rounding must not select a filtered token
    return tokens.gather(-1, torch.minimum(position, last)).squeeze(-1)


def beam_search(steps: Steps, config: GenerationConfig, start: int, end: int, limits: Tensor) -> list[list[int]]:
    """Return the best hypothesis of every row, without start and end tokens; rows are independent of each other.

    Each step considers 2 · beam continuations, so that `beam` alive hypotheses remain even if others end. A row is done
    when no alive hypothesis can overtake its best finished one, even at the most favourable length. A beam of 1 is
    greedy search, which `write` does in less time.

    Shape: limits (rows,), the maximum number of tokens of each sequence.
    """
    rows, beam = steps.rows, config.beam
    device = limits.device
    steps.repeat(beam)
    first_row = torch.arange(rows, device=device)[:, None] * beam
    alive = torch.full((rows, beam), -torch.inf, device=device)
    alive[:, 0] = 0.0  # all beams are equal at first, so only one may be expanded
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
        best, index = sums.flatten(1).topk(2 * beam)  # (rows, candidates)
        origin, token = index // scores.shape[-1], index % scores.shape[-1]
        grown = _pick(alive_tokens, origin)
        grown = torch.cat([grown, token[:, :, None]], dim=2)  # (rows, candidates, 1 + length)

        is_end = token == end
        ended = torch.where(is_end, best / _penalty(length, config.length_penalty), -torch.inf)
        # a finished row does not change while others continue
        ended = torch.where(is_done[:, None], -torch.inf, ended)
        finished_tokens = torch.nn.functional.pad(finished_tokens, (0, 1), value=end)
        finished, kept = torch.cat([finished, ended], dim=1).topk(beam)
        finished_tokens = _pick(torch.cat([finished_tokens, grown], dim=1), kept)

        continuing = torch.where(is_end, -torch.inf, best)
        alive, chosen = continuing.topk(beam)
        alive_tokens = _pick(grown, chosen)
        steps.select((first_row + origin.gather(1, chosen)).flatten())

        # the penalty grows with the length, so an alive hypothesis scores best at its limit
        bound = alive[:, 0] / _penalty(limits, config.length_penalty)
        is_done = is_done | (finished[:, 0] >= bound)
        is_at_limit = ~is_done & (length >= limits)
        unfinished = torch.where(is_at_limit & finished[:, 0].isneginf(), 0.0, -torch.inf)[:, None]
        finished, kept = torch.cat([finished, unfinished], dim=1).topk(beam)
        finished_tokens = _pick(torch.cat([finished_tokens, alive_tokens[:, :1]], dim=1), kept)
        is_done = is_done | is_at_limit
    return [until(row[1:], end) for row in finished_tokens[:, 0].tolist()]


def _penalty(length: int | Tensor, alpha: float) -> float | Tensor:
    """Length penalty ((5 + length) / 6)^α; the end token counts, the start token does not."""
    return ((5 + length) / 6) ** alpha


def _pick(tokens: Tensor, index: Tensor) -> Tensor:
    """Select hypotheses of every row: (rows, n, length), (rows, m) -> (rows, m, length)."""
    return tokens.gather(1, index[:, :, None].expand(-1, -1, tokens.shape[2]))


class Seq2Seq(Model):
    """An encoder-decoder model; calling it returns the encoder's hidden states, as for any model."""

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
        """Return the decoder's hidden states for whole target sequences, with causal masking.

        Shape: tokens (batch, length), or (tokens,) when packed; the result has one more axis, the width.
        """
        return self.decoder(tokens, layout, subnet=subnet, backend=backend, memory=memory, table=self.borrowed_table)

    def scores(self, states: Tensor) -> Tensor:
        """Return the scores over the target vocabulary: (…, width) -> (…, vocabulary)."""
        return self._table_scores(states, self._next_token.bias)

    def next_token_loss(self, states: Tensor, targets: Tensor, smoothing: float = 0.0) -> TokenLoss:
        """Return the cross-entropy of `scores`: states (targets, width), targets (targets,) with some IGNORED."""
        embedding = self._scored_embedding
        return embedding.rows.loss(states, embedding.token_table, self._next_token.bias, targets, smoothing=smoothing)

    def exit_scores(self, layer: int, states: Tensor) -> Tensor:
        """Return the scores of the exit after decoder block `layer`: (…, width) -> (…, vocabulary)."""
        return self.head("decoder_exits")(layer, states, self._table_scores)

    def _table_scores(self, states: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product with the token vectors that the decoder reads, by their rows: int8 ones multiply codes."""
        embedding = self._scored_embedding
        return embedding.rows.scores(states, embedding.token_table, bias)

    @property
    def _next_token(self) -> NextToken:
        head = self.head("next_token")
        assert isinstance(head, NextToken)
        return head

    @property
    def _scored_embedding(self) -> Embedding:
        """The embedding with the token vectors that the decoder reads."""
        return (self.decoder if self.owns_target_table else self.encoder).embedding

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
        constraint: Constraint | None = None,
        begin: Callable[[Memory], Steps] | None = None,
    ) -> list[list[int]]:
        """Return the generated tokens of each row, without start and end tokens, which default to the tokenizer's.

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
            if begin is not None:
                steps = begin(memory)
            else:
                steps = Steps(self.decoder, self.scores, memory, table=table, subnet=subnet, constraint=constraint)
            decode = beam_search if config.method == "beam" and config.beam > 1 else write
            return decode(steps, config, start, end, limits)

    def translate(
        self,
        texts: Sequence[str],
        config: GenerationConfig | None = None,
        *,
        batch_size: int = 32,
        progress: Callable[[int], None] = lambda texts: None,
        begin: Callable[[Memory], Steps] | None = None,
    ) -> list[str]:
        """Translate texts; `progress` is called with the number of texts in each finished batch.

        `begin` is that of `generate`.
        """
        if isinstance(texts, str):
            raise InputError("translate takes a list of texts, not a string; put it in a list")
        check_texts(texts, batch_size)
        tokenizer = self.require_tokenizer()
        written = self.write_tokens(texts, config, batch_size=batch_size, progress=progress, begin=begin)
        return [tokenizer.decode(tokens) for tokens in written]

    def write_tokens(
        self,
        texts: Sequence[str],
        config: GenerationConfig | None = None,
        *,
        batch_size: int = 32,
        progress: Callable[[int], None] = lambda texts: None,
        constrain: Callable[[list[int]], Constraint] | None = None,
        begin: Callable[[Memory], Steps] | None = None,
    ) -> list[list[int]]:
        """Return the tokens generated for each text; `constrain` makes the constraint of a batch from text indices."""
        # batch texts of similar length: finished rows wait for the longest
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        results: list[list[int]] = [[]] * len(texts)
        for first in range(0, len(order), batch_size):
            positions = order[first : first + batch_size]
            batch = self._batch([texts[position] for position in positions])
            constraint = None if constrain is None else constrain(positions)
            written = self.generate(
                batch["input_ids"], batch["attention_mask"], config, constraint=constraint, begin=begin
            )
            for position, tokens in zip(positions, written, strict=True):
                results[position] = tokens
            progress(len(positions))
        return results

    def attention_maps(self, source: Tensor, target: Tensor) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """Return the maps of the encoder's and the decoder's layers; "cross_attention" aligns target and source.

        Shape: source and target (batch, length), rows without padding; maps (batch, heads, query length, key length).
        """
        layout, target_layout = SequenceLayout.full(*source.shape), SequenceLayout.full(*target.shape)
        read = self.encoder.run(EncoderInputs(source, layout), Want(maps=True))
        memory, table = Memory(read.last, layout), self.borrowed_table
        written = self.decoder.run(EncoderInputs(target, target_layout, memory=memory, table=table), Want(maps=True))
        return list(read.maps), list(written.maps)

    def redraw_features(self, step: int, seed: int) -> None:
        super().redraw_features(step, seed)
        self.decoder.redraw_features(step, key(seed, 1))  # independent of the encoder's draws

    @property
    def decoder_vocabulary(self) -> int:
        """Number of tokens of the target vocabulary."""
        assert self.config.decoder is not None
        return self.config.decoder.vocabulary

    @property
    def borrowed_table(self) -> Tensor | None:
        """The encoder's token vectors if the decoder has no token table, else None."""
        return None if self.owns_target_table else self.token_table
