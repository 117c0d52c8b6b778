"""Invalid configs raise an error that names the field."""

from typing import Any

import pytest

import bertsmith
from bertsmith import InputError
from bertsmith.models.config import ModelConfig

TINY = {"width": 32, "layers": 2, "heads": 2, "vocabulary": 100}


def changed(path: str, value: Any, name: str = "bert-tiny") -> dict[str, Any]:
    plain = bertsmith.preset(name, **TINY).plain()
    *keys, last = path.split(".")
    node = plain
    for key in keys:
        node = node[int(key)] if key.isdigit() else node[key]
    node[last] = value
    return plain


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (
            "encoder.layers.1.cross",
            {"kind": "full", "heads": 2},
            r"layers\.1\.cross is given; allowed in the layers of",
        ),
        ("encoder.layers.1.mixer.heads", 5, r"layers\.1\.mixer: width 32 is not a multiple of heads 5"),
        ("encoder.layers.0.feedforward.groups", 3, r"layers\.0\.feedforward: width 32 is not a multiple of groups 3"),
        ("encoder.layers.1.mixer", {"kind": "disentangled", "heads": 2}, r"layers\.1\.mixer reads relative positions"),
        ("encoder.layers.0.branch", {"kernel_size": 4}, "kernel_size is 4; allowed: odd numbers"),
        ("encoder.embedding.rank", 200, "embedding.rank is 200; allowed: up to 32"),
    ],
)
def test_errors_name_the_field(path: str, value: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        ModelConfig.parse(changed(path, value))


@pytest.mark.parametrize(
    ("name", "overrides", "sentence"),
    [
        ("convbert-small", {"ratio": 0}, "ratio is 0: input should be greater than 0"),
        ("convbert-small", {"heads": 0}, "heads is 0: input should be greater than 0"),
        ("convbert-small", {"width": 32, "heads": 5}, "width 32 is not a multiple of heads 5"),
        ("deberta-v2-xlarge", {"kernel_size": 4}, "kernel_size is 4; allowed: odd numbers"),
        ("albert-base", {"layers": 0}, "layers is 0: input should be greater than 0"),
    ],
)
def test_presets_validate_overrides(name: str, overrides: dict[str, int], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        bertsmith.preset(name, **overrides)


def test_pretraining_rejects_decoders() -> None:
    from bertsmith.training.pretraining import PretrainSettings

    settings = PretrainSettings.parse({"model": {"preset": "transformer-tiny"}})
    with pytest.raises(InputError, match="model 'transformer-tiny' has a decoder; allowed: encoders"):
        settings.network(None)
    masks = {"preset": "deberta-base", "overrides": {"layers": 2, "max_length": 64}}
    settings = PretrainSettings.parse({"model": masks, "sequences": {"length": 128}})
    with pytest.raises(InputError, match=r"sequences\.length is 128; the model takes at most 64 tokens"):
        settings.network(None)
