"""Candidates of bakeoff.py: networks and objectives of about one size, each a few changes to the same base."""

from collections.abc import Callable
from typing import Any

from bertsmith.layers.mixers.disentangled import DisentangledConfig
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.layers.mixers.span_conv import SpanConvConfig
from bertsmith.layers.positions import RelativeConfig
from bertsmith.models.config import LayerConfig, ModelConfig
from bertsmith.models.published import preset

LAYERS, HEADS, HEAD_WIDTH = 12, 4, 64  # width 256

# ConvBERT's bottleneck halves the four heads, and adds as many convolution heads
SPAN_CONV = SpanConvConfig(heads=HEADS // 2, head_width=HEAD_WIDTH, dropout=0.0)
FULL = FullConfig(heads=HEADS, dropout=0.0)
ROTARY = FULL.changed(rotary=10_000.0)
DISENTANGLED = DisentangledConfig(heads=HEADS, dropout=0.0, position_dropout=0.0)

MIXERS = {
    "span_conv": (SPAN_CONV,),
    "full": (FULL,),
    "rotary": (ROTARY,),
    "disentangled": (DISENTANGLED,),
    "span_conv, rotary": (SPAN_CONV, ROTARY),
    "span_conv, disentangled": (SPAN_CONV, DISENTANGLED),
}
"""Mixers of consecutive layers, repeated over the depth."""
FAMILIES = {"span_conv": "convbert", "full": "electra", "disentangled": "disentangled"}
"""Family whose fine-tuning defaults apply, by the mixer of the first layer."""
WITH_POSITIONS = ("span_conv", "full")
"""Mixers that need learned position embeddings; the others encode relative positions."""


def network(mixers: str, vocabulary: int, placement: str = "pre") -> ModelConfig:
    """Return an encoder of the size of ELECTRA-small and ConvBERT-small with these mixers, or a native network."""
    if mixers in NATIVE:
        return NATIVE[mixers](vocabulary)
    config = preset("electra-small", vocabulary=vocabulary, dropout=0.0, placement=placement, init_std=0.04)
    encoder, cycle = config.encoder, MIXERS[mixers]
    layers: list[LayerConfig] = [
        layer.changed(mixer=cycle[index % len(cycle)]) for index, layer in enumerate(encoder.layers)
    ]
    positions = "learned" if mixers in WITH_POSITIONS else "none"
    reads_distances = any(mixer.reads_positions for mixer in cycle)
    encoder = encoder.changed(
        layers=tuple(layers),
        embedding=encoder.embedding.changed(positions=positions),
        relative=RelativeConfig(span=64, max_distance=512, has_norm=True) if reads_distances else None,
    )
    return config.changed(encoder=encoder, family=FAMILIES[cycle[0].kind])


def modernbert(vocabulary: int) -> ModelConfig:
    """Return ModernBERT in this size with global attention in every layer: `modernbert` in transformers."""
    config = preset(
        "modern-small",
        vocabulary=vocabulary,
        width=HEADS * HEAD_WIDTH,
        layers=LAYERS,
        heads=HEADS,
        neurons=640,
        global_every=1,
        max_length=512,
        init_std=0.04,
    )
    layers = tuple(layer.changed(mixer=layer.mixer.changed(rotary=10_000.0)) for layer in config.encoder.layers)
    return config.changed(encoder=config.encoder.changed(layers=layers))


def deberta_v2(vocabulary: int) -> ModelConfig:
    """Return DeBERTa-v3 in this size with two token types: `deberta-v2` in transformers."""
    config = preset(
        "deberta-v3-xsmall",
        vocabulary=vocabulary,
        width=HEADS * HEAD_WIDTH,
        layers=LAYERS,
        heads=HEADS,
        span=64,
        dropout=0.0,
        init_std=0.04,
    )
    encoder = config.encoder
    # as many parameters as the gated feed-forwards of modernbert
    layers = tuple(layer.changed(feedforward=layer.feedforward.changed(neurons=960)) for layer in encoder.layers)
    return config.changed(encoder=encoder.changed(layers=layers, embedding=encoder.embedding.changed(types=2)))


NATIVE: dict[str, Callable[[int], ModelConfig]] = {"modernbert": modernbert, "deberta-v2": deberta_v2}
"""Networks that transformers has a class for. Their token embeddings are as wide as the layers."""

BASE: dict[str, Any] = {
    "mixers": "span_conv",
    "placement": "pre",
    "stages": ("replaced_tokens",),
    "micro_batches": 1,
    "rate": 1.5e-3,
    "rates": {},  # peak learning rates of single stages
    "generator_rate": 1.0,  # peak learning rate of the generator, relative to the encoder's
    "warmup": 0.06,
}
# narrow post-norm networks need a lower learning rate (docs/results/families.md)
POST_NORM: dict[str, Any] = {"mixers": "deberta-v2", "rate": 5e-4, "warmup": 0.1}
BOTH = ("masked_lm", "replaced_tokens")
CANDIDATES: dict[str, dict[str, Any]] = {
    # networks
    "convbert": {},
    "electra": {"mixers": "full"},
    "rotary": {"mixers": "rotary"},
    "deberta": {"mixers": "disentangled"},
    "convbert + rotary": {"mixers": "span_conv, rotary"},
    "convbert, masked tokens": {"stages": ("masked_lm",)},
    "convbert, masked then replaced": {"stages": ("masked_lm", "replaced_tokens")},
    # variations of the best network
    "deberta, norms after": {"mixers": "disentangled", "placement": "post"},
    "deberta, masked then replaced": {"mixers": "disentangled", "stages": ("masked_lm", "replaced_tokens")},
    "deberta, rate 3e-3": {"mixers": "disentangled", "rate": 3e-3},
    "deberta, rate 7e-4": {"mixers": "disentangled", "rate": 7e-4},
    "deberta, batch twice as large": {"mixers": "disentangled", "micro_batches": 2, "rate": 2e-3},
    # networks that transformers has a class for
    "modernbert, masked": {"mixers": "modernbert", "stages": ("masked_lm",)},
    "modernbert, masked, rate 3e-3": {"mixers": "modernbert", "stages": ("masked_lm",), "rate": 3e-3},
    "modernbert, masked then replaced": {"mixers": "modernbert", "stages": BOTH},
    "modernbert, masked then replaced, rates apart": {
        "mixers": "modernbert",
        "stages": BOTH,
        "rates": {"replaced_tokens": 7.5e-4},
        "generator_rate": 4.0,
    },
    "modernbert, replaced": {"mixers": "modernbert"},
    "deberta-v2, masked": {**POST_NORM, "stages": ("masked_lm",)},
    "deberta-v2, masked, rate 1e-3": {**POST_NORM, "stages": ("masked_lm",), "rate": 1e-3},
    "deberta-v2, masked then replaced": {**POST_NORM, "stages": BOTH},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "masked_lm": {"kind": "masked_lm", "masking": {"rate": 0.2}},
    "replaced_tokens": {"kind": "replaced_tokens", "masking": {"rate": 0.15}, "optimizers": "two"},
}


def recipe(name: str, stage: str, *, data: str, vocabulary: int, micro: int, workers: int, compiled: str) -> dict:
    """Return the settings of one stage of a candidate; the number of steps is set later."""
    chosen = BASE | CANDIDATES[name]
    has_generator = stage == "replaced_tokens"
    extra = {"generator_rate": chosen["generator_rate"]} if has_generator else {}
    return {
        "data": data,
        "model": {"network": network(chosen["mixers"], vocabulary, chosen["placement"]).plain()},
        **({"generator": {"width": 0.5, "depth": 0.75, "sharing": "full"}} if has_generator else {}),
        "sequences": {"length": 128, "cut": "segments", "micro_tokens": micro},
        "objective": OBJECTIVES[stage] | extra,
        "batch": {"tokens": micro * chosen["micro_batches"]},
        "optimizer": {"learning_rate": chosen["rates"].get(stage, chosen["rate"])},
        "schedule": {"kind": "wsd", "warmup": chosen["warmup"], "decay": 0.3},
        "run": {
            "workers": workers,
            "compile": compiled,
            "log_every": 20,
            "evaluate_every": 10**9,
            "evaluate_batches": 4,
            "checkpoint_every": 10**9,
            "keep": 0,
        },
    }
