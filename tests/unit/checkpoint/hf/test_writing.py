"""Configs that describe the same network in other words, and sentences about those that do not."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import bertsmith
from bertsmith.checkpoint.hf.writing import first_difference
from bertsmith.errors import InputError
from bertsmith.models.config import ModelConfig
from bertsmith.models.published import preset

SIZE = {"width": 24, "layers": 2, "heads": 4, "vocabulary": 50}


def changed(config: ModelConfig, path: str, value: Any) -> ModelConfig:
    data = config.plain()
    *parents, last = (int(name) if name.isdigit() else name for name in path.split("."))
    owner: Any = data
    for name in parents:
        owner = owner[name]
    owner[last] = value
    return ModelConfig.parse(data)


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("bert-tiny", "encoder.layers.1.mixer.head_width", 6),
        ("bert-tiny", "encoder.layers.0.mixer.value_width", 6),
        ("bert-tiny", "encoder.embedding.width", 24),
        ("bert-tiny", "heads", preset("bert-tiny").plain()["heads"][::-1]),
        ("electra-small", "heads.0.epsilon", 0.5),  # of a norm that is not there
        ("deberta-base", "encoder.relative.clamp", "hf"),  # of buckets that are not there
        ("deberta-base", "encoder.relative.epsilon", 0.5),
        ("transformer-tiny", "decoder.embedding.epsilon", 0.5),
    ],
)
def test_equivalent_configs_do_not_differ(name: str, path: str, value: Any) -> None:
    config = preset(name, **SIZE)
    other = changed(config, path, value)
    assert other != config
    assert first_difference(config, other) is None


@pytest.mark.parametrize(
    ("name", "path", "value", "difference"),
    [
        ("bert-tiny", "family", "electra", "family is 'electra' and would be read back as 'bert'"),
        ("bert-tiny", "encoder.layers.1.feedforward.groups", 2, "groups is 2 and would be read back as 1"),
        ("bert-tiny", "encoder.layers.0.branch", {}, "branch is given and would be read back as None"),
        ("bert-tiny", "heads", [], "heads.masked_tokens is None and would be read back as given"),
        ("transformer-tiny", "decoder.embedding.max_length", 9, "max_length is 9 and would be read back as 1024"),
    ],
)
def test_first_difference(name: str, path: str, value: Any, difference: str) -> None:
    config = preset(name, **SIZE)
    found = first_difference(changed(config, path, value), config)
    assert found is not None
    assert found.startswith(path)
    assert found.endswith(difference)


def test_tensor_without_a_name_is_not_exported(tmp_path: Path) -> None:
    model = bertsmith.build(preset("bert-tiny", **SIZE))
    model.heads["odd"] = nn.Linear(2, 2)
    with pytest.raises(InputError, match=r"a Hugging Face bert has no tensor for 'heads\.odd\.bias'"):
        bertsmith.export(model, tmp_path / "hf", native="always")
