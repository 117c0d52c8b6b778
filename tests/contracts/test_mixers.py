"""Contract of mixers, for every mixer of the table."""

from dataclasses import replace

import pytest
import torch
from cases import (
    CAUSAL_CASES,
    HEADS,
    LENGTH_CASES,
    MEMORY_CASES,
    MIXER_CASES,
    WIDTH,
    forward_context,
    packed_layout,
    padded_layout,
    rows_of,
)

from bertsmith.errors import InputError
from bertsmith.layers.context import Memory
from bertsmith.layers.mixers import MIXERS, Mixer
from bertsmith.layers.mixers.base import MAP_KINDS
from bertsmith.layers.subnet import LayerCut

every_case = pytest.mark.parametrize("name", MIXER_CASES)


def make(name: str, **changes: object) -> Mixer:
    mixer = MIXER_CASES[name].model_copy(update=changes).build(WIDTH).double().eval()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.3)
    return mixer


def sequences(lengths: list[int]) -> list[torch.Tensor]:
    return [torch.randn(length, WIDTH, dtype=torch.float64) for length in lengths]


def alone(mixer: Mixer, item: torch.Tensor) -> torch.Tensor:
    return mixer(item, forward_context(packed_layout([len(item)])))


def test_every_mixer_has_a_case() -> None:
    assert {config.kind for config in MIXER_CASES.values()} == MIXERS.keys()


@every_case
@pytest.mark.parametrize("case", LENGTH_CASES)
def test_mixer_output_is_the_same_alone_padded_and_packed(name: str, case: str) -> None:
    mixer, items = make(name), sequences(LENGTH_CASES[case])
    lengths = LENGTH_CASES[case]
    expected = torch.cat([alone(mixer, item) for item in items])
    packed = mixer(torch.cat(items), forward_context(packed_layout(lengths, empty=2)))
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-12)
    for extra in (0, 3):
        layout = padded_layout(lengths, extra)
        rows = mixer(rows_of(items, extra, padding=1e3), forward_context(layout))
        torch.testing.assert_close(rows[layout.is_token], expected, rtol=0, atol=1e-12)


@every_case
def test_other_sequences_do_not_matter(name: str) -> None:
    mixer, items = make(name), sequences([5, 4, 6])
    context = forward_context(packed_layout([5, 4, 6]))
    before = mixer(torch.cat(items), context)
    items[1] = torch.randn(4, WIDTH, dtype=torch.float64) * 100
    after = mixer(torch.cat(items), context)
    assert torch.equal(before[:5], after[:5])
    assert torch.equal(before[9:], after[9:])
    assert not torch.equal(before[5:9], after[5:9])


@every_case
def test_order_of_sequences_is_irrelevant(name: str) -> None:
    mixer, items = make(name), sequences([3, 7])
    first = mixer(torch.cat(items), forward_context(packed_layout([3, 7])))
    second = mixer(torch.cat(items[::-1]), forward_context(packed_layout([7, 3])))
    torch.testing.assert_close(first, torch.cat([second[7:], second[:7]]), rtol=0, atol=1e-12)


@every_case
@pytest.mark.parametrize("heads", [1, 3, HEADS])
def test_extracted_mixer_equals_cut(name: str, heads: int) -> None:
    mixer, cut = make(name), LayerCut(heads, 1)
    hidden, layout = torch.randn(2, 6, WIDTH, dtype=torch.float64), padded_layout([6, 4])
    small = mixer.extract(cut)
    assert small.heads == heads
    torch.testing.assert_close(
        small(hidden, forward_context(layout)), mixer(hidden, forward_context(layout, cut)), rtol=0, atol=1e-12
    )
    config = MIXER_CASES[name].cut(cut, WIDTH).build(WIDTH)
    assert {n: t.shape for n, t in config.state_dict().items()} == {n: t.shape for n, t in small.state_dict().items()}


@every_case
def test_reorder_permutes_heads_and_preserves_the_output(name: str) -> None:
    mixer, context = make(name), forward_context(padded_layout([6, 4]))
    hidden = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    before, maps = mixer(hidden, context), mixer.maps(hidden, context)
    order = torch.tensor([2, 0, 3, 1])
    mixer.reorder(order)
    torch.testing.assert_close(mixer(hidden, context), before, rtol=0, atol=1e-12)
    for kind, after in mixer.maps(hidden, context).items():
        torch.testing.assert_close(after, maps[kind][:, order], rtol=0, atol=1e-12)


