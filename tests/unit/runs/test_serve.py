"""`bertsmith.serve` from Python."""

import os
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest

import bertsmith
from bertsmith.models.build import build
from bertsmith.models.published import preset
from bertsmith.runs.serve import serve
from bertsmith.serving import server as process
from bertsmith.text.learn import learn_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = learn_tokenizer(["the smith forges an iron gate"] * 2, "wordpiece", 100, progress=False)
    model = build(preset("bert-tiny", layers=1, width=16, heads=2, vocabulary=tokenizer.size, max_length=16), seed=0)
    model.tokenizer = tokenizer
    bertsmith.save(model, tmp_path / "encoder")
    return tmp_path / "encoder"


def test_serve_is_exported() -> None:
    assert bertsmith.serve is serve
    assert bertsmith.serving.server is process


def test_serves_until_a_signal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BERTSMITH_KEY", "from-the-environment")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers: list[int] = []

    def send_request() -> None:
        transport = httpx.HTTPTransport(retries=20)  # until it listens
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=20) as client:
                for key in ("wrong", "from-the-environment"):
                    body = {"inputs": ["the gate"], "model": "mine"}
                    answer = client.post("/embed", json=body, headers={"Authorization": f"Bearer {key}"})
                    answers.append(answer.status_code)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=send_request)
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the service did not start"))
    try:
        thread.start()
        assert bertsmith.serve([f"mine={folder}", f"two={folder}"], port=port, device="cpu", workers=1) is None
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, before)
    assert answers == [401, 200]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"Listening on http://127.0.0.1:{port}")
    assert lines[1:] == [
        f"  {name}: bert; mask filling, embeddings; up to 16 tokens; one size; float32 on cpu"
        for name in ("mine", "two")
    ]
