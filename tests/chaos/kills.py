"""Kill every producing command at random moments, before file events and in the middle of writes.

Then continue it, and compare the result with an undisturbed run.
"""

import hashlib
import json
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from events import FileEvents, kill_at_size
from forked import TRACEBACK, Kill, Outcome, run_command, run_first, run_forked
from helpers_finetuning import RECIPE as FINETUNE_RECIPE
from helpers_shrinking import SMALL, write_folders
from helpers_training import RECIPE as PRETRAIN_RECIPE

import bertsmith
from bertsmith.cli import main
from bertsmith.files import SEAL
from bertsmith.runs.compare import PLAN
from bertsmith.runs.predict import REQUEST

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STOPS_IN_A_ROW = 3
SHORT = ("run.steps=8", "run.checkpoint_every=2", "run.evaluate_every=4")
SLOW = {"pretrain with a loader process": 4, "export --to onnx": 6}
"""Most kills of slow commands: a loader process imports PyTorch, an export traces the network."""
VOLATILE = {"seconds", "tokens_per_second", "megabytes_per_second", "peak_memory_mb", "data_wait", "utilisation"}
VOLATILE |= {"latency_ms", "at"}
MOST_EVENTS, MOST_KINDS = 60, 30
"""File events up to which a command is killed before each. Of more, it is killed before the first of this many kinds:
training writes many files alike."""
SIZES = (1, 400, 6000, 60_000)
"""Bytes of a file after which a write kills the process."""
Arguments = Callable[[Path], list[str]]
"""Arguments of a command for an output folder that may hold an unfinished run."""
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
    for path in (recipe, home / "other.toml"):
        path.write_text(PRETRAIN_RECIPE)
    tuning.write_text(FINETUNE_RECIPE)

    def model() -> str:
        folder, _ = write_folders(home / "tuned")
        bertsmith.export(bertsmith.load(folder), home / "hf", to="hf")
        return ""

    arguments = ["tokenizer", str(texts), "--out", str(home / "tokenizer"), "--vocabulary", "160"]
    corpus = ["corpus", str(texts), "--tokenizer", str(home / "tokenizer"), "--out", str(home / "corpus")]
    for outcome in (run_command(arguments), run_command([*corpus, "--workers", "1"]), run_forked(model)):
        assert outcome.code == 0, outcome.output
    return Work(home, texts, home / "corpus", recipe, home / "tuned" / "model", home / "tuned" / "data", tuning)


def commands(work: Work) -> dict[str, Arguments]:
    """Return the arguments of every producing command for an output folder that may hold an unfinished run."""
    common = ["--device", "cpu"]
    settings = [*common, *(word for change in SMALL for word in ("--set", change))]
    data, model, texts = ["--data", str(work.data)], str(work.model), str(work.texts)

    def repeated(*arguments: str) -> Arguments:
        return lambda out: [*arguments, "--out", str(out), *(["--force"] if out.exists() else [])]

    def resumed(command: str, *first: str, record: str = "recipe.toml", is_complete: bool = True) -> Arguments:
        """Resume if the file `record` exists; `is_complete` if it has all settings, else they are repeated."""

        def arguments(out: Path) -> list[str]:
            if (out / record).exists():
                return [command, *(() if is_complete else first), "--out", str(out), "--resume"]
            return [command, *first, "--out", str(out), *(["--force"] if out.exists() else [])]

        return arguments

    def corpus(workers: int) -> Arguments:
        arguments = ["corpus", texts, "--tokenizer", str(work.corpus), "--workers", str(workers)]
        return lambda out: [
            *(*arguments, "--out", str(out)),
            *(["--force"] if (out / "result.json").exists() else []),
        ]

    tuning = ["--recipe", str(work.tuning), *data, "--set", "run.epochs=2", *common]
    training = [str(work.recipe), "--data", str(work.corpus), *common]
    training += [word for change in SHORT for word in ("--set", change)]
    other = str(work.home / "other.toml")
    dev, hf, budget = str(work.data / "dev.jsonl"), str(work.home / "hf"), ["--budget", "2k tokens"]
    return {
        "tokenizer": repeated("tokenizer", texts, "--vocabulary", "160"),
        "corpus": corpus(workers=2),
        "corpus in one process": corpus(workers=1),
        "pairs": repeated("pairs", texts),
        "pretrain": resumed("pretrain", *training),
        "pretrain with a loader process": resumed("pretrain", *training, "--set", "run.workers=1"),
        "compare": resumed("compare", other, *training, *budget, record=PLAN, is_complete=False),
        "finetune": resumed("finetune", *tuning),
        "finetune --seeds": resumed("finetune", *tuning, "--seeds", "2"),
        "shrink": resumed("shrink", model, *data, *settings),
        "convert": repeated("convert", model, "--to", "favor", *common),
        "import": repeated("import", hf),
        "export --to hf": repeated("export", model),
        "export --to torch": repeated("export", model, "--to", "torch", "--precision", "int8"),
        "export --to onnx": repeated("export", model, "--to", "onnx"),
        "evaluate": repeated("evaluate", model, *data, *common),
        "predict": repeated("predict", model, "--data", dev, *common),
        "predict --resume": resumed("predict", model, "--data", dev, *common, record=REQUEST, is_complete=False),
        "encode": repeated("encode", model, "--data", texts, *common),
        "inspect": repeated("inspect", model, "--text", "the fine day"),
    }


