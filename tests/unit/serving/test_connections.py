"""Connections are closed only if nothing has arrived on them."""

import socket
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from bertsmith.serving.connections import Connection, Connections


class _Transport(SimpleNamespace):
    """A transport whose event loop is busy: nothing reads from its socket."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(socket=connected, closed=False)

    def get_extra_info(self, name: str) -> socket.socket:
        assert name == "socket"
        return self.socket  # type: ignore[no-any-return]

    def is_closing(self) -> bool:
        return bool(self.closed)

    def close(self) -> None:
        self.closed = True

    abort = close


def _connection(connected: socket.socket) -> Any:
    connection: Any = Connection.__new__(Connection)
    connection.transport, connection.address = _Transport(connected), "127.0.0.1"
    return connection


def test_idle_connection_with_an_unread_request_stays_open() -> None:
    client, server = socket.socketpair()
    with client, server:
        connection = _connection(server)
        client.send(b"GET")
        connection.timeout_keep_alive_handler()
        assert not connection.transport.closed
        server.recv(3)
        connection.timeout_keep_alive_handler()
        assert connection.transport.closed


def test_new_connection_displaces_a_silent_one_without_unread_bytes(monkeypatch: Any) -> None:
    monkeypatch.setattr("bertsmith.serving.connections._MIN_SILENCE", 0.0)
    with ExitStack() as stack:
        pairs = [tuple(map(stack.enter_context, socket.socketpair())) for _ in range(3)]
        first, second, third = (_connection(server) for _, server in pairs)
        pairs[0][0].send(b"GET")
        connections = Connections(limit=2, per_address=9)
        assert all([connections.add(first), connections.add(second), connections.add(third)])
        assert [one.transport.closed for one in (first, second, third)] == [False, True, False]
