"""Mutate files of every format and read them: an error of one sentence or the right result, nothing else."""

import gzip
import hashlib
import json
import lzma
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from forked import Outcome, run_command, run_forked
from helpers_finetuning import ROWS
from kills import Work

import bertsmith
from bertsmith.data.build_corpus import build_corpus
from bertsmith.data.shards import TokenCorpus
from bertsmith.errors import InputError
from bertsmith.files import SEAL
from bertsmith.runtime import load as load_onnx
from bertsmith.shrinking.elastic_metadata import read_elastic_metadata
from bertsmith.shrinking.fit.store import Measurements
from bertsmith.tasks.data_source import task_splits
from bertsmith.tasks.predictor import Predictor, has_task_record
from bertsmith.text.readers import read_documents
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.toml import read_toml
from bertsmith.training.checkpoint import find_checkpoint
from bertsmith.training.log import read_log
from bertsmith.training.pretraining import PretrainSettings

MEMORY_MB, SECONDS = 1500, 60
TEXTS = ["the fine day", "a broken clock"]
VALUES = [None, True, -1, 0, 2, 2**31, 2**63, 1e308, float("inf"), float("nan"), "", "x", "../outside", [], {}, [[]]]
"""Replacements of a JSON value."""


@dataclass(frozen=True)
class Reader:
    """A function that reads a folder and returns a digest of the content, and the files to mutate."""

    read: Callable[[Path], str]
    files: tuple[str, ...]
    is_sealed: bool = True
    """Whether every difference must be detected; without checksums a changed value may be a valid one."""


@dataclass
class MutationFigures:
    """Counts over all readers; anything in `faults` is a failure."""

    mutations: Counter[str] = field(default_factory=Counter)
    errors: int = 0
    faults: list[str] = field(default_factory=list)


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _read_model(folder: Path) -> str:
    model = bertsmith.load(folder)
    tensors = {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in model.state_dict().items()}
    return _hash(model.config, tensors, model.require_tokenizer().hash, has_task_record(folder))


def _predict(folder: Path) -> str:
    return _hash(Predictor.load(folder).details(TEXTS))


def _predict_onnx(folder: Path) -> str:
    return _hash([{name: str(value) for name, value in row.items()} for row in load_onnx(folder).details(TEXTS)])


def _read_corpus(folder: Path) -> str:
    corpus = TokenCorpus(folder)
    tokens = [corpus.read(index, 0, int(length)) for index, length in enumerate(corpus.lengths)]
    sentences = [corpus.sentence_starts(index) for index in range(len(corpus))]
    return _hash(np.concatenate(tokens).tobytes(), np.concatenate(sentences).tobytes(), Tokenizer.load(folder).hash)


def _resume_corpus(folder: Path) -> str:
    text = folder / "texts.txt"
    manifest = build_corpus(
        [text], Tokenizer.load(folder / "tokenizer"), folder / "out", workers=1, shard_megabytes=0.01
    )
    return _hash(manifest, _read_corpus(folder / "out"))


def _read_checkpoint(folder: Path) -> str:
    path, _ = find_checkpoint(folder)
    if path is None:
        raise InputError("no checkpoint is complete")
    return _hash(path.name)


def _read_table(folder: Path) -> str:
    path = next(path for path in sorted(folder.iterdir()) if path.name.startswith("dev"))
    return _hash(list(task_splits(str(path), file_is="dev").read("dev").rows))


def _read_texts(folder: Path) -> str:
    return _hash(list(read_documents(sorted(folder.iterdir()))))


def _read_log(folder: Path) -> str:
    return _hash(read_log(folder / "log.jsonl"))


def _read_tokenizer(folder: Path) -> str:
    tokenizer = Tokenizer.load(folder)
    return _hash(tokenizer.hash, [ids.tolist() for ids in tokenizer.encode(TEXTS, padding=False)["input_ids"]])


def _read_recipe(folder: Path) -> str:
    return _hash(PretrainSettings.parse(read_toml(folder / "recipe.toml"), source="recipe"))


def _read_elastic(folder: Path) -> str:
    return _hash(read_elastic_metadata(folder).subnets)


def _read_measurements(folder: Path) -> str:
    return _hash(Measurements(folder / "measurements.jsonl", [])._values)


