"""A model folder opened for serving: runner, task, tokenizer, and the sizes it can be served in."""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch

from bertsmith.bundled import bundled_hint, model_folder
from bertsmith.bundled.hub import hub_folder
from bertsmith.data.inference import InferencePrecision, inference_autocast, is_half
from bertsmith.engines.artefact import ARTEFACT_FILE, open_runner, read_artefact
from bertsmith.engines.base import Artefact, Precision, Runner
from bertsmith.engines.int8 import ACTIVATIONS
from bertsmith.engines.onnx_graph import has_task_head
from bertsmith.engines.onnx_trace import max_input_length
from bertsmith.engines.torch_engine import with_bfloat16_products
from bertsmith.errors import InputError
from bertsmith.files import read_json
from bertsmith.layers.subnet import Subnet
from bertsmith.models.build import extract
from bertsmith.models.config import ModelConfig
from bertsmith.models.cost import parameters
from bertsmith.models.heads import MaskDecoderConfig
from bertsmith.models.model import Model
from bertsmith.serving.requests import Operation, TokenSequence
from bertsmith.serving.settings import default_threads
from bertsmith.serving.size_schedule import SizeSchedule
from bertsmith.serving.worker import Rows, run_batch
from bertsmith.shrinking.elastic_metadata import ELASTIC_FILE, ElasticMetadata, read_elastic_metadata
from bertsmith.shrinking.fit.table import layer_shapes, stack_config
from bertsmith.tasks import AnyTask
from bertsmith.tasks.base import Encoding
from bertsmith.tasks.predictor import TASK_FILE, has_task_record, read_task_record
from bertsmith.text.tokenizer import Tokenizer

_WARM_UP_LENGTHS = (8, 33)  # tokens
_ROWS: dict[str, Rows] = {"torch": "packed", "compiled": "fixed", "onnxruntime": "padded"}


