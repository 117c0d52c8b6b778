"""8-bit encoder-decoders: codes = rounding model in forward and step, cached = uncached, ranges of pairs and beams."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import bertsmith
from bertsmith import Subnet
from bertsmith.data.layout import SequenceLayout
from bertsmith.data.pairs import PairBatch
from bertsmith.engines import int8
from bertsmith.engines.artefact import open_runner, write_artefact
from bertsmith.engines.base import Artefact, Inputs, Precision
from bertsmith.engines.int8 import Int8Rows, calibrate, float_inputs, int8_model
from bertsmith.errors import InputError
from bertsmith.layers.context import Memory
from bertsmith.layers.histogram import Histogram
from bertsmith.layers.quantised import FLOAT, QuantisationConfig, Ranges, fake_quantise
from bertsmith.models.build import build
from bertsmith.models.model import Model
from bertsmith.models.published import preset
from bertsmith.models.quantise import dequantised, measuring, quantised
from bertsmith.models.seq2seq import GenerationConfig, Seq2Seq, Steps

START, END = 1, 2
PRECISIONS: list[Precision] = ["int8_weights", "int8", "int8_static"]
SIZES = {"width": 32, "layers": 2, "heads": 2, "neurons": 64, "vocabulary": 90, "max_length": 24, "dropout": 0.0}
TABLES = ["given", "own"]
SEARCH = GenerationConfig(beam=3, extra_length=4)


def translator(table: str = "given") -> Seq2Seq:
    config = preset("transformer-tiny", **SIZES, init_std=0.3)
    decoder = config.decoder
    assert decoder is not None
    config = config.changed(decoder=decoder.changed(embedding=decoder.embedding.changed(table=table)))
    model = build(config, seed=0).eval()
    assert isinstance(model, Seq2Seq)
    return model


def pairs(seed: int = 0) -> PairBatch:
    """Three packed pairs of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    layouts = [SequenceLayout.packed(torch.tensor(starts).int(), 7) for starts in ([0, 5, 7, 14], [0, 3, 10, 12])]
    source, target = (torch.randint(3, 90, (size,), generator=generator) for size in (14, 12))
    return PairBatch(source, layouts[0], target, layouts[1], target, torch.arange(3), 26)


def teacher_forced(model: Seq2Seq, batch: PairBatch) -> Tensor:
    memory = Memory(model.encoder(batch.source, batch.source_layout), batch.source_layout)
    return model.scores(model.decode(batch.target, batch.target_layout, memory))


@pytest.fixture(autouse=True)
def short_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Translate a few samples with the tests' special tokens."""
    monkeypatch.setattr(int8, "BEAM_SAMPLES", 2)
    generate = Seq2Seq.generate

    def with_special_tokens(self: Seq2Seq, *inputs: object, **options: object) -> list[list[int]]:
        return generate(self, *inputs, **{"start": START, "end": END, **options})

    monkeypatch.setattr(Seq2Seq, "generate", with_special_tokens)


def rounding(table: str = "given", **settings: object) -> Seq2Seq:
    model = quantised(translator(table), QuantisationConfig(**settings))
    with measuring(model), torch.no_grad():
        teacher_forced(model, pairs(1))
    return model


def test_without_measured_ranges_and_with_fine_steps_nothing_changes() -> None:
    plain = translator()
    assert torch.equal(
        teacher_forced(dequantised(quantised(plain, QuantisationConfig())), pairs()), teacher_forced(plain, pairs())
    )
    model = rounding()
    difference = (teacher_forced(model, pairs()) - teacher_forced(plain, pairs())).abs().max()
    assert difference > 1e-4
    assert torch.equal(teacher_forced(dequantised(model), pairs()), teacher_forced(plain, pairs()))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("table", TABLES)
