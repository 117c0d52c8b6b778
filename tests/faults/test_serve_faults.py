"""`bertsmith serve` as a process: invalid arguments, and a graceful shutdown that loses no request."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

import bertsmith
from bertsmith.cli import main
from bertsmith.models.build import build
from bertsmith.models.published import preset
from bertsmith.text.learn import learn_tokenizer

TEXTS = [f"the smith forges {'an iron gate ' * count}" for count in range(1, 9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "encoder"
    tokenizer = learn_tokenizer(TEXTS * 2, "wordpiece", 200, progress=False)
    sizes = {"layers": 2, "width": 32, "heads": 2, "vocabulary": tokenizer.size, "max_length": 64, "init_std": 0.3}
    model = build(preset("bert-tiny", **sizes), seed=0)
    model.tokenizer = tokenizer
    bertsmith.save(model, path)
    return path


@contextmanager
def _served(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server; yield its process and URL."""
    command = [sys.executable, "-m", "bertsmith", "serve", *arguments, "--port", "0", "--threads", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, bufsize=1
    )
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        assert first.startswith("Listening on http://127.0.0.1:"), process.communicate()
        yield process, first.split()[2]
    finally:
        process.kill()
        process.communicate()


class _Clients:
    """Client threads that send requests in a loop and check the responses until the server is gone."""

    def __init__(self, url: str, vectors: np.ndarray) -> None:
        self.url, self.vectors = url, vectors
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(8)]
        for thread in self.threads:
            thread.start()

    def _ask(self, number: int) -> None:
        order = np.random.default_rng(number)
        client = httpx.Client(base_url=self.url, timeout=30)
        for turn in range(100_000):
            if number % 2 and turn % 3 == 0:  # some open a connection for every few requests
                client.close()
                client = httpx.Client(base_url=self.url, timeout=30)
            chosen = order.integers(0, len(TEXTS), 16)
            try:
                answer = client.post("/embed", json={"inputs": [TEXTS[index] for index in chosen], "normalize": False})
            except httpx.ConnectError:
                break  # the server accepts no connections any more
            except httpx.HTTPError as error:
                self.counts["lost"] += 1
                self.wrong.append(repr(error))
                break
            self.counts[str(answer.status_code)] += 1
            if answer.status_code == 200 and np.abs(np.array(answer.json()) - self.vectors[chosen]).max() > 1e-4:
                self.wrong.append("the answer to another request")
        client.close()

    def end(self) -> None:
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_under_load_loses_no_request(folder: Path, number: signal.Signals) -> None:
    vectors = bertsmith.load(folder).encode(TEXTS).numpy()
    with _served(str(folder)) as (process, url):
        clients = _Clients(url, vectors)
        end = time.monotonic() + 20
        while clients.counts["200"] < 40 and time.monotonic() < end:
            time.sleep(0.02)
        before = clients.counts["200"]
        process.send_signal(number)
        assert process.wait(20) == 0
        clients.end()
    assert clients.wrong == []
    assert set(clients.counts) == {"200"}
    assert clients.counts["200"] > before >= 40  # requests in flight were answered


@pytest.mark.slow
def test_signal_under_load_loses_no_request_ten_times(folder: Path) -> None:
    for _ in range(10):
        test_signal_under_load_loses_no_request(folder, signal.SIGTERM)


@pytest.mark.slow
def test_second_signal_stops_immediately(folder: Path) -> None:
    with _served(str(folder), "--drain-delay", "0.5") as (process, url):
        address = urlsplit(url)
        with socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=10) as line:
            body = json.dumps({"inputs": TEXTS}).encode()
            lines = (
                "POST /embed HTTP/1.1",
                "Host: 127.0.0.1",
                "Content-Type: application/json",
                f"Content-Length: {len(body)}",
            )
            line.sendall("\r\n".join((*lines, "", "")).encode() + body[:5])
            assert httpx.get(f"{url}/health").json() == {"status": "ready"}
            process.send_signal(signal.SIGTERM)
            end = time.monotonic() + 5
            while httpx.get(f"{url}/health").status_code == 200 and time.monotonic() < end:
                time.sleep(0.02)
            draining = httpx.get(f"{url}/health")
            assert (draining.status_code, draining.json()) == (503, {"status": "draining"})
            late = httpx.post(f"{url}/embed", json={"inputs": TEXTS})  # still accepted during the delay
            assert (late.status_code, late.headers["Connection"]) == (200, "close")
            time.sleep(1.2)
            assert process.poll() is None  # it waits for the rest of the body
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert process.wait(10) == 128 + signal.SIGTERM
            assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "model folder 'none' does not exist"),
        (["{empty}"], "has no config.json"),
        (["{folder}", "{folder}"], "two models are called 'encoder'; name them"),
        (["/={folder}"], "the name of a model is '/'"),
        (["{folder}", "--port", "{taken}"], "Address already in use; choose others with --host and --port"),
        (["{folder}", "--port", "70000"], "port is 70000"),
        (["{folder}", "--host", "256.1.1.1"], "cannot listen on 256.1.1.1"),
        (["{folder}", "--timeout", "0"], "times.answer is 0"),
        (["{folder}", "--max-texts", "0"], "limits.texts is 0"),
        (["{folder}", "--floor", "2"], "floor is 2"),
        (["{folder}", "--floor", "0.9", "--no-elastic"], "--no-elastic and --floor 0.9"),
        (["{folder}", "--elastic"], "no model has a smaller size"),
        (["{folder}", "--key-file", "none"], "--key-file 'none' cannot be read: No such file"),
        (["{folder}", "--key-file", "{blank}"], "is not a valid key"),
    ],
)
def test_invalid_arguments_are_reported(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.delenv("BERTSMITH_KEY", raising=False)
    (tmp_path / "blank").write_text(" \n")
    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"folder": folder, "empty": tmp_path / "empty", "blank": tmp_path / "blank"}
        port = taken.getsockname()[1]
        flags = [argument.format(**names, taken=port) for argument in arguments]
        with pytest.raises(SystemExit) as exit_info:
            main(["serve", *flags, *([] if "--port" in flags else ["--port", "0"])])
    assert exit_info.value.code == 2
    output = capsys.readouterr().err
    assert message in output
    assert len(output.splitlines()) == 1
