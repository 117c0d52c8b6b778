"""How good sub-networks and artefacts are on dev, by the task's own figure."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bertsmith.checkpoint.files import NewFolder
from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.artefact import write_artefact
from bertsmith.engines.exit_runner import ModelRunner
from bertsmith.layers.subnet import Subnet
from bertsmith.models.build import build, extract
from bertsmith.models.model import Model
from bertsmith.settings import Record
from bertsmith.shrinking.fit.candidates import Candidate, Way
from bertsmith.shrinking.fit.measure import Conditions, Measurer, fingerprint, versions
from bertsmith.shrinking.fit.settings import MEGABYTE, MeasureConfig
from bertsmith.shrinking.fit.store import Measurements, digest
from bertsmith.shrinking.fit.table import Kind, WayTables, stack_config, table_stacks
from bertsmith.tasks.base import Encoding, Evaluation
from bertsmith.tasks.metrics.base import confidence_interval
from bertsmith.tasks.predictor import Predictor, TaskRecord, item_outputs, sample_inputs, write_task_record
from bertsmith.text.rows import Table


class _Part(ModelRunner):
    """A model that answers as one of its sub-networks."""

    def __init__(self, model: Model, subnet: Subnet) -> None:
        super().__init__(model)
        self.subnet = subnet

    def outputs(
        self,
        tokens: Tensor,
        layout: SequenceLayout,
        types: Tensor | None = None,
        *,
        subnet: Subnet | None = None,
        sizes: Tensor | None = None,
    ) -> Tensor:
        return self.model.outputs(tokens, layout, types, subnet=self.subnet)


class Quality:
    """Scores on one part of a task's data."""

    def __init__(self, model: Model, kept: TaskRecord, table: Table, ranking_examples: int, seed: int) -> None:
        self.model, self.kept, self.table = model, kept, table
        self.examples = kept.task.examples(table)
        encoding = Encoding.of(model, kept.sequences.length)
        drawn = np.random.default_rng(seed).permutation(len(self.examples))[:ranking_examples]
        self.some = [self.examples[index] for index in sorted(drawn.tolist())]
        self.is_whole = len(self.some) == len(self.examples)
        """Whether candidates are compared on all examples from the start."""
        self.features = kept.task.features(self.examples, encoding)
        self.some_features = self.features if self.is_whole else kept.task.features(self.some, encoding)

    def of_subnet(self, subnet: Subnet, *, on_all: bool) -> float:
        """The score of a sub-network, run in place."""
        examples, features = (self.examples, self.features) if on_all else (self.some, self.some_features)
        outputs = item_outputs(_Part(self.model, subnet), features, self.kept.sequences)
        answers = self.kept.task.answers(examples, features, outputs)
        return _ordered(self.kept.task.evaluate(examples, answers))

    def of_artefact(self, folder: Path) -> dict[str, Any]:
        """The figures of an artefact on all examples, as `bertsmith evaluate` has them."""
        predictor = Predictor.load(folder)
        evaluation = predictor.task.evaluate(self.examples, predictor.answers(self.examples))
        return {
            "metric": evaluation.metric,
            "score": evaluation.score,
            "figures": evaluation.metrics,
            **self._interval(evaluation),
        }

    def lengths(self, count: int) -> tuple[int, ...]:
        """So many lengths that stand for all of the sequences: evenly spread quantiles."""
        lengths = self.features.tokens.lengths
        places = (np.arange(count) + 0.5) / count
        return tuple(int(length) for length in np.quantile(lengths, places, method="nearest"))

    def _interval(self, evaluation: Evaluation) -> dict[str, list[float]]:
        found = confidence_interval(evaluation, len(self.examples))
        return {} if found is None else {"interval": list(found)}


def _ordered(evaluation: Evaluation) -> float:
    """The score, or something below all scores where it is not defined."""
    return evaluation.score if np.isfinite(evaluation.score) else -1e9


SAMPLES = 64  # rows that ranges of activations are measured with
SOURCE_FILES = ("config.json", "model.safetensors", "tokenizer.json", "vocab.txt", "task.json")


