"""The random matrix of the favor mixer: first draw, redraws, saving, reproducibility."""

from pathlib import Path

import pytest
import torch

import bertsmith
from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.context import ForwardContext
from bertsmith.layers.mixers.favor import FavorConfig
from bertsmith.layers.mixers.full import FullConfig
from bertsmith.models.cost import parameters
from bertsmith.models.published import preset


def small(**changes: object) -> bertsmith.Model:
    settings = {"width": 32, "layers": 2, "heads": 2, "vocabulary": 50, "max_length": 16, "features": 24, **changes}
    return bertsmith.build(preset("performer-small", **settings), seed=3)


def matrices(model: bertsmith.Model) -> list[torch.Tensor]:
    return [block.mixer.projection.clone() for block in model.encoder.blocks]


def test_build_seed_determines_the_first_matrix() -> None:
    first, second = matrices(small()), matrices(small())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])
    blocks = first[0][:16] @ first[0][:16].T
    torch.testing.assert_close(blocks, blocks.diagonal().diag(), rtol=0, atol=1e-5)
    # the weights equal a BERT built with the same seed
    bert = bertsmith.build(preset("bert-tiny", width=32, layers=2, heads=2, vocabulary=50, max_length=16), seed=3)
    assert torch.equal(bert.encoder.blocks[1].mixer.project.weight, small().encoder.blocks[1].mixer.project.weight)


def test_redraws_follow_the_interval_and_depend_on_the_seed_only() -> None:
    model, other = small(redraw_every=5), small(redraw_every=5)
    start = matrices(model)
    address = model.encoder.blocks[0].mixer.projection.data_ptr()
    for step in (0, 1, 4):
        model.encoder.redraw_features(step, 7)
    assert all(torch.equal(a, b) for a, b in zip(matrices(model), start, strict=True))
    model.encoder.redraw_features(5, 7)
    fifth = matrices(model)
    assert not torch.equal(fifth[0], start[0])
    assert not torch.equal(fifth[0], fifth[1])
    assert model.encoder.blocks[0].mixer.projection.data_ptr() == address
    other.encoder.redraw_features(5, 8)
    assert not torch.equal(matrices(other)[0], fifth[0])
    # like another process, with other earlier draws and another state of the global generator
    torch.manual_seed(99)
    other.encoder.redraw_features(10, 7)
    other.encoder.redraw_features(5, 7)
    assert all(torch.equal(a, b) for a, b in zip(matrices(other), fifth, strict=True))
    never = small(redraw_every=0)
    never.encoder.redraw_features(1000, 7)
    assert all(torch.equal(a, b) for a, b in zip(matrices(never), start, strict=True))


def test_random_matrix_is_saved_and_loaded(tmp_path: Path) -> None:
    model = small(redraw_every=5)
    model.encoder.redraw_features(5, 1)
    bertsmith.save(model, tmp_path / "model")
    loaded = bertsmith.load(tmp_path / "model")
    assert all(torch.equal(a, b) for a, b in zip(matrices(loaded), matrices(model), strict=True))
    ids = torch.randint(0, 50, (2, 9))
    assert torch.equal(loaded(ids), model.eval()(ids))


def test_random_matrix_stays_float32_in_half_precision_models() -> None:
    model = small().eval()
    before, ids = matrices(model), torch.randint(0, 50, (2, 9))
    exact = model(ids)
    model.to(torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(matrices(model), before, strict=True))
    assert model(ids).dtype == torch.bfloat16
    torch.testing.assert_close(model(ids).float(), exact, rtol=0, atol=0.1)
    assert model.double().encoder.blocks[0].mixer.projection.dtype == torch.float64


def test_activation_checkpointing_preserves_gradients() -> None:
    from torch.utils.checkpoint import checkpoint

    mixer = FavorConfig(heads=2, features=24, dropout=0.0).build(16).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.3)
    hidden = torch.randn(2, 9, 16, dtype=torch.float64)
    context = ForwardContext(SequenceLayout.full(2, 9))
    mixer(hidden, context).square().sum().backward()
    plain = [parameter.grad.clone() for parameter in mixer.parameters()]
    mixer.zero_grad()
    checkpoint(mixer, hidden, context, use_reentrant=False).square().sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, mixer.parameters(), strict=True))


def test_flops_of_linear_attention() -> None:
    favor, full = FavorConfig(heads=12), FullConfig(heads=12)
    projections = 2 * 4 * 768 * 768
    assert favor.flops(768, 4096) - projections == 12 * 8 * 256 * 64
    assert favor.flops(768, 64) == favor.flops(768, 65536)
    # the cost is equal at a length of twice the features
    assert favor.flops(768, 512) == full.flops(768, 512)
    assert FavorConfig(heads=12, feature_map="hyperbolic").flops(768, 9) - projections == 12 * 8 * 512 * 64
    assert FavorConfig(heads=12, feature_map="relu", features=0).flops(768, 9) - projections == 12 * 4 * 64 * 64
    assert parameters(preset("performer-base")) == parameters(preset("bert-base"))


def test_invalid_favor_settings_raise() -> None:
    with pytest.raises(InputError, match="feature_map is 'softmx'"):
        FavorConfig.parse({"heads": 2, "feature_map": "softmx"})
    with pytest.raises(ValueError, match="width 10 is not a multiple of heads 4"):
        FavorConfig(heads=4).check(10)
    with pytest.raises(ValueError, match="features is 0 and feature_map 'softmax' needs a random matrix"):
        FavorConfig(heads=2, features=0).check(8)
    with pytest.raises(InputError, match="family is 'performer'; Hugging Face adapters exist for"):
        bertsmith.export(small(), "nowhere", native="always")
