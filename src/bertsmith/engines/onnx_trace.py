"""Trace encoders to ONNX graphs, each kind of layer once.

Tracing takes about a second per layer, and most layers of a network are alike. So for each kind of layer a network with
this layer alone is traced, without weights, and the nodes of the layer are copied for every layer of the kind.
Sub-networks of any depth share these traces. The stacked graph has the operators of a trace of the whole network.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.onnx_session import GraphHead
from bertsmith.models.build import assemble
from bertsmith.models.config import LayerConfig, ModelConfig
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads import MaskDecoderConfig, TaskHeadConfig
from bertsmith.models.heads.pretraining import MaskDecoder
from bertsmith.models.model import Model

if TYPE_CHECKING:
    import onnx_ir as ir

OPSET = 20
"""The first opset with Gelu, widely supported."""
_TRACED = (2, 6)  # batch and length of the traced inputs; both are dynamic in the graph
_UNLIMITED = 2**20  # upper bound of dynamic axes without a limit
_LAYERS = "model.encoder.blocks."
_FIRST_LAYER = f"{_LAYERS}0."
_MAX_TEMPLATES = 64


def input_names(config: ModelConfig) -> tuple[str, ...]:
    """Names of the inputs of the graph, each (batch, length)."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    return names if config.encoder.embedding.types else names[:2]


def max_input_length(config: ModelConfig, head: GraphHead | None = None) -> int | None:
    """Maximum length of a sequence; None if positions are relative only."""
    embedding, universal = config.encoder.embedding, config.encoder.universal
    limits = [embedding.max_length] if embedding.positions != "none" or universal is not None else []
    limits += [layer.mixer.length_limit for layer in config.encoder.layers if layer.mixer.length_limit is not None]
    if head == "masked_tokens":
        limits += [head.max_length for head in config.heads if isinstance(head, MaskDecoderConfig)]
    return min(limits, default=None)


