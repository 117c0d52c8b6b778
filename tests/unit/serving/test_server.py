"""The socket a service listens on: from bound to closed, nobody is taken in and then left without an answer."""

import socket
import sys
import threading

import pytest

from bertsmith.errors import InputError
from bertsmith.serving.server import _refuse, address, bound


def test_who_comes_too_early_is_refused_and_the_port_is_taken() -> None:
    with bound("127.0.0.1", 0) as listener:
        where = listener.getsockname()
        assert address(listener) == f"http://127.0.0.1:{where[1]}"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(where, timeout=5)
        listener.listen()
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1 port {where[1]}: Address already in use"):
            bound("127.0.0.1", where[1])


@pytest.mark.skipif(sys.platform != "linux", reason="a filter on a socket is Linux's")
def test_who_waits_at_the_end_is_taken_in_and_who_comes_then_is_refused() -> None:
    with bound("127.0.0.1", 0) as listener:
        listener.listen()
        listener.settimeout(5)
        where = listener.getsockname()
        with socket.create_connection(where, timeout=5) as early:
            _refuse(listener)
            refused: list[Exception] = []

            def come() -> None:
                try:
                    socket.create_connection(where, timeout=10).close()
                except OSError as error:
                    refused.append(error)

            late = threading.Thread(target=come)
            late.start()
            taken, _ = listener.accept()
            with taken:
                early.sendall(b"asked")
                assert taken.recv(10) == b"asked"
                taken.sendall(b"answered")
                assert early.recv(10) == b"answered"
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()
            listener.close()
            late.join()
            assert [type(error) for error in refused] == [ConnectionRefusedError]
