"""What the OpenAPI document says of answers other than the good one, and of the headers of good ones."""

from typing import Any

from bertsmith.serving.http.errors import ErrorAnswer, OpenAIErrorAnswer

_SAID = {
    400: "The body is no JSON.",
    401: "The service wants a key and was given none, or another.",
    404: "No such model is served.",
    408: "The body did not come in time.",
    413: "The body, the number of texts or the number of tokens goes beyond a limit.",
    422: "The request is not one that this model can answer.",
    429: "The queue is full; Retry-After says when to come back.",
    500: "The service failed.",
    503: "The answer was not ready in time, or the service is ending.",
}
_HEADERS = {
    "X-Bertsmith-Model": ("string", "The model that answered."),
    "X-Bertsmith-Width": ("number", "The share of heads and neurons that answered: 1 for the whole model."),
    "X-Bertsmith-Depth": ("number", "The share of layers that answered: 1 for the whole model."),
    "X-Queue-Time": ("number", "Milliseconds the request waited for the engine."),
    "X-Inference-Time": ("number", "Milliseconds the engine worked on it."),
    "X-Tokenization-Time": ("number", "Milliseconds its texts took to become tokens."),
    "X-Total-Time": ("number", "Milliseconds from the head of the request to the answer."),
    "X-Compute-Tokens": ("integer", "The tokens that were worked on."),
}

HEADERS = {name: {"schema": {"type": kind}, "description": text} for name, (kind, text) in _HEADERS.items()}


def errors(model: type[Any], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """The documentation of some errors in one shape."""
    found: dict[int | str, dict[str, Any]] = {
        status: {"model": model, "description": _SAID[status]} for status in statuses
    }
    if 429 in found:
        wait = {"schema": {"type": "integer"}, "description": "Seconds to wait."}
        found[429]["headers"] = {"Retry-After": wait}
    return found


READ_ERRORS = errors(ErrorAnswer, 400, 401, 404, 408, 413, 422, 429, 500, 503)
WORK_ERRORS = READ_ERRORS | {200: {"headers": HEADERS}}
OPENAI_ERRORS = errors(OpenAIErrorAnswer, 400, 401, 404, 408, 413, 422, 429, 500, 503) | {200: {"headers": HEADERS}}
ASK_ERRORS = errors(ErrorAnswer, 401, 429, 500)
OPENAI_ASK_ERRORS = errors(OpenAIErrorAnswer, 401, 404, 429, 500)
