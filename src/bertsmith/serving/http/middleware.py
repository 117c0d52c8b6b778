"""Middleware in front of every endpoint: host, key, the limits on bodies and concurrent requests, and timeouts.

A body is read completely, with a limit on its size and a timeout, before it reaches an endpoint. A body that is too
long is rejected at the first byte over the limit, even if its Content-Length is smaller.
"""

import asyncio
import hmac
import time
from contextlib import suppress

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bertsmith.serving.connections import OVER_LIMIT
from bertsmith.serving.http.errors import ApiError, error_response, too_large
from bertsmith.serving.http.service import Service
from bertsmith.serving.settings import is_loopback

_PAGE_FILES = "/page/"
_DISCARD_SECONDS, _DISCARD_BYTES = 1.0, 32_000_000
_BODY_TIMEOUT = 408
_UNLIMITED_PATHS = frozenset({"/health", "/metrics", "/live"})  # answered even if there are too many requests


class RequestMiddleware:
    """The outermost middleware of the app."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service, self.settings = app, service, service.settings
        self.buffered_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sender = _Sender(send, self.service)
        scope["bertsmith.started_at"] = started_at = time.perf_counter()
        try:
            await self._handle(scope, receive, sender)
        finally:
            self.service.metrics.count_request(_endpoint(scope), sender.status, time.perf_counter() - started_at)

    async def _handle(self, scope: Scope, receive: Receive, sender: "_Sender") -> None:
        body_bytes, is_read, is_counted = 0, False, False
        try:
            self._check_host(scope)
            self._check_key(scope)
            is_limited = scope["path"] not in _UNLIMITED_PATHS
            if is_limited:
                self._check_load(scope)
            body = await self._read_body(scope, receive)
            if body is None:  # the client disconnected
                return
            body_bytes, is_read = len(body), True
            if is_limited:  # not before, so that slow bodies keep nobody out
                self.service.check_requests()
                is_counted = True
                self.service.requests += 1
            await self.app(scope, _replay(body, receive), sender)
        except Exception as error:
            if sender.status is not None:
                raise
            response = error_response(error, scope["path"])
            if not is_read and not await self._is_discarded(scope, receive, response.status_code):
                # the rest of the body would be read as the next request
                response.headers["Connection"] = "close"
            await response(scope, receive, sender)
        finally:
            self.buffered_bytes -= body_bytes
            self.service.requests -= is_counted

    async def _is_discarded(self, scope: Scope, receive: Receive, status: int) -> bool:
        """Read the rest of the body of a rejected request, unless the client waits for permission to send it."""
        is_expected = status != _BODY_TIMEOUT and "expect" not in Request(scope).headers
        return is_expected and await _discard(receive)

    def _check_load(self, scope: Scope) -> None:
        """Reject a request that could not be answered in time, before its body is read."""
        if scope.get(OVER_LIMIT):
            message = "too many connections are open"
            raise ApiError(503, message, "Overloaded", retry_after=self.service.expected_wait())
        self.service.check_requests()
        if scope["method"] == "POST":
            self.service.check_room()

    def _check_host(self, scope: Scope) -> None:
        """Reject names of other hosts on loopback: a web page could point its own name here (DNS rebinding)."""
        name = Request(scope).headers.get("host", "")
        if self.settings.key is None and is_loopback(self.settings.host) and not self._is_allowed(name):
            message = f"Host is {name[:80]!a}; allowed: localhost, 127.0.0.1 and the names of --allow-host"
            raise ApiError(403, message, "Unauthorized")

    def _is_allowed(self, host: str) -> bool:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else host
        name = name.strip("[]").lower()
        return not name or is_loopback(name) or name in self.settings.allowed_hosts

    def _check_key(self, scope: Scope) -> None:
        key = self.settings.key
        if key is None or _needs_no_key(scope["method"], scope["path"]):
            return
        scheme, _, client_key = Request(scope).headers.get("authorization", "").partition(" ")
        is_correct = hmac.compare_digest(client_key.strip().encode(), key.encode())
        if scheme.lower() != "bearer" or not is_correct:
            raise ApiError(401, "this service requires its key as Authorization: Bearer …", "Unauthorized")

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body, counted in buffered_bytes; None if the client disconnected."""
        limit = self.settings.limits.body_bytes
        length = Request(scope).headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > limit):
            raise _body_too_large(limit)
        chunks: list[bytes] = []
        size = 0
        is_complete = False
        try:
            async with asyncio.timeout(self.settings.times.body):
                while not is_complete:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    self.buffered_bytes += len(chunk)
                    if size > limit:
                        raise _body_too_large(limit)
                    if self.buffered_bytes > self.settings.limits.buffered_bytes:
                        raise self.service.overloaded("the bodies of all current requests are too large")
                    chunks.append(chunk)
                    is_complete = not message.get("more_body", False)
        except TimeoutError:
            seconds = self.settings.times.body
            raise ApiError(_BODY_TIMEOUT, f"the body did not arrive within {seconds:g} s", "Timeout") from None
        finally:
            if not is_complete:
                self.buffered_bytes -= size
        return b"".join(chunks)


def _needs_no_key(method: str, path: str) -> bool:
    """Whether a request needs no key: probes have none, and the page must load before the user can enter one."""
    return path == "/health" or (method in ("GET", "HEAD") and (path == "/" or path.startswith(_PAGE_FILES)))


class _Sender:
    """Sends messages with a timeout, records the status, and closes connections during a shutdown."""

    def __init__(self, send: Send, service: Service) -> None:
        self.send, self.service = send, service
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.service.is_draining:
                headers = [header for header in message.get("headers", ()) if header[0].lower() != b"connection"]
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
        async with asyncio.timeout(self.service.settings.times.send):
            await self.send(message)


async def _discard(receive: Receive) -> bool:
    """Read the rest of a body, because the client would lose the response if the connection closed while it sends.

    Return whether the whole body was read.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            remaining = _DISCARD_BYTES
            while remaining > 0:
                message = await receive()
                remaining -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return True
    return False


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that yields the body and then the server's messages."""
    is_sent = False

    async def receive_again() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def _body_too_large(limit: int) -> ApiError:
    return too_large(f"the body is longer than {limit} bytes; send fewer or shorter texts")


def _endpoint(scope: Scope) -> str:
    """Return the path pattern of the route, so that clients cannot create arbitrary metric labels."""
    route = getattr(scope.get("route"), "path", None)
    if route is None and scope["path"] in scope["app"].openapi()["paths"]:  # rejected before routing
        return str(scope["path"])
    return route or "other"
