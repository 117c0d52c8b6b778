"""A model exported to Hugging Face is imported as the same network, or rejected, for every adapter and setting."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TINY, padded_layout
from torch import Tensor

import bertsmith
from bertsmith.checkpoint.hf.reading import ADAPTERS
from bertsmith.errors import InputError
from bertsmith.layers.context import Memory
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model
from bertsmith.models.published import PRESETS, overridable, preset
from bertsmith.models.seq2seq import Seq2Seq

Stack = dict[str, Any]
_OWNERS = {preset(name).family: name for name in reversed(PRESETS)}
# families without a preset have tests of their own (tests/parity/test_roberta.py)
_WITH_PRESET = {name: adapter for name, adapter in ADAPTERS.items() if adapter.family in _OWNERS}
_SETTINGS = {**TINY, "positions": "sinusoid_halves"}


def _every_layer(change: Callable[[Stack], Any]) -> Callable[[Stack], Any]:
    return lambda stack: [change(layer) for layer in stack["layers"]]


def _pre_norm(stack: Stack) -> None:
    for layer in stack["layers"]:
        layer["norm"]["placement"] = "pre"
    stack["final_norm"] = stack["layers"][0]["norm"]


CHANGES: dict[str, Callable[[Stack], Any]] = {
    "nothing": lambda stack: None,
    "a first branch": lambda stack: stack["layers"][0].update(branch={"dropout": 0.0}),
    "a last branch": lambda stack: stack["layers"][-1].update(branch={"dropout": 0.0}),
    "universal": lambda stack: stack.update(universal={}),
    "universal, sharing all": lambda stack: stack.update(universal={}, sharing="all"),
    "halting": lambda stack: stack.update(universal={"halting": {}}),
    "groups": _every_layer(lambda layer: layer["feedforward"].update(groups=2)),
    "rank": lambda stack: stack["embedding"].update(rank=4),
    "value_width": _every_layer(lambda layer: layer["mixer"].update(value_width=5)),
    "head_width": _every_layer(lambda layer: layer["mixer"].update(head_width=5)),
    "fewer heads": _every_layer(lambda layer: layer["mixer"].update(heads=1, head_width=6)),
    "sharing mixers": lambda stack: stack.update(sharing="mixer"),
    "sharing feed-forwards": lambda stack: stack.update(sharing="feedforward"),
    "sharing all": lambda stack: stack.update(sharing="all"),
    "sharing nothing": lambda stack: stack.update(sharing="none"),
    "one layer": lambda stack: stack.update(layers=stack["layers"][:1]),
    "pre-norm": _pre_norm,
    "sinusoids": lambda stack: stack["embedding"].update(positions="sinusoid"),
    "no positions": lambda stack: stack["embedding"].update(positions="none"),
    "no types": lambda stack: stack["embedding"].update(types=0),
    "no norm": lambda stack: stack["embedding"].update(has_norm=False),
    "scaled": lambda stack: stack["embedding"].update(is_scaled=True),
    "a wide embedding": lambda stack: stack["embedding"].update(width=None),
    "a narrow embedding": lambda stack: stack["embedding"].update(width=12),
    "a causal layer": lambda stack: stack["layers"][1]["mixer"].update(is_causal=True),
    "more neurons in one layer": lambda stack: stack["layers"][1]["feedforward"].update(neurons=36),
    "another activation": lambda stack: stack["layers"][1]["feedforward"].update(activation="silu"),
    "another epsilon": lambda stack: stack["embedding"].update(epsilon=1e-3),
    "another dropout": lambda stack: stack["layers"][0].update(dropout=0.5),
    "longer": lambda stack: stack["embedding"].update(max_length=20),
    "relative positions": lambda stack: stack.update(relative={"span": 5}),
    "rotary": _every_layer(lambda layer: layer["mixer"].update(rotary=100.0)),
    "another window": lambda stack: stack["layers"][1]["mixer"].update(window=5),
    "gated": lambda stack: stack["layers"][1]["feedforward"].update(is_gated=True),
    "not gated": lambda stack: stack["layers"][1]["feedforward"].update(is_gated=False),
    "no biases in a mixer": lambda stack: stack["layers"][1]["mixer"].update(has_bias=False),
    "no biases in a feed-forward": lambda stack: stack["layers"][1]["feedforward"].update(has_bias=False),
    "no biases in a norm": lambda stack: stack["layers"][1]["norm"].update(has_bias=False),
    "no biases in the embedding": lambda stack: stack["embedding"].update(has_bias=False),
    "no norm of a mixer": lambda stack: stack["layers"][1].update(has_mixer_norm=False),
    "an rms norm": lambda stack: stack["layers"][1]["norm"].update(kind="rms"),
    "an rms norm of the embedding": lambda stack: stack["embedding"].update(norm="rms"),
    "other fresh weights": lambda stack: stack.update(scales_outputs=True),
}
SURVIVES = {
    "nothing": set(_WITH_PRESET),
    "one layer": set(_WITH_PRESET),
    "sharing nothing": set(_WITH_PRESET) - {"albert"},
    "sharing all": {"albert"},
    "a first branch": {"deberta-v2"},
    "groups": {"convbert"},
    "no types": {"deberta", "deberta-v2", "marian", "modernbert", "mpnet"},
    "no norm": {"marian"},
    "no positions": {"deberta", "deberta-v2", "modernbert"},
    "pre-norm": {"modernbert"},
    "rotary": {"modernbert"},
    "gated": {"modernbert"},
    **{f"no biases in a {part}": {"modernbert"} for part in ("mixer", "feed-forward", "norm")},
    "a wide embedding": set(_WITH_PRESET) - {"albert"},
    "a narrow embedding": {"albert", "electra", "convbert"},
    "relative positions": {"deberta", "deberta-v2"},
    "another epsilon": {"marian"},  # of a norm that does not exist
    "scaled": {"marian"},
    "not gated": set(_WITH_PRESET) - {"modernbert"},
    "no biases in the embedding": {"marian", "modernbert"},
    "an rms norm of the embedding": {"marian"},
    "other fresh weights": set(_WITH_PRESET),
    "longer": set(_WITH_PRESET) - {"marian", "deberta", "deberta-v2"},  # whose decoders are unchanged
}


def _model(family: str, change: Callable[[Stack], Any]) -> Model:
    name = _OWNERS[family]
    data = preset(name, **{key: value for key, value in _SETTINGS.items() if key in overridable(name)}).plain()
    change(data["encoder"])
    model = bertsmith.build(ModelConfig.parse(data), seed=0).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def _outputs(model: Model) -> list[Tensor]:
    ids, layout = torch.arange(18).view(2, 9), padded_layout([9, 4])
    states = model(ids, layout.is_token.long())
    if not isinstance(model, Seq2Seq):
        return [states]
    return [states, model.scores(model.decode(ids, layout, Memory(states, layout)))]


@pytest.mark.parametrize("adapter", _WITH_PRESET)
@pytest.mark.parametrize("change", CHANGES)
def test_export_round_trips_or_raises(adapter: str, change: str, tmp_path: Path) -> None:
    try:
        model = _model(ADAPTERS[adapter].family, CHANGES[change])
    except InputError:
        assert adapter not in SURVIVES.get(change, ())
        return  # no such model
    folder = tmp_path / "hf"
    if adapter not in SURVIVES.get(change, ()):
        with pytest.raises(InputError, match=r"^(this model cannot be exported as )?a Hugging Face [^\n]*$"):
            bertsmith.export(model, folder, native="always")
        assert not folder.exists()
        return
    bertsmith.export(model, folder, native="always")
    back = bertsmith.load(folder)
    assert all(torch.equal(mine, other) for mine, other in zip(_outputs(model), _outputs(back), strict=True))
    tensors = back.state_dict()
    assert tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())
