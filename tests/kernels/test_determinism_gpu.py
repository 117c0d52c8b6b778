"""Deterministic runs on a GPU: two trainings of every family from one seed give the same bits."""

from pathlib import Path

import pytest
import torch
from cases import FAMILIES, VARIANTS

from bertsmith.checkpoint.source import GeneratorSource, ModelSource
from bertsmith.data.batch import TokenBatch
from bertsmith.data.layout import SequenceLayout
from bertsmith.models.published import overridable
from bertsmith.ops.cumulative_sum import cumulative_sum
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.meter import Meter
from bertsmith.training.optimizer import OptimizerConfig, ScheduleConfig
from bertsmith.training.pretraining import OBJECTIVES
from bertsmith.training.run_config import Method, RunConfig
from bertsmith.training.starting_model import pretraining_model
from bertsmith.training.step import TrainStep

pytestmark = pytest.mark.gpu
SIZE = {
    "width": 128,
    "heads": 2,
    "layers": 2,
    "max_length": 512,
    "embedding_width": 64,
    "features": 64,
    "span": 64,
    "max_distance": 128,
    "window": 64,
    "dropout": 0.1,
}
ENCODERS = [name for name in FAMILIES if "transformer" not in name and name.partition(" ")[2] not in VARIANTS]
RUNS = [(name, "masked_lm", "off") for name in ENCODERS]
RUNS += [("bert-tiny", "replaced_tokens", "off"), ("bert-tiny", "causal_lm", "off"), ("bert-tiny", "masked_lm", "on")]
RUNS += [("bert-tiny", "masked_lm", "graphs"), ("bert-tiny", "replaced_tokens", "whole")]


def trained(name: str, kind: str, compile: str, corpus: Path, out: Path, *, deterministic: bool) -> list[torch.Tensor]:
    """Return the weights after three steps on sequences that are long enough for attention to split its sums."""
    tokenizer = Tokenizer.load(corpus)
    config = OBJECTIVES[kind]()
    sizes = {key: value for key, value in SIZE.items() if key in overridable(name)}
    generator = GeneratorSource() if kind == "replaced_tokens" else None
    source = ModelSource(preset=name, overrides=sizes)
    model, _ = pretraining_model(source, generator, config.heads, tokenizer.size, tokenizer, seed=0)
    objective = config.build(tokenizer, model.config.encoder.ponder_weight)
    run = RunConfig(steps=3, precision="bfloat16", compile=compile, deterministic=deterministic)
    method = Method(run, OptimizerConfig(), ScheduleConfig(), ())
    step = TrainStep(model, objective, method, out, device="cuda")
    lengths = torch.tensor([0, 512, 100, 400, 512, 17])
    starts = lengths.cumsum(0).int()
    ids = torch.randint(5, tokenizer.size, (int(starts[-1]),), generator=torch.Generator().manual_seed(1))
    batch = TokenBatch(ids, SequenceLayout.packed(starts, 512), torch.arange(5), len(ids)).to("cuda")
    meter = Meter(objective.terms, step.device)
    for number in range(3):
        step.learn([step.objective.prepare(batch, number)], [(number,)], 1e-3, meter)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    step.close(is_last=False)
    return weights


@pytest.mark.parametrize(("name", "kind", "compile"), RUNS, ids=[" ".join(run) for run in RUNS])
def test_two_runs_of_one_seed_are_bit_equal(
    name: str, kind: str, compile: str, corpus_folder: Path, tmp_path: Path
) -> None:
    first, second = (trained(name, kind, compile, corpus_folder, tmp_path, deterministic=True) for _ in range(2))
    assert all(weight.isfinite().all() for weight in first)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("shape", [(1000,), (1, 40_000), (300, 77), (3, 50, 20)])
@pytest.mark.parametrize("dim", [0, -1])
def test_cumulative_sum_in_deterministic_mode(shape: tuple[int, ...], dim: int) -> None:
    exact = torch.randn(shape, dtype=torch.float64)
    values = exact.float().cuda().requires_grad_()
    sums = cumulative_sum(values, dim)
    torch.testing.assert_close(sums.double().cpu(), exact.cumsum(dim), rtol=1e-4, atol=1e-4)
    upstream = torch.randn_like(values)
    (gradient,) = torch.autograd.grad(sums, values, upstream)
    expected = upstream.double().cpu().flip(dim).cumsum(dim).flip(dim)
    torch.testing.assert_close(gradient.double().cpu(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(cumulative_sum(values, dim), sums)
