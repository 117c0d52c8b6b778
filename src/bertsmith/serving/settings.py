"""Settings of the service: address, key, limits, timeouts, batching; and the number of CPU cores to use."""

from ipaddress import ip_address
from pathlib import Path

from pydantic import Field

from bertsmith.settings import Record
from bertsmith.shrinking.fit.measure import usable_cores

MAX_CPU_WORKERS = 8
"""Batches computed at the same time. More would contend for Python's lock, so further cores become threads."""
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class Limits(Record):
    """Limits on one request and on concurrent requests."""

    body_bytes: int = Field(default=2_000_000, ge=1)
    """Maximum size of a request body, checked while it is read."""
    texts: int = Field(default=256, ge=1)
    """Maximum number of texts in a request."""
    tokens: int = Field(default=65_536, ge=1)
    """Maximum number of tokens in a request; the model limits the length of each text."""
    masks: int = Field(default=64, ge=1)
    """Maximum number of masks in a request: each needs the probabilities of the whole vocabulary."""
    requests: int = Field(default=512, ge=1)
    """Maximum number of concurrent requests; further ones get status 429."""
    buffered_bytes: int = Field(default=64_000_000, ge=1)
    """Maximum total size of the request bodies in memory."""


class Times(Record):
    """Timeouts in seconds."""

    answer: float = Field(default=30.0, gt=0)
    """From the first byte of a request to its response."""
    body: float = Field(default=10.0, gt=0)
    """For the head of a request, and again for its body."""
    send: float = Field(default=30.0, gt=0)
    """For a client to read a chunk of its response."""
    keep_alive: int = Field(default=5, gt=0)
    """For an idle connection."""
    drain: int = Field(default=40, gt=0)
    """For a graceful shutdown: from the signal until every accepted request is answered."""
    drain_delay: float = Field(default=0.0, ge=0)
    """After the signal, during which new requests are still accepted and /health returns 503."""


class ServeSettings(Record):
    """Settings of the HTTP service."""

    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = Field(default=8080, ge=0, le=65535)
    """The port; 0 takes a free one."""
    key: str | None = Field(default=None, min_length=1, repr=False)
    """The key that clients must send as `Authorization: Bearer …`; None accepts every client."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names that requests to a service without a key on loopback may use."""
    strict_names: bool = False
    """Reject unknown model names even if there is only one model, which otherwise answers to every name."""
    truncate: bool = False
    """Default of `truncate` for requests: truncate texts that are too long, or reject them."""
    limits: Limits = Limits()
    times: Times = Times()


class SchedulerLimits(Record):
    """Limits of batches and queue, and the rule for changing the size of an elastic model."""

    batch_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of a batch; a longer sequence gets its own batch. None: 1024 on a CPU, 16384 on a GPU."""
    waiting_tokens: int = Field(default=65_536, ge=1)
    """Maximum tokens in the queue; further requests are rejected."""
    waiting_sequences: int = Field(default=4096, ge=1)
    """Maximum sequences in the queue."""
    workers: int | None = Field(default=None, ge=1)
    """Threads that each compute a batch. None: cores divided by threads on a CPU, one on a GPU."""
    wait_target: float = Field(default=0.25, gt=0)
    """Expected wait in seconds above which an elastic model switches to the next smaller size."""
    quiet_seconds: float = Field(default=5.0, gt=0)
    """Duration of low load after which an elastic model switches to the next larger size."""


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine itself."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name, such as 127.example.org
        return False


def cores(quota: Path = _QUOTA) -> int:
    """Return the number of CPU cores this process may use, limited by the quota of its container."""
    available = usable_cores()
    try:
        allowed, period = quota.read_text(encoding="utf-8").split()
        return min(available, max(1, -(-int(allowed) // int(period))))
    except (OSError, ValueError):  # without a quota there is no file, or it contains "max"
        return available


def default_threads() -> int:
    """Return the threads per matrix product: 1, unless there are more cores than workers.

    The threads of a product synchronise many times per batch; batches on separate cores never do.
    """
    return max(1, cores() // MAX_CPU_WORKERS)
