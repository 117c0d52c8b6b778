"""Measurements survive crashes and are reused."""

from pathlib import Path

import pytest

from bertsmith.errors import InputError
from bertsmith.shrinking.fit.store import MEASUREMENTS, Measurements, cache_file, earlier_file


def refuse() -> dict:
    raise AssertionError("measured again")


def test_each_key_is_measured_once(tmp_path: Path) -> None:
    file, copy = tmp_path / MEASUREMENTS, tmp_path / "cache" / MEASUREMENTS
    first = Measurements(file, copies=[copy])
    key = {"engine": "torch", "subnet": {"width": 0.5}}
    assert first.get_or_measure(key, lambda: {"p50": 0.1 + 0.2}) == {"p50": 0.1 + 0.2}
    assert first.get_or_measure(dict(reversed(key.items())), refuse) == {"p50": 0.1 + 0.2}
    assert first.taken == 1
    for store in (Measurements(file), Measurements(tmp_path / "other", earlier=[copy])):
        assert store.get_or_measure(key, refuse) == {"p50": 0.1 + 0.2}
        assert store.taken == 0
    assert Measurements(file).get({**key, "engine": "other"}) is None


@pytest.mark.parametrize("length", range(1, 40, 6))
def test_truncated_line_loses_only_one_measurement(tmp_path: Path, length: int) -> None:
    file = tmp_path / MEASUREMENTS
    store = Measurements(file)
    store.get_or_measure({"number": 1}, lambda: {"value": 1})
    whole = file.read_bytes()
    store.get_or_measure({"number": 2}, lambda: {"value": 2})
    file.write_bytes(whole + file.read_bytes()[len(whole) :][:length])
    again = Measurements(file)
    assert again.get({"number": 1}) == {"value": 1}
    assert again.get({"number": 2}) is None
    again.get_or_measure({"number": 2}, lambda: {"value": 2})
    assert Measurements(file).get({"number": 2}) == {"value": 2}
    assert Measurements(file).get({"number": 1}) == {"value": 1}


def test_cache_file_respects_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file() == tmp_path / "bertsmith" / MEASUREMENTS


def test_unwritable_cache_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    store = Measurements(tmp_path / MEASUREMENTS, copies=[tmp_path / "taken" / MEASUREMENTS])
    assert store.get_or_measure({"number": 1}, lambda: {"value": 1}) == {"value": 1}


def test_missing_measurements_raise(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no measurements\.jsonl"):
        earlier_file(tmp_path)
    (tmp_path / MEASUREMENTS).touch()
    assert earlier_file(tmp_path) == earlier_file(tmp_path / MEASUREMENTS) == tmp_path / MEASUREMENTS
