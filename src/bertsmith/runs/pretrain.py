"""`bertsmith pretrain`: pre-train an encoder on a corpus."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bertsmith.checkpoint.store import write_model
from bertsmith.data.devices import Device
from bertsmith.errors import InputError
from bertsmith.files import read_json, write_text
from bertsmith.models.generator import fold
from bertsmith.recipes import merge_settings, read_recipe
from bertsmith.report.pretraining import PretrainingReport, render_pretraining_page
from bertsmith.runs.flags import DataFlag, ForceFlag, OutFlag, SetFlag, flag_group
from bertsmith.runs.folder import RECIPE, RunFolder, read_recipe_file
from bertsmith.runs.output import REPORT, RESULT
from bertsmith.runs.result import Explanation, Result, StoppedRun, print_explanation, print_plain, spread
from bertsmith.settings import Plain
from bertsmith.toml import override
from bertsmith.training.branch import branch_settings, branch_step, check_branch
from bertsmith.training.budget import Budget, measure_pace, steps_at
from bertsmith.training.log import LOG, read_log
from bertsmith.training.pretraining import PretrainSettings, make_trainer, steps_for
from bertsmith.training.pretraining import explain as explain_costs
from bertsmith.training.summary import TrainingSummary, summarise_training
from bertsmith.training.trainer import Trainer

DIVERGED = 1.5
"""Held-out loss, as a multiple of the unigram level, above which a run has diverged."""
BRANCH = flag_group("Continue from a checkpoint with a decay")


@dataclass(frozen=True, kw_only=True)
class PretrainResult(Result):
    """Result of a finished pre-training."""

    tier: str
    token_term: str
    """Name of the token-prediction loss term, which prefixes the names of its metrics."""
    training: TrainingSummary = spread()
    training_flops_per_token: float
    held_out: dict[str, float] | None
    """Metrics on the held-out split; None if there is none."""
    unigram_level: float | None
    """Loss of predicting tokens by their frequency alone."""


def pretrain(
    recipe: str | Path | None = None,
    *,
    data: DataFlag[Path | None] = None,
    out: OutFlag[Path | None] = None,
    set: SetFlag = None,
    seed: int | None = None,
    budget: str | None = None,
    branch: Annotated[Path | None, BRANCH] = None,
    decay: Annotated[str | None, BRANCH] = None,
    device: Device = "auto",
    explain: bool = False,
    resume: bool = False,
    force: ForceFlag = False,
) -> PretrainResult | StoppedRun | Explanation:
    """Pre-train an encoder on a corpus.

    For several processes or GPUs, start it with `accelerate launch -m bertsmith pretrain …`.

    Parameters
    ----------
    recipe
        A TOML file with the settings, or a name that `bertsmith list recipes` prints: a file that comes with the
        package, such as continue-small, or PRESET[:TIER], where TIER is paper, crammed (the default) or modern.
        --explain prints all settings. --resume uses the recipe of the run.
    data
        Corpus folder written by `bertsmith corpus`.
    out
        Output folder: the model, log.jsonl, checkpoints, recipe.toml, report.html and result.json.
    set
        Override a setting of the recipe, for example optimizer.learning_rate=1e-3; repeatable.
    seed
        Random seed of weights, data order, masks and dropout (run.seed).
    budget
        Training budget, instead of run.steps: 10min, 2h, 300M (tokens) or "1e18 flops". A time is converted to steps
        by measuring the speed of the first steps; recipe.toml contains the steps.
    branch
        Checkpoint to continue from, RUN/checkpoints/step-…, with the recipe of that run and a learning-rate decay.
    decay
        With --branch: length of the decay in steps (500), as a share of the steps of the whole run (20%) or in tokens
        (50M).
    device
        Device to run on; "auto" uses a GPU if one is available.
    explain
        Print all settings, the number of parameters, FLOPs per token and memory; do not train.
    resume
        Resume from the newest intact checkpoint in --out.
    force
        Replace the contents of --out.
    """
    start = time.perf_counter()
    data, out, branch = (None if path is None else Path(path) for path in (data, out, branch))
    if resume and out is None:
        raise InputError("--resume needs --out, the folder of the run to resume")
    _check_flags(recipe, resume, budget, branch, decay)
    limit = None if budget is None else Budget.parse(budget)
    earlier = out if resume else None if branch is None else branch.parent.parent
    plain = plain_settings(recipe, data, earlier, set or [], seed)
    settings = PretrainSettings.parse(plain, source=str(recipe or "settings"))
    if branch is not None:
        settings = branch_settings(settings, branch, str(decay))
    if limit is not None:
        settings = _apply_budget(settings, limit, out if resume else None)
    if explain:
        costs = explain_costs(settings)
        return print_explanation(settings, costs if limit is None else costs | {"budget": limit.explanation})
    return run_pretraining(settings, out, budget=limit, start=start, device=device, resume=resume, force=force)


def run_pretraining(
    settings: PretrainSettings,
    out: Path | None,
    *,
    device: str,
    resume: bool = False,
    force: bool = False,
    budget: Budget | None = None,
    start: float | None = None,
    prints: bool = True,
) -> PretrainResult | StoppedRun:
    """Pre-train with complete settings; write the model, its log, the report and the result to `out`.

    A time budget counts from `start`, a value of `time.perf_counter`. `prints` is False for one of several runs.
    """
    start = time.perf_counter() if start is None else start
    if not resume:  # a resumed run reads its own checkpoints, not the branch
        check_branch(settings)
    with RunFolder(out, settings, inputs=settings.inputs, resume=resume, force=force, device=device) as run:
        trainer = make_trainer(settings, run.path, device=device, resume=resume)
        if budget is not None and not resume:
            settings = _measure_budget(settings, trainer, budget, start)
        run.claim(settings)
        progress = trainer.run(resume=resume)
        if not trainer.is_finished:
            trainer.close()
            return StoppedRun(steps=progress.step)
        result = _result(settings, trainer)
        if run.is_main:
            write_model(fold(trainer.model), run.path)
            commands = (
                f'bertsmith inspect {run.path} --text "Some words." --out maps',
                f"bertsmith export {run.path} --out hf-model",
            )
            write_report(run.path, result.to_json(), title=run.path.name, commands=commands)
            run.finish(result)
            if prints:
                _print_result(result, run.path)
        trainer.close()
        return result


def _check_flags(
    recipe: str | Path | None, resume: bool, budget: str | None, branch: Path | None, decay: str | None
) -> None:
    """Raise InputError if flags contradict each other."""
    if (branch is None) != (decay is None):
        raise InputError("--branch and --decay must be given together: the checkpoint and the length of the decay")
    for flag, is_given in (("RECIPE", recipe is not None), ("--budget", budget is not None), ("--resume", resume)):
        if branch is not None and is_given:
            raise InputError(f"--branch uses the recipe of its run and the length given by --decay; omit {flag}")
    if branch is not None:
        branch_step(branch)


def plain_settings(
    recipe: str | Path | None, data: Path | None, run: Path | None, assignments: list[str], seed: int | None
) -> Plain:
    """Return the settings as plain data: the recipe, or the recipe of the run to resume, with the flags applied."""
    plain = merge_settings(_base_settings(recipe, run), override({}, assignments))
    if data is not None:
        plain["data"] = str(data)
    if seed is not None:
        plain = override(plain, [f"run.seed={seed}"])
    return plain


def _base_settings(recipe: str | Path | None, run: Path | None) -> Plain:
    """Return the recipe by its name or file, or else the recipe of the run to resume."""
    stored = read_recipe_file(None, run)
    if recipe is not None:
        # accelerate and torchrun set WORLD_SIZE to the number of processes
        return read_recipe(recipe, processes=int(os.environ.get("WORLD_SIZE", "1")))
    if stored is None:
        raise InputError("no recipe is given; give a name such as bert-base:paper, or a .toml file")
    return stored


def _apply_budget(settings: PretrainSettings, budget: Budget, run: Path | None) -> PretrainSettings:
    """Set run.steps from a budget in tokens or FLOPs, or from the run to resume; a time budget is applied later."""
    if run is not None:
        stored = read_recipe_file(None, run)
        steps = 0 if stored is None else stored["run"]["steps"]
    elif budget.kind == "seconds":
        return settings
    else:
        steps = steps_for(settings, budget)
    return settings.changed(run=settings.run.changed(steps=steps))


def _measure_budget(settings: PretrainSettings, trainer: Trainer, budget: Budget, start: float) -> PretrainSettings:
    """Set run.steps from a time budget by measuring the speed; print the steps of any budget."""
    text = f"budget {budget.text}:"
    if budget.kind == "seconds":
        pace = measure_pace(trainer, budget.amount)
        steps = steps_at(pace, trainer, budget.amount, spent=time.perf_counter() - start)
        settings = settings.changed(run=settings.run.changed(steps=steps))
        trainer.set_steps(steps)
        size, unit = (1e6, "M") if pace.tokens_per_second >= 1e6 else (1e3, "k")
        text += f" {pace.tokens_per_second / size:.2f} {unit} tokens/s, so"
    if trainer.show:
        print_plain(f"{text} {settings.run.steps:,} steps of {settings.batch.tokens:,} tokens")
    return settings


def _result(settings: PretrainSettings, trainer: Trainer) -> PretrainResult:
    held_out = trainer.log.of_kind("held_out")
    last = {name: value for name, value in held_out[-1].items() if name not in ("kind", "step")} if held_out else None
    assert last is None or trainer.baseline is not None
    return PretrainResult(
        tier=settings.tier,
        token_term=settings.objective.token_term,
        training=summarise_training(trainer),
        training_flops_per_token=trainer.data.phases[0].flops_per_token,
        held_out=last,
        unigram_level=None if last is None or trainer.baseline is None else trainer.baseline.level(),
    )


def _print_result(result: PretrainResult, out: Path) -> None:
    training = result.training
    print_plain(f"{training.steps} steps, {training.tokens:,} tokens in {training.seconds} s", style="bold")
    if result.held_out is not None:
        owner = ""
        if "replaced_recall" in result.held_out:
            owner = " of the generator"
            recall, precision = result.held_out["replaced_recall"], result.held_out["replaced_precision"]
            print_plain(f"held-out replaced-token detection: recall {recall:.1%}, precision {precision:.1%}")
        loss = result.held_out[f"{result.token_term}_loss"]
        print_plain(f"held-out loss{owner} {loss:.3f} (unigram level {result.unigram_level:.3f})")
        if result.unigram_level is not None and loss > DIVERGED * result.unigram_level:
            print_plain(
                "diverged: the model predicts tokens worse than their frequencies do; use a lower learning rate or a "
                "longer warm-up"
            )
    print_plain(f"written to {out}: model.safetensors, {REPORT}, {RESULT}")


def write_report(run: Path, metrics: Plain, *, title: str, commands: tuple[str, ...] = ()) -> None:
    """Write the page of a run from its log.jsonl, recipe.toml and config.json; `metrics` become its result.json."""
    rows = read_log(run / LOG)
    config = read_json(run / "config.json")["model"]
    term = metrics["token_term"]
    report = PretrainingReport(
        title=title,
        facts=_facts(config, metrics),
        steps=[_named(row, term) for row in rows if row["kind"] == "training"],
        held_out=[_named(row, term) for row in rows if row["kind"] == "held_out"],
        unigram_entropy=metrics.get("unigram_level"),
        settings=(run / RECIPE).read_text(encoding="utf-8"),
        commands=commands,
        notices=tuple(row["text"] for row in rows if row["kind"] == "notice"),
        predicted=_predicted(term),
    )
    write_text(run / REPORT, render_pretraining_page(report))


def _named(row: Plain, term: str) -> Plain:
    """Return a log row with the page's names; "loss" is the token loss, comparable with the unigram level."""
    return {**row, "loss": row[f"{term}_loss"], "masked_accuracy": row[f"{term}_accuracy"]}


