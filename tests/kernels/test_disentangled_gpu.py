"""Disentangled attention on a GPU: backends, half precision, and a compiled step with the mask decoder."""

import pytest
import torch
from cases import packed_layout

import bertsmith
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.ops.disentangled import BACKENDS, RelativePositions, bucket_slots, disentangled

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("lengths", [[1], [17, 1, 63], [64, 65], [600, 3]])
def test_backends_match_float64(lengths: list[int], has_positions: bool, dtype: torch.dtype) -> None:
    layout = packed_layout(lengths, empty=2).to("cuda")
    slots = bucket_slots(256, 512, clamps_distance=True).cuda()
    shapes = [(sum(lengths),)] * 3 + [(512,)] * 2
    exact = [torch.randn(*shape, 4, 64, device="cuda", dtype=torch.float64) for shape in shapes]
    weight, positions = torch.randn_like(exact[0]), torch.randint(0, 600, (sum(lengths),), device="cuda")
    relative = RelativePositions(exact[3], slots, positions if has_positions else None)

    def results(backend: str, precision: torch.dtype) -> list[torch.Tensor]:
        tensors = [tensor.to(dtype).to(precision).requires_grad_() for tensor in exact]
        mixed = disentangled(*tensors, layout, relative, backend=backend)
        assert mixed.dtype == precision
        return [mixed, *torch.autograd.grad((mixed * weight.to(precision)).sum(), tensors)]

    truth = results("reference", torch.float64)
    for backend in set(BACKENDS) - {"triton", "blocks", "grouped"}:  # tested elsewhere
        for value, expected in zip(results(backend, dtype), truth, strict=True):
            scale = expected.norm() + 0.01 * expected.numel() ** 0.5
            assert (value.double() - expected).norm() / scale < (2e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("name", ["deberta-base", "deberta-v2-xlarge"])
def test_compiled_step_equals_eager_step(name: str) -> None:
    size = {"width": 64, "layers": 3, "heads": 2, "vocabulary": 200, "max_length": 128, "dropout": 0.0, "init_std": 0.1}
    model = bertsmith.build(bertsmith.preset(name, **size), seed=0).cuda()
    lengths = [100, 28, 128]
    tokens, layout = torch.randint(0, 200, (256,), device="cuda"), packed_layout(lengths).to("cuda")
    positions = torch.randperm(256, device="cuda")[:40]

    def step(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        states = model.run(EncoderInputs(tokens, layout), Want(masked_positions=positions)).masked_states
        return model.head("masked_tokens")(states, model.token_table).logsumexp(-1).sum()

    gradients = []
    for compute in (step, torch.compile(step, fullgraph=True)):
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compute(tokens, positions)
        loss.backward()
        gradients.append([loss, *(parameter.grad for parameter in model.parameters())])
    for compiled, plain in zip(gradients[1], gradients[0], strict=True):
        assert (compiled - plain).norm() <= 0.05 * plain.norm() + 1e-2
