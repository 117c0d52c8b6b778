"""The files of the page at /."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request, Response

from bertsmith.report.page import read_asset
from bertsmith.serving.http.errors import ApiError

router = APIRouter(include_in_schema=False)

# Only files of this service and nothing inline: even a text that became markup by mistake could not run or load code.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True)
class PageFile:
    media_type: str
    content: bytes
    etag: str


@router.get("/")
async def index(request: Request) -> Response:
    return _respond(request, "index.html")


@router.get("/page/{name}")
async def file(request: Request, name: str) -> Response:
    return _respond(request, name)


@cache
def page_files() -> dict[str, PageFile]:
    """Return the files of the page by name; some are shared with the reports."""
    folder = files("bertsmith.serving") / "page"
    texts = {entry.name: entry.read_text(encoding="utf-8") for entry in folder.iterdir() if "." in entry.name}
    texts["house.css"] = read_asset("base.css")
    texts["explorer.css"] = read_asset("explorer.css") + read_asset("kernels.css")
    texts["explorer.js"] = read_asset("explorer.js") + "\nexport { explore };\n"
    found = {}
    for name, text in texts.items():
        content = text.encode()
        etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
        found[name] = PageFile(_TYPES[name.rpartition(".")[2]], content, etag)
    return found


def _respond(request: Request, name: str) -> Response:
    """Return a file from the table; the name is never used as a path."""
    if name not in page_files():
        raise ApiError(404, "the page has no such file", "NotFound")
    found = page_files()[name]
    headers = {**_HEADERS, "ETag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=f"{found.media_type}; charset=utf-8", headers=headers)
