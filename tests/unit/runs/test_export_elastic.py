"""`bertsmith export` of a sub-network: the one that the model was trained for."""

from pathlib import Path
from typing import Literal

import pytest
import torch

import bertsmith
from bertsmith.layers.subnet import Subnet
from bertsmith.runs.exchange import export_model
from bertsmith.shrinking.elastic_metadata import ElasticRecord, write_record


@pytest.mark.parametrize("rule", ["keep_last", "drop_last"])
def test_a_depth_keeps_the_layers_that_were_trained(tmp_path: Path, rule: Literal["keep_last", "drop_last"]) -> None:
    """Which layers go is written in elastic.json; the other rule would leave layers that never stood together."""
    config = bertsmith.preset("bert-tiny", vocabulary=50, width=16, heads=2, layers=4, longest=16)
    model = bertsmith.build(config, seed=0).eval()
    bertsmith.save(model, tmp_path / "model")
    record = ElasticRecord(
        metric="accuracy",
        teacher_score=1.0,
        depth_rule=rule,
        length=8,
        grid=(),
        head_scores=(),
        head_order=(),
        neuron_order=(),
    )
    write_record(record, tmp_path / "model")
    export_model(tmp_path / "model", out=tmp_path / "out", depth=0.5)
    tokens = torch.arange(8)[None]
    wanted = bertsmith.extract(model, Subnet(depth=0.5, depth_rule=rule))(tokens)
    torch.testing.assert_close(bertsmith.load(tmp_path / "out")(tokens), wanted)
