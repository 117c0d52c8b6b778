"""Score and time sub-networks and artefacts; earlier measurements are reused."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from bertsmith.bundled import model_folder
from bertsmith.checkpoint.source import ModelSource
from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.artefact import write_artefact
from bertsmith.engines.exit_runner import ModelRunner
from bertsmith.files import NewFolder
from bertsmith.layers.subnet import Subnet
from bertsmith.models.build import build, extract
from bertsmith.models.model import Model
from bertsmith.settings import Record
from bertsmith.shrinking.fit.candidates import Candidate, RunMode
from bertsmith.shrinking.fit.measure import (
    MEGABYTE,
    ArtefactScore,
    Conditions,
    Measurer,
    ProcessTiming,
    Timing,
    fingerprint,
    least_disturbed,
    versions,
)
from bertsmith.shrinking.fit.settings import MeasureConfig
from bertsmith.shrinking.fit.store import Measurements, Value, digest
from bertsmith.shrinking.fit.table import LayerShape, ModeTables, stack_config, table_stacks
from bertsmith.tasks.base import Encoding, Evaluation
from bertsmith.tasks.degenerate import has_constant_answers
from bertsmith.tasks.metrics.base import confidence_interval
from bertsmith.tasks.outputs import item_outputs
from bertsmith.tasks.predictor import Predictor, TaskRecord, sample_inputs, write_task_record
from bertsmith.text.rows import Table


class SubnetRunner(ModelRunner):
    """Run a sub-network in place, without extracting it."""

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


class Scorer:
    """Score sub-networks and artefacts on one split of a task's data."""

    def __init__(self, model: Model, record: TaskRecord, table: Table, ranking_examples: int, seed: int) -> None:
        self.model, self.record, self.table = model, record, table
        self.examples = record.task.examples(table)
        encoding = Encoding.of(model, record.sequences.length)
        sample = np.random.default_rng(seed).permutation(len(self.examples))[:ranking_examples]
        self.ranking_examples = [self.examples[index] for index in sorted(sample.tolist())]
        self.is_whole = len(self.ranking_examples) == len(self.examples)
        """Whether candidates are ranked on all examples."""
        self.features = record.task.features(self.examples, encoding)
        self.ranking_features = (
            self.features if self.is_whole else record.task.features(self.ranking_examples, encoding)
        )

    def score_subnet(self, subnet: Subnet, *, on_all: bool) -> float:
        """Return the score of a sub-network, run in place."""
        examples, features = (
            (self.examples, self.features) if on_all else (self.ranking_examples, self.ranking_features)
        )
        outputs = item_outputs(SubnetRunner(self.model, subnet), features, self.record.sequences)
        answers = self.record.task.answers(examples, features, outputs)
        return _finite_score(self.record.task.evaluate(examples, answers))

    def is_degenerate(self) -> bool:
        """Whether the whole model gives the same answer to all examples that candidates are ranked on."""
        outputs = item_outputs(SubnetRunner(self.model, Subnet()), self.ranking_features, self.record.sequences)
        answers = self.record.task.answers(self.ranking_examples, self.ranking_features, outputs)
        return has_constant_answers(self.record.task, self.ranking_examples, answers)

    def score_artefact(self, folder: Path) -> ArtefactScore:
        """Return the scores of an artefact on all examples, as `bertsmith evaluate` computes them."""
        predictor = Predictor.load(folder)
        evaluation = predictor.task.evaluate(self.examples, predictor.answers(self.examples))
        interval = confidence_interval(evaluation, len(self.examples))
        return ArtefactScore(evaluation.metric, evaluation.score, dict(evaluation.metrics), interval)

    def lengths(self, count: int) -> tuple[int, ...]:
        """Return `count` evenly spaced quantiles of the sequence lengths."""
        lengths = self.features.tokens.lengths
        quantiles = (np.arange(count) + 0.5) / count
        return tuple(int(length) for length in np.quantile(lengths, quantiles, method="nearest"))


def _finite_score(evaluation: Evaluation) -> float:
    """Return the score, or a number below all scores if it is not finite."""
    return evaluation.score if np.isfinite(evaluation.score) else -1e9


SAMPLES = 64  # rows that calibrate the ranges of activations
SOURCE_FILES = ("config.json", "model.safetensors", "tokenizer.json", "vocab.txt", "task.json")


