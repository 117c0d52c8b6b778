"""Pruning from its settings: worth, cuts, what is learned around them, and what they leave."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertsmith.commands.finetune_task import Tables
from bertsmith.commands.run import print_explanation
from bertsmith.commands.shrink_work import Work, begun, end_together, fine_tuned, learned

if TYPE_CHECKING:
    from bertsmith.models.model import Model
    from bertsmith.shrinking.importance import Importance
    from bertsmith.shrinking.prune.prune import PruneSettings
    from bertsmith.shrinking.prune.selection import Selector, Shares
    from bertsmith.shrinking.prune.units import Kept
    from bertsmith.training.trainer import Trainer

CUTS, GATES, RECOVERY = "cuts", "gates", "recovery"


def shrink_prune(
    settings: "PruneSettings",
    tables: Tables,
    out: Path,
    *,
    device: str,
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Carries out all cuts and what is learned around them; returns the figures of the whole."""
    model = fine_tuned(settings)
    selector = _selector(settings, model)  # what cannot be kept is said before any folder is made
    if explain:
        return print_explanation(settings, _costs(settings, selector, len(tables.train)))
    work = begun(settings, tables, out, device=device, resume=resume, force=force)
    figures = _carried_out(work, tables.notices)
    end_together()
    return figures


def _selector(settings: "PruneSettings", model: "Model") -> "Selector":
    from bertsmith.shrinking.prune.selection import Selector

    return Selector(settings.prune, model.config.encoder, model.encoder.units)


def _carried_out(work: "Work[PruneSettings]", notices: Sequence[str]) -> dict[str, Any]:
    from rich.console import Console

    from bertsmith.shrinking.prune.selection import schedule

    settings, out = work.settings, work.out
    console = Console(quiet=not work.is_main)
    for notice in notices:
        console.print(notice, markup=False, highlight=False)
    model, seconds = work.teacher, 0.0
    if settings.prune.by == "l0":
        console.rule("learning gates")
        gated, seconds = learned(work, out / GATES, lambda folder: _gating(work, folder))
        if gated is None:
            return {"is_finished": False, "stage": GATES}
        model = gated.to(work.teacher.device)
    cuts = schedule(settings.prune)
    for number, shares in enumerate(cuts, start=1):
        cut = out / CUTS / str(number)
        console.print(f"cut {number} of {len(cuts)}", highlight=False)
        model = _cut(work, cut, model, shares, out / CUTS / str(number - 1))
        epochs = settings.recovery.between if number < len(cuts) else settings.epochs_after
        if epochs:
            console.rule(f"learning after cut {number}")
            found, took = learned(work, out / RECOVERY / str(number), _recovery(work, model, epochs))
            if found is None:
                return {"is_finished": False, "stage": f"{RECOVERY}/{number}"}
            model, seconds = found.to(work.teacher.device), seconds + took
    return _finish(work, model, len(cuts), seconds) if work.is_main else {"is_finished": True}


def _gating(work: "Work[PruneSettings]", folder: Path) -> "Trainer":
    """The training of gates, so many of which shall stay open as units will be kept."""
    import torch

    from bertsmith.shrinking.importance import Importance
    from bertsmith.shrinking.prune.prune import make_gating
    from bertsmith.shrinking.prune.selection import schedule

    units = work.teacher.encoder.units
    selector = _selector(work.settings, work.teacher)
    even = Importance(*(tuple(torch.ones(getattr(u, kind)) for u in units) for kind in ("heads", "neurons")))
    (shares,) = schedule(work.settings.prune)
    heads, neurons = selector.kept(even, shares).counts
    wanted = (sum(heads) / sum(u.heads for u in units), sum(neurons) / sum(u.neurons for u in units))
    return make_gating(
        work.settings,
        work.teacher,
        wanted,
        work.train,
        work.dev,
        folder,
        processes=work.processes,
        device=work.device,
    )


def _recovery(work: "Work[PruneSettings]", model: "Model", epochs: float) -> Any:
    from bertsmith.shrinking.prune.prune import make_recovery

    def make(folder: Path) -> "Trainer":
        return make_recovery(
            work.settings,
            model,
            work.teacher,
            work.train,
            work.dev,
            folder,
            epochs=epochs,
            processes=work.processes,
            device=work.device,
        )

    return make


def _cut(work: "Work[PruneSettings]", folder: Path, model: "Model", shares: "Shares", before: Path) -> "Model":
    """The model after a cut, from the folder where an interrupted run left it or cut now."""
    from accelerate import PartialState

    from bertsmith.checkpoint.files import NewFolder, write_json
    from bertsmith.checkpoint.store import load, write_model
    from bertsmith.shrinking.prune.prune import cut_gated
    from bertsmith.shrinking.prune.units import cut_down

    is_gated = "gates" in model.heads
    if not folder.is_dir() and work.is_main:
        earlier = _kept(work, before)
        scores = _worth(work, model)
        chosen = _selector(work.settings, work.teacher).kept(scores, shares)
        small = cut_gated(model, chosen) if is_gated else cut_down(model, chosen)
        kept = chosen.within(earlier)
        heads, neurons = kept.counts
        facts = {
            "heads": [own.tolist() for own in kept.heads],
            "neurons": [own.tolist() for own in kept.neurons],
            "head_scores": [own.tolist() for own in scores.heads],
            "figures": {"heads": sum(heads), "neurons": sum(neurons), "score": work.evaluate(small).score},
        }
        folder.parent.mkdir(exist_ok=True)
        with NewFolder(folder) as new:
            write_model(small, new)
            write_json(new / "kept.json", facts)
    PartialState().wait_for_everyone()
    return load(folder).to(work.teacher.device)


