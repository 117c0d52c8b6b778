"""A model as one ONNX graph with a free batch and a free length, in operations that every ONNX program knows."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn

from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.onnx_session import GraphHead, GraphNotes
from bertsmith.errors import InputError, nearest
from bertsmith.models.config import ModelConfig
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads import MaskDecoderConfig, TaskHeadConfig
from bertsmith.models.heads.pretraining import MaskDecoder
from bertsmith.models.model import Model

OPSET = 20
"""The version of the operations: the first with Gelu, and one that all programs of the last years read."""
LARGEST = 2 * 1024**3 - 64 * 1024**2
"""Bytes of weights: a file is one protobuf message, of which 2 GiB is the most; the rest is room for the graph."""
_TRACED = (2, 6)  # sequences and tokens of the inputs it is traced with; neither stays in the graph
_ANY = 2**20  # the most sequences, and tokens where a model has no limit: tracing wants a number


AskedHead = Literal["auto", "masked_tokens"]
"""What a graph should end with: the task's head or, where there is none, the last states; or the scores of tokens."""


class RowsModel(nn.Module):
    """The model as a function of padded rows: what a head says, or without one the last states."""

    def __init__(self, model: Model, head: GraphHead | None) -> None:
        super().__init__()
        self.model, self.head = model, head
        mixers = [block.mixer for block in model.encoder._blocks()]
        has_products = any("products" in forms for mixer in mixers for forms in mixer.forms)
        self.backend = "products" if has_products else "auto"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Shape: (batch, length) each -> (batch, outputs), or (batch, length, outputs) where tokens are spoken of."""
        if self.head is None:
            return self.model(input_ids, attention_mask, token_type_ids, backend=self.backend)
        layout = SequenceLayout.rows(input_ids, attention_mask)
        if self.head == "masked_tokens":
            return _token_scores(self.model, input_ids, layout, token_type_ids, self.backend)
        return self.model.outputs(input_ids, layout, token_type_ids, backend=self.backend)


def _token_scores(model: Model, tokens: Tensor, layout: SequenceLayout, types: Tensor | None, backend: str) -> Tensor:
    """What the masked_tokens head says at every place, so that no shape depends on where masks stand.

    Shape: tokens and types (batch, length) -> (batch, length, vocabulary).
    """
    inputs = EncoderInputs(tokens, layout, types, backend=backend)
    if "mask_decoder" in model.heads:
        decoder = model.heads["mask_decoder"]
        assert isinstance(decoder, MaskDecoder)
        output = model.run(inputs, Want(last_block=False))
        hidden = model.encoder.final_norm(decoder.everywhere(output.hidden_states[-1], *output.blocks[-1]))
    else:
        hidden = model.run(inputs).last
    scores: Tensor = model.heads["masked_tokens"](hidden, model.token_table)
    return scores


def has_task_head(config: ModelConfig) -> bool:
    """Whether a model was fine-tuned for a task."""
    return graph_head(config) is not None


def graph_head(config: ModelConfig, asked: AskedHead = "auto") -> GraphHead | None:
    """What the graph of a model ends with: the head asked for, or its task's; None for the last states."""
    if asked not in get_args(AskedHead):
        raise InputError(f"head is {asked!r}; {nearest(asked, get_args(AskedHead))}")
    if asked == "masked_tokens":
        kinds = [head.kind for head in config.heads]
        if "masked_tokens" not in kinds:
            have = ", ".join(kinds) or "none"
            raise InputError(f"head is 'masked_tokens', which this model has not (its heads: {have}); allowed: auto")
        return asked
    found = next((head.kind for head in config.heads if isinstance(head, TaskHeadConfig)), None)
    return cast(GraphHead | None, found)


def input_names(config: ModelConfig) -> tuple[str, ...]:
    """What the graph of a model reads, each (batch, length)."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    return names if config.encoder.embedding.types else names[:2]


def longest_input(config: ModelConfig, head: GraphHead | None = None) -> int | None:
    """The most tokens a sequence may have; None where places are only relative and any length goes."""
    embedding, universal = config.encoder.embedding, config.encoder.universal
    limits = [embedding.longest] if embedding.positions != "none" or universal is not None else []
    if head == "masked_tokens":
        limits += [own.longest for own in config.heads if isinstance(own, MaskDecoderConfig)]
    return min(limits, default=None)


def graph_notes(config: ModelConfig, head: GraphHead | None) -> GraphNotes:
    """All that a run-time must know of the graph of a model that ends with a head."""
    embedding, longest = config.encoder.embedding, longest_input(config, head)
    cut = embedding.longest if longest is None else min(embedding.longest, longest)
    return GraphNotes(input_names(config), head, config.encoder.vocabulary, longest, cut, embedding.types)


def check_graph(model: Model) -> None:
    """Raises a sentence if a model cannot be one ONNX graph."""
    if model.config.decoder is not None:
        raise InputError("this model has a decoder, whose steps are no single graph; allowed for ONNX: encoders")
    for head in model.config.heads:
        if isinstance(head, TaskHeadConfig) and head.recurrent is not None:
            raise InputError(
                "this model's head has a BiLSTM (head.recurrent), which is not written as ONNX; allowed: heads without"
            )
    size = sum(parameter.numel() for parameter in model.parameters()) * 4
    if size > LARGEST:
        raise InputError(f"this model has {size / 1024**3:.1f} GiB of weights; allowed in one ONNX file: up to 2 GiB")


def write_graph(model: Model, path: Path, head: GraphHead | None) -> None:
    """Writes a model that is in eval mode, in float32 and on the CPU as an ONNX file that ends with a head."""
    check_graph(model)
    with TemporaryDirectory(dir=path.parent, prefix=".graph-") as folder:
        traced = Path(folder) / "traced.onnx"
        _trace(RowsModel(model, head), model.config, traced)
        _simplify(traced, path)


def _trace(rows: RowsModel, config: ModelConfig, path: Path) -> None:
    names, longest = input_names(config), longest_input(config, rows.head)
    batch = torch.export.Dim("batch", max=_ANY)
    length = torch.export.Dim("length", max=longest or _ANY)
    tokens = torch.zeros(_TRACED[0], min(_TRACED[1], longest or _ANY), dtype=torch.long)
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
            verbose=False,
        )
        assert program is not None
        program.save(path, external_data=False)


def _simplify(traced: Path, path: Path) -> None:
    """Writes the graph with all that follows from weights alone computed, and nothing of where it was made.

    What several layers share is then one constant again, and every product with weights is one that can be quantised.
    """
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC  # standard operations only
    options.optimized_model_filepath = str(traced.with_name("simple.onnx"))
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(traced), options, providers=["CPUExecutionProvider"])
    found = onnx.load(options.optimized_model_filepath)
    used = {node.domain for node in found.graph.node}
    kept = [opset for opset in found.opset_import if opset.domain in used]
    del found.opset_import[:]
    found.opset_import.extend(kept)
    # without shapes in between ONNX Runtime leaves sums and norms apart, and its kernel for both at once is slower on a
    # CPU (1.31: 5 % of a BERT, more in 8 bits); and those of weights turned round for 8 bits would be wrong
    del found.graph.value_info[:]
    for part in (*found.graph.node, *found.graph.initializer, found.graph):
        part.doc_string = ""
        del part.metadata_props[:]
    found.graph.name = "bertsmith"
    del found.metadata_props[:]
    onnx.save(found, str(path))


@contextmanager
def quiet() -> Iterator[None]:
    """Without the exporters' remarks inside, which are about their own insides."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