class Bench:
    """Measure the sub-networks of one model on this machine, under given conditions."""

    def __init__(
        self,
        source: ModelSource,
        scorer: Scorer,
        conditions: Conditions,
        config: MeasureConfig,
        store: Measurements,
        measurer: Measurer,
        work: Path,
    ) -> None:
        self.scorer, self.conditions, self.config = scorer, conditions, config
        self.store, self.measurer, self.work = store, measurer, work
        self.models: dict[str, Model] = {"whole": scorer.model}
        """The model with its whole and its cut vocabulary."""
        self._vocabularies: dict[str, object] = {"whole": scorer.model.config.encoder.vocabulary}
        self.machine = fingerprint()
        folder = model_folder(source.name)
        subnet = b"" if source.subnet is None else source.subnet.model_dump_json().encode()
        self.identity = digest(*(_content(folder / name) for name in SOURCE_FILES), *([subnet] if subnet else []))
        rows = json.dumps([dict(row) for row in scorer.table], sort_keys=True, default=str)
        self.data = digest(rows.encode())

    def add_cut(self, model: Model) -> None:
        """Add the model with a cut vocabulary."""
        table = model.token_table.detach().cpu().float().numpy()
        self.models["cut"] = model
        self._vocabularies["cut"] = [model.config.encoder.vocabulary, digest(table.tobytes())]

    def subnet_score(self, subnet: Subnet, *, on_all: bool) -> float:
        """Return the score of a sub-network in float32, on all examples or on those for ranking."""
        examples = len(self.scorer.examples if on_all else self.scorer.ranking_examples)
        key = {**self._environment("in place"), "kind": "subnet", "subnet": without_none(subnet), "data": self.data}
        key["examples"] = examples
        value = self.store.get_or_measure(key, lambda: {"score": self.scorer.score_subnet(subnet, on_all=on_all)})
        return float(value["score"])

    def tables(self, mode: RunMode, shapes: Sequence[LayerShape]) -> ModeTables:
        """Measure the latency and size tables for layers of these shapes in one run mode."""
        stacks = table_stacks(shapes)
        model = self.models[mode.vocabulary]
        configs = [stack_config(model.config, stack) for stack in stacks]
        key = {
            **self._environment(mode.engine, mode),
            "kind": "table",
            "conditions": self.conditions.plain(),
            "networks": digest(*(config.model_dump_json().encode() for config in configs)),
            "runs": self.config.table_runs,
        }
        del key["model"]  # latency does not depend on the weights

        def measure() -> Value:
            folders = []
            for index, config in enumerate(configs):
                small = build(config, seed=0).eval()
                small.tokenizer = model.tokenizer
                folders.append(self._write(small, mode, self.work / f"table-{index}"))
            sizes = [_bytes(folder) for folder in folders]
            timing = self._time(folders, self.config.table_runs)
            for folder in folders:
                shutil.rmtree(folder)
            return {"latencies": timing.latencies, "sizes": sizes, "processor_share": timing.processor_share}

        value = self.store.get_or_measure(key, measure)
        return ModeTables.of(stacks, value["latencies"], value["sizes"])

    def size_mb(self, candidate: Candidate) -> float:
        """Return the size of the artefact of a candidate."""
        key = {**self._key(candidate), "kind": "size"}
        return (
            float(self.store.get_or_measure(key, lambda: {"bytes": _bytes(self.folder(candidate))})["bytes"]) / MEGABYTE
        )

    def timing(self, candidate: Candidate, process: int) -> ProcessTiming:
        """Time a candidate in a fresh process; `process` numbers the repeats."""
        key = {
            **self._key(candidate),
            "kind": "timing",
            "conditions": self.conditions.plain(),
            "runs": self.config.runs,
            "process": process,
        }

        def measure() -> Value:
            timing = self._time([self.folder(candidate)], self.config.runs)
            memory = {"memory_mb": timing.memory_mb, "memory_of_model_mb": timing.memory_of_model_mb}
            return {"latency": timing.latencies[0], **memory, "processor_share": timing.processor_share}

        return ProcessTiming(**self.store.get_or_measure(key, measure))

    def _time(self, folders: Sequence[Path], runs: int) -> Timing:
        return least_disturbed(self.measurer, folders, self.conditions, runs, self.config.seconds)

    def score(self, candidate: Candidate) -> ArtefactScore:
        """Score the artefact of a candidate on all of dev."""
        key = {**self._key(candidate), "kind": "score", "data": self.data}
        value = self.store.get_or_measure(key, lambda: self.scorer.score_artefact(self.folder(candidate)).value)
        return ArtefactScore(value["metric"], value["score"], value["metrics"], value.get("interval"))

    def folder(self, candidate: Candidate) -> Path:
        """Return the folder with the artefact of a candidate; write it if it does not exist."""
        folder = self.work / candidate.name
        if not folder.is_dir():
            model = extract(self.models[candidate.mode.vocabulary], candidate.subnet).eval()
            self._write(model, candidate.mode, folder)
        return folder

    def discard(self, candidate: Candidate) -> None:
        """Remove the artefact of a candidate."""
        shutil.rmtree(self.work / candidate.name, ignore_errors=True)

    def _write(self, model: Model, mode: RunMode, folder: Path) -> Path:
        with NewFolder(folder) as new:
            # the model's own tokenizer, because a cut vocabulary has other ids
            samples = sample_inputs(model, self.scorer.record, self.scorer.table, rows=SAMPLES)
            write_artefact(model, new, mode.artefact, samples)
            write_task_record(self.scorer.record, new)
        return folder

    def _key(self, candidate: Candidate) -> Value:
        mode = candidate.mode
        return {**self._environment(mode.engine, mode), "subnet": without_none(candidate.subnet)}

    def _environment(self, engine: str, mode: RunMode | None = None) -> Value:
        key: Value = {"machine": self.machine, "versions": versions(engine), "model": self.identity}
        if mode is not None:
            key |= {"engine": engine, "precision": mode.precision, "vocabulary": self._vocabularies[mode.vocabulary]}
        return key


def without_none(record: Record) -> Value:
    """Return a record as plain data without its None values."""
    return {name: value for name, value in record.plain().items() if value is not None}


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