@torch.no_grad()
def test_round_trip_is_exact(table: str, precision: Precision, tmp_path: Path) -> None:
    model, samples = translator(table), [pairs(1), pairs(2)]
    before = int8_model(model, precision, samples)
    write_artefact(model, tmp_path, Artefact(engine="torch", precision=precision), samples)
    opened = open_runner(tmp_path)
    assert isinstance(opened, Seq2Seq)
    written, read = dict(before.named_buffers()), dict(opened.named_buffers())
    assert all(torch.equal(written[name], read[name]) for name in written)
    assert torch.equal(teacher_forced(opened, pairs()), teacher_forced(before, pairs()))
    expected = teacher_forced(model, pairs())
    assert (teacher_forced(opened, pairs()) - expected).abs().max() < 0.3 * expected.abs().max()
    codes = [name for name in written if name.startswith("decoder.") and name.endswith(".codes")]
    assert len(codes) == 2 * 6 + (table == "own")


@pytest.mark.parametrize("ranges", ["matrix", "row", "group"])
@pytest.mark.parametrize("table", TABLES)
@torch.no_grad()
def test_codes_equal_the_rounding_model(table: str, ranges: str) -> None:
    """In forward and in steps, as far as float32 sums do not move a value across a rounding border."""
    model = rounding(table, weight_ranges=ranges, groups=5)
    small = int8_model(model, "int8_static")
    torch.testing.assert_close(teacher_forced(small, pairs(3)), teacher_forced(model, pairs(3)), rtol=0, atol=0.05)
    source = pairs(3).source[:5][None]
    for config in (GenerationConfig(method="greedy", extra_length=6), SEARCH):
        assert small.generate(source, None, config) == model.generate(source, None, config)


@pytest.mark.parametrize("precision", PRECISIONS)
@torch.no_grad()
def test_cached_equals_uncached(precision: Precision) -> None:
    model = int8_model(translator(), precision, [pairs(1)])
    assert isinstance(model, Seq2Seq)
    source, target = pairs(3).source[:5][None], torch.tensor([[START, 7, 20, 33, 4]])
    memory = Memory(model(source), SequenceLayout.full(1, 5))
    steps = Steps(model.decoder, model.scores, memory, table=model.borrowed_table)
    cached = torch.stack([steps.next(token) for token in target.T], dim=1)
    whole = model.scores(model.decode(target, SequenceLayout.full(1, 5), memory)).log_softmax(-1)
    torch.testing.assert_close(cached, whole, rtol=0, atol=0.05)
    assert torch.equal(cached.argmax(-1), whole.argmax(-1))


