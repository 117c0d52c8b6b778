"""The server process, with a graceful shutdown that loses no accepted request.

SIGTERM, SIGINT or SIGHUP → /health returns 503 and responses carry `Connection: close` → (drain_delay) → no new
connections → every accepted request is answered, within `drain` seconds → schedulers drain → exit code 0. A second
signal ends the process immediately. docs/explanations/decisions.md explains why uvicorn's own shutdown is not enough.
"""

import array
import asyncio
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from types import FrameType

import uvicorn
from fastapi import FastAPI

from bertsmith.errors import InputError
from bertsmith.serving.connections import connection_class
from bertsmith.serving.http.service import Service
from bertsmith.serving.repeated_logs import limit_repeated_logs
from bertsmith.serving.settings import ServeSettings

_SIGNALS = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()))
_BACKLOG = 2048
_SO_ATTACH_FILTER = 26
_ACCEPT_ITERATIONS = 4  # of the event loop, to accept pending connections before the socket is closed
_GRACE_SECONDS = 1.0  # for requests in transit when the signal arrived
_POLL_SECONDS = 0.05
_KILL_AFTER = 5.0  # seconds after all other timeouts of a shutdown
_CONNECTIONS_PER_REQUEST = 4  # because clients keep idle connections open
_OTHER_FILES = 256  # file descriptors besides connections
_LOGGERS = ("uvicorn.error", "asyncio", "bertsmith.serving", "bertsmith.serving.scheduler")


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet; raise InputError if the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
        return bound
    except (OSError, OverflowError, UnicodeError) as error:
        reason = str(error)
        if isinstance(error, OSError):  # str(error) of a failed bind repeats the address
            has_number = error.errno is not None and error.errno > 0
            reason = os.strerror(error.errno or 0) if has_number else error.strerror or reason
        message = f"cannot listen on {host} port {port}: {reason}; choose others with --host and --port"
        raise InputError(message) from None


def base_url(listener: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn with a shutdown that loses no request and limits on connections and request heads."""

    def __init__(self, app: FastAPI, settings: ServeSettings, ready: Callable[[], None] = lambda: None) -> None:
        """`ready` is called when the server accepts requests."""
        self.max_connections = _CONNECTIONS_PER_REQUEST * settings.limits.requests
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",  # the shutdown is tested with this event loop
                http=connection_class(settings.times.body, self.max_connections, app.state.service.refuse),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=settings.times.keep_alive,
                timeout_graceful_shutdown=settings.times.drain,
            )
        )
        self.service: Service = app.state.service
        self.times, self.ready = settings.times, ready
        self.stops_at: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        _allow_files(2 * self.max_connections + _OTHER_FILES)
        limit_repeated_logs(_LOGGERS)
        await super().startup(sockets)
        self.ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals; unlike uvicorn, do not raise them again, so that the exit code is 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the shutdown, and kill the process if it takes longer than all its timeouts."""
        if self.stops_at is not None:
            print("bertsmith: stopped immediately by a second signal", file=sys.stderr, flush=True)
            os._exit(128 + sig)
        self.service.is_draining = True
        self.stops_at = time.monotonic() + self.times.drain_delay
        self._kill = threading.Timer(self.times.drain_delay + self.times.drain + _KILL_AFTER, os._exit, (1,))
        self._kill.daemon = True
        self._kill.start()

    async def on_tick(self, counter: int) -> bool:
        if self.stops_at is not None and time.monotonic() >= self.stops_at:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.is_draining = True
        for listener in sockets or ():
            refuse_connections(listener)
        for _ in range(_ACCEPT_ITERATIONS):
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()
        # uvicorn would close idle connections immediately, although a request may be in transit
        end = time.monotonic() + _GRACE_SECONDS
        while self.server_state.connections and time.monotonic() < end:
            await asyncio.sleep(_POLL_SECONDS)
        await super().shutdown(sockets)
        if self.stops_at is not None:
            self._kill.cancel()


def _allow_files(count: int) -> None:
    """Raise the limit on open files, if possible; each connection needs one."""
    if find_spec("resource") is None:
        return
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def refuse_connections(listener: socket.socket) -> None:
    """Refuse new connections; connections that are already established can still be accepted (Linux only).

    Closing a listening socket resets connections that were not accepted yet, and another one may arrive between the
    last accept and the close. A packet filter that drops everything closes that gap.
    """
    if sys.platform != "linux":
        return
    drop_all = array.array("B", struct.pack("HBBI", 0x06, 0, 0, 0))  # one BPF instruction: accept 0 bytes
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, drop_all.buffer_info()[0]))
