"""`bertsmith shrink`: a fine-tuned model → one that is smaller, or that can be cut to any size."""

import json
import shutil
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from bertsmith.bundled import model_folder, model_text
from bertsmith.checkpoint.source import replace_source
from bertsmith.checkpoint.store import write_model
from bertsmith.errors import InputError, nearest
from bertsmith.runs.folder import RunFolder, read_recipe_file
from bertsmith.runs.result import Result, StoppedRun, print_explanation, print_plain
from bertsmith.runs.shrink_results import (
    ElasticResult,
    ExitResult,
    PruneResult,
    RowCounts,
    VocabularyResult,
    print_elastic,
    print_exits,
    print_pruned,
    print_vocabulary,
    write_elastic_report,
)
from bertsmith.settings import Plain
from bertsmith.shrinking.augmentation import Augmenter
from bertsmith.shrinking.context import (
    ShrinkContext,
    TaskTables,
    TrainingStopped,
    encode_split,
    freeze_random_features,
    load_fine_tuned,
    read_settings,
)
from bertsmith.shrinking.elastic import ElasticSettings, check_head, explain_elastic, remove_stages, shrink_elastic
from bertsmith.shrinking.elastic_metadata import write_elastic_metadata
from bertsmith.shrinking.exits import (
    ExitSettings,
    answer_kind,
    choose_rule,
    explain_exits,
    make_exit_trainer,
    with_exits,
)
from bertsmith.shrinking.prune import PruneSettings, explain_prune, make_selector, remove_cuts, shrink_prune
from bertsmith.shrinking.pruned_units import write_pruning_metadata
from bertsmith.shrinking.vocabulary import VocabularySettings, shrink_vocabulary
from bertsmith.tasks.predictor import write_task_record
from bertsmith.toml import override
from bertsmith.training.run_config import device_type
from bertsmith.training.summary import summarise_training

METHODS = ("elastic", "prune", "exits", "vocabulary")
ShrinkResult = ElasticResult | PruneResult | ExitResult | VocabularyResult


