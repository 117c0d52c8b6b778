"""`modern` tier: networks and recipes of our own choice, without a published counterpart."""

from bertsmith.recipes.crammed import CRAMMED_ALL
from bertsmith.recipes.parts import Recipe, Table, by_preset, without

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
    "optimizer.weight_decay": 0.0125,  # 1e-5 per step at the peak rate
    "schedule.warmup": 0.03,
    "run.steps": 10_000,
}
_MODERN_SIZES = by_preset(
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
# chosen by comparison (docs/results/small.md); the generator shares the embedding to keep the model small
_BUNDLED: Table = {
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
    "run.log_every": 50,
    "run.evaluate_every": 1050,
    "run.evaluate_batches": 4,
    "run.checkpoint_every": 5250,
    "run.keep": 1,
}
MODERN: dict[str, Recipe] = {
    **{f"bert-{size}": _MODERN_SIZES[f"modern-{size}"] for size in ("small", "base", "large")},
    **_MODERN_SIZES,
    **by_preset("our own comparison", _BUNDLED, disentangled_small={}),
}
