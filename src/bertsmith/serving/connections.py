"""HTTP connections of the server: limits on their number, on request heads, and on the time for a head to arrive."""

import asyncio
import selectors
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 65_536
_MIN_SILENCE = 1.0  # seconds; the request of a newer connection may be in transit
_MAX_CHECKED = 8  # silent connections that are checked for unread bytes when a new one needs room
OVER_LIMIT = "bertsmith.is_over_limit"
"""Key of the ASGI scope: whether the connection is over the limit."""
Refuse = Callable[[bytes], bytes | None]
"""Takes the URL of a POST request; returns a whole response if the request cannot be accepted, else None."""
_REFUSED = SimpleNamespace(response_complete=True, disconnected=False, message_event=asyncio.Event())
"""Stands for the cycle of a refused request, so that its body is ignored."""
_HEAD_TOO_LONG = f"the head of the request is longer than {MAX_HEAD_BYTES} bytes"


class Connections:
    """The open connections. If there are too many, in total or of one address, the oldest silent one is closed.

    A connection is silent until the first complete head of a request, so clients that open connections and send
    nothing, or send slowly, displace each other and not the requests of other clients. (After a response a connection
    is kept for some seconds, because the next request may be in transit.) If none is silent, a connection over the
    limit stays open for probes such as /health and for refusals; twice the limit is never exceeded.
    """

    def __init__(self, limit: int, per_address: int) -> None:
        self.limit, self.per_address = limit, per_address
        self._count = 0
        self._count_by_address: defaultdict[str, int] = defaultdict(int)
        # the time since when each is silent, oldest first, by address; None: of all addresses
        self._silent: defaultdict[str | None, dict[Connection, float]] = defaultdict(dict)

    def add(self, connection: "Connection") -> bool:
        """Add a new connection and make room for it; return False if no other one is silent."""
        address = connection.address
        self._count += 1
        self._count_by_address[address] += 1
        has_room = (
            self._close_oldest(address, _MIN_SILENCE) if self._count_by_address[address] > self.per_address else True
        )
        has_room = self._close_oldest(None, _MIN_SILENCE) and has_room if self._count > self.limit else has_room
        self.set_silent(connection, True)
        return has_room

    def remove(self, connection: "Connection") -> None:
        """Remove a closed connection."""
        self.set_silent(connection, False)
        self._count -= 1
        self._count_by_address[connection.address] -= 1
        if not self._count_by_address[connection.address]:
            del self._count_by_address[connection.address]

    def set_silent(self, connection: "Connection", is_silent: bool) -> None:
        """Record whether a connection waits for its first request."""
        for key in (connection.address, None):
            if is_silent:
                self._silent[key].setdefault(connection, time.monotonic())
            else:
                self._silent[key].pop(connection, None)
            if not self._silent[key]:
                del self._silent[key]

    def has_room(self, address: str) -> bool:
        """Whether the limits are kept."""
        return self._count <= self.limit and self._count_by_address[address] <= self.per_address

    def make_reserve(self) -> bool:
        """Return whether a connection over the limit may stay open, if necessary in place of a silent one."""
        return self._count <= 2 * self.limit or self._close_oldest(None, 0.0)

    def _close_oldest(self, address: str | None, min_silence: float) -> bool:
        """Close the oldest silent connection, of an address or of all; return False if no connection is silent."""
        for connection, silent_since in islice(self._silent.get(address, {}).items(), _MAX_CHECKED):
            if time.monotonic() - silent_since < min_silence:
                return False
            if not has_unread(connection.transport):
                self.set_silent(connection, False)
                connection.transport.abort()
                return True
        return False


def has_unread(transport: asyncio.Transport) -> bool:
    """Whether bytes have arrived that a busy event loop has not read yet: closing would lose a request."""
    with selectors.DefaultSelector() as selector:
        selector.register(transport.get_extra_info("socket"), selectors.EVENT_READ)
        return bool(selector.select(0))


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol with the limits; `connection_class` sets the first three attributes."""

    head_seconds: float
    open_connections: Connections
    refuse: Refuse
    address = ""
    _timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _is_over_limit = False
    _refusal: bytes | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._is_over_limit = not self.open_connections.add(self)
        if self._is_over_limit and not self.open_connections.make_reserve():
            transport.abort()
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self.open_connections.remove(self)
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        if not has_unread(self.transport):
            super().timeout_keep_alive_handler()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._head_bytes += len(data)  # reset by a complete head
        super().data_received(data)
        if self._is_idle and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(_HEAD_TOO_LONG)
        self._update()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_over_limit = self._is_over_limit and not self.open_connections.has_room(self.address)
        cast(dict[str, object], self.scope)[OVER_LIMIT] = self._is_over_limit

    def on_headers_complete(self) -> None:
        separators = len(b": \r\n")
        self._head_bytes = len(self.url) + sum(len(name) + len(value) + separators for name, value in self.headers)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError(_HEAD_TOO_LONG)  # the parser reports it, and `send_400_response` follows
        self._head_bytes = 0
        # a refusal without an ASGI task takes a fraction of the time, which the accepted requests need
        is_plain = self.parser.should_keep_alive() and not self.expect_100_continue
        if is_plain and self._is_idle and self.parser.get_method() == b"POST":
            self._refusal = self.refuse(self.url)
        if self._refusal is None:
            super().on_headers_complete()
        else:
            self.cycle = cast(RequestResponseCycle, _REFUSED)

    def on_message_complete(self) -> None:
        if self._refusal is None:
            super().on_message_complete()
            return
        self.transport.write(self._refusal)
        self._refusal = None
        self.on_response_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update()

    def send_400_response(self, msg: str) -> None:
        """Reject a malformed request, or one with too long a head."""
        if self._head_bytes <= MAX_HEAD_BYTES:
            super().send_400_response(msg)
            return
        body = f'{{"error": "{_HEAD_TOO_LONG}", "error_type": "TooLarge"}}'
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(f"HTTP/1.1 431 Request Header Fields Too Large\r\n{head}{body}".encode())
        self.transport.close()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _update(self) -> None:
        """Start or stop the time for the next head; uvicorn has a timer for idle connections after a response."""
        if self.transport.is_closing():
            return
        self.open_connections.set_silent(self, self.cycle is None)
        if not self._is_idle or self.timeout_keep_alive_task is not None:
            self._cancel_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.head_seconds, self._close)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        self._timer = None
        if self._is_idle and not has_unread(self.transport):
            self.transport.close()


def connection_class(head_seconds: float, limit: int, refuse: Refuse) -> type[Connection]:
    """Return the protocol of a server; one address may have half of all connections."""
    connections = Connections(limit, max(1, limit // 2))
    attributes = {"head_seconds": head_seconds, "open_connections": connections, "refuse": staticmethod(refuse)}
    return type("Connection", (Connection,), attributes)
