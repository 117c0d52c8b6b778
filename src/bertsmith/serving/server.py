"""The process that serves: it listens, and it ends without losing what it took.

SIGTERM or SIGINT → /health says "draining" and answers say `Connection: close` → (drain_delay) → no new connections
→ every accepted request is answered, for at most `drain` seconds → engines end → exit code 0. A second signal ends the
process at once.
"""

import asyncio
import ctypes
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bertsmith.errors import InputError
from bertsmith.serving.http.service import Service
from bertsmith.serving.settings import ServeSettings

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BACKLOG = 2048
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER, which Python does not name
_TURNS = 4
_GRACE = 1.0  # seconds in which a request that was on its way when the signal came is still read …
_LOOK = 0.05  # … unless all connections are closed before
_BEYOND = 5.0  # seconds after all others have passed, when a process that hangs is ended
_IDLE = 4  # connections for each request at a time: clients keep some open


def bound(host: str, port: int) -> socket.socket:
    """The socket that will listen, or a sentence why there is none. Who connects before it listens is refused."""
    try:
        family, kind, number, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, number)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind(where)
        except OSError:
            made.close()
            raise
        return made
    except (OSError, OverflowError, UnicodeError) as error:
        reason = str(error)
        if isinstance(
            error, OSError
        ):  # a bind that fails tells the address once more; a name that is none has no number
            known = error.errno is not None and error.errno > 0
            reason = os.strerror(error.errno or 0) if known else error.strerror or reason
        raise InputError(
            f"cannot listen on {host} port {port}: {reason}; choose others with --host and --port"
        ) from None


def address(listener: socket.socket) -> str:
    """Where a socket listens, as a client writes it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(app: FastAPI, listener: socket.socket, settings: ServeSettings, ready: Callable[[], None]) -> None:
    """Serves until a signal; `ready` is called when the first request can come."""
    Server(app, settings, ready).run([listener])


class Server(uvicorn.Server):
    """uvicorn, with an end that loses nothing and a clock for the heads of requests."""

    def __init__(self, app: FastAPI, settings: ServeSettings, ready: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",  # whatever else is installed: how the end takes connections in is tested with it
                http=protocol(settings.times.body),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                limit_concurrency=_IDLE * settings.limits.requests,
                timeout_keep_alive=settings.times.keep_alive,
                timeout_graceful_shutdown=settings.times.drain,
            )
        )
        self.service: Service = app.state.service
        self.times, self.ready = settings.times, ready
        self.ends_at: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals end the service in order, and the process then ends as one that did its work."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.ends_at is not None:
            print("bertsmith: ended at once by a second signal", file=sys.stderr, flush=True)
            os._exit(128 + sig)
        self.end()

    def end(self) -> None:
        """Begins to end the service."""
        self.service.is_draining = True
        self.ends_at = time.monotonic() + self.times.drain_delay
        watch = threading.Timer(self.times.drain_delay + self.times.drain + _BEYOND, os._exit, (1,))
        watch.daemon = True
        watch.start()
        self._watch = watch

    async def on_tick(self, counter: int) -> bool:
        if self.ends_at is not None and time.monotonic() >= self.ends_at:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.is_draining = True
        for listener in sockets or ():
            _refuse(listener)
        for _ in range(_TURNS):  # of the loop, which takes in the connections that wait
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()
        # uvicorn would close idle connections now, though a request may be on its way
        end = time.monotonic() + _GRACE
        while self.server_state.connections and time.monotonic() < end:
            await asyncio.sleep(_LOOK)
        await super().shutdown(sockets)
        if self.ends_at is not None:
            self._watch.cancel()


def _refuse(listener: socket.socket) -> None:
    """Lets nobody connect any more, while those who have are still taken in.

    A socket that is closed resets the connections that wait in it, and between the last one taken in and the close
    there may always be another. So a filter drops what asks to connect, until the close refuses it: Linux has that.
    """
    if sys.platform != "linux":
        return
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0, keep no byte
    program = struct.pack("HL", 1, ctypes.addressof(drop_all))
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def protocol(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP over httptools, closing a connection whose next request has no whole head after so many seconds.

    uvicorn itself knows no such clock: clients that send a byte now and then would hold all connections there may be.
    """

    class Clocked(HttpToolsProtocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _watch(self) -> None:
            is_idle = self.cycle is None or self.cycle.response_complete
            if not is_idle or self.timeout_keep_alive_task is not None:
                self._stop()
            elif self._late is None:
                self._late = self.loop.call_later(seconds, self._close)

        def _stop(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _close(self) -> None:
            self._late = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return Clocked
