"""A model with exits as something that answers batches: each item after as many layers as it needs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.base import Runner
from bertsmith.models.exiting import EarlyAnswers, answer_early, exit_outputs, exits_config
from bertsmith.models.heads.exits import ExitRule
from bertsmith.models.model import Model
from bertsmith.text.tokenizer import Tokenizer


class ModelRunner:
    """What runners that hold a model have in common."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.config, self.tokenizer = model.config, model.tokenizer

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def is_for_tokens(self) -> bool:
        return self.model.is_for_tokens

    def require_tokenizer(self) -> Tokenizer:
        return self.model.require_tokenizer()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with self.model.evaluating():
            yield


class ExitRunner(ModelRunner):
    """Follows a rule, and counts the layers that were computed since `evaluating` was last entered."""

    def __init__(self, model: Model, rule: ExitRule) -> None:
        super().__init__(model)
        exits_config(model).check_rule(rule)
        self.rule = rule
        self._layers: list[Tensor] = []

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self._layers = []
        with self.model.evaluating():
            yield

    @property
    def layers_used(self) -> Tensor:
        """The layers of every sequence in the order they were answered, (sequences,)."""
        return torch.cat(self._layers) if self._layers else torch.empty(0, dtype=torch.long)

    @property
    def mean_layers(self) -> float | None:
        """The mean over sequences; None before anything was answered."""
        return float(self.layers_used.double().mean()) if self._layers else None

    def outputs(
        self, tokens: Tensor, layout: SequenceLayout, types: Tensor | None = None, *, sizes: Tensor | None = None
    ) -> Tensor:
        """What is said of every sequence; `sizes` as in `early`."""
        return self.early(tokens, layout, types, sizes=sizes).outputs

    def early(
        self, tokens: Tensor, layout: SequenceLayout, types: Tensor | None = None, *, sizes: Tensor | None = None
    ) -> EarlyAnswers:
        """What is said of every sequence, and after how many layers.

        Choices are sure of an item, not of a sequence: without `sizes`, the numbers of sequences, they take all layers.
        Shape: tokens and types (batch, length) or (tokens,); sizes (items,), int64.
        """
        if sizes is None and exits_config(self.model).answer == "choices":
            depth = len(self.config.encoder.layers)
            answers = EarlyAnswers(self.model.outputs(tokens, layout, types), torch.full((layout.batch,), depth))
        else:
            answers = answer_early(self.model, tokens, layout, types, rule=self.rule, sizes=sizes)
        self._layers.append(answers.layers.cpu())
        return answers


class AllExits(ModelRunner):
    """Says what every exit says, side by side, the task's head last: (sequences, exits × outputs)."""

    def outputs(self, tokens: Tensor, layout: SequenceLayout, types: Tensor | None = None) -> Tensor:
        return torch.cat(exit_outputs(self.model, tokens, layout, types), dim=-1)


def leaving_early(runner: Runner) -> Runner:
    """The runner as it is, or, for a model with exits and a rule for them, one that uses them."""
    if not isinstance(runner, Model) or "exits" not in runner.heads:
        return runner
    rule = exits_config(runner).rule
    return runner if rule is None else ExitRunner(runner, rule)
