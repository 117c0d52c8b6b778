"""`bertsmith serve`: serve models over HTTP."""

import gc
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from rich.console import Console

from bertsmith.bundled import model_folder, model_text
from bertsmith.data.devices import Device
from bertsmith.data.inference import InferencePrecision
from bertsmith.data.progress import progress_bar
from bertsmith.errors import InputError
from bertsmith.runs.flags import flag_group
from bertsmith.serving.model import ServedModel
from bertsmith.serving.scheduler import Scheduler
from bertsmith.serving.settings import SchedulerLimits, ServeSettings, is_loopback

LIMITS, SHUTDOWN = flag_group("Limits"), flag_group("Shutdown")
COMPUTE, SIZES = flag_group("Processor"), flag_group("Elastic models")
KEY_VARIABLE = "BERTSMITH_KEY"
_DEFAULT_FLOOR = 0.95


def serve(
    folders: list[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    device: Device = "auto",
    precision: Annotated[InferencePrecision, COMPUTE] = "auto",
    threads: Annotated[int | None, COMPUTE] = None,
    workers: Annotated[int | None, COMPUTE] = None,
    elastic: Annotated[bool | None, SIZES] = None,
    floor: Annotated[float | None, SIZES] = None,
    truncate: bool = False,
    strict_names: bool = False,
    key_file: Path | None = None,
    allow_host: list[str] | None = None,
    timeout: Annotated[float, LIMITS] = 30.0,
    max_body: Annotated[int, LIMITS] = 2_000_000,
    max_texts: Annotated[int, LIMITS] = 256,
    max_tokens: Annotated[int, LIMITS] = 65_536,
    max_requests: Annotated[int, LIMITS] = 512,
    queue_tokens: Annotated[int, LIMITS] = 65_536,
    queue_sequences: Annotated[int, LIMITS] = 4096,
    batch_tokens: Annotated[int | None, LIMITS] = None,
    drain: Annotated[int, SHUTDOWN] = 40,
    drain_delay: Annotated[float, SHUTDOWN] = 0.0,
) -> None:
    """Serve models over HTTP: embeddings, predictions, rankings and mask filling.

    SIGTERM, SIGHUP or Ctrl-C starts a graceful shutdown: accepted requests are answered first. A second signal stops
    the server immediately.

    Parameters
    ----------
    folders
        Bundled models (small), model folders or artefacts, each as FOLDER or NAME=FOLDER. Requests select a model by
        name, which is the folder name by default; requests without a name use the first model.
    host
        Address to listen on; the default accepts connections from this machine only.
    port
        Port to listen on; 0 selects a free port.
    device
        Device to run on; "auto" uses a GPU if one is available.
    precision
        Precision of matrix products; "auto" is bfloat16 on a GPU and float32 on a CPU. In bfloat16 a GPU runs captured
        CUDA graphs.
    threads
        CPU threads per matrix product; 1 by default, more on machines with more than eight cores.
    workers
        Number of batches of a model in progress; one per core by default on a CPU, two on a GPU, which computes one
        while the next is prepared.
    elastic
        Let elastic models use smaller sizes under load; on if --floor is given.
    floor
        Minimum score of a smaller size, as a share of the score of the whole model; 0.95 by default with --elastic.
    truncate
        Truncate texts that are too long; by default they are rejected. A request can override this.
    strict_names
        Reject requests that name an unknown model; by default a single model answers to every name, as clients of
        OpenAI send names such as text-embedding-3-small.
    key_file
        File with the key that clients must send as `Authorization: Bearer …`; or set BERTSMITH_KEY.
    allow_host
        Another host name by which clients reach a service without a key on this machine, such as the name of a reverse
        proxy; may be repeated. Other names are rejected, because a web page could point its own name at this machine.
    timeout
        Timeout of a request in seconds.
    max_body
        Maximum size of a request in bytes.
    max_texts
        Maximum texts per request.
    max_tokens
        Maximum tokens per request.
    max_requests
        Maximum concurrent requests; further requests get status 429.
    queue_tokens
        Maximum tokens in the queue of a model; further requests get status 429.
    queue_sequences
        Maximum sequences in the queue of a model.
    batch_tokens
        Maximum tokens per batch; 1024 on a CPU and 16384 on a GPU by default.
    drain
        Seconds that a graceful shutdown may take.
    drain_delay
        Seconds after the signal during which requests are still accepted, so that a load balancer can notice that
        /health fails.
    """
    _check_packages()
    from bertsmith.serving.http.app import make_app  # needs the optional packages
    from bertsmith.serving.server import Server, base_url, bind_socket

    limits = {"body_bytes": max_body, "texts": max_texts, "tokens": max_tokens, "requests": max_requests}
    times = {"answer": timeout, "drain": drain, "drain_delay": drain_delay}
    address = {"host": host, "port": port, "key": _read_key(key_file), "allowed_hosts": allow_host or []}
    names = {"strict_names": strict_names, "truncate": truncate}
    settings = ServeSettings.parse({**address, **names, "limits": limits, "times": times}, "serve")
    batches = {"batch_tokens": batch_tokens, "workers": workers}
    queue = {"waiting_tokens": queue_tokens, "waiting_sequences": queue_sequences}
    scheduler_limits = SchedulerLimits.parse({**batches, **queue}, "serve")
    if elastic is False and floor is not None:
        raise InputError(f"--no-elastic and --floor {floor:g} are both given; --floor is only for elastic serving")
    floor = _DEFAULT_FLOOR if elastic and floor is None else floor
    named = _name_folders([folders] if isinstance(folders, str | Path) else folders)
    listener = bind_socket(settings.host, settings.port)  # fail before loading models, which takes longer
    try:
        served = [
            ServedModel.open(folder, name=name, device=device, threads=threads, floor=floor, precision=precision)
            for name, folder in named.items()
        ]
        if floor is not None and all(len(one.schedule) == 1 for one in served):
            flag = "--elastic" if elastic else "--floor"
            raise InputError(f"{flag} is given, but no model has a smaller size that keeps {floor:g} of its score")
        schedulers = {one.name: Scheduler(one, scheduler_limits) for one in served}
        for name, scheduler in schedulers.items():
            with progress_bar(f"capture {name}") as watch:
                scheduler.start(watch)
        app = make_app(schedulers, settings)
        models = list(schedulers.values())
        # garbage collections during requests would visit every object of the models and of PyTorch
        gc.collect()
        gc.freeze()
        Server(app, settings, lambda: _print_models(base_url(listener), models, settings)).run([listener])
    finally:
        gc.unfreeze()
        listener.close()
    for scheduler in schedulers.values():
        scheduler.close()


def _check_packages() -> None:
    for package in ("fastapi", "prometheus_client", "uvicorn"):
        if find_spec(package) is None:
            raise InputError(f"serve needs {package}, which is not installed: pip install 'bertsmith[serve]'")


def _name_folders(folders: list[str]) -> dict[str, Path]:
    """Return the folders by model name."""
    named: dict[str, Path] = {}
    for argument in map(model_text, folders):
        before, equals, after = argument.partition("=")
        has_name = bool(equals) and not Path(argument).exists()
        folder = model_folder(after if has_name else argument)
        name = before if has_name else folder.resolve().name
        if not name or not name.isprintable() or "/" in name:
            raise InputError(
                f"the name of a model is {name!r}; allowed: printable characters without /, as in name=folder"
            )
        if name in named:
            raise InputError(f"two models are called {name!r}; name them, as in one={folder} two=…")
        named[name] = folder
    if not named:
        raise InputError("no folder is given; give at least one")
    return named


def _read_key(file: Path | None) -> str | None:
    """Return the API key from the file or the environment; None if neither is set."""
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
        raise InputError(f"{source} is not a valid key; allowed: printable ASCII characters without spaces")
    return key


def _print_models(url: str, schedulers: Sequence[Scheduler], settings: ServeSettings) -> None:
    """Print the URL, and for each model its operations, maximum length, sizes and precision."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"Listening on {url} (documentation at {url}/docs)")
    for scheduler in schedulers:
        served = scheduler.served
        task = "" if served.task is None else served.task.kind
        names = {"task": task, "vectors": "embeddings", "fill_mask": "mask filling"}
        operations = ", ".join(names[operation] for operation in sorted(served.operations))
        sizes = "one size" if len(served.schedule) == 1 else f"{len(served.schedule)} sizes"
        family, length = served.runner.config.family, served.encoding.length
        console.print(
            f"  {served.name}: {family}; {operations}; up to {length} tokens; {sizes}; {_describe_engine(scheduler)}"
        )
    if settings.key is None and not is_loopback(settings.host):
        console.print("  Warning: no key is set, so every client is accepted; set --key-file or BERTSMITH_KEY")


def _describe_engine(scheduler: Scheduler) -> str:
    """Return precision and device, and on a GPU the number of CUDA graphs or why there are none."""
    place = f"{scheduler.served.precision} on {scheduler.served.runner.device.type}"
    if scheduler.captured is not None:
        return f"{place}, {len(scheduler.captured)} CUDA graphs captured in {scheduler.captured.seconds:.1f} s"
    return place if scheduler.why_eager is None else f"{place}, without CUDA graphs: {scheduler.why_eager}"
