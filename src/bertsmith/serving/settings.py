"""What an operator settles: where the service listens, who may ask, and how much of anything it takes."""

from pathlib import Path

from pydantic import Field

from bertsmith.settings import Record
from bertsmith.shrinking.fit.measure import usable_cores


class Limits(Record):
    """How much one request may hold, and how many there may be at a time."""

    body_bytes: int = Field(default=2_000_000, ge=1)
    """The most bytes of a body; counted while it is read."""
    texts: int = Field(default=256, ge=1)
    """The most texts of a request."""
    tokens: int = Field(default=65_536, ge=1)
    """The most tokens of a request, all its texts together. One text has at most those that its model takes."""
    masks: int = Field(default=64, ge=1)
    """The most masks of a request: for each the share of every piece is computed."""
    requests: int = Field(default=512, ge=1)
    """The most requests that are read, wait or are worked on at a time; the next ones are told to come back."""
    held_bytes: int = Field(default=64_000_000, ge=1)
    """The most bytes of all bodies together that are being read or worked on."""


class Times(Record):
    """How long anything may take, in seconds."""

    answer: float = Field(default=30.0, gt=0)
    """From the first byte of a request to its answer."""
    body: float = Field(default=10.0, gt=0)
    """Until the head of a request is there, and from then until its body is."""
    sending: float = Field(default=30.0, gt=0)
    """Until a client has taken a piece of its answer."""
    keep_alive: int = Field(default=5, gt=0)
    """How long an idle connection stays open."""
    drain: int = Field(default=40, gt=0)
    """From the signal to end until every accepted request must be answered."""
    drain_delay: float = Field(default=0.0, ge=0)
    """How long the service still takes requests after the signal, while /health says that it is ending."""


class ServeSettings(Record):
    """All there is to settle about the service itself; models and their engines have settings of their own."""

    host: str = "127.0.0.1"
    """The address to listen on: this machine alone unless another is given."""
    port: int = Field(default=8080, ge=0, le=65535)
    """The port; 0 takes a free one."""
    key: str | None = Field(default=None, min_length=1, repr=False)
    """What clients must send as `Authorization: Bearer …`; None for no such thing."""
    truncate: bool = False
    """Whether a text that is too long is cut where a request does not say; else it is refused."""
    limits: Limits = Limits()
    times: Times = Times()


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