@dataclass(frozen=True)
class ServedModel:
    """A model with everything needed to run requests; create it with `open`."""

    name: str
    runner: Runner
    tokenizer: Tokenizer
    encoding: Encoding
    operations: frozenset[Operation]
    schedule: SizeSchedule = field(default_factory=SizeSchedule)
    """The sizes that the scheduler may choose; a single one for a model that is not elastic."""
    task: AnyTask | None = None
    """The task of a fine-tuned model."""
    elastic: ElasticMetadata | None = None
    """Scores and latencies of the sub-networks of an elastic model."""
    rows: Rows = "packed"
    """Layout of batches."""
    threads: int = 1
    """Threads per matrix product."""
    networks: dict[Subnet | None, Model] = field(default_factory=dict)
    """Models of their own for sizes of the schedule: extracted ones, and for bfloat16 the whole one as well."""
    precision: Precision = "float32"
    is_half: bool = False
    """Whether matrix products of float32 inputs are in bfloat16; False for an artefact, whatever its precision."""

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        name: str | None = None,
        device: str = "auto",
        threads: int | None = None,
        floor: float | None = None,
        precision: InferencePrecision = "auto",
    ) -> "ServedModel":
        """Open and warm up the model in a folder; raise InputError if it cannot be served.

        `threads` is the number of threads per matrix product. `precision` "auto" is bfloat16 on a GPU, float32 on a
        CPU, and an artefact's own. `floor` is the share of the whole model's score that a
        smaller size must keep; without it an elastic model is always served whole.
        """
        # the cache of the hub names folders by commit
        own_name = None if hub_folder(folder) is None else Path(folder).name
        folder = model_folder(folder)
        _check_folder(folder)
        threads = default_threads() if threads is None else threads
        if threads < 1:
            raise InputError(f"threads is {threads}; allowed: 1 or more")
        runner = open_runner(folder, device=device, threads=threads)
        torch.set_num_threads(threads)
        artefact = read_artefact(folder)
        half = _is_half(folder, artefact, runner, precision)
        model = runner.torch_model
        if runner.tokenizer is None:
            raise InputError(f"{str(folder)!r} has no tokenizer.json, so its model cannot read texts")
        has_task = has_task_record(folder) and has_task_head(runner.config)
        task_record = read_task_record(folder) if has_task else None
        operations = _operations(runner, has_task=has_task)
        if not operations:
            raise InputError(f"{str(folder)!r} has a task head but no {TASK_FILE}; copy it from the model's folder")
        elastic = read_elastic_metadata(folder) if model is not None and (folder / ELASTIC_FILE).is_file() else None
        schedule = SizeSchedule.of(elastic, floor)
        length = runner.config.text_length if task_record is None else task_record.sequences.length
        served = cls(
            name=name or own_name or folder.resolve().name,
            runner=runner,
            tokenizer=runner.tokenizer,
            encoding=Encoding.of(runner, length),
            operations=operations,
            schedule=schedule,
            task=None if task_record is None else task_record.task,
            elastic=elastic,
            rows=_ROWS[artefact.engine],
            threads=threads,
            networks={} if model is None else _networks(model, schedule, is_half=half and not runner.has_early_exits),
            precision="bfloat16" if half else artefact.precision,
            is_half=half,
        )
        served.warm_up()
        return served

    @property
    def model(self) -> Model | None:
        """The PyTorch model; None for an ONNX graph."""
        return self.runner.torch_model

    def is_elastic(self, operation: Operation) -> bool:
        """Whether the scores of elastic.json, which were measured with the task head, apply to an operation."""
        return operation == "task" or (operation == "vectors" and self.has_embedder)

    def has_subnets(self, operation: Operation) -> bool:
        """Whether a request for an operation may choose a sub-network; a generator that fills masks has one size."""
        is_generator = operation == "fill_mask" and self._mask_config is not self.runner.config
        return self.can_be_cut and not is_generator

    @property
    def can_be_cut(self) -> bool:
        """Whether sub-networks can be run: int8 weights, an exported graph and compiled lengths have one size."""
        return self.runner.has_subnets and self.rows != "fixed" and self.precision not in ACTIVATIONS

    @property
    def has_embedder(self) -> bool:
        """Whether vectors come from a trained head; otherwise they are means of hidden states."""
        return any(head.kind == "embedder" for head in self.runner.config.heads)

    @cached_property
    def vector_width(self) -> int:
        """Number of dimensions of a vector."""
        (vector,) = self.run("vectors", [TokenSequence(np.array([self.tokenizer.start]))])
        return len(vector)

    def max_length(self, operation: Operation) -> int:
        """Return the maximum length of a sequence; for a model without a limit, the length it was trained with."""
        embedding = self.runner.config.encoder.embedding
        limits = [max_input_length(self.runner.config) or max(embedding.max_length, self.encoding.length)]
        if operation == "fill_mask":
            limits += [head.max_length for head in self._mask_config.heads if isinstance(head, MaskDecoderConfig)]
        return min(limits)

    @property
    def _mask_config(self) -> ModelConfig:
        """The config of the network that fills masks: the model or its generator."""
        config = self.runner.config
        has_head = any(head.kind == "masked_tokens" for head in config.heads)
        return config if has_head or config.generator is None else config.generator.model

    def check(self, operation: Operation, sequence: TokenSequence, subnet: Subnet | None = None) -> None:
        """Raise InputError if a sequence is invalid: it would make the whole batch fail, other requests included."""
        if operation not in self.operations:
            raise InputError(f"operation is {operation!r}; {self.name!r} supports {', '.join(sorted(self.operations))}")
        tokens, types, positions = sequence.tokens, sequence.types, sequence.mask_positions
        encoder = self.runner.config.encoder
        max_length = self.max_length(operation)
        if tokens.ndim != 1 or not 1 <= len(tokens) <= max_length:
            raise InputError(f"a sequence has the shape {tokens.shape}; {self.name!r} takes 1 to {max_length} tokens")
        if int(tokens.min()) < 0 or int(tokens.max()) >= encoder.vocabulary:
            raise InputError(f"a sequence has a token id outside of 0 to {encoder.vocabulary - 1}")
        type_count = max(1, encoder.embedding.types)
        if types is not None and (
            types.shape != tokens.shape or int(types.min()) < 0 or int(types.max()) >= type_count
        ):
            raise InputError(f"types must have one entry per token, each from 0 to {type_count - 1}")
        if operation == "fill_mask":
            if not set(positions.tolist()) <= set(range(len(tokens))):
                raise InputError(f"mask_positions must be from 0 to {len(tokens) - 1}")
            if not 0 < len(np.unique(positions)) == len(positions):
                raise InputError("mask_positions must have at least one entry and no duplicates")
        if subnet is not None:
            if self.model is None or not self.has_subnets(operation):
                raise InputError(f"subnet must be None: {self.name!r} has one size for {operation}")
            subnet.cuts(self.model.encoder.units)

    def run(
        self, operation: Operation, sequences: list[TokenSequence], subnet: Subnet | None = None
    ) -> list[np.ndarray]:
        """Return the outputs of sequences that are computed together (shapes: serving/requests.py)."""
        network = None if operation == "fill_mask" else self.networks.get(subnet)
        with inference_autocast(self.runner.device, "bfloat16" if self.is_half else "float32"):
            if network is not None:
                return run_batch(network, operation, sequences, rows=self.rows, pad=self.tokenizer.pad)
            return run_batch(self.runner, operation, sequences, rows=self.rows, pad=self.tokenizer.pad, subnet=subnet)

    def warm_up(self) -> None:
        """Run every operation once at every size, so that the first request is as fast as later ones."""
        for operation in sorted(self.operations):
            lengths = [min(length, self.max_length(operation)) for length in _WARM_UP_LENGTHS]
            tokens = [np.full(length, self.tokenizer.start, dtype=np.int64) for length in lengths]
            sequences = [TokenSequence(row, None, np.zeros(1, dtype=np.int64)) for row in tokens]
            for size in self.schedule.sizes:
                self.run(operation, sequences, size.subnet)

    def choose_subnet(self, operation: Operation, width: float, depth: float) -> Subnet | None:
        """Return the sub-network of a width and a depth; None if the model has one size for the operation.

        The whole model is `Subnet()`, because None would let the scheduler choose a size.
        """
        is_whole = width == 1 and depth == 1
        if not self.has_subnets(operation):
            if not is_whole:
                raise InputError(
                    f"width is {width:g} and depth is {depth:g}; {self.name!r} has one size for {operation}: 1 × 1"
                )
            return None
        if self.elastic is None:
            return Subnet(width=width, depth=depth)
        grid = self.elastic.grid
        if not is_whole and not any((entry.width, entry.depth) == (width, depth) for entry in grid):
            trained = ", ".join(f"{entry.width:g} × {entry.depth:g}" for entry in grid)
            raise InputError(f"width × depth is {width:g} × {depth:g}; {self.name!r} was trained for {trained}")
        return Subnet(width=width, depth=depth, depth_rule=self.elastic.depth_rule)

    def parameters(self, subnet: Subnet | None = None) -> int:
        """Return the number of parameters of the model, or of a sub-network without the generator."""
        model = self.model if self.can_be_cut else None
        return parameters(self.runner.config) if model is None else _subnet_parameters(model, subnet or Subnet())


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"model folder {str(folder)!r} does not exist{bundled_hint(folder)}")
    if not (folder / "config.json").is_file():
        raise InputError(f"{str(folder)!r} has no config.json, so it is not a model folder")
    config = read_json(folder / "config.json").get("model")
    if isinstance(config, dict) and config.get("decoder") is not None:
        raise InputError(f"{str(folder)!r} holds a model with a decoder; only encoders can be served")


