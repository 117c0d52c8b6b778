"""Depth-adaptive decoding (Elbayad et al. 2020): every token leaves the decoder after as many blocks as it needs.

A token that left after block e is still seen by later tokens in the blocks above: its hidden state is copied upward and
becomes a key and a value there (`Block.absorb`), without being computed any further.
"""

from collections.abc import Callable

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


class BlockCounts:
    """Number of tokens by the number of decoder blocks computed for them."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}

    def add(self, blocks: Tensor) -> None:
        """Count the blocks of some tokens, (tokens,)."""
        for number, count in enumerate(torch.bincount(blocks).tolist()):
            if count:
                self.tokens[number] = self.tokens.get(number, 0) + count

    @property
    def mean(self) -> float | None:
        """Mean number of blocks per token; None before the first token."""
        total = sum(self.tokens.values())
        return sum(blocks * count for blocks, count in self.tokens.items()) / total if total else None


class ExitPolicy:
    """Decides which tokens leave at an exit; one object per batch of sequences."""

    reads_scores = False
    """Whether `leaves` needs the log-probabilities of the exit."""

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

    def __init__(self, thresholds: tuple[float, ...]) -> None:
        self.thresholds = thresholds

    def leaves(self, exit_index: int, hidden: Tensor, rows: Tensor, scores: Tensor | None) -> Tensor:
        assert scores is not None
        return scores.amax(-1).exp() > self.thresholds[exit_index]


class Geometric(ExitPolicy):
    """Leave if the probability of stopping is large enough."""

    def __init__(self, chooser: GeometricChooser, thresholds: tuple[float, ...]) -> None:
        self.chooser, self.thresholds = chooser, thresholds

    def leaves(self, exit_index: int, hidden: Tensor, rows: Tensor, scores: Tensor | None) -> Tensor:
        return self.chooser.stop_scores(exit_index, hidden).sigmoid() > self.thresholds[exit_index]


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

    Rows are decided one by one: which others are in the batch does not matter.
    """

    def __init__(self, model: Seq2Seq, memory: Memory, policy: ExitPolicy, counts: BlockCounts) -> None:
        super().__init__(model.decoder, model.scores, memory, table=model.borrowed_table)
        self.model, self.policy, self.counts = model, policy, counts
        self.exits = {layer: index for index, layer in enumerate(decoder_exits_config(model).layers)}
        self.skipped: Tensor | None = None

    def repeat(self, times: int) -> None:
        super().repeat(times)
        self.policy.repeat(times)

    def skip(self, rows: Tensor) -> None:
        self.skipped = rows

    def next(self, tokens: Tensor) -> Tensor:
        hidden = self.stack.embedding.at(tokens, self.position, self.table)
        self.position += 1
        running = torch.arange(self.rows, device=tokens.device)
        if self.skipped is not None:
            running = running[~self.skipped]
        blocks = torch.zeros(self.rows, dtype=torch.long, device=tokens.device)
        found: list[tuple[Tensor, Tensor]] = []  # rows and their log-probabilities
        for number in range(1, len(self.blocks) + 1):
            hidden = self._block(number - 1, hidden, running)
            blocks[running] = number
            if not len(running):
                continue
            normalised = self.stack.final_norm(hidden[running])
            if number == 1:
                self.policy.after_first_block(normalised, running)
            if number in self.exits:
                leaves, scores = self._leave(number, normalised, running)
                found.append((running[leaves], scores))
                running = running[~leaves]
            elif number == len(self.blocks):
                found.append((running, self.score(normalised).float().log_softmax(-1)))
        self.counts.add(blocks[blocks > 0])
        rows, scores = (torch.cat(tensors) for tensors in zip(*found, strict=True))
        # skipped rows have scores of 0, which nobody reads
        return scores.new_zeros(self.rows, scores.shape[-1]).index_copy(0, rows, scores)

    def _leave(self, number: int, hidden: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
        """Return which running rows leave at an exit, and the log-probabilities of those."""

        def log_probabilities(states: Tensor) -> Tensor:
            return self.model.exit_scores(number, states).float().log_softmax(-1)

        scores = log_probabilities(hidden) if self.policy.reads_scores else None
        leaves = self.policy.leaves(self.exits[number], hidden, running, scores)
        return leaves, log_probabilities(hidden[leaves]) if scores is None else scores[leaves]

    def _block(self, index: int, hidden: Tensor, running: Tensor) -> Tensor:
        """Compute one block for the running rows; the others' hidden states become keys and values as they are."""
        (block, context), (own, cross) = self.blocks[index], self.states[index]
        if len(running) == self.rows:
            hidden, self.states[index] = block.step(hidden, (own, cross), context)
            return hidden
        if not len(running):
            self.states[index] = block.absorb(hidden, (own, cross), context)
            return hidden
        is_waiting = torch.ones(self.rows, dtype=torch.bool, device=hidden.device)
        is_waiting[running] = False
        waiting = is_waiting.nonzero().squeeze(-1)
        computed, (stepped, _) = block.step(
            hidden[running], (_rows(own, running), _rows(cross, running)), _context_of(context, running)
        )
        absorbed, _ = block.absorb(hidden[waiting], (_rows(own, waiting), ()), context)
        order = torch.cat([running, waiting]).argsort()
        state = tuple(torch.cat(parts)[order] for parts in zip(stepped, absorbed, strict=True))
        self.states[index] = (state, cross)
        return torch.cat([computed, hidden[waiting].to(computed)])[order]


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
        return Geometric(chooser, rule.thresholds)
    penalties = depth_penalties(model, rule, memory.hidden_states.device)
    if isinstance(chooser, MultinomialChooser):
        return Multinomial(chooser, penalties)
    if isinstance(chooser, SequenceChooser):
        means = memory.layout.means(memory.hidden_states)
        return BySequence((chooser.log_probabilities(means, means, ()) - penalties).argmax(-1))
    return Confidence(rule.thresholds)
