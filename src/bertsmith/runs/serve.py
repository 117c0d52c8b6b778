"""Serve models over HTTP until a signal."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rich.console import Console

from bertsmith.bundled import model_folder, model_text
from bertsmith.errors import InputError
from bertsmith.serving.model import ServedModel
from bertsmith.serving.scheduler import Scheduler
from bertsmith.serving.settings import SchedulerLimits, ServeSettings

KEY_VARIABLE = "BERTSMITH_KEY"
_DEFAULT_FLOOR = 0.95
_LOOPBACK = ("127.", "::1", "localhost")


def serve(
    folders: list[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    threads: int | None = None,
    workers: int | None = None,
    elastic: bool | None = None,
    floor: float | None = None,
    truncate: bool = False,
    key_file: Path | None = None,
    timeout: float = 30.0,
    max_body: int = 2_000_000,
    max_texts: int = 256,
    max_tokens: int = 65_536,
    max_requests: int = 512,
    queue_tokens: int = 65_536,
    queue_sequences: int = 4096,
    batch_tokens: int | None = None,
    drain: int = 40,
    drain_delay: float = 0.0,
) -> None:
    """Serve models over HTTP: vectors, predictions, rankings, masks (docs/how-to/serving.md).

    SIGTERM or Ctrl-C shut it down after all accepted requests are answered; a second signal stops it at once.

    Parameters
    ----------
    folders
        Bundled models (small), model folders or artefacts made from them, each as folder or name=folder; requests
        choose a model by name, which is the folder's by default, and get the first one if they name none.
    host
        The address to listen on; by default reachable from this machine only.
    port
        The port; 0 takes a free one.
    device
        Where to compute; "auto" uses a GPU if there is one.
    threads
        Threads of one matrix product; by default 1, or more on machines with more than eight cores.
    workers
        Batches of a model that are computed at the same time; on a CPU by default one per core.
    elastic
        Let elastic models answer with smaller sizes under load; on if --floor is given.
    floor
        The share of the whole model's score that a smaller size must keep; 0.95 if only --elastic is given.
    truncate
        Truncate texts that are too long unless a request says otherwise; by default they are rejected.
    key_file
        A file with the key that clients must send as `Authorization: Bearer …`; or set BERTSMITH_KEY.
    timeout
        Seconds after which a request without an answer fails.
    max_body
        Maximum bytes of a request.
    max_texts
        Maximum texts of a request.
    max_tokens
        Maximum tokens of a request.
    max_requests
        Maximum concurrent requests; further ones get status 429.
    queue_tokens
        Maximum tokens in the queue of a model; further requests get status 429.
    queue_sequences
        Maximum sequences in the queue of a model.
    batch_tokens
        Maximum tokens of a batch; by default 1024 on a CPU and 16384 on a GPU.
    drain
        Seconds after the signal in which all accepted requests must be answered.
    drain_delay
        Seconds after the signal in which requests are still accepted, so that a load balancer can see /health first.
    """
    _check_packages()
    from bertsmith.serving.http.app import make_app  # needs the optional packages
    from bertsmith.serving.server import Server, base_url, bind_socket

    limits = {"body_bytes": max_body, "texts": max_texts, "tokens": max_tokens, "requests": max_requests}
    times = {"answer": timeout, "drain": drain, "drain_delay": drain_delay}
    address = {"host": host, "port": port, "key": _read_key(key_file), "truncate": truncate}
    settings = ServeSettings.parse({**address, "limits": limits, "times": times}, "serve")
    batches = {"batch_tokens": batch_tokens, "workers": workers}
    queue = {"waiting_tokens": queue_tokens, "waiting_sequences": queue_sequences}
    scheduler_limits = SchedulerLimits.parse({**batches, **queue}, "serve")
    if elastic is False and floor is not None:
        raise InputError(f"--no-elastic and --floor {floor:g} are given; a floor is for elastic models")
    floor = _DEFAULT_FLOOR if elastic and floor is None else floor
    named = _name_folders([folders] if isinstance(folders, str | Path) else folders)
    listener = bind_socket(settings.host, settings.port)  # before the models are loaded, which takes longer
    try:
        served = [
            ServedModel.open(folder, name=name, device=device, threads=threads, floor=floor)
            for name, folder in named.items()
        ]
        if elastic and all(len(one.schedule) == 1 for one in served):
            raise InputError(f"--elastic is given and no model has a smaller size that keeps {floor:g} of its score")
        schedulers = {one.name: Scheduler(one, scheduler_limits) for one in served}
        for scheduler in schedulers.values():
            scheduler.start()
        app = make_app(schedulers, settings)
        Server(app, settings, lambda: _print_models(base_url(listener), served, settings)).run([listener])
    finally:
        listener.close()
    for scheduler in schedulers.values():
        scheduler.close()


def _check_packages() -> None:
    for package in ("fastapi", "prometheus_client", "uvicorn"):
        if find_spec(package) is None:
            raise InputError(f"serve needs {package}, which is not installed: pip install 'bertsmith[serve]'")


def _name_folders(folders: list[str]) -> dict[str, Path]:
    """Return the folders by the names of their models."""
    named: dict[str, Path] = {}
    for given in map(model_text, folders):
        before, equals, after = given.partition("=")
        has_name = bool(equals) and not Path(given).exists()
        folder = model_folder(after if has_name else given)
        name = before if has_name else folder.resolve().name
        if not name or not name.isprintable() or "/" in name:
            raise InputError(
                f"the name of a model is {name!r}; allowed: printable characters without /, as in name=folder"
            )
        if name in named:
            raise InputError(f"two models are called {name!r}; give them names, as in one={folder} two=…")
        named[name] = folder
    if not named:
        raise InputError("no folder is given; serve needs at least one")
    return named


def _read_key(file: Path | None) -> str | None:
    """Return the key that clients must send, from a file or from the environment."""
    source = KEY_VARIABLE if file is None else f"--key-file {str(file)!r}"
    if file is None:
        key = os.environ.get(KEY_VARIABLE)
        if key is None:
            return None
    else:
        try:
            key = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise InputError(f"{source} cannot be read: {reason}") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(f"{source} holds no key; allowed: printable ASCII characters without spaces")
    return key


def _print_models(url: str, models: Sequence[ServedModel], settings: ServeSettings) -> None:
    """Print the URL and what each model supports."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"Listening on {url} (documentation at {url}/docs)")
    for served in models:
        task = "" if served.task is None else served.task.kind
        names = {"task": task, "vectors": "vectors", "fill_mask": "masks"}
        operations = ", ".join(names[one] for one in sorted(served.operations))
        sizes = "one size" if len(served.schedule) == 1 else f"{len(served.schedule)} sizes"
        family, length = served.runner.config.family, served.encoding.length
        console.print(f"  {served.name}: {family}; {operations}; up to {length} tokens; {sizes}")
    if settings.key is None and not settings.host.startswith(_LOOPBACK):
        console.print("  No key is set, so every client is accepted (--key-file, BERTSMITH_KEY)")
