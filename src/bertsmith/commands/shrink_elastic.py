"""Elastic training from its settings: importance, rewiring, the stages, and what they leave."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertsmith.bundled import model_folder
from bertsmith.commands.finetune_task import Tables
from bertsmith.commands.run import print_explanation
from bertsmith.commands.shrink_work import Work, begun, end_together, fine_tuned, learned
from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.models.model import Model
    from bertsmith.shrinking.elastic import ElasticSettings, Stage
    from bertsmith.shrinking.grid_judge import Member
    from bertsmith.shrinking.importance import Orders
    from bertsmith.training.trainer import Trainer

REWIRED = "rewired"


def shrink_elastic(
    settings: "ElasticSettings",
    tables: Tables,
    out: Path,
    *,
    device: str,
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Carries out all stages; returns the figures of the whole."""
    from bertsmith.commands.augmentation import Augmentation
    from bertsmith.shrinking.elastic import encoded
    from bertsmith.training.hardware import device_type

    _check_head(settings)
    augmentation = Augmentation.of(settings.task, settings.augmentation)
    if explain:
        taught = len(tables.train) if augmentation is None else augmentation.most(len(tables.train))
        return print_explanation(settings, _costs(settings, fine_tuned(settings), len(tables.train), taught))
    others = [] if settings.augmentation.model is None else [model_folder(settings.augmentation.model)]
    work = begun(settings, tables, out, device=device, resume=resume, force=force, others=others)
    if augmentation is not None:
        rows = settings.task.examples(augmentation.table(tables.train, out, device_type(device)))
        work = replace(work, taught=(rows, encoded(settings, work.teacher, rows)))
    figures = _stages(work, tables.notices)
    end_together()
    return figures


def _check_head(settings: "ElasticSettings") -> None:
    """Raises a sentence if the head of the task reads layers that the shallowest sub-networks do not have."""
    from bertsmith.checkpoint.source import ModelSource
    from bertsmith.models.heads import TaskHeadConfig

    config = ModelSource(folder=settings.model).described_config()
    grid = settings.stage_grid("depth" if "depth" in settings.stages else "width")
    fewest = len(grid.subnets[0].kept_layers(len(config.encoder.layers)))
    for head in config.heads:
        if isinstance(head, TaskHeadConfig):
            reads = head.features.layers + head.features.skip
            if not head.features.layers or reads > fewest:
                raise InputError(
                    f"the model's head reads {reads} layers and grid.depths leaves {fewest}; allowed: 1 to {fewest}"
                )


def _stages(work: "Work[ElasticSettings]", notices: Sequence[str]) -> dict[str, Any]:
    from rich.console import Console

    console = Console(quiet=not work.is_main)
    for notice in notices:
        console.print(notice, markup=False, highlight=False)
    console.rule("importance")
    student = _rewired(work)
    teacher = work.teacher
    seconds = 0.0
    for stage in work.settings.stages:
        console.rule(f"stage: {stage}")
        found, took = _stage(work, stage, student, teacher)
        if found is None:
            return {"is_finished": False, "stage": stage}
        seconds += took
        if stage == "labels" and not _is_better(work, found, student):
            console.print("the labels did not raise the mean score: the model of the stage before is kept")
            continue
        student = teacher = found
    return _finish(work, student, seconds) if work.is_main else {"is_finished": True}


def _rewired(work: "Work[ElasticSettings]") -> "Model":
    """The model with its units in order, from the folder where an interrupted run left it or made now."""
    from accelerate import PartialState

    from bertsmith.checkpoint.files import NewFolder, write_json
    from bertsmith.checkpoint.store import load, write_model
    from bertsmith.shrinking.elastic import steady
    from bertsmith.shrinking.importance import orders, rewire

    folder, settings, state = work.out / REWIRED, work.settings, PartialState()
    if not folder.is_dir() and work.is_main:
        scores = work.importance(work.teacher)
        found = orders(work.teacher, scores, settings.order, settings.run.seed)
        model = load(settings.model)
        rewire(model, found)
        with NewFolder(folder) as new:
            write_model(model, new)
            write_json(new / "orders.json", {"head_scores": _lists(scores.heads), **_orders(found)})
    state.wait_for_everyone()
    return steady(load(folder))


def _orders(found: "Orders") -> dict[str, Any]:
    return {"head_order": _lists(found.heads), "neuron_order": _lists(found.neurons)}


def _lists(tensors: Sequence[Any]) -> list[list[Any]]:
    return [tensor.tolist() for tensor in tensors]


