"""Masking on a GPU chooses the same tokens as on the CPU, without synchronisation."""

import numpy as np
import pytest
import torch
from helpers_gpu import no_synchronisation

from bertsmith.data.batch import TokenBatch
from bertsmith.data.corruption import MaskingConfig, Vocabulary, corrupt
from bertsmith.data.layout import SequenceLayout

pytestmark = pytest.mark.gpu

RULES = [MaskingConfig(unit=unit, draw=draw) for draw in ("exact", "windows") for unit in ("token", "word", "ngram")]
RULES.append(MaskingConfig(draw="with_replacement"))


@pytest.mark.parametrize("masking", RULES, ids=lambda masking: f"{masking.draw}-{masking.unit}")
def test_gpu_masks_like_cpu_without_synchronising(masking: MaskingConfig) -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(3, 129, size=200)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).int()
    tokens = torch.from_numpy(draw.integers(5, 60, size=int(lengths.sum())))
    tokens[starts[:-1].long()] = 1
    batch = TokenBatch(tokens, SequenceLayout.packed(starts, 128), torch.arange(200), len(tokens))
    ids = torch.arange(60)
    table = Vocabulary(60, 3, ids < 5, ids < 40)
    expected = corrupt(batch, 7, masking, table)
    batch, table = batch.to("cuda"), table.to("cuda")
    corrupt(batch, 7, masking, table)
    with no_synchronisation():
        actual = corrupt(batch, 7, masking, table)
    for name in ("tokens", "positions", "targets"):
        assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name
