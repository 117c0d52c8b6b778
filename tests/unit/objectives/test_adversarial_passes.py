"""The three passes of adversarial training: noise, ascent, gradients, layouts, DDP."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from small_tasks import FAMILIES, LENGTHS, assert_same, gradients, losses, make, make_batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from bertsmith import SequenceLayout
from bertsmith.data.examples import TaskBatch
from bertsmith.errors import InputError
from bertsmith.layers.linear import ElasticLinear
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads.task import TaggerConfig
from bertsmith.models.model import Model
from bertsmith.objectives import adversarial
from bertsmith.objectives.adversarial import Adversarial, AdversarialConfig, ascend, draw_noise
from bertsmith.objectives.base import Sums, soft_cross_entropy, squared_error
from bertsmith.objectives.supervised import Classes, Supervised, Tags
from bertsmith.training.finetuning import FinetuneSettings, training_objective


def test_noise_is_truncated_normal() -> None:
    noise = draw_noise(torch.empty(500, 200), SequenceLayout.full(1, 500), 0.01)
    assert noise.dtype == torch.float32
    assert noise.abs().max() == torch.tensor(0.02)
    # mean square of a normal clamped at two standard deviations, and the fraction of clamped values
    assert noise.square().mean().sqrt() / 0.01 == pytest.approx(0.9205**0.5, abs=0.01)
    assert (noise.abs() == 0.02).float().mean() == pytest.approx(0.0455, abs=0.003)
    half = draw_noise(torch.empty(3, 4, dtype=torch.bfloat16), SequenceLayout.full(1, 3), 0.01)
    assert half.dtype == torch.float32


def test_padding_has_no_noise_and_no_draws() -> None:
    padded, packed = make_batch("padded").layout, make_batch("packed").layout
    torch.manual_seed(3)
    noise = draw_noise(torch.empty(3, 8, 5), padded, 0.01)
    torch.manual_seed(3)
    assert torch.equal(noise[padded.is_token], draw_noise(torch.empty(sum(LENGTHS), 5), packed, 0.01))
    assert noise[~padded.is_token].abs().max() == 0


def test_ascent_step_has_max_norm_rate_per_vector() -> None:
    noise, gradient = torch.randn(4, 6), torch.randn(4, 6) * torch.tensor([1e3, 1.0, 1e-3, 0.0])[:, None]
    change = ascend(noise, gradient, 0.5) - noise
    assert change.abs().amax(-1).tolist() == pytest.approx([0.5, 0.5, 0.5, 0.0], rel=1e-2, abs=1e-9)
    assert torch.equal(change[:3].sign(), gradient[:3].sign())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_gradient_leaves_the_noise_unchanged(value: float) -> None:
    noise, gradient = torch.randn(4, 6), torch.randn(4, 6)
    gradient[2, 3] = value
    assert torch.equal(ascend(noise, gradient, 0.5), noise)


def test_ascent_step_increases_the_divergence() -> None:
    model, batch = make(), make_batch()
    vectors = torch.randn(sum(LENGTHS), 16, dtype=torch.float64)

    def scores(noise: Tensor) -> Tensor:
        inputs = EncoderInputs(batch.tokens, batch.layout, perturb=lambda _: vectors + noise)
        return model.run(inputs, Want(task=True)).outputs

    noise, clean = draw_noise(vectors, batch.layout, 1e-2).requires_grad_(), scores(torch.zeros(())).detach()
    distance = soft_cross_entropy(scores(noise), clean).sum()
    (gradient,) = torch.autograd.grad(distance, noise)
    assert soft_cross_entropy(scores(ascend(noise, gradient, 1e-4)), clean).sum() > distance
    assert soft_cross_entropy(scores(ascend(noise, -gradient, 1e-4)), clean).sum() < distance


@pytest.mark.parametrize("name", ["bert-tiny", "deberta-v3-small"])
def test_noise_pass_computes_no_weight_gradients(name: str) -> None:
    model, batch = make(name), make_batch()
    objective = Adversarial(Classes(), AdversarialConfig(kind="sift"))
    arrived: list[str] = []
    for parameter_name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, own=parameter_name: arrived.append(own))
    sums = objective(model, batch)
    assert not arrived
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    sum(term.loss for term in sums.values()).backward()
    assert len(arrived) == len(set(arrived)) == len(list(model.parameters()))


def test_noise_gradient_skips_weight_gradient_products() -> None:
    """Operations: three forward passes, and a backward pass without the products for weight gradients."""
    model, batch = make(), make_batch()
    objective = Adversarial(Classes(), AdversarialConfig(kind="sift"))

    def operations(work: Callable[[], Any]) -> int:
        with FlopCounterMode(display=False) as counter:
            work()
        return counter.get_total_flops()

    clean: list[dict[str, Sums]] = []
    forward = operations(lambda: clean.append(Classes()(model, batch)))
    backward = operations(lambda: clean[0]["task"].loss.backward())
    weights, heads = (
        sum(module.weight.numel() for module in part.modules() if isinstance(module, ElasticLinear))
        for part in (model.encoder, model.heads)
    )
    assert weights > 0
    of_weights = 2 * (sum(LENGTHS) * weights + len(LENGTHS) * heads)
    assert operations(lambda: objective(model, batch)) == 3 * forward + backward - of_weights


@dataclass(frozen=True)
class DetachedPass(Classes):
    """Classes whose logits of one forward pass, given by its number, are detached."""

    deaf: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", [])

    def comparable_logits(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        self.passes.append(outputs)
        return outputs.detach() if len(self.passes) - 1 == self.deaf else outputs


def test_only_the_clean_pass_trains_the_embedding() -> None:
    model, batch = make("electra-small"), make_batch()
    reached = {}
    for deaf in (0, 2):
        loss = losses(Adversarial(DetachedPass(deaf=deaf), AdversarialConfig(kind="sift")), model, batch)["adversarial"]
        reached[deaf] = gradients(model, loss)
    tables = {f"encoder.embedding.{name}" for name in ("token_table", "type_table", "position.table")}
    every = {name for name, _ in model.named_parameters()}
    assert tables < every
    assert reached[2].keys() == every
    assert reached[0].keys() == every - tables


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_and_padded_are_the_same(name: str) -> None:
    model = make(name)
    objective = Adversarial(Classes(), AdversarialConfig(kind="sift"))
    packed, padded = (losses(objective, model, make_batch(layout))["adversarial"] for layout in ("packed", "padded"))
    assert_same(model, packed, padded)


def test_tags_packed_and_padded_are_the_same() -> None:
    model = make(head=TaggerConfig(labels=("a", "b", "c")))
    objective = Adversarial(Tags(), AdversarialConfig(kind="vat"))
    packed, padded = (losses(objective, model, make_batch(layout))["adversarial"] for layout in ("packed", "padded"))
    assert_same(model, packed, padded)


def test_noise_depends_on_the_seed() -> None:
    model, batch = make(), make_batch()
    objective = Adversarial(Classes(), AdversarialConfig(kind="sift"))
    one, again, other = (losses(objective, model, batch, seed)["adversarial"] for seed in (5, 5, 6))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_adversarial_loss_under_autocast() -> None:
    model, batch = make().float(), make_batch()
    objective = Adversarial(Classes(), AdversarialConfig(kind="sift"))
    expected = losses(objective, model, batch)["adversarial"]
    with torch.autocast("cpu", torch.bfloat16):
        found = losses(objective, model, batch)["adversarial"]
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=0.05)
    assert all(gradient.isfinite().all() for gradient in gradients(model, found).values())


@contextmanager
def one_process() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


class Step(nn.Module):
    """A model with its objective, as the trainer wraps it."""

    def __init__(self, model: Model, objective: Adversarial) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: TaskBatch) -> dict[str, Tensor]:
        return losses(self.objective, self.model, batch)


def test_ddp_wrapper_sees_one_backward_pass() -> None:
    """DDP raises if a parameter is ready twice, and waits for one that never is."""
    model, batch = make(), make_batch()
    objective = Adversarial(Classes(), AdversarialConfig(kind="sift"))
    expected = gradients(model, sum(losses(objective, model, batch).values()))
    with one_process():
        wrapped = DistributedDataParallel(Step(model, objective))
        for _ in range(2):  # DDP detects unfinished reductions of the first step in the second
            model.zero_grad()
            sum(wrapped(batch).values()).backward()
        del wrapped  # it may not be the last owner of the process group, whose threads it would wait for with the GIL
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-10)


def test_impossible_outcomes_do_not_count() -> None:
    scores, other = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4)
    longer = [torch.cat([part, torch.full((2, 3, 1), float("-inf"))], -1) for part in (scores, other)]
    for divergence in (adversarial.symmetric_kl, soft_cross_entropy):
        found = divergence(*longer)
        torch.testing.assert_close(found, divergence(scores, other))
        (gradient,) = torch.autograd.grad(found.sum(), scores)
        assert gradient.isfinite().all()
        assert found.shape == (2,)
    assert squared_error(*longer).isfinite().all()


@dataclass(frozen=True)
class NoLogits(Supervised):
    """A task without comparable logits."""

    def sums(self, outputs: Tensor, batch: TaskBatch) -> Sums:
        return Sums(outputs.sum(), {})

    def count(self, batch: TaskBatch) -> Tensor:
        return torch.tensor(1)


def test_task_without_comparable_logits_raises() -> None:
    with pytest.raises(InputError, match="NoLogits has no comparable logits"):
        Adversarial(NoLogits(), AdversarialConfig(kind="sift"))(make(), make_batch())


def test_frozen_encoder_raises() -> None:
    with pytest.raises(InputError, match="encoder is frozen"):
        Adversarial(Classes(frozen="all"), AdversarialConfig(kind="vat"))


SETTINGS = {"model": "bert-tiny", "task": {"kind": "classification"}}


def test_settings_select_adversarial_training() -> None:
    plain = FinetuneSettings.parse(SETTINGS)
    assert plain.adversarial.kind == "none"
    assert training_objective(Classes(), plain) == Classes()
    chosen = FinetuneSettings.parse({**SETTINGS, "adversarial": {"kind": "sift"}, "encoder": {"layer_decay": 0.8}})
    objective = training_objective(Classes(weights=(1.0, 2.0)), chosen)
    assert isinstance(objective, Adversarial)
    assert objective.terms["adversarial"].weight == 5.0
    assert objective.for_evaluation() == Classes(weights=(1.0, 2.0), layer_decay=0.8)
    model = make()
    assert len(objective.portions(model)[0].groups) == len(objective.task.portions(model)[0].groups) > 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"encoder": {"frozen": "all"}}, "encoder.frozen is 'all'"), ({"run": {"compile": "whole"}}, "run.compile")],
)
def test_incompatible_settings_raise(changes: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        FinetuneSettings.parse({**SETTINGS, "adversarial": {"kind": "sift"}, **changes})
