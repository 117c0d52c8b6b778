"""`bertsmith shrink`: make a fine-tuned model elastic, prune units or weights, add early exits, cut its vocabulary."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from bertsmith.bundled import model_folder, model_text
from bertsmith.checkpoint.source import FineTunedSource, expand_source, replace_source
from bertsmith.checkpoint.store import write_model
from bertsmith.data.devices import Device, device_type
from bertsmith.errors import InputError, nearest
from bertsmith.models.model import Model
from bertsmith.objectives.translation import TranslationConfig
from bertsmith.runs.flags import DataFlag, ForceFlag, OutFlag, RecipeFlag, SetFlag, flag_group
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
    ShrinkSettings,
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
from bertsmith.shrinking.elastic import ElasticSettings, check_head, explain_elastic, shrink_elastic, temporary_files
from bertsmith.shrinking.elastic_metadata import write_elastic_metadata
from bertsmith.shrinking.exits import (
    ExitSettings,
    answer_kind,
    choose_rule,
    explain_exits,
    make_exit_trainer,
    with_exits,
)
from bertsmith.shrinking.prune import TEMPORARY as CUT_FILES
from bertsmith.shrinking.prune import PruneSettings, explain_prune, make_selector, shrink_prune
from bertsmith.shrinking.pruned_units import write_pruning_metadata
from bertsmith.shrinking.vocabulary import VocabularySettings, shrink_vocabulary
from bertsmith.shrinking.weights import TEMPORARY as WEIGHT_FILES
from bertsmith.shrinking.weights import WeightSettings, explain_weights, prepare_masks, shrink_weights, speed_note
from bertsmith.tasks.notices import drop_empty_rows
from bertsmith.tasks.predictor import read_task_record, write_task_record
from bertsmith.tasks.translation import require_decoder
from bertsmith.toml import override
from bertsmith.training.summary import summarise_training
from bertsmith.training.task_trainer import pair_trainer
from bertsmith.training.trainer import Trainer

METHODS = ("elastic", "prune", "weights", "exits", "vocabulary")
ELASTIC, PRUNE, WEIGHTS, EXITS, VOCABULARY = (flag_group(f"With --method {method}") for method in METHODS)
ShrinkResult = ElasticResult | PruneResult | WeightPruningResult | ExitResult | DecoderExitResult | VocabularyResult


def shrink(
    model: str | Path | None = None,
    *,
    data: DataFlag[str | None] = None,
    out: OutFlag[Path],
    method: str | None = None,
    recipe: RecipeFlag = None,
    widths: Annotated[list[float] | None, Parameter(consume_multiple=True), ELASTIC] = None,
    depths: Annotated[list[float] | None, Parameter(consume_multiple=True), ELASTIC] = None,
    keep: Annotated[float | None, PRUNE] = None,
    sparsity: Annotated[float | None, WEIGHTS] = None,
    tokens: Annotated[int | None, VOCABULARY] = None,
    rank: Annotated[int | None, VOCABULARY] = None,
    tolerance: Annotated[float | None, EXITS] = None,
    blocks: Annotated[float | None, EXITS] = None,
    epochs: float | None = None,
    learning_rate: float | None = None,
    batch: int | None = None,
    augment: Annotated[str | Path | None, ELASTIC] = None,
    column: list[str] | None = None,
    set: SetFlag = None,
    seed: int | None = None,
    device: Device = "auto",
    explain: bool = False,
    resume: bool = False,
    force: ForceFlag = False,
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
        TOML file with the settings, or the name of one that comes with the package (`bertsmith list recipes`). --resume
        uses the recipe of the run.
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
    plain = dict(read_recipe_file(recipe, out if resume else None) or {})
    plain |= {name: str(value) for name, value in (("data", data), ("method", method)) if value is not None}
    if model is not None:
        plain["model"] = replace_source(plain.get("model"), model_text(model))
    if "model" not in plain:
        raise InputError("MODEL is not given, and no recipe sets it; give the folder of a fine-tuned model")
    chosen = plain.setdefault("method", "elastic")
    if chosen not in METHODS:
        raise InputError(f"--method is {chosen!r}; {nearest(str(chosen), METHODS)}")
    method_flags = {
        "widths": ("elastic", "grid.widths", widths),
        "depths": ("elastic", "grid.depths", depths),
        "augment": ("elastic", "augmentation.model", None if augment is None else json.dumps(model_text(augment))),
        "keep": ("prune", "prune.keep", keep),
        "sparsity": ("weights", "weights.sparsity", sparsity),
        "tolerance": ("exits", "leave.tolerance", tolerance),
        "blocks": ("exits", "leave.blocks", blocks),
        "tokens": ("vocabulary", "vocabulary.tokens", tokens),
        "rank": ("vocabulary", "vocabulary.rank", rank),
    }
    for name, (flag_method, _, value) in method_flags.items():
        if value is not None and chosen != flag_method:
            raise InputError(f"--{name} is given with --method {chosen}; allowed: with --method {flag_method}")
    flags = {path: value for _, path, value in method_flags.values()}
    flags |= {
        "run.epochs": epochs,
        "optimizer.learning_rate": learning_rate,
        "batch.examples": batch,
        "run.seed": seed,
    }
    assignments = [f"{path}={value}" for path, value in flags.items() if value is not None]
    plain = override(plain, [*(set or []), *assignments])
    columns, source = column or [], str(recipe or "settings")
    run = ShrinkRun(out, device, explain=explain, resume=resume, force=force)
    try:
        if chosen == "prune":
            return run_prune(run, *read_settings(PruneSettings, plain, columns, source=source))
        if chosen == "weights":
            return run_weights(run, *read_settings(WeightSettings, plain, columns, source=source))
        if chosen == "exits" and has_decoder(plain["model"]):
            for name, value in (("epochs", epochs), ("batch", batch)):
                if value is not None:
                    instead = "run.steps" if name == "epochs" else "batch.tokens"
                    raise InputError(f"--{name} is given with a translation model; use --set {instead}=… instead")
            exits = read_settings(DecoderExitSettings, plain, columns, source=source, inherits=False)
            return run_decoder_exits(run, *exits)
        if chosen == "exits":
            # new heads on a frozen encoder need a higher rate than the fine-tuning used
            inherits = plain.get("encoder") == "joint"
            return run_exits(run, *read_settings(ExitSettings, plain, columns, source=source, inherits=inherits))
        if chosen == "vocabulary":
            return run_vocabulary(
                run, *read_settings(VocabularySettings, plain, columns, source=source, inherits=False)
            )
        return run_elastic(run, *read_settings(ElasticSettings, plain, columns, source=source))
    except TrainingStopped as stop:
        return StoppedRun(steps=stop.step, stage=stop.stage)


@dataclass(frozen=True)
class ShrinkRun:
    """Output folder and flags of a run, and the steps that all methods share."""

    out: Path
    device: str
    explain: bool
    resume: bool
    force: bool

    def open(self, settings: ShrinkSettings, *more_inputs: Path, temporary: Sequence[str] = ()) -> RunFolder:
        """Return the output folder; a method claims it after its own checks.

        `temporary` are patterns of files that are removed when the run is finished.
        """
        return RunFolder(
            self.out,
            settings,
            inputs=[*settings.inputs, *more_inputs],
            resume=self.resume,
            force=self.force,
            device=device_type(self.device),
            temporary=temporary,
        )

    def context(self, settings: ShrinkSettings, tables: TaskTables, model: Model | None = None) -> ShrinkContext:
        """Load the fine-tuned model, unless one is passed, and encode the data."""
        return ShrinkContext.open(settings, tables, self.out, self.device, model)

    def write(self, settings: ShrinkSettings, model: Model) -> None:
        """Write the model and its task record."""
        write_model(model, self.out)
        write_task_record(settings.task_record, self.out)

    def train(self, trainer: Trainer, folder: RunFolder) -> Result | None:
        """Train; return the result if the run ends here: it was stopped, or this is not the main process."""
        progress = trainer.run(resume=self.resume)
        if trainer.is_finished and folder.is_main:
            return None
        trainer.close()
        return Result() if trainer.is_finished else StoppedRun(steps=progress.step)


def run_elastic(run: ShrinkRun, settings: ElasticSettings, tables: TaskTables) -> ElasticResult | Result:
    """Make a model elastic; write it with the metadata of its sub-networks, report and result."""
    check_head(settings)
    augmenter, task = Augmenter.open(settings.task, settings.augmentation), settings.task
    if run.explain:
        rows = len(tables.train)
        augmented_rows = rows if augmenter is None else augmenter.max_rows(rows)
        return print_explanation(settings, explain_elastic(settings, load_fine_tuned(settings), rows, augmented_rows))
    more_inputs = [] if augmenter is None else [model_folder(str(settings.augmentation.model))]
    with run.open(settings, *more_inputs, temporary=temporary_files(settings)) as folder:
        context = run.context(settings, tables)
        folder.claim()
        augmented = context.train
        if augmenter is not None:
            rows_and_copies = augmenter.augment(tables.train, run.out, device_type(run.device))
            augmented = encode_split(settings, context.model, task.examples(rows_and_copies))
        _print_notices(folder, tables)
        elastic = shrink_elastic(settings, context, augmented)
        if elastic is None:
            context.close()
            return Result()
        run.write(settings, elastic.model)
        write_elastic_metadata(elastic.metadata, run.out)
        result = ElasticResult.of(
            elastic.metadata,
            order=settings.order,
            rows=RowCounts(len(context.train.examples), len(augmented.examples)),
            seed=settings.run.seed,
            seconds=round(elastic.seconds, 1),
        )
        write_elastic_report(settings, elastic, run.out, task.texts(context.dev.examples))
        folder.finish(result)
        print_elastic(elastic.metadata, run.out, settings.data)
        context.close()
        return result


def run_prune(run: ShrinkRun, settings: PruneSettings, tables: TaskTables) -> PruneResult | Result:
    """Prune a model; write it with the list of remaining units and its result."""
    selector = make_selector(settings, load_fine_tuned(settings))  # raises if the share is impossible
    if run.explain:
        return print_explanation(settings, explain_prune(settings, selector, len(tables.train)))
    with run.open(settings, temporary=CUT_FILES) as folder:
        context = run.context(settings, tables)
        folder.claim()
        _print_notices(folder, tables)
        pruned = shrink_prune(settings, context)
        if pruned is None:
            context.close()
            return Result()
        run.write(settings, pruned.model.cpu())
        write_pruning_metadata(pruned.metadata, run.out)
        result = folder.finish(PruneResult.of(pruned, settings.run.seed))
        print_pruned(result, pruned.metadata, run.out)
        context.close()
        return result


def run_weights(run: ShrinkRun, settings: WeightSettings, tables: TaskTables) -> WeightPruningResult | Result:
    """Prune single weights of a model; write it with its masks and its result."""
    if run.explain:
        return print_explanation(settings, explain_weights(settings, load_fine_tuned(settings), len(tables.train)))
    with run.open(settings, temporary=WEIGHT_FILES) as folder:
        context = run.context(settings, tables)
        prepare_masks(settings, context.model)  # raises before the folder is emptied
        folder.claim()
        _print_notices(folder, tables)
        pruned = shrink_weights(settings, context)
        if pruned is None:
            context.close()
            return Result()
        run.write(settings, pruned.model.cpu())
        result = folder.finish(WeightPruningResult.of(pruned, note=speed_note(settings), seed=settings.run.seed))
        print_weights(result, run.out)
        context.close()
        return result


def run_exits(run: ShrinkRun, settings: ExitSettings, tables: TaskTables) -> ExitResult | Result:
    """Add early exits to a model; write it with the chosen exit rule and its result."""
    answer_kind(settings.task)
    model = with_exits(freeze_random_features(settings.model.load()), settings)
    if run.explain:
        examples = settings.task.augment(settings.task.examples(tables.train))
        return print_explanation(settings, explain_exits(settings, model, len(examples)))
    with run.open(settings, temporary=("checkpoints",)) as folder:
        trainer = make_exit_trainer(settings, run.context(settings, tables, model), notices=tables.notices)
        folder.claim()
        ended = run.train(trainer, folder)
        if ended is not None:
            return ended
        chosen = choose_rule(settings, trainer)
        run.write(settings, trainer.model.cpu())
        result = folder.finish(
            ExitResult(
                exits=chosen,
                tolerance=settings.leave.tolerance,
                seed=settings.run.seed,
                training=summarise_training(trainer),
            )
        )
        print_exits(settings.measure, chosen, run.out)
        trainer.close()
        return result


def has_decoder(model: Plain | str) -> bool:
    """Whether the fine-tuned model of a recipe translates."""
    name = FineTunedSource.parse(expand_source(model), source="model").name
    return read_task_record(name).task.kind == "translation"


def run_decoder_exits(run: ShrinkRun, settings: DecoderExitSettings, tables: TaskTables) -> DecoderExitResult | Result:
    """Add exits to the decoder of a translation model; write it with the chosen rule and its result."""
    task = settings.translation
    table, left_out = drop_empty_rows(task, tables.train)
    train, dev = task.examples(table), task.examples(tables.dev)
    model = with_decoder_exits(require_decoder(settings.model.load(allows_decoder=True)), settings)
    if run.explain:
        return print_explanation(settings, explain_decoder_exits(settings, model))
    with run.open(settings, temporary=("checkpoints",)) as folder:
        trainer = pair_trainer(
            settings.learning,
            model,
            depth_objective(settings, model),
            task.pairs(train, model, settings.sequences),
            task.pairs(dev, model, settings.sequences),
            settings.sequences,
            run.out,
            settings=settings.plain(),
            targets_per_token=TranslationConfig().targets_per_token,
            device=run.device,
            notices=(*tables.notices, *left_out),
        )
        folder.claim()
        ended = run.train(trainer, folder)
        if ended is not None:
            return ended
        before = require_decoder(settings.model.load(allows_decoder=True)).to(device_type(run.device))
        score_before = DepthEvaluator(task, dev, settings.leave.examples).decode(before.translate).score
        chosen = choose_depth(settings, require_decoder(trainer.model), dev, score_before, print_plain)
        run.write(settings, trainer.model.cpu())
        result = folder.finish(
            DecoderExitResult(
                exits=chosen,
                choose=settings.exits.choose,
                seed=settings.run.seed,
                training=summarise_training(trainer),
            )
        )
        print_depth(chosen, run.out)
        trainer.close()
        return result


def run_vocabulary(run: ShrinkRun, settings: VocabularySettings, tables: TaskTables) -> VocabularyResult | Result:
    """Cut the vocabulary of a model; write it with its result."""
    if run.resume:
        raise InputError("--resume is not supported with --method vocabulary, which takes seconds; omit it")
    if run.explain:
        texts = list(settings.task.texts(settings.task.examples(tables.train)))
        return print_explanation(settings, {"training texts": f"{len(texts):,}"})
    with run.open(settings) as folder:
        cut = shrink_vocabulary(settings, tables, device_type(run.device))
        folder.claim()
        run.write(settings, cut.model.cpu())
        result = folder.finish(
            VocabularyResult(
                metric=cut.evaluation.metric,
                score=cut.evaluation.score,
                score_before=cut.evaluation_before.score,
                cut=cut.cut,
            )
        )
        print_vocabulary(result, run.out)
        return result


def _print_notices(folder: RunFolder, tables: TaskTables) -> None:
    for notice in tables.notices if folder.is_main else ():
        print_plain(notice)
