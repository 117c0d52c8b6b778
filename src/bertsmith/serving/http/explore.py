"""The /explore endpoint of the page: one input at one size, with latency and attention maps."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from fastapi import APIRouter
from pydantic import BaseModel, Field

from bertsmith import __version__
from bertsmith.answers.embedding import unit
from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.report.attention import Explorer
from bertsmith.report.maps import sequence_maps
from bertsmith.serving.http.errors import invalid
from bertsmith.serving.http.inputs import check_count, mask_sequences, task_inputs, text_sequences
from bertsmith.serving.http.openapi import INFO_RESPONSES, TEXT_RESPONSES
from bertsmith.serving.http.service import CurrentRequest, HttpRequest, StrictRoute
from bertsmith.serving.http.wire import (
    ExploreRequest,
    PageColumn,
    PageModel,
    PageModels,
    PageSizes,
    PageTask,
    RecordedSize,
    TaskInput,
)
from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import Operation, QueueFull, TokenSequence
from bertsmith.serving.scheduler import Scheduler
from bertsmith.serving.settings import Limits
from bertsmith.tasks import AnyTask
from bertsmith.tasks.tagging import Tagging
from bertsmith.text.tokenizer import Tokenizer

MAX_COMPARED_TEXTS = 24
MAX_MAP_TOKENS = 64  # the maps of 144 heads on 64 tokens take about 800 kB
_MASK_CANDIDATES = 8
_MAX_WAITING_MAPS = 8
_OPERATIONS: tuple[Operation, ...] = ("task", "fill_mask", "vectors")
ExploredAnswer = dict[str, Any]
"""The answer of a task, similarities of texts, or candidates for masks, in the form that the page reads."""


class ExploredMaps(BaseModel):
    """Data and markup of the attention explorer."""

    data: dict[str, Any]
    markup: str


class Explored(BaseModel):
    """The answer, the size of the network, and its latency."""

    model: str
    width: float
    depth: float
    parameters: int
    seconds: Annotated[float, Field(description="Latency of the network on this input alone.")]
    queued_seconds: float
    tokens: int
    sequences: int
    cut: Annotated[bool, Field(description="Whether the input was truncated.")]
    answer: ExploredAnswer
    maps: ExploredMaps | None = None
    maps_refused: Annotated[str | None, Field(description="Why there are no maps although they were requested.")] = None


@dataclass(frozen=True)
class _Prepared:
    """The sequences of an input, whether it was truncated, and how to read the outputs."""

    sequences: list[TokenSequence]
    is_truncated: bool
    read: Callable[[list[np.ndarray]], ExploredAnswer]


class MapDrawer:
    """Draws maps in one thread, so that they never keep more than one core busy."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "bertsmith-maps")
        self.waiting = 0

    async def draw(self, served: ServedModel, sequence: TokenSequence, subnet: Subnet | None) -> ExploredMaps:
        if self.waiting >= _MAX_WAITING_MAPS:
            raise QueueFull(1.0)
        self.waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, draw_maps, served, sequence, subnet)
        finally:
            self.waiting -= 1


def make_router(schedulers: Mapping[str, Scheduler]) -> APIRouter:
    """Return the endpoints for these models."""
    router = APIRouter(route_class=StrictRoute, tags=["page"])
    drawer = MapDrawer()
    models = PageModels(version=__version__, models=[describe_model(one.served) for one in schedulers.values()])

    @router.get(
        "/explore",
        summary="The models with their tasks and sizes, for the page",
        responses=INFO_RESPONSES,
        response_model_exclude_unset=True,
    )
    async def describe() -> PageModels:
        """Return tasks, operations and sizes of all models."""
        return models

    @router.post("/explore", summary="One input at one size, with latency and maps", responses=TEXT_RESPONSES)
    async def explore(body: ExploreRequest, request: CurrentRequest) -> Explored:
        """Run one input at a width and a depth, alone and not in a batch with other requests."""
        return await explore_input(body, request, drawer)

    return router


