"""AdamW and its parameter groups; schedules of learning rate and batch size."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.distributed.tensor import DTensor

from bertsmith.objectives.base import Portion
from bertsmith.settings import Record


class Adam(torch.optim.AdamW):
    """AdamW without bias correction, or with StableAdamW's update clipping, or both.

    The moments m and v start at 0, so after t steps they are too small by the factors c₁ = 1 - β₁ᵗ and c₂ = 1 - β₂ᵗ.
    PyTorch updates a weight by λ (m/c₁) / (√(v/c₂) + ε) and decays it by λ d. Google's code for BERT and ELECTRA omits
    c₁ and c₂; PyTorch's formula gives the same with λ' = λ c₁/√c₂, ε' = ε/√c₂ and d' = d √c₂/c₁ for λ, ε and d.

    StableAdamW (Wortsman et al. 2023) scales the update of each tensor by 1/max(1, r), r = √mean(g² / max(v, ε²)): if
    the gradient g is much larger than v estimates, the update would be too large by that factor.

    All weights of a group must get a gradient in every step, or never: the group counts the steps for all of them.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, bias_correction: bool = True, stable: bool = False, **settings: Any
    ) -> None:
        # counted in the groups, since a checkpoint stores those
        super().__init__([{**group, "steps": 0} for group in groups], **settings)
        self.bias_correction, self.stable = bias_correction, stable

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the weights once."""
        given = [{name: group[name] for name in ("lr", "eps", "weight_decay")} for group in self.param_groups]
        before = [
            [parameter.clone() for parameter in _with_gradient(group)] if self.stable else []
            for group in self.param_groups
        ]
        for group in self.param_groups:
            group["steps"] += 1
            if not self.bias_correction:
                first, second = _biases(group)
                group["lr"] *= first / math.sqrt(second)
                group["eps"] /= math.sqrt(second)
                group["weight_decay"] *= math.sqrt(second) / first
        super().step(closure)
        for group, settings, parameters in zip(self.param_groups, given, before, strict=True):
            group.update(settings)
            if parameters:
                self._clip_updates(group, parameters)

    def _clip_updates(self, group: dict[str, Any], before: list[Tensor]) -> None:
        """Scale down updates whose RMS exceeds 1; `before` are the group's weights before the step."""
        weights = _with_gradient(group)
        correction = _biases(group)[1] if self.bias_correction else 1.0
        gradients = [parameter.grad for parameter in weights if parameter.grad is not None]
        roots = list(torch._foreach_sqrt([self.state[parameter]["exp_avg_sq"] for parameter in weights]))
        torch._foreach_div_(roots, math.sqrt(correction))
        torch._foreach_clamp_min_(roots, group["eps"])
        ratios = torch._foreach_div(gradients, roots)
        sizes = torch._foreach_norm(ratios)  # r √numel, one number per tensor
        sizes = torch._foreach_div(sizes, [math.sqrt(parameter.numel()) for parameter in weights])
        shares = torch._foreach_reciprocal(torch._foreach_clamp_min(sizes, 1.0))
        # subtract (1 - share) of the update: exactly 0 where the share is 1
        excess = torch._foreach_sub(weights, before)
        torch._foreach_mul_(excess, [1 - share for share in shares])
        torch._foreach_sub_(weights, excess)


