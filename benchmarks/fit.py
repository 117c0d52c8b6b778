"""Check `bertsmith fit`: how often its artefact meets the budget, and whether brute force finds a better one.

    python benchmarks/fit.py again OUT --times 10
    python benchmarks/fit.py brute MODEL --data TASK --out OUT --latency-ms 8 --length 64 --engine torch

`again` measures the artefact of a fit in OUT repeatedly, each time in a fresh process, and prints how often its budget
is met. `brute` runs fit, then writes, scores and measures every sub-network of the uniform grid in every requested
engine and precision, and prints the best score within the budget beside fit's.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import bertsmith
from bertsmith.shrinking.fit.bench import Bench
from bertsmith.shrinking.fit.candidates import Candidate, Estimates
from bertsmith.shrinking.fit.measure import Conditions, in_fresh_process
from bertsmith.shrinking.fit.search import prepare
from bertsmith.shrinking.fit.settings import BudgetConfig, Costs, FitSettings
from bertsmith.shrinking.fit.store import MEASUREMENTS, Measurements


def main() -> None:
    options = _options()
    metrics = _again(options) if options.what == "again" else _brute(options)
    if options.metrics:
        Path(options.metrics).write_text(json.dumps(metrics, indent=2), encoding="utf-8")


def _again(options: argparse.Namespace) -> dict[str, Any]:
    """Print how often an artefact meets its budget."""
    result = json.loads((options.out / "result.json").read_text(encoding="utf-8"))
    if not result["fits"]:
        raise SystemExit(f"{options.out} holds no artefact: nothing kept {result['budget']}")
    budget = BudgetConfig.parse(result["limits"])
    conditions = Conditions.parse(result["conditions"])
    print(f"{result['chosen']['words']}; {result['budget']}")
    kept, rows = 0, []
    for number in range(1, options.times + 1):
        timing = in_fresh_process([options.out], conditions, options.runs, options.seconds)
        latency = _latency(timing.latencies[0], budget)
        misses = budget.misses(Costs(latency, result["chosen"]["size_mb"], timing.memory_mb, result["score"]))
        kept += not misses
        rows.append(
            {
                "latency_ms": latency,
                "memory_mb": timing.memory_mb,
                "is_kept": not misses,
                "processor_share": timing.processor_share,
            }
        )
        told = "kept" if not misses else "; ".join(miss.description for miss in misses)
        share = f"{timing.processor_share:4.0%} of the processor"
        print(
            f"{number:3}  p{budget.percentile} {latency:8.2f} ms  {timing.memory_mb:7.0f} MB  {share}  {told}",
            flush=True,
        )
    print(f"kept {kept} of {options.times} times")
    return {"kept": kept, "times": options.times, "rows": rows}


def _brute(options: argparse.Namespace) -> dict[str, Any]:
    """Print the best score within the budget, by fit and by brute force."""
    run_modes = {"engine": options.engine, "precision": options.precision}
    budget = {"latency_ms": options.latency_ms, "size_mb": options.size_mb, "length": options.length or None}
    budget |= {"threads": options.threads, "percentile": options.percentile}
    found = bertsmith.fit(
        options.model, data=options.data, out=options.out, subnets="even", fresh=True, force=True, **run_modes, **budget
    )
    settings = FitSettings.parse(_recorded(options.out))
    inputs = prepare(settings)
    work = options.out / ".brute"
    work.mkdir(exist_ok=True)
    store = Measurements(options.out / MEASUREMENTS)
    bench = Bench(settings.model, inputs.scorer, inputs.conditions, settings.measure, store, in_fresh_process, work)
    estimates = Estimates(inputs.model, settings.budget.percentile)
    rows = []
    for mode in inputs.run_modes:
        for subnet in inputs.grid:
            candidate = Candidate(subnet, mode, estimates.shapes(subnet), 0.0, Costs())
            timings = [bench.timing(candidate, number) for number in range(options.processes)]
            latency = statistics.median(_latency(timing.latency, settings.budget) for timing in timings)
            memory = max(timing.memory_mb for timing in timings)
            score = bench.score(candidate).score
            costs = Costs(latency, bench.size_mb(candidate), memory, score)
            bench.discard(candidate)
            words, is_kept = candidate.description, not settings.budget.misses(costs)
            rows.append({"words": words, "fits": is_kept, **costs._asdict()})
            fits = "fits" if is_kept else ""
            print(f"{words:48} {score:7.2f} {latency:8.2f} ms {costs.size_mb:8.1f} MB  {fits}", flush=True)
    best = max((row for row in rows if row["fits"]), key=lambda row: row["score"], default=None)
    own = found.outcome.score
    print(f"fit: {own if own is None else round(own, 2)}; brute force: {best and round(best['score'], 2)}")
    return {"fit": own, "chosen": found.to_json()["chosen"], "brute_force": best, "rows": rows}


def _recorded(out: Path) -> dict[str, Any]:
    from bertsmith.toml import read_toml

    return read_toml(out / "recipe.toml")


def _latency(latencies: dict[str, Any], budget: BudgetConfig) -> float:
    return max(float(found[f"p{budget.percentile}"]) for found in latencies.values())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    again = parts.add_parser("again")
    again.add_argument("out", type=Path)
    again.add_argument("--times", type=int, default=10)
    again.add_argument("--runs", type=int, default=200)
    again.add_argument("--seconds", type=float, default=10.0)
    brute = parts.add_parser("brute")
    brute.add_argument("model")
    brute.add_argument("--data", required=True)
    brute.add_argument("--out", type=Path, required=True)
    brute.add_argument("--latency-ms", type=float)
    brute.add_argument("--size-mb", type=float)
    brute.add_argument("--percentile", type=int, default=95)
    brute.add_argument("--length", type=int, action="append")
    brute.add_argument("--threads", type=int)
    brute.add_argument("--engine", action="append")
    brute.add_argument("--precision", action="append")
    brute.add_argument("--processes", type=int, default=5)
    for part in (again, brute):
        part.add_argument("--figures", help="write all metrics to this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
