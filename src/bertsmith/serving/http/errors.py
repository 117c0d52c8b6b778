"""Whatever goes wrong is one sentence in one JSON shape: text-embeddings-inference's, and OpenAI's under /v1."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from bertsmith.errors import InputError
from bertsmith.serving.requests import BatchFailed, DeadlineExceeded, QueueFull, SchedulerError, ShuttingDown

ErrorType = Literal[
    "Validation", "TooLarge", "NotFound", "Unauthorized", "Overloaded", "Timeout", "Unhealthy", "Backend"
]
_log = logging.getLogger("bertsmith.serving")

# what OpenAI's clients read as `error.type`
_OPENAI: dict[ErrorType, str] = {
    "Unauthorized": "authentication_error",
    "Overloaded": "rate_limit_error",
    "Timeout": "server_error",
    "Unhealthy": "server_error",
    "Backend": "server_error",
}
_OF_STATUS: dict[int, ErrorType] = {401: "Unauthorized", 404: "NotFound", 413: "TooLarge", 500: "Backend"}


class ErrorAnswer(BaseModel):
    """What is wrong, as a sentence, and of what kind it is."""

    error: str = Field(examples=["inputs holds 300 texts; at most 256 are taken in one request"])
    error_type: ErrorType = Field(examples=["TooLarge"])


class OpenAIErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAIErrorAnswer(BaseModel):
    """The same as OpenAI's clients read it."""

    error: OpenAIErrorDetails


class ApiError(HTTPException):
    """A request cannot be answered: the status, the sentence, and when to come back if that may help."""

    def __init__(self, status: int, message: str, error_type: ErrorType, *, retry_after: float | None = None) -> None:
        headers = {} if retry_after is None else {"Retry-After": str(max(1, math.ceil(retry_after)))}
        headers |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        super().__init__(status, message, headers)
        self.message, self.error_type = message, error_type

    def content(self, path: str) -> dict[str, Any]:
        """The body of the answer, as clients of this path read it."""
        if path.startswith("/v1/"):
            kind = _OPENAI.get(self.error_type, "invalid_request_error")
            return {"error": {"message": self.message, "type": kind, "param": None, "code": self.error_type}}
        return {"error": self.message, "error_type": self.error_type}


def invalid(message: str) -> ApiError:
    """The request is not one that can be answered."""
    return ApiError(422, message, "Validation")


def too_large(message: str) -> ApiError:
    """The request goes beyond a limit."""
    return ApiError(413, message, "TooLarge")


def as_api_error(error: Exception) -> ApiError:
    """Any exception as what a client may know of it; what nobody foresaw is logged and not told."""
    match error:
        case ApiError():
            return error
        case QueueFull():
            return ApiError(429, str(error), "Overloaded", retry_after=error.retry_after)
        case DeadlineExceeded():
            return ApiError(503, str(error) or "the answer was not ready in time", "Timeout", retry_after=1)
        case ShuttingDown():
            return ApiError(503, "the service is ending and takes nothing new", "Unhealthy", retry_after=1)
        case BatchFailed():
            return ApiError(500, "the model failed at this request; the log of the service says why", "Backend")
        case InputError():
            return invalid(str(error))
        case RequestValidationError():
            return invalid(_first_problems(error.errors()))
        case HTTPException():
            known = ApiError(error.status_code, str(error.detail), _OF_STATUS.get(error.status_code, "Validation"))
            known.headers = error.headers  # such as Allow, of a method that is not
            return known
    _log.error("an endpoint failed", exc_info=error)
    return ApiError(500, "the service failed at this request; its log says why", "Backend")


def _first_problems(problems: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong with the first field that is wrong; each of the forms it may have says why it does not fit."""
    field = problems[0]["loc"][:2]
    own = [problem for problem in problems if problem["loc"][:2] == field]
    name = ".".join(str(part) for part in field[1:]) or "the body"
    if own[0]["type"] == "missing":
        return f"{name} is required and not given"
    if own[0]["type"] == "extra_forbidden":
        path = ".".join(str(part) for part in own[0]["loc"][1:])
        return f"{path[:80]!a} is not a field of this request"
    said = dict.fromkeys(str(problem["msg"])[:1].lower() + str(problem["msg"])[1:] for problem in own)
    return f"{name}: {' or '.join(said)}".encode("utf-8", "backslashreplace").decode()


def answer(error: Exception, path: str) -> JSONResponse:
    """The response to a request that failed."""
    known = as_api_error(error)
    return JSONResponse(known.content(path), known.status_code, dict(known.headers or {}))


def install(app: FastAPI) -> None:
    """Makes every foreseen error of the app an answer in the one shape; the rest is the guard's (guard.py)."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return answer(error, request.url.path)

    for kind in (SchedulerError, InputError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)
