"""Hostile clients: invalid bodies, limits, slow and broken connections."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from serving_cases import TEXTS, FakeScheduler, schedulers, serving, until, write_encoder

from bertsmith.layers.subnet import Subnet
from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import BatchFailed, DeadlineExceeded, QueueFull, RequestResult, ShuttingDown
from bertsmith.serving.settings import Limits, ServeSettings, Times
from bertsmith.text.tokenizer import Tokenizer

LIMITS = Limits(body_bytes=1_000_000, texts=8, tokens=300, masks=4, requests=4, buffered_bytes=3_000_000)
SETTINGS = ServeSettings(limits=LIMITS, times=Times(body=0.6, answer=5.0), strict_names=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("hostile") / "encoder")


@pytest.fixture(scope="module")
def served(folder: Path) -> ServedModel:
    return ServedModel.open(folder, device="cpu")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with schedulers({"encoder": folder}) as models, serving(models, SETTINGS) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    """A client; the service must still answer after the test."""
    with httpx.Client(base_url=url, timeout=20) as opened:
        yield opened
        until(lambda: opened.post("/embed", json={"inputs": TEXTS}).status_code == 200, 3)


def _check_rejected(response: httpx.Response, status: int, *words: str) -> None:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error", "error_type"}
    for word in words:
        assert word in response.json()["error"]


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (b'{"inputs": ["a"', 400, "not valid JSON"),
        (b"", 422, "required"),
        (b"null", 422, "body"),
        (b"[1]", 422, "body"),
        (b'{"inputs": "a", "dimensions": NaN}', 400, "not valid JSON"),
        (b'{"inputs": "half \\ud800 a pair"}', 400, "not valid JSON"),
        (b'{"inputs": "\xff\xfe"}', 400, "not valid JSON"),
        (b"[" * 300_000, 400, "recursion"),
        (b'{"inputs": ' + b"[" * 150 + b"]" * 150 + b"}", 422, "inputs"),
        (b'{"inputs": [' + b"9" * 5000 + b"]}", 400, "number"),
        (b'{"inputs": [-1]}', 422, "token id -1"),
        (b'{"inputs": [123456789012345678901234567890]}', 422, "token id"),
        (b'{"inputs": [1.5]}', 422, "inputs"),
        (b'{"inputs": ["a", 1]}', 422, "inputs"),
        (b'{"inputs": [], "model": "encoder"}', 422, "empty"),
        (b'{"inputs": [[]]}', 200, ""),
        (b'{"inputs": [5.0, 6]}', 200, ""),
        (b'{"inputs": [true]}', 422, "inputs"),
        (b'{"inputs": "a", "model": "../../etc/passwd"}', 404, "encoder"),
        (b'{"inputs": "a", "model": "\\u0000"}', 404, "encoder"),
        (b'{"inputs": "a", "dimensions": 0}', 422, "dimensions"),
        (b'{"inputs": "a", "dimensions": 1e400}', 422, "dimensions"),
        (b'{"inputs": "a", "normalize": "yes"}', 422, "normalize"),
        (b'{"inputs": "a", "pickle": "x"}', 422, "'pickle' is not a field"),
        (b'{"inputs": "a", "truncation_direction": "left"}', 422, "truncation_direction"),
    ],
)
def test_invalid_bodies_are_rejected(client: httpx.Client, body: bytes, status: int, word: str) -> None:
    response = client.post("/embed", content=body, headers={"Content-Type": "application/json"})
    if status == 200:
        assert response.status_code == 200
    else:
        _check_rejected(response, status, word)


def test_many_invalid_items_are_rejected_at_the_first(client: httpx.Client) -> None:
    many = b"null," * 190_000
    for body in (b'{"inputs": [' + many + b"0]}", b'{"inputs": [[' + many + b"0]]}"):
        assert len(body) > 900_000
        started_at = time.process_time()
        _check_rejected(
            client.post("/embed", content=body, headers={"Content-Type": "application/json"}), 422, "inputs"
        )
        assert time.process_time() - started_at < 2  # an error for every item took ten times as long
    fields = json.dumps({"inputs": dict.fromkeys(map(str, range(300)))})
    _check_rejected(
        client.post("/predict", content=fields, headers={"Content-Type": "application/json"}), 413, "256 fields"
    )


def test_deadline_includes_tokenisation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Tokenizer._encode

    def slow(self: Tokenizer, inputs: Any, **settings: Any) -> Any:
        time.sleep(1.5 if len(inputs[0]) > 300 else 0)
        return encode(self, inputs, **settings)

    settings = ServeSettings(times=Times(answer=0.5))
    with schedulers({"encoder": folder}) as models, serving(models, settings) as address:
        # a body that is not parsed in time, because other requests occupy the threads
        with monkeypatch.context() as patch:
            patch.setattr("bertsmith.serving.http.service._parse", lambda body: time.sleep(1.5))
            _check_rejected(
                httpx.post(f"{address}/embed", json={"inputs": ["no " * 1200]}), 503, "not processed in time"
            )
        monkeypatch.setattr(Tokenizer, "_encode", slow)
        started_at = time.monotonic()
        late = httpx.post(f"{address}/embed", json={"inputs": ["no " * 1200]}, timeout=20)
        _check_rejected(late, 503, "not processed in time")
        assert time.monotonic() - started_at < 1.4
        assert httpx.post(f"{address}/embed", json={"inputs": "no"}).status_code == 200


def test_only_json_is_accepted(client: httpx.Client) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a"):
        response = client.post("/embed", content=b'{"inputs": "a"}', headers={"Content-Type": kind})
        assert 400 <= response.status_code < 500
    _check_rejected(
        client.post("/embed_sparse", json={"inputs": "a"}), 404, "'/embed_sparse' is not an endpoint", "/docs"
    )
    assert client.get("/embed").status_code == 405
    assert client.get("/embed").headers["Allow"] == "POST"


def test_unusual_characters_are_accepted(client: httpx.Client) -> None:
    odd = ["\x00\x00", "a\x00b", "", " ", "\ufeff\u202e", "🙂" * 20, "\U0010ffff", "e\u0301" * 30, "[CLS] [SEP] [PAD]"]
    for start in range(0, len(odd), 8):
        texts = odd[start : start + 8]
        response = client.post("/embed", json={"inputs": texts})
        assert (response.status_code, len(response.json())) == (200, len(texts))


def test_long_bodies_are_rejected_while_reading(client: httpx.Client) -> None:
    whole = json.dumps({"inputs": "a " * 5_000_000}).encode()
    assert len(whole) > 10_000_000
    headers = {"Content-Type": "application/json"}
    _check_rejected(client.post("/embed", content=whole, headers=headers), 413, "1000000 bytes")
    chunks = (whole[start : start + 65_536] for start in range(0, len(whole), 65_536))
    _check_rejected(client.post("/embed", content=chunks, headers=headers), 413, "1000000 bytes")


def test_wrong_content_length_is_rejected(url: str, client: httpx.Client) -> None:
    for length, status in (("9999999999", b" 413 "), ("9" * 23, b" 400 "), ("-1", b" 400 ")):
        with _connect(url) as connection:
            connection.sendall(_head("/embed", f"Content-Length: {length}", "Expect: 100-continue"))
            assert status in _read_all(connection)


def test_limits_on_texts_and_tokens(client: httpx.Client) -> None:
    _check_rejected(client.post("/embed", json={"inputs": ["a"] * 9}), 413, "9 texts", "at most 8")
    long = "no " * 100_000
    _check_rejected(client.post("/embed", json={"inputs": long}), 413, "more than 48 tokens", "truncate: true")
    assert client.post("/embed", json={"inputs": long, "truncate": True}).status_code == 200
    ids = {"inputs": [[5] * 100_000]}
    _check_rejected(client.post("/embed", json=ids), 413, "100000 token ids")
    assert client.post("/embed", json={**ids, "truncate": True}).status_code == 200
    _check_rejected(client.post("/embed", json={"inputs": ["no " * 46] * 8}), 413, "384 tokens", "at most 300")
    _check_rejected(client.post("/fill-mask", json={"inputs": "[MASK] " * 5}), 413, "5 masks", "at most 4")
    _check_rejected(client.post("/fill-mask", json={"inputs": "none"}), 422, "no [MASK]")
    _check_rejected(client.post("/tokenize", json={"inputs": "no " * 400}), 413, "301 tokens", "at most 300")
    _check_rejected(client.post("/tokenize", json={"inputs": long}), 413, "300000 characters", "at most 2400")
    _check_rejected(client.post("/predict", json={"inputs": "a"}), 422, "cannot predict", "it can fill masks, embed")
    _check_rejected(client.post("/rerank", json={"query": long, "texts": ["a"]}), 413, "tokens")
    assert client.post("/rerank", json={"query": "a", "texts": ["b"] * 8}).status_code == 200
    _check_rejected(client.post("/rerank", json={"query": "a", "texts": ["b"] * 9}), 413, "9 texts")


def test_scheduler_errors_become_statuses(served: ServedModel) -> None:
    scheduler = FakeScheduler(served)
    with serving({"encoder": scheduler}) as address, httpx.Client(base_url=address) as client:

        def raised(error: Exception) -> httpx.Response:
            scheduler.does = lambda *_: error
            return client.post("/embed", json={"inputs": "a"})

        busy = raised(QueueFull(2.3))
        _check_rejected(busy, 429, "the queue is full; try again in 3 s")
        assert busy.headers["Retry-After"] == "3"
        late = raised(DeadlineExceeded("the model did not answer within 5 s"))
        _check_rejected(late, 503, "5 s")
        assert late.headers["Retry-After"] == "1"
        _check_rejected(raised(ShuttingDown()), 503, "shutting down")
        _check_rejected(raised(BatchFailed("secret")), 500, "the model failed")
        unknown = raised(RuntimeError("a path such as /secret"))
        _check_rejected(unknown, 500, "see its log")
        assert "secret" not in unknown.text


def test_headers_have_the_size_of_the_network(served: ServedModel) -> None:
    small = Subnet(width=0.5, depth=0.25)
    scheduler = FakeScheduler(
        served, lambda operation, sequences, _: RequestResult([np.ones(4)] * len(sequences), small, 0.002, 0.001)
    )
    with serving({"encoder": scheduler}) as address:
        headers = httpx.post(f"{address}/embed", json={"inputs": ["a", "b"]}).headers
        assert (headers["X-Bertsmith-Width"], headers["X-Bertsmith-Depth"]) == ("0.5", "0.25")
        assert (headers["X-Queue-Time"], headers["X-Inference-Time"]) == ("2.000", "1.000")
        counted = 'bertsmith_calls_by_size_total{depth="0.25",model="encoder",width="0.5"} 1.0'
        assert counted in httpx.get(f"{address}/metrics").text


def test_non_finite_output_returns_500(served: ServedModel) -> None:
    broken = FakeScheduler(
        served,
        lambda operation, sequences, _: RequestResult([np.array([np.nan, 1.0])] * len(sequences), None, 0.0, 0.0),
    )
    with serving({"encoder": broken}) as address:
        _check_rejected(httpx.post(f"{address}/embed", json={"inputs": "a"}), 500, "returned non-finite values")


def test_key_is_required_except_for_health(served: ServedModel) -> None:
    scheduler = FakeScheduler(served, lambda *_: ShuttingDown())
    with (
        serving({"encoder": scheduler}, ServeSettings(key="right")) as address,
        httpx.Client(base_url=address) as client,
    ):
        assert client.get("/health").status_code == 200
        for path in ("/metrics", "/info", "/docs", "/openapi.json", "/v1/models"):
            _check_unauthorized(client.get(path))
            assert client.get(path, headers={"Authorization": "bearer right"}).status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic right"},
            {"Authorization": "right"},
        ):
            for path in ("/embed", "/", "/v1/embeddings", "/models/encoder"):
                _check_unauthorized(client.post(path, json={"inputs": "a"}, headers=headers))
        document = client.get("/openapi.json", headers={"Authorization": "Bearer right"}).json()
        assert document["security"] == [{"key": []}]
        odd = client.post("/embed", json={}, headers={b"Authorization": "Bearer ä".encode()})
        _check_unauthorized(odd)


def _check_unauthorized(response: httpx.Response) -> None:
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"


def _connect(url: str) -> socket.socket:
    split = urlsplit(url)
    return socket.create_connection((str(split.hostname), int(split.port or 0)), timeout=10)


def _head(path: str, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers, "", ""]
    return "\r\n".join(lines).encode()


def _read_all(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    received = b""
    while chunk := connection.recv(65_536):
        received += chunk
    return received


def test_long_heads_are_rejected(url: str, client: httpx.Client) -> None:
    value = b"a" * 70_000
    heads = [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + value + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + value,  # never ends
        b"GET /" + value + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-Many: 1\r\n" * 8000 + b"\r\n",
    ]
    for head in heads:
        with _connect(url) as connection:
            connection.sendall(head)
            assert _read_all(connection).startswith(b"HTTP/1.1 431 ")
    assert client.get("/health", headers={"X-Long": "a" * 60_000}).status_code == 200


def test_idle_connections_give_way_to_new_ones(url: str, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertsmith.serving.connections._MIN_SILENCE", 0.0)
    with ExitStack() as stack:
        idle = [stack.enter_context(_connect(url)) for _ in range(12)]  # the limit of one address is 8
        with httpx.Client(base_url=url) as other:
            assert other.post("/embed", json={"inputs": "a"}).status_code == 200
        with suppress(ConnectionResetError):
            assert idle[0].recv(1) == b""  # the oldest was closed


def test_probes_are_answered_while_all_connections_are_busy(url: str, client: httpx.Client) -> None:
    with ExitStack() as stack:
        for _ in range(8):  # the limit of one address
            busy = stack.enter_context(_connect(url))
            busy.sendall(_head("/embed", "Content-Length: 100"))
        until(lambda: httpx.post(f"{url}/embed", json={"inputs": "a"}).status_code == 503, 3)
        assert httpx.get(f"{url}/health").status_code == 200


def test_requests_without_the_key_are_not_counted(folder: Path) -> None:
    settings = ServeSettings(key="secret", limits=Limits(requests=2), times=Times(body=3.0))
    with schedulers({"encoder": folder}) as models, serving(models, settings) as address, ExitStack() as stack:
        for _ in range(3):
            slow = stack.enter_context(_connect(address))
            slow.sendall(_head("/embed", "Content-Length: 100"))
        headers = {"Authorization": "Bearer secret"}
        assert httpx.post(f"{address}/embed", json={"inputs": "a"}, headers=headers).status_code == 200


def test_names_of_other_hosts_are_rejected_on_loopback(url: str, folder: Path, client: httpx.Client) -> None:
    for name in ("example.org", "127.example.org", "localhost.example.org:80", "10.0.0.1", "[::2]:80"):
        response = client.get("/health", headers={"Host": name})
        _check_rejected(response, 403, "Host is", "--allow-host")
    for name in ("localhost", "LOCALHOST:80", "127.0.0.1:80", "127.1.2.3", "[::1]:80", "[::1]"):
        assert client.get("/health", headers={"Host": name}).status_code == 200, name
    for settings in (ServeSettings(allowed_hosts=("example.org",)), ServeSettings(key="secret")):
        with schedulers({"encoder": folder}) as models, serving(models, settings) as address:
            assert httpx.get(f"{address}/health", headers={"Host": "example.org:80"}).status_code == 200


def test_slow_body_times_out(url: str, client: httpx.Client) -> None:
    started_at = time.monotonic()
    with _connect(url) as connection:
        connection.sendall(_head("/embed", "Content-Length: 100") + b'{"inp')
        assert b" 408 " in _read_all(connection)
    with _connect(url) as connection:  # a byte now and then
        connection.sendall(_head("/embed", "Transfer-Encoding: chunked"))
        for _ in range(4):
            connection.sendall(b"1\r\n[\r\n")
            time.sleep(0.2)
        assert b" 408 " in _read_all(connection)
    assert time.monotonic() - started_at < 8


def test_slow_header_times_out(url: str, client: httpx.Client) -> None:
    started_at = time.monotonic()
    connections = [_connect(url) for _ in range(3)]
    connections[0].sendall(b"POST /embed HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
    connections[1].sendall(b"P")
    for connection in connections:
        with connection:
            assert _read_all(connection) == b""
    with _connect(url) as connection:  # the second request of a connection as well
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        until(lambda: connection.recv(65_536, socket.MSG_PEEK))
        connection.sendall(b"GET /hea")
        assert _read_all(connection).count(b"HTTP/1.1 ") == 1
    assert time.monotonic() - started_at < 6


def test_disconnected_clients_are_dropped(url: str, client: httpx.Client) -> None:
    body = json.dumps({"inputs": TEXTS}).encode()
    whole = _head("/embed", f"Content-Length: {len(body)}") + body
    for end in (1, 30, len(whole) - 5, len(whole)):
        for _ in range(5):
            connection = _connect(url)
            connection.sendall(whole[:end])
            connection.close()
    until(lambda: _gauge(client, "bertsmith_waiting_sequences") == 0)


def _gauge(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def test_concurrent_requests_are_limited(served: ServedModel) -> None:
    release = threading.Event()
    scheduler = FakeScheduler(served, lambda *_: _wait(release, RequestResult([np.ones(4)], None, 0.0, 0.0)))
    settings = ServeSettings(limits=Limits(requests=2))
    with (
        serving({"encoder": scheduler}, settings) as address,
        httpx.Client(base_url=address, timeout=20) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        slow = _connect(address)  # a body that does not arrive takes no place
        slow.sendall(_head("/embed", "Content-Length: 100"))
        running = [pool.submit(httpx.post, f"{address}/embed", json={"inputs": "a"}, timeout=20) for _ in range(2)]
        until(lambda: client.post("/predict", json={"inputs": "a"}).status_code == 429, 5)
        scheduler.waits = 3.4
        rejected = client.post("/embed", json={"inputs": "a"})
        _check_rejected(rejected, 429, "too many requests", "try again in 4 s")
        assert (rejected.headers["Retry-After"], rejected.headers.get("Connection")) == ("4", None)  # stays open
        assert client.get("/health").status_code == 200
        assert 'requests_total{endpoint="/embed",status="429"}' in client.get("/metrics").text
        release.set()
        assert [one.result().status_code for one in running] == [200, 200]
        slow.close()
        assert client.post("/embed", json={"inputs": "a"}).status_code == 200


async def _wait(release: threading.Event, result: RequestResult) -> RequestResult:
    while not release.is_set():
        await asyncio.sleep(0.01)
    return result


def test_bytes_in_memory_are_limited(folder: Path) -> None:
    limits = Limits(body_bytes=1_000_000, buffered_bytes=1_500_000)
    settings = ServeSettings(limits=limits, times=Times(body=3.0))
    with (
        schedulers({"encoder": folder}) as models,
        serving(models, settings) as address,
        _connect(address) as connection,
    ):
        connection.sendall(_head("/embed", "Content-Length: 1000000") + b" " * 999_000)
        body = b" " * 900_000 + b'{"inputs": "a"}'
        headers = {"Content-Type": "application/json"}
        responses = []

        def is_rejected() -> bool:
            responses.append(httpx.post(f"{address}/embed", content=body, headers=headers))
            return responses[-1].status_code == 429

        until(is_rejected, 3)
        connection.close()
        until(lambda: httpx.post(f"{address}/embed", content=body, headers=headers).status_code == 200)
