"""ALBERT against `transformers`, in float64, on tiny random models: hidden states, losses, gradients, weights."""

import json
from pathlib import Path

import pytest
import torch
from theirs import TINY as COMMON
from theirs import batch, compare_masked_losses, make, ours, there_and_back
from transformers import AlbertForMaskedLM, AlbertModel

import bertsmith
from bertsmith import SequenceLayout, Subnet
from bertsmith.errors import InputError
from bertsmith.models.encoder import EncoderInputs, Want

TINY = {**COMMON, "embedding_size": 12}
SHAPES = [([5, 5], 5), ([9, 1, 4], 9), ([3, 7, 7, 2], 8)]


@pytest.mark.parametrize(("lengths", "length"), SHAPES)
@pytest.mark.parametrize("changes", [{}, {"hidden_act": "gelu", "layer_norm_eps": 1e-5}, {"num_hidden_layers": 1}])
def test_hidden_states_equal_theirs(changes: dict, lengths: list[int], length: int, tmp_path: Path) -> None:
    theirs = make(AlbertModel, 0, TINY | changes)
    model = ours(theirs, tmp_path)
    inputs = batch(lengths, length)
    expected = theirs(**inputs, output_hidden_states=True)
    real = inputs["attention_mask"].bool()
    states = model(**inputs)
    torch.testing.assert_close(states[real], expected.last_hidden_state[real], rtol=0, atol=1e-10)
    layers = model.encoder.run(
        EncoderInputs(inputs["input_ids"], SequenceLayout.padded(real), inputs["token_type_ids"]),
        Want(all_hidden_states=True),
    ).hidden_states
    for mine, reference in zip(layers, expected.hidden_states, strict=True):
        torch.testing.assert_close(mine[real], reference[real], rtol=0, atol=1e-10)
    pooled = model.head("pooler")(states[:, 0])
    torch.testing.assert_close(pooled, expected.pooler_output, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("lengths", "length"), SHAPES)
def test_loss_and_gradients_equal_theirs(lengths: list[int], length: int, tmp_path: Path) -> None:
    theirs = make(AlbertForMaskedLM, 1, TINY)
    compare_masked_losses(ours(theirs, tmp_path), theirs, batch(lengths, length))


@pytest.mark.parametrize("kind", [AlbertModel, AlbertForMaskedLM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_survive_import_and_export(kind: type, dtype: torch.dtype, tmp_path: Path) -> None:
    there_and_back(make(kind, 2, TINY), dtype, tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_groups": 3}, "num_hidden_groups is 3; allowed: 1, because all layers share one group"),
        ({"inner_group_num": 2}, "inner_group_num is 2; allowed: 1, because a group is one layer"),
        ({"embedding_size": 24}, "embedding_size is 24, equal to hidden_size; allowed: another size"),
    ],
)
def test_unsupported_config_raises(change: dict, reason: str, tmp_path: Path) -> None:
    make(AlbertModel, 3, TINY).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=reason):
        bertsmith.load(tmp_path)


def test_model_without_counterpart_is_not_exported(tmp_path: Path) -> None:
    model = ours(make(AlbertModel, 4, TINY), tmp_path / "theirs")
    uneven = bertsmith.extract(model, Subnet(heads=(4, 4, 2)))
    with pytest.raises(InputError, match=r"encoder\.layers\.2\.mixer\.heads is 2 and would be read back as 4"):
        bertsmith.export(uneven, tmp_path / "uneven", native="always")
    shared = bertsmith.preset("bert-tiny", vocabulary=67)
    encoder = shared.encoder.model_copy(update={"sharing": "mixer"})
    with pytest.raises(InputError, match=r"encoder\.sharing is 'mixer' and would be read back as 'none'"):
        bertsmith.export(
            bertsmith.build(shared.model_copy(update={"encoder": encoder})), tmp_path / "shared", native="always"
        )
    fewer = bertsmith.extract(model, Subnet(depth=0.67))
    bertsmith.export(fewer, tmp_path / "fewer")
    assert AlbertModel.from_pretrained(tmp_path / "fewer").config.num_hidden_layers == 2
