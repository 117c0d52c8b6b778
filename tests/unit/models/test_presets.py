"""Published parameter counts, and overrides."""

import pytest

import bertsmith
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.cost import parameters, training_flops
from bertsmith.models.published import PRESETS, preset


def without_heads(name: str, keep: tuple[str, ...] = ()) -> int:
    config = preset(name)
    return parameters(config.model_copy(update={"heads": tuple(h for h in config.heads if h.kind in keep)}))


@pytest.mark.parametrize(
    ("name", "count"),
    [("bert-base", 109_482_240), ("bert-large", 335_141_888)],
)
def test_bert_with_pooler(name: str, count: int) -> None:
    assert without_heads(name, ("pooler",)) == count


@pytest.mark.parametrize(
    ("name", "count"),
    [("bert-base", 110_106_428), ("bert-large", 336_226_108)],
)
def test_bert_with_all_heads(name: str, count: int) -> None:
    assert parameters(preset(name)) == count


@pytest.mark.parametrize(
    ("name", "millions"), [("bert-tiny", 4.39), ("bert-mini", 11.17), ("bert-small", 28.76), ("bert-medium", 41.37)]
)
def test_small_berts(name: str, millions: float) -> None:
    assert round(without_heads(name, ("pooler",)) / 1e6, 2) == millions


@pytest.mark.parametrize(("name", "count"), [("electra-small", 13_483_008), ("electra-base", 108_891_648)])
def test_electra(name: str, count: int) -> None:
    assert without_heads(name) == count


@pytest.mark.parametrize(
    ("name", "millions", "without_tokens"),
    [
        ("deberta-base", 138.6, 100.0),
        ("deberta-large", 405.2, 353.7),
        ("deberta-xlarge", 757.8, 706.3),
        ("deberta-v2-xlarge", 884.6, 687.8),
        ("deberta-v2-xxlarge", 1564.5, 1367.8),
        ("deberta-v3-xsmall", 70.7, 21.5),
        ("deberta-v3-small", 141.3, 42.9),
        ("deberta-v3-base", 183.8, 85.5),
        ("deberta-v3-large", 434.0, 302.8),
    ],
)
def test_deberta(name: str, millions: float, without_tokens: float) -> None:
    count, encoder = without_heads(name), preset(name).encoder
    assert round(count / 1e6, 1) == millions
    assert round((count - encoder.vocabulary * encoder.width) / 1e6, 1) == without_tokens


def test_deberta_generators_are_half_as_deep() -> None:
    names = [name for name in PRESETS if name.endswith("-generator") and "deberta" in name]
    assert len(names) == 5
    for name in names:
        generator, whole = preset(name), preset(name.replace("-generator", ""))
        assert 2 * len(generator.encoder.layers) == len(whole.encoder.layers)
        assert generator.encoder.width == whole.encoder.width
        assert [head.kind for head in generator.heads] == ["mask_decoder", "masked_tokens"]


@pytest.mark.parametrize(
    ("name", "count"),
    [("convbert-small", 13_143_768), ("convbert-medium-small", 17_475_888), ("convbert-base", 105_680_520)],
)
def test_convbert(name: str, count: int) -> None:
    assert without_heads(name) == count


@pytest.mark.parametrize(
    ("name", "short", "long"),
    [
        ("convbert-small", "2.4e+09", "1.1e+10"),
        ("convbert-medium-small", "3.6e+09", "1.6e+10"),
        ("convbert-base", "2.1e+10", "8.9e+10"),
        ("electra-small", "2.6e+09", "1.3e+10"),
        ("electra-base", "2.2e+10", "9.7e+10"),
    ],
)
def test_forward_flops_of_convbert_and_its_baselines(name: str, short: str, long: str) -> None:
    encoder = preset(name).encoder
    assert [f"{encoder.flops(length) * length:.1e}" for length in (128, 512)] == [short, long]


@pytest.mark.parametrize(
    ("name", "heads", "head_width"),
    [
        ("convbert-small", 2, 64),
        ("convbert-medium-small", 4, 48),
        ("convbert-base", 6, 64),
        (
            "convbert-small-generator",
            1,
            64,
        ),  # a single head cannot be divided: attention and convolution have full width
        ("convbert-medium-small-generator", 1, 48),
        ("convbert-base-generator", 2, 64),
    ],
)
def test_convbert_heads(name: str, heads: int, head_width: int) -> None:
    mixer = preset(name).encoder.layers[0].mixer
    assert (mixer.heads, mixer.head_width) == (heads, head_width)


