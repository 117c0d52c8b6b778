"""`bertsmith shrink`: make a fine-tuned model elastic, prune units or weights, add early exits, cut its vocabulary."""

import json
import shutil
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from bertsmith.bundled import model_folder, model_text
from bertsmith.checkpoint.source import FineTunedSource, expand_source, replace_source
from bertsmith.checkpoint.store import write_model
from bertsmith.errors import InputError, nearest
from bertsmith.objectives.translation import TranslationConfig
from bertsmith.runs.folder import RunFolder, read_recipe_file
from bertsmith.runs.result import Result, StoppedRun, print_explanation, print_plain
from bertsmith.runs.shrink_results import (
    DecoderExitResult,
    ElasticResult,
    ExitResult,
    PruneResult,
    RowCounts,
    VocabularyResult,
    WeightPruningResult,
    print_depth,
    print_elastic,
    print_exits,
    print_pruned,
    print_vocabulary,
    print_weights,
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
from bertsmith.shrinking.decoder_exits import (
    DecoderExitSettings,
    DepthEvaluator,
    choose_depth,
    depth_objective,
    explain_decoder_exits,
    with_decoder_exits,
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
from bertsmith.shrinking.weights import WeightSettings, explain_weights, prepare_masks, shrink_weights, speed_note
from bertsmith.shrinking.weights import remove_stages as remove_weight_stages
from bertsmith.tasks.notices import drop_empty_rows
from bertsmith.tasks.predictor import read_task_record, write_task_record
from bertsmith.tasks.translation import require_decoder
from bertsmith.toml import override
from bertsmith.training.run_config import device_type
from bertsmith.training.summary import summarise_training
from bertsmith.training.task_trainer import pair_trainer

METHODS = ("elastic", "prune", "weights", "exits", "vocabulary")
ShrinkResult = ElasticResult | PruneResult | WeightPruningResult | ExitResult | DecoderExitResult | VocabularyResult


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
    sparsity: float | None = None,
    tokens: int | None = None,
    rank: int | None = None,
    tolerance: float | None = None,
    blocks: float | None = None,
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
    """Make a fine-tuned model smaller or elastic.

    elastic (DynaBERT): sort heads and neurons by importance, then train sub-networks of several widths and depths by
    distillation from the fine-tuned model; bertsmith.load(OUT, subnet=...) and bertsmith fit extract any of them.
    prune: remove the least important heads and neurons, and train the rest to recover. weights: set the smallest single
    weights to 0 and keep them there, which saves storage but no time. exits: add classifiers to lower layers, which
    answer inputs they are confident about; in a translation model, exits after decoder blocks. vocabulary: remove
    tokens that the training texts do not use.

    Parameters
    ----------
    model
        Folder of a fine-tuned model, as written by bertsmith finetune.
    data
        Data it was fine-tuned on: a folder with train.jsonl and dev.jsonl (or .csv, .tsv, .parquet), a single such
        file, or a data set on the hub.
    out
        Output folder: the model, recipe.toml, result.json; and elastic.json with the scores and costs of all
        sub-networks, pruned.json with the remaining heads and neurons, or masks.safetensors with the pruned weights.
    method
        elastic (the default), prune, weights, exits or vocabulary.
    recipe
        TOML file with the settings. --resume uses the recipe of the run.
    widths
        With --method elastic: shares of heads and neurons, for example 1 0.75 0.5 0.25 (grid.widths).
    depths
        With --method elastic: shares of layers, for example 1 0.75 0.5 (grid.depths).
    keep
        With --method prune: share of heads and neurons to keep, for example 0.5 (prune.keep).
    sparsity
        With --method weights: share of single weights to prune, for example 0.5 (weights.sparsity).
    tokens
        With --method vocabulary: maximum number of tokens to keep (vocabulary.tokens); all tokens in the training
        texts by default.
    rank
        With --method vocabulary: rank of a factorised token embedding (vocabulary.rank).
    tolerance
        With --method exits: maximum loss of dev score, in points (leave.tolerance).
    blocks
        With --method exits of a translation model: maximum mean number of decoder blocks per token (leave.blocks);
        instead of a tolerance.
    epochs
        Epochs per stage (run.epochs).
    learning_rate
        Peak learning rate (optimizer.learning_rate); the rate of the fine-tuning by default.
    batch
        Examples per optimiser step (batch.examples).
    augment
        With --method elastic: a bundled model (small) or the folder of a masked language model that augments the
        training rows by replacing words (augmentation.model).
    column
        Column for a role of the task, for example label=stars; repeatable.
    set
        Override a setting of the recipe, for example grid.sample=2; repeatable.
    seed
        Random seed of data order, dropout and sampling (run.seed).
    device
        Device to run on; "auto" uses a GPU if one is available.
    explain
        Print all settings and the costs of the run; do not train.
    resume
        Resume an interrupted run in --out.
    force
        Replace the contents of --out.
    """
    out = Path(out)
    plain = dict(read_recipe_file(None if recipe is None else Path(recipe), out if resume else None) or {})
    plain |= {name: str(value) for name, value in (("data", data), ("method", method)) if value is not None}
    if model is not None:
        plain["model"] = replace_source(plain.get("model"), model_text(model))
    if "model" not in plain:
        raise InputError("MODEL is not given, and no recipe sets it; give the folder of a fine-tuned model")
    chosen = plain.setdefault("method", "elastic")
    if chosen not in METHODS:
        raise InputError(f"--method is {chosen!r}; {nearest(str(chosen), METHODS)}")
    method_flags = {
        "widths": ("elastic", widths),
        "depths": ("elastic", depths),
        "augment": ("elastic", augment),
        "keep": ("prune", keep),
        "sparsity": ("weights", sparsity),
        "tolerance": ("exits", tolerance),
        "blocks": ("exits", blocks),
        "tokens": ("vocabulary", tokens),
        "rank": ("vocabulary", rank),
    }
    for name, (flag_method, value) in method_flags.items():
        if value is not None and chosen != flag_method:
            raise InputError(f"--{name} is given with --method {chosen}; allowed: with --method {flag_method}")
    flags = {
        "grid.widths": widths,
        "grid.depths": depths,
        "prune.keep": keep,
        "weights.sparsity": sparsity,
        "leave.tolerance": tolerance,
        "leave.blocks": blocks,
        "vocabulary.tokens": tokens,
        "vocabulary.rank": rank,
        "run.epochs": epochs,
        "optimizer.learning_rate": learning_rate,
        "batch.examples": batch,
        "run.seed": seed,
        "augmentation.model": None if augment is None else json.dumps(model_text(augment)),
    }
    assignments = [f"{path}={value}" for path, value in flags.items() if value is not None]
    plain = override(plain, [*(set or []), *assignments])
    columns, source = column or [], str(recipe or "settings")
    run: Plain = {"device": device, "explain": explain, "resume": resume, "force": force}
    if chosen == "prune":
        return run_prune(*read_settings(PruneSettings, plain, columns, source=source), out, **run)
    if chosen == "weights":
        return run_weights(*read_settings(WeightSettings, plain, columns, source=source), out, **run)
    if chosen == "exits" and has_decoder(plain["model"]):
        for name, value in (("epochs", epochs), ("batch", batch)):
            if value is not None:
                instead = "run.steps" if name == "epochs" else "batch.tokens"
                raise InputError(f"--{name} is given with a translation model; use --set {instead}=… instead")
        exits = read_settings(DecoderExitSettings, plain, columns, source=source, inherits=False)
        return run_decoder_exits(*exits, out, **run)
    if chosen == "exits":
        # new heads on a frozen encoder need a higher rate than the fine-tuning used
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
    """Make a model elastic; write it with the metadata of its sub-networks, report and result to `out`."""
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
            all_examples = task.examples(augmenter.augment(tables.train, out, used))  # original and augmented rows
            augmented = encode_split(settings, context.model, all_examples)
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
    """Prune a model; write it with the list of remaining units and its result to `out`."""
    selector = make_selector(settings, load_fine_tuned(settings))  # raises if the share is impossible
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


def run_weights(
    settings: WeightSettings,
    tables: TaskTables,
    out: Path,
    *,
    device: str,
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
) -> WeightPruningResult | Result:
    """Prune single weights of a model; write it with its masks and its result to `out`."""
    if explain:
        return print_explanation(settings, explain_weights(settings, load_fine_tuned(settings), len(tables.train)))
    used = device_type(device)
    with RunFolder(out, settings, inputs=settings.inputs, resume=resume, force=force, device=used) as folder:
        context = ShrinkContext.open(settings, tables, out, device)
        prepare_masks(settings, context.model)  # raises before the folder is emptied
        folder.claim()
        if folder.is_main:
            _print_notices(tables)
        try:
            pruned = shrink_weights(settings, context)
        except TrainingStopped as stop:
            return StoppedRun(steps=stop.step, stage=stop.stage)
        if pruned is None:
            context.close()
            return Result()
        write_model(pruned.model.cpu(), out)
        write_task_record(settings.task_record, out)
        result = WeightPruningResult.of(pruned, note=speed_note(settings), seed=settings.run.seed)
        folder.finish(result)
        remove_weight_stages(out)
        print_weights(result, out)
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
    """Add early exits to a model; write it with the chosen exit rule and its result to `out`."""
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


def has_decoder(model: Plain | str) -> bool:
    """Whether the fine-tuned model of a recipe translates."""
    name = FineTunedSource.parse(expand_source(model), source="model").name
    return read_task_record(name).task.kind == "translation"


def run_decoder_exits(
    settings: DecoderExitSettings,
    tables: TaskTables,
    out: Path,
    *,
    device: str,
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
) -> DecoderExitResult | Result:
    """Add exits to the decoder of a translation model; write it with the chosen rule and its result to `out`."""
    task = settings.translation
    table, left_out = drop_empty_rows(task, tables.train)
    train, dev = task.examples(table), task.examples(tables.dev)
    model = with_decoder_exits(require_decoder(settings.model.load(allows_decoder=True)), settings)
    if explain:
        return print_explanation(settings, explain_decoder_exits(settings, model))
    used = device_type(device)
    with RunFolder(out, settings, inputs=settings.inputs, resume=resume, force=force, device=used) as folder:
        objective = depth_objective(settings, model)
        trainer = pair_trainer(
            settings.learning,
            model,
            objective,
            task.pairs(train, model, settings.sequences),
            task.pairs(dev, model, settings.sequences),
            settings.sequences,
            out,
            targets_per_token=TranslationConfig().targets_per_token,
            device=device,
            notices=(*tables.notices, *left_out),
        )
        folder.claim()
        progress = trainer.run(resume=resume)
        if not trainer.is_finished:
            trainer.close()
            return StoppedRun(steps=progress.step)
        if not folder.is_main:
            trainer.close()
            return Result()
        before = require_decoder(settings.model.load(allows_decoder=True)).to(used)
        _, score_before, _ = DepthEvaluator(task, dev, settings.leave.examples).score(before.translate)
        chosen = choose_depth(settings, require_decoder(trainer.model), dev, score_before, print_plain)
        write_model(trainer.model.cpu(), out)
        write_task_record(settings.task_record, out)
        result = folder.finish(
            DecoderExitResult(
                exits=chosen,
                choose=settings.exits.choose,
                seed=settings.run.seed,
                training=summarise_training(trainer),
            )
        )
        shutil.rmtree(out / "checkpoints", ignore_errors=True)  # the model is written
        print_depth(chosen, out)
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
    """Cut the vocabulary of a model; write it with its result to `out`."""
    if resume:
        raise InputError("--resume is not supported with --method vocabulary, which takes seconds; omit it")
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