def _is_half(folder: Path, artefact: Artefact, runner: Runner, precision: InferencePrecision) -> bool:
    """Whether to run matrix products in bfloat16; raise InputError for a precision that an artefact does not have."""
    half = is_half(runner.device, precision)
    if not (folder / ARTEFACT_FILE).is_file():
        return half
    if precision not in ("auto", artefact.precision):
        raise InputError(
            f"precision is {precision!r}, but {str(folder)!r} was exported in {artefact.precision}; allowed: auto, or "
            "the folder it was exported from"
        )
    return False


def _operations(runner: Runner, *, has_task: bool) -> frozenset[Operation]:
    operations: set[Operation] = {"task"} if has_task else set()
    operations |= {"vectors"} if runner.can_embed else set()
    operations |= {"fill_mask"} if runner.can_fill_masks else set()
    return frozenset(operations)


@lru_cache(maxsize=256)
def _subnet_parameters(model: Model, subnet: Subnet) -> int:
    units = model.encoder.units
    return parameters(stack_config(model.config, layer_shapes(range(len(units)), units, subnet)))


def _networks(model: Model, schedule: SizeSchedule, *, is_half: bool) -> dict[Subnet | None, Model]:
    """Extract the smaller sizes as separate models, which are faster than cutting the whole one in every forward pass.

    They share the embedding, the heads, and all layers with the same cut. With `is_half` the whole model is a copy for
    bfloat16, from which the smaller ones are extracted.
    """
    networks: dict[Subnet | None, Model] = {}
    if is_half:
        model = with_bfloat16_products(model).eval()
        networks[None] = model
    units, whole = model.encoder.units, model.encoder
    blocks = {(index, cut): whole.blocks[index] for index, cut in enumerate(units)}
    for size in schedule.sizes:
        if size.subnet is None:
            continue
        small = extract(model, size.subnet)
        small.encoder.embedding, small.encoder.final_norm = whole.embedding, whole.final_norm
        small.encoder.relative = whole.relative
        for index, cut in enumerate(size.subnet.cuts(units)):
            small.encoder.blocks[index] = blocks.setdefault(cut, small.encoder.blocks[index])
        for kind in small.heads:
            small.heads[kind] = model.heads[kind]
        networks[size.subnet] = small.eval()
    return networks
