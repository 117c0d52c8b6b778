"""Quantisation-aware training: prepare the model and calibrate its activation ranges on the first examples."""

from itertools import islice

import torch
from pydantic import Field

from bertsmith.data.examples import ExamplePlan, ExampleReader, TaskBatch
from bertsmith.data.loader import SpecialTokens
from bertsmith.data.pairs import PairBatch, PairConfig, PairPlan, PairReader, Pairs
from bertsmith.layers.quantised import QuantisationConfig, Ranges
from bertsmith.models.model import Model
from bertsmith.models.quantise import measuring, quantised
from bertsmith.models.seq2seq import Seq2Seq
from bertsmith.objectives.translation import target_scores


class QuantisedLearning(QuantisationConfig):
    """Settings of quantisation-aware training."""

    calibration: int = Field(default=16, gt=0)
    """Batches for the initial activation ranges: a moving average alone would need thousands of steps."""

    @property
    def network(self) -> QuantisationConfig:
        """The part that belongs to the network's config."""
        return QuantisationConfig.parse({name: value for name, value in self.plain().items() if name != "calibration"})


def add_quantisation(model: Model, learning: QuantisedLearning | None) -> Model:
    """Add quantisation to a model; a model that has it already is returned with its ranges."""
    if learning is None or learning.network == model.config.quantisation:
        return model
    return quantised(model, learning.network)


@torch.no_grad()
def calibrate_ranges(model: Model, plan: ExamplePlan, batches: int) -> None:
    """Measure activation ranges on the first batches of a run, unless the model has ranges already."""
    if not _needs_ranges(model):
        return
    reader = ExampleReader(plan.features, plan.config, model.require_tokenizer().pad)
    with measuring(model):
        for item in islice(plan.one_epoch(), batches):
            batch = reader[item].batch
            assert isinstance(batch, TaskBatch)
            batch = batch.to(model.device)
            model.outputs(batch.tokens, batch.layout, batch.types)


@torch.no_grad()
def calibrate_pair_ranges(model: Seq2Seq, pairs: Pairs, config: PairConfig, batches: int, seed: int) -> None:
    """Measure the first activation ranges of an encoder-decoder on the first batches of a run, unless it has ranges."""
    if not _needs_ranges(model):
        return
    tokenizer, packed = model.require_tokenizer(), config.changed(layout="packed")  # padding would widen the ranges
    reader = PairReader(pairs, packed, SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator))
    with measuring(model):
        for item in islice(PairPlan(pairs, packed, seed).one_epoch(), batches):
            batch = reader[item].batch
            assert isinstance(batch, PairBatch)
            target_scores(model, batch.to(model.device))


def _needs_ranges(model: Model) -> bool:
    ranges = [part for part in model.modules() if isinstance(part, Ranges)]
    return bool(ranges) and not any(bool(part.limits.any()) for part in ranges)
