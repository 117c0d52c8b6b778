"""Sharded weights (FSDP): each process keeps a shard of every tensor and gathers a layer while it computes it.

accelerate starts the processes and passes on the FSDP settings of its config; PyTorch's `fully_shard` does the work,
on GPUs and CPUs alike (reasons: docs/explanations/decisions.md). Every layer is one group, gathered and freed
together; embeddings, heads and weights that several layers share form the root group.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from bertsmith.checkpoint.files import copy_tensors, tensors_of
from bertsmith.errors import InputError
from bertsmith.layers.block import Block
from bertsmith.models.build import assemble
from bertsmith.models.model import Model

_SWITCH = "ACCELERATE_USE_FSDP"
# environment variable of accelerate's config -> (accelerate's default, the supported value)
_SUPPORTED = {
    "FSDP_VERSION": ("1", "2"),
    "FSDP_OFFLOAD_PARAMS": ("false", "false"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("false", "false"),
}


def is_requested() -> bool:
    """Return whether accelerate's config requests sharded weights; raise InputError for unsupported FSDP settings."""
    if os.environ.get(_SWITCH, "false").lower() != "true":
        return False
    for name, (default, allowed) in _SUPPORTED.items():
        given = os.environ.get(name, default).lower()
        if given != allowed:
            raise InputError(f"accelerate's config has {name.lower()}: {given}; allowed: {allowed}")
    return True


@contextmanager
def hidden_from_accelerate() -> Iterator[None]:
    """Hide the FSDP switch from accelerate, which would shard the model itself, and on GPUs only."""
    given = os.environ.pop(_SWITCH, None)
    try:
        yield
    finally:
        if given is not None:
            os.environ[_SWITCH] = given


def shard(root: nn.Module, device: torch.device, processes: int, *, half: bool) -> FSDPModule:
    """Shard the weights of the root, equal on all processes so far, over the processes; build optimisers afterwards.

    With `half`, weights are gathered in bfloat16; gradients are still reduced in float32.
    """
    mesh = init_device_mesh(device.type, (processes,))
    # autocast decides what inputs are cast: a cast here would reach random draws and ids, too
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    policy = policy if half else MixedPrecisionPolicy()
    frees = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false"
    for block in own_blocks(root):
        fully_shard(block, mesh=mesh, reshard_after_forward=frees, mp_policy=policy)
    return fully_shard(root, mesh=mesh, mp_policy=policy)


def own_blocks(root: nn.Module) -> list[Block]:
    """Return the layers that share no weight with another layer."""
    blocks = [module for module in root.modules() if isinstance(module, Block)]
    users = Counter(parameter for block in blocks for parameter in block.parameters())
    return [block for block in blocks if all(users[parameter] == 1 for parameter in block.parameters())]


def whole_model(model: Model, device: torch.device | str = "cpu") -> Model:
    """Gather a sharded model into a plain one on the main process; all processes must call this.

    The other processes, and a model that is not sharded, get the model back unchanged.
    """
    tensors = tensors_of(model)
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        return model
    is_main = torch.distributed.get_rank() == 0
    gathered = {}
    for name, tensor in tensors.items():  # one at a time: the whole may not fit on a GPU
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if is_main:
            gathered[name] = full.detach().cpu()
    if not is_main:
        return model
    whole = assemble(model.config)
    copy_tensors(gathered, whole, "the sharded model")
    whole.tokenizer = model.tokenizer
    return whole.train(model.training).to(device)
