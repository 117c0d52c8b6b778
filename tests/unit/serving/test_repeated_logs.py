"""Log lines that repeat are written once in ten seconds."""

import logging

from bertsmith.serving.repeated_logs import RepeatedLogs


def test_repeated_lines_are_counted() -> None:
    now = 0.0
    limit = RepeatedLogs(lambda: now)

    def written(text: str, *values: object) -> str | None:
        record = logging.LogRecord("name", logging.WARNING, "file", 1, text, values, None)
        return record.getMessage() if limit.filter(record) else None

    assert written("a batch of %d failed", 3) == "a batch of 3 failed"
    assert [written("a batch of %d failed", 4) for _ in range(5)] == [None] * 5
    assert written("another line") == "another line"
    now = 11.0
    assert written("a batch of %d failed", 6) == "a batch of 6 failed (5 more since the last such line)"
    assert written("a batch of %d failed", 6) is None
