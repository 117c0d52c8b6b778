"""Depth-adaptive decoding (Elbayad et al. 2020): every token leaves the decoder after as many blocks as it needs.

A token that left after block e is still seen by later tokens in the blocks above: its hidden state is copied upward and
becomes a key and a value there (`Block.absorb`), without being computed any further.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.context import ForwardContext, Memory
from bertsmith.layers.mixers.base import State
from bertsmith.models.heads import DecoderExitsConfig
from bertsmith.models.heads.decoder_exits import (
    DecoderExits,
    DepthRule,
    GeometricChooser,
    MultinomialChooser,
    SequenceChooser,
)
from bertsmith.models.model import Model
from bertsmith.models.seq2seq import Seq2Seq, Steps

GATHER_SHARE = 0.5
"""Share of running rows up to which they are computed in a batch of their own, which copies their decoding states;
with more, all rows are computed."""


class BlockCounts:
    """Number of tokens by the number of decoder blocks computed for them."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}

    def add(self, blocks: int, tokens: int) -> None:
        """Count tokens that left after some number of blocks."""
        if tokens:
            self.tokens[blocks] = self.tokens.get(blocks, 0) + tokens

    @property
    def mean(self) -> float | None:
        """Mean number of blocks per token; None before the first token."""
        return mean_blocks(self.tokens) if self.tokens else None


def mean_blocks(tokens: Mapping[int, int]) -> float:
    """Return the mean number of blocks from the numbers of tokens by their blocks."""
    return sum(blocks * count for blocks, count in tokens.items()) / sum(tokens.values())


class ExitPolicy:
    """Decides which tokens leave at an exit; one object per batch of sequences."""

    reads_scores = False
    """Whether `leaves` needs the log-probabilities of the exit."""

    def is_open(self, exit_index: int) -> bool:
        """Whether any token may leave at an exit; closed ones cost nothing."""
        return True

    def repeat(self, times: int) -> None:
        """Repeat every row, as beam search does."""

    def after_first_block(self, hidden: Tensor, rows: Tensor) -> None:
        """Look at the hidden states of some rows after the first block."""

    def leaves(self, exit_index: int, hidden: Tensor, rows: Tensor, scores: Tensor | None) -> Tensor:
        """Return which rows leave, (rows,) bool.

        Shape: hidden (rows, width); rows their numbers; scores (rows, vocabulary), log-probabilities.
        """
        raise NotImplementedError


class Confidence(ExitPolicy):
    """Leave if the likeliest token is likely enough."""

    reads_scores = True

    def __init__(self, rule: DepthRule) -> None:
        self.rule = rule

    def is_open(self, exit_index: int) -> bool:
        return self.rule.is_open(exit_index)

    def leaves(self, exit_index: int, hidden: Tensor, rows: Tensor, scores: Tensor | None) -> Tensor:
        assert scores is not None
        return scores.amax(-1).exp() > self.rule.thresholds[exit_index]


class Geometric(ExitPolicy):
    """Leave if the probability of stopping is large enough."""

    def __init__(self, chooser: GeometricChooser, rule: DepthRule) -> None:
        self.chooser, self.rule = chooser, rule

    def is_open(self, exit_index: int) -> bool:
        return self.rule.is_open(exit_index)

    def leaves(self, exit_index: int, hidden: Tensor, rows: Tensor, scores: Tensor | None) -> Tensor:
        return self.chooser.stop_scores(exit_index, hidden).sigmoid() > self.rule.thresholds[exit_index]


class BySequence(ExitPolicy):
    """One exit for all tokens of a sequence, chosen from the source."""

    def __init__(self, chosen: Tensor) -> None:
        self.chosen = chosen

    def repeat(self, times: int) -> None:
        self.chosen = self.chosen.repeat_interleave(times)

    def leaves(self, exit_index: int, hidden: Tensor, rows: Tensor, scores: Tensor | None) -> Tensor:
        return self.chosen[rows] == exit_index


