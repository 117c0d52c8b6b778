"""`modern`: other networks, which load nowhere else, by a recipe of their own."""

from bertsmith.recipes.crammed import CRAMMED_ALL
from bertsmith.recipes.parts import Recipe, Table, named, without

_MODERN: Table = {
    **without(CRAMMED_ALL, "model.overrides.", "phases"),
    "sequences.length": 512,
    "objective.masking.rate": 0.3,
    "batch.ramp_from": 131072,
    "batch.tokens": 524288,
    "sequences.micro_tokens": 32768,
    "optimizer.kind": "stable_adamw",
    "optimizer.clip": 0.0,
    "optimizer.learning_rate": 8e-4,
    "optimizer.weight_decay": 0.0125,  # 1e-5 a step at the peak rate
    "schedule.warmup": 0.03,
    "run.steps": 10_000,
}
_MODERN_SIZES = named(
    "Warner et al. 2024, scaled to one GPU",
    _MODERN,
    modern_small={"sequences.micro_tokens": 65536, "optimizer.learning_rate": 1e-3, "optimizer.weight_decay": 0.01},
    modern_base={},
    modern_large={
        "sequences.micro_tokens": 16384,
        "batch.tokens": 1048576,
        "optimizer.learning_rate": 5e-4,
        "optimizer.weight_decay": 0.02,
    },
)
# what a bake-off chose (docs/results/small.md); one embedding for both networks, so that all of it is small
_BOX: Table = {
    "model.overrides.dropout": 0.0,
    "generator.width": 0.5,
    "generator.depth": 0.75,
    "generator.sharing": "full",
    "sequences.length": 128,
    "sequences.cut": "segments",
    "sequences.micro_tokens": 65536,
    "phases": [{"begin": 0.92, "length": 512}],
    "objective.kind": "replaced_tokens",
    "objective.optimizers": "two",
    "objective.masking.rate": 0.15,
    "batch.tokens": 65536,
    "optimizer.learning_rate": 1e-3,
    "schedule.kind": "wsd",
    "schedule.warmup": 0.02,
    "schedule.decay": 0.3,
    "run.steps": 10_500,
    "run.workers": 8,
    "run.compile": "graphs",  # a network this small waits for the host otherwise
    "run.log_every": 50,
    "run.evaluate_every": 1050,
    "run.evaluate_batches": 4,
    "run.checkpoint_every": 5250,
    "run.keep": 1,
}
MODERN: dict[str, Recipe] = {
    **{f"bert-{size}": _MODERN_SIZES[f"modern-{size}"] for size in ("small", "base", "large")},
    **_MODERN_SIZES,
    **named("a bake-off of ours", _BOX, disentangled_small={}),
}
