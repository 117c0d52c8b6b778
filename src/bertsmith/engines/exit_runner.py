"""Run a model with early exits: each item uses as many layers as it needs."""

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
    """Base of the runners that wrap a model."""

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
    """Exit by a rule, and count the layers computed since `evaluating` was last entered."""

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
        """Number of layers of every sequence so far, (sequences,)."""
        return torch.cat(self._layers) if self._layers else torch.empty(0, dtype=torch.long)

    @property
    def mean_layers(self) -> float | None:
        """Mean over sequences; None before the first."""
        return float(self.layers_used.double().mean()) if self._layers else None

    def outputs(
        self, tokens: Tensor, layout: SequenceLayout, types: Tensor | None = None, *, sizes: Tensor | None = None
    ) -> Tensor:
        """Return the outputs of every sequence; `sizes` as in `early`."""
        return self.early(tokens, layout, types, sizes=sizes).outputs

    def early(
        self, tokens: Tensor, layout: SequenceLayout, types: Tensor | None = None, *, sizes: Tensor | None = None
    ) -> EarlyAnswers:
        """Return the outputs of every sequence, and the number of layers used.

        Multiple choice decides per item: without `sizes`, its numbers of sequences, all layers are used.
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
    """Concatenate the outputs of all exits, the task head last: (sequences, exits × outputs)."""

    def outputs(self, tokens: Tensor, layout: SequenceLayout, types: Tensor | None = None) -> Tensor:
        return torch.cat(exit_outputs(self.model, tokens, layout, types), dim=-1)


def with_exits(runner: Runner) -> Runner:
    """Wrap a model with exits and an exit rule in an `ExitRunner`; return any other runner unchanged."""
    if not isinstance(runner, Model) or "exits" not in runner.heads:
        return runner
    rule = exits_config(runner).rule
    return runner if rule is None else ExitRunner(runner, rule)
