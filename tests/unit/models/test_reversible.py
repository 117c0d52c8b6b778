"""Reversible layers against the plain formula and autograd."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bertsmith
from bertsmith import InputError, Subnet
from bertsmith.data.layout import SequenceLayout
from bertsmith.layers.elementwise import LayerGates
from bertsmith.models.config import ModelConfig
from bertsmith.models.encoder import FINAL_HIDDEN_STATES, EncoderInputs, Want
from bertsmith.models.model import Model
from bertsmith.models.reversible import ReversibleEncoder, ReversibleStack
from bertsmith.shrinking.hessian import layer_sharpness

SIZES: dict[str, Any] = {"width": 16, "heads": 2, "vocabulary": 30, "max_length": 12, "init_std": 0.3}
PRESETS = {
    "full": ("bert-tiny", {"placement": "pre"}),
    "disentangled": ("disentangled-small", {"embedding_width": 8, "span": 4, "max_distance": 8}),
    "favor": ("performer-base", {"placement": "pre", "features": 8}),
    "dynamic_conv": ("dynamicconv-base", {"placement": "pre"}),
    "shared": ("albert-base", {"placement": "pre", "embedding_width": 8}),
    "modern": ("modern-small", {"neurons": 24, "window": 2}),
}
LENGTHS = [5, 9, 1]


def reversible(kind: str = "full", *, layers: int = 3, dropout: float = 0.0, **changes: Any) -> Model:
    name, own = PRESETS[kind]
    config = bertsmith.preset(
        name, **{**SIZES, **own, "layers": layers, "dropout": dropout, "reversible": True, **changes}
    )
    model = bertsmith.build(config.changed(heads=(), generator=None), seed=0).double()
    assert isinstance(model.encoder, ReversibleEncoder)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def layouts() -> dict[str, tuple[Tensor, SequenceLayout]]:
    is_token = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    rows = torch.randint(0, 30, is_token.shape)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return {
        "padded": (rows, SequenceLayout.padded(is_token)),
        "packed": (rows[is_token], SequenceLayout.packed(starts, max(LENGTHS))),
    }


def formula(model: Model, inputs: EncoderInputs) -> Tensor:
    """Return the final hidden states by the equations of the module's docstring, with ordinary autograd."""
    encoder = model.encoder
    hidden = encoder.embedding(inputs.tokens, inputs.layout, inputs.types)
    context = encoder.context(inputs.tokens, inputs.layout)
    x1 = x2 = hidden
    for block, own in encoder.active_blocks(context, inputs.subnet, inputs.gates):
        y1 = x1 + block.dropout(block.mixer(block.mixer_norm(x2), own), inputs.layout)
        y2 = x2 + block.dropout(block.feedforward(block.feedforward_norm(y1), own), inputs.layout)
        x1, x2 = y1, y2
    return encoder.final_norm((x1 + x2) / 2)


def gates_of(model: Model) -> list[LayerGates]:
    def gate(count: int) -> Tensor:
        return torch.rand(count, dtype=torch.float64).add(0.5).requires_grad_()

    return [LayerGates(gate(unit.heads), gate(unit.neurons)) for unit in model.encoder.units]


@pytest.mark.parametrize("kind", PRESETS)
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_output_and_gradients_equal_autograd_of_the_formula(kind: str, layout: str, dropout: float) -> None:
    model = reversible(kind, dropout=dropout).train()
    tokens, where = layouts()[layout]
    gates = gates_of(model)
    inputs = EncoderInputs(tokens, where, gates=gates)
    sources = [*model.parameters(), *(part for gate in gates for part in (gate.heads, gate.neurons))]
    results = []
    for run in (lambda: model.encoder.run(inputs).last, lambda: formula(model, inputs)):
        torch.manual_seed(3)
        output = run()
        output = output if where.is_token is None else output[where.is_token]
        weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
        gradients = torch.autograd.grad((output * weights).sum(), sources, allow_unused=True)
        results.append((output, gradients, torch.get_rng_state()))
    (output, gradients, state), (expected, expected_gradients, expected_state) = results
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    assert torch.equal(state, expected_state)
    assert sum(gradient is not None for gradient in gradients) > len(gates) * 8
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12 * max(1.0, float(wanted.abs().max())))


def test_frozen_weights_get_no_gradients_and_the_others_do() -> None:
    model = reversible().train()
    frozen = [*model.encoder.embedding.parameters(), *model.encoder.blocks[0].parameters()]
    for parameter in frozen:
        parameter.requires_grad_(False)
    tokens, layout = layouts()["packed"]
    model.encoder(tokens, layout).square().sum().backward()
    assert all(parameter.grad is None for parameter in frozen)
    assert all(parameter.grad is not None for parameter in model.encoder.blocks[1].parameters())


