"""A tiny fine-tuned model with synthetic scores and latencies, so that the best candidate is known."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import bertsmith
from bertsmith.layers.subnet import Subnet
from bertsmith.models.attach_heads import with_task_head
from bertsmith.shrinking.fit.bench import Scorer
from bertsmith.shrinking.fit.candidates import Candidate
from bertsmith.shrinking.fit.measure import ArtefactScore, Conditions, Timing
from bertsmith.shrinking.fit.search import FitSearch, SearchOutcome, prepare
from bertsmith.shrinking.fit.settings import FitSettings
from bertsmith.shrinking.fit.store import MEASUREMENTS, Measurements
from bertsmith.tasks.predictor import TaskRecord, write_task_record
from bertsmith.text.learn import learn_tokenizer

LAYERS, HEADS, NEURONS = 4, 4, 64
TEXTS = ["good words", "bad words", "awful", "fine good day", "a bad day", "fine words", "awful day", "good"]


def write_folders(folder: Path) -> tuple[Path, Path]:
    """Write a model with a task record, like a fine-tuned one, and data for its task."""
    tokenizer = learn_tokenizer(TEXTS * 4, "wordpiece", 80, progress=False)
    sizes = {"width": 16, "heads": HEADS, "layers": LAYERS, "max_length": 32}
    model = bertsmith.build(bertsmith.preset("bert-tiny", vocabulary=tokenizer.size, **sizes), seed=0)
    model.tokenizer = tokenizer
    record = TaskRecord.parse(
        {"task": {"kind": "classification", "labels": ["no", "yes"]}, "sequences": {"length": 16}}
    )
    model = with_task_head(model, record.task.head(model.config), seed=0)
    bertsmith.save(model, folder / "model")
    write_task_record(record, folder / "model")
    (folder / "data").mkdir()
    rows = [json.dumps({"text": text, "label": "yes" if "good" in text else "no"}) + "\n" for text in TEXTS]
    for split in ("train", "dev"):
        (folder / "data" / f"{split}.jsonl").write_text("".join(rows), encoding="utf-8")
    return folder / "model", folder / "data"


class FakeMeasurer:
    """Return latencies computed from the config: a constant plus a cost per head and neuron."""

    factors: Mapping[str, float] = {"float32": 1.0, "bfloat16": 1.3}

    def __init__(self, noise: Sequence[float] = (1.0,)) -> None:
        self.noise, self.calls, self.measured = noise, 0, list[Path]()

    def __call__(self, folders: Sequence[Path], conditions: Conditions, runs: int, seconds: float) -> Timing:
        factor = self.noise[self.calls % len(self.noise)] if len(folders) == 1 else 1.0
        self.calls += 1
        self.measured += folders
        latencies = []
        for folder in folders:
            precision = json.loads((folder / "artefact.json").read_text())["precision"]
            milliseconds = latency_of(folder) * self.factors[precision] * factor
            p = {"p50": milliseconds, "p95": 1.1 * milliseconds, "mean": milliseconds, "runs": float(runs)}
            latencies.append({workload.name: p for workload in conditions.workloads})
        return Timing(latencies, 100 + latency_of(folders[0]), latency_of(folders[0]))


def latency_of(folder: Path) -> float:
    config = json.loads((folder / "config.json").read_text())["model"]["encoder"]
    layers = config["layers"]
    return 1.0 + sum(
        0.1 + layer["mixer"]["heads"] / HEADS + layer["feedforward"]["neurons"] / NEURONS for layer in layers
    )


def score_of(subnet: Subnet) -> float:
    """Synthetic score: more units are better, in later layers more so."""
    full = [bertsmith.layers.subnet.LayerCut(HEADS, NEURONS)] * LAYERS
    return 50 + sum((1 + 0.5 * index) * (cut.heads / HEADS) ** 0.5 for index, cut in subnet.cuts(full))


@pytest.fixture
def synthetic_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace scores by `score_of`; artefacts in bfloat16 score one point less."""

    def score_subnet(self: Scorer, subnet: Subnet, *, on_all: bool) -> float:
        return score_of(subnet)

    def score_artefact(self: Scorer, folder: Path) -> ArtefactScore:
        loss = 1.0 if "bfloat16" in folder.name else 0.0
        score = ARTEFACTS[folder.name] - loss
        return ArtefactScore("accuracy", score, {"accuracy": score}, [score - 1, score + 1])

    monkeypatch.setattr(Scorer, "score_subnet", score_subnet)
    monkeypatch.setattr(Scorer, "score_artefact", score_artefact)
    original = Candidate.name.fget
    assert original is not None

    def name(candidate: Candidate) -> str:
        ARTEFACTS[original(candidate)] = candidate.float32_score
        return original(candidate)

    monkeypatch.setattr(Candidate, "name", property(name))


ARTEFACTS: dict[str, float] = {}
"""Synthetic scores by the names of artefacts."""


def run_search(folders: tuple[Path, Path], out: Path, measurer: Any = None, **settings: Any) -> SearchOutcome:
    """Run a search with fake measurements."""
    model, data = folders
    defaults = {"engines": ["torch"], "precisions": list(FakeMeasurer.factors), "subnets": "even"}
    search = {**defaults, **settings.pop("search", {})}
    plain = {"model": str(model), "data": str(data), "search": search, **settings}
    inputs = prepare(FitSettings.parse(plain))
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    store = Measurements(out / MEASUREMENTS)
    return FitSearch(inputs, store, work, measurer=measurer or FakeMeasurer()).run()
