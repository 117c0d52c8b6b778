"""The deep equilibrium encoder: solvers, implicit gradients and the Jacobian term."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import bertsmith
from bertsmith import InputError, Subnet
from bertsmith.data.layout import SequenceLayout
from bertsmith.layers.fixed_point import find_fixed_point
from bertsmith.layers.replay import GeneratorStates
from bertsmith.models.config import ModelConfig
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.equilibrium import EquilibriumConfig, EquilibriumEncoder, _Layers
from bertsmith.models.model import Model

SIZES: dict[str, Any] = {"width": 16, "heads": 2, "vocabulary": 30, "max_length": 12, "init_std": 0.12, "layers": 1}
TIGHT: dict[str, Any] = {"steps": 120, "backward_steps": 120, "tolerance": 1e-13}
PRESETS = {
    "full": ("bert-tiny", {}),
    "disentangled": ("deberta-v3-xsmall", {"span": 4, "max_distance": 8}),
    "favor": ("performer-base", {"features": 8}),
    "dynamic_conv": ("dynamicconv-base", {}),
}
LENGTHS = [5, 9, 1]


def equilibrium(kind: str = "full", *, dropout: float = 0.0, layers: int = 1, **settings: Any) -> Model:
    name, own = PRESETS[kind]
    config = bertsmith.preset(name, **{**SIZES, **own, "dropout": dropout, "layers": layers})
    encoder = config.encoder.changed(equilibrium=EquilibriumConfig(**{**TIGHT, **settings}))
    model = bertsmith.build(config.changed(encoder=encoder, heads=(), generator=None), seed=0).double()
    assert isinstance(model.encoder, EquilibriumEncoder)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def batch() -> tuple[Tensor, SequenceLayout, Tensor, SequenceLayout]:
    """Return the same sequences packed and padded."""
    generator = torch.Generator().manual_seed(7)
    is_token = torch.arange(max(LENGTHS) + 1) < torch.tensor(LENGTHS)[:, None]
    rows = torch.randint(0, 30, is_token.shape, generator=generator)
    starts = torch.tensor([0, *LENGTHS, 0]).cumsum(0).int()  # ends in an empty sequence
    return rows[is_token], SequenceLayout.packed(starts, max(LENGTHS)), rows, SequenceLayout.padded(is_token)


def layers_of(model: Model, tokens: Tensor, layout: SequenceLayout) -> tuple[Any, Tensor]:
    """Return f as a plain function of z, and x."""
    encoder = model.encoder
    injected = encoder.embedding(tokens, layout)
    blocks = encoder.active_blocks(encoder.context(tokens, layout))

    def function(point: Tensor) -> Tensor:
        hidden = point + injected
        for block, context in blocks:
            hidden = block(hidden, context)
        return hidden

    return function, injected


@pytest.mark.parametrize("kind", PRESETS)
@pytest.mark.parametrize("solver", ["anderson", "plain"])
def test_output_is_a_fixed_point(kind: str, solver: str) -> None:
    model, (tokens, layout, _, _) = equilibrium(kind, solver=solver).eval(), batch()
    with torch.no_grad():
        output = model.encoder.run(EncoderInputs(tokens, layout), Want(all_hidden_states=True))
        function, _ = layers_of(model, tokens, layout)
        point = output.hidden_states[-1]
        torch.testing.assert_close(function(point), point, rtol=0, atol=1e-11)
    assert output.convergence is not None
    assert (output.convergence.residual[:3] <= 1e-13).all()
    assert output.convergence.residual[3] == 0
    assert output.convergence.iterations[:3].min() > 3


def test_both_solvers_and_other_starts_reach_the_same_point() -> None:
    model, (tokens, layout, _, _) = equilibrium().eval(), batch()
    with torch.no_grad():
        function, injected = layers_of(model, tokens, layout)
        options = {"steps": 200, "tolerance": 1e-14}
        expected = find_fixed_point(function, torch.zeros_like(injected), layout, solver="plain", **options)
        for start in (torch.zeros_like(injected), torch.randn_like(injected)):
            found = find_fixed_point(function, start, layout, solver="anderson", **options)
            torch.testing.assert_close(found.point, expected.point, rtol=0, atol=1e-10)
        assert found.convergence.iterations[:3].max() < expected.convergence.iterations[:3].max()


def test_stopping_early_does_not_change_the_result() -> None:
    model, (tokens, layout, _, _) = equilibrium().eval(), batch()
    with torch.no_grad():
        function, injected = layers_of(model, tokens, layout)
        for solver in ("anderson", "plain"):
            whole, early = (
                find_fixed_point(
                    function, injected, layout, solver=solver, steps=60, tolerance=1e-9, stops_early=stops_early
                )
                for stops_early in (False, True)
            )
            assert torch.equal(whole.point, early.point)
            assert torch.equal(whole.convergence.iterations, early.convergence.iterations)
            assert len(whole.convergence.iterations[:3].unique()) > 1  # sequences stop at different steps


def test_constant_function_has_its_value_as_fixed_point() -> None:
    model, (tokens, layout, _, _) = equilibrium(), batch()
    (block,) = model.encoder.blocks
    with torch.no_grad():
        for linear in (block.mixer.output, block.feedforward.contract):
            linear.weight.zero_()
            linear.bias.zero_()
        # z = norm(norm(z + x)): the second norm of a layer without sub-layers has a closed form, weight 1 and bias b
        block.mixer_norm.weight.zero_()
        expected = block.feedforward_norm(block.mixer_norm.bias)
        output = model.eval().encoder.run(EncoderInputs(tokens, layout))
    torch.testing.assert_close(output.last, expected.expand_as(output.last), rtol=0, atol=1e-12)
    assert output.convergence is not None
    assert output.convergence.iterations[:3].tolist() == [2, 2, 2]


@pytest.mark.parametrize("solver", ["anderson", "plain"])
@pytest.mark.parametrize("steps", [7, 120])
def test_alone_padded_and_packed_are_the_same(solver: str, steps: int) -> None:
    model = equilibrium(solver=solver, steps=steps, backward_steps=steps, tolerance=1e-6)
    packed, packed_layout, rows, padded_layout = batch()
    table = model.encoder.embedding.token_table

    def result(tokens: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        output = model.encoder(tokens, layout)
        output = output if layout.is_token is None else output[layout.is_token]
        return output, torch.autograd.grad(output.pow(3).sum(), table)[0]

    together = result(packed, packed_layout)
    torch.testing.assert_close(result(rows, padded_layout), together, rtol=1e-10, atol=1e-10)
    alone = [
        result(item[None, :length], SequenceLayout.full(1, length)) for item, length in zip(rows, LENGTHS, strict=True)
    ]
    outputs, gradients = zip(*alone, strict=True)
    torch.testing.assert_close(torch.cat([o.flatten(0, 1) for o in outputs]), together[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(sum(gradients), together[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", PRESETS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_implicit_gradients_equal_those_of_many_unrolled_steps(kind: str, dropout: float) -> None:
    model, (tokens, layout, _, _) = equilibrium(kind, dropout=dropout).train(), batch()
    weights = torch.linspace(-1, 1, 15 * 16, dtype=torch.float64).view(15, 16)
    results = []
    for is_unrolled in (False, True):
        model.encoder.is_unrolled = is_unrolled
        model.encoder.settings = model.encoder.settings.changed(unrolled_steps=100)
        torch.manual_seed(3)
        output = model.encoder(tokens, layout)
        sources = list(model.parameters())
        found = torch.autograd.grad((output * weights).sum(), sources, allow_unused=True)
        results.append((output, [gradient for gradient in found if gradient is not None], torch.get_rng_state()))
    (output, gradients, state), (expected, expected_gradients, expected_state) = results
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-11)
    assert len(gradients) == len(expected_gradients) > 10
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-8, atol=1e-9)
    if not dropout:
        assert torch.equal(state, expected_state)


def test_gradcheck() -> None:
    model = equilibrium().eval()
    tokens, layout = torch.tensor([[3, 4, 5]]), SequenceLayout.full(1, 3)
    parameters = [parameter for parameter in model.encoder.blocks.parameters() if parameter.dim() == 1]

    def run(*_: Tensor) -> Tensor:
        return model.encoder(tokens, layout)[..., :3]

    assert torch.autograd.gradcheck(run, parameters, fast_mode=True)
    assert torch.autograd.gradcheck(run, [model.encoder.embedding.token_table], fast_mode=True)


def test_gradients_of_intermediate_hidden_states_are_implicit_too() -> None:
    model, (tokens, layout, _, _) = equilibrium(layers=2, dropout=0.1).train(), batch()
    parameters = list(model.encoder.blocks.parameters())
    results = []
    for is_unrolled in (False, True):
        model.encoder.is_unrolled = is_unrolled
        model.encoder.settings = model.encoder.settings.changed(unrolled_steps=250)
        torch.manual_seed(3)
        output = model.encoder.run(EncoderInputs(tokens, layout), Want(all_hidden_states=True))
        loss = output.hidden_states[1].pow(3).sum() + output.hidden_states[0].pow(3).sum() + output.last.pow(3).sum()
        results.append((loss, torch.autograd.grad(loss, parameters)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-8, atol=1e-8)


def test_unrolled_mode_is_a_shared_network_with_injection() -> None:
    model, (tokens, layout, _, _) = equilibrium(unrolled_until=10, unrolled_steps=3).train(), batch()
    model.encoder.redraw_features(9, seed=0)
    output = model.encoder.run(EncoderInputs(tokens, layout))
    function, injected = layers_of(model, tokens, layout)
    expected = function(function(function(torch.zeros_like(injected))))
    torch.testing.assert_close(output.last, model.encoder.final_norm(expected), rtol=0, atol=1e-13)
    assert output.convergence is not None
    assert output.convergence.iterations.tolist() == [3, 3, 3, 3]
    assert (output.convergence.residual[:3] > 1e-6).all()
    model.encoder.redraw_features(10, seed=0)
    after = model.encoder.run(EncoderInputs(tokens, layout)).convergence
    assert after is not None
    assert (after.residual <= 1e-13).all()
    model.encoder.redraw_features(9, seed=0)
    evaluated = model.eval().encoder.run(EncoderInputs(tokens, layout)).convergence  # evaluation solves at any step
    assert evaluated is not None
    assert (evaluated.residual <= 1e-13).all()


def test_all_evaluations_drop_the_same_values() -> None:
    model, (tokens, layout, _, _) = equilibrium(dropout=0.3).train(), batch()
    encoder = model.encoder
    blocks = encoder.active_blocks(encoder.context(tokens, layout))
    point = torch.randn(15, 16, dtype=torch.float64)
    function = _Layers(blocks, encoder.embedding(tokens, layout), is_random=True)
    states = GeneratorStates.capture(tokens.device)
    first = function(point)
    assert torch.equal(function(point), first)
    assert not states.differ()
    assert torch.equal(function.last(point), first)
    assert states.differ()
    assert not torch.equal(function.last(point), first)


class Saved:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def test_saved_tensors_do_not_depend_on_the_number_of_steps() -> None:
    tokens, layout, _, _ = batch()
    counts = []
    for steps in (3, 30):
        model = equilibrium(steps=steps, tolerance=0.0).train()
        alive: weakref.WeakSet[Saved] = weakref.WeakSet()

        def pack(tensor: Tensor, alive: weakref.WeakSet[Saved] = alive) -> Saved:
            saved = Saved(tensor)
            alive.add(saved)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            output = model.encoder(tokens, layout)
        assert output.requires_grad
        counts.append(sum(saved.tensor.numel() for saved in alive))
    assert counts[0] == counts[1] > 0


@pytest.mark.slow  # many samples
def test_jacobian_term_is_an_unbiased_estimate_of_the_squared_norm() -> None:
    model = equilibrium(jacobian_weight=1.0, jacobian_share=1.0).train()
    tokens, layout = torch.tensor([[3, 4, 5, 0]]), SequenceLayout.padded(torch.tensor([[True, True, True, False]]))
    encoder = model.encoder
    encoder.redraw_features(0, seed=0)
    function, injected = layers_of(model, tokens, layout)
    point = find_fixed_point(function, torch.zeros_like(injected), layout, steps=100, tolerance=1e-13).point.detach()
    jacobian = torch.autograd.functional.jacobian(function, point)[0, :3, :, 0, :3]  # (3, 16, 3, 16)
    exact = jacobian.square().sum() / 16
    torch.manual_seed(0)
    draws = []
    for _ in range(300):
        convergence = encoder.run(EncoderInputs(tokens, layout)).convergence
        assert convergence is not None
        draws.append(convergence.jacobian)
    estimates = torch.stack(draws)
    error = estimates.std() / 300**0.5
    assert abs(estimates.mean() - exact) < 4 * error < 0.2 * exact
    gradients = torch.autograd.grad(draws[0], list(encoder.blocks.parameters()), allow_unused=True)
    assert sum(gradient is not None and bool(gradient.any()) for gradient in gradients) > 6
    assert encoder.eval().run(EncoderInputs(tokens, layout)).convergence.jacobian is None


def test_jacobian_term_is_drawn_for_a_share_of_the_steps() -> None:
    encoder = equilibrium(jacobian_weight=1.0, jacobian_share=0.35).encoder
    drawn = []
    for step in range(400):
        encoder.redraw_features(step, seed=1)
        drawn.append(encoder.computes_jacobian)
    assert 100 < sum(drawn) < 180
    encoder.redraw_features(7, seed=1)
    assert encoder.computes_jacobian == drawn[7]
    without = equilibrium().encoder
    without.redraw_features(0, seed=1)
    assert not without.computes_jacobian


def test_solver_runs_in_float32_under_autocast() -> None:
    model, (tokens, layout, _, _) = equilibrium("disentangled", tolerance=1e-5).float().eval(), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        output = model.encoder.run(EncoderInputs(tokens, layout))
    assert output.convergence is not None
    assert (output.convergence.residual <= 1e-5).all()
    assert output.last.dtype == torch.bfloat16


def test_subnet_equals_extract() -> None:
    model, (tokens, layout, _, _) = equilibrium(layers=2).eval(), batch()
    for subnet in (Subnet(width=0.5), Subnet(depth=0.5)):
        small = bertsmith.extract(model, subnet)
        assert isinstance(small.encoder, EquilibriumEncoder)
        expected = model.encoder(tokens, layout, subnet=subnet)
        torch.testing.assert_close(small.encoder(tokens, layout), expected, rtol=0, atol=1e-11)


def test_configs_and_requests_that_do_not_fit_raise() -> None:
    model, (tokens, layout, _, _) = equilibrium(), batch()
    plain = model.config.plain()
    for changes, message in (
        ({"reversible": True}, r"reversible and equilibrium are given"),
        ({"universal": {}}, r"equilibrium and universal are given"),
        ({"layer_drop": 0.1}, r"equilibrium and layer_drop are given"),
        (
            {"layers": [{**plain["encoder"]["layers"][0], "norm": {"placement": "pre"}}]},
            r"equilibrium is given, but layers\.0\.norm\.placement is 'pre'; use 'post'",
        ),
    ):
        with pytest.raises(InputError, match=message):
            ModelConfig.parse({**plain, "encoder": {**plain["encoder"], **changes}})
    with pytest.raises(InputError, match=r"quantisation and encoder\.equilibrium are given"):
        ModelConfig.parse({**plain, "quantisation": {}})
    with pytest.raises(InputError, match=r"a mask_decoder is given with encoder\.equilibrium"):
        ModelConfig.parse({**plain, "heads": [{"kind": "mask_decoder", "max_length": 12}, {"kind": "masked_tokens"}]})
    with pytest.raises(InputError, match="an equilibrium encoder has no separate last layer"):
        model.encoder.run(EncoderInputs(tokens, layout), Want(last_block=False))


def test_flops_count_every_step() -> None:
    model = equilibrium(steps=9)
    once = model.config.encoder.changed(equilibrium=None)
    assert model.config.encoder.flops(8) == 10 * once.flops(8)


def test_compiled_equilibrium_needs_the_plain_solver_and_no_gradients() -> None:
    tokens, layout, _, _ = batch()
    plain, mixed = equilibrium(solver="plain", steps=4).eval(), equilibrium(steps=4).eval()
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(plain.encoder, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(tokens, layout), plain.encoder(tokens, layout), rtol=0, atol=1e-12)
    refusals = (InputError, torch._dynamo.exc.Unsupported)
    with torch.no_grad(), pytest.raises(refusals, match="compiled and exported models need 'plain'"):
        torch.compile(mixed.encoder, fullgraph=True, backend="eager")(tokens, layout)
    with pytest.raises(refusals, match="cannot be compiled with gradients"):
        torch.compile(plain.encoder, fullgraph=True, backend="eager")(tokens, layout)
