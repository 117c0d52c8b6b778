"""Deterministic mode: settings of the process, their restoration, and errors."""

import pytest
import torch

from bertsmith.errors import InputError
from bertsmith.ops.cumulative_sum import cumulative_sum
from bertsmith.training import determinism
from bertsmith.training.determinism import enter_deterministic_mode, explains_nondeterminism


@pytest.fixture(autouse=True)
def _default_mode(_deterministic: None) -> None:
    """Undo the deterministic mode in which tests run."""
    torch.use_deterministic_algorithms(False)


def test_mode_is_entered_and_left() -> None:
    from torch._inductor import config as inductor

    leave = enter_deterministic_mode(torch.device("cpu"))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert inductor.deterministic
    leave()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert not inductor.deterministic


def test_other_workspace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(determinism.WORKSPACE, ":0:0")
    with pytest.raises(InputError, match=r"CUBLAS_WORKSPACE_CONFIG is ':0:0'; allowed: ':4096:8', ':16:8'"):
        enter_deterministic_mode(torch.device("cuda"))
    assert not torch.are_deterministic_algorithms_enabled()


def test_operation_without_deterministic_implementation_is_named() -> None:
    @explains_nondeterminism
    def step(message: str) -> None:
        raise RuntimeError(message)

    with pytest.raises(InputError, match="but kthvalue_CUDA has no deterministic implementation on this device"):
        step("kthvalue_CUDA does not have a deterministic implementation, but you set 'torch.use_deterministic…'")
    with pytest.raises(RuntimeError, match="out of memory"):
        step("out of memory")


def test_cumulative_sum_equals_cumsum() -> None:
    torch.use_deterministic_algorithms(True)
    values = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.equal(cumulative_sum(values, 1), values.cumsum(1))
    assert torch.autograd.gradcheck(lambda x: cumulative_sum(x, 0), values)