async def explore_input(body: ExploreRequest, request: HttpRequest, drawer: MapDrawer) -> Explored:
    """Run one input at the requested size."""
    served = request.select_model(body.model, body.work)
    subnet = served.choose_subnet(body.work, body.width, body.depth)
    limits = request.settings.limits
    prepared = await request.run(lambda: _prepare(served, body, limits))
    sequences = prepared.sequences
    result = await request.submit(body.work, sequences, subnet)
    used = result.subnet
    refusal = why_no_maps(served, sequences, body.sequence) if body.maps else None
    return Explored(
        model=served.name,
        width=1.0 if used is None else used.width,
        depth=1.0 if used is None else used.depth,
        parameters=served.parameters(used),
        seconds=result.computed_seconds,
        queued_seconds=result.queued_seconds,
        tokens=sum(len(one.tokens) for one in sequences),
        sequences=len(sequences),
        cut=prepared.is_truncated,
        answer=await request.run(lambda: prepared.read(result.outputs)),
        maps=await drawer.draw(served, sequences[body.sequence], used) if body.maps and refusal is None else None,
        maps_refused=refusal,
    )


def _prepare(served: ServedModel, body: ExploreRequest, limits: Limits) -> _Prepared:
    """Tokenise an input; texts that are too long are truncated."""
    if body.work == "task":
        return _prepare_task(served, body.inputs, limits)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not isinstance(texts, list):
        raise invalid(f"inputs has columns; for {body.work!r} it must be a text or a list of texts")
    check_count(texts, limits)
    max_texts = MAX_COMPARED_TEXTS if body.work == "vectors" else 1
    if len(texts) > max_texts:
        raise invalid(f"inputs has {len(texts)} texts; at most {max_texts} are accepted here")
    if body.work == "vectors":
        sequences = text_sequences(served, texts, truncate=True, limits=limits)
        return _Prepared(sequences, _is_truncated(served, sequences), similarities)
    sequences = mask_sequences(served, texts, truncate=True, limits=limits)
    return _Prepared(
        sequences,
        _is_truncated(served, sequences),
        lambda outputs: {"masks": [mask_candidates(served.tokenizer, one) for one in outputs[0]]},
    )


def _is_truncated(served: ServedModel, sequences: list[TokenSequence]) -> bool:
    return any(len(one.tokens) == served.encoding.length for one in sequences)


def _prepare_task(served: ServedModel, inputs: TaskInput, limits: Limits) -> _Prepared:
    values = list(inputs.values()) if isinstance(inputs, dict) else [inputs]
    for texts in ([value] if isinstance(value, str) else value for value in values):
        check_count(texts, limits)
        if not all(text.strip() for text in texts):
            raise InputError("one of the inputs is empty; each needs some words")
    read = task_inputs(served, [inputs], truncate=True, limits=limits)

    def answer(outputs: list[np.ndarray]) -> ExploredAnswer:
        items = read.item_outputs(outputs, served.runner)
        first = dict(read.answers(items)[0])
        offsets = getattr(read.examples[0], "offsets", ())  # character offsets of words
        return {**first, "positions": [list(offset) for offset in offsets]} if offsets else first

    return _Prepared(read.sequences, bool(read.features.cut), answer)


def similarities(vectors: list[np.ndarray]) -> ExploredAnswer:
    """Return the cosines of all pairs of vectors, and their width."""
    scaled = unit(np.stack(vectors))
    return {"similarities": np.round(scaled @ scaled.T, 4).tolist(), "width": scaled.shape[-1]}


def mask_candidates(tokenizer: Tokenizer, probabilities: np.ndarray) -> list[ExploredAnswer]:
    """Return the most probable tokens for one mask, their text, and whether they start a word.

    Shape: probabilities (vocabulary,).
    """
    best = np.argsort(-probabilities)[:_MASK_CANDIDATES].tolist()
    return [
        {
            "token": name,
            "text": tokenizer.decode([token]).removeprefix("##").strip() or name,
            "starts_word": bool(tokenizer.starts_word[token]) if token < tokenizer.size else True,
            "score": float(probabilities[token]),
        }
        for token, name in zip(best, tokenizer.tokens(best), strict=True)
    ]


