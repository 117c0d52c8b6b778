"""What stands before every endpoint: the key, the limits on bodies and on requests at a time, and the clock.

A body is read here, whole, with a count and a clock, before anything else looks at it: one that is too long is refused
at the byte that is too many, whatever its head said, and one that trickles in does not hold a place for long.
"""

import asyncio
import hmac
import time
from contextlib import suppress

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bertsmith.serving.http.errors import ApiError, answer, too_large
from bertsmith.serving.http.service import Service

PAGE = "/page/"
"""Where the page's own files are."""
_LINGER_SECONDS, _LINGER_BYTES = 1.0, 32_000_000
_BODY_LATE = 408
UNCOUNTED = frozenset({"/health", "/metrics", "/live"})
"""What is answered however many requests there are: an overloaded service must say that it is one."""


class RequestMiddleware:
    """The outermost layer of the app."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service, self.settings = app, service, service.settings
        self.requests = 0
        self.held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        watched = _Watched(send, self.service)
        scope["bertsmith.started"] = started = time.perf_counter()
        is_counted = scope["path"] not in UNCOUNTED
        self.requests += is_counted
        try:
            await self._guarded(scope, receive, watched, is_counted)
        finally:
            self.requests -= is_counted
            self.service.metrics.request(_endpoint(scope), watched.status, time.perf_counter() - started)

    async def _guarded(self, scope: Scope, receive: Receive, watched: "_Watched", is_counted: bool) -> None:
        held, is_read = 0, False
        try:
            self._check_key(scope)
            if is_counted and self.requests > self.settings.limits.requests:
                raise ApiError(429, "too many requests at a time; try again in 1 s", "Overloaded", retry_after=1)
            body = await self._body(scope, receive)
            if body is None:  # the client went away
                return
            held, is_read = len(body), True
            await self.app(scope, _replay(body, receive), watched)
        except Exception as error:
            if watched.status is not None:
                raise
            response = answer(error, scope["path"])
            if not is_read:
                if response.status_code != _BODY_LATE and "expect" not in Request(scope).headers:
                    await _discard(receive)
                # what is left of the body cannot be told from the next request
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
            raise ApiError(_BODY_LATE, f"the body was not there after {seconds:g} s", "Timeout") from None
        finally:
            if not is_whole:
                self.held_bytes -= size
        return b"".join(pieces)


def _is_open(method: str, path: str) -> bool:
    """Whether the key is not needed: probes have none, and the page must be there to ask for it."""
    return path == "/health" or (method in ("GET", "HEAD") and (path == "/" or path.startswith(PAGE)))


class _Watched:
    """Sends on, remembers the status, and gives up on a client that takes nothing."""

    def __init__(self, send: Send, service: Service) -> None:
        self.send, self.service = send, service
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.service.is_draining:  # the client's next request goes elsewhere
                headers = [header for header in message.get("headers", ()) if header[0].lower() != b"connection"]
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
        async with asyncio.timeout(self.service.settings.times.sending):
            await self.send(message)


async def _discard(receive: Receive) -> None:
    """Reads on for a while: a connection that is closed while its client still sends loses the answer, too."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            left = _LINGER_BYTES
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


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
    route = getattr(scope.get("route"), "path", None)
    if route is None and scope["path"] in scope["app"].openapi()["paths"]:  # refused before it was looked for
        return str(scope["path"])
    return route or "other"
