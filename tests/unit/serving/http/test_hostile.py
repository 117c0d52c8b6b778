"""Hostile clients: invalid bodies, limits, slow and broken connections."""

import json
import socket
import time
from collections.abc import Iterator
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

LIMITS = Limits(body_bytes=1_000_000, texts=8, tokens=300, masks=4, requests=4, held_bytes=3_000_000)
SETTINGS = ServeSettings(limits=LIMITS, times=Times(body=0.6, answer=5.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("hostile") / "encoder")


@pytest.fixture(scope="module")
def served(folder: Path) -> ServedModel:
    return ServedModel.open(folder, device="cpu")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with schedulers({"encoder": folder}) as models, serving(models, SETTINGS) as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    """A client of a service that must still answer at the end of the test."""
    with httpx.Client(base_url=url, timeout=20) as found:
        yield found
        until(lambda: found.post("/embed", json={"inputs": TEXTS}).status_code == 200, 3)


def _rejected(answer: httpx.Response, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error", "error_type"}
    for word in words:
        assert word in answer.json()["error"]


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
    answer = client.post("/embed", content=body, headers={"Content-Type": "application/json"})
    if status == 200:
        assert answer.status_code == 200
    else:
        _rejected(answer, status, word)


def test_only_json_is_accepted(client: httpx.Client) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a"):
        answer = client.post("/embed", content=b'{"inputs": "a"}', headers={"Content-Type": kind})
        assert 400 <= answer.status_code < 500
    assert client.get("/embed").status_code == 405
    assert client.get("/embed").headers["Allow"] == "POST"


def test_unusual_characters_are_accepted(client: httpx.Client) -> None:
    odd = ["\x00\x00", "a\x00b", "", " ", "\ufeff\u202e", "🙂" * 20, "\U0010ffff", "e\u0301" * 30, "[CLS] [SEP] [PAD]"]
    for start in range(0, len(odd), 8):
        texts = odd[start : start + 8]
        answer = client.post("/embed", json={"inputs": texts})
        assert (answer.status_code, len(answer.json())) == (200, len(texts))


def test_long_bodies_are_rejected_while_reading(client: httpx.Client) -> None:
    whole = json.dumps({"inputs": "a " * 5_000_000}).encode()
    assert len(whole) > 10_000_000
    headers = {"Content-Type": "application/json"}
    _rejected(client.post("/embed", content=whole, headers=headers), 413, "1000000 bytes")
    pieces = (whole[start : start + 65_536] for start in range(0, len(whole), 65_536))
    _rejected(client.post("/embed", content=pieces, headers=headers), 413, "1000000 bytes")


def test_wrong_content_length_is_rejected(url: str, client: httpx.Client) -> None:
    for length, status in (("9999999999", b" 413 "), ("9" * 23, b" 400 "), ("-1", b" 400 ")):
        with _connected(url) as line:
            line.sendall(_head("/embed", f"Content-Length: {length}", "Expect: 100-continue"))
            assert status in _answer(line)


def test_limits_on_texts_and_tokens(client: httpx.Client) -> None:
    _rejected(client.post("/embed", json={"inputs": ["a"] * 9}), 413, "9 texts", "at most 8")
    long = "no " * 100_000
    _rejected(client.post("/embed", json={"inputs": long}), 413, "100002 tokens", "at most 48", "truncate: true")
    assert client.post("/embed", json={"inputs": long, "truncate": True}).status_code == 200
    ids = {"inputs": [[5] * 100_000]}
    _rejected(client.post("/embed", json=ids), 413, "100000 token ids")
    assert client.post("/embed", json={**ids, "truncate": True}).status_code == 200
    _rejected(client.post("/embed", json={"inputs": ["no " * 46] * 8}), 413, "384 tokens", "at most 300")
    _rejected(client.post("/fill-mask", json={"inputs": "[MASK] " * 5}), 413, "5 masks", "at most 4")
    _rejected(client.post("/fill-mask", json={"inputs": "none"}), 422, "no [MASK]")
    _rejected(client.post("/tokenize", json={"inputs": long}), 413, "100000 tokens")
    _rejected(client.post("/predict", json={"inputs": "a"}), 422, "cannot predict", "it can fill masks, embed")
    _rejected(client.post("/rerank", json={"query": long, "texts": ["a"]}), 413, "tokens")
    assert client.post("/rerank", json={"query": "a", "texts": ["b"] * 8}).status_code == 200
    _rejected(client.post("/rerank", json={"query": "a", "texts": ["b"] * 9}), 413, "9 texts")


def test_scheduler_errors_become_statuses(served: ServedModel) -> None:
    scheduler = FakeScheduler(served)
    with serving({"encoder": scheduler}) as own, httpx.Client(base_url=own) as client:

        def raised(error: Exception) -> httpx.Response:
            scheduler.does = lambda *_: error
            return client.post("/embed", json={"inputs": "a"})

        busy = raised(QueueFull(2.3))
        _rejected(busy, 429, "the queue is full")
        assert busy.headers["Retry-After"] == "3"
        late = raised(DeadlineExceeded("the answer was not there in 5 s"))
        _rejected(late, 503, "5 s")
        assert late.headers["Retry-After"] == "1"
        _rejected(raised(ShuttingDown()), 503, "shutting down")
        _rejected(raised(BatchFailed("secret")), 500, "the model failed")
        unknown = raised(RuntimeError("a path such as /secret"))
        _rejected(unknown, 500, "see its log")
        assert "secret" not in unknown.text


def test_headers_have_the_size_of_the_network(served: ServedModel) -> None:
    small = Subnet(width=0.5, depth=0.25)
    scheduler = FakeScheduler(
        served, lambda operation, sequences, _: RequestResult([np.ones(4)] * len(sequences), small, 0.002, 0.001)
    )
    with serving({"encoder": scheduler}) as own:
        headers = httpx.post(f"{own}/embed", json={"inputs": ["a", "b"]}).headers
        assert (headers["X-Bertsmith-Width"], headers["X-Bertsmith-Depth"]) == ("0.5", "0.25")
        assert (headers["X-Queue-Time"], headers["X-Inference-Time"]) == ("2.000", "1.000")
        counted = 'bertsmith_calls_by_size_total{depth="0.25",model="encoder",width="0.5"} 1.0'
        assert counted in httpx.get(f"{own}/metrics").text


def test_non_finite_output_returns_500(served: ServedModel) -> None:
    broken = FakeScheduler(
        served,
        lambda operation, sequences, _: RequestResult([np.array([np.nan, 1.0])] * len(sequences), None, 0.0, 0.0),
    )
    with serving({"encoder": broken}) as own:
        _rejected(httpx.post(f"{own}/embed", json={"inputs": "a"}), 500, "returned non-finite values")


def test_key_is_required_except_for_health(served: ServedModel) -> None:
    scheduler = FakeScheduler(served, lambda *_: ShuttingDown())
    with (
        serving({"encoder": scheduler}, ServeSettings(key="right")) as own,
        httpx.Client(base_url=own) as client,
    ):
        assert client.get("/health").status_code == 200
        for path in ("/metrics", "/info", "/docs", "/openapi.json", "/v1/models"):
            _key_wanted(client.get(path))
            assert client.get(path, headers={"Authorization": "bearer right"}).status_code == 200
        for given in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic right"},
            {"Authorization": "right"},
        ):
            for path in ("/embed", "/", "/v1/embeddings", "/models/encoder"):
                _key_wanted(client.post(path, json={"inputs": "a"}, headers=given))
        document = client.get("/openapi.json", headers={"Authorization": "Bearer right"}).json()
        assert document["security"] == [{"key": []}]
        odd = client.post("/embed", json={}, headers={b"Authorization": "Bearer ä".encode()})
        _key_wanted(odd)


def _key_wanted(answer: httpx.Response) -> None:
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"


def _connected(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=10)


def _head(path: str, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *more, "", ""]
    return "\r\n".join(lines).encode()


def _answer(line: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    while piece := line.recv(65_536):
        found += piece
    return found


def test_slow_body_times_out(url: str, client: httpx.Client) -> None:
    began = time.monotonic()
    with _connected(url) as line:
        line.sendall(_head("/embed", "Content-Length: 100") + b'{"inp')
        assert b" 408 " in _answer(line)
    with _connected(url) as line:  # a byte now and then
        line.sendall(_head("/embed", "Transfer-Encoding: chunked"))
        for _ in range(4):
            line.sendall(b"1\r\n[\r\n")
            time.sleep(0.2)
        assert b" 408 " in _answer(line)
    assert time.monotonic() - began < 8


def test_slow_header_times_out(url: str, client: httpx.Client) -> None:
    began = time.monotonic()
    lines = [_connected(url) for _ in range(3)]
    lines[0].sendall(b"POST /embed HTTP/1.1\r\nHost: a\r\nX-Slow: ")
    lines[1].sendall(b"P")
    for line in lines:
        with line:
            assert _answer(line) == b""
    with _connected(url) as line:  # the second request of a connection as well
        line.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        until(lambda: line.recv(65_536, socket.MSG_PEEK))
        line.sendall(b"GET /hea")
        assert _answer(line).count(b"HTTP/1.1 ") == 1
    assert time.monotonic() - began < 6


def test_disconnected_clients_are_dropped(url: str, client: httpx.Client) -> None:
    body = json.dumps({"inputs": TEXTS}).encode()
    whole = _head("/embed", f"Content-Length: {len(body)}") + body
    for end in (1, 30, len(whole) - 5, len(whole)):
        for _ in range(5):
            line = _connected(url)
            line.sendall(whole[:end])
            line.close()
    until(lambda: _gauge(client, "bertsmith_waiting_sequences") == 0)


def _gauge(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def test_concurrent_requests_are_limited(url: str, client: httpx.Client) -> None:
    lines = [_connected(url) for _ in range(LIMITS.requests)]
    try:
        for line in lines:
            line.sendall(_head("/embed", "Content-Length: 100"))  # each waits for its body
        answers: list[Any] = []
        until(lambda: answers.append(client.post("/embed", json={"inputs": "a"})) or answers[-1].status_code == 429, 3)
        _rejected(answers[-1], 429, "too many requests")
        assert answers[-1].headers["Retry-After"] == "1"
        assert client.get("/health").status_code == 200
        assert 'requests_total{endpoint="/embed",status="429"}' in client.get("/metrics").text
    finally:
        for line in lines:
            line.close()
    until(lambda: client.post("/embed", json={"inputs": "a"}).status_code == 200)


def test_bytes_in_memory_are_limited(folder: Path) -> None:
    limits = Limits(body_bytes=1_000_000, held_bytes=1_500_000)
    settings = ServeSettings(limits=limits, times=Times(body=3.0))
    with schedulers({"encoder": folder}) as models, serving(models, settings) as own, _connected(own) as line:
        line.sendall(_head("/embed", "Content-Length: 1000000") + b" " * 999_000)
        body = b" " * 900_000 + b'{"inputs": "a"}'
        headers = {"Content-Type": "application/json"}
        answers = []

        def is_refused() -> bool:
            answers.append(httpx.post(f"{own}/embed", content=body, headers=headers))
            return answers[-1].status_code == 429

        until(is_refused, 3)
        line.close()
        until(lambda: httpx.post(f"{own}/embed", content=body, headers=headers).status_code == 200)
