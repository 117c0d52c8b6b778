"""`crammed` tier: published networks with a recipe for one GPU (80 GB; minutes to hours)."""

from bertsmith.recipes.parts import Recipe, Table, by_preset, without

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


# small networks are bound by kernel launches, so their micro-batches are large
_WIDTH_128 = _size(1e-3, micro=65536, batch=262144, steps=16_000, masked=0.2, init_std=0.05)
_WIDTH_256 = _size(1e-3, micro=65536, batch=262144, steps=16_000, masked=0.2, init_std=0.035)
_WIDTH_384 = _size(1e-3, micro=65536, batch=262144, steps=16_000, masked=0.2, init_std=0.03)
_WIDTH_512 = _size(1e-3, micro=65536, batch=524288, steps=10_000, masked=0.2, init_std=0.025)
_BASE = _size(8e-4, micro=32768, batch=524288, steps=10_000, masked=0.3)
_LARGE = _size(5e-4, micro=16384, batch=1048576, steps=10_000, masked=0.3)
_HUGE = _size(5e-4, micro=8192, batch=1048576, steps=10_000, masked=0.3)
# twelve narrow post-norm layers stayed at the unigram level at 1e-3 (docs/results/families.md)
_DEEP: Table = {"optimizer.learning_rate": 5e-4, "schedule.warmup": 0.1}
# a small generator stays at the unigram level for minutes, during which its encoder learns nothing: it is wider here,
# and shares neither gradients nor gradient clipping with the encoder, whose loss has weight 50
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
# with more replacements the encoder could no longer recognise the text around them
_RTD_MASKING: Table = {"objective.masking.rate": 0.2}
# logits over 128,000 tokens take memory
_LARGE_VOCABULARY: Table = {"sequences.micro_tokens": 16384}
# below its 256 features, linear attention saves nothing
_LONG_ONLY: Table = {"sequences.length": 512, "phases": []}


def _plain_generator(preset: str) -> Table:
    """Return settings for a published generator without dropout."""
    return {"generator.preset": preset, "generator.overrides.dropout": 0.0}


CRAMMED: dict[str, Recipe] = {
    **by_preset(
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
        performer_small=(_WIDTH_512, _LONG_ONLY),
        performer_base=(_BASE, _LONG_ONLY),
        performer_relu_small=(_WIDTH_512, _LONG_ONLY),
        performer_relu_base=(_BASE, _LONG_ONLY),
        lightconv_base=_BASE,
        dynamicconv_base=_BASE,
        lite_bert_small=(_WIDTH_256, _DEEP),
        lite_bert_base=_BASE,
        universal_base=_BASE,
    ),
    **by_preset(
        "as BERT's, with a wider generator and DeBERTa v3's sharing",
        CRAMMED_ALL,
        _RTD,
        electra_small=(_WIDTH_256, _DEEP),
        electra_base=(_BASE, _RTD_MASKING),
        electra_large=(_LARGE, _RTD_MASKING),
        convbert_small=(_WIDTH_256, _DEEP),
        convbert_medium_small=(_WIDTH_384, _DEEP),
        convbert_base=(_BASE, _RTD_MASKING),
    ),
    **by_preset(
        "as BERT's, with the published generator",
        CRAMMED_ALL,
        _V3,
        deberta_v3_xsmall=(
            _WIDTH_384,
            _DEEP,
            _LARGE_VOCABULARY,
            _plain_generator("deberta-v3-xsmall-generator"),
        ),
        deberta_v3_small=(
            _BASE,
            _RTD_MASKING,
            _LARGE_VOCABULARY,
            _plain_generator("deberta-v3-small-generator"),
        ),
        deberta_v3_base=(
            _BASE,
            _RTD_MASKING,
            _LARGE_VOCABULARY,
            _plain_generator("deberta-v3-base-generator"),
        ),
        deberta_v3_large=(
            _LARGE,
            _RTD_MASKING,
            _LARGE_VOCABULARY,
            _plain_generator("deberta-v3-large-generator"),
        ),
        mdeberta_v3_base=(
            _BASE,
            _RTD_MASKING,
            _LARGE_VOCABULARY,
            _plain_generator("mdeberta-v3-base-generator"),
        ),
    ),
}