def draw_maps(served: ServedModel, sequence: TokenSequence, subnet: Subnet | None) -> ExploredMaps:
    """Return the attention maps of one sequence."""
    model = served.model
    assert model is not None
    ids = torch.from_numpy(sequence.tokens)[None].to(model.device)
    types = None if sequence.types is None else torch.from_numpy(sequence.types)[None].to(model.device)
    tokens = served.tokenizer.tokens(sequence.tokens.tolist())
    explorer = Explorer.from_arrays(tokens, sequence_maps(model, ids, types, subnet=subnet))
    return ExploredMaps(data=explorer.data, markup=str(explorer.markup))


def why_no_maps(served: ServedModel, sequences: Sequence[TokenSequence], index: int) -> str | None:
    """Return the reason why maps cannot be drawn for one of the sequences; None if they can."""
    if served.model is None:
        return f"{served.name!r} does not run in PyTorch, which draws the maps; serve the folder it was exported from"
    if index >= len(sequences):
        return f"sequence is {index}; the input has {len(sequences)}, counted from 0"
    if len(sequences[index].tokens) > MAX_MAP_TOKENS:
        return f"The text has {len(sequences[index].tokens)} tokens; maps are shown for up to {MAX_MAP_TOKENS}."
    return None


def describe_model(served: ServedModel) -> PageModel:
    """Return the properties of a model for the page."""
    encoder = served.runner.config.encoder
    operations = [one for one in _OPERATIONS if one in served.operations]
    task = served.task
    if task is not None and task.kind == "embedding":
        operations.remove("task")  # the page compares vectors instead of showing one
    return PageModel(
        name=served.name,
        works=operations,
        task=None if task is None else _describe_task(task),
        mask=served.tokenizer.tokens([served.tokenizer.mask])[0] if "fill_mask" in operations else None,
        sizes={operation: describe_sizes(served, operation) for operation in operations},
        parameters=served.parameters(),
        layers=len(encoder.layers),
        heads=max(layer.mixer.heads for layer in encoder.layers),
        length=served.encoding.length,
        maps=served.model is not None,
    )


def describe_sizes(served: ServedModel, operation: Operation) -> PageSizes:
    """Return the sizes that a request for an operation may choose."""
    model, record = served.model, served.elastic
    if model is None or not served.has_subnets(operation):
        return PageSizes(kind="one")
    if record is None:
        heads, layers = min(unit.heads for unit in model.encoder.units), len(model.encoder.units)
        return PageSizes(
            kind="free",
            widths=[(count + 1) / heads for count in range(heads)],
            depths=[(count + 1) / layers for count in range(layers)],
        )
    return PageSizes(
        kind="recorded",
        widths=sorted({entry.width for entry in record.grid}),
        depths=sorted({entry.depth for entry in record.grid}),
        grid=[
            RecordedSize(
                width=entry.width,
                depth=entry.depth,
                score=entry.score,
                parameters=entry.parameters,
                latency_ms=entry.latency_ms,
            )
            for entry in record.grid
        ],
        metric=record.metric,
    )


def _describe_task(task: AnyTask) -> PageTask:
    roles = [(role, getattr(task, role)) for role in task.roles]
    columns = [PageColumn(column=column, role=role) for role, column in roles if column is not None]
    optional = {name: getattr(task, name) for name in ("threshold", "lowest", "highest") if hasattr(task, name)}
    if isinstance(task, Tagging):
        names = {label.split("-", 1)[-1] if task.has_chunks else label for label in task.labels}
        optional["types"] = sorted(names - {"O"}) if task.has_chunks else sorted(names)
    return PageTask(kind=task.kind, columns=columns, **optional)
