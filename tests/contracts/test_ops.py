"""Every backend of every op against its reference, and the choice between backends."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from cases import LENGTH_CASES, OP_CASES, packed_layout, padded_layout, tiny_model

from bertsmith import ops
from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.ops.attention import BACKENDS, attention, attention_map
from bertsmith.ops.disentangled import disentangled
from bertsmith.ops.sparse import SOFTMAX_ONLY

# backends that need a GPU, dropout, no float64 or no gradients are tested elsewhere
PARTICULAR_FORMS = ["short", "varlen", "grouped", "triton", "blocks"]
ATTENDING = {
    "attention": attention,
    "disentangled": partial(disentangled, position_key=None, position_query=None, relative=None),
    "favor": OP_CASES["favor softmax"].op,
}


def inputs(shape: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(*shape, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTH_CASES.values(), ids=LENGTH_CASES)
@pytest.mark.parametrize("lying", ["packed", "padded", "full"])
@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name, case in OP_CASES.items() for form in case.backends if form != "reference"],
)
def test_backends_equal_the_reference_with_gradients(
    name: str, form: str, lying: str, lengths: list[int], is_causal: bool
) -> None:
    case, rows = OP_CASES[name], (len(lengths), max(lengths) + 1)
    shape, layout = {
        "packed": ((sum(lengths),), packed_layout(lengths, empty=1)),
        "padded": (rows, padded_layout(lengths, extra=1)),
        "full": (rows, SequenceLayout.full(*rows)),
    }[lying]
    tensors = case.tensors(shape)
    real = torch.ones(shape, dtype=torch.bool) if layout.is_token is None else layout.is_token
    results = []
    for backend in (form, "reference"):
        try:
            mixed = case.op(*tensors, layout=layout, is_causal=is_causal, backend=backend)
        except InputError as error:
            if form not in PARTICULAR_FORMS and SOFTMAX_ONLY not in str(error):
                raise
            pytest.skip(str(error))
        assert mixed.shape[:-1] == tensors[0].shape[:-1]
        results.append([mixed[real], *torch.autograd.grad(mixed[real].square().sum(), tensors)])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-10)


def test_every_op_folder_has_a_case() -> None:
    folders = {path.name for path in Path(ops.__file__).parent.iterdir() if (path / "__init__.py").exists()}
    for folder in folders:
        module = import_module(f"bertsmith.ops.{folder}")
        tables = [table for name, table in vars(module).items() if name.endswith("BACKENDS")]
        assert tables, folder
        assert all(any(case.backends is table for case in OP_CASES.values()) for table in tables), folder


@pytest.mark.parametrize("name", ATTENDING)
def test_incompatible_key_layouts_raise(name: str) -> None:
    one, two = SequenceLayout.full(1, 6), SequenceLayout.full(2, 3)
    op, (query, key, value) = ATTENDING[name], inputs((2, 3))
    with pytest.raises(InputError, match="2 sequences of queries cannot attend to 1 sequences of keys"):
        op(query, key.view(1, 6, 3, 8), value.view(1, 6, 3, 8), layout=two, key_layout=one)
    with pytest.raises(InputError, match="is_causal is True, but key_layout differs from the queries' layout"):
        op(query, key, value, layout=two, key_layout=SequenceLayout.full(2, 3), is_causal=True)


def test_attention_reference_matches_the_formula() -> None:
    query, key, value = inputs((1, 4))
    expected = torch.empty(1, 4, 3, 8, dtype=torch.float64)
    for head in range(3):
        for i in range(4):
            scores = torch.stack([query[0, i, head] @ key[0, j, head] / 8**0.5 for j in range(4)])
            expected[0, i, head] = sum(scores.softmax(0)[j] * value[0, j, head] for j in range(4))
    mixed = attention(query, key, value, SequenceLayout.full(1, 4), backend="reference")
    torch.testing.assert_close(mixed, expected)


def test_causal_attention_ignores_future_tokens() -> None:
    query, key, value = inputs((6,))
    layout = packed_layout([6])
    before = attention(query, key, value, layout, is_causal=True)
    key2, value2 = (torch.cat([tensor[:4], torch.randn(2, 3, 8, dtype=torch.float64)]) for tensor in (key, value))
    after = attention(query, key2, value2, layout, is_causal=True)
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4:], after[4:])


def test_empty_sequences_give_no_nan() -> None:
    query, key, value = inputs((2, 3))
    layout = SequenceLayout.padded(torch.tensor([[True, True, False], [False, False, False]]))
    for backend in ("sdpa", "products", "reference"):
        mixed = attention(query, key, value, layout, backend=backend)
        gradients = torch.autograd.grad(mixed.square().sum(), (query, key, value))
        assert all(tensor.isfinite().all() for tensor in (mixed, *gradients)), backend


def test_named_backend_raises_with_the_reason() -> None:
    tensors, layout = inputs((5,)), packed_layout([5])
    with pytest.raises(InputError, match="backend 'varlen' cannot compute this: the tensors are on cpu"):
        attention(*tensors, layout, backend="varlen")
    with pytest.raises(InputError, match="backend is 'sdp'; did you mean 'sdpa'"):
        attention(*tensors, layout, backend="sdp")


def test_varlen_reports_each_reason() -> None:
    tensors = inputs((2, 3))
    with pytest.raises(InputError, match="the layout is padded"):
        attention(*tensors, SequenceLayout.full(2, 3), backend="varlen")


def test_attention_map_is_zero_outside_the_sequence() -> None:
    query, key, _ = inputs((5,))
    maps = attention_map(query, key, packed_layout([3, 2]))
    assert maps.shape == (2, 3, 3, 3)
    assert (maps[1, :, :, 2] == 0).all()


def test_op_rejects_backends_of_other_ops() -> None:
    from bertsmith.ops.conv import light_conv

    with pytest.raises(InputError, match="backend is 'sdpa'; allowed: auto, reference, taps, triton"):
        light_conv(torch.randn(5, 2, 4), torch.randn(5, 2, 3), packed_layout([5]), backend="sdpa")


def test_model_rejects_unknown_backends() -> None:
    ids = torch.randint(0, 50, (2, 6))
    with pytest.raises(
        InputError, match="backend is 'taps'; allowed: auto, grouped, products, reference, sdpa, short, varlen"
    ):
        tiny_model("bert-tiny")(ids, backend="taps")
    with pytest.raises(InputError, match="backend is 'tabs'; did you mean 'taps'"):
        tiny_model("convbert-small")(ids, backend="tabs")


def test_ops_without_the_requested_backend_use_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    from bertsmith.ops import conv

    used = set()
    for backends in (BACKENDS, conv.BACKENDS, conv.DEPTHWISE_BACKENDS):
        for name, form in backends.items():
            spy = replace(form, compute=lambda inputs, form=form, name=name: (used.add(name), form.compute(inputs))[1])
            monkeypatch.setitem(backends, name, spy)
    model, ids = tiny_model("convbert-small"), torch.randint(0, 50, (2, 6))
    for backend, expected in {"taps": {"taps", "sdpa"}, "sdpa": {"taps", "sdpa"}, "reference": {"reference"}}.items():
        used.clear()
        model(ids, backend=backend)
        assert used == expected