def _stage(
    work: "Work[ElasticSettings]", stage: "Stage", student: "Model", teacher: "Model"
) -> tuple["Model | None", float]:
    """The model after a stage and the seconds it took; None where it was asked to stop."""
    from bertsmith.shrinking.elastic import make_stage

    def make(folder: Path) -> "Trainer":
        return make_stage(
            work.settings,
            stage,
            student,
            teacher,
            work.train if stage == "labels" else work.taught,
            work.dev,
            folder,
            processes=work.processes,
            device=work.device,
        )

    return learned(work, work.out / stage, make)


def _members(work: "Work[ElasticSettings]", model: "Model") -> list["Member"]:
    """Every sub-network of the grid with its score, as the stages that were carried out leave it."""
    from bertsmith.shrinking.grid_judge import GridJudge

    settings = work.settings
    grid = settings.stage_grid("depth" if "depth" in settings.stages else "width")
    task = settings.task.objective(work.train[0]).for_evaluation()
    evaluator = GridJudge(settings.task, work.dev[0], work.dev[1], settings.sequences, task, grid.subnets)
    return evaluator.members(model.to(work.teacher.device).eval())


def _is_better(work: "Work[ElasticSettings]", model: "Model", other: "Model") -> bool:
    from statistics import fmean

    mine, theirs = (fmean(m.evaluation.score for m in _members(work, one)) for one in (model, other))
    return mine > theirs


def _finish(work: "Work[ElasticSettings]", model: "Model", seconds: float) -> dict[str, Any]:
    """Writes the elastic model, the record of its sub-networks and the figures; returns these."""
    from statistics import fmean

    from bertsmith.checkpoint.files import read_json
    from bertsmith.checkpoint.store import write_model
    from bertsmith.commands.shrink_report import print_grid, write_elastic_report
    from bertsmith.runs.output import write_result
    from bertsmith.shrinking.elastic_metadata import ElasticRecord, MemberFigures, write_record
    from bertsmith.shrinking.subnet_costs import member_costs
    from bertsmith.tasks.predictor import write_task_record

    settings, out = work.settings, work.out
    teacher, members, length = work.evaluate(work.teacher), _members(work, model), work.length
    model = model.cpu()  # where bertsmith fit measures, too: latencies are to be compared with its budgets
    costs = member_costs(model, [member.subnet for member in members], length)
    record = ElasticRecord.parse(
        {
            "metric": teacher.metric,
            "teacher_score": teacher.score,
            "depth_rule": settings.grid.depth_rule,
            "length": length,
            "grid": [
                MemberFigures(
                    width=member.subnet.width,
                    depth=member.subnet.depth,
                    score=member.evaluation.score,
                    parameters=cost.parameters,
                    flops=cost.flops,
                    latency_ms=cost.latency_ms,
                ).plain()
                for member, cost in zip(members, costs, strict=True)
            ],
            **read_json(out / REWIRED / "orders.json"),
        },
        source="the elastic training",
    )
    write_model(model, out)
    write_task_record(settings.task_record, out)
    write_record(record, out)
    figures = {
        "metric": record.metric,
        "score": fmean(member.score for member in record.grid),
        "teacher_score": record.teacher_score,
        "grid": [member.plain() for member in record.grid],
        "length": length,
        "order": settings.order,
        "rows": {"train": len(work.train[0]), "taught": len(work.taught[0])},
        "seed": settings.run.seed,
        "seconds": round(seconds, 1),
        "is_finished": True,
    }
    write_elastic_report(settings, record, out, settings.task.texts(work.dev[0]), seconds=seconds)
    write_result(out, figures)  # the last: a run that has it is finished
    _tidy(out, settings.stages)
    print_grid(record, out, settings.data)
    return figures


def _tidy(out: Path, stages: Sequence[str]) -> None:
    """Removes what it took to get to the model, and what killed runs left half-written; logs stay."""
    import shutil

    folders = [out / REWIRED, *(out / stage / name for stage in stages for name in ("model", "checkpoints"))]
    for home in (out, *(out / stage for stage in stages)):
        folders += [*home.glob(".*.partial-*"), *home.glob(".*.old-*")]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _costs(settings: "ElasticSettings", teacher: "Model", examples: int, taught: int) -> dict[str, str]:
    """What the settings cost, for --explain; `taught` are the most examples that teachers are asked about."""
    units = teacher.encoder.units
    facts = {} if taught == examples else {"augmentation": f"{examples:,} rows become {taught:,} at most"}
    for stage in settings.stages:
        batches = -(-(examples if stage == "labels" else taught) // settings.batch.examples)
        grid, steps = settings.stage_grid(stage), settings.stage_run(stage).steps(batches)
        learned = grid.subnets if grid.is_whole else grid.drawn(units, 0)
        passes = sum(subnet.width * subnet.depth for subnet in learned)
        facts[f"stage {stage}"] = f"{len(learned)} sub-networks a step, {passes:.2f} whole ones' work, {steps:,} steps"
    return facts