class Bench:
    """Measures on this machine, under given conditions, the sub-networks of one model."""

    def __init__(
        self,
        source: Path,
        quality: Quality,
        conditions: Conditions,
        config: MeasureConfig,
        store: Measurements,
        measurer: Measurer,
        work: Path,
    ) -> None:
        self.quality, self.conditions, self.config = quality, conditions, config
        self.store, self.measurer, self.work = store, measurer, work
        self.models: dict[str, Model] = {"whole": quality.model}
        """The model by what was done to its vocabulary."""
        self._vocabularies: dict[str, Any] = {"whole": quality.model.config.encoder.vocabulary}
        self.machine = fingerprint()
        self.identity = digest(*(_content(source / name) for name in SOURCE_FILES))
        rows = json.dumps([dict(row) for row in quality.table], sort_keys=True, default=str)
        self.data = digest(rows.encode())

    def add_cut(self, model: Model) -> None:
        """Makes a model with fewer pieces known, too."""
        table = model.token_table.detach().cpu().float().numpy()
        self.models["cut"] = model
        self._vocabularies["cut"] = [model.config.encoder.vocabulary, digest(table.tobytes())]

    def subnet_score(self, subnet: Subnet, *, on_all: bool) -> float:
        """The score of a sub-network in float32, on all or on some examples."""
        examples = len(self.quality.examples if on_all else self.quality.some)
        key = {**self._place("in place"), "kind": "subnet", "subnet": described(subnet), "data": self.data}
        key["examples"] = examples
        found = self.store.known(key, lambda: {"score": self.quality.of_subnet(subnet, on_all=on_all)})
        return float(found["score"])

    def tables(self, way: Way, kinds: Sequence[Kind]) -> WayTables:
        """The tables of what layers of these kinds cost in one way."""
        stacks = table_stacks(kinds)
        model = self.models[way.vocabulary]
        configs = [stack_config(model.config, stack) for stack in stacks]
        key = {
            **self._place(way.engine, way),
            "kind": "table",
            "conditions": self.conditions.plain(),
            "networks": digest(*(config.model_dump_json().encode() for config in configs)),
            "runs": self.config.table_runs,
        }
        del key["model"]  # it is the same for all weights

        def measure() -> dict[str, Any]:
            folders = []
            for index, config in enumerate(configs):
                small = build(config, seed=0).eval()
                small.tokenizer = model.tokenizer
                folders.append(self._write(small, way, self.work / f"table-{index}"))
            sizes = [_bytes(folder) for folder in folders]
            timing = self.measurer(folders, self.conditions, self.config.table_runs, self.config.seconds)
            for folder in folders:
                shutil.rmtree(folder)
            return {"latencies": timing.latencies, "sizes": sizes}

        found = self.store.known(key, measure)
        return WayTables.of(stacks, found["latencies"], found["sizes"])

    def size_mb(self, candidate: Candidate) -> float:
        """The megabytes of its artefact."""
        key = {**self._key(candidate), "kind": "size"}
        return float(self.store.known(key, lambda: {"bytes": _bytes(self.folder(candidate))})["bytes"]) / MEGABYTE

    def timing(self, candidate: Candidate, process: int) -> dict[str, Any]:
        """What one of several fresh processes finds: latencies by workload, memory."""
        key = {
            **self._key(candidate),
            "kind": "timing",
            "conditions": self.conditions.plain(),
            "runs": self.config.runs,
            "process": process,
        }

        def measure() -> dict[str, Any]:
            timing = self.measurer([self.folder(candidate)], self.conditions, self.config.runs, self.config.seconds)
            memory = {"memory_mb": timing.memory_mb, "memory_of_model_mb": timing.memory_of_model_mb}
            return {"latency": timing.latencies[0], **memory, "processor_share": timing.processor_share}

        return self.store.known(key, measure)

    def evaluate(self, candidate: Candidate) -> dict[str, Any]:
        """The figures of its artefact on all of dev."""
        key = {**self._key(candidate), "kind": "score", "data": self.data}
        return self.store.known(key, lambda: self.quality.of_artefact(self.folder(candidate)))

    def folder(self, candidate: Candidate) -> Path:
        """Its artefact, which is written now if it is not there."""
        folder = self.work / candidate.name
        if not folder.is_dir():
            model = extract(self.models[candidate.way.vocabulary], candidate.subnet).eval()
            self._write(model, candidate.way, folder)
        return folder

    def discard(self, candidate: Candidate) -> None:
        """Its artefact is not needed any more."""
        shutil.rmtree(self.work / candidate.name, ignore_errors=True)

    def _write(self, model: Model, way: Way, folder: Path) -> Path:
        with NewFolder(folder) as new:
            # by its own tokenizer: ids of the whole vocabulary are none of one that was cut
            samples = sample_inputs(model, self.quality.kept, self.quality.table, rows=SAMPLES)
            write_artefact(model, new, way.artefact, samples)
            write_task_record(self.quality.kept, new)
        return folder

    def _key(self, candidate: Candidate) -> dict[str, Any]:
        way = candidate.way
        return {**self._place(way.engine, way), "subnet": described(candidate.subnet)}

    def _place(self, engine: str, way: Way | None = None) -> dict[str, Any]:
        key: dict[str, Any] = {"machine": self.machine, "versions": versions(engine), "model": self.identity}
        if way is not None:
            key |= {"engine": engine, "precision": way.precision, "vocabulary": self._vocabularies[way.vocabulary]}
        return key


def described(record: Record) -> Mapping[str, Any]:
    """What a record says, without what it leaves open."""
    return {name: value for name, value in record.plain().items() if value is not None}


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
