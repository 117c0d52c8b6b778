"""`paper` tier: networks and recipes as published; if text and code differ, as the released models were trained."""

from bertsmith.recipes.parts import Recipe, Table, batch, by_preset, masking, steps

_PAPER: Table = {
    "sequences.layout": "packed",  # the networks see the same sequences as padded ones, without padding
    "optimizer.betas": [0.9, 0.999],
    "optimizer.epsilon": 1e-6,
    "optimizer.weight_decay": 0.01,
    "optimizer.clip": 1.0,
    "schedule.kind": "linear",
    "schedule.fall": "from_start",
    "run.workers": 4,
    "run.log_every": 100,
    "run.evaluate_every": 5000,
    "run.checkpoint_every": 5000,
}
_BERT: Table = {
    **_PAPER,
    **batch(256, 128, micro=32768),
    **steps(1_000_000, warmup=10_000),
    "sequences.cut": "sentence_pairs",
    "phases": [{"begin": 0.9, "length": 512, "batch_tokens": 256 * 512}],
    "objective.kind": "masked_lm",
    "objective.next_sentence": True,
    **masking(0.15),
    "optimizer.learning_rate": 1e-4,
    "optimizer.bias_correction": False,
}
_NO_PAIRS: Table = {"sequences.cut": "chunks", "objective.next_sentence": False}
_ELECTRA: Table = {
    **_PAPER,
    **batch(128, 128, micro=16384),
    **steps(1_000_000, warmup=10_000),
    "objective.kind": "replaced_tokens",
    "objective.weight": 50.0,
    "sequences.cut": "segments",
    **masking(0.15, mask=0.85, random=0.0),
    "objective.masking.draw": "with_replacement",
    "objective.masking.max_predictions": 19,
    "generator.sharing": "full",
    "optimizer.learning_rate": 5e-4,
    "optimizer.bias_correction": False,
    "schedule.fall": "throughout",
}
_ELECTRA_BASE: Table = {
    **batch(256, 512, micro=32768),
    "objective.masking.max_predictions": 79,
    **steps(766_000, warmup=10_000),
    "optimizer.learning_rate": 2e-4,
}
_ELECTRA_LARGE: Table = {
    **batch(2048, 512, micro=16384),
    **steps(400_000, warmup=10_000),
    "objective.masking.rate": 0.25,
    "objective.masking.max_predictions": 130,
    "optimizer.learning_rate": 2e-4,
}
_NGRAMS: Table = {**masking(0.15, unit="ngram"), "objective.masking.max_ngram": 3}
_WINDOWS: Table = {**_NGRAMS, "objective.masking.draw": "windows", "objective.masking.max_predictions": 80}
_DEBERTA: Table = {
    **_PAPER,
    **batch(2048, 512, micro=16384),
    **steps(1_000_000, warmup=10_000),
    "objective.kind": "masked_lm",
    **_WINDOWS,
    "optimizer.learning_rate": 2e-4,
}
_DEBERTA_LARGE: Table = {"sequences.micro_tokens": 8192}
_DEBERTA_HUGE: Table = {"sequences.micro_tokens": 4096, "optimizer.learning_rate": 1.5e-4}
_DEBERTA_V3: Table = {
    **_PAPER,
    **batch(8192, 512, micro=16384),
    **steps(500_000, warmup=10_000),
    "objective.kind": "replaced_tokens",
    "objective.weight": 50.0,
    "objective.optimizers": "two",
    **masking(0.15, mask=1.0, random=0.0),
    "generator.sharing": "gradient_disentangled",
    "optimizer.learning_rate": 5e-4,
    "optimizer.betas": [0.9, 0.98],
}
_ALBERT: Table = {**_NO_PAIRS, **_NGRAMS}
_PERFORMER: Table = {
    **_NO_PAIRS,
    "phases": [],
    **batch(64, 512, micro=32768),
    "optimizer.learning_rate": 1e-3,
    "optimizer.betas": [0.9, 0.98],
    "optimizer.epsilon": 1e-9,
    "optimizer.weight_decay": 0.1,
    "optimizer.clip": 0.5,
    "optimizer.bias_correction": True,
    "schedule.kind": "constant",
    "schedule.fall": "after_warmup",
}


