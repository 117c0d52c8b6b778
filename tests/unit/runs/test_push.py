"""push uploads a folder with a complete card, to a hub that runs in this test."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bertsmith.errors import InputError
from bertsmith.runs.push import push

pytest.importorskip("huggingface_hub")


class Hub(BaseHTTPRequestHandler):
    """The three requests of an upload."""

    files: ClassVar[dict[str, bytes]] = {}

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/repos/create"):
            self.answer({"url": f"http://{self.headers['Host']}/me/model", "name": "me/model"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            self.answer({"files": modes})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    Hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer(
                {
                    "success": True,
                    "commitOid": "1" * 40,
                    "commitUrl": f"http://{self.headers['Host']}/me/model/commit/{'1' * 40}",
                }
            )
        else:
            self.answer({"endpoints": []})

    def do_GET(self) -> None:
        self.answer({"id": "me/model", "sha": "1" * 40, "siblings": [], "endpoints": []})

    def answer(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield Hub.files
    server.shutdown()
    server.server_close()


def export(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / ".bertsmith").touch()
    (folder / "README.md").write_text("---\nlibrary_name: onnx\n---\n# A\n\nNo licence is stated. Add one.\n")
    return folder


def test_folder_is_uploaded_with_its_licence(hub: dict[str, bytes], tmp_path: Path) -> None:
    result = push(export(tmp_path / "model"), "me/model", license="apache-2.0")
    assert sorted(hub) == result.files == ["README.md", "config.json"]
    assert b"license: apache-2.0" in hub["README.md"]
    assert b"No licence is stated" not in hub["README.md"]


def test_incomplete_folders_are_refused(tmp_path: Path) -> None:
    folder = export(tmp_path / "model")
    with pytest.raises(InputError, match="states no licence; give --license"):
        push(folder, "me/model")
    with pytest.raises(InputError, match="allowed: USER/NAME"):
        push(folder, "model", license="mit")
    (folder / "README.md").unlink()
    with pytest.raises(InputError, match="has no model card"):
        push(folder, "me/model", license="mit")