class Multinomial(ExitPolicy):
    """An exit for each token, chosen after the first block."""

    def __init__(self, chooser: MultinomialChooser, penalties: Tensor) -> None:
        self.chooser, self.penalties = chooser, penalties
        self.chosen: Tensor | None = None

    def after_first_block(self, hidden: Tensor, rows: Tensor) -> None:
        chosen = (self.chooser.log_probabilities(hidden, hidden, ()) - self.penalties).argmax(-1)
        self.chosen = chosen.new_zeros(int(rows.max()) + 1).index_copy(0, rows, chosen)

    def leaves(self, exit_index: int, hidden: Tensor, rows: Tensor, scores: Tensor | None) -> Tensor:
        assert self.chosen is not None
        return self.chosen[rows] == exit_index


class AdaptiveSteps(Steps):
    """A decoder step in which every row leaves where the policy says so; `counts` gets the blocks of every token.

    Rows are decided one by one: which others are in the batch does not matter. A block computes the keys and values of
    tokens that left below it when it computes a later token, for all of them at once: a block that no later token
    reaches costs nothing.
    """

    def __init__(self, model: Seq2Seq, memory: Memory, policy: ExitPolicy, counts: BlockCounts) -> None:
        super().__init__(model.decoder, model.scores, memory, table=model.borrowed_table)
        self.model, self.policy, self.counts = model, policy, counts
        layers = decoder_exits_config(model).layers
        self.exits = {layer: index for index, layer in enumerate(layers) if policy.is_open(index)}
        self.skipped: Tensor | None = None
        self.pending: list[list[Tensor]] = [[] for _ in self.blocks]
        """Inputs of each block that its decoding states lack, in order: (rows, tokens, width)."""

    def repeat(self, times: int) -> None:
        super().repeat(times)
        self.policy.repeat(times)
        self.pending = [[part.repeat_interleave(times, dim=0) for part in parts] for parts in self.pending]

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.pending = [[torch.cat(parts, dim=1)[rows]] if parts else [] for parts in self.pending]

    def skip(self, rows: Tensor) -> None:
        self.skipped = rows

    def next(self, tokens: Tensor) -> Tensor:
        hidden = self.stack.embedding.at(tokens, self.position, self.table)
        self.position += 1
        running = torch.arange(self.rows, device=tokens.device)
        if self.skipped is not None and self.rows > 1:  # the only row is never skipped
            running = running[~self.skipped]
        found: list[tuple[Tensor, Tensor]] = []  # rows and their log-probabilities
        for number in range(1, len(self.blocks) + 1):
            hidden = self._block(number - 1, hidden, running)
            is_last = number == len(self.blocks)
            if not len(running) or not (number == 1 or number in self.exits or is_last):
                continue
            states = self.stack.final_norm(hidden if len(running) == self.rows else hidden[running])
            if number == 1:
                self.policy.after_first_block(states, running)
            left: tuple[Tensor, Tensor] | None = None
            if is_last:
                left = running, log_probabilities(self.score(states))
            elif number in self.exits:
                running, left = self._leave(number, states, running)
            if left is not None:
                found.append(left)
                self.counts.add(number, len(left[0]))
        if self.rows == 1:
            return found[0][1]
        rows, scores = (torch.cat(tensors) for tensors in zip(*found, strict=True))
        # skipped rows have scores of 0, which nobody reads
        return scores.new_zeros(self.rows, scores.shape[-1]).index_copy(0, rows, scores)

    def _leave(self, number: int, states: Tensor, running: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return the rows that run on after an exit, and the leaving ones with their log-probabilities, if any."""
        scores = log_probabilities(self.model.exit_scores(number, states)) if self.policy.reads_scores else None
        leaves = self.policy.leaves(self.exits[number], states, running, scores)
        count = int(leaves.sum())
        if count == 0:
            return running, None
        if count == len(running):
            left, running = running, running[:0]
        else:  # a batch of one row never needs this, which takes longer than all the rest
            left, running, states = running[leaves], running[~leaves], states[leaves]
            scores = None if scores is None else scores[leaves]
        if scores is None:
            scores = log_probabilities(self.model.exit_scores(number, states))
        return running, (left, scores)

    def _block(self, index: int, hidden: Tensor, running: Tensor) -> Tensor:
        """Compute one block for the running rows; the others keep their hidden states."""
        block, context = self.blocks[index]
        if not len(running):
            self.pending[index].append(hidden[:, None])
            return hidden
        if self.pending[index]:
            self.states[index] = block.absorb(torch.cat(self.pending[index], dim=1), self.states[index], context)
            self.pending[index] = []
        own, cross = self.states[index]
        if len(running) <= GATHER_SHARE * self.rows:
            computed, _ = block.step(
                hidden[running], (_rows(own, running), _rows(cross, running)), _context_of(context, running)
            )
            self.pending[index] = [hidden[:, None]]
            return hidden.to(computed).index_copy(0, running, computed)
        computed, self.states[index] = block.step(hidden, (own, cross), context)
        if len(running) == self.rows:
            return computed
        return hidden.to(computed).index_copy(0, running, computed[running])


def log_probabilities(scores: Tensor) -> Tensor:
    """Return log-probabilities in float32: (…, vocabulary) -> the same."""
    return scores.float().log_softmax(-1)


def _rows(state: State, rows: Tensor) -> State:
    return tuple(part[rows] for part in state)


def _context_of(context: ForwardContext, rows: Tensor) -> ForwardContext:
    """Return the context of some rows, which attend to their own sources."""
    assert context.memory is not None
    layout = context.memory.layout
    layout = (
        SequenceLayout.full(len(rows), layout.max_length)
        if layout.is_token is None
        else SequenceLayout.padded(layout.is_token[rows])
    )
    # the cross mixers have projected the memory; its hidden states are not read again
    return context.with_memory(Memory(context.memory.hidden_states, layout))


def decoder_exits_config(model: Model) -> DecoderExitsConfig:
    """Return the settings of a model's decoder exits; raise InputError if it has none."""
    for head in model.config.heads:
        if isinstance(head, DecoderExitsConfig):
            return head
    raise InputError("this model has no decoder exits; bertsmith shrink MODEL --method exits adds them")


def set_depth_rule(model: Model, rule: DepthRule | None) -> None:
    """Store a rule in the model's config; None to compute all blocks."""
    own = decoder_exits_config(model)
    heads = tuple(head.changed(rule=rule) if head is own else head for head in model.config.heads)
    model.config = model.config.changed(heads=heads)


def adaptive_steps(model: Seq2Seq, rule: DepthRule, counts: BlockCounts) -> Callable[[Memory], Steps]:
    """Return the argument `begin` of `Seq2Seq.generate` for decoding with this rule."""
    config = decoder_exits_config(model)
    config.check_rule(rule)
    exits = model.head("decoder_exits")
    assert isinstance(exits, DecoderExits)

    def begin(memory: Memory) -> Steps:
        return AdaptiveSteps(model, memory, make_policy(model, exits, rule, memory), counts)

    return begin


def depth_penalties(model: Model, rule: DepthRule, device: torch.device) -> Tensor:
    """Return the penalty of each exit and of the last block, (exits + 1,)."""
    assert model.config.decoder is not None
    layers = (*decoder_exits_config(model).layers, len(model.config.decoder.layers))
    return rule.depth_penalty * torch.tensor(layers, device=device, dtype=torch.float32)


def make_policy(model: Seq2Seq, exits: DecoderExits, rule: DepthRule, memory: Memory) -> ExitPolicy:
    """Return the policy of one batch; the chooser was decided when the model was built."""
    chooser = exits.chooser
    if isinstance(chooser, GeometricChooser):
        return Geometric(chooser, rule)
    penalties = depth_penalties(model, rule, memory.hidden_states.device)
    if isinstance(chooser, MultinomialChooser):
        return Multinomial(chooser, penalties)
    if isinstance(chooser, SequenceChooser):
        means = memory.layout.means(memory.hidden_states)
        return BySequence((chooser.log_probabilities(means, means, ()) - penalties).argmax(-1))
    return Confidence(rule)