@every_case
def test_gradients(name: str) -> None:
    mixer, context = make(name), forward_context(packed_layout([3, 2]))
    hidden = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda h: mixer(h, context), hidden, fast_mode=True)
    mixer(hidden, context).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in mixer.parameters())


@every_case
def test_maps_stay_inside_the_sequence(name: str) -> None:
    mixer, layout = make(name), padded_layout([6, 4])
    maps = mixer.maps(torch.randn(2, 6, WIDTH, dtype=torch.float64), forward_context(layout))
    assert maps
    for kind, values in maps.items():
        assert values.shape == (2, HEADS, 6, 6), kind
        assert (values[1, :, :, 4:] == 0).all(), kind
        if name in CAUSAL_CASES:
            assert (values.triu(1) == 0).all(), kind
        if not MAP_KINDS[kind].is_score:
            assert (values >= 0).all(), kind
            assert (values.sum(-1) <= 1 + 1e-12).all(), kind
    if "attention" in maps:
        torch.testing.assert_close(maps["attention"].sum(-1), torch.ones(2, HEADS, 6, dtype=torch.float64))


@every_case
def test_dropout_applies_in_training_only(name: str) -> None:
    mixer = make(name, dropout=0.5)
    hidden, context = torch.randn(4, 9, WIDTH, dtype=torch.float64), forward_context(padded_layout([9, 7, 9, 2]))
    # 800 dropout masks per sequence; kernels without token-dependent weights draw one mask per call
    copies = 5 if "fixed" in name or "depthwise" in name else 50
    repeated = forward_context(padded_layout([9, 7, 9, 2] * copies))
    with torch.no_grad():
        clean = mixer(hidden, context)
        assert torch.equal(clean, mixer(hidden, context))
        mixer.train()
        calls = [mixer(hidden.repeat(copies, 1, 1), repeated) for _ in range(800 // copies)]
        noisy = torch.cat(calls).view(800, *hidden.shape)
    assert noisy.std(0).mean() > 0.05
    # dropout preserves the expectation
    error = (noisy.mean(0) - clean)[context.layout.is_token].abs().mean() / noisy.std(0)[context.layout.is_token].mean()
    assert error < 3 / 800**0.5


@pytest.mark.parametrize("name", CAUSAL_CASES)
def test_causal_mixer_ignores_future_tokens(name: str) -> None:
    mixer, context = make(name), forward_context(packed_layout([9]))
    hidden = torch.randn(9, WIDTH, dtype=torch.float64)
    before = mixer(hidden, context)
    changed = torch.cat([hidden[:5], torch.randn(4, WIDTH, dtype=torch.float64) * 10])
    after = mixer(changed, context)
    torch.testing.assert_close(after[:5], before[:5], rtol=0, atol=1e-12)
    assert not torch.allclose(after[5:], before[5:])


@pytest.mark.parametrize("name", CAUSAL_CASES)
@pytest.mark.parametrize("heads", [None, 2])
def test_step_by_step_equals_forward(name: str, heads: int | None) -> None:
    mixer, cut = make(name), None if heads is None else LayerCut(heads, 1)
    hidden = torch.randn(3, 12, WIDTH, dtype=torch.float64)
    expected = mixer(hidden, forward_context(padded_layout([12, 12, 12]), cut))
    context = forward_context(padded_layout([1, 1, 1]), cut)
    state = mixer.start(context)
    for position in range(12):
        if position == 6:  # beam search selects and repeats rows
            rows = torch.tensor([2, 0, 0])
            state, hidden, expected = tuple(part[rows] for part in state), hidden[rows], expected[rows]
        mixed, state = mixer.step(hidden[:, position], state, context)
        torch.testing.assert_close(mixed, expected[:, position], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", CAUSAL_CASES)
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("waiting", [(0, 3, 4, 7, 10), (0, 1, 2, 3, 4, 5, 6, 8, 9)])
def test_absorbed_tokens_are_seen_by_later_steps(name: str, heads: int | None, waiting: tuple[int, ...]) -> None:
    mixer, cut = make(name), None if heads is None else LayerCut(heads, 1)
    hidden = torch.randn(2, 12, WIDTH, dtype=torch.float64)
    expected = mixer(hidden, forward_context(padded_layout([12, 12]), cut))
    context = forward_context(padded_layout([1, 1]), cut)
    state, pending = mixer.start(context), []
    for position in range(12):
        if position in waiting:
            pending.append(hidden[:, position])
            continue
        if pending:
            state, pending = mixer.absorb(torch.stack(pending, dim=1), state, context), []
        mixed, state = mixer.step(hidden[:, position], state, context)
        torch.testing.assert_close(mixed, expected[:, position], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in MIXER_CASES if name not in CAUSAL_CASES])
def test_absorb_raises_for_non_causal_mixers(name: str) -> None:
    context = forward_context(padded_layout([1]))
    with pytest.raises(InputError, match="is_causal"):
        make(name).absorb(torch.randn(1, 1, WIDTH, dtype=torch.float64), (), context)


@pytest.mark.parametrize("name", [name for name in CAUSAL_CASES if "favor" not in name and "multi_linear" not in name])
def test_decoding_state_has_the_autocast_dtype(name: str) -> None:
    mixer, context = make(name).float(), forward_context(padded_layout([1, 1]))
    context = replace(context, relative_positions=replace(context.relative_positions, vectors=torch.randn(16, WIDTH)))
    state = mixer.start(context)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            _, state = mixer.step(torch.randn(2, WIDTH, dtype=torch.bfloat16), state, context)
    assert {part.dtype for part in state} <= {torch.bfloat16, torch.long}


@pytest.mark.parametrize("name", [name for name in MIXER_CASES if name not in CAUSAL_CASES])
def test_step_raises_for_non_causal_mixers(name: str) -> None:
    context = forward_context(padded_layout([1]))
    with pytest.raises(InputError, match="is_causal"):
        make(name).step(torch.randn(1, WIDTH, dtype=torch.float64), (), context)


@pytest.mark.parametrize("name", MEMORY_CASES)
def test_mixers_attend_to_memory(name: str) -> None:
    mixer, queries, seen = make(name), sequences([2, 5, 1]), sequences([6, 1, 4])
    expected = []
    for item, states in zip(queries, seen, strict=True):
        context = forward_context(packed_layout([len(item)]), memory=Memory(states, packed_layout([len(states)])))
        expected.append(mixer(item, context))
    layouts = {
        "packed": (torch.cat(queries), packed_layout([2, 5, 1]), torch.cat(seen), packed_layout([6, 1, 4])),
        "padded": (rows_of(queries), padded_layout([2, 5, 1]), rows_of(seen, 2, 1e3), padded_layout([6, 1, 4], 2)),
        "mixed": (torch.cat(queries), packed_layout([2, 5, 1]), rows_of(seen, 2, 1e3), padded_layout([6, 1, 4], 2)),
    }
    for hidden, layout, states, seen_layout in layouts.values():
        mixed = mixer(hidden, forward_context(layout, memory=Memory(states, seen_layout)))
        mixed = mixed if layout.is_packed else mixed[layout.is_token]
        torch.testing.assert_close(mixed, torch.cat(expected), rtol=0, atol=1e-12)
    maps = mixer.maps(hidden, forward_context(layout, memory=Memory(states, seen_layout)))
    assert all(values.shape == (3, HEADS, 5, 8) for values in maps.values())


@pytest.mark.parametrize("name", MEMORY_CASES)
def test_memory_step_equals_forward(name: str) -> None:
    mixer, memory = make(name), Memory(torch.randn(2, 6, WIDTH, dtype=torch.float64), padded_layout([6, 4]))
    hidden = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    expected = mixer(hidden, forward_context(padded_layout([3, 3]), memory=memory))
    context = forward_context(padded_layout([1, 1]), memory=memory)
    state = mixer.start(context)
    for position in range(3):
        mixed, state = mixer.step(hidden[:, position], state, context)
        torch.testing.assert_close(mixed, expected[:, position], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [name for name, config in MIXER_CASES.items() if not config.reads_memory])
def test_memory_is_rejected(name: str) -> None:
    memory = Memory(torch.randn(4, WIDTH, dtype=torch.float64), packed_layout([4]))
    with pytest.raises(InputError, match="memory"):
        make(name)(torch.randn(2, WIDTH, dtype=torch.float64), forward_context(packed_layout([2]), memory=memory))


@every_case
def test_mixer_config_round_trips(name: str) -> None:
    config = MIXER_CASES[name]
    assert type(config).parse(config.plain()) == config
