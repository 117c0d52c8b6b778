"""`bertsmith fit`: a model and a budget → the best artefact that keeps it on this machine."""

from pathlib import Path
from typing import Any, Literal

from bertsmith.bundled import model_text
from bertsmith.errors import InputError


def fit(
    model: str | Path | None = None,
    *,
    data: str | None = None,
    out: Path,
    latency_ms: float | None = None,
    percentile: int | None = None,
    length: list[int] | None = None,
    batch: int | None = None,
    threads: int | None = None,
    size_mb: float | None = None,
    memory_mb: float | None = None,
    at_least: float | None = None,
    prefer: Literal["fast", "small"] | None = None,
    engine: list[str] | None = None,
    precision: list[str] | None = None,
    subnets: Literal["even", "layers"] | None = None,
    vocabulary: Literal["keep", "cut", "auto"] | None = None,
    part: str | None = None,
    set: list[str] | None = None,
    measurements: Path | None = None,
    fresh: bool = False,
    explain: bool = False,
    resume: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Find the best model that keeps a budget on this machine: measured here, handed over with proof.

    Parameters
    ----------
    model
        The folder of a fine-tuned model, best an elastic one (bertsmith shrink).
    data
        A folder with a dev part, and best a train part, as for bertsmith evaluate.
    out
        The folder to write: an artefact ready to serve, card.md, report.html, result.json, candidates.jsonl and
        measurements.jsonl. Where nothing keeps the budget there is no artefact, and the exit code is 1.
    latency_ms
        Milliseconds that an answer may take, from token ids to what the head says.
    percentile
        The share of answers in percent that must be as quick: 50 or 95; 95 if not given.
    length
        Tokens of the sequences that this holds for; may be given several times. Without it sequences are as long as
        those of the data.
    batch
        Sequences that are answered at a time; 1 if not given.
    threads
        Threads to compute with; all cores if not given.
    size_mb
        Megabytes (of 1,000,000 bytes) that all files which are needed to answer may have.
    memory_mb
        Megabytes of memory that a fresh process which answers may take at its peak, all counted in.
    at_least
        The lowest score on dev that is good enough: then the fastest model that has it is wanted.
    prefer
        With at_least: the fastest model, or the smallest.
    engine
        What may run the model: torch, compiled, onnxruntime; may be given several times. All if not given.
    precision
        What it may compute in: float32, bfloat16, int8, int8_static, int8_weights; may be given several times.
    subnets
        Even widths and depths alone, or also layers that differ; the latter if the model is elastic.
    vocabulary
        Whether pieces that the training texts do not use are dropped; "auto" if nothing else is small enough.
    part
        The part of the data that candidates are scored on; dev if not given.
    set
        One setting, such as measure.repeats=10 or search.generations=12; may be given several times.
    measurements
        Measurements of an earlier fit to use, a file or its folder; those of all earlier ones are used anyway.
    fresh
        Measure everything anew.
    explain
        Print the settings and what would be measured, then stop.
    resume
        Go on with the search in --out, with the budget it has unless another one is given.
    force
        Replace what --out holds.
    """
    from bertsmith.commands.fit_run import explain_fit, run_fit
    from bertsmith.commands.run import recipe_of
    from bertsmith.shrinking.fit.settings import FitSettings
    from bertsmith.toml import override

    out = Path(out)
    plain = dict(recipe_of(None, out if resume else None) or {})
    given: dict[str, dict[str, Any]] = {
        "budget": {
            "latency_ms": latency_ms,
            "percentile": percentile,
            "lengths": length,
            "batch": batch,
            "threads": threads,
            "size_mb": size_mb,
            "memory_mb": memory_mb,
            "at_least": at_least,
        },
        "search": {"engines": engine, "precisions": precision, "subnets": subnets, "vocabulary": vocabulary},
    }
    top = {"model": model and model_text(model), "data": data and str(data), "part": part, "prefer": prefer}
    plain |= {name: value for name, value in top.items() if value is not None}
    for group, values in given.items():
        said = {name: value for name, value in values.items() if value is not None}
        plain[group] = {**plain.get(group, {}), **said}
    if "model" not in plain:
        raise InputError("MODEL is not given; give the folder of a fine-tuned model")
    if "data" not in plain:
        raise InputError("--data is not given; give a folder with a dev part")
    settings = FitSettings.parse(override(plain, set or []), source="fit")
    if explain:
        return explain_fit(settings)
    return run_fit(settings, out, measurements=measurements, fresh=fresh, resume=resume, force=force)