def shrink(
    model: str | Path | None = None,
    *,
    data: str | None = None,
    out: Path,
    method: str | None = None,
    recipe: Path | None = None,
    widths: Annotated[list[float] | None, Parameter(consume_multiple=True)] = None,
    depths: Annotated[list[float] | None, Parameter(consume_multiple=True)] = None,
    keep: float | None = None,
    tokens: int | None = None,
    rank: int | None = None,
    tolerance: float | None = None,
    epochs: float | None = None,
    learning_rate: float | None = None,
    batch: int | None = None,
    augment: str | Path | None = None,
    column: list[str] | None = None,
    set: list[str] | None = None,
    seed: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
) -> ShrinkResult | Result:
    """Make a fine-tuned model elastic, so that it works at every width and depth (DynaBERT), or make it smaller.

    Elastic: heads and neurons are ordered by importance; then sub-networks of all widths, and of all widths and depths,
    learn from the fine-tuned model. bertsmith.load(OUT, subnet=...) and bertsmith fit extract any of them. Prune: the
    least important heads and neurons are removed, and the model is trained to recover. Exits: small heads on lower
    layers answer the inputs they are certain of. Vocabulary: it is cut to the pieces that the training texts use.

    Parameters
    ----------
    model
        The folder of a fine-tuned model; bertsmith finetune makes one of a bundled model.
    data
        Its data: a folder with train.jsonl and dev.jsonl (or .csv, .tsv, .parquet), one such file, or a name on the
        hub.
    out
        The folder to write: the model, recipe.toml, result.json, and elastic.json with all sub-networks, or pruned.json
        with the units that were kept.
    method
        "elastic" (the default), "prune", "exits" or "vocabulary".
    recipe
        A TOML file with the settings. With --resume the run's own recipe is used.
    widths
        Shares of heads and neurons, such as 1 0.75 0.5 0.25 (grid.widths).
    depths
        Shares of layers, such as 1 0.75 0.5 (grid.depths).
    keep
        With --method prune: the share of heads and of neurons to keep (prune.keep).
    tokens
        With --method vocabulary: maximum number of tokens to keep (vocabulary.tokens); default: all that are used.
    rank
        With --method vocabulary: the rank of a factorised token table (vocabulary.rank).
    tolerance
        With --method exits: points of the dev score that early exits may cost (leave.tolerance).
    epochs
        Epochs of every stage (run.epochs).
    learning_rate
        The highest learning rate (optimizer.learning_rate); that of the fine-tuning if not given.
    batch
        Examples of a step (batch.examples).
    augment
        A bundled model (small) or the folder of a masked language model: the sub-networks also learn from copies of the
        training rows in which it replaces words (augmentation.model).
    column
        A column of the task, such as label=stars; may be given several times.
    set
        One setting over the recipe, such as grid.sample=2; may be given several times.
    seed
        Seed of data order, dropout and sampling (run.seed).
    device
        Where to compute; "auto" takes a GPU if there is one.
    explain
        Print the resolved settings and their costs, then stop.
    resume
        Resume an interrupted run in --out.
    force
        Replace an earlier run in --out.
    """
    out = Path(out)
    plain = dict(read_recipe_file(None if recipe is None else Path(recipe), out if resume else None) or {})
    plain |= {name: str(value) for name, value in (("data", data), ("method", method)) if value is not None}
    if model is not None:
        plain["model"] = replace_source(plain.get("model"), model_text(model))
    if "model" not in plain:
        raise InputError("MODEL is not given and no recipe names one; give the folder of a fine-tuned model")
    chosen = plain.setdefault("method", "elastic")
    if chosen not in METHODS:
        raise InputError(f"--method is {chosen!r}; {nearest(str(chosen), METHODS)}")
    own = {
        "widths": ("elastic", widths),
        "depths": ("elastic", depths),
        "augment": ("elastic", augment),
        "keep": ("prune", keep),
        "tolerance": ("exits", tolerance),
        "tokens": ("vocabulary", tokens),
        "rank": ("vocabulary", rank),
    }
    for name, (home, value) in own.items():
        if value is not None and chosen != home:
            raise InputError(f"--{name} is given with --method {chosen}; allowed: with --method {home}")
    flags = {
        "grid.widths": widths,
        "grid.depths": depths,
        "prune.keep": keep,
        "leave.tolerance": tolerance,
        "vocabulary.tokens": tokens,
        "vocabulary.rank": rank,
        "run.epochs": epochs,
        "optimizer.learning_rate": learning_rate,
        "batch.examples": batch,
        "run.seed": seed,
        "augmentation.model": None if augment is None else json.dumps(model_text(augment)),
    }
    given = [f"{path}={value}" for path, value in flags.items() if value is not None]
    plain = override(plain, [*(set or []), *given])
    columns, source = column or [], str(recipe or "settings")
    run: Plain = {"device": device, "explain": explain, "resume": resume, "force": force}
    if chosen == "prune":
        return run_prune(*read_settings(PruneSettings, plain, columns, source=source), out, **run)
    if chosen == "exits":
        # fresh heads alone need a higher rate than a trained encoder
        inherits = plain.get("encoder") == "joint"
        return run_exits(*read_settings(ExitSettings, plain, columns, source=source, inherits=inherits), out, **run)
    if chosen == "vocabulary":
        cut = read_settings(VocabularySettings, plain, columns, source=source, inherits=False)
        return run_vocabulary(*cut, out, **run)
    return run_elastic(*read_settings(ElasticSettings, plain, columns, source=source), out, **run)


def run_elastic(
    settings: ElasticSettings,
    tables: TaskTables,
    out: Path,
    *,
    device: str,
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
) -> ElasticResult | Result:
    """Make a model elastic; leave it with the record of its sub-networks, page and result in `out`."""
    check_head(settings)
    augmenter, task = Augmenter.open(settings.task, settings.augmentation), settings.task
    if explain:
        rows = len(tables.train)
        augmented_rows = rows if augmenter is None else augmenter.max_rows(rows)
        return print_explanation(settings, explain_elastic(settings, load_fine_tuned(settings), rows, augmented_rows))
    inputs = [*settings.inputs, *([] if augmenter is None else [model_folder(str(settings.augmentation.model))])]
    used = device_type(device)
    with RunFolder(out, settings, inputs=inputs, resume=resume, force=force, device=used) as folder:
        context = ShrinkContext.open(settings, tables, out, device)
        folder.claim()
        augmented = context.train
        if augmenter is not None:
            rows_of_both = task.examples(augmenter.augment(tables.train, out, used))
            augmented = encode_split(settings, context.model, rows_of_both)
        if folder.is_main:
            _print_notices(tables)
        try:
            elastic = shrink_elastic(settings, context, augmented)
        except TrainingStopped as stop:
            return StoppedRun(steps=stop.step, stage=stop.stage)
        if elastic is None:
            context.close()
            return Result()
        metadata = elastic.metadata
        write_model(elastic.model, out)
        write_task_record(settings.task_record, out)
        write_elastic_metadata(metadata, out)
        result = ElasticResult.of(
            metadata,
            order=settings.order,
            rows=RowCounts(len(context.train.examples), len(augmented.examples)),
            seed=settings.run.seed,
            seconds=round(elastic.seconds, 1),
        )
        write_elastic_report(settings, elastic, out, task.texts(context.dev.examples))
        folder.finish(result)
        remove_stages(settings, out)
        print_elastic(metadata, out, settings.data)
        context.close()
        return result