def digest(out: Path) -> dict[str, str]:
    """Return a hash of every file of a folder without times; hidden files and pages by name only."""
    hashes = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        # a run keeps the checkpoints of the moments at which it was stopped
        is_checkpoint = path.parent.parent.name == "checkpoints" and (path.parent / SEAL).exists()
        if not path.is_file() or path.name == SEAL or is_checkpoint:
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


class Trial:
    """Kills of one command, each followed by its continuation and a comparison with an undisturbed run."""

    def __init__(self, name: str, arguments: Arguments, work: Work, figures: KillFigures) -> None:
        self.name, self.arguments, self.figures = name, arguments, figures
        self.home = work.home / "kills" / name.replace(" ", "")
        self.runs = 0

    def run_undisturbed(self) -> bool:
        """Run the command to get the expected result, its duration and its file events; return False if it fails."""
        first = run_first(self.arguments(self.folder()))  # the duration of the second one, without imports, counts
        out, events = self.folder(), FileEvents(self.home)
        start = time.monotonic()
        outcome = self._run(out, setup=events.install, value=lambda: json.dumps(events.seen))
        self.duration = time.monotonic() - start
        if first.code or outcome.code:
            self._add_fault(f"does not run: {(first if first.code else outcome).output[-300:]}")
            return False
        self.expected, self.events = digest(out), json.loads(outcome.value)
        return True

    def folder(self) -> Path:
        """Return a new output folder; its path is as long as the others, because files contain it."""
        self.runs += 1
        out = self.home / f"{self.runs:05d}" / "out"
        out.parent.mkdir(parents=True)
        return out

    def kill_at_moments(self, count: int, chooser: random.Random) -> None:
        """Kill the command `count` times at random moments, up to three times in a row before it may finish."""
        made, attempt = 0, 0
        while made < count and attempt < 4 * count:
            attempt += 1
            out = self.folder()
            for _ in range(min(STOPS_IN_A_ROW, count - made)):
                number = chooser.choice(SIGNALS)
                outcome = self._run(out, kill=Kill(number, chooser.random() * self.duration))
                if not outcome.was_killed:
                    break
                made += 1
                self._count(signal.Signals(number).name, outcome)
            self._finish(out)

    def kill_at_events(self) -> None:
        """Kill the command before every file event, or before some if there are many."""
        stops = list(range(len(self.events)))
        if len(stops) > MOST_EVENTS:
            kinds = sorted(map(self.events.index, set(self.events)))
            stops = kinds[:: -(-len(kinds) // MOST_KINDS)]
        for stop in stops:
            out = self.folder()
            outcome = self._run(out, setup=FileEvents(self.home, stop).install)
            self._count("SIGKILL before a file event", outcome)
            if outcome.code != -signal.SIGKILL:
                self._add_fault(f"is not killed before {self.events[stop]}")
            self._finish(out, f" before {self.events[stop]}")

    def kill_at_sizes(self) -> None:
        """Kill the command in the middle of a write, at several sizes of a file."""
        for size in SIZES:
            out = self.folder()
            outcome = self._run(out, setup=partial(kill_at_size, size))
            if outcome.code != 0:
                self._count("SIGXFSZ in a write", outcome)
                self._finish(out, f" at {size} bytes of a file")
            else:
                shutil.rmtree(out.parent)

    def _run(self, out: Path, *, value: Callable[[], str] = str, **more: Any) -> Outcome:
        arguments = self.arguments(out)

        def call() -> str:
            main(arguments)
            return value()

        return run_forked(call, **more)

    def _count(self, kind: str, outcome: Outcome) -> None:
        self.figures.kills[f"{self.name}|{kind}"] += 1
        if outcome.orphans:
            self._add_fault(f"{outcome.orphans} orphans after {kind}")
        if outcome.is_hung:
            self._add_fault(f"hangs after {kind}")
        if outcome.code == TRACEBACK:
            self._add_fault(f"traceback after {kind}: {outcome.output[-500:]}")

    def _finish(self, out: Path, moment: str = "") -> None:
        """Continue the command without kills and compare; remove the folder if the result is right."""
        # a finished run has nothing to resume, but also then left-overs of the last kill are removed
        is_over = "--resume" in self.arguments(out) and _is_finished(out)
        outcome = self._run(out)
        self.figures.runs += 1
        if outcome.code != 0 and not (is_over and "there is nothing to resume" in outcome.output):
            self._add_fault(f"not continued after a kill{moment}: {outcome.output[-400:]}")
            return
        found = digest(out)
        files = sorted(self.expected.keys() | found.keys())
        different = [file for file in files if self.expected.get(file) != found.get(file)]
        if different:
            self._add_fault(f"differs after a kill{moment}: {different[:4]}")
        left = sorted(path.name for path in out.parent.iterdir() if path != out)
        if left:
            self._add_fault(f"left over after a kill{moment}: {left}")
        shutil.rmtree(out.parent)

    def _add_fault(self, text: str) -> None:
        self.figures.faults.append(f"{self.name}: {text}")


def kill_command(
    name: str, arguments: Arguments, work: Work, count: int, figures: KillFigures, seed: int, *, events: bool = True
) -> None:
    """Kill a command `count` times at random moments, and with `events` also at every file event."""
    trial = Trial(name, arguments, work, figures)
    if not trial.run_undisturbed():
        return
    count = min(count, SLOW.get(name, count))
    trial.kill_at_moments(count, random.Random(f"{name} {seed}"))
    if events and name not in SLOW:
        trial.kill_at_events()
        trial.kill_at_sizes()


def _is_finished(out: Path) -> bool:
    try:
        result = json.loads((out / "result.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(result.get("is_finished", True))