def test_gradients_accumulate_over_backward_passes() -> None:
    model, (tokens, layout) = reversible(dropout=0.1).train(), layouts()["packed"]
    loss = model.encoder(tokens, layout).square().sum()
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.encoder.parameters()]
    loss.backward()
    for parameter, grad in zip(model.encoder.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * grad, rtol=1e-12, atol=1e-12)


def test_changed_weights_before_the_backward_pass_raise() -> None:
    model, (tokens, layout) = reversible().train(), layouts()["packed"]
    loss = model.encoder(tokens, layout).square().sum()
    with torch.no_grad():
        model.encoder.blocks[0].feedforward.expand.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 5e-5)])
def test_inverse_of_forward_is_the_input(dtype: torch.dtype, limit: float) -> None:
    model = reversible(layers=12, dropout=0.1).to(dtype).train()
    tokens, layout = layouts()["packed"]
    blocks = model.encoder.active_blocks(model.encoder.context(tokens, layout))
    streams = torch.randn(15, 16, dtype=dtype), torch.randn(15, 16, dtype=dtype)
    stack = ReversibleStack.of(blocks, streams[0], is_random=True)
    outputs = stack.forward(streams)
    assert (outputs[0] - streams[0]).abs().max() > 1
    inputs, _, _ = stack.backward(outputs, (torch.ones_like(streams[0]), torch.ones_like(streams[0])))
    for found, expected in zip(inputs, streams, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=limit)


class Saved:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output that its own node keeps would be a reference cycle


def saved_bytes(model: Model, want: Want = FINAL_HIDDEN_STATES) -> int:
    """Return the bytes that are kept for the backward pass after the forward pass, without weights."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        alive.add(saved)
        return saved

    tokens, layout = layouts()["packed"]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        output = model.encoder.run(EncoderInputs(tokens, layout), want)
    assert output.last.requires_grad
    storages = {saved.tensor.untyped_storage().data_ptr(): saved.tensor.untyped_storage().nbytes() for saved in alive}
    return sum(size for address, size in storages.items() if address not in own)


def test_saved_bytes_do_not_grow_with_depth() -> None:
    shallow, deep = (reversible(layers=layers, dropout=0.1).train() for layers in (2, 12))
    assert saved_bytes(shallow) == saved_bytes(deep)
    everything = Want(all_hidden_states=True)
    assert saved_bytes(deep, everything) > 4 * saved_bytes(shallow, everything) > 4 * saved_bytes(deep)


@pytest.mark.parametrize("kind", ["full", "disentangled"])
def test_all_hidden_states_and_maps_keep_the_result(kind: str) -> None:
    model, (tokens, layout) = reversible(kind), layouts()["padded"]
    final = model.encoder(tokens, layout)
    output = model.encoder.run(EncoderInputs(tokens, layout), Want(all_hidden_states=True, maps=True))
    torch.testing.assert_close(output.last, final, rtol=0, atol=1e-12)
    assert len(output.hidden_states) == 4
    torch.testing.assert_close(output.normalised(-1), final, rtol=0, atol=1e-12)
    # the maps are those of the stream that the mixer reads
    block, context = output.blocks[1]
    expected = block.mixer.maps(block.mixer_norm(output.hidden_states[1]), context)
    torch.testing.assert_close(output.maps[1], expected)


@pytest.mark.parametrize("subnet", [Subnet(width=0.5), Subnet(depth=0.67), Subnet(layers=(0, 2), heads=(1, 2))])
def test_subnet_equals_extract_with_gradients(subnet: Subnet, tmp_path: Path) -> None:
    model, (tokens, layout) = reversible(), layouts()["packed"]
    small = bertsmith.extract(model, subnet)
    assert isinstance(small.encoder, ReversibleEncoder)
    assert small.config.encoder.reversible
    gradients = []
    for encoder, cut in ((model.encoder, subnet), (small.encoder, None)):
        output = encoder(tokens, layout, subnet=cut)
        (gradient,) = torch.autograd.grad(output.square().sum(), encoder.embedding.token_table)
        gradients.append((output, gradient))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    bertsmith.save(small, tmp_path / "small")
    assert torch.equal(bertsmith.load(tmp_path / "small").encoder(tokens, layout), small.encoder(tokens, layout))


def test_streams_are_float32_under_autocast() -> None:
    model = reversible(layers=24, dropout=0.1).float().train()
    tokens, layout = layouts()["packed"]
    results = []
    for run in (lambda inputs: model.encoder.run(inputs).last, lambda inputs: _float32_formula(model, inputs)):
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = run(EncoderInputs(tokens, layout))
        results.append((output, torch.autograd.grad(output.float().square().mean(), list(model.encoder.parameters()))))
    (output, gradients), (expected, expected_gradients) = results
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected)
    assert saved_dtypes(model) == {torch.float32}
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0.02 * float(wanted.abs().max()) + 1e-6)


def saved_dtypes(model: Model) -> set[torch.dtype]:
    """Return the dtypes of the streams that the stack keeps under autocast."""
    tokens, layout = layouts()["packed"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        blocks = model.encoder.active_blocks(model.encoder.context(tokens, layout))
        hidden = model.encoder.embedding(tokens, layout)
        assert hidden.dtype == torch.bfloat16
        streams = ReversibleStack.of(blocks, hidden, is_random=True).forward((hidden.float(), hidden.float()))
    return {stream.dtype for stream in streams}


def _float32_formula(model: Model, inputs: EncoderInputs) -> Tensor:
    """Return the formula with float32 streams and everything else in autocast's dtype."""
    encoder, layout = model.encoder, inputs.layout
    hidden = encoder.embedding(inputs.tokens, layout)
    first = second = hidden.float()
    for block, own in encoder.active_blocks(encoder.context(inputs.tokens, layout)):
        first = first + block.dropout(block.mixer(block.mixer_norm(second.bfloat16()), own), layout)
        second = second + block.dropout(block.feedforward(block.feedforward_norm(first.bfloat16()), own), layout)
    return encoder.final_norm(((first + second) / 2).bfloat16())


