"""AdamW with the right groups, and learning rate and batch over time."""

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
    """AdamW without the correction of its moments' bias, or with steady tensors, or both; fused where asked for.

    The moments m and v begin at 0, so after t steps they are too small by c₁ = 1 - β₁ᵗ and c₂ = 1 - β₂ᵗ. PyTorch moves
    a weight by λ (m/c₁) / (√(v/c₂) + ε) and shrinks it by λ d. Google's code for BERT and ELECTRA leaves c₁ and c₂ out;
    with λ' = λ c₁/√c₂, ε' = ε/√c₂ and d' = d √c₂/c₁ in the place of λ, ε and d PyTorch's formula gives the same.

    A steady tensor (Wortsman et al. 2023, StableAdamW) goes only 1/max(1, r) of its step, r = √mean(g² / max(v, ε²)):
    where the gradient g has outgrown what v knows of it, the step is as much too long.

    All weights of a group must get a gradient in every step, or never: the group counts the steps for all of them.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, bias_correction: bool = True, steady: bool = False, **settings: Any
    ) -> None:
        # in the groups, and not here, since those are what a checkpoint keeps
        super().__init__([{**group, "steps": 0} for group in groups], **settings)
        self.bias_correction, self.steady = bias_correction, steady

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Moves the weights once."""
        given = [{name: group[name] for name in ("lr", "eps", "weight_decay")} for group in self.param_groups]
        before = [
            [parameter.clone() for parameter in _moved(group)] if self.steady else [] for group in self.param_groups
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
                self._steady(group, parameters)

    def _steady(self, group: dict[str, Any], before: list[Tensor]) -> None:
        """Takes back what the steps of a group's tensors are too long by; `before` are the weights before the step."""
        moved = _moved(group)
        correction = _biases(group)[1] if self.bias_correction else 1.0
        gradients = [parameter.grad for parameter in moved if parameter.grad is not None]
        roots = list(torch._foreach_sqrt([self.state[parameter]["exp_avg_sq"] for parameter in moved]))
        torch._foreach_div_(roots, math.sqrt(correction))
        torch._foreach_clamp_min_(roots, group["eps"])
        ratios = torch._foreach_div(gradients, roots)
        sizes = torch._foreach_norm(ratios)  # r √numel, a number for each tensor
        sizes = torch._foreach_div(sizes, [math.sqrt(parameter.numel()) for parameter in moved])
        shares = torch._foreach_reciprocal(torch._foreach_clamp_min(sizes, 1.0))
        # the step times 1 - share is too much: exactly nothing where the share is 1
        excess = torch._foreach_sub(moved, before)
        torch._foreach_mul_(excess, [1 - share for share in shares])
        torch._foreach_sub_(moved, excess)


def _moved(group: dict[str, Any]) -> list[Tensor]:
    """The weights of a group that the next step moves."""
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def _biases(group: dict[str, Any]) -> tuple[float, float]:
    """What the two moments are too small by after a group's steps."""
    first, second = group["betas"]
    return 1 - first ** group["steps"], 1 - second ** group["steps"]


Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Record):
    """AdamW with decoupled weight decay."""

    kind: Literal["adamw", "stable_adamw"] = "adamw"
    """The second shortens the step of a tensor whose gradient jumps, which takes the place of clipping: clip = 0."""
    learning_rate: float = Field(default=5e-4, gt=0, le=10)
    """The highest rate the schedule reaches."""
    betas: tuple[Share, Share] = (0.9, 0.98)
    epsilon: float = Field(default=1e-6, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    """On matrices and embeddings; never on biases and norms."""
    bias_correction: bool = True
    """Whether the first steps make up for moments that begin at 0; Google's code for BERT and ELECTRA does not."""
    clip: float = Field(default=1.0, ge=0)
    """Largest norm of the gradient; 0 for no limit."""

    def build(self, portions: Sequence[Portion]) -> torch.optim.AdamW:
        """One AdamW over all portions: it treats every weight by itself, so each portion has an optimiser of its own.

        Each group of a portion is split in two, matrices and others; `rate` is what its learning rate is scaled by.
        """
        groups = []
        for given in (group for portion in portions for group in portion.groups):
            matrices = [parameter for parameter in given.parameters if parameter.dim() >= 2]
            others = [parameter for parameter in given.parameters if parameter.dim() < 2]
            for members, decay in ((matrices, self.weight_decay), (others, 0.0)):
                if members:
                    groups.append({"params": members, "weight_decay": decay, "rate": given.rate})
        parameters = [parameter for portion in portions for parameter in portion.parameters]
        # one kernel for all that a weight needs; on a CPU it does not know sharded tensors
        kinds = {parameter.device.type for parameter in parameters}
        is_sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        fused = kinds == {"cuda"} or (kinds == {"cpu"} and not is_sharded)
        settings: dict[str, Any] = {"lr": self.learning_rate, "betas": self.betas, "eps": self.epsilon, "fused": fused}
        is_steady = self.kind == "stable_adamw"
        if self.bias_correction and not is_steady:
            return torch.optim.AdamW(groups, **settings)
        return Adam(groups, bias_correction=self.bias_correction, steady=is_steady, **settings)

    def set_rate(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        """Sets the learning rate of the next step."""
        for group in optimizer.param_groups:
            group["lr"] = rate * group["rate"]


class ScheduleConfig(Record):
    """The learning rate as a share of its peak, from the first step to the last."""

    kind: Literal["linear", "cosine", "noam", "wsd", "constant"] = "linear"
    """After the warm-up: straight to the floor, half a cosine, 1/√step, or constant with a 1-√ decay at the end."""
    warmup: float = Field(default=0.06, ge=0, le=1)
    """Share of the steps in which the rate rises in a straight line."""
    begin: float = Field(default=0.0, ge=0, le=1)
    """What it rises from, as a share of the peak. Cramming's triangle is "linear" with warmup 0.75 and begin 0.25."""
    fall: Literal["after_warmup", "from_start", "throughout"] = "after_warmup"
    """For "linear" and "cosine": from the peak on; from the first step on, unseen in the warm-up, so that the rate
    jumps at its end (BERT, DeBERTa); or from the first step on, times the warm-up (ELECTRA)."""
    decay: float = Field(default=0.2, gt=0, le=1)
    """For "wsd": share of the steps in which the rate falls."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """What the rate falls to, as a share of the peak."""

    @model_validator(mode="after")
    def _check_fall(self) -> "ScheduleConfig":
        if self.fall != "after_warmup" and self.kind not in ("linear", "cosine"):
            raise ValueError(f"fall is {self.fall!r} with kind {self.kind!r}; allowed: 'after_warmup'")
        return self

    def factor(self, step: int, steps: int) -> float:
        """The share of the peak rate in step `step` of `steps`, counted from 0; no step has the rate 0 but the last."""
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
    """How many tokens an optimiser step sees."""

    tokens: int = Field(default=32768, gt=0)
    """Tokens of one step, over all processes: a multiple of sequences.micro_tokens times the processes."""
    ramp_from: int | None = Field(default=None, gt=0)
    """Tokens of the first step; None for no ramp."""
    ramp: float = Field(default=0.6, ge=0, le=1)
    """Share of the steps in which the batch grows in a straight line to its full size."""

    @model_validator(mode="after")
    def _check_ramp(self) -> "BatchConfig":
        if self.ramp_from is not None and self.ramp and self.ramp_from > self.tokens:
            raise ValueError(f"ramp_from is {self.ramp_from}; allowed: up to tokens, {self.tokens}")
        return self

    def micro_batches(self, step: int, steps: int, micro_tokens: int, processes: int) -> int:
        """The micro-batches of one step on each process: whole ones, at least one."""
        tokens = float(self.tokens)
        if self.ramp_from is not None and step < self.ramp * steps:
            tokens = self.ramp_from + (self.tokens - self.ramp_from) * step / (self.ramp * steps)
        return max(1, round(tokens / (micro_tokens * processes)))
