"""`bertsmith serve`: models as a service over HTTP."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bertsmith.bundled import model_folder, model_text
from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.serving.model import ServedModel
    from bertsmith.serving.scheduler import Scheduler, SchedulerLimits
    from bertsmith.serving.settings import ServeSettings

KEY = "BERTSMITH_KEY"
"""The environment's name for the key that clients must send."""
_FLOOR = 0.95
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
    """Answer over HTTP with models: vectors, predictions, rankings, masks; docs/serving.md has it all.

    Ends on SIGTERM or Ctrl-C after it has answered all it took; a second signal ends it at once.

    Parameters
    ----------
    folders
        Bundled models (small), folders of models or of artefacts made from them, each by itself or as name=folder;
        requests choose by the name, which is the folder's unless given, and get the first where they name none.
    host
        The address to listen on; this machine alone unless another is given.
    port
        The port; 0 takes a free one.
    device
        Where to compute; "auto" takes a GPU if there is one.
    threads
        Threads of one product; if not given 1, or more where there are cores for more than eight batches at a time.
    workers
        Batches of a model that are worked on at a time; on a CPU as many as there are cores for, if not given.
    elastic
        Let elastic models answer in smaller sizes while work piles up; on if --floor is given.
    floor
        The share of the whole model's score that a smaller size must keep; 0.95 if only --elastic is given.
    truncate
        Cut texts that are too long where a request does not say; else they are refused.
    key_file
        A file with the key that clients must send as `Authorization: Bearer …`; or set BERTSMITH_KEY.
    timeout
        Seconds after which a request that has no answer is given up.
    max_body
        The most bytes of a request.
    max_texts
        The most texts of a request.
    max_tokens
        The most tokens of a request.
    max_requests
        The most requests at a time; further ones are told to come back.
    queue_tokens
        The most tokens that wait for a model; further requests are told to come back.
    queue_sequences
        The most sequences that wait for a model.
    batch_tokens
        The most tokens of a batch; 1024 on a CPU and 16384 on a GPU if not given.
    drain
        Seconds after the signal to end in which all that was taken must be answered.
    drain_delay
        Seconds after the signal in which requests are still taken, so that a load balancer can see /health first.
    """
    _check_installed()
    from bertsmith.serving.http.app import make_app
    from bertsmith.serving.scheduler import SchedulerLimits
    from bertsmith.serving.server import address, bound, run
    from bertsmith.serving.settings import ServeSettings

    limits = {"body_bytes": max_body, "texts": max_texts, "tokens": max_tokens, "requests": max_requests}
    times = {"answer": timeout, "drain": drain, "drain_delay": drain_delay}
    plain = {"host": host, "port": port, "key": _key(key_file), "truncate": truncate, "limits": limits, "times": times}
    settings = ServeSettings.parse(plain, "serve")
    waiting = {"waiting_tokens": queue_tokens, "waiting_sequences": queue_sequences}
    engine_limits = SchedulerLimits.parse({"batch_tokens": batch_tokens, "workers": workers, **waiting}, "serve")
    named = _named([folders] if isinstance(folders, str | Path) else folders)
    listener = bound(settings.host, settings.port)  # before models are read, which takes longer
    try:
        chosen = _floor(elastic, floor)
        models = _open(named, engine_limits, device=device, threads=threads, floor=chosen)
        if elastic and all(len(served.schedule) == 1 for served, _ in models.values()):
            raise InputError(f"--elastic is given and no model has a smaller size that keeps {chosen:g} of its score")
        for _, engine in models.values():
            engine.start()
        app = make_app(models, settings)
        run(app, listener, settings, lambda: _say(address(listener), models, settings))
    finally:
        listener.close()
    for _, engine in models.values():
        engine.close()


def _check_installed() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as missing:
        raise InputError(
            f"serve needs {missing.name}, which is not installed: pip install 'bertsmith[serve]'"
        ) from None


def _named(folders: list[str]) -> dict[str, Path]:
    """The folders by the names of their models."""
    named: dict[str, Path] = {}
    for given in map(model_text, folders):
        before, equals, after = given.partition("=")
        is_named = bool(equals) and not Path(given).exists()
        folder = model_folder(after if is_named else given)
        name = before if is_named else folder.resolve().name
        if not name or not name.isprintable() or "/" in name:
            raise InputError(f"the name of a model is {name!r}; allowed: printable signs without /, as in name=folder")
        if name in named:
            raise InputError(f"two models are called {name!r}; give them names, as in one={folder} two=…")
        named[name] = folder
    if not named:
        raise InputError("no folder is given; serve needs at least one")
    return named


def _floor(elastic: bool | None, floor: float | None) -> float | None:
    """The share of its score that a model must keep; None to answer with whole models alone."""
    if elastic is False and floor is not None:
        raise InputError(f"--no-elastic and --floor {floor:g} are given; a floor is for elastic models")
    return _FLOOR if elastic and floor is None else floor


def _key(file: Path | None) -> str | None:
    """The key that clients must send, from a file or from the environment."""
    source = KEY if file is None else f"--key-file {str(file)!r}"
    if file is None:
        key = os.environ.get(KEY)
        if key is None:
            return None
    else:
        try:
            key = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"{source} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}"
            ) from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(f"{source} holds no key; allowed: ASCII letters, digits and signs, without spaces")
    return key


def _open(
    named: Mapping[str, Path], limits: "SchedulerLimits", **settings: Any
) -> "dict[str, tuple[ServedModel, Scheduler]]":
    from bertsmith.serving.model import ServedModel
    from bertsmith.serving.scheduler import Scheduler

    models = {}
    for name, folder in named.items():
        served = ServedModel.open(folder, name=name, **settings)
        models[name] = (served, Scheduler(served, limits))
    return models


def _say(where: str, models: "Mapping[str, tuple[ServedModel, Scheduler]]", settings: "ServeSettings") -> None:
    """Where the service listens and what each model can do."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"Listening on {where} (documentation at {where}/docs)")
    for name, (served, _) in models.items():
        can = {"task": "" if served.kept is None else served.kept.task.kind, "vectors": "vectors", "fill_mask": "masks"}
        works = ", ".join(can[work] for work in sorted(served.works))
        sizes = "one size" if len(served.schedule) == 1 else f"{len(served.schedule)} sizes"
        family = served.runner.config.family
        console.print(f"  {name}: {family}; {works}; up to {served.encoding.length} tokens; {sizes}")
    if settings.key is None and not settings.host.startswith(_LOOPBACK):
        console.print("  Anyone who reaches this address may ask: no key is set (--key-file, BERTSMITH_KEY)")