def _generator(preset: str) -> Table:
    return {"generator.preset": preset}


PAPER: dict[str, Recipe] = {
    **by_preset(
        "Devlin et al. 2019 and their code",
        _BERT,
        bert_tiny={},
        bert_mini={},
        bert_small={},
        bert_medium={},
        bert_base={},
        bert_large={"sequences.micro_tokens": 16384},
    ),
    **by_preset(
        "Clark et al. 2020 and their code",
        _ELECTRA,
        electra_small={},
        electra_base=_ELECTRA_BASE,
        electra_large=_ELECTRA_LARGE,
    ),
    **by_preset(
        "Jiang et al. 2020, their code",
        _ELECTRA,
        convbert_small={"optimizer.learning_rate": 3e-4, **_generator("convbert-small-generator")},
        convbert_medium_small={"optimizer.learning_rate": 5e-4, **_generator("convbert-medium-small-generator")},
        convbert_base={
            "optimizer.learning_rate": 2e-4,
            **batch(256, 128, micro=32768),
            **_generator("convbert-base-generator"),
        },
    ),
    **by_preset("He et al. 2021, table 8", _DEBERTA, deberta_base={}, deberta_large=_DEBERTA_LARGE),
    **by_preset("none published; DeBERTa large's", _DEBERTA, deberta_xlarge={"sequences.micro_tokens": 4096}),
    **by_preset("He et al. 2021, appendix A.4", _DEBERTA, deberta_ap_base=steps(200_000, warmup=10_000)),
    **by_preset("none published; DeBERTa 1.5B's", _DEBERTA, deberta_v2_xlarge=_DEBERTA_HUGE),
    **by_preset("He et al. 2021, table 8 (1.5B)", _DEBERTA, deberta_v2_xxlarge=_DEBERTA_HUGE),
    **by_preset(
        "He et al. 2023",
        _DEBERTA_V3,
        deberta_v3_xsmall=_generator("deberta-v3-xsmall-generator"),
        deberta_v3_small=_generator("deberta-v3-small-generator"),
        deberta_v3_base=_generator("deberta-v3-base-generator"),
        deberta_v3_large={
            "optimizer.learning_rate": 3e-4,
            "sequences.micro_tokens": 8192,
            **_generator("deberta-v3-large-generator"),
        },
        mdeberta_v3_base=_generator("mdeberta-v3-base-generator"),
    ),
    **by_preset(
        "BERT's, with Lan et al. 2020's n-grams; their LAMB, sentence order and batch of 4096 are not here",
        _BERT,
        _ALBERT,
        albert_base={},
        albert_large={"sequences.micro_tokens": 16384},
        albert_xlarge={"sequences.micro_tokens": 8192},
        albert_xxlarge={"sequences.micro_tokens": 4096},
    ),
    **by_preset(
        "Choromanski et al. 2021, appendix A.2; batch, steps and warm-up are BERT's",
        _BERT,
        _PERFORMER,
        performer_small={},
        performer_base={},
        performer_relu_small={},
        performer_relu_base={},
    ),
    **by_preset(
        "Choromanski et al. 2021, section 4.4; batch, steps and warm-up are BERT's",
        _BERT,
        _PERFORMER,
        batch(32, 1024, micro=32768),
        performer_protein_small={},
        performer_protein_deep={"sequences.micro_tokens": 8192},
    ),
    **by_preset(
        "none published for text encoders; BERT's",
        _BERT,
        lightconv_base={},
        dynamicconv_base={},
        lite_bert_small={},
        lite_bert_base={},
        universal_base={},
    ),
}
