"""Kill every producing command at random moments, continue it, and compare the result with an undisturbed run."""

import hashlib
import json
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from forked import TRACEBACK, Kill, Outcome, run_command, run_forked
from helpers_finetuning import RECIPE as FINETUNE_RECIPE
from helpers_shrinking import SMALL, write_folders
from helpers_training import RECIPE as PRETRAIN_RECIPE

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STOPS_IN_A_ROW = 3
SLOW = {"pretrain with a loader process": 4}
"""Most kills of commands that start slowly: a loader process imports PyTorch."""
VOLATILE = {"seconds", "tokens_per_second", "megabytes_per_second", "peak_memory_mb", "data_wait", "utilisation"}
VOLATILE |= {"latency_ms", "at"}
CONTENT = (".safetensors", ".shard", ".json", ".jsonl", ".txt", ".toml")
"""Endings of compared files; pages and cards contain times."""


@dataclass(frozen=True)
class Work:
    """Inputs of all commands."""

    home: Path
    texts: Path
    corpus: Path
    recipe: Path
    model: Path
    data: Path
    tuning: Path


@dataclass
class KillFigures:
    """Counts over all commands; anything in `faults` is a failure."""

    kills: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    faults: list[str] = field(default_factory=list)


def prepare(home: Path) -> Work:
    """Write the inputs: texts, a corpus, recipes, a fine-tuned model and its data."""
    texts = home / "texts.txt"
    words = ["the smith", "a traveller", "forges", "an iron gate", "by the river", "before sunrise", "the old clerk"]
    chooser = random.Random(0)
    sentences = (" ".join(chooser.choices(words, k=5)).capitalize() + "." for _ in range(900))
    stories = [" ".join(islice(sentences, 6)) for _ in range(150)]
    texts.write_text("\n\n".join(stories))
    recipe, tuning = home / "pretrain.toml", home / "finetune.toml"
    recipe.write_text(PRETRAIN_RECIPE)
    tuning.write_text(FINETUNE_RECIPE)

    def model() -> str:
        write_folders(home / "tuned")
        return ""

    arguments = ["tokenizer", str(texts), "--out", str(home / "tokenizer"), "--vocabulary", "160"]
    corpus = ["corpus", str(texts), "--tokenizer", str(home / "tokenizer"), "--out", str(home / "corpus")]
    for outcome in (run_command(arguments), run_command([*corpus, "--workers", "1"]), run_forked(model)):
        assert outcome.code == 0, outcome.output
    return Work(home, texts, home / "corpus", recipe, home / "tuned" / "model", home / "tuned" / "data", tuning)


def commands(work: Work) -> dict[str, Callable[[Path], list[str]]]:
    """Return the arguments of every producing command for an output folder that may hold an unfinished run."""
    common = ["--device", "cpu"]
    settings = [word for change in SMALL for word in ("--set", change)]
    data, model, texts = ["--data", str(work.data)], str(work.model), str(work.texts)

    def repeated(*arguments: str) -> Callable[[Path], list[str]]:
        return lambda out: [*arguments, "--out", str(out), *(["--force"] if out.exists() else [])]

    def resumed(first: list[str], command: str, *more: str) -> Callable[[Path], list[str]]:
        def arguments(out: Path) -> list[str]:
            if (out / "recipe.toml").exists():
                return [command, "--out", str(out), "--resume", *more]
            return [command, *first, "--out", str(out), *more, *(["--force"] if out.exists() else [])]

        return arguments

    tuning = ["--recipe", str(work.tuning), *data]
    return {
        "tokenizer": repeated("tokenizer", texts, "--vocabulary", "160"),
        "corpus": lambda out: [
            *("corpus", texts, "--tokenizer", str(work.corpus), "--out", str(out)),
            *("--workers", "2"),
            *(["--force"] if (out / "result.json").exists() else []),
        ],
        "pairs": repeated("pairs", texts),
        "pretrain": resumed([str(work.recipe), "--data", str(work.corpus)], "pretrain", *common),
        "pretrain with a loader process": resumed(
            [str(work.recipe), "--data", str(work.corpus), "--set", "run.workers=1"], "pretrain", *common
        ),
        "finetune": resumed(tuning, "finetune", *common),
        "finetune --seeds": resumed([*tuning, "--seeds", "2"], "finetune", *common),
        "shrink": resumed([model, *data, *settings], "shrink", *common),
        "convert": repeated("convert", model, "--to", "favor", *common),
        "export --to hf": repeated("export", model),
        "export --to torch": repeated("export", model, "--to", "torch", "--precision", "int8"),
        "evaluate": repeated("evaluate", model, *data, *common),
        "predict": repeated("predict", model, "--data", str(work.data / "dev.jsonl"), *common),
    }


