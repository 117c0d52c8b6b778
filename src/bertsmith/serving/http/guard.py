"""What stands before every endpoint: the key, the limits on bodies and on requests at a time, and the clock.

A body is read here, whole, with a count and a clock, before anything else looks at it: one that is too long is refused
at the byte that is too many, whatever its head said, and one that trickles in does not hold a place for long.
"""

import asyncio
import hmac
import time

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bertsmith.serving.http.errors import ApiError, answer, too_large
from bertsmith.serving.http.metrics import Metrics
from bertsmith.serving.settings import ServeSettings

PAGE = "/page/"
"""Where the page's own files are."""
UNCOUNTED = frozenset({"/health", "/metrics"})
"""What is answered however many requests there are: an overloaded service must say that it is one."""


class Guard:
    """The outermost layer of the app."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        self.requests = 0
        self.held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        watched = _Watched(send, self.settings.times.sending)
        scope["bertsmith.started"] = started = time.perf_counter()
        is_counted = scope["path"] not in UNCOUNTED
        self.requests += is_counted
        try:
            await self._guarded(scope, receive, watched, is_counted)
        finally:
            self.requests -= is_counted
            self.metrics.request(_endpoint(scope), watched.status, time.perf_counter() - started)

    async def _guarded(self, scope: Scope, receive: Receive, watched: "_Watched", is_counted: bool) -> None:
        held = 0
        try:
            self._check_key(scope)
            if is_counted and self.requests > self.settings.limits.requests:
                raise ApiError(429, "too many requests at a time; try again in 1 s", "Overloaded", retry_after=1)
            body = await self._body(scope, receive)
            if body is None:  # the client went away
                return
            held = len(body)
            await self.app(scope, _replay(body, receive), watched)
        except Exception as error:
            if watched.status is not None:
                raise
            response = answer(error, scope["path"])
            # what is left of a body that was not read cannot be told from the next request
            if held == 0:
                response.headers["Connection"] = "close"
            await response(scope, receive, watched)
        finally:
            self.held_bytes -= held

    def _check_key(self, scope: Scope) -> None:
        key = self.settings.key
        if key is None or _is_open(scope["method"], scope["path"]):
            return
        scheme, _, given = Request(scope).headers.get("authorization", "").partition(" ")
        # both are compared whole, so that the time it takes tells nothing of the key
        is_right = hmac.compare_digest(given.strip().encode(), key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise ApiError(401, "this service wants its key as Authorization: Bearer …", "Unauthorized")

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body, counted in held_bytes; None if the client went away before it was there."""
        limit = self.settings.limits.body_bytes
        said = Request(scope).headers.get("content-length", "")
        if said.isdecimal() and (len(said) > 18 or int(said) > limit):
            raise _too_long(limit)
        pieces: list[bytes] = []
        size = 0
        is_whole = False
        try:
            async with asyncio.timeout(self.settings.times.body):
                while not is_whole:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    piece = message.get("body", b"")
                    size += len(piece)
                    self.held_bytes += len(piece)
                    if size > limit:
                        raise _too_long(limit)
                    if self.held_bytes > self.settings.limits.held_bytes:
                        raise ApiError(429, "too many bytes wait to be read; try again", "Overloaded", retry_after=1)
                    pieces.append(piece)
                    is_whole = not message.get("more_body", False)
        except TimeoutError:
            seconds = self.settings.times.body
            raise ApiError(408, f"the body was not there after {seconds:g} s", "Timeout") from None
        finally:
            if not is_whole:
                self.held_bytes -= size
        return b"".join(pieces)


def _is_open(method: str, path: str) -> bool:
    """Whether the key is not needed: probes have none, and the page must be there to ask for it."""
    return path == "/health" or (method in ("GET", "HEAD") and (path == "/" or path.startswith(PAGE)))


class _Watched:
    """Sends on, remembers the status, and gives up on a client that takes nothing."""

    def __init__(self, send: Send, seconds: float) -> None:
        self.send, self.seconds = send, seconds
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        async with asyncio.timeout(self.seconds):
            await self.send(message)


def _replay(body: bytes, receive: Receive) -> Receive:
    """What the app receives: the body that was read, then whatever the server has to say."""
    is_given = False

    async def again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _too_long(limit: int) -> ApiError:
    return too_large(f"the body is longer than {limit} bytes; send fewer or shorter texts at a time")


def _endpoint(scope: Scope) -> str:
    """The endpoint by its pattern, never by what a client made up."""
    return getattr(scope.get("route"), "path", None) or "other"
