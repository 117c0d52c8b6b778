"""Regression on the frozen encoder as the start of a fine-tuning (LP-FT, Kumar et al. 2022).

A head with random weights changes the encoder before it has learned anything itself. On small data, a fine-tuning that
begins with fitted scores keeps more of the pre-trained features.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from bertsmith.answers.sequences import Features, length_batches
from bertsmith.data.examples import ExampleConfig, ExampleReader, TaskBatch
from bertsmith.data.inference import to_device, token_budget
from bertsmith.data.random import shuffled
from bertsmith.errors import InputError
from bertsmith.layers.linear import ElasticLinear
from bertsmith.models.heads.task import ScoringHead
from bertsmith.models.model import Model
from bertsmith.objectives.supervised import Supervised

MAX_ITEMS = 10_000
"""Items that the regression reads; the encoder computes each of them once."""
MAX_VALUES = 2**27
"""Limit of the numbers that are kept in memory: heads for tokens have one vector per token."""
INVERSE_PENALTY = 10.0
"""Weight of the loss beside the L2 penalty, for centred vectors of mean length 1: the C of scikit-learn."""
MAX_ITERATIONS = 100


@dataclass(frozen=True)
class ScoredBatch:
    """The inputs of a head's last linear layer for a batch."""

    vectors: Tensor
    batch: TaskBatch

    @property
    def real_vectors(self) -> Tensor:
        """The vectors without padding, (vectors, width)."""
        is_token = self.batch.layout.is_token
        return self.vectors if self.vectors.dim() == 2 or is_token is None else self.vectors[is_token]


def fit_scores(model: Model, objective: Supervised, features: Features, sequences: ExampleConfig, seed: int) -> None:
    """Fit the last linear layer of the task head by regularised regression; all other weights stay.

    Minimises INVERSE_PENALTY · Σ loss + ½ ‖weights‖² by L-BFGS, with the loss of the task.
    """
    head = model.task_head
    if not isinstance(head, ScoringHead) or type(head.score) is not ElasticLinear:
        kind = next(kind for kind, own in model.heads.items() if own is head)
        raise InputError(
            f"head.start is 'regression', but the {kind} head has no plain linear layer at its end; use 'random'"
        )
    batches = _score_inputs(model, head, features, sequences, seed)
    vectors = torch.cat([each.real_vectors for each in batches])
    mean = vectors.mean(0)
    scale = (vectors - mean).square().sum(-1).mean().sqrt()
    weight = torch.zeros_like(head.score.weight, requires_grad=True)
    bias = torch.zeros(len(weight), device=weight.device, requires_grad=True)
    count, own = sum(float(objective.count(each.batch)) for each in batches), objective.for_model(model)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=MAX_ITERATIONS, history_size=10, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        scores = ((linear((each.vectors - mean) / scale, weight, bias), each.batch) for each in batches)
        error = torch.stack([own.sums(outputs, batch).loss for outputs, batch in scores]).sum()
        total: Tensor = (INVERSE_PENALTY * error + 0.5 * weight.square().sum()) / count
        total.backward()
        return total

    optimizer.step(loss)
    with torch.no_grad():
        head.score.weight.copy_(weight / scale)
        assert head.score.bias is not None
        head.score.bias.copy_(bias - linear(mean, weight / scale))


@torch.no_grad()
def _score_inputs(
    model: Model, head: ScoringHead, features: Features, sequences: ExampleConfig, seed: int
) -> list[ScoredBatch]:
    """Run the frozen encoder on a random sample and return the inputs of the last linear layer."""
    items = shuffled(len(features), seed, 12)[:MAX_ITEMS]
    if head.is_for_tokens:
        items = items[: max(1, np.searchsorted(features.lengths[items].cumsum(), MAX_VALUES // head.features.width))]
    reader = ExampleReader(features, sequences, model.require_tokenizer().pad)
    inputs: list[Tensor] = []
    hook = head.score.register_forward_pre_hook(lambda _, given: inputs.append(given[0].float()))
    batches = []
    with model.evaluating():
        for rows in length_batches(features.lengths[items], token_budget(model.device)):
            batch = to_device(reader.batch(items[rows]), model.device)
            model.outputs(batch.tokens, batch.layout, batch.types)
            batches.append(batch)
    hook.remove()
    return [ScoredBatch(vectors, batch) for vectors, batch in zip(inputs, batches, strict=True)]
