"""Contract of encoders, for one preset of each family."""

from pathlib import Path

import pytest
import torch
from cases import FAMILIES, LENGTH_CASES, orders_of, packed_layout, padded_layout, rows_of, tiny_model
from choosing import slow_unless

import bertsmith
from bertsmith import Subnet
from bertsmith.models.config import ModelConfig
from bertsmith.models.cost import parameters
from bertsmith.models.published import PRESETS, preset

SUBNETS = {
    "width": Subnet(width=0.5),
    "depth": Subnet(depth=0.67),
    "both": Subnet(width=0.25, depth=0.34, depth_rule="drop_last"),
    "by layer": Subnet(layers=(0, 2), heads=(1, 2), neurons=(6, 20)),
}


def tokens_of(lengths: list[int]) -> list[torch.Tensor]:
    return [torch.randint(0, 50, (length,)) for length in lengths]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("case", LENGTH_CASES)
def test_alone_padded_and_packed_are_the_same(name: str, case: str) -> None:
    model, lengths = tiny_model(name), LENGTH_CASES[case]
    items = tokens_of(lengths)
    expected = torch.cat([model(item[None])[0] for item in items])
    packed = model.encoder(torch.cat(items), packed_layout(lengths, empty=1))
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-11)
    layout = padded_layout(lengths, extra=2)
    for padding in (0, 49):
        rows = model(rows_of(items, 2, padding), layout.is_token.long())
        torch.testing.assert_close(rows[layout.is_token], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("subnet", SUBNETS.values(), ids=list(SUBNETS))
def test_extract_equals_subnet(name: str, subnet: Subnet, tmp_path: Path) -> None:
    model = tiny_model(name)
    ids, mask = torch.randint(0, 50, (3, 9)), padded_layout([9, 4, 1]).is_token
    expected = model(ids, mask, subnet=subnet)
    small = bertsmith.extract(model, subnet)
    count = sum(p.numel() for p in small.parameters())
    assert count == parameters(small.config)
    # with a shared layer a lower depth has the same weights, and layers with different cuts are no longer shared
    if model.config.encoder.sharing == "none":
        assert count < sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(small(ids, mask), expected, rtol=0, atol=1e-11)
    bertsmith.save(small, tmp_path / "small")
    bertsmith.save(model, tmp_path / "large")
    assert torch.equal(bertsmith.load(tmp_path / "small")(ids, mask), small(ids, mask))
    assert torch.equal(bertsmith.load(tmp_path / "large", subnet=subnet)(ids, mask), small(ids, mask))


@pytest.mark.parametrize("name", FAMILIES)
def test_extract_does_not_change_the_original(name: str) -> None:
    model = tiny_model(name)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    small = bertsmith.extract(model, Subnet(width=0.5))
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.fill_(7)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_reorder_keeps_the_output_and_changes_the_cut(name: str) -> None:
    model = tiny_model(name)
    ids = torch.randint(0, 50, (2, 8))
    before, half = model(ids), model(ids, subnet=Subnet(width=0.5))
    model.encoder.reorder(*orders_of(model))
    torch.testing.assert_close(model(ids), before, rtol=0, atol=1e-11)
    assert not torch.allclose(model(ids, subnet=Subnet(width=0.5)), half)


@pytest.mark.parametrize("name", FAMILIES)
def test_backends_agree_with_gradients(name: str) -> None:
    model, layout = tiny_model(name), packed_layout([5, 1, 7])
    tokens = torch.randint(0, 50, (13,))
    results = {}
    for backend in ("auto", "reference"):
        model.zero_grad()
        states = model.encoder(tokens, layout, backend=backend)
        states.square().sum().backward()
        results[backend] = [states, *(p.grad.clone() for p in model.encoder.parameters())]
    for fast, slow in zip(results["auto"], results["reference"], strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


QUICK = {"bert-tiny", "deberta-v3-xsmall"}
"""Families whose compilation and export run in every test run."""


COMPILED = [name for name in FAMILIES if not name.endswith(" equilibrium")]  # compiled without gradients only


@pytest.mark.parametrize("name", slow_unless(QUICK, COMPILED))
def test_compiles_as_one_graph(name: str) -> None:
    torch.compiler.reset()  # otherwise earlier families count as recompilations
    model = tiny_model(name, layers=2)
    tokens, layout = torch.randint(0, 50, (12,)), packed_layout([5, 7])
    # the whole model with gradients, the cut model without
    for subnet, backend in ((None, "aot_eager"), (Subnet(width=0.5), "eager")):
        encoder = torch.compile(model.encoder, fullgraph=True, backend=backend)
        found, expected = (form(tokens, layout, subnet=subnet) for form in (encoder, model.encoder))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
        if subnet is None:
            weight = torch.linspace(-1, 1, found.numel()).view_as(found)
            weights = [parameter for parameter in model.encoder.parameters() if parameter.requires_grad]
            gradients = (torch.autograd.grad((s * weight).sum(), weights, allow_unused=True) for s in (found, expected))
            # PyTorch 2.11 lost gradients of in-place copies
            torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", slow_unless(QUICK, FAMILIES))
def test_exports_with_dynamic_shapes(name: str) -> None:
    model = tiny_model(name, layers=2)
    example = (torch.randint(0, 50, (2, 5)), torch.ones(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long))
    free = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=16)}
    program = torch.export.export(model, example, dynamic_shapes=(free, free, free))
    other = (torch.randint(0, 50, (3, 9)), padded_layout([9, 2, 4]).is_token.long(), torch.randint(0, 2, (3, 9)))
    torch.testing.assert_close(program.module()(*other), model(*other), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_configs_round_trip(name: str) -> None:
    config = preset(name)
    assert ModelConfig.parse(config.plain()) == config


def test_same_seed_gives_same_weights() -> None:
    first, second = (bertsmith.build(preset("bert-tiny"), seed=3) for _ in range(2))
    other = bertsmith.build(preset("bert-tiny"), seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.encoder.embedding.token_table, other.encoder.embedding.token_table)


def test_initial_weights_are_truncated_at_two_std() -> None:
    model = bertsmith.build(preset("bert-tiny"), seed=0)
    table = model.encoder.embedding.token_table
    assert table.abs().max() <= 0.04
    assert abs(table.std().item() - 0.0176) < 0.0005  # 0.02 · the std of a normal truncated at two std
    assert (model.encoder.blocks[0].mixer_norm.weight == 1).all()
    assert (model.encoder.blocks[0].mixer.project.bias == 0).all()