def readers(work: Work) -> dict[str, tuple[Path, Reader]]:
    """Return every reader with a folder of intact files; the folders are written by children."""
    home = work.home / "mutations"
    home.mkdir()

    def make() -> str:
        model = bertsmith.load(work.model)
        for name in ("sealed", "unsealed"):
            bertsmith.export(model, home / f"onnx-{name}", to="onnx", task=work.model)
            bertsmith.save(model, home / f"model-{name}")
        bertsmith.export(model, home / "hf", to="hf", native="always")
        for name in ("onnx-unsealed", "model-unsealed", "hf"):
            (home / name / SEAL).unlink()
        shutil.copytree(work.model, home / "task")
        (home / "task" / SEAL).unlink()
        _write_elastic(home / "elastic")
        _write_tables(home)
        _write_texts(home, work.texts)
        (home / "recipe").mkdir()
        shutil.copyfile(work.recipe, home / "recipe" / "recipe.toml")
        (home / "tokenizer").mkdir()
        shutil.copyfile(work.corpus / "tokenizer.json", home / "tokenizer" / "tokenizer.json")
        (home / "vocabulary").mkdir()
        tokens = Tokenizer.load(work.corpus).vocabulary
        (home / "vocabulary" / "vocab.txt").write_text("\n".join(sorted(tokens, key=lambda token: tokens[token])))
        (home / "measurements").mkdir()
        rows = [{"key": {"a": number}, "value": {"p50": 1.5}, "at": 1} for number in range(4)]
        (home / "measurements" / "measurements.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        _write_unfinished_corpus(home / "journal", work)
        return ""

    outcome = run_forked(make)
    assert outcome.code == 0, outcome.output
    run = home / "run"
    arguments = ["pretrain", str(work.recipe), "--data", str(work.corpus), "--out", str(run), "--device", "cpu"]
    _run(arguments)
    checkpoint = max((run / "checkpoints").iterdir())
    shutil.copytree(checkpoint, home / "checkpoint" / checkpoint.name)  # alone: else an older one replaces it
    shutil.copytree(work.corpus, home / "corpus")
    names = {
        "model": Reader(_read_model, ("config.json", "model.safetensors", "tokenizer.json")),
        "model without seal": Reader(_read_model, ("config.json", "model.safetensors", "tokenizer.json"), False),
        "Hugging Face folder": Reader(_read_model, ("config.json", "model.safetensors"), False),
        "task.json": Reader(_predict, ("task.json", "config.json"), False),
        "ONNX folder": Reader(_predict_onnx, ("model.onnx", "onnx.json", "task.json", "tokenizer.json")),
        "ONNX folder without seal": Reader(_predict_onnx, ("onnx.json", "task.json"), False),
        "elastic.json": Reader(_read_elastic, ("elastic.json",), False),
        "corpus": Reader(_read_corpus, ("manifest.json", "tokenizer.json", "*.shard")),
        "unfinished corpus": Reader(_resume_corpus, ("out/journal.jsonl", "out/*.shard")),
        "checkpoint": Reader(_read_checkpoint, ("*/*",)),
        "log.jsonl": Reader(_read_log, ("log.jsonl",), False),
        "recipe.toml": Reader(_read_recipe, ("recipe.toml",), False),
        "tokenizer.json": Reader(_read_tokenizer, ("tokenizer.json",), False),
        "vocab.txt": Reader(_read_tokenizer, ("vocab.txt",), False),
        "measurements.jsonl": Reader(_read_measurements, ("measurements.jsonl",), False),
        **{f"table {name}": Reader(_read_table, ("dev*",), False) for name in ("jsonl", "csv", "tsv", "parquet")},
        **{f"texts {name}": Reader(_read_texts, ("texts*",), False) for name in ("txt", "gz", "xz", "zst")},
    }
    folders = {
        "model": "model-sealed",
        "model without seal": "model-unsealed",
        "Hugging Face folder": "hf",
        "task.json": "task",
        "ONNX folder": "onnx-sealed",
        "ONNX folder without seal": "onnx-unsealed",
        "elastic.json": "elastic",
        "unfinished corpus": "journal",
        "log.jsonl": "run",
        "recipe.toml": "recipe",
        "tokenizer.json": "tokenizer",
        "vocab.txt": "vocabulary",
        "measurements.jsonl": "measurements",
    }
    return {name: (home / folders.get(name, name.replace(" ", "-")), reader) for name, reader in names.items()}


def _run(arguments: list[str]) -> None:
    outcome = run_command(arguments)
    assert outcome.code == 0, outcome.output


def _write_elastic(folder: Path) -> None:
    folder.mkdir()
    subnetwork = {"width": 0.5, "depth": 1.0, "score": 80.0, "parameters": 10, "flops": 1e6, "latency_ms": 1.5}
    content = {"metric": "accuracy", "teacher_score": 90.0, "depth_rule": "keep_last", "length": 16}
    content |= {"grid": [subnetwork, {**subnetwork, "width": 1.0}], "head_scores": [[0.5, 0.25]]}
    content |= {"head_order": [[1, 0]], "neuron_order": [[0, 1]]}
    (folder / "elastic.json").write_text(json.dumps(content))


def _write_tables(home: Path) -> None:
    rows = [{"text": text, "label": label} for text, label in ROWS[:40]]
    for name in ("jsonl", "csv", "tsv", "parquet"):
        (home / f"table-{name}").mkdir()
    (home / "table-jsonl" / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, separator in (("csv", ","), ("tsv", "\t")):
        lines = [separator.join(row.values()) for row in rows]
        (home / f"table-{name}" / f"dev.{name}").write_text("\n".join([separator.join(rows[0]), *lines]) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), home / "table-parquet" / "dev.parquet")


def _write_texts(home: Path, texts: Path) -> None:
    content = texts.read_bytes()
    packed = {"txt": content, "gz": gzip.compress(content), "xz": lzma.compress(content)}
    packed["zst"] = zstandard.ZstdCompressor().compress(content)
    for name, data in packed.items():
        (home / f"texts-{name}").mkdir()
        (home / f"texts-{name}" / ("texts.txt" + ("" if name == "txt" else f".{name}"))).write_bytes(data)


def _write_unfinished_corpus(folder: Path, work: Work) -> None:
    """Write a corpus whose build was killed before its manifest."""
    folder.mkdir()
    shutil.copyfile(work.texts, folder / "texts.txt")
    shutil.copytree(work.corpus, folder / "tokenizer", ignore=shutil.ignore_patterns("*.shard", "*manifest*"))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr("bertsmith.data.build_corpus._manifest", killed)
        _resume_corpus(folder)


def mutate(path: Path, chooser: random.Random) -> str:
    """Change a file and return a description of the change."""
    content = bytearray(path.read_bytes())
    if path.suffix in (".json", ".jsonl") and chooser.random() < 0.6:
        lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
        index = chooser.randrange(len(lines))
        try:
            lines[index], kind = _mutate_json(json.loads(lines[index]), chooser)
        except ValueError:
            kind = "unchanged"
        path.write_text("\n".join(lines) + "\n")
        return kind
    kind = chooser.choice(("flip", "flip", "byte", "cut", "insert", "delete", "swap", "empty", "deep"))
    size = len(content)
    position = chooser.randrange(max(1, size if chooser.random() < 0.5 else min(size, 512)))
    if kind == "flip" and size:
        content[position] ^= 1 << chooser.randrange(8)
    elif kind == "byte" and size:
        content[position] = chooser.choice((0, 255, 48, 123, 34, 10))
    elif kind == "cut":
        del content[position:]
    elif kind == "insert":
        content[position:position] = chooser.randbytes(chooser.choice((1, 8, 64)))
    elif kind == "delete":
        del content[position : position + chooser.choice((1, 8, 64))]
    elif kind == "swap":
        other = chooser.randrange(max(1, size))
        content[position : position + 16], content[other : other + 16] = (
            content[other : other + 16],
            content[position : position + 16],
        )
    elif kind == "empty":
        content.clear()
    elif kind == "deep":
        content = bytearray(b"[" * 100_000)
    path.write_bytes(content)
    return kind


def _mutate_json(data: object, chooser: random.Random) -> tuple[str, str]:
    """Replace, remove or rename one value of JSON data."""
    places: list[tuple[object, object]] = []

    def collect(value: object) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            places.append((value, key))
            if len(places) < 3000:
                collect(inner)

    collect(data)
    if not places:
        return json.dumps([data]), "wrapped"
    owner, key = chooser.choice(places)
    kind = chooser.choice(("value", "value", "value", "scaled", "removed", "renamed"))
    old = owner[key]  # type: ignore[index]
    if kind == "scaled" and isinstance(old, int | float) and not isinstance(old, bool):
        owner[key] = old * chooser.choice((-1, 1000, 1_000_000, 0.5))  # type: ignore[index]
    elif kind == "removed":
        del owner[key]  # type: ignore[attr-defined]
    elif kind == "renamed" and isinstance(owner, dict):
        owner[f"{key}x"] = owner.pop(key)
    else:
        owner[key] = chooser.choice(VALUES)  # type: ignore[index]
    return json.dumps(data), f"{kind} {key}"


def mutate_reader(
    name: str, folder: Path, reader: Reader, work: Work, count: int, figures: MutationFigures, seed: int
) -> None:
    """Read a folder `count` times with one mutated file each."""
    chooser = random.Random(f"{name} {seed}")
    copy = work.home / "mutated"

    def fresh() -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)

    fresh()
    normal = run_forked(lambda: reader.read(copy))
    assert normal.code == 0, f"{name}: {normal.output}"
    for _ in range(count):
        fresh()
        path = chooser.choice([path for pattern in reader.files for path in sorted(copy.glob(pattern))])
        before = path.read_bytes()
        kind = mutate(path, chooser)
        if path.read_bytes() == before:
            continue
        outcome = run_forked(lambda: reader.read(copy), seconds=SECONDS, memory_mb=MEMORY_MB)
        figures.mutations[name] += 1
        fault = _fault(outcome, normal, reader)
        figures.errors += outcome.code == 2
        if fault is not None:
            figures.faults.append(f"{name}: {path.name} ({kind}): {fault}")


def _fault(outcome: Outcome, normal: Outcome, reader: Reader) -> str | None:
    """Return the fault of an outcome of reading a mutated file; None if it is an error or the right result."""
    if outcome.is_hung:
        return f"hangs for {SECONDS} s"
    if outcome.code not in (0, 2):
        return f"exit {outcome.code}: {outcome.output[-600:]}"
    if outcome.code == 2 and len(outcome.output.strip().splitlines()) != 1:
        return f"more than one sentence: {outcome.output[-300:]}"
    if outcome.code == 0 and reader.is_sealed and outcome.value != normal.value:
        return "a silent difference"
    if outcome.peak_mb > 2 * normal.peak_mb:
        return f"peak memory {outcome.peak_mb:.0f} MB instead of {normal.peak_mb:.0f} MB"
    return None
