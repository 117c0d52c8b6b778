"""Error responses in the JSON shape of text-embeddings-inference, or in OpenAI's under /v1."""

import logging
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
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

# `error.type` for OpenAI's clients
_OPENAI_TYPES: dict[ErrorType, str] = {
    "Unauthorized": "authentication_error",
    "Overloaded": "rate_limit_error",
    "Timeout": "server_error",
    "Unhealthy": "server_error",
    "Backend": "server_error",
}
_TYPES_BY_STATUS: dict[int, ErrorType] = {
    401: "Unauthorized",
    403: "Unauthorized",
    404: "NotFound",
    413: "TooLarge",
    500: "Backend",
}


class ErrorAnswer(BaseModel):
    """A message and the type of the error."""

    error: str = Field(examples=["inputs has 300 texts; at most 256 are accepted in one request"])
    error_type: ErrorType = Field(examples=["TooLarge"])


class OpenAIErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAIErrorAnswer(BaseModel):
    """An error in OpenAI's shape."""

    error: OpenAIErrorDetails


class ApiError(HTTPException):
    """An error response: status, message, and the seconds to wait before a retry."""

    def __init__(self, status: int, message: str, error_type: ErrorType, *, retry_after: float | None = None) -> None:
        headers = {} if retry_after is None else {"Retry-After": str(max(1, math.ceil(retry_after)))}
        headers |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        super().__init__(status, message, headers)
        self.message, self.error_type = message, error_type

    def body(self, path: str) -> ErrorAnswer | OpenAIErrorAnswer:
        """Return the body in the shape that clients of this path expect."""
        if path.startswith("/v1/"):
            kind = _OPENAI_TYPES.get(self.error_type, "invalid_request_error")
            return OpenAIErrorAnswer(error=OpenAIErrorDetails(message=self.message, type=kind, code=self.error_type))
        return ErrorAnswer(error=self.message, error_type=self.error_type)

    def to_bytes(self, path: str) -> bytes:
        """Return the whole HTTP response, for requests that are refused before they reach the app."""
        body = self.body(path).model_dump_json()
        fields = {"content-type": "application/json", "content-length": str(len(body.encode())), **(self.headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"HTTP/1.1 {self.status_code} {HTTPStatus(self.status_code).phrase}\r\n{head}\r\n{body}".encode()


def invalid(message: str) -> ApiError:
    """Return the error for an invalid request."""
    return ApiError(422, message, "Validation")


def too_large(message: str) -> ApiError:
    """Return the error for a request that exceeds a limit."""
    return ApiError(413, message, "TooLarge")


def to_api_error(error: Exception) -> ApiError:
    """Convert any exception; unexpected ones are logged and their details hidden from the client."""
    match error:
        case ApiError():
            return error
        case QueueFull():
            return ApiError(429, str(error), "Overloaded", retry_after=error.retry_after)
        case DeadlineExceeded():
            return ApiError(503, str(error), "Timeout", retry_after=error.retry_after)
        case ShuttingDown():
            message = "the service is shutting down and accepts no new requests"
            return ApiError(503, message, "Unhealthy", retry_after=1)
        case BatchFailed():
            return ApiError(500, "the model failed on this request; see the log of the service", "Backend")
        case InputError():
            return invalid(str(error))
        case RequestValidationError():
            return invalid(_first_problem(error.errors()))
        case HTTPException():
            error_type = _TYPES_BY_STATUS.get(error.status_code, "Validation")
            api_error = ApiError(error.status_code, str(error.detail), error_type)
            api_error.headers = error.headers  # such as Allow for a wrong method
            return api_error
    _log.error("an endpoint failed", exc_info=error)
    return ApiError(500, "the service failed on this request; see its log", "Backend")


def _first_problem(problems: Sequence[Mapping[str, Any]]) -> str:
    """Describe the first invalid field; for a union, why it matches none of the types."""
    field = problems[0]["loc"][:2]
    of_field = [problem for problem in problems if problem["loc"][:2] == field]
    name = ".".join(str(key) for key in field[1:]) or "the body"
    if of_field[0]["type"] == "missing":
        return f"{name} is required"
    if of_field[0]["type"] == "extra_forbidden":
        path = ".".join(str(key) for key in of_field[0]["loc"][1:])
        return f"{path[:80]!a} is not a field of this request"
    texts = [str(problem["msg"]).removeprefix("Value error, ") for problem in of_field]
    messages = dict.fromkeys(text[:1].lower() + text[1:] for text in texts)
    return f"{name}: {' or '.join(messages)}".encode("utf-8", "backslashreplace").decode()


def error_response(error: Exception, path: str) -> JSONResponse:
    """Return the response to a request that failed."""
    if isinstance(error, HTTPException) and (error.status_code, error.detail) == (404, "Not Found"):  # no route
        error = ApiError(404, f"{path[:80]!a} is not an endpoint of this service; GET /docs lists them", "NotFound")
    api_error = to_api_error(error)
    return JSONResponse(api_error.body(path).model_dump(), api_error.status_code, dict(api_error.headers or {}))


def install_handlers(app: FastAPI) -> None:
    """Convert all expected errors of the app; the middleware converts the rest."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        response = error_response(error, request.url.path)
        methods = app.openapi()["paths"].get(request.scope["path"], {})
        if response.status_code == 405 and methods:  # each route knows its own method only
            response.headers["Allow"] = ", ".join(sorted(method.upper() for method in methods))
        return response

    for kind in (SchedulerError, InputError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)