@torch.no_grad()
def test_vocabulary_product_uses_codes() -> None:
    model = int8_model(translator(), "int8")
    rows = model.encoder.embedding.rows
    assert isinstance(rows, Int8Rows)
    states = torch.randn(4, 32)
    step = states.abs().amax(-1, keepdim=True) / 127
    expected = ((states / step).round().double() @ rows.codes.double().T) * step * rows.steps.T
    torch.testing.assert_close(model.scores(states).double(), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_unmeasured_part_of_self_attention_takes_the_range_of_all_parts() -> None:
    mixer = rounding().decoder.blocks[0].mixer
    limits = mixer.project.entering.limits
    assert not limits[2].any()  # keys and values alone are not asked for in training
    assert torch.equal(mixer.project.entering.effective_limits(2), mixer.project.entering.effective_limits(0))
    assert limits[0].any()


@torch.no_grad()
def test_quantised_extract_equals_subnet() -> None:
    model = rounding(layer_bits=(8, 6, 5, 4))
    small = bertsmith.extract(model, Subnet(layers=(1,), heads=(2,), neurons=(64,)))
    assert small.config.quantisation.layer_bits == (6, 4)
    source = pairs(3).source[:5][None]
    subnet = Subnet(layers=(1,), heads=(2,), neurons=(64,))
    assert small.generate(source, None, SEARCH) == model.generate(source, None, SEARCH, subnet=subnet)
    assert model.decoder.blocks[1].feedforward.expand.rounding.bits == 4


@torch.no_grad()
def test_beam_search_widens_ranges() -> None:
    """Ranges are means over batches of their largest values: those of the beam are among them."""
    batch = pairs(1)
    calibrated = calibrate(translator(), [batch])
    alone = quantised(translator(), QuantisationConfig(weight_ranges="row"))
    with measuring(alone):
        teacher_forced(alone, batch)
    changed = [
        not torch.equal(own.limits, other.limits)
        for own, other in zip(_ranges(calibrated), _ranges(alone), strict=True)
    ]
    assert all(changed)


def _ranges(model: Model) -> list[Ranges]:
    return [module for module in model.modules() if isinstance(module, Ranges)]


@torch.no_grad()
def test_padded_samples_are_refused() -> None:
    batch = pairs()
    rows, layout = batch.source_layout.pad(batch.source)
    padded = PairBatch(rows, layout, batch.target, batch.target_layout, batch.expected, batch.sample, 26)
    with pytest.raises(InputError, match="padding would widen"):
        calibrate(translator(), [padded])
    with pytest.raises(InputError, match="has no decoder"):
        calibrate(build(preset("bert-tiny"), seed=0), [batch])
    with pytest.raises(InputError, match="needs samples"):
        int8_model(translator(), "int8_static")


def test_kl_threshold_clips_outliers_and_keeps_a_uniform() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(400_000, generator=generator)
    values[:40] = 50.0  # a share of 1e-4 at 50 deviations
    gaussian = Histogram()
    for part in values.flip(0).split(50_000):
        gaussian.add(part)
    assert gaussian.counts.sum() == 400_000
    assert 2 < gaussian.kl_threshold(128) < 10
    assert not gaussian.is_sparse
    uniform = Histogram()
    uniform.add(torch.rand(400_000, generator=generator) * 3)
    assert uniform.kl_threshold(128) == pytest.approx(3, rel=0.02)


def test_histogram_grows_by_merging_bins() -> None:
    histogram = Histogram()
    histogram.add(torch.tensor([0.5, 1.0]))
    histogram.add(torch.tensor([3.5, 0.0]))
    assert histogram.limit == 4.0
    assert np.flatnonzero(histogram.counts).tolist() == [0, 256, 511, 1792]
    assert histogram.counts.sum() == 4


@torch.no_grad()
def test_sparse_inputs_stay_in_floating_point() -> None:
    ranges = Ranges(1, 1, 0, 8, 0.9)
    ranges.counts, ranges.histograms = torch.zeros_like(ranges.limits), {}
    spikes = torch.zeros(10_000)
    spikes[0] = 1.0
    spikes[1:] = 1e-4
    ranges(spikes[:, None])
    ranges.take_thresholds()
    assert ranges.limits.flatten().tolist() == [FLOAT]
    ranges.counts = ranges.histograms = None
    assert torch.equal(ranges.eval()(spikes[:, None]), spikes[:, None])
    model = calibrate(translator(), [pairs(1)], "kl")
    layer = model.decoder.blocks[0].feedforward.expand
    layer.entering.limits.fill_(FLOAT)
    assert "decoder.blocks.0.feedforward.expand" in float_inputs(model)
    small = int8_model(model, "int8_static").decoder.blocks[0].feedforward.expand
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(small(hidden), layer(hidden), rtol=0, atol=1e-5)


@torch.no_grad()
def test_kl_ranges_are_at_most_the_largest_values() -> None:
    largest, kl = (calibrate(translator(), [pairs(1), pairs(2)], kind) for kind in ("mean_max", "kl"))
    shares = [
        float(own.limits.max() / other.limits.max()) for own, other in zip(_ranges(kl), _ranges(largest), strict=True)
    ]
    assert all(0 < share < 2 or share < 0 for share in shares)
    assert min(shares) < 0.99
    expected = teacher_forced(translator(), pairs(2))
    difference = (teacher_forced(kl, pairs(2)) - expected).abs().mean()
    assert difference < 0.2 * expected.abs().mean()


def test_quantised_training_has_gradients_everywhere() -> None:
    model = rounding().train()
    teacher_forced(model, pairs(2)).square().sum().backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert missing == []


@torch.no_grad()
def test_encoder_samples_still_calibrate_encoders() -> None:
    ids = torch.randint(0, 90, (2, 6))
    with pytest.raises(InputError, match="not fine-tuned"):  # it is run as a task, and has no task's head
        calibrate(build(preset("bert-tiny"), seed=0), [Inputs(ids, SequenceLayout.rows(ids, None))])


def test_fake_quantise_leaves_float_ranges_alone() -> None:
    values = torch.randn(4)
    assert torch.equal(fake_quantise(values, torch.tensor(FLOAT), 8), values)
