"""How good sub-networks and artefacts are on dev, by the task's own figure."""

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.exit_runner import ModelRunner
from bertsmith.layers.subnet import Subnet
from bertsmith.models.model import Model
from bertsmith.tasks.base import Encoding, Judgement
from bertsmith.tasks.metrics.base import confidence_interval
from bertsmith.tasks.predictor import KeptTask, Predictor, item_outputs
from bertsmith.text.rows import Table


class _Part(ModelRunner):
    """A model that answers as one of its sub-networks."""

    def __init__(self, model: Model, subnet: Subnet) -> None:
        super().__init__(model)
        self.subnet = subnet

    def outputs(self, tokens: Tensor, layout: SequenceLayout, types: Tensor | None = None) -> Tensor:
        return self.model.outputs(tokens, layout, types, subnet=self.subnet)


class Quality:
    """Scores on one part of a task's data."""

    def __init__(self, model: Model, kept: KeptTask, table: Table, ranking_examples: int, seed: int) -> None:
        self.model, self.kept, self.table = model, kept, table
        self.examples = kept.task.examples(table)
        encoding = Encoding.of(model, kept.sequences.length)
        drawn = np.random.default_rng(seed).permutation(len(self.examples))[:ranking_examples]
        self.some = [self.examples[index] for index in sorted(drawn.tolist())]
        self.is_whole = len(self.some) == len(self.examples)
        """Whether candidates are compared on all examples from the start."""
        self.features = kept.task.features(self.examples, encoding)
        self.some_features = self.features if self.is_whole else kept.task.features(self.some, encoding)

    def of_subnet(self, subnet: Subnet, *, on_all: bool) -> float:
        """The score of a sub-network, run in place."""
        examples, features = (self.examples, self.features) if on_all else (self.some, self.some_features)
        outputs = item_outputs(_Part(self.model, subnet), features, self.kept.sequences)
        answers = self.kept.task.answers(examples, features, outputs)
        return _ordered(self.kept.task.judged(examples, answers))

    def of_artefact(self, folder: Path) -> dict[str, Any]:
        """The figures of an artefact on all examples, as `bertsmith evaluate` has them."""
        predictor = Predictor.load(folder)
        judgement = predictor.task.judged(self.examples, predictor.answers(self.examples))
        return {
            "metric": judgement.metric,
            "score": judgement.score,
            "figures": judgement.figures,
            **self._interval(judgement),
        }

    def lengths(self, count: int) -> tuple[int, ...]:
        """So many lengths that stand for all of the sequences: evenly spread quantiles."""
        lengths = self.features.tokens.lengths
        places = (np.arange(count) + 0.5) / count
        return tuple(int(length) for length in np.quantile(lengths, places, method="nearest"))

    def _interval(self, judgement: Judgement) -> dict[str, list[float]]:
        found = confidence_interval(judgement, len(self.examples))
        return {} if found is None else {"interval": list(found)}


def _ordered(judgement: Judgement) -> float:
    """The score, or something below all scores where it is not defined."""
    return judgement.score if np.isfinite(judgement.score) else -1e9
