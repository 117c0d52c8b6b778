"""Turns of several benchmarks on one device."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from turns import Turn

STOPPED = "T"


@pytest.fixture
def other() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for(process: int, *, stopped: bool) -> None:
    """Wait until the state is as expected: signals arrive a little later."""
    until = time.monotonic() + 10
    while (state_of(process) == STOPPED) != stopped:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_other_processes_are_stopped_during_a_turn(other: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    with Turn(str(tmp_path / "turn"), [other.pid], device="cpu"):
        wait_for(other.pid, stopped=True)
    wait_for(other.pid, stopped=False)


def test_error_ends_the_turn(other: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    turn = Turn(str(tmp_path / "turn"), [other.pid], device="cpu")

    def fail() -> None:
        with turn.ended():
            turn.begin()
            wait_for(other.pid, stopped=True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    wait_for(other.pid, stopped=False)


def test_process_that_has_ended_is_ignored(other: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    other.kill()
    other.wait()
    with Turn(str(tmp_path / "turn"), [other.pid], device="cpu"):
        pass


def test_second_turn_waits_for_the_first(tmp_path: Path) -> None:
    first, second = (Turn(str(tmp_path / "turn"), device="cpu") for _ in range(2))
    first.begin()
    thread = threading.Thread(target=second.begin)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    first.end()
    thread.join(10)
    assert not thread.is_alive()
    assert second.waited >= 0.1
    second.end()


def test_turn_without_file_and_processes_does_nothing() -> None:
    with Turn(device="cuda") as turn:
        assert turn.waited == 0
