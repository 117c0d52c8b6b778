"""`bertsmith evaluate --mteb`: score the vectors of a model on tasks of MTEB, with the `mteb` package."""

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from bertsmith.checkpoint.store import load
from bertsmith.data.devices import device_type
from bertsmith.data.inference import InferencePrecision
from bertsmith.errors import InputError, first_line
from bertsmith.models.model import Model
from bertsmith.models.search import pairwise_similarities
from bertsmith.runs.output import check_out, claim, write_result
from bertsmith.runs.result import OneShotResult, print_plain

FILES = "mteb"
"""Folder with the full results of every task, in MTEB's own format."""


@dataclass(frozen=True, kw_only=True)
class MtebScore:
    """Main score of one task in percent: the mean over its splits and languages."""

    score: float
    metric: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class MtebResult(OneShotResult):
    """Main scores; `score` is their mean over tasks."""

    score: float
    tasks: dict[str, MtebScore]
    model: str
    data: str | None
    mteb: str
    """Version of the package."""


def evaluate_mteb(
    folder: Path,
    names: Sequence[str],
    *,
    data: Path | None,
    out: Path | None,
    device: str,
    precision: InferencePrecision,
    force: bool,
) -> MtebResult:
    """Score a model on tasks or benchmarks of MTEB; `data` holds data sets in folders of their hub names."""
    if find_spec("mteb") is None:
        raise InputError("--mteb needs mteb, which is not installed: pip install 'bertsmith[mteb]'")
    import mteb  # takes seconds
    from mteb.models import ModelMeta

    tasks = _find_tasks(mteb, names)
    for task in tasks if data is not None else ():
        _use_local_data(task, Path(str(data)))
    if out is not None:
        check_out(out, force, folder, data)
    for task in tasks:
        _load_data(task)  # raises before the model is loaded
    model = load(folder, device=device_type(device))
    name = f"bertsmith/{folder.resolve().name}"  # MTEB wants a name like the hub's
    meta = ModelMeta.create_empty({"name": name, "revision": "local"})
    encoder = MtebEncoder(model, precision, meta)
    scores: dict[str, MtebScore] = {}
    results: dict[str, Any] = {}
    for task in tasks:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks of the package about models without metadata
            # no cache: a folder of the same name may have other weights by now
            (result,) = mteb.evaluate(
                encoder, task, cache=None, co2_tracker=False, show_progress_bar=sys.stderr.isatty()
            ).task_results
        results[task.metadata.name] = result
        scores[task.metadata.name] = MtebScore(
            score=round(100 * float(result.get_score()), 4),
            metric=task.metadata.main_score,
            seconds=round(result.evaluation_time or 0.0, 1),
        )
    outcome = MtebResult(
        score=round(fmean(one.score for one in scores.values()), 4),
        tasks=scores,
        model=str(folder),
        data=None if data is None else str(data),
        mteb=mteb.__version__,
    )
    if out is not None:
        claim(out, force, folder, data)
        (out / FILES).mkdir()
        for name, result in results.items():
            result.to_disk(out / FILES / f"{name}.json")
        write_result(out, outcome.to_json())
    _print_scores(outcome, out)
    return outcome


class MtebEncoder:
    """A model as an encoder of the `mteb` package.

    Prompts of the model are chosen as MTEB documents it: by task, by type of task, then for queries and documents.
    """

    def __init__(self, model: Model, precision: InferencePrecision, meta: Any) -> None:
        self.model, self.precision, self.mteb_model_meta = model, precision, meta

    def encode(
        self, inputs: Iterable[Mapping[str, Any]], *, task_metadata: Any, prompt_type: Any = None, **options: Any
    ) -> Tensor:
        """Return the vectors of all batches, on the CPU."""
        texts = [text for batch in inputs for text in batch["text"]]
        role = None if prompt_type is None else str(prompt_type.value)
        names = [name for of in (task_metadata.name, task_metadata.type) for name in (f"{of}-{role}", of)]
        embedder = self.model.config.embedder
        prompt = next((name for name in names if embedder is not None and name in embedder.texts.prompts), None)
        if prompt is not None:
            vectors = self.model.encode(texts, prompt_name=prompt, precision=self.precision)
        elif role == "query":
            vectors = self.model.encode_query(texts, precision=self.precision)
        elif role == "document":
            vectors = self.model.encode_document(texts, precision=self.precision)
        else:
            vectors = self.model.encode(texts, precision=self.precision)
        return vectors.cpu()

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the similarity of every vector of the first with every one of the second."""
        return self.model.similarity(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the similarities of corresponding vectors."""
        return pairwise_similarities(embeddings1, embeddings2, self.model.similarity_kind)


def _find_tasks(mteb: Any, names: Sequence[str]) -> list[Any]:
    """Return the tasks with these names, and all tasks of a benchmark."""
    tasks: list[Any] = []
    benchmarks = {benchmark.name: benchmark for benchmark in mteb.get_benchmarks()}
    for name in names:
        if name in benchmarks:
            tasks += benchmarks[name].tasks
            continue
        try:
            tasks.append(mteb.get_task(name))
        except KeyError as error:
            hint = str(error.args[0]).partition("Did you mean: ")[2] or "a task or a benchmark of the mteb package"
            raise InputError(f"--mteb names {name!r}, which mteb does not have; use {hint.removesuffix('?')}") from None
    for task in tasks:
        if list(task.metadata.modalities) != ["text"]:
            kinds = ", ".join(task.metadata.modalities)
            raise InputError(f"--mteb names {task.metadata.name!r}, whose inputs are {kinds}; allowed: tasks on text")
    return tasks


def _use_local_data(task: Any, folder: Path) -> None:
    """Let a task read its data from a folder instead of the hub."""
    path = task.metadata.dataset["path"]
    places = [folder / path, folder / Path(path).name]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise InputError(
            f"--data {str(folder)!r} has no folder {path!r} with the data of {task.metadata.name}; download the data "
            "set of this name from the hub into it, or omit --data"
        )
    local = {**task.metadata.dataset, "path": str(found)}
    task.metadata = task.metadata.model_copy(update={"dataset": local})


def _load_data(task: Any) -> None:
    try:
        task.load_data()
    except (OSError, ValueError, KeyError) as error:
        path = task.metadata.dataset["path"]
        raise InputError(
            f"--mteb: the data of {task.metadata.name}, {path!r}, cannot be read ({first_line(error)}); without "
            "network access, give --data with a folder that contains it"
        ) from None


def _print_scores(result: MtebResult, out: Path | None) -> None:
    table = Table("task", "metric", "score", box=None, pad_edge=False)
    for name, one in result.tasks.items():
        table.add_row(name, one.metric, f"{one.score:.2f}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    written = "" if out is None else f"; written to {out}"
    mean = f"mean {result.score:.2f}; " if len(result.tasks) > 1 else ""
    print_plain(f"{mean}mteb {result.mteb}{written}")
