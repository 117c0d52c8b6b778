"""What every mixer must keep, over the whole table."""

import pytest
import torch
from cases import HEADS, LENGTH_CASES, WIDTH, mixer_config, packed_layout, padded_layout, rows_of

from bertsmith.layers.call import ForwardPass
from bertsmith.layers.mixers import MIXERS, Mixer
from bertsmith.layers.subnet import LayerCut

pytestmark = pytest.mark.parametrize("kind", MIXERS)


def make(kind: str) -> Mixer:
    mixer = mixer_config(kind).build(WIDTH).double().eval()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.3)
    return mixer


def sequences(lengths: list[int]) -> list[torch.Tensor]:
    return [torch.randn(length, WIDTH, dtype=torch.float64) for length in lengths]


def alone(mixer: Mixer, item: torch.Tensor) -> torch.Tensor:
    return mixer(item, ForwardPass(packed_layout([len(item)])))


@pytest.mark.parametrize("case", LENGTH_CASES)
def test_alone_padded_and_packed_are_the_same(kind: str, case: str) -> None:
    mixer, items = make(kind), sequences(LENGTH_CASES[case])
    lengths = LENGTH_CASES[case]
    expected = torch.cat([alone(mixer, item) for item in items])
    packed = mixer(torch.cat(items), ForwardPass(packed_layout(lengths, empty=2)))
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-12)
    for extra in (0, 3):
        layout = padded_layout(lengths, extra)
        rows = mixer(rows_of(items, extra, filling=1e3), ForwardPass(layout))
        torch.testing.assert_close(rows[layout.is_token], expected, rtol=0, atol=1e-12)


def test_neighbours_never_matter(kind: str) -> None:
    mixer, items = make(kind), sequences([5, 4, 6])
    layout = ForwardPass(packed_layout([5, 4, 6]))
    before = mixer(torch.cat(items), layout)
    items[1] = torch.randn(4, WIDTH, dtype=torch.float64) * 100
    after = mixer(torch.cat(items), layout)
    assert torch.equal(before[:5], after[:5])
    assert torch.equal(before[9:], after[9:])
    assert not torch.equal(before[5:9], after[5:9])


def test_order_of_sequences_is_irrelevant(kind: str) -> None:
    mixer, items = make(kind), sequences([3, 7])
    first = mixer(torch.cat(items), ForwardPass(packed_layout([3, 7])))
    second = mixer(torch.cat(items[::-1]), ForwardPass(packed_layout([7, 3])))
    torch.testing.assert_close(first, torch.cat([second[7:], second[:7]]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("heads", [1, 3, HEADS])
def test_extracted_equals_cut(kind: str, heads: int) -> None:
    mixer, cut = make(kind), LayerCut(heads, 1)
    hidden, layout = torch.randn(2, 6, WIDTH, dtype=torch.float64), padded_layout([6, 4])
    small = mixer.extract(cut)
    assert small.heads == heads
    torch.testing.assert_close(
        small(hidden, ForwardPass(layout)), mixer(hidden, ForwardPass(layout, cut)), rtol=0, atol=1e-12
    )
    config = mixer_config(kind).cut(cut, WIDTH).build(WIDTH)
    assert {n: p.shape for n, p in config.named_parameters()} == {n: p.shape for n, p in small.named_parameters()}


def test_reorder_moves_heads_and_keeps_the_output(kind: str) -> None:
    mixer, call = make(kind), ForwardPass(padded_layout([6, 4]))
    hidden = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    before, maps = mixer(hidden, call), mixer.maps(hidden, call)
    order = torch.tensor([2, 0, 3, 1])
    mixer.reorder(order)
    torch.testing.assert_close(mixer(hidden, call), before, rtol=0, atol=1e-12)
    torch.testing.assert_close(mixer.maps(hidden, call), maps[:, order], rtol=0, atol=1e-12)


def test_gradients(kind: str) -> None:
    mixer, call = make(kind), ForwardPass(packed_layout([3, 2]))
    hidden = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda h: mixer(h, call), hidden, fast_mode=True)
    mixer(hidden, call).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in mixer.parameters())


def test_maps_sum_to_one_over_real_tokens(kind: str) -> None:
    mixer, layout = make(kind), padded_layout([6, 4])
    maps = mixer.maps(torch.randn(2, 6, WIDTH, dtype=torch.float64), ForwardPass(layout))
    assert maps.shape == (2, HEADS, 6, 6)
    assert (maps[1, :, :, 4:] == 0).all()
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, HEADS, 6, dtype=torch.float64))


def test_dropout_works_in_training_and_only_there(kind: str) -> None:
    mixer = mixer_config(kind).model_copy(update={"dropout": 0.5}).build(WIDTH).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.3)
    hidden, call = torch.randn(4, 9, WIDTH, dtype=torch.float64), ForwardPass(padded_layout([9, 7, 9, 2]))
    clean = mixer.eval()(hidden, call)
    assert torch.equal(clean, mixer(hidden, call))
    mixer.train()
    noisy = torch.stack([mixer(hidden, call) for _ in range(3000)])
    assert noisy.std(0).mean() > 0.05
    # dropout leaves the expectation where it was
    error = (noisy.mean(0) - clean)[call.layout.is_token].abs().mean() / noisy.std(0)[call.layout.is_token].mean()
    assert error < 3 / 3000**0.5


def test_config_round_trips(kind: str) -> None:
    config = mixer_config(kind)
    assert type(config).parse(config.plain()) == config
