"""What a fine-tuning will take, before it begins."""

import numpy as np

from bertsmith.models.cost import parameters, training_flops
from bertsmith.models.model import Model
from bertsmith.tasks.base import Encoding
from bertsmith.training.distilling import teaching_cost
from bertsmith.training.finetuning import TaskData, starting_pair

_SAMPLE = 2000  # examples that lengths are measured on


def explain(data: TaskData, start: Model | None = None) -> dict[str, str]:
    """Steps, tokens and operations as names and values to print; lengths are those of a sample where there is much."""
    settings, train = data.settings, data.train
    chosen = np.linspace(0, len(train) - 1, min(len(train), _SAMPLE)).astype(int)
    sample = [train[index] for index in chosen.tolist()]
    model, teacher = starting_pair(settings, sample, start)
    features = settings.task.features(settings.task.augment(sample), Encoding.of(model, settings.sequences.length))
    scale = len(train) / len(sample)
    batches = -(-round(len(features) * scale) // settings.batch.examples)
    run = settings.run.run(batches)
    length = float(features.tokens.lengths.mean())
    tokens = settings.run.epochs * scale * len(features.tokens.tokens)
    cost = settings.adversarial.cost
    if teacher is not None:
        cost = teaching_cost(model.config, teacher.config, max(1, int(length)))
    flops = cost * training_flops(model.config, max(1, int(length)), 0.0)
    return {
        "parameters": f"{parameters(model.config):,}",
        "examples": f"{len(train):,} to learn from, {len(data.dev):,} in dev",
        "length": f"{length:.1f} tokens on average, {features.cut / len(features.tokens):.1%} at the limit",
        "steps": f"{run.steps:,}, {batches:,} an epoch, {round(settings.schedule.warmup * run.steps):,} of warm-up",
        "evaluations": f"every {run.evaluate_every:,} steps",
        "tokens": f"{tokens:,.0f}",
        "training FLOPs per token": f"{flops:.3e}",
        "training FLOPs in all": f"{flops * tokens:.3e}",
    }