def digest(out: Path) -> dict[str, str]:
    """Return a hash of every file of a folder without times; hidden files and pages by name only."""
    hashes = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if not path.is_file() or path.name == "seal.json":
            continue
        content = path.read_bytes() if path.suffix in CONTENT and not path.name.startswith(".") else b""
        if path.suffix in (".json", ".jsonl") and content:
            rows = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
            content = json.dumps([_stable(json.loads(row)) for row in rows], sort_keys=True).encode()
        # commands and reports name the output folder
        hashes[name] = hashlib.sha256(content.replace(str(out).encode(), b"OUT")).hexdigest()
    return hashes


def _stable(value: object) -> object:
    if isinstance(value, dict):
        return {name: _stable(item) for name, item in value.items() if name not in VOLATILE}
    return [_stable(item) for item in value] if isinstance(value, list) else value


def kill_command(
    name: str, arguments: Callable[[Path], list[str]], work: Work, count: int, figures: KillFigures, seed: int
) -> None:
    """Kill a command `count` times; after every few kills let it finish and compare."""
    chooser, count = random.Random(f"{name} {seed}"), min(count, SLOW.get(name, count))
    home = work.home / "kills" / name.replace(" ", "")
    home.mkdir(parents=True)
    # twice: the first run fills caches of the system, and the duration of the second one spreads the kills
    for reference in (home / "first" / "out", home / "reference" / "out"):
        reference.parent.mkdir()
        start = time.monotonic()
        outcome = run_command(arguments(reference))
        duration = time.monotonic() - start
        if outcome.code != 0:
            figures.faults.append(f"{name}: does not run: {outcome.output[-300:]}")
            return
    expected = digest(reference)
    made, attempt = 0, 0
    while made < count and attempt < 4 * count:
        attempt += 1
        out = home / str(attempt) / "out"
        out.parent.mkdir()
        for _ in range(min(STOPS_IN_A_ROW, count - made)):
            number = chooser.choice(SIGNALS)
            kill = Kill(number, chooser.random() * duration)
            outcome = run_command(arguments(out), kill=kill)
            if not outcome.was_killed:
                break
            made += 1
            figures.kills[f"{name}|{signal.Signals(number).name}"] += 1
            _check_end(name, number, outcome, figures)
        # a finished run has nothing to resume; other commands are repeated, which removes left-overs of the last kill
        is_over = "--resume" in arguments(out) and _is_finished(out)
        outcome = None if is_over else run_command(arguments(out))
        figures.runs += 1
        if outcome is not None and outcome.code != 0:
            figures.faults.append(f"{name}: not continued: {outcome.output[-400:]}")
            continue
        found = digest(out)
        different = sorted(file for file in expected.keys() | found.keys() if expected.get(file) != found.get(file))
        different = [file for file in different if not file.startswith("checkpoints/")]
        if different:
            figures.faults.append(f"{name}: differs after kills: {different[:4]}")
        left = sorted(path.name for path in out.parent.iterdir() if path != out)
        if left:
            figures.faults.append(f"{name}: left over: {left}")
        shutil.rmtree(out.parent)


def _check_end(name: str, number: int, outcome: Outcome, figures: KillFigures) -> None:
    if outcome.orphans:
        figures.faults.append(f"{name}: {outcome.orphans} orphans after {signal.Signals(number).name}")
    if outcome.is_hung:
        figures.faults.append(f"{name}: hangs after {signal.Signals(number).name}")
    if outcome.code == TRACEBACK:
        figures.faults.append(f"{name}: traceback after {signal.Signals(number).name}: {outcome.output[-500:]}")


def _is_finished(out: Path) -> bool:
    try:
        result = json.loads((out / "result.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(result.get("is_finished", True))
