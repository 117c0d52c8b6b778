"""AdamW in the two forms that PyTorch's own does not have."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


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