class RowsModel(nn.Module):
    """Wrap a model as a function of padded rows that returns the output of a head or the last hidden states."""

    def __init__(self, model: Model, head: GraphHead | None, *, has_hidden_states: bool = False) -> None:
        super().__init__()
        self.model, self.head = model, head
        self.has_hidden_states = has_hidden_states
        """Whether the input of every layer and the output of the last are returned, too."""
        mixers = [block.mixer for block in model.encoder._blocks()]
        has_products = any("products" in backends for mixer in mixers for backends in mixer.backends)
        self.backend = "products" if has_products else "auto"

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Shape: (batch, length) each -> (batch, outputs), or (batch, length, outputs) from token heads; hidden states
        (batch, length, width).
        """
        layout = SequenceLayout.rows(input_ids, attention_mask)
        inputs = EncoderInputs(input_ids, layout, token_type_ids, backend=self.backend)
        if self.head == "masked_tokens" and "mask_decoder" in self.model.heads:
            return (self._decoded_scores(inputs),)
        is_task = self.head not in (None, "masked_tokens")
        output = self.model.run(inputs, Want(task=is_task, all_hidden_states=self.has_hidden_states))
        result = output.outputs if is_task else output.last
        if self.head == "masked_tokens":
            result = self._token_scores(result)
        return result, *(output.hidden_states if self.has_hidden_states else ())

    def _token_scores(self, hidden: Tensor) -> Tensor:
        """Return the logits of the masked_tokens head at every position, so that no shape depends on the masks.

        Shape: (batch, length, width) -> (batch, length, vocabulary).
        """
        scores: Tensor = self.model.heads["masked_tokens"](hidden, self.model.token_table)
        return scores

    def _decoded_scores(self, inputs: EncoderInputs) -> Tensor:
        decoder = self.model.heads["mask_decoder"]
        assert isinstance(decoder, MaskDecoder)
        output = self.model.run(inputs, Want(last_block=False))
        entering = output.hidden_states[-1]
        return self._token_scores(self.model.encoder.final_norm(decoder.everywhere(entering, *output.blocks[-1])))


def trace_graph(model: Model, head: GraphHead | None) -> "ir.Model":
    """Return the graph of a model (in eval mode, float32, on the CPU) with this output head."""
    if has_separate_layers(model.config, head):
        return _stack_layers(model, head)
    return _optimised(_trace(RowsModel(model, head)))


def has_separate_layers(config: ModelConfig, head: GraphHead | None) -> bool:
    """Whether each layer reads only the output of the layer before it, and the head only that of the last one."""
    features = [one.features for one in config.heads if isinstance(one, TaskHeadConfig) and one.kind == head]
    reads_last = all((one.layers, one.skip) == (1, 0) for one in features)
    has_decoder = head == "masked_tokens" and any(one.kind == "mask_decoder" for one in config.heads)
    is_stack = config.encoder.other_walk is None and config.quantisation is None
    return is_stack and reads_last and not has_decoder


def _trace(rows: RowsModel) -> "ir.Model":
    """Return the graph of a model as it is traced, with the weights under their names in the module."""
    config = rows.model.config
    names, max_length = input_names(config), max_input_length(config, rows.head)
    batch = torch.export.Dim("batch", max=_UNLIMITED)
    length = torch.export.Dim("length", max=max_length or _UNLIMITED)
    tokens = torch.zeros(_TRACED[0], min(_TRACED[1], max_length or _UNLIMITED), dtype=torch.long)
    example = (tokens, torch.ones_like(tokens), torch.zeros_like(tokens))[: len(names)]
    with torch.no_grad(), quiet():
        program = torch.onnx.export(
            rows,
            example,
            dynamo=True,
            dynamic_shapes=tuple({0: batch, 1: length} for _ in names),
            input_names=names,
            output_names=["outputs"],
            opset_version=OPSET,
            optimize=False,  # would rename weights
            verbose=False,
        )
    assert program is not None
    return program.model


def _optimised(graph: "ir.Model") -> "ir.Model":
    """Fold constants and remove redundant nodes, in place."""
    from onnxscript import optimizer

    with quiet():
        return optimizer.optimize(graph)


def _stack_layers(model: Model, head: GraphHead | None) -> "ir.Model":
    """Return the graph of a model with separate layers, copied from the templates of its layers."""
    import onnx_ir as ir
    from onnx_ir.passes import common

    templates = [_template(_one_layer(model.config, layer, head), head) for layer in model.config.encoder.layers]
    first, last = templates[0], templates[-1]
    copies = _Copies(model, first)
    for template in {id(template): template for template in templates}.values():
        copies.add_shared(template)
    hidden = copies.values[first.layer_input]
    for index, template in enumerate(templates):
        copies.values[template.layer_input] = hidden
        copies.add(template.layer, index)
        hidden = copies.values[template.layer_output]
    copies.add(last.head)
    output = copies.values[last.output]
    output.name = "outputs"
    initializers = list(copies.initializers.values())
    imports = first.graph.opset_imports
    graph = ir.Graph(copies.inputs, [output], nodes=copies.nodes, initializers=initializers, opset_imports=imports)
    stacked = ir.Model(graph, ir_version=first.ir_version)
    common.CommonSubexpressionEliminationPass()(stacked)  # nodes before the layers, and those of shared weights
    return stacked


def _one_layer(config: ModelConfig, layer: LayerConfig, head: GraphHead | None) -> ModelConfig:
    """Return the config of a network with one of the layers; not validated, as the layer alone may be no model."""
    encoder = config.encoder.model_copy(update={"layers": (layer,), "sharing": "none"})
    heads = tuple(one for one in config.heads if one.kind in (head, "pooler"))
    return config.model_copy(update={"encoder": encoder, "heads": heads})


@dataclass(frozen=True, eq=False)
class _Template:
    """The traced graph of a network with one layer, divided at the input and the output of the layer."""

    graph: "ir.Graph"
    ir_version: int
    inputs: Sequence["ir.Value"]
    """Inputs of the model; the graph's other inputs are its weights."""
    shared: Sequence["ir.Node"]
    """Nodes that depend neither on the layer nor on its input: embedding, mask, positions."""
    layer: Sequence["ir.Node"]
    head: Sequence["ir.Node"]
    """Nodes that depend on the output of the layer."""

    @property
    def output(self) -> "ir.Value":
        return self.graph.outputs[0]

    @property
    def layer_input(self) -> "ir.Value":
        return self.graph.outputs[1]

    @property
    def layer_output(self) -> "ir.Value":
        return self.graph.outputs[2]


_TEMPLATES: dict[tuple[str, GraphHead | None], _Template] = {}
"""Templates by config and head; they hold no weights."""


