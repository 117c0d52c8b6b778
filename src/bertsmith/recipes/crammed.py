"""`crammed`: the networks as published, by another recipe, for one GPU (80 GB; minutes to hours)."""

from bertsmith.recipes.parts import Recipe, Table, named, without

CRAMMED_ALL: Table = {
    "model.overrides.dropout": 0.0,
    "sequences.length": 128,
    "phases": [{"begin": 0.9, "length": 512}],
    "objective.kind": "masked_lm",
    "batch.ramp": 0.5,
    "optimizer.betas": [0.9, 0.98],
    "optimizer.epsilon": 1e-6,
    "optimizer.weight_decay": 0.01,
    "optimizer.clip": 1.0,
    "schedule.kind": "wsd",
    "schedule.warmup": 0.05,
    "schedule.decay": 0.2,
    "run.workers": 4,
    "run.compile": "on",
    "run.log_every": 20,
    "run.evaluate_every": 500,
    "run.checkpoint_every": 500,
}


def _size(rate: float, micro: int, batch: int, steps: int, masked: float, init_std: float = 0.02) -> Table:
    return {
        "model.overrides.init_std": init_std,  # the published 0.02 was chosen for a width of 768
        "sequences.micro_tokens": micro,
        "objective.masking.rate": masked,
        "batch.tokens": batch,
        "batch.ramp_from": batch // 4,
        "optimizer.learning_rate": rate,
        "run.steps": steps,
    }


# small networks wait for kernels to start, so their micro-batches are large
_WIDTH_128 = _size(1e-3, micro=65536, batch=262144, steps=16_000, masked=0.2, init_std=0.05)
_WIDTH_256 = _size(1e-3, micro=65536, batch=262144, steps=16_000, masked=0.2, init_std=0.035)
_WIDTH_384 = _size(1e-3, micro=65536, batch=262144, steps=16_000, masked=0.2, init_std=0.03)
_WIDTH_512 = _size(1e-3, micro=65536, batch=524288, steps=10_000, masked=0.2, init_std=0.025)
_BASE = _size(8e-4, micro=32768, batch=524288, steps=10_000, masked=0.3)
_LARGE = _size(5e-4, micro=16384, batch=1048576, steps=10_000, masked=0.3)
_HUGE = _size(5e-4, micro=8192, batch=1048576, steps=10_000, masked=0.3)
# twelve narrow layers with norms after the sums stood at the unigram level at 1e-3 (docs/results/families.md)
_DEEP: Table = {"optimizer.learning_rate": 5e-4, "schedule.warmup": 0.1}
# a small generator keeps to the unigrams for minutes, and its encoder learns nothing meanwhile: it is wider here, and
# neither shares a gradient nor a limit on it with the encoder, whose loss counts fifty times
_RTD: Table = {
    "objective.kind": "replaced_tokens",
    "objective.weight": 50.0,
    "objective.optimizers": "two",
    "objective.masking.mask": 0.85,
    "objective.masking.random": 0.0,
    "generator.width": 0.5,
    "generator.sharing": "gradient_disentangled",
}
_V3: Table = {**without(_RTD, "generator.width"), "objective.masking.mask": 1.0}
# the encoder must still recognise the text around the guesses
_FEWER: Table = {"objective.masking.rate": 0.2}
# scores over 128,000 tokens take room
_LESS_ROOM: Table = {"sequences.micro_tokens": 16384}
# less than its 256 features is nothing to save with
_LONG: Table = {"sequences.length": 512, "phases": []}


def _still(preset: str) -> Table:
    """A published generator without dropout."""
    return {"generator.preset": preset, "generator.overrides.dropout": 0.0}


CRAMMED: dict[str, Recipe] = {
    **named(
        "Cramming, MosaicBERT, ModernBERT",
        CRAMMED_ALL,
        bert_tiny=_WIDTH_128,
        bert_mini=_WIDTH_256,
        bert_small=_WIDTH_512,
        bert_medium=_WIDTH_512,
        bert_base=_BASE,
        bert_large=_LARGE,
        deberta_base=_BASE,
        deberta_large=_LARGE,
        deberta_xlarge=_HUGE,
        deberta_ap_base=_BASE,
        deberta_v2_xlarge=_HUGE,
        deberta_v2_xxlarge=_HUGE,
        albert_base=_BASE,
        albert_large=_LARGE,
        albert_xlarge=_HUGE,
        albert_xxlarge=_HUGE,
        performer_small=(_WIDTH_512, _LONG),
        performer_base=(_BASE, _LONG),
        performer_relu_small=(_WIDTH_512, _LONG),
        performer_relu_base=(_BASE, _LONG),
        lightconv_base=_BASE,
        dynamicconv_base=_BASE,
        universal_base=_BASE,
    ),
    **named(
        "as BERT's, with a wider generator and DeBERTa v3's sharing",
        CRAMMED_ALL,
        _RTD,
        electra_small=(_WIDTH_256, _DEEP),
        electra_base=(_BASE, _FEWER),
        electra_large=(_LARGE, _FEWER),
        convbert_small=(_WIDTH_256, _DEEP),
        convbert_medium_small=(_WIDTH_384, _DEEP),
        convbert_base=(_BASE, _FEWER),
    ),
    **named(
        "as BERT's, with the published generator",
        CRAMMED_ALL,
        _V3,
        deberta_v3_xsmall=(_WIDTH_384, _DEEP, _LESS_ROOM, _still("deberta-v3-xsmall-generator")),
        deberta_v3_small=(_BASE, _FEWER, _LESS_ROOM, _still("deberta-v3-small-generator")),
        deberta_v3_base=(_BASE, _FEWER, _LESS_ROOM, _still("deberta-v3-base-generator")),
        deberta_v3_large=(_LARGE, _FEWER, _LESS_ROOM, _still("deberta-v3-large-generator")),
        mdeberta_v3_base=(_BASE, _FEWER, _LESS_ROOM, _still("mdeberta-v3-base-generator")),
    ),
}
