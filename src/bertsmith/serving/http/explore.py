"""/explore: one input at one size, with the time it took and the maps the model made of it; what the page asks."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from bertsmith.errors import InputError
from bertsmith.models.cost import parameters
from bertsmith.serving import exploring
from bertsmith.serving.http.errors import ApiError, invalid
from bertsmith.serving.http.inputs import check_count, task_asked, texts_asked
from bertsmith.serving.http.service import HttpRequest
from bertsmith.serving.http.wire import ModelName
from bertsmith.serving.requests import Operation, QueueFull, TokenSequence
from bertsmith.serving.settings import Limits
from bertsmith.serving.sizes import cut_model, parameters_of, size_of

if TYPE_CHECKING:
    from bertsmith.serving.model import ServedModel

COMPARED = 24  # texts that are compared with each other at most
_WAITING = 8  # inputs whose maps may wait to be drawn

Read = Callable[[list[np.ndarray]], dict[str, Any]]
"""From the outputs to what they mean."""


class ExploreRequest(BaseModel):
    """One input, asked of one size of one model."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    work: Annotated[
        Operation,
        Field(description="What the task's head says, how alike texts are, or what masks hide.", examples=["vectors"]),
    ]
    inputs: Annotated[
        str | list[str] | dict[str, str | list[str]],
        Field(
            description="A text, texts to compare, or the columns of the task by their names.",
            examples=[["a text", "another"]],
        ),
    ]
    width: Annotated[float, Field(gt=0, le=1, description="Share of heads and neurons.")] = 1.0
    depth: Annotated[float, Field(gt=0, le=1, description="Share of layers.")] = 1.0
    maps: Annotated[bool, Field(description="Whether the maps of one sequence are wanted.")] = False
    sequence: Annotated[int, Field(ge=0, le=1000, description="Which sequence: an input may become several.")] = 0
    model: ModelName = None


class Explored(BaseModel):
    """What was said, by what, and how long it took."""

    model: str
    width: float
    depth: float
    parameters: int
    seconds: Annotated[float, Field(description="Of the network alone, on this input alone.")]
    queued_seconds: float
    tokens: int
    sequences: int
    cut: Annotated[bool, Field(description="Whether the input was longer than the model reads.")]
    answer: dict[str, Any]
    maps: dict[str, Any] | None = None
    maps_refused: Annotated[str | None, Field(description="Why there are no maps though they were asked for.")] = None


class Drawing:
    """Draws maps one at a time in a thread of its own, so that no more than one core is ever busy with them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "bertsmith-maps")
        self._waiting = 0

    async def __call__(self, *arguments: Any) -> dict[str, Any]:
        if self._waiting >= _WAITING:
            raise QueueFull(1.0)
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, exploring.maps_of, *arguments)
        finally:
            self._waiting -= 1


async def explored(body: ExploreRequest, call: HttpRequest, drawing: Drawing) -> Explored:
    """What the network of the size that is asked for says of the input."""
    served = call.model(body.model, body.work)
    subnet = size_of(served, body.width, body.depth)
    asked, cut, read = await call.service.aside(_asked, served, body, call.settings.limits)
    if body.sequence >= len(asked):
        raise invalid(f"sequence is {body.sequence}; the input has {len(asked)}, counted from 0")
    answered = await call.engine.submit(body.work, asked, timeout=call.settings.times.answer, subnet=subnet)
    if not all(np.isfinite(output).all() for output in answered.outputs):
        raise ApiError(500, f"the model {served.name!r} gave numbers that are none (inf or nan)", "Backend")
    tokens, size, model = sum(len(one.tokens) for one in asked), answered.subnet, cut_model(served)
    call.service.metrics.call(served.name, tokens, answered)
    refused = exploring.why_no_maps(served, asked[body.sequence]) if body.maps else None
    return Explored(
        model=served.name,
        width=1.0 if size is None else size.width,
        depth=1.0 if size is None else size.depth,
        parameters=parameters(served.runner.config) if model is None else parameters_of(model, size),
        seconds=answered.computed_seconds,
        queued_seconds=answered.queued_seconds,
        tokens=tokens,
        sequences=len(asked),
        cut=cut,
        answer=await call.service.aside(read, answered.outputs),
        maps=await drawing(served, asked[body.sequence], size) if body.maps and refused is None else None,
        maps_refused=refused,
    )


def _asked(served: "ServedModel", body: ExploreRequest, limits: Limits) -> tuple[list[TokenSequence], bool, Read]:
    """The sequences of an input, whether it was cut, and what reads the answer. Texts that are too long are cut."""
    if body.work == "task":
        return _task_asked(served, body.inputs, limits)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not isinstance(texts, list):
        raise invalid(f"inputs holds columns; for {body.work!r} it must be a text or a list of texts")
    check_count(texts, limits)
    most = COMPARED if body.work == "vectors" else 1
    if len(texts) > most:
        raise invalid(f"inputs holds {len(texts)} texts; at most {most} are taken here")
    asked = texts_asked(served, texts, True, limits)
    cut = any(len(one.tokens) == served.encoding.length for one in asked)
    if body.work == "vectors":
        return asked, cut, exploring.similarities
    tokenizer = served.tokenizer
    places = np.flatnonzero(asked[0].tokens == tokenizer.mask)
    if not len(places):
        mask = tokenizer.pieces([tokenizer.mask])[0]
        raise invalid(f"the text has no {mask} to fill, at least not in the first {served.encoding.length} tokens")
    masked = TokenSequence(asked[0].tokens, asked[0].types, places)
    return [masked], cut, lambda outputs: {"masks": [exploring.candidates(tokenizer, own) for own in outputs[0]]}


def _task_asked(served: "ServedModel", inputs: Any, limits: Limits) -> tuple[list[TokenSequence], bool, Read]:
    values = inputs.values() if isinstance(inputs, dict) else [inputs]
    texts = [text for value in values for text in ([value] if isinstance(value, str) else value)]
    check_count(texts, limits)
    if not all(text.strip() for text in texts):
        raise InputError("one of the inputs is empty; each needs some words")
    made = task_asked(served, [inputs], True, limits)

    def read(outputs: list[np.ndarray]) -> dict[str, Any]:
        own = made.outputs(outputs, is_for_tokens=served.runner.is_for_tokens)
        answer = dict(made.task.answers(made.examples, made.features, own)[0])
        offsets = getattr(made.examples[0], "offsets", ())  # of words in a text
        return {**answer, "places": [list(offset) for offset in offsets]} if offsets else answer

    return made.asked, bool(made.features.cut), read