def test_it_is_not_the_pre_norm_network_of_the_same_weights() -> None:
    model, (tokens, layout) = reversible(layers=1), layouts()["packed"]
    plain = bertsmith.build(model.config.changed(encoder=model.config.encoder.changed(reversible=False))).double()
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(plain.encoder(tokens, layout), model.encoder(tokens, layout), atol=1e-3)


def test_configs_that_do_not_fit_raise() -> None:
    with pytest.raises(InputError, match=r"reversible is given, but layers\.0\.norm\.placement is 'post'; use 'pre'"):
        bertsmith.preset("bert-tiny", reversible=True)
    with pytest.raises(InputError, match=r"reversible and layer_drop are given"):
        bertsmith.preset("bert-tiny", reversible=True, placement="pre", layer_drop=0.1)
    with pytest.raises(InputError, match=r"reversible and universal are given"):
        bertsmith.preset("universal-base", reversible=True, placement="pre")
    with pytest.raises(InputError, match=r"reversible is given, but layers\.0 has a branch"):
        bertsmith.preset("deberta-v2-xlarge", reversible=True, placement="pre")
    with pytest.raises(InputError, match=r"a mask_decoder is given with encoder\.reversible"):
        bertsmith.preset("deberta-base", reversible=True, placement="pre")
    with pytest.raises(InputError, match=r"reversible is given, but layers\.0 has a cross"):
        bertsmith.preset("transformer-tiny", reversible=True, placement="pre")
    plain = reversible().config.plain()
    with pytest.raises(InputError, match="exits are given; allowed: an encoder without universal steps, reversible"):
        ModelConfig.parse({**plain, "heads": [{"kind": "exits", "layers": [1], "outputs": 2, "answer": "classes"}]})
    with pytest.raises(InputError, match=r"quantisation and encoder\.reversible are given"):
        ModelConfig.parse({**plain, "quantisation": {}})


def test_requests_that_do_not_fit_raise() -> None:
    model, (tokens, layout) = reversible(), layouts()["packed"]
    with pytest.raises(InputError, match="a reversible encoder has no separate last layer"):
        model.encoder.run(EncoderInputs(tokens, layout), Want(last_block=False))
    with pytest.raises(InputError, match="a reversible or equilibrium encoder has no second derivatives"):
        layer_sharpness(model, [])


def test_training_mode_is_not_compiled() -> None:
    model, (tokens, layout) = reversible(layers=1), layouts()["packed"]
    compiled = torch.compile(model.encoder.train(), fullgraph=True, backend="eager")
    with pytest.raises((InputError, torch._dynamo.exc.Unsupported), match="cannot be compiled"):
        compiled(tokens, layout)


def test_every_parameter_is_ready_for_distributed_training() -> None:
    """DDP averages a gradient when a hook on its parameter fires; a missing one would be an error here."""
    model, (tokens, layout) = reversible(dropout=0.1).train(), layouts()["packed"]
    model.encoder.embedding.type_table.requires_grad_(False)  # no types are given
    torch.manual_seed(1)
    model.encoder(tokens, layout).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.encoder.parameters() if parameter.requires_grad]
    model.zero_grad()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model.encoder)
        for _ in range(2):  # the second forward pass checks that the first reduced every parameter
            model.zero_grad()
            torch.manual_seed(1)
            wrapped(tokens, layout).square().sum().backward()
        del wrapped  # it may not be the last owner of the process group, whose threads it would wait for with the GIL
    finally:
        torch.distributed.destroy_process_group()
    found = [parameter.grad for parameter in model.encoder.parameters() if parameter.requires_grad]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
