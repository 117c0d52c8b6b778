"""Multi-linear attention: the formula with its tensor, several cores, parameter count, lengths and pruning."""

import pytest
import torch
from cases import WIDTH, forward_context, packed_layout, padded_layout

from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.int8 import int8_model
from bertsmith.errors import InputError
from bertsmith.layers.elementwise import LayerGates
from bertsmith.layers.mixers.multi_linear import MultiLinear, MultiLinearConfig, RankCore
from bertsmith.layers.quantised import QuantisationConfig, QuantisedLinear
from bertsmith.layers.subnet import LayerCut
from bertsmith.models.build import build
from bertsmith.models.config import ModelConfig
from bertsmith.models.encoder import EncoderInputs
from bertsmith.models.published import preset
from bertsmith.ops.multi_linear import multi_linear
from bertsmith.shrinking.prune_selection import magnitude
from bertsmith.shrinking.pruned_units import fold_gates

LENGTH, RANK, OUT = 7, 5, 4


def make(**settings: object) -> MultiLinear:
    mixer = MultiLinearConfig(heads=3, head_width=2, dropout=0.0, max_length=12, **settings).build(WIDTH).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.5)
    return mixer.eval()


def factors() -> list[torch.Tensor]:
    shapes = ((LENGTH, RANK), (LENGTH, RANK), (LENGTH, RANK), (9, 9, OUT))
    return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", ["products", "reference"])
def test_output_equals_the_formula(backend: str, is_causal: bool) -> None:
    query, key, value, pairs = factors()
    mixed = multi_linear(query, key, value, pairs, packed_layout([LENGTH]), is_causal=is_causal, backend=backend)
    for i in range(LENGTH):
        last = i + 1 if is_causal else LENGTH
        expected = torch.zeros(OUT, dtype=torch.float64)
        for j in range(last):
            for m in range(last):
                expected += (query[i] * key[j] * value[m]).sum() * pairs[j, m]
        torch.testing.assert_close(mixed[i], expected / last**2, rtol=0, atol=1e-12)


def test_several_cores_equal_their_mean() -> None:
    """Block-term attention with diagonal cores and shared factors is attention with one core."""
    query, key, value, pairs = factors()
    cores = torch.randn(3, RANK, dtype=torch.float64)
    layout = packed_layout([LENGTH])
    by_core = [multi_linear(query * core, key, value, pairs, layout, backend="reference") for core in cores]
    one = multi_linear(query * cores.mean(0), key, value, pairs, layout)
    torch.testing.assert_close(torch.stack(by_core).mean(0), one, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_default_backend_never_stores_the_tensor(is_causal: bool) -> None:
    length, rank, out = 40, 2, 3
    query, key, value = (torch.randn(length, rank, requires_grad=True) for _ in range(3))
    pairs, largest = torch.randn(length, length, out, requires_grad=True), 0

    def saved(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        multi_linear(query, key, value, pairs, packed_layout([length]), is_causal=is_causal)
    assert 0 < largest <= max(rank, out) * length**2 < length**3


@pytest.mark.parametrize(("width", "rank", "max_length"), [(256, 40, 32), (256, 40, 80), (64, 16, 9)])
def test_parameters_and_flops_follow_the_formulas(width: int, rank: int, max_length: int) -> None:
    config = MultiLinearConfig(heads=4, head_width=rank // 4, max_length=max_length)
    weights = 3 * width * rank + rank + max_length**2 * width
    biases = 3 * rank + width
    assert sum(parameter.numel() for parameter in config.build(width).parameters()) == weights + biases
    assert config.flops(width, 20) == 2 * (3 * width * rank + 20 * rank * width + rank * width)


def test_map_sums_the_tensor_over_its_third_index() -> None:
    mixer, hidden = make(), torch.randn(6, WIDTH, dtype=torch.float64)
    context = forward_context(packed_layout([6]))
    query, key, value = mixer._project(hidden, context)
    expected = torch.einsum("ihr,jhr,mhr->hij", query, key, value)[None] / 36
    torch.testing.assert_close(mixer.maps(hidden, context)["multi_linear"], expected, rtol=0, atol=1e-12)


def test_closed_gate_equals_extraction() -> None:
    mixer, layout = make(), padded_layout([6, 3])
    hidden = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    gates = LayerGates(heads=torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    gated = mixer(hidden, forward_context(layout).with_gates(gates))
    small = mixer.extract(LayerCut(2, 1))
    torch.testing.assert_close(small(hidden, forward_context(layout)), gated, rtol=0, atol=1e-12)
    assert small.pairs.shape == mixer.pairs.shape


def test_long_sequences_raise() -> None:
    mixer = make(is_causal=True)
    with pytest.raises(InputError, match="may have 13 tokens; a multi_linear mixer with max_length 12"):
        mixer(torch.randn(13, WIDTH, dtype=torch.float64), forward_context(packed_layout([13])))
    context, hidden = forward_context(padded_layout([1])), torch.randn(1, WIDTH, dtype=torch.float64)
    state = mixer.start(context)
    for _ in range(12):
        _, state = mixer.step(hidden, state, context)
    with pytest.raises(InputError, match="may have 13 tokens"):
        mixer.step(hidden, state, context)


def network(max_length: int = 16) -> ModelConfig:
    config = preset("bert-tiny", width=WIDTH, heads=4, layers=2, vocabulary=50, max_length=16)
    mixer = MultiLinearConfig(heads=4, dropout=0.0, max_length=max_length)
    layers = tuple(layer.changed(mixer=mixer) for layer in config.encoder.layers)
    return config.changed(encoder=config.encoder.changed(layers=layers))


def test_mixer_shorter_than_the_embedding_raises() -> None:
    with pytest.raises(InputError, match=r"mixer.max_length is 15; allowed: embedding.max_length, 16, or more"):
        network(max_length=15)
    assert network().encoder.layers[0].mixer.length_limit == 16


def test_pruning_scores_and_folded_gates() -> None:
    model = build(network(), seed=0).double().eval()
    assert [scores.shape for scores in magnitude(model).heads] == [(4,), (4,)]
    assert all((block.mixer.output.weight == 1).all() for block in model.encoder.blocks)
    ids = torch.randint(0, 50, (2, 9))
    gates = [LayerGates(heads=torch.rand(4, dtype=torch.float64), neurons=torch.ones(96).double()) for _ in range(2)]
    expected = model.run(EncoderInputs(ids, SequenceLayout.full(2, 9), gates=gates)).last
    fold_gates(model, gates)
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-12)


def test_core_is_not_quantised() -> None:
    quantised = build(network().changed(heads=(), quantisation=QuantisationConfig()), seed=0).eval()
    mixer = quantised.encoder.blocks[0].mixer
    assert isinstance(mixer.project, QuantisedLinear)
    assert type(mixer.output) is RankCore
    ids = torch.randint(0, 50, (2, 9))
    small = int8_model(build(network().changed(heads=()), seed=0).eval(), "int8_weights")
    plain = build(network().changed(heads=()), seed=0).eval()(ids)
    torch.testing.assert_close(small(ids), plain, rtol=0, atol=0.1)
