"""What the OpenAPI document says of answers other than the good one, and of the headers of good ones."""

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

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


router = APIRouter(include_in_schema=False)

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
article { border-top: 1px solid #8886; padding: 1rem 0; }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
pre { overflow-x: auto; padding: .75rem; background: #8882; border-radius: .4rem; }
h2 { font-size: 1.1rem; } td { padding: 0 1rem 0 0; vertical-align: top; }
"""


@router.get("/docs", response_class=HTMLResponse)
async def docs(request: Request) -> HTMLResponse:
    """The endpoints with what they take and answer."""
    document = request.app.openapi()
    address = escape(str(request.base_url).rstrip("/"))
    parts = "".join(_endpoint(document, *found, address) for found in _endpoints(document))
    title = escape(document["info"]["title"])
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style><h1>{title}</h1>'
        f"<p>{escape(document['info'].get('description', ''))} The document itself: "
        f'<a href="openapi.json">openapi.json</a>.</p>{parts}</html>'
    )
    return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"})


def _endpoints(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, details in methods.items():
            yield method, path, details


def _endpoint(document: dict[str, Any], method: str, path: str, details: dict[str, Any], address: str) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(status)}</code><td>{escape(answer['description'])}"
        for status, answer in details["responses"].items()
    )
    text = "".join(f"<p>{escape(part)}</p>" for part in details.get("description", "").split("\n\n"))
    return (
        f"<article><h2><code>{method.upper()} {escape(path)}</code> {escape(details['summary'])}</h2>{text}"
        f"{_request(document, method, path, details, address)}<table>{rows}</table></article>"
    )


def _request(document: dict[str, Any], method: str, path: str, details: dict[str, Any], address: str) -> str:
    """A call to try, and the fields of the body."""
    if "requestBody" not in details:
        return f"<pre>curl {address}{escape(path)}</pre>"
    reference = details["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rsplit("/", 1)[-1]]
    fields = schema["properties"]
    needed = {name: fields[name].get("examples", ["…"])[0] for name in schema.get("required", ())}
    example = json.dumps(needed, ensure_ascii=False)
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{escape(_kind(field))}<td>{escape(field.get('description', ''))}"
        for name, field in fields.items()
    )
    return (
        f"<pre>curl {address}{escape(path)} -H 'Content-Type: application/json' \\\n"
        f"  -d '{escape(example)}'</pre><table>{rows}</table>"
    )


def _kind(field: dict[str, Any]) -> str:
    """The type of a field in words."""
    if "anyOf" in field:
        return " or ".join(_kind(one) for one in field["anyOf"])
    if "enum" in field or "const" in field:
        return " or ".join(json.dumps(value) for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of ({_kind(field['items'])})" if "anyOf" in field["items"] else f"list of {_kind(field['items'])}"
    return str(field.get("type", field.get("$ref", "anything")).rsplit("/", 1)[-1])
