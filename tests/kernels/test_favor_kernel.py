"""Fused kernels of FAVOR+ against the reference in float64: outputs, all gradients, invariances."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from cases import packed_layout, padded_layout
from torch import Tensor

from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.ops import kernel_support as support
from bertsmith.ops.dispatch import choose
from bertsmith.ops.favor import BACKENDS, FEATURE_MAPS, RandomFeatures, draw, favor, fused
from bertsmith.ops.favor.reference import FavorInputs

DEVICE = "cpu" if support.is_interpreting() else "cuda"
HALF = torch.float16 if support.is_interpreting() else torch.bfloat16
pytestmark = pytest.mark.skipif(
    not support.HAS_TRITON or not (support.is_interpreting() or torch.cuda.is_available()),
    reason="needs Triton, and a GPU or TRITON_INTERPRET=1",
)
HEADS = 2
LENGTHS = [1, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000]


@dataclass(frozen=True)
class Case:
    """Inputs of one comparison."""

    lengths: list[int]
    head_width: int = 16
    features: int = 20
    feature_map: str = "softmax"
    dtype: torch.dtype = torch.float32
    is_causal: bool = False
    is_packed: bool = True
    epsilon: float | None = None
    scale: float = 0.7
    memory: list[int] = field(default_factory=list)

    def layout(self, lengths: list[int]) -> SequenceLayout:
        return (packed_layout(lengths, empty=1) if self.is_packed else padded_layout([*lengths, 0], extra=2)).to(DEVICE)

    def random(self, *shape: int) -> Tensor:
        return self.scale * torch.randn(*shape, HEADS, self.head_width, dtype=torch.float64, device=DEVICE)

    def states(self, lengths: list[int]) -> Tensor:
        return self.random(sum(lengths)) if self.is_packed else self.random(len(lengths) + 1, max(lengths) + 2)

    def matrix(self) -> Tensor:
        """Draw a random matrix, rounded as in the kernel."""
        constant = FEATURE_MAPS[self.feature_map].has_constant_norms
        matrix = draw(self.features, self.head_width, has_constant_norms=constant).to(DEVICE).float()
        rounded = (matrix * self.head_width**-0.25).to(self.dtype)
        return rounded.double() * self.head_width**0.25


def is_real(layout: SequenceLayout, states: Tensor) -> Tensor:
    real = torch.ones(states.shape[:-2], dtype=torch.bool, device=DEVICE)
    return real if layout.is_token is None else layout.is_token


def results(case: Case) -> dict[str, list[Tensor]]:
    """Return output and gradients of the kernel, of the reference in the same precision, and in float64."""
    layout = case.layout(case.lengths)
    key_layout = case.layout(case.memory) if case.memory else layout
    exact = [case.states(case.lengths), *(case.states(case.memory or case.lengths) for _ in range(2))]
    weight, matrix = torch.randn_like(exact[0]), case.matrix()
    weight = weight * is_real(layout, weight)[..., None, None]
    by_backend = {}
    for name, dtype in (("triton", case.dtype), ("reference", case.dtype), ("truth", torch.float64)):
        tensors = [tensor.to(case.dtype).to(dtype).requires_grad_() for tensor in exact]
        features = RandomFeatures(matrix if name == "truth" else matrix.float(), case.feature_map, case.epsilon)
        backend = "triton" if name == "triton" else "reference"
        mixed = favor(*tensors, features, layout, key_layout=key_layout, is_causal=case.is_causal, backend=backend)
        gradients = torch.autograd.grad((mixed * weight.to(dtype)).sum(), tensors)
        real = mixed * is_real(layout, mixed)[..., None, None]
        if name == "triton":
            assert torch.equal(mixed, real)
        by_backend[name] = [tensor.double() for tensor in (real, *gradients)]
        for position in (1, 2) if case.feature_map == "relu" else ():
            rounded = exact[position - 1].to(case.dtype).double()
            by_backend[name][position] = by_backend[name][position] * has_slope(rounded, matrix)
    return by_backend


def has_slope(states: Tensor, matrix: Tensor) -> Tensor:
    """Return where relu has a stable derivative: near 0, rounding decides between two slopes, and both are correct.

    Shape: (…, heads, 1).
    """
    return ((states @ matrix.T).abs() > 1e-5 * matrix.norm(dim=1)).all(-1, keepdim=True)


def check(case: Case) -> None:
    by_backend = results(case)
    room = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 6e-3}[case.dtype]
    if case.dtype == torch.bfloat16 and support.is_interpreting():
        room = 3e-2  # the interpreter truncates where the GPU rounds
    for fast, rounded, truth in zip(by_backend["triton"], by_backend["reference"], by_backend["truth"], strict=True):
        assert fast.isfinite().all()
        # with one token or one feature, the gradient of queries is 0 up to rounding
        is_zero = truth.norm() <= 1e-9 * truth.numel() ** 0.5
        scale = truth.norm() + (1.0 if is_zero else 0.01) * truth.numel() ** 0.5
        assert (fast - truth).norm() / scale <= 1.5 * (rounded - truth).norm() / scale + room


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case([17, 5, 40]),
        Case([9, 3], is_packed=False, epsilon=0.1),
        Case([34], feature_map="hyperbolic", epsilon=0.01),
        Case([5, 1], features=1, feature_map="exp"),
        pytest.param(Case([1], 64, 256, dtype=HALF, scale=0.5), marks=pytest.mark.slow),
        Case([9], 32, 100, feature_map="regularised", epsilon=0.0),
        Case([40], feature_map="relu"),
        Case([130, 3], features=16, dtype=HALF),
        pytest.param(Case([130, 3], features=16, feature_map="relu", dtype=HALF), marks=pytest.mark.slow),
        pytest.param(Case([20], features=16, dtype=torch.bfloat16), marks=pytest.mark.slow),
        pytest.param(Case([140], features=16, dtype=torch.float16, scale=2.0), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kernel_equals_the_reference(case: Case, is_causal: bool) -> None:
    check(replace(case, is_causal=is_causal))


def test_more_features_than_one_program_holds() -> None:
    check(Case([40], features=266))


@pytest.mark.parametrize("is_packed", [True, False])
def test_keys_may_have_another_layout(is_packed: bool) -> None:
    check(Case([3, 20], memory=[40, 1], is_packed=is_packed, epsilon=0.01))
    check(Case([5, 3], memory=[7, 9], feature_map="relu", is_packed=is_packed))


def test_sequences_in_many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    from bertsmith.ops.favor.kernels import features as splits

    monkeypatch.setattr(splits, "_MIN_ROWS", 16)
    check(Case([150, 7], epsilon=0.01))
    check(Case([150, 7], feature_map="relu", dtype=HALF))
    check(Case([70], memory=[150], scale=2.0))


@pytest.mark.parametrize(
    "case", [Case([130, 7], epsilon=0.01), Case([130, 3], feature_map="relu", dtype=HALF)], ids=str
)
def test_causal_sequences_in_many_splits(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from bertsmith.ops.favor.kernels import features as splits

    monkeypatch.setattr(splits, "_MIN_ROWS", 16)
    check(replace(case, is_causal=True))


def test_causal_with_more_features_than_one_program_holds() -> None:
    check(Case([40, 1], features=100, is_causal=True))


def call(lengths: list[int], is_causal: bool, **options: Any) -> tuple[Any, list[Tensor]]:
    case = Case(lengths, **options)
    features = RandomFeatures(case.matrix().float(), case.feature_map)
    tensors = [case.states(lengths).to(case.dtype).requires_grad_() for _ in range(3)]
    layout = case.layout(lengths)
    return partial(favor, features=features, layout=layout, is_causal=is_causal, backend="triton"), tensors


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_equals_padded_and_backward_is_deterministic(is_causal: bool) -> None:
    lengths = [17, 3, 34]
    compute, tensors = call(lengths, is_causal)
    mixed = compute(*tensors)
    upstream = torch.randn_like(mixed)
    gradients = torch.autograd.grad(mixed, tensors, upstream, retain_graph=True)
    again = torch.autograd.grad(mixed, tensors, upstream)
    assert all(torch.equal(*pair) for pair in zip(gradients, again, strict=True))
    packed = packed_layout(lengths).to(DEVICE)
    rows, layout = zip(*(packed.pad(tensor.detach()) for tensor in tensors), strict=True)
    padded = compute(*rows, layout=layout[0])
    assert torch.equal(packed.unpad(padded, mixed), mixed)
    assert (padded[~layout[0].is_token] == 0).all()


@pytest.mark.parametrize("feature_map", ["softmax", "relu"])
def test_causal_output_ignores_future_tokens(feature_map: str) -> None:
    compute, tensors = call([70], True, feature_map=feature_map)
    tensors = [tensor.detach() for tensor in tensors]
    before = compute(*tensors)
    for position in (13, 32, 45):
        later = [torch.cat([tensor[:position], 5 * torch.randn_like(tensor[position:])]) for tensor in tensors]
        after = compute(*later)
        assert torch.equal(before[:position], after[:position])
        assert not torch.equal(before[position:], after[position:])


@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_sequences_and_strided_tensors(is_causal: bool) -> None:
    case = Case([20])
    layout = SequenceLayout.packed(torch.tensor([0, 0, 13, 13, 20, 20], dtype=torch.int32, device=DEVICE), 13)
    whole = torch.randn(20, 3, HEADS, case.head_width, device=DEVICE)
    features = RandomFeatures(case.matrix().float())
    mixed = favor(*whole.unbind(1), features, layout, is_causal=is_causal, backend="triton")
    expected = favor(*whole.unbind(1), features, layout, is_causal=is_causal, backend="reference")
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-5)
    if not is_causal:
        empty = SequenceLayout.packed(torch.tensor([0, 0, 0, 0, 0, 20], dtype=torch.int32, device=DEVICE), 20)
        tensors = [tensor.contiguous().requires_grad_() for tensor in whole.unbind(1)]
        mixed = favor(*tensors, features, layout, key_layout=empty, backend="triton")
        assert (mixed == 0).all()
        assert all((grad == 0).all() for grad in torch.autograd.grad(mixed.sum(), tensors))


@pytest.mark.parametrize("is_causal", [False, True])
def test_op_passes_opcheck_and_compiles(is_causal: bool) -> None:
    compute, tensors = call([5, 3], is_causal)
    mixed = compute(*tensors)
    gradients = torch.autograd.grad(mixed.square().sum(), tensors)
    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")(*tensors)
    assert torch.equal(compiled, mixed)
    again = torch.autograd.grad(compiled.square().sum(), tensors)
    assert all(torch.equal(*pair) for pair in zip(gradients, again, strict=True))
    # one sequence, so that no saved tensor has elements that are never written
    first, length = (torch.tensor([start], dtype=torch.int32, device=DEVICE) for start in (0, 8))
    matrix = torch.randn(20, 16, device=DEVICE)
    curve = (True, -0.5, 1e-6)
    if is_causal:
        arguments = (*tensors, matrix, first, length, 8, False, 32, 32, *curve)
        torch.library.opcheck(torch.ops.bertsmith.favor_causal.default, arguments)
    else:
        arguments = (*tensors, matrix, first, length, first, length, 8, 8, False, False, *curve)
        torch.library.opcheck(torch.ops.bertsmith.favor.default, arguments)


def test_unsupported_inputs_return_the_reason() -> None:
    def reason(feature_map: str = "softmax", width: int = 16, value_width: int = 16, count: int = 20) -> str | None:
        layout, tensors = SequenceLayout.full(1, 2), [torch.zeros(1, 2, 1, width, device=DEVICE) for _ in range(3)]
        features = RandomFeatures(torch.zeros(count, width, device=DEVICE), feature_map)
        value = torch.zeros(1, 2, 1, value_width, device=DEVICE)
        return fused.unsupported(FavorInputs(*tensors[:2], value, layout, layout, features=features))

    assert reason() is None
    assert "feature_map is 'elu', but the kernel supports exponential maps and relu" in str(reason("elu"))
    assert "the head width is 24, but the kernel supports 16, 32, 64, 128" in str(reason(width=24, value_width=24))
    assert "values have head width 32 and keys 16, but must have the same" in str(reason(value_width=32))
    assert "there are 514 features, but the kernel supports 1 to 512" in str(reason("hyperbolic", count=257))
    doubles = [torch.zeros(1, 2, 1, 16, dtype=torch.float64, device=DEVICE) for _ in range(3)]
    features = RandomFeatures(torch.zeros(4, 16, device=DEVICE))
    with pytest.raises(InputError, match=r"backend 'triton' cannot compute this: the tensors are torch\.float64"):
        favor(*doubles, features, SequenceLayout.full(1, 2), backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_width", [16, 32, 64, 128])
@pytest.mark.parametrize("lengths", [[length] for length in LENGTHS] + [[17, 1, 1000, 64, 129], [128] * 8], ids=str)
def test_every_length(lengths: list[int], head_width: int, dtype: torch.dtype, is_causal: bool) -> None:
    check(Case(lengths, head_width, 256, dtype=dtype, is_causal=is_causal, scale=0.5))


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("feature_map", ["softmax", "hyperbolic", "regularised", "exp", "relu"])
@pytest.mark.parametrize("features", [1, 100, 256, 266, 512])
def test_every_map_and_number_of_features(features: int, feature_map: str, is_causal: bool) -> None:
    count = features // 2 or 1 if feature_map == "hyperbolic" else features
    for dtype in (torch.bfloat16, torch.float32):
        check(Case([200, 65], 64, count, feature_map, dtype, is_causal, is_packed=False, scale=0.5))


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_32k_tokens_in_half_precision_are_finite(dtype: torch.dtype, scale: float, is_causal: bool) -> None:
    length = 32_768
    query, key = (scale * torch.randn(1, length, 2, 64, device="cuda") for _ in range(2))
    value = 1 + 0.1 * torch.randn(1, length, 2, 64, device="cuda")
    tensors = [tensor.to(dtype).requires_grad_() for tensor in (query, key, value)]
    features, layout = RandomFeatures(draw(256, 64).float().cuda()), SequenceLayout.full(1, length)
    with torch.autocast("cuda", dtype):
        mixed = favor(*tensors, features, layout, is_causal=is_causal, backend="triton")
    assert mixed.dtype == dtype
    assert mixed.isfinite().all()
    # a mean of values near 1
    assert (mixed - 1).abs().max() < 0.7
    gradients = torch.autograd.grad(mixed.float().square().sum(), tensors)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_width", [32, 64, 128])
@pytest.mark.parametrize("lengths", [[1], [63, 64, 65], [512] * 32, [1000, 1, 2047], [8192], [4096, 8192]], ids=str)
def test_20_causal_runs_are_equal(lengths: list[int], head_width: int, dtype: torch.dtype) -> None:
    # a product that reads shared memory while the next load overwrites it differs from run to run
    compute, tensors = call(lengths, True, head_width=head_width, features=256, dtype=dtype, scale=0.5)
    upstream = torch.randn_like(tensors[0])

    def run() -> list[Tensor]:
        mixed = compute(*tensors)
        return [mixed.detach(), *torch.autograd.grad(mixed, tensors, upstream)]

    expected = run()
    for _ in range(19):
        assert all(torch.equal(*pair) for pair in zip(expected, run(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lengths", [[4096], [8192], [2048, 1, 8192]], ids=str)
def test_long_causal_sequences_equal_the_linear_backend(lengths: list[int], dtype: torch.dtype) -> None:
    compute, tensors = call(lengths, True, head_width=64, features=256, dtype=dtype, scale=0.5)
    upstream = torch.randn_like(tensors[0])
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    mixed, truth = compute(*tensors), compute(*exact, backend="linear")
    fast = [mixed, *torch.autograd.grad(mixed, tensors, upstream)]
    true = [truth, *torch.autograd.grad(truth, exact, upstream.double())]
    for left, right in zip(fast, true, strict=True):
        assert (left - right).norm() <= (1e-2 if dtype == torch.bfloat16 else 1e-5) * right.norm()


@pytest.mark.gpu
def test_auto_chooses_the_kernel_on_a_gpu() -> None:
    layout = SequenceLayout.full(1, 4)
    tensors = [torch.randn(1, 4, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    inputs = FavorInputs(*tensors, layout, layout, features=RandomFeatures(torch.randn(8, 64, device="cuda")))
    assert choose(BACKENDS, "auto", inputs) is BACKENDS["triton"]
