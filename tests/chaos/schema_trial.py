"""Generated requests to every endpoint, with all checks of schemathesis: `python tests/chaos/schema_trial.py`.

One service for every kind of task, for an encoder, for an elastic model, and for several models with a key. Requests
are valid and invalid by the service's own OpenAPI document; a valid one must be answered with 2xx, an invalid one
rejected, and every response must be as documented.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE.parent / "unit/serving/http"), str(_HERE.parent / "contracts")]
from serving_cases import RELEVANCE, schedulers, serving, write_encoder, write_task  # noqa: E402

from bertsmith.serving.settings import ServeSettings  # noqa: E402

TASKS = {
    "classification": "classification",
    "pairs": "classification of pairs",
    "relevance": RELEVANCE,
    "tagging": "tagging",
    "parsing": "parsing",
    "regression": "regression",
    "multi-label": "multi_label",
    "choice": "choice",
    "spans": "spans",
    "embedding": "embedding of alike texts",
}
_KEY = "a-key-of-the-trial"


@dataclass(frozen=True)
class Outcome:
    """Endpoints, generated requests, failures, and the report of them."""

    endpoints: int
    cases: int
    failures: int
    report: str


def services(home: Path) -> dict[str, Mapping[str, Path]]:
    """Write the models; return the folders of every service by model name."""
    models = {name: {name: write_task(home / name, case)} for name, case in TASKS.items()}
    models["encoder"] = {"encoder": write_encoder(home / "encoder")}
    models["elastic"] = {"elastic": write_task(home / "elastic", "classification", elastic=True)}
    several = {name: models[name][name] for name in ("tagging", "encoder", "spans", "pairs")}
    return {**models, "several models with a key": several}


def run(folders: Mapping[str, Path], examples: int, seed: int, home: Path) -> Outcome:
    """Start a service and let schemathesis send requests to all its endpoints."""
    key = _KEY if len(folders) > 1 else None
    floor = 0.9 if "elastic" in folders else None
    report = home / "report.json"
    with schedulers(folders, floor=floor) as models, serving(models, ServeSettings(key=key)) as url:
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(_HERE / "schemathesis.toml")]
        command += ["run", f"{url}/openapi.json", "--checks", "all", "--phases", "examples,coverage,fuzzing"]
        command += ["--max-examples", str(examples), "--seed", str(seed), "--continue-on-failure", "--no-shrink"]
        command += ["--report", "json", "--report-json-path", str(report)]
        command += [] if key is None else ["--header", f"Authorization: Bearer {key}"]
        paths = os.pathsep.join([str(_HERE), *filter(None, sys.path)])
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "schema_hooks", "PYTHONPATH": paths}
        finished = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=home)
    if not report.exists():
        return Outcome(0, 0, 1, finished.stdout + finished.stderr)
    result = json.loads(report.read_text())
    report.unlink()
    cases = result["test_cases"]
    failures = cases["unique_failures"] + len(result["errors"])
    return Outcome(result["operations"]["tested"], cases["generated"], failures, finished.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=20, help="random requests per endpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="services to try")
    options = parser.parse_args()
    total, failures = 0, 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as home:
        folders = services(Path(home))
        for name in options.only or folders:
            outcome = run(folders[name], options.examples, options.seed, Path(home))
            total += outcome.cases
            failures += outcome.failures
            print(f"| {name} | {outcome.endpoints} | {outcome.cases:,} | {outcome.failures} |", flush=True)
            if outcome.failures:
                print(outcome.report)
    print(f"| total | | {total:,} | {failures} |")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
