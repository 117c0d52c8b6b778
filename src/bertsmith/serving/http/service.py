"""What all endpoints share: the models, the engines, a place to tokenise, and how an answer goes out."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json, to_json

from bertsmith.errors import nearest
from bertsmith.serving.http.errors import ApiError, invalid
from bertsmith.serving.http.metrics import Metrics, size_of
from bertsmith.serving.requests import DeadlineExceeded, Operation, RequestResult, TokenSequence
from bertsmith.serving.scheduler import Scheduler
from bertsmith.serving.settings import ServeSettings

if TYPE_CHECKING:
    from bertsmith.serving.model import ServedModel

Value = TypeVar("Value")
_SMALL = 2048  # bytes of a request whose texts are tokenised sooner than a thread is told to
_THREADS = 2  # a tokenizer serves one thread at a time; the second is for another model, or for writing answers


class Service:
    """The state of one running service."""

    def __init__(self, models: "Mapping[str, tuple[ServedModel, Scheduler]]", settings: ServeSettings) -> None:
        self.models, self.settings = models, settings
        self.metrics = Metrics(models)
        self.is_draining = False
        self._threads = ThreadPoolExecutor(_THREADS, "bertsmith-text")

    def find(self, name: str | None) -> "tuple[ServedModel, Scheduler]":
        """The model of this name; the first one if none is named."""
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            clause = nearest(name, self.models)
            raise ApiError(404, f"model is {name[:80]!a}, which is not served here; {clause}", "NotFound")
        return self.models[name]

    async def aside(self, function: Callable[..., Value], *arguments: Any) -> Value:
        """What a function returns that would hold up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def drain(self) -> None:
        """Finishes what was taken."""
        self.is_draining = True
        for _, engine in self.models.values():
            await engine.drain()
        self._threads.shutdown(wait=False)


class HttpRequest:
    """One request on its way: its model, what was asked of the engine, and the times that its answer tells."""

    def __init__(self, service: Service, started: float, *, is_small: bool = False) -> None:
        self.service, self.settings, self.started, self.is_small = service, service.settings, started, is_small
        self.headers: dict[str, str] = {}

    def model(self, name: str | None, work: Operation) -> "ServedModel":
        """The model that is asked, if it does this kind of work."""
        self.served, self.engine = self.service.find(name)
        self.engine.check_room()  # whoever is refused hears it before anything is tokenised
        if work not in self.served.works:
            can = ", ".join(_SAID[kind] for kind in sorted(self.served.works))
            raise invalid(f"the model {self.served.name!r} cannot {_SAID[work]}; it can {can}")
        return self.served

    def truncates(self, asked: bool | None) -> bool:
        """Whether texts that are too long are cut."""
        return self.settings.truncate if asked is None else asked

    async def read(self, function: Callable[..., Value], *arguments: Any) -> Value:
        """What a function that tokenises returns; the time it takes is told."""
        begin = time.perf_counter()
        found = function(*arguments) if self.is_small else await self.service.aside(function, *arguments)
        self.headers["X-Tokenization-Time"] = _milliseconds(time.perf_counter() - begin)
        return found

    async def work(self, work: Operation, asked: Sequence[TokenSequence]) -> list[np.ndarray]:
        """What the engine says of some sequences."""
        left = self.settings.times.answer - (time.perf_counter() - self.started)
        if left <= 0:
            raise DeadlineExceeded("the request was not read in the time allowed")
        name = self.served.name
        answered = RequestResult([], None, 0.0, 0.0)
        if asked:
            answered = await self.engine.submit(work, asked, timeout=left)
        if not all(np.isfinite(output).all() for output in answered.outputs):
            raise ApiError(500, f"the model {name!r} gave numbers that are none (inf or nan)", "Backend")
        tokens = sum(len(one.tokens) for one in asked)
        self.service.metrics.call(name, tokens, answered)
        width, depth = size_of(answered)
        self.headers |= {
            "X-Bertsmith-Model": name.encode("ascii", "backslashreplace").decode(),
            "X-Bertsmith-Width": width,
            "X-Bertsmith-Depth": depth,
            "X-Queue-Time": _milliseconds(answered.queued_seconds),
            "X-Inference-Time": _milliseconds(answered.computed_seconds),
            "X-Compute-Tokens": str(tokens),
        }
        return answered.outputs

    async def answer(self, make: Callable[..., Any], *arguments: Any) -> Response:
        """The response whose JSON a function makes; both are done beside the event loop where they may be long."""
        if self.is_small:
            body = to_json(make(*arguments))
        else:
            body = await self.service.aside(lambda: to_json(make(*arguments)))
        self.headers["X-Total-Time"] = _milliseconds(time.perf_counter() - self.started)
        return Response(body, media_type="application/json", headers=self.headers)


_SAID: dict[Operation, str] = {
    "task": "predict (it has a task)",
    "vectors": "embed",
    "fill_mask": "fill masks",
}


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3f}"


async def call_of(request: Request) -> HttpRequest:  # not async, it would be sent to a thread and waited for
    started = request.scope.get("bertsmith.started", time.perf_counter())
    size = request.headers.get("content-length", "")
    is_small = size.isdecimal() and len(size) < 10 and int(size) <= _SMALL
    return HttpRequest(request.app.state.service, started, is_small=is_small)


RequestHere = Annotated[HttpRequest, Depends(call_of)]


class _StrictRequest(Request):
    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is no JSON: {error}", "Validation") from None


class StrictRoute(APIRoute):
    """A route whose bodies are JSON as its standard has it: no NaN, no halves of characters, no endless nesting."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return handle
