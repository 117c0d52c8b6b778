"""`modern`: other networks, which load nowhere else, by a recipe of their own."""

from bertsmith.training.recipes.crammed import CRAMMED_ALL
from bertsmith.training.recipes.parts import Recipe, Table, named, without

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
MODERN: dict[str, Recipe] = {
    **{f"bert-{size}": _MODERN_SIZES[f"modern-{size}"] for size in ("small", "base", "large")},
    **_MODERN_SIZES,
}