def _template(config: ModelConfig, head: GraphHead | None) -> _Template:
    """Return the template of a network with one layer; trace it if it is new."""
    key = config.model_dump_json(), head
    if key not in _TEMPLATES:
        if len(_TEMPLATES) == _MAX_TEMPLATES:
            _TEMPLATES.clear()
        _TEMPLATES[key] = _trace_layer(config, head)
    return _TEMPLATES[key]


def _trace_layer(config: ModelConfig, head: GraphHead | None) -> _Template:
    """Trace a network with one layer, with its weights as inputs."""
    model = assemble(config).eval()
    traced = _trace(RowsModel(model, head, has_hidden_states=True))
    graph, inputs = traced.graph, list(traced.graph.inputs)
    for name in _weights(model):
        if name in graph.initializers:
            weight = graph.initializers.pop(name)
            weight.const_value = None
            graph.inputs.append(weight)
    _optimised(traced)
    of_layer = {value for value in graph.inputs if str(value.name).startswith(_FIRST_LAYER)}
    of_layer.add(graph.outputs[1])
    of_head = {graph.outputs[2]}
    parts: tuple[list[ir.Node], ...] = ([], [], [])
    shared, layer, ending = parts
    for node in graph:
        read = set(node.inputs)
        if read & of_head:
            ending.append(node)
            of_head.update(node.outputs)
        elif read & of_layer:
            layer.append(node)
            of_layer.update(value for value in node.outputs if value not in of_head)
        else:
            shared.append(node)
    return _Template(graph, traced.ir_version, inputs, shared, layer, ending)


def _weights(model: Model) -> dict[str, Tensor]:
    """Return parameters and buffers by their names in a graph; a weight that layers share has several names."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {f"model.{name}": tensor for name, tensor in tensors}


class _Copies:
    """Nodes copied from templates, with the weights of a model."""

    def __init__(self, model: Model, template: _Template) -> None:
        self.weights = _weights(model)
        self.inputs = [_value_like(value, value.name) for value in template.inputs]
        self.values: dict[ir.Value, ir.Value] = {}
        """The latest copy of each value of the templates."""
        self.nodes: list[ir.Node] = []
        self.initializers: dict[object, ir.Value] = {}
        """By weight or content of a constant, so that shared weights and equal constants are stored once."""

    def add_shared(self, template: _Template) -> None:
        """Copy the nodes before the layer, some of which are equal in all templates."""
        self.values |= dict(zip(template.inputs, self.inputs, strict=True))
        self.add(template.shared)

    def add(self, nodes: Sequence["ir.Node"], layer: int = 0) -> None:
        """Copy nodes; those of the template's layer get the weights of the model's layer number `layer`."""
        import onnx_ir as ir

        for node in nodes:
            inputs = [None if value is None else self._input(value, layer) for value in node.inputs]
            outputs = [_value_like(value) for value in node.outputs]
            self.nodes.append(ir.Node(node.domain, node.op_type, inputs, node.attributes, outputs=outputs))
            self.values |= dict(zip(node.outputs, outputs, strict=True))

    def _input(self, value: "ir.Value", layer: int) -> "ir.Value":
        if value in self.values:
            return self.values[value]
        import onnx_ir as ir

        name = str(value.name).replace(_FIRST_LAYER, f"{_LAYERS}{layer}.")
        weight = self.weights.get(name)
        if weight is not None:
            return self._initializer(weight, ir.Tensor(weight.detach().numpy(), name=name), name)
        constant = value.const_value
        assert constant is not None
        content = constant.dtype, tuple(constant.shape), constant.tobytes()
        return self._initializer(content, constant, f"constant_{len(self.initializers)}")

    def _initializer(self, key: object, tensor: "ir.TensorProtocol", name: str) -> "ir.Value":
        import onnx_ir as ir

        if key not in self.initializers:
            kind, shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
            self.initializers[key] = ir.Value(name=name, type=kind, shape=shape, const_value=tensor)
        return self.initializers[key]


def _value_like(value: "ir.Value", name: str | None = None) -> "ir.Value":
    import onnx_ir as ir

    return ir.Value(name=name, type=value.type, shape=None if value.shape is None else value.shape.copy())


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and log messages of the exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
