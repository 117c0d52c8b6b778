"""The state shared by all endpoints, and the handling of one HTTP request."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json, to_json

from bertsmith.errors import nearest
from bertsmith.layers.subnet import Subnet
from bertsmith.serving.http.errors import ApiError, invalid, to_api_error
from bertsmith.serving.http.metrics import Metrics, format_size
from bertsmith.serving.http.wire import MAX_FIELDS
from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import DeadlineExceeded, Operation, RequestResult, TokenSequence
from bertsmith.serving.scheduler import Scheduler
from bertsmith.serving.settings import ServeSettings

Value = TypeVar("Value")
_SMALL_BODY = 2048  # bytes; tokenising a smaller body takes less time than switching to a thread
_TEXT_THREADS = 2  # a long request does not delay another one
_TOO_MANY = "too many requests at the same time"
_MODEL_PATHS = frozenset(
    {"/", "/decode", "/embed", "/explore", "/fill-mask", "/predict", "/rerank", "/tokenize", "/v1/embeddings"}
)
_VERBS: dict[Operation, str] = {"task": "predict (it has a task)", "vectors": "embed", "fill_mask": "fill masks"}


class Service:
    """The schedulers by model name, the settings, the metrics, and threads for tokenising."""

    def __init__(self, schedulers: Mapping[str, Scheduler], settings: ServeSettings) -> None:
        self.schedulers, self.settings = schedulers, settings
        self.metrics = Metrics(schedulers)
        self.is_draining = False
        self.requests = 0
        """Requests that were read completely and not answered yet."""
        self._threads = ThreadPoolExecutor(_TEXT_THREADS, "bertsmith-text")

    def find(self, name: str | None) -> Scheduler:
        """Return the scheduler of a model; by default, of the first one. A single model may answer to every name."""
        is_only = len(self.schedulers) == 1 and not self.settings.strict_names
        if name is None or is_only:
            return next(iter(self.schedulers.values()))
        if name not in self.schedulers:
            raise unknown_model(name, self.schedulers)
        return self.schedulers[name]

    def check_requests(self) -> None:
        """Raise if there are too many requests at the same time."""
        if self.requests >= self.settings.limits.requests:
            raise self.overloaded(_TOO_MANY)

    def overloaded(self, message: str) -> ApiError:
        """Return the error for a request that may be sent again after the current wait."""
        seconds = max(1, math.ceil(self.expected_wait()))
        return ApiError(429, f"{message}; try again in {seconds} s", "Overloaded", retry_after=seconds)

    def refuse(self, url: bytes) -> bytes | None:
        """Return the whole response to a POST request if there are too many requests; None if it may be read."""
        path = url.decode("latin-1")
        if path not in _MODEL_PATHS or self.is_draining or self.requests < self.settings.limits.requests:
            return None
        self.metrics.count_request(path, 429, 0.0)
        return self.overloaded(_TOO_MANY).to_bytes(path)

    def check_room(self) -> None:
        """Raise QueueFull if no model accepts a request, before anything is read."""
        if len(self.schedulers) == 1:
            next(iter(self.schedulers.values())).check_room()

    def expected_wait(self) -> float:
        """Return the seconds that a new request would wait, for the busiest model."""
        return max(scheduler.expected_wait() for scheduler in self.schedulers.values())

    async def run_in_thread(self, function: Callable[[], Value], seconds: float) -> Value:
        """Run a function that would block the event loop; raise DeadlineExceeded if it does not end in time.

        A function that has not started by then never runs.
        """
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        except TimeoutError:
            raise DeadlineExceeded("the text of the request was not processed in time", self.expected_wait()) from None

    async def drain(self) -> None:
        """Finish all accepted requests."""
        self.is_draining = True
        for scheduler in self.schedulers.values():
            await scheduler.drain()
        self._threads.shutdown(wait=False)


def unknown_model(name: str, names: Iterable[str]) -> ApiError:
    """Return the error for a model that is not served."""
    return ApiError(404, f"model is {name[:80]!a}, which is not served here; {nearest(name, names)}", "NotFound")


class HttpRequest:
    """One request: its model, its deadline, and the timing headers of its response."""

    def __init__(self, request: Request) -> None:
        self.service = service_of(request)
        self.settings = self.service.settings
        self.started_at: float = request.scope["bertsmith.started_at"]
        size = request.headers.get("content-length", "")
        self.is_small = size.isdecimal() and len(size) < 10 and int(size) <= _SMALL_BODY
        self.headers: dict[str, str] = {}

    def select_model(self, name: str | None, operation: Operation) -> ServedModel:
        """Return the requested model; raise if it is overloaded or does not support the operation."""
        self.scheduler = self.service.find(name)
        self.served = self.scheduler.served
        self.scheduler.check_room()  # reject before anything is tokenised
        if operation not in self.served.operations:
            supported = ", ".join(_VERBS[one] for one in sorted(self.served.operations))
            raise invalid(f"the model {self.served.name!r} cannot {_VERBS[operation]}; it can {supported}")
        return self.served

    def truncates(self, requested: bool | None) -> bool:
        """Whether texts that are too long are truncated."""
        return self.settings.truncate if requested is None else requested

    def _seconds_left(self) -> float:
        seconds_left = self.settings.times.answer - (time.perf_counter() - self.started_at)
        if seconds_left <= 0:
            message = f"the request was not answered within {self.settings.times.answer:g} s"
            raise DeadlineExceeded(message, self.service.expected_wait())
        return seconds_left

    async def run(self, function: Callable[[], Value]) -> Value:
        """Run a function that takes long for a large request, then in a thread."""
        seconds_left = self._seconds_left()
        return function() if self.is_small else await self.service.run_in_thread(function, seconds_left)

    async def tokenise(self, function: Callable[[], Value]) -> Value:
        """Run a function that tokenises, and record its duration."""
        started_at = time.perf_counter()
        result = await self.run(function)
        self.headers["X-Tokenization-Time"] = _milliseconds(time.perf_counter() - started_at)
        return result

    async def submit(
        self, operation: Operation, sequences: Sequence[TokenSequence], subnet: Subnet | None = None
    ) -> RequestResult:
        """Run sequences through the selected model; raise if its outputs are not finite."""
        seconds_left = self._seconds_left()
        result = RequestResult([], None, 0.0, 0.0)
        if sequences:
            result = await self.scheduler.submit(operation, sequences, timeout=seconds_left, subnet=subnet)
        name, tokens = self.served.name, sum(len(one.tokens) for one in sequences)
        if not all(np.isfinite(output).all() for output in result.outputs):
            raise ApiError(500, f"The model {name!r} returned non-finite values.", "Backend")
        self.service.metrics.count_result(name, tokens, result)
        width, depth = format_size(result.subnet)
        self.headers |= {
            "X-Bertsmith-Model": name.encode("ascii", "backslashreplace").decode(),
            "X-Bertsmith-Width": width,
            "X-Bertsmith-Depth": depth,
            "X-Bertsmith-Precision": self.served.precision,
            "X-Queue-Time": _milliseconds(result.queued_seconds),
            "X-Inference-Time": _milliseconds(result.computed_seconds),
            "X-Compute-Tokens": str(tokens),
        }
        return result

    async def respond(self, make: Callable[[], object]) -> Response:
        """Return a value as a JSON response; large ones are built in a thread."""
        body = await self.run(lambda: to_json(make()))
        self.headers["X-Total-Time"] = _milliseconds(time.perf_counter() - self.started_at)
        return Response(body, media_type="application/json", headers=self.headers)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3f}"


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _http_request(request: Request) -> HttpRequest:  # async, because FastAPI runs other functions in a thread
    return HttpRequest(request)


CurrentRequest = Annotated[HttpRequest, Depends(_http_request)]


class _StrictRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        try:
            return await HttpRequest(self).run(lambda: _parse(body))
        except DeadlineExceeded as error:
            raise to_api_error(error) from None  # FastAPI answers an unknown exception with status 400


def _parse(body: bytes) -> Any:
    """Parse standard JSON; raise if an object has too many fields, each of which could become an error message."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", "Validation") from None
    inputs = list(value.values()) if isinstance(value, dict) else []
    objects = [value, *inputs, *(item for one in inputs if isinstance(one, list) for item in one)]
    if any(isinstance(one, dict) and len(one) > MAX_FIELDS for one in objects):
        raise ApiError(413, f"an object has more than {MAX_FIELDS} fields", "TooLarge")
    return value


class StrictRoute(APIRoute):
    """A route that accepts standard JSON only: no NaN, no unpaired surrogates, no deep nesting."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return handle
