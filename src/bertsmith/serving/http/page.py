"""The files of the page at /."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from bertsmith.report.page import read_asset
from bertsmith.serving.http.errors import ApiError

router = APIRouter()

# Only files of this service, nothing inline: a text that became markup by mistake could neither run nor load code.
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


@router.get("/", summary="The page", tags=["page"], response_class=HTMLResponse)
async def index(request: Request) -> Response:
    """Return the page, which sends texts to the models at every size; needs no key."""
    return _respond(request, "index.html")


@router.get("/page/{name}", include_in_schema=False)
async def page_file(request: Request, name: str) -> Response:
    return _respond(request, name)


@cache
def page_files() -> dict[str, PageFile]:
    """Return the files of the page by name; some are shared with the reports."""
    folder = files("bertsmith.serving") / "page"
    texts = {entry.name: entry.read_text(encoding="utf-8") for entry in folder.iterdir() if "." in entry.name}
    texts["base.css"] = read_asset("base.css")
    texts["explorer.css"] = read_asset("explorer.css") + read_asset("kernels.css")
    texts["explorer.js"] = read_asset("tables.js") + read_asset("explorer.js") + "\nexport { explore };\n"
    page = {}
    for name, text in texts.items():
        content = text.encode()
        etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
        page[name] = PageFile(_TYPES[name.rpartition(".")[2]], content, etag)
    return page


def _respond(request: Request, name: str) -> Response:
    """Return a file of `page_files`; the name is never used as a path."""
    if name not in page_files():
        raise ApiError(404, "the page has no such file", "NotFound")
    file = page_files()[name]
    headers = {**_HEADERS, "ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=f"{file.media_type}; charset=utf-8", headers=headers)
