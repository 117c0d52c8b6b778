"""What is known before anything is measured: the model, the data, the conditions, what is to be tried."""

from dataclasses import dataclass
from pathlib import Path

from bertsmith.checkpoint.store import load
from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.models.model import Model
from bertsmith.models.seq2seq import Seq2Seq
from bertsmith.shrinking.fit.candidates import even_grid
from bertsmith.shrinking.fit.machine import usable_cores
from bertsmith.shrinking.fit.measure import Conditions, Workload
from bertsmith.shrinking.fit.quality import Quality
from bertsmith.shrinking.fit.settings import FitSettings
from bertsmith.shrinking.fit.ways import Way, ways
from bertsmith.tasks.parts import task_parts
from bertsmith.tasks.predictor import KeptTask, read_kept
from bertsmith.text.tables import Table

DATA_LENGTHS = 16  # that stand for all lengths of the data


@dataclass
class Prepared:
    """What is known before anything is measured."""

    settings: FitSettings
    model: Model
    kept: KeptTask
    table: Table
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
    folder = Path(settings.model)
    if not folder.is_dir():
        raise InputError(f"MODEL {settings.model!r} is no folder; give that of a fine-tuned model")
    kept = read_kept(folder)
    table = task_parts(settings.data, file_is=settings.part).read(settings.part)
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
    found, notices = ways(search, lengths)
    if not is_elastic:
        notices.append(
            "the model is not elastic (it has no elastic.json), so its smaller sub-networks were never trained; "
            "bertsmith shrink trains them"
        )
    return Prepared(settings, model, kept, table, quality, conditions, grid, is_elastic, found, notices)
