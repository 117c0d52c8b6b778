"""The page at /: its files, what it must know of the models, what it asks them, and how the engines fare."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from bertsmith import __version__
from bertsmith.report.page import read_asset
from bertsmith.serving.exploring import described
from bertsmith.serving.http.errors import ApiError
from bertsmith.serving.http.explore import Drawing, Explored, ExploreRequest, explored
from bertsmith.serving.http.openapi import ASK_ERRORS, READ_ERRORS
from bertsmith.serving.http.service import RequestHere, StrictRoute
from bertsmith.serving.scheduler import Scheduler
from bertsmith.serving.settings import ServeSettings

if TYPE_CHECKING:
    from bertsmith.serving.model import ServedModel

# Nothing from elsewhere and nothing inline: even a text that became markup by mistake could not run or load anything.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def router(models: "Mapping[str, tuple[ServedModel, Scheduler]]", settings: ServeSettings) -> APIRouter:
    """The endpoints of the page."""
    routes = APIRouter(route_class=StrictRoute, tags=["page"])
    drawing = Drawing()
    known = {"version": __version__, "models": [described(served) for served, _ in models.values()]}

    @routes.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return _file(request, "index.html")

    @routes.get("/page/{name}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        return _file(request, name)

    @routes.get("/explore", summary="What the page must know of the models", responses=ASK_ERRORS)
    async def describe() -> dict[str, Any]:
        return known

    @routes.post("/explore", summary="One input at one size, with its time and its maps", responses=READ_ERRORS)
    async def explore(body: ExploreRequest, call: RequestHere) -> Explored:
        """What the network of a width and a depth says of one input. It runs by itself, not in a batch with others."""
        return await explored(body, call, drawing)

    @routes.get("/live", summary="How the engines fare right now", responses=ASK_ERRORS)
    async def live() -> dict[str, Any]:
        """For every model what waits, what was done in the last seconds, and which size answers."""
        return {"models": {name: _state(engine) for name, (_, engine) in models.items()}}

    return routes


def _state(engine: Scheduler) -> dict[str, Any]:
    state = asdict(engine.stats())
    subnet = state.pop("subnet")
    return {**state, "width": 1.0 if subnet is None else subnet.width, "depth": 1.0 if subnet is None else subnet.depth}


@cache
def page_files() -> dict[str, tuple[str, bytes, str]]:
    """The files of the page by name: their type, their content and its tag. Some are those of the reports."""
    folder = files("bertsmith.serving") / "page"
    texts = {entry.name: entry.read_text(encoding="utf-8") for entry in folder.iterdir() if "." in entry.name}
    texts["house.css"] = read_asset("base.css")
    texts["explorer.css"] = read_asset("explorer.css") + read_asset("kernels.css")
    texts["explorer.js"] = read_asset("explorer.js") + "\nexport { explore };\n"
    found = {}
    for name, text in texts.items():
        content = text.encode()
        found[name] = (_TYPES[name.rpartition(".")[2]], content, f'"{hashlib.sha256(content).hexdigest()[:20]}"')
    return found


def _file(request: Request, name: str) -> Response:
    """One of the files there are; nothing of the name ever becomes a path."""
    if name not in page_files():
        raise ApiError(404, "the page has no such file", "NotFound")
    kind, content, tag = page_files()[name]
    headers = {**HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=f"{kind}; charset=utf-8", headers=headers)