def run_prune(
    settings: PruneSettings,
    tables: TaskTables,
    out: Path,
    *,
    device: str,
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
) -> PruneResult | Result:
    """Prune a model; leave it with the record of its units and its result in `out`."""
    selector = make_selector(settings, load_fine_tuned(settings))  # an impossible share raises before anything else
    if explain:
        return print_explanation(settings, explain_prune(settings, selector, len(tables.train)))
    used = device_type(device)
    with RunFolder(out, settings, inputs=settings.inputs, resume=resume, force=force, device=used) as folder:
        context = ShrinkContext.open(settings, tables, out, device)
        folder.claim()
        if folder.is_main:
            _print_notices(tables)
        try:
            pruned = shrink_prune(settings, context)
        except TrainingStopped as stop:
            return StoppedRun(steps=stop.step, stage=stop.stage)
        if pruned is None:
            context.close()
            return Result()
        write_model(pruned.model.cpu(), out)
        write_task_record(settings.task_record, out)
        write_pruning_metadata(pruned.metadata, out)
        result = PruneResult.of(pruned, settings.run.seed)
        folder.finish(result)
        remove_cuts(out)
        print_pruned(result, pruned.metadata, out)
        context.close()
        return result


def run_exits(
    settings: ExitSettings,
    tables: TaskTables,
    out: Path,
    *,
    device: str,
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
) -> ExitResult | Result:
    """Add early exits to a model; leave it with the chosen rule and its result in `out`."""
    answer_kind(settings.task)
    model = with_exits(freeze_random_features(settings.model.load()), settings)
    if explain:
        examples = settings.task.augment(settings.task.examples(tables.train))
        return print_explanation(settings, explain_exits(settings, model, len(examples)))
    used = device_type(device)
    with RunFolder(out, settings, inputs=settings.inputs, resume=resume, force=force, device=used) as folder:
        context = ShrinkContext.open(settings, tables, out, device, model)
        trainer = make_exit_trainer(settings, context, notices=tables.notices)
        folder.claim()
        progress = trainer.run(resume=resume)
        if not trainer.is_finished:
            trainer.close()
            return StoppedRun(steps=progress.step)
        if not folder.is_main:
            trainer.close()
            return Result()
        chosen = choose_rule(settings, trainer)
        write_model(trainer.model.cpu(), out)
        write_task_record(settings.task_record, out)
        result = folder.finish(
            ExitResult(
                exits=chosen,
                tolerance=settings.leave.tolerance,
                seed=settings.run.seed,
                training=summarise_training(trainer),
            )
        )
        shutil.rmtree(out / "checkpoints", ignore_errors=True)  # the model is written
        print_exits(settings.measure, chosen, out)
        trainer.close()
        return result


def run_vocabulary(
    settings: VocabularySettings,
    tables: TaskTables,
    out: Path,
    *,
    device: str,
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
) -> VocabularyResult | Result:
    """Cut the vocabulary of a model; leave it with its result in `out`."""
    if resume:
        raise InputError("--resume is given with --method vocabulary, which takes seconds; leave it out")
    if explain:
        texts = list(settings.task.texts(settings.task.examples(tables.train)))
        return print_explanation(settings, {"training texts": f"{len(texts):,}"})
    with RunFolder(out, settings, inputs=settings.inputs, force=force, device=device_type(device)) as folder:
        cut = shrink_vocabulary(settings, tables, device_type(device))
        folder.claim()
        write_model(cut.model.cpu(), out)
        write_task_record(settings.task_record, out)
        result = folder.finish(
            VocabularyResult(
                metric=cut.evaluation.metric,
                score=cut.evaluation.score,
                score_before=cut.evaluation_before.score,
                cut=cut.cut,
            )
        )
        print_vocabulary(result, out)
        return result


def _print_notices(tables: TaskTables) -> None:
    for notice in tables.notices:
        print_plain(notice)