def _with_gradient(group: dict[str, Any]) -> list[Tensor]:
    """Return the weights of a group that have a gradient."""
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def _biases(group: dict[str, Any]) -> tuple[float, float]:
    """Return the bias corrections 1 - βᵗ of both moments."""
    first, second = group["betas"]
    return 1 - first ** group["steps"], 1 - second ** group["steps"]


Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Record):
    """AdamW with decoupled weight decay."""

    kind: Literal["adamw", "stable_adamw"] = "adamw"
    """"stable_adamw" scales down the update of a tensor whose gradient jumps; it replaces clipping (clip = 0)."""
    learning_rate: float = Field(default=5e-4, gt=0, le=10)
    """Peak of the schedule."""
    betas: tuple[Share, Share] = (0.9, 0.98)
    epsilon: float = Field(default=1e-6, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    """Applied to matrices and embeddings, never to biases and norms."""
    bias_correction: bool = True
    """Correct for moments that start at 0; Google's code for BERT and ELECTRA does not."""
    clip: float = Field(default=1.0, ge=0)
    """Maximum norm of the gradient; 0 for no limit."""

    def build(self, portions: Sequence[Portion]) -> torch.optim.AdamW:
        """Build one AdamW over all portions; as AdamW treats each weight by itself, portions stay independent.

        Each group of a portion is split into matrices and other weights; `rate` multiplies its learning rate.
        """
        groups = []
        for given in (group for portion in portions for group in portion.groups):
            matrices = [parameter for parameter in given.parameters if parameter.dim() >= 2]
            others = [parameter for parameter in given.parameters if parameter.dim() < 2]
            for members, decay in ((matrices, self.weight_decay), (others, 0.0)):
                if members:
                    groups.append({"params": members, "weight_decay": decay, "rate": given.rate})
        parameters = [parameter for portion in portions for parameter in portion.parameters]
        # on a CPU the fused kernel does not support sharded tensors
        kinds = {parameter.device.type for parameter in parameters}
        is_sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        fused = kinds == {"cuda"} or (kinds == {"cpu"} and not is_sharded)
        settings: dict[str, Any] = {"lr": self.learning_rate, "betas": self.betas, "eps": self.epsilon, "fused": fused}
        is_stable = self.kind == "stable_adamw"
        if self.bias_correction and not is_stable:
            return torch.optim.AdamW(groups, **settings)
        return Adam(groups, bias_correction=self.bias_correction, stable=is_stable, **settings)

    def set_rate(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        """Set the learning rate of the next step."""
        for group in optimizer.param_groups:
            group["lr"] = rate * group["rate"]


class ScheduleConfig(Record):
    """Learning rate schedule, as a share of the peak."""

    kind: Literal["linear", "cosine", "noam", "wsd", "constant"] = "linear"
    """After the warm-up: linear or cosine decay to the floor, 1/√step, or constant with a 1-√ decay at the end."""
    warmup: float = Field(default=0.06, ge=0, le=1)
    """Share of the steps with a linearly rising rate."""
    begin: float = Field(default=0.0, ge=0, le=1)
    """Initial rate as a share of the peak. Cramming's triangle is "linear" with warmup 0.75 and begin 0.25."""
    fall: Literal["after_warmup", "from_start", "throughout"] = "after_warmup"
    """For "linear" and "cosine", where the decay starts: at the peak; at the first step but without effect during the
    warm-up, after which the rate jumps (BERT, DeBERTa); or at the first step, multiplied with the warm-up (ELECTRA)."""
    decay: float = Field(default=0.2, gt=0, le=1)
    """For "wsd": share of the steps with a falling rate."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Final rate as a share of the peak."""

    @model_validator(mode="after")
    def _check_fall(self) -> "ScheduleConfig":
        if self.fall != "after_warmup" and self.kind not in ("linear", "cosine"):
            raise ValueError(f"fall is {self.fall!r} with kind {self.kind!r}; allowed: 'after_warmup'")
        return self

    def factor(self, step: int, steps: int) -> float:
        """Return the share of the peak rate at a step, counted from 0; only the last step can have rate 0."""
        warmup = round(self.warmup * steps)
        rise = self.begin + (1 - self.begin) * min(1.0, (step + 1) / max(1, warmup))
        if step < warmup and self.fall != "throughout":
            return rise
        if self.kind == "constant":
            return 1.0
        if self.kind == "noam":
            return math.sqrt(max(1, warmup) / (step + 1))
        if self.kind == "wsd":
            begin = steps - round(self.decay * steps)
            gone = max(0.0, (step + 1 - begin) / max(1, steps - begin))
            return self.floor + (1 - self.floor) * (1 - math.sqrt(gone))
        begin = warmup if self.fall == "after_warmup" else 0
        gone = (step + 1 - begin) / max(1, steps - begin)
        fall = 0.5 * (1 + math.cos(math.pi * gone)) if self.kind == "cosine" else 1 - gone
        return rise * (self.floor + (1 - self.floor) * fall)


class BatchConfig(Record):
    """Tokens per optimiser step."""

    tokens: int = Field(default=32768, gt=0)
    """Tokens of one step, over all processes: a multiple of sequences.micro_tokens times the processes."""
    ramp_from: int | None = Field(default=None, gt=0)
    """Tokens of the first step; None for no ramp."""
    ramp: float = Field(default=0.6, ge=0, le=1)
    """Share of the steps in which the batch grows linearly to its full size."""

    @model_validator(mode="after")
    def _check_ramp(self) -> "BatchConfig":
        if self.ramp_from is not None and self.ramp and self.ramp_from > self.tokens:
            raise ValueError(f"ramp_from is {self.ramp_from}; allowed: up to tokens, {self.tokens}")
        return self

    def micro_batches(self, step: int, steps: int, micro_tokens: int, processes: int) -> int:
        """Return the number of micro-batches of one step on each process, at least one."""
        tokens = float(self.tokens)
        if self.ramp_from is not None and step < self.ramp * steps:
            tokens = self.ramp_from + (self.tokens - self.ramp_from) * step / (self.ramp * steps)
        return max(1, round(tokens / (micro_tokens * processes)))
