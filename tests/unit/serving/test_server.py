"""The listening socket: no established connection is lost between bind and close."""

import socket
import sys
import threading

import pytest

from bertsmith.errors import InputError
from bertsmith.serving.server import base_url, bind_socket, refuse_connections


def test_bound_socket_refuses_connections_and_holds_the_port() -> None:
    with bind_socket("127.0.0.1", 0) as listener:
        where = listener.getsockname()
        assert base_url(listener) == f"http://127.0.0.1:{where[1]}"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(where, timeout=5)
        listener.listen()
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1 port {where[1]}: Address already in use"):
            bind_socket("127.0.0.1", where[1])


@pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux only")
def test_refuse_connections_keeps_established_ones() -> None:
    with bind_socket("127.0.0.1", 0) as listener:
        listener.listen()
        listener.settimeout(5)
        where = listener.getsockname()
        with socket.create_connection(where, timeout=5) as early:
            refuse_connections(listener)
            refused: list[Exception] = []

            def connect() -> None:
                try:
                    socket.create_connection(where, timeout=10).close()
                except OSError as error:
                    refused.append(error)

            late = threading.Thread(target=connect)
            late.start()
            accepted, _ = listener.accept()
            with accepted:
                early.sendall(b"request")
                assert accepted.recv(10) == b"request"
                accepted.sendall(b"response")
                assert early.recv(10) == b"response"
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()
            listener.close()
            late.join()
            assert [type(error) for error in refused] == [ConnectionRefusedError]
