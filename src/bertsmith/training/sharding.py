"""Weights spread over the processes: each keeps a share of every tensor, and gathers a layer's while it computes it.

accelerate starts the processes and hands on what its config says of FSDP; the work is done by PyTorch's `fully_shard`,
the same way on GPUs and CPUs (reasons: docs/explanations/decisions.md). Every layer is one group, gathered and freed
together; embeddings, heads and whatever several layers share are the group of the root.
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
# what accelerate's config may say, by the name of the variable it comes in; the first value is accelerate's own default
_ALLOWED = {
    "FSDP_VERSION": ("1", "2"),
    "FSDP_OFFLOAD_PARAMS": ("false", "false"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("false", "false"),
}


def is_asked_for() -> bool:
    """Whether accelerate's config asks for sharded weights; a sentence where it asks for what we do not do."""
    if os.environ.get(_SWITCH, "false").lower() != "true":
        return False
    for name, (default, allowed) in _ALLOWED.items():
        given = os.environ.get(name, default).lower()
        if given != allowed:
            raise InputError(f"accelerate's config says {name.lower()}: {given}; allowed: {allowed}")
    return True


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, accelerate does not see that sharding is asked for: it would do it itself, and on GPUs only."""
    given = os.environ.pop(_SWITCH, None)
    try:
        yield
    finally:
        if given is not None:
            os.environ[_SWITCH] = given


def shard(root: nn.Module, device: torch.device, processes: int, *, half: bool) -> FSDPModule:
    """The root with its weights spread over all processes, which must hold the same ones; optimisers are made after.

    With `half`, weights are gathered in bfloat16, and gradients still added up in float32.
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
    """The layers that share no weight with another one."""
    blocks = [module for module in root.modules() if isinstance(module, Block)]
    users = Counter(parameter for block in blocks for parameter in block.parameters())
    return [block for block in blocks if all(users[parameter] == 1 for parameter in block.parameters())]


def whole_model(model: Model, device: torch.device | str = "cpu") -> Model:
    """A plain model with the weights that the processes hold together; all must take part, the main one gets it.

    A model that is not sharded comes back itself, as it does on the other processes.
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
