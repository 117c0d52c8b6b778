"""Early exit: an item that is sure enough after some layers leaves the batch, and the rest go on in a smaller one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads.exits import ExitRule, Exits, ExitsConfig
from bertsmith.models.model import Model


@dataclass(frozen=True)
class EarlyAnswers:
    """What was said of every sequence, and after how many layers.

    Shape: outputs (sequences, outputs), layers (sequences,), int64.
    """

    outputs: Tensor
    layers: Tensor


class Certainty:
    """Follows a rule from exit to exit; what an item said before is remembered for patience.

    Every item is looked at by itself: who else is in the batch does not matter.
    """

    def __init__(self, config: ExitsConfig, rule: ExitRule) -> None:
        config.check_rule(rule)
        self.config, self.rule = config, rule
        self._said: Tensor | None = None
        self._agreed: Tensor | None = None

    def are_sure(self, outputs: Tensor, sizes: Tensor) -> Tensor:
        """Whether each item may leave, (items,), after what the next exit says of its sequences.

        Shape: outputs (sequences, outputs); sizes (items,), the number of sequences of each item.
        """
        if self.rule.measure == "patience":
            return self._are_patient(self._answers(outputs, sizes))
        shares, outcomes = self._shares(outputs, sizes)
        if self.rule.measure == "probability":
            return shares.amax(-1).amin(-1) >= self.rule.threshold
        # of one possible outcome the entropy is 0, and so is the logarithm of their number
        even = outcomes.to(shares).log().clamp(min=1e-9)
        return (torch.special.entr(shares).sum(-1) / even).amax(-1) <= self.rule.threshold

    def keep(self, stay: Tensor) -> None:
        """Goes on with some of the items; Shape: (items,), bool."""
        if self._said is not None and self._agreed is not None:
            self._said, self._agreed = self._said[stay], self._agreed[stay]

    def _are_patient(self, said: Tensor) -> Tensor:
        before, self._said = self._said, said
        if before is None or self._agreed is None:
            self._agreed = torch.zeros(len(said), dtype=torch.long, device=said.device)
        else:
            is_same = ((said - before).abs() <= self.rule.within).all(-1)
            self._agreed = torch.where(is_same, self._agreed + 1, 0)
        return self._agreed >= self.rule.threshold

    def _answers(self, outputs: Tensor, sizes: Tensor) -> Tensor:
        """What would be answered, as numbers that can be compared: (items, parts)."""
        if self.config.answer == "value":
            return outputs
        shares, _ = self._shares(outputs, sizes)
        if self.config.answer == "labels":
            return (shares[..., 0] >= self.config.yes_from).long()
        return shares.argmax(-1)

    def _shares(self, outputs: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """The shares of the outcomes, and how many outcomes there are.

        Shape: shares (items, parts, most outcomes), one part but for labels; outcomes to be divided by as (items, 1).
        """
        scores = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if self.config.answer == "classes":
            scores = scores[:, None]
        elif self.config.answer == "labels":
            # the sigmoid of a score is the softmax of it and 0
            scores = torch.stack([scores, torch.zeros_like(scores)], dim=-1)
        else:
            is_there = torch.arange(int(sizes.max()), device=sizes.device) < sizes[:, None]
            table = scores.new_full(is_there.shape, -torch.inf).masked_scatter(is_there, scores.squeeze(-1))
            return table.softmax(-1)[:, None], sizes[:, None]
        return scores.softmax(-1), torch.full_like(sizes, scores.shape[-1])[:, None]


def exits_config(model: Model) -> ExitsConfig:
    """The settings of a model's exits, or a sentence that it has none."""
    for head in model.config.heads:
        if isinstance(head, ExitsConfig):
            return head
    raise InputError("this model has no exits; bertsmith shrink MODEL --method exits gives it some")


