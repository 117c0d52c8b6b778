"""How many cores there are to work with, and how a service divides them."""

from pathlib import Path

from bertsmith.shrinking.fit.measure import usable_cores

MOST_WORKERS = 8
"""Batches at a time: more than that wait for each other in Python, so products get further cores."""
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores(quota: Path = _QUOTA) -> int:
    """The cores this process may use; in a container no more than it is allowed the time of, rounded up."""
    found = usable_cores()
    try:
        allowed, period = quota.read_text(encoding="utf-8").split()
        return min(found, max(1, -(-int(allowed) // int(period))))
    except (OSError, ValueError):  # no such limit: no file, or the word "max"
        return found


def default_threads() -> int:
    """Threads of one product: one, unless there are more cores than batches at a time.

    Threads of one product wait for each other many times in a batch, for long where other programs want the cores too;
    batches that each have a core wait for nothing.
    """
    return max(1, cores() // MOST_WORKERS)
