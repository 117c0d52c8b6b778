"""Requests that a server loses at SIGTERM: uvicorn alone, ours without its packet filter, and ours.

    python benchmarks/shutdown.py [--rounds 20]

Every round starts a server on loopback that answers after 5 ms, lets eight clients send requests for half a second, six
of them with a new connection per request, and sends SIGTERM. A round counts as lossy if a client's connection was reset
or a request got no response; a refused connection is no loss.
"""

import argparse
import asyncio
import http.client
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from bertsmith.serving import server as serving_server
from bertsmith.serving.settings import ServeSettings

VARIANTS = ("uvicorn alone", "ours without the filter", "ours")
CLIENTS = 8


def serve(variant: str) -> None:
    """Run one server until SIGTERM; print its port first."""
    service = SimpleNamespace(is_draining=False)

    async def answer(request: Request) -> PlainTextResponse:
        await asyncio.sleep(0.005)
        return PlainTextResponse("ok", headers={"connection": "close"} if service.is_draining else None)

    app = Starlette(routes=[Route("/", answer, methods=["POST"])])
    app.state.service = service
    listener = serving_server.bind_socket("127.0.0.1", 0)
    if variant == "uvicorn alone":
        config = uvicorn.Config(app, loop="asyncio", log_config=None, access_log=False, timeout_graceful_shutdown=20)
        server: uvicorn.Server = uvicorn.Server(config)
    else:
        if variant == "ours without the filter":
            serving_server.refuse_connections = lambda listener: None  # type: ignore[assignment]
        server = serving_server.Server(app, ServeSettings())  # type: ignore[arg-type]
    print(listener.getsockname()[1], flush=True)
    server.run([listener])


def ask_until_refused(number: int, port: int, counts: Counter[str]) -> None:
    """Send one request after the other; every fourth client keeps its connection."""
    connection: http.client.HTTPConnection | None = None
    while True:
        # a keep-alive connection that the server has closed may be opened again, as every client library does
        if connection is not None and (connection.sock is None or select.select([connection.sock], [], [], 0)[0]):
            connection.close()
            connection = None
        if connection is None or number % 4:
            if connection is not None:
                connection.close()
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            try:
                connection.connect()
            except (ConnectionRefusedError, TimeoutError):
                return
            except OSError:
                counts["lost"] += 1
                return
        try:
            connection.request("POST", "/", body=b"x" * 200)
            connection.getresponse().read()
            counts["answered"] += 1
        except (OSError, http.client.HTTPException):
            counts["lost"] += 1
            return


def shut_down_under_load(variant: str) -> Counter[str]:
    """Return answered and lost requests of one round."""
    words = [sys.executable, __file__, "--serve", variant]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    _wait_until_listening(port)
    counts: Counter[str] = Counter()
    clients = [threading.Thread(target=ask_until_refused, args=(n, port, counts)) for n in range(CLIENTS)]
    for client in clients:
        client.start()
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    for client in clients:
        client.join(30)
    process.wait(30)
    return counts


def _wait_until_listening(port: int) -> None:
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--serve", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    print("| server | shutdowns | with a lost request | requests lost | answered |\n|---|---|---|---|---|")
    for variant in VARIANTS:
        rounds = [shut_down_under_load(variant) for _ in range(options.rounds)]
        lossy, lost = sum(counts["lost"] > 0 for counts in rounds), sum(counts["lost"] for counts in rounds)
        answered = sum(counts["answered"] for counts in rounds)
        print(f"| {variant} | {len(rounds)} | {lossy} | {lost} | {answered:,} |", flush=True)


if __name__ == "__main__":
    main()