def _predicted(term: str) -> str:
    """Return the name of a term's tokens on the page."""
    return "next tokens" if term == "next_token" else "masked tokens"


def _facts(config: Plain, metrics: Plain) -> dict[str, str]:
    """Return the facts about the run shown on the page."""
    encoder = config["encoder"]
    facts = {
        "network": f"{config['family']}, {len(encoder['layers'])} layers of width {encoder['width']}",
        "parameters": f"{metrics['parameters']:,}",
        **_generator_facts(config, metrics),
        "vocabulary": f"{encoder['vocabulary']:,}",
        "tokens seen": f"{metrics['tokens']:,}",
        "time": f"{metrics['seconds']:,.0f} s",
        "speed": f"{metrics['tokens_per_second']:,.0f} tokens/s",
    }
    held_out = metrics.get("held_out")
    if held_out:
        term = metrics["token_term"]
        facts["held-out loss"] = f"{held_out[f'{term}_loss']:.3f}"
        facts["unigram level"] = f"{metrics['unigram_level']:.3f}"
        facts[f"{_predicted(term)} accuracy"] = f"{held_out[f'{term}_accuracy']:.1%}"
        if "next_sentence_accuracy" in held_out:
            facts["NSP accuracy"] = f"{held_out['next_sentence_accuracy']:.1%}"
        if "replaced_recall" in held_out:
            facts["tokens replaced"] = f"{held_out['replaced_share']:.1%}"
            facts["recall of replaced tokens"] = f"{held_out['replaced_recall']:.1%}"
            facts["precision"] = f"{held_out['replaced_precision']:.1%}"
    return facts


def _generator_facts(config: Plain, metrics: Plain) -> dict[str, str]:
    """Return the facts about the generator, if there is one."""
    if config.get("generator") is None:
        return {}
    encoder, sharing = config["generator"]["model"]["encoder"], config["generator"]["sharing"].replace("_", "-")
    shape = f"{len(encoder['layers'])} layers of width {encoder['width']}, embedding sharing: {sharing}"
    return {"generator": shape, "parameters, generator": f"{metrics['generator_parameters']:,}"}