def test_convbert_supports_any_ratio_and_every_ablation() -> None:
    mixer = preset("convbert-base", ratio=4).encoder.layers[0].mixer
    assert (mixer.heads, mixer.head_width) == (3, 64)
    assert preset("convbert-base", ratio=1).encoder.layers[0].mixer.heads == 12
    counts = [parameters(preset("convbert-small", kernel_from=source)) for source in ("span", "token", "fixed", "none")]
    assert counts == sorted(counts, reverse=True)
    # base has the published 106M only if the convolution has its own value projection; the paper's formulas give 102M
    config = preset("convbert-base").model_copy(update={"heads": ()})
    mixer = config.encoder.layers[0].mixer.model_copy(update={"shares_value": True})
    layers = tuple(layer.model_copy(update={"mixer": mixer}) for layer in config.encoder.layers)
    shared = config.model_copy(update={"encoder": config.encoder.model_copy(update={"layers": layers})})
    assert round(parameters(shared) / 1e6, 1) == 102.1
    with pytest.raises(InputError, match="kernel_size is 8; allowed: odd numbers"):
        preset("convbert-base", kernel_size=8)
    with pytest.raises(InputError, match="width 768 is not a multiple of groups 5"):
        preset("convbert-base", groups=5)


@pytest.mark.parametrize(
    ("name", "count", "published"),
    [
        ("albert-base", 11_683_584, 12),
        ("albert-large", 17_683_968, 18),
        ("albert-xlarge", 58_724_864, 60),
        ("albert-xxlarge", 222_595_584, 235),
    ],
)
def test_albert_with_pooler(name: str, count: int, published: int) -> None:
    # the paper rounds; these are the exact counts of the released models
    assert without_heads(name, ("pooler",)) == count
    assert abs(count / 1e6 - published) < 0.06 * published


@pytest.mark.parametrize(
    ("name", "count", "published"),
    [("modern-small", 26_770_560, None), ("modern-base", 133_772_544, 149), ("modern-large", 374_459_392, 395)],
)
def test_modern(name: str, count: int, published: int | None) -> None:
    assert without_heads(name) == count
    if published is not None:  # with the vocabulary of the released models
        assert round(parameters(preset(name, vocabulary=50368).changed(heads=())) / 1e6) == published


def test_universal_has_the_parameters_of_one_bert_layer() -> None:
    # without 11 layers and the position table; with the halting weights
    assert without_heads("universal-base") == without_heads("bert-base") - 11 * 7_087_872 - 512 * 768 + 768 + 1


def test_flops_follow_the_cost_model() -> None:
    # 6·(12LH² + p·V·H) + 12·L·H·S, to which the transform before the vocabulary is added here
    for name, layers, width in (("bert-base", 12, 768), ("bert-small", 4, 512)):
        simple = 6 * (12 * layers * width**2 + 0.15 * 30522 * width) + 12 * layers * width * 128
        assert training_flops(preset(name), 128, 0.15) == pytest.approx(simple + 6 * 0.15 * width**2, rel=1e-9)


def test_overrides() -> None:
    config = preset("bert-base", layers=3, vocabulary=100)
    assert (len(config.encoder.layers), config.encoder.vocabulary) == (3, 100)
    with pytest.raises(InputError, match="preset is 'bert-bse'; did you mean 'bert-base'"):
        preset("bert-bse")
    with pytest.raises(InputError, match="layer is not a known setting; did you mean 'layers'"):
        preset("bert-base", layer=3)
    with pytest.raises(InputError, match="width 770 is not a multiple of heads 12"):
        preset("bert-base", width=770)


def test_encode_does_not_depend_on_the_batch(corpus_folder) -> None:
    tokenizer = bertsmith.Tokenizer.load(corpus_folder)
    model = bertsmith.build(preset("bert-tiny", vocabulary=tokenizer.size), seed=0)
    model.tokenizer = tokenizer
    together = model.encode(["the smith", "a traveller forgets the letter by the river"], batch_size=2)
    alone = model.encode(["the smith"])
    assert together.shape == (2, 128)
    assert (together[0] - alone[0]).abs().max() < 1e-5
    assert model.training
    with pytest.raises(InputError, match=r"contains no \[MASK\] to fill"):
        model.fill_mask("the smith")
    predictions = model.fill_mask("the [MASK] forges the [MASK].", top_k=3)
    assert [len(row) for row in predictions] == [3, 3]


def test_next_token_head_requires_equal_widths() -> None:
    config = preset("bert-tiny").plain() | {"heads": [{"kind": "next_token"}]}
    config["encoder"]["embedding"]["width"] = 64
    with pytest.raises(InputError, match="a next_token head needs an embedding as wide as the hidden states: 64 ≠ 128"):
        ModelConfig.parse(config)
