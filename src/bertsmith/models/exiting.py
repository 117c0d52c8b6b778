"""Early exit: items that meet the exit rule after some layer leave the batch; the others continue in a smaller one."""

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
    """Outputs of every sequence and the number of layers computed for it.

    Shape: outputs (sequences, outputs), layers (sequences,), int64.
    """

    outputs: Tensor
    layers: Tensor


class Certainty:
    """Applies an exit rule at consecutive exits; remembers earlier answers for the patience rule.

    Items are independent of the other items in the batch.
    """

    def __init__(self, config: ExitsConfig, rule: ExitRule) -> None:
        config.check_rule(rule)
        self.config, self.rule = config, rule
        self._previous: Tensor | None = None
        self._agreements: Tensor | None = None

    def are_sure(self, outputs: Tensor, sizes: Tensor) -> Tensor:
        """Return whether each item may leave, (items,), given the outputs of the next exit.

        Shape: outputs (sequences, outputs); sizes (items,), the number of sequences of each item.
        """
        if self.rule.measure == "patience":
            return self._are_patient(self._answers(outputs, sizes))
        probabilities, outcomes = self._probabilities(outputs, sizes)
        if self.rule.measure == "probability":
            return probabilities.amax(-1).amin(-1) >= self.rule.threshold
        # with one possible outcome both the entropy and its maximum are 0
        max_entropy = outcomes.to(probabilities).log().clamp(min=1e-9)
        return (torch.special.entr(probabilities).sum(-1) / max_entropy).amax(-1) <= self.rule.threshold

    def keep(self, stay: Tensor) -> None:
        """Continue with some of the items; Shape: (items,), bool."""
        if self._previous is not None and self._agreements is not None:
            self._previous, self._agreements = self._previous[stay], self._agreements[stay]

    def _are_patient(self, answers: Tensor) -> Tensor:
        previous, self._previous = self._previous, answers
        if previous is None or self._agreements is None:
            self._agreements = torch.zeros(len(answers), dtype=torch.long, device=answers.device)
        else:
            is_same = ((answers - previous).abs() <= self.rule.within).all(-1)
            self._agreements = torch.where(is_same, self._agreements + 1, 0)
        return self._agreements >= self.rule.threshold

    def _answers(self, outputs: Tensor, sizes: Tensor) -> Tensor:
        """Return the predictions as comparable numbers: (items, parts)."""
        if self.config.answer == "value":
            return outputs
        probabilities, _ = self._probabilities(outputs, sizes)
        if self.config.answer == "labels":
            return (probabilities[..., 0] >= self.config.yes_from).long()
        return probabilities.argmax(-1)

    def _probabilities(self, outputs: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities of the outcomes and the number of outcomes.

        Shape: probabilities (items, parts, max outcomes), one part except for labels; number of outcomes (items, 1).
        """
        scores = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if self.config.answer == "classes":
            scores = scores[:, None]
        elif self.config.answer == "labels":
            # sigmoid(score) equals the softmax of (score, 0)
            scores = torch.stack([scores, torch.zeros_like(scores)], dim=-1)
        else:
            is_choice = torch.arange(int(sizes.max()), device=sizes.device) < sizes[:, None]
            table = scores.new_full(is_choice.shape, -torch.inf).masked_scatter(is_choice, scores.squeeze(-1))
            return table.softmax(-1)[:, None], sizes[:, None]
        return scores.softmax(-1), torch.full_like(sizes, scores.shape[-1])[:, None]


def exits_config(model: Model) -> ExitsConfig:
    """Return the settings of a model's exits; raise InputError if it has none."""
    for head in model.config.heads:
        if isinstance(head, ExitsConfig):
            return head
    raise InputError("this model has no exits; bertsmith shrink MODEL --method exits adds them")


def with_rule(model: Model, rule: ExitRule | None) -> None:
    """Set the model's exit rule; None disables its exits."""
    own = exits_config(model)
    heads = tuple(head.changed(rule=rule) if head is own else head for head in model.config.heads)
    model.config = model.config.changed(heads=heads)


def exit_outputs(
    model: Model, tokens: Tensor, layout: SequenceLayout, types: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the outputs of every exit, lowest first, and of the task head, last.

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
    """Return the outputs of all sequences, each from the first exit at which its item meets the rule.

    `sizes` is the number of sequences of each item, one if None; the sequences of an item leave together.
    Shape: tokens and types (batch, length) or (tokens,); sizes (items,), int64.
    """
    exits, head, encoder = _exits(model), model.task_head, model.encoder
    certainty = Certainty(exits_config(model), rule)
    sizes = torch.ones(layout.batch, dtype=torch.long, device=tokens.device) if sizes is None else sizes
    # indices in the whole batch of the sequences still present
    present = torch.arange(layout.batch, device=tokens.device)
    layers = torch.full_like(present, len(model.config.encoder.layers))
    answered: list[tuple[Tensor, Tensor]] = []
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
        # stop if only empty sequences remain, which a packed batch may end in
        is_end = not bool(layout.lengths(tokens.device)[~leaves].any())
        leaves = torch.ones_like(leaves) if is_end else leaves
        answered.append((present[leaves], outputs[leaves]))
        layers[present[leaves]] = depth
        if is_end:
            return _in_order(answered, layers)
        layout, positions = layout.select((~leaves).nonzero().squeeze(-1))
        hidden_states = [_select(hidden, positions, layout) for hidden in hidden_states]
        present, sizes = present[~leaves], sizes[~is_sure]
        certainty.keep(~is_sure)
        context = encoder.context(hidden_states[-1], layout, backend)
    answered.append((present, head([encoder.final_norm(hidden) for hidden in hidden_states], layout, model.pooler)))
    return _in_order(answered, layers)


def _select(hidden_states: Tensor, positions: Tensor, layout: SequenceLayout) -> Tensor:
    """Return the hidden states at some positions of the first axis; rows are cut to the new maximum length."""
    selected = hidden_states[positions]
    return selected if layout.is_packed else selected[:, : layout.max_length]


def _in_order(answered: Sequence[tuple[Tensor, Tensor]], layers: Tensor) -> EarlyAnswers:
    """Return the outputs of all groups in the original order of the sequences."""
    indices, outputs = (torch.cat(tensors) for tensors in zip(*answered, strict=True))
    return EarlyAnswers(outputs[indices.argsort()], layers)


def _exits(model: Model) -> Exits:
    exits_config(model)
    return cast(Exits, model.heads["exits"])