def with_rule(model: Model, rule: ExitRule | None) -> None:
    """Makes the rule the model's own; with None its exits are not used."""
    own = exits_config(model)
    heads = tuple(head.changed(rule=rule) if head is own else head for head in model.config.heads)
    model.config = model.config.changed(heads=heads)


def exit_outputs(
    model: Model, tokens: Tensor, layout: SequenceLayout, types: Tensor | None = None
) -> tuple[Tensor, ...]:
    """What every exit says of all sequences, lowest first, and what the task's head says, last.

    Shape: tokens and types (batch, length) or (tokens,); (batch, outputs) each.
    """
    exits = _exits(model)
    output = model.run(EncoderInputs(tokens, layout, types), Want(task=True, all_hidden_states=True))
    return (*(exits(layer, output.normalised(layer), layout) for layer in exits.layers), output.outputs)


def answer_early(
    model: Model,
    tokens: Tensor,
    layout: SequenceLayout,
    types: Tensor | None = None,
    *,
    rule: ExitRule,
    sizes: Tensor | None = None,
    backend: str = "auto",
) -> EarlyAnswers:
    """The answers to all sequences, each from the first exit where its item is sure enough.

    The sequences of one item, of which there are `sizes` (one where None), stay together.
    Shape: tokens and types (batch, length) or (tokens,); sizes (items,), int64.
    """
    exits, head, encoder = _exits(model), model.task_head, model.encoder
    certainty = Certainty(exits_config(model), rule)
    sizes = torch.ones(layout.batch, dtype=torch.long, device=tokens.device) if sizes is None else sizes
    # who is still there, by their numbers in the whole batch
    present = torch.arange(layout.batch, device=tokens.device)
    layers = torch.full_like(present, len(model.config.encoder.layers))
    found: list[tuple[Tensor, Tensor]] = []
    hidden_states = [encoder.embedding(tokens, layout, types, model.given_table)]
    context = encoder.context(tokens, layout, backend)
    for depth, (block, _) in enumerate(encoder.active_blocks(context), start=1):
        hidden_states = [*hidden_states, block(hidden_states[-1], context)][-head.layers :]
        if depth not in exits.layers:
            continue
        outputs = exits(depth, encoder.final_norm(hidden_states[-1]), layout)
        is_sure = certainty.are_sure(outputs, sizes)
        leaves = torch.repeat_interleave(is_sure, sizes)
        if not bool(leaves.any()):
            continue
        # empty sequences, which a packed batch may end in, do not go on alone
        is_end = not bool(layout.lengths(tokens.device)[~leaves].any())
        leaves = torch.ones_like(leaves) if is_end else leaves
        found.append((present[leaves], outputs[leaves]))
        layers[present[leaves]] = depth
        if is_end:
            return _in_order(found, layers)
        layout, positions = layout.chosen((~leaves).nonzero().squeeze(-1))
        hidden_states = [_chosen(hidden, positions, layout) for hidden in hidden_states]
        present, sizes = present[~leaves], sizes[~is_sure]
        certainty.keep(~is_sure)
        context = encoder.context(hidden_states[-1], layout, backend)
    found.append((present, head([encoder.final_norm(hidden) for hidden in hidden_states], layout, model.pooler)))
    return _in_order(found, layers)


def _chosen(hidden_states: Tensor, positions: Tensor, layout: SequenceLayout) -> Tensor:
    """The states at some places of the first axis; rows are cut to the longest that is left."""
    kept = hidden_states[positions]
    return kept if layout.is_packed else kept[:, : layout.max_length]


def _in_order(found: Sequence[tuple[Tensor, Tensor]], layers: Tensor) -> EarlyAnswers:
    """The outputs of groups of sequences in the order of the sequences."""
    numbers, outputs = (torch.cat(tensors) for tensors in zip(*found, strict=True))
    return EarlyAnswers(outputs[numbers.argsort()], layers)


def _exits(model: Model) -> Exits:
    exits_config(model)
    return cast(Exits, model.heads["exits"])
