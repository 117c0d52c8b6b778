"""Response descriptions for the OpenAPI document, and /docs, which renders the document as one page without scripts."""

import json
import re
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from bertsmith.serving.http.errors import ErrorAnswer, OpenAIErrorAnswer

Schema = dict[str, Any]
"""An object of an OpenAPI document."""

_STATUSES = {
    400: "The body is not valid JSON.",
    401: "The key is missing or wrong.",
    403: "The host name is not allowed on a service without a key.",
    404: "The model does not exist.",
    408: "The body did not arrive in time.",
    413: "The body, the number of texts or the number of tokens exceeds a limit.",
    422: "The request is invalid for this model.",
    429: "The queue is full; retry after the seconds in Retry-After.",
    500: "The service failed.",
    503: "The request timed out, or the service is shutting down.",
}
_HEADERS = {
    "X-Bertsmith-Model": ("string", "The model that answered."),
    "X-Bertsmith-Width": ("number", "Share of heads and neurons in use: 1 for the whole model."),
    "X-Bertsmith-Depth": ("number", "Share of layers in use: 1 for the whole model."),
    "X-Bertsmith-Precision": ("string", "Precision of matrix products, or of the exported weights."),
    "X-Queue-Time": ("number", "Milliseconds in the queue."),
    "X-Inference-Time": ("number", "Milliseconds of inference."),
    "X-Tokenization-Time": ("number", "Milliseconds of tokenisation."),
    "X-Total-Time": ("number", "Milliseconds from the header of the request to the response."),
    "X-Compute-Tokens": ("integer", "Number of tokens computed."),
}


def _errors(model: type[BaseModel], *statuses: int) -> dict[int | str, Schema]:
    """Document error responses of one shape."""
    responses: dict[int | str, Schema] = {
        status: {"model": model, "description": _STATUSES[status]} for status in statuses
    }
    wait = {"schema": {"type": "integer"}, "description": "Seconds to wait."}
    responses[429]["headers"] = {"Retry-After": wait}
    return responses


_POST_STATUSES = (400, 401, 403, 404, 408, 413, 422, 429, 500, 503)
_TIMES = {200: {"headers": {n: {"schema": {"type": kind}, "description": d} for n, (kind, d) in _HEADERS.items()}}}
TEXT_RESPONSES = _errors(ErrorAnswer, *_POST_STATUSES)
MODEL_RESPONSES = TEXT_RESPONSES | _TIMES
OPENAI_RESPONSES = _errors(OpenAIErrorAnswer, *_POST_STATUSES) | _TIMES
INFO_RESPONSES = _errors(ErrorAnswer, 401, 403, 429, 500)
OPENAI_INFO_RESPONSES = _errors(OpenAIErrorAnswer, 401, 403, 404, 429, 500)


def document_key(app: FastAPI) -> None:
    """Document that requests need a key, which the middleware checks."""
    document = app.openapi()
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]
    for path in ("/", "/health"):
        document["paths"][path]["get"]["security"] = []


router = APIRouter(include_in_schema=False)
_POLICY = "default-src 'none'; style-src 'self'; img-src 'self'; base-uri 'none'; frame-ancestors 'none'"
_STYLES = "".join(f'<link rel="stylesheet" href="page/{name}.css">' for name in ("base", "page", "docs"))


@router.get("/docs", response_class=HTMLResponse)
async def docs(request: Request) -> HTMLResponse:
    """Return a page with all endpoints, their requests and responses."""
    document = request.app.openapi()
    base_url = escape(str(request.base_url).rstrip("/"))
    groups: dict[str, list[str]] = {}
    links = []
    for path, methods in document["paths"].items():
        for method, details in methods.items():
            groups.setdefault(details["tags"][0], []).append(_endpoint(method, path, details, base_url))
        links.append(f'<li><a href="#{escape(f"{next(iter(methods))} {path}")}">{escape(path)}</a></li>')
    sections = "".join(
        f'<section class="group"><h2>{escape(group.replace("_", " "))}</h2>{"".join(articles)}</section>'
        for group, articles in groups.items()
    )
    title = escape(document["info"]["title"])
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title} endpoints</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="page/icon.svg" type="image/svg+xml">{_STYLES}</head><body><header class="top">'
        f'<h1><img src="page/icon.svg" alt="" width="26" height="26"><a href=".">{title}</a></h1></header><main>'
        f'<h1>Endpoints</h1><p class="lead">{escape(document["info"].get("description", ""))} For programs: '
        f'<a href="openapi.json">openapi.json</a>.</p><ul class="endpoints">{"".join(links)}</ul>{sections}'
        "</main></body></html>"
    )
    return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"})


def _endpoint(method: str, path: str, details: Schema, base_url: str) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(status)}</code></td><td>{escape(response['description'])}</td></tr>"
        for status, response in details["responses"].items()
    )
    text = "".join(f"<p>{_prose(paragraph)}</p>" for paragraph in details.get("description", "").split("\n\n"))
    return (
        f'<article class="panel endpoint" id="{escape(f"{method} {path}")}"><h3><code><b>{method.upper()}</b> '
        f"{escape(path)}</code> {escape(details['summary'])}</h3>{text}{_example(path, details, base_url)}"
        f'<details><summary>Responses</summary><div class="fields-table"><table>{rows}</table></div></details>'
        "</article>"
    )


def _prose(text: str) -> str:
    """Return a docstring's text as HTML, with code between backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _example(path: str, details: Schema, base_url: str) -> str:
    """Return a curl command and a table of the fields of the body."""
    if "requestBody" not in details:
        return f"<pre>curl {base_url}{escape(path)}</pre>"
    schema = details["requestBody"]["content"]["application/json"]["schema"]
    schema = schema.get("anyOf", [schema])[0]  # of several models, the first
    fields = schema["properties"]
    required = {name: fields[name].get("examples", ["…"])[0] for name in schema.get("required", ())}
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type(field))}</td>"
        f"<td>{_prose(field.get('description', ''))}</td></tr>"
        for name, field in fields.items()
    )
    return (
        f"<pre>curl {base_url}{escape(path)} -H 'Content-Type: application/json' \\\n"
        f"  -d '{escape(json.dumps(required, ensure_ascii=False))}'</pre>"
        f'<details><summary>Fields</summary><div class="fields-table"><table>{rows}</table></div></details>'
    )


def _type(field: Schema) -> str:
    """Return the type of a field in words."""
    if "anyOf" in field:
        return " or ".join(_type(one) for one in field["anyOf"])
    if "enum" in field or "const" in field:
        return " or ".join(json.dumps(value) for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of ({_type(field['items'])})" if "anyOf" in field["items"] else f"list of {_type(field['items'])}"
    return str(field.get("type", field.get("$ref", "anything"))).rsplit("/", 1)[-1]