def _kept(work: "Work[PruneSettings]", folder: Path) -> "Kept":
    """The units that a cut left, by their first numbers; all of them before the first cut."""
    import torch

    from bertsmith.checkpoint.files import read_json
    from bertsmith.shrinking.prune.units import Kept

    if not folder.is_dir():
        return Kept.all_of(work.teacher.encoder.units)
    told = read_json(folder / "kept.json")
    heads, neurons = (tuple(torch.tensor(own) for own in told[name]) for name in ("heads", "neurons"))
    return Kept(heads, neurons)


def _worth(work: "Work[PruneSettings]", model: "Model") -> "Importance":
    """What the units of a model are worth, by what the settings say."""
    from bertsmith.shrinking.prune.prune import locations
    from bertsmith.shrinking.prune.selection import magnitude

    by = work.settings.prune.by
    if by == "l0":
        return locations(model)
    if by == "magnitude":
        return magnitude(model)
    return work.importance(model)


def _finish(work: "Work[PruneSettings]", model: "Model", cuts: int, seconds: float) -> dict[str, Any]:
    """Writes the pruned model, the record of its units and the figures; returns these."""
    import shutil

    from bertsmith.checkpoint.files import read_json
    from bertsmith.checkpoint.store import load, write_model
    from bertsmith.runs.output import write_result
    from bertsmith.shrinking.prune.units import PrunedRecord, write_pruned
    from bertsmith.tasks.predictor import write_task_record

    settings, out, units = work.settings, work.out, work.teacher.encoder.units
    write_model(model.cpu(), out)
    write_task_record(settings.task_record, out)
    evaluation, before = work.evaluate(load(out)), work.evaluate(work.teacher)
    told = [read_json(out / CUTS / str(number) / "kept.json") for number in range(1, cuts + 1)]
    record = PrunedRecord.parse(
        {
            "by": settings.prune.by,
            "scope": settings.prune.scope,
            "metric": evaluation.metric,
            "teacher_score": before.score,
            "score": evaluation.score,
            "heads_before": [layer.heads for layer in units],
            "neurons_before": [layer.neurons for layer in units],
            "heads": told[-1]["heads"],
            "neurons": told[-1]["neurons"],
            "head_scores": told[0]["head_scores"],
        },
        source="the pruning",
    )
    write_pruned(record, out)
    figures = {
        "metric": evaluation.metric,
        "score": evaluation.score,
        "teacher_score": before.score,
        "cut_score": told[-1]["figures"]["score"],
        **evaluation.metrics,
        **_sizes(work, model),
        "heads": [len(own) for own in record.heads],
        "neurons": [len(own) for own in record.neurons],
        "cuts": [one["figures"] for one in told],
        "seed": settings.run.seed,
        "seconds": round(seconds, 1),
        "is_finished": True,
    }
    write_result(out, figures)
    # the model is written; what it took to get there is not needed
    shutil.rmtree(out / CUTS, ignore_errors=True)
    for folder in (out / GATES, *(out / RECOVERY).glob("*")):
        shutil.rmtree(folder / "model", ignore_errors=True)
    _print(record, figures, out)
    return figures


def _sizes(work: "Work[PruneSettings]", model: "Model") -> dict[str, Any]:
    """What the model costs, and the unpruned one: weights of all kinds, of mixers and feed-forwards, operations."""
    from bertsmith.models.cost import parameters
    from bertsmith.shrinking.prune.units import Kept

    selector = _selector(work.settings, work.teacher)
    length, now, before = work.length, model.config, work.teacher.config
    return {
        "parameters": parameters(now),
        "parameters_before": parameters(before),
        "layer_parameters": selector.parameters(Kept.all_of(model.encoder.units)),
        "layer_parameters_before": selector.whole,
        "length": length,
        "flops": float(now.encoder.flops(length)) * length,
        "flops_before": float(before.encoder.flops(length)) * length,
    }


def _print(record: Any, figures: dict[str, Any], out: Path) -> None:
    from rich.console import Console

    heads, neurons = sum(figures["heads"]), sum(figures["neurons"])
    lines = [
        f"dev: {record.metric} {record.score:.2f}; unpruned {record.teacher_score:.2f}",
        f"heads {heads} of {sum(record.heads_before)}, neurons {neurons:,} of {sum(record.neurons_before):,}; "
        f"parameters {figures['parameters']:,} of {figures['parameters_before']:,}; "
        f"operations {figures['flops'] / figures['flops_before']:.1%}",
        f"written to {out}: an ordinary model; pruned.json says which heads and neurons stayed",
    ]
    for line in lines:
        Console().print(line, markup=False, highlight=False, soft_wrap=True)


def _costs(settings: "PruneSettings", selector: "Selector", examples: int) -> dict[str, str]:
    """What the settings cost, for --explain."""
    from bertsmith.shrinking.prune.selection import schedule

    batches, run = -(-examples // settings.batch.examples), settings.run
    cuts = schedule(settings.prune)
    measured = min(examples, settings.importance.examples)
    facts = {"cuts": f"{len(cuts)}"}
    if settings.prune.by == "importance":
        facts["importance"] = f"measured on {measured:,} examples before each cut"
    if settings.prune.by == "l0":
        epochs = run.epochs if settings.gates.epochs is None else settings.gates.epochs
        facts["learning of gates"] = f"{run.changed(epochs=epochs).steps(batches):,} steps"
    if settings.recovery.between:
        steps = run.changed(epochs=settings.recovery.between).steps(batches)
        facts["learning between cuts"] = f"{(len(cuts) - 1) * steps:,} steps"
    if settings.epochs_after:
        facts["learning after the cuts"] = f"{run.changed(epochs=settings.epochs_after).steps(batches):,} steps"
    facts["layer parameters"] = f"{selector.whole:,} before"
    return facts
