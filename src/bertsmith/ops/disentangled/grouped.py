"""Disentangled attention on a CPU for packed sequences: sequences of similar length are computed together.

Padded to the longest sequence of the batch, short texts would be mostly padding.
"""

from dataclasses import replace

import torch
from torch import Tensor

from bertsmith.data.layout import SequenceLayout, gather_rows, scatter_rows
from bertsmith.ops.disentangled import products, sdpa
from bertsmith.ops.disentangled.reference import DisentangledInputs


def unsupported(inputs: DisentangledInputs) -> str | None:
    if inputs.query.device.type != "cpu":
        return f"the tensors are on {inputs.query.device.type}, but this backend is for the CPU"
    if not inputs.layout.is_packed:
        return "the sequences are not packed"
    if inputs.query_positions is not None or inputs.key_layout is not inputs.layout:
        return "query_positions are set, or key_layout differs from the queries' layout"
    if torch.compiler.is_compiling():
        return "shapes depend on the lengths, which compiled code does not support"
    if inputs.dropout > 0.0:
        return "dropout is not 0, and its random numbers would differ from those of a padded batch"
    return None


def preferred(inputs: DisentangledInputs) -> bool:
    return len(inputs.layout.groups.sizes) > 1


def disentangled(inputs: DisentangledInputs) -> Tensor:
    """Return the attention output in the shape and dtype of the query."""
    groups = inputs.layout.groups
    counts = [sequences * length for sequences, length in groups.sizes]
    tensors = (inputs.query, inputs.key, inputs.value)
    # (tokens, heads, …) -> per group (sequences · length, heads, …)
    queries, keys, values = (scatter_rows(tensor, groups.positions, groups.rows).split(counts) for tensor in tensors)
    compute = sdpa.disentangled if inputs.sparse is None else products.disentangled
    mixed = []
    for group, size, is_token in zip(
        zip(queries, keys, values, strict=True), groups.sizes, groups.is_token, strict=True
    ):
        layout = SequenceLayout.full(*size) if is_token is None else SequenceLayout.padded(is_token)
        query, key, value = (tensor.unflatten(0, size) for tensor in group)
        group_inputs = replace(inputs, query=query, key=key, value=value, layout=layout, key_layout=layout)
        mixed.append(compute(group_inputs).flatten(0, 1))
    return gather_rows(torch.cat(mixed), groups.positions)
