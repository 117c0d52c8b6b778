"""The commands and Python blocks of every tutorial and of the README run in the order in which they stand."""

import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from bertsmith.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
BLOCK = re.compile(r"(?<!<!-- not run -->\n)^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TINY = (
    "--set sequences.length=32 --set sequences.micro_tokens=512 --set batch.tokens=512 --set run.workers=0 "
    "--set run.compile=off"
)
NAMED = f"{TINY} --set batch.ramp_from=512 --set phases=[]"
NETWORK = "--set model.overrides={width=32,layers=2,heads=2,embedding_width=16,max_length=64}"
SHORTER = {
    "electra-small:crammed": f"electra-small:crammed {NETWORK} {NAMED}",
    "continue-small": f"continue-small {TINY}",
    "--budget 10min": "--set run.steps=2",
    "bert-mini modern-small": f"bert-tiny bert-mini {NAMED} --set model.overrides={{width=32,layers=1,heads=2}}",
    "--budget 1M": "--budget 1k",
}
"""Replacements in commands that would take minutes."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs(page: Path, workplace: Path) -> None:
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    services: list[subprocess.Popen[bytes]] = []
    port = free_port()
    try:
        for language, code in blocks:
            if language == "python":
                exec(compile(code, str(page), "exec"), names)
                continue
            for line in code.replace("8080", str(port)).splitlines():
                print("$", line)
                if line.endswith(" &"):
                    services.append(start_service(line, port))
                else:
                    run_command(line)
    finally:
        for service in services:
            service.terminate()
            service.wait()
    assert blocks


def run_command(line: str) -> None:
    for command, shorter in SHORTER.items():
        line = line.replace(command, shorter)
    program, *words = shlex.split(line)
    if program == "bertsmith":
        main(words)
    else:
        assert program == "curl"
        subprocess.run([program, "--fail", *words], check=True)


def start_service(line: str, port: int) -> subprocess.Popen[bytes]:
    program, *words = shlex.split(line.removesuffix("&"))
    assert program == "bertsmith"
    service = subprocess.Popen([sys.executable, "-m", "bertsmith", *words])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and service.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
            return service
        except urllib.error.URLError:
            time.sleep(0.1)
    service.kill()
    raise AssertionError("the service did not start")


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
