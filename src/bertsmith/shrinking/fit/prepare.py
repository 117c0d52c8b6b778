"""What is known before anything is measured: the model, the data, the conditions, what is to be tried."""

from dataclasses import dataclass
from pathlib import Path

from bertsmith.bundled import model_folder
from bertsmith.checkpoint.store import load
from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.models.model import Model
from bertsmith.models.seq2seq import Seq2Seq
from bertsmith.shrinking.fit.candidates import even_grid
from bertsmith.shrinking.fit.measure import Conditions, Workload, usable_cores
from bertsmith.shrinking.fit.quality import Quality
from bertsmith.shrinking.fit.settings import FitSettings
from bertsmith.shrinking.fit.ways import Way, ways
from bertsmith.tasks.data_source import held_out, task_parts
from bertsmith.tasks.predictor import KeptTask, read_kept
from bertsmith.text.rows import Table
from bertsmith.toml import read_toml

RECIPE = "recipe.toml"
DATA_LENGTHS = 16  # that stand for all lengths of the data


@dataclass
class Prepared:
    """What is known before anything is measured."""

    settings: FitSettings
    model: Model
    kept: KeptTask
    table: Table
    """What candidates are scored on."""
    train: Table | None
    """The training part, if the data have one."""
    quality: Quality
    conditions: Conditions
    grid: list[Subnet]
    is_elastic: bool
    ways: list[Way]
    notices: list[str]

    @property
    def evolves(self) -> bool:
        """Whether sub-networks with layers that differ are looked for."""
        asked = self.settings.search.subnets
        return self.is_elastic if asked is None else asked == "layers"


def prepare(settings: FitSettings) -> Prepared:
    """The model, the data and what is to be tried; a sentence if any of it cannot be used."""
    settings.budget.require_any()
    folder = model_folder(settings.model)
    if not folder.is_dir():
        raise InputError(f"MODEL {settings.model!r} is no folder; give that of a fine-tuned model")
    kept = read_kept(settings.model)
    table, train, notices = _tables(settings, kept)
    model = load(folder)
    if isinstance(model, Seq2Seq):
        raise InputError(f"{settings.model!r} holds a model that translates; fit is for encoders")
    search, budget = settings.search, settings.budget
    quality = Quality(model, kept, table, search.ranking_examples, search.seed)
    embedding = model.config.encoder.embedding
    for length in budget.lengths:
        if embedding.positions != "none" and length > embedding.longest:
            raise InputError(f"--length is {length}; the model takes at most {embedding.longest}")
    workloads = tuple(Workload(name=str(length), lengths=(length,)) for length in dict.fromkeys(budget.lengths))
    if not workloads:
        workloads = (Workload(name="data", lengths=quality.lengths(DATA_LENGTHS)),)
    conditions = Conditions(
        workloads=workloads,
        batch=budget.batch,
        threads=budget.threads or usable_cores(),
        layout=kept.sequences.layout,
    )
    grid, is_elastic = even_grid(folder, model.encoder.units)
    lengths = [length for workload in workloads for length in workload.lengths]
    found, left_out = ways(search, lengths)
    notices += left_out
    if not is_elastic:
        notices.append(
            "the model is not elastic (it has no elastic.json), so its smaller sub-networks were never trained; "
            "bertsmith shrink trains them"
        )
    return Prepared(settings, model, kept, table, train, quality, conditions, grid, is_elastic, found, notices)


def _tables(settings: FitSettings, kept: KeptTask) -> tuple[Table, Table | None, list[str]]:
    """The rows that candidates are scored on, the training rows, and sentences about them.

    Where fine-tuning found no dev part and held rows out of train, these are the same rows: those that were trained on
    would flatter every candidate.
    """
    is_trained_on = settings.part == "dev" and Path(settings.data).is_file() and _learned_from(settings)
    parts = task_parts(settings.data, file_is="train" if is_trained_on else settings.part)
    table, train = parts.find(settings.part), parts.find("train")
    if table is not None:
        return table, train, []
    if settings.part != "dev" or train is None:
        raise parts.missing(settings.part)
    train, table, said = held_out(kept.task, train, "there is no dev part")
    return table, train, [f"{said}, as in fine-tuning"]


def _learned_from(settings: FitSettings) -> bool:
    """Whether the model's recipe names the same data."""
    recipe = model_folder(settings.model) / RECIPE
    data = read_toml(recipe).get("data") if recipe.is_file() else None
    return isinstance(data, str) and Path(data).resolve() == Path(settings.data).resolve()
