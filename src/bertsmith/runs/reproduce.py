"""`bertsmith reproduce`: run the tables of the papers, or tables of your own, and decide their claims."""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table as ConsoleTable

from bertsmith.data.devices import device_type
from bertsmith.data.executor import Executor, LostWorker
from bertsmith.errors import InputError
from bertsmith.report.page import format_duration
from bertsmith.report.reproduction import claim_rows, published_markdown, render_table_page, table_markdown
from bertsmith.reproduction.evaluation import Lines, TableEvaluation, evaluate_table
from bertsmith.reproduction.plan import PlannedRun, RunPlan
from bertsmith.reproduction.table import BLOCK, ExperimentTable, block_tables, read_table, table_names
from bertsmith.runs.flags import RayFlag
from bertsmith.runs.jobs import JobOrder, Outcome, open_jobs
from bertsmith.runs.output import MARK, REPORT, RESULT, check_out, lock, unlock, write_result
from bertsmith.runs.reproduce_check import check_table, rehearse
from bertsmith.runs.result import OneShotResult, print_plain
from bertsmith.runs.search import MODEL_FILES
from bertsmith.toml import to_toml

RUNS, LINES = "runs", "runs.jsonl"
GPU_PROCESSES = 4


@dataclass(frozen=True, kw_only=True)
class ReproduceResult(OneShotResult):
    """Verdicts of all tables; exit code 1 if runs are missing, whatever the verdicts."""

    tables: dict[str, dict[str, str]] = field(default_factory=dict)
    """Verdict of every claim, by table."""
    missing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Runs that have not finished, by table."""
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        return 1 if self.missing else 0


def reproduce(
    names: list[str] | None = None,
    *,
    out: Path = Path("reproduce"),
    data: Path | None = None,
    seeds: int | None = None,
    processes: int | None = None,
    minutes: float | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    ray: RayFlag = None,
    list_tables: Annotated[bool, Parameter(name="--list", negative=())] = False,
    published: bool = False,
    check: bool = False,
) -> ReproduceResult:
    """Run tables of experiments and decide their claims: a paper's, or your own.

    A table is a TOML file with rows, runs, metrics and claims, which are fixed before the first run. Runs that several
    tables share are run once. Repeat the command to continue an interrupted one, to retry failed runs or to add tables.

    Parameters
    ----------
    names
        Tables of the papers (--list prints them), blocks of them such as block-1, or .toml files.
    out
        Output folder: runs.jsonl with one line per finished run, runs/ with their folders, and one folder per table
        with table.md, report.html and result.json. An existing folder is continued.
    data
        Folder that {data} in a table stands for.
    seeds
        Number of seeds of every row, instead of the table's.
    processes
        Runs side by side on the device; 4 on a GPU and 1 on a CPU by default. With --ray: on every GPU, or on as many
        cores as this machine has.
    minutes
        Start no run that is not expected to end within this time.
    device
        Device to run on; "auto" uses a GPU if one is available.
    ray
        Run on a Ray cluster: its address, "auto", or "local" to start one on this machine. --out and --data must be
        folders that all machines share. A run whose worker is lost is repeated.
    list_tables
        Print all tables of the papers with their planned minutes.
    published
        Print the published figures and the claims; run nothing.
    check
        Check the tables: every setting, network and claim. With --data, also run every distinct run for a few steps on
        a narrow network and a sample of the data.
    """
    if list_tables:
        _print_list()
        return ReproduceResult()
    tables = [read_table(name) for name in _expand(names or [])]
    if seeds is not None:
        if seeds < 1:
            raise InputError(f"--seeds is {seeds}; allowed: 1 or more")
        tables = [table.with_seeds(seeds) for table in tables]
    if published:
        for table in tables:
            print_plain(published_markdown(table))
        return ReproduceResult()
    place = device_type(device)
    processes = processes or (GPU_PROCESSES if place == "cuda" else 1)
    if processes < 1:
        raise InputError(f"--processes is {processes}; allowed: 1 or more")
    plan = RunPlan(tables)
    for table in tables:
        check_table(table, plan)
    if check:
        return _check(tables, plan, data)
    store = RunStore(Path(out), data)
    begin = time.perf_counter()
    store.open()
    try:
        with open_jobs(processes, device, ray) as executor:
            run_plan(plan, store, executor, device=place, minutes=minutes)
    finally:
        unlock(store.out)
    return _write_tables(tables, plan, store, time.perf_counter() - begin)


class RunStore:
    """Finished runs in runs.jsonl, and their folders."""

    def __init__(self, out: Path, data: Path | None) -> None:
        self.out, self.data = out, data
        if not (out / MARK).is_file():
            check_out(out, False, data)
        self.lines: dict[str, dict[str, Any]] = {line["key"]: line for line in read_lines(out / LINES)}
        self._fingerprints: dict[str, str] = {}

    def open(self) -> None:
        """Create the folder and lock it; raise InputError if another process uses it."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / MARK).touch()
        lock(self.out)

    def folder(self, key: str) -> Path:
        """Return the folder of a run."""
        return self.out / RUNS / key

    def has_result(self, job: PlannedRun) -> bool:
        """Return whether a run has finished on the present data; without --data, whether it has finished."""
        line = self.lines.get(job.key)
        if line is None or "error" in line:
            return False
        return self.data is None or line.get("inputs", {}) in ({}, self.inputs(job))

    def has_output(self, job: PlannedRun) -> bool:
        """Return whether other runs can read the folder of a finished run."""
        return (self.folder(job.key) / RESULT).is_file() and not (self.folder(job.key) / _PRUNED).is_file()

    def inputs(self, job: PlannedRun) -> dict[str, str]:
        """Return the fingerprints of the data that a run reads."""
        if self.data is None:
            return {}
        for path in job.data_paths:
            if path not in self._fingerprints:
                self._fingerprints[path] = fingerprint(self.data / path)
        return {path: self._fingerprints[path] for path in job.data_paths}

    def order(self, job: PlannedRun, device: str) -> JobOrder:
        """Return the order to run a job."""
        settings = job.located(self.data, {need: self.folder(need) for need in job.needs})
        affinity = job.affinity if device == "cuda" else ""  # nothing is compiled on a CPU
        return JobOrder(job.key, job.command, settings, self.folder(job.key), device, affinity)

    def add(self, job: PlannedRun, outcome: Outcome) -> None:
        """Append a line to runs.jsonl."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / MARK).touch()
        line = {"key": job.key, "label": job.label, "command": job.command, "seed": job.seed, **outcome}
        if "error" not in outcome:
            line |= {"settings": job.settings, "needs": list(job.needs), "inputs": self.inputs(job)}
        with (self.out / LINES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.lines[job.key] = line

    def prune(self, job: PlannedRun) -> None:
        """Delete the weights of a finished run that no other run reads."""
        found = [self.folder(job.key) / name for name in MODEL_FILES if (self.folder(job.key) / name).is_file()]
        for path in found:
            path.unlink()
        if found:
            (self.folder(job.key) / _PRUNED).touch()


_PRUNED = ".pruned"
"""File in the folder of a run whose weights were deleted."""


def run_plan(
    plan: RunPlan,
    store: RunStore,
    executor: Executor[JobOrder, Outcome],
    *,
    device: str,
    minutes: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run all jobs without a result in the order of the plan; a job starts once the jobs it reads have finished.

    A failed run fails the runs that read it and no others. With `minutes`, a run starts only if it is expected to end
    in time: its planned seconds, times the runs side by side, times the ratio of measured and planned times so far.
    """
    todo = _unfinished(plan, store)
    running: dict[str, float] = {}
    futures: dict[Future[Outcome], str] = {}
    ratios: list[float] = []
    late: set[str] = set()
    begin, read_keys, total = clock(), plan.read_keys, len(todo)
    if total:
        print_plain(f"{total} runs to do, {len(plan.jobs) - total} are done")
    finished = 0

    def expected(job: PlannedRun) -> float:
        share = 1 if job.alone else executor.slots
        return job.seconds * share * (median(ratios) if ratios else 1.0)

    def next_job() -> PlannedRun | None:
        for key, job in todo.items():
            if key in running or key in late or any(need in todo for need in job.needs):
                continue
            if job.alone and running:
                return None  # whatever is behind it waits, too, or it would never start
            if minutes is not None and clock() - begin + expected(job) > 60 * minutes:
                late.add(key)
                continue
            return job
        return None

    while True:
        is_exclusive = any(plan.jobs[key].alone for key in running)
        while len(running) < executor.slots and not is_exclusive and (job := next_job()) is not None:
            running[job.key] = clock()
            is_exclusive = job.alone
            order = store.order(job, device)
            futures[executor.submit(order, order.affinity)] = job.key
        if not running:
            break
        future = executor.first_finished(futures)
        key = futures.pop(future)
        try:
            outcome = future.result()
        except LostWorker as error:
            outcome = {"error": str(error)}
        job = todo.pop(key)
        started = running.pop(key)
        if job.seconds:
            ratios.append((clock() - started) / (job.seconds * (1 if job.alone else executor.slots)))
        if "error" in outcome:
            _fail_readers(plan, todo, key)
        elif key not in read_keys:
            store.prune(job)
        store.add(job, outcome)
        finished += 1
        message = outcome.get("error") or f"{outcome['seconds']:.0f} s"
        print_plain(f"{finished}/{total} after {format_duration(clock() - begin)}: {job.label}: {message}")
    if late:
        print_plain(f"{len(todo)} runs were not started: they would not end within {minutes:g} minutes")


def _unfinished(plan: RunPlan, store: RunStore) -> dict[str, PlannedRun]:
    """Return the jobs without a result, and those whose output such a job reads and that is gone."""
    todo = {key for key, job in plan.jobs.items() if not store.has_result(job)}
    pending = list(todo)
    while pending:
        for need in plan.jobs[pending.pop()].needs:
            if need not in todo and not store.has_output(plan.jobs[need]):
                todo.add(need)
                pending.append(need)
    return {key: job for key, job in plan.jobs.items() if key in todo}


def _fail_readers(plan: RunPlan, todo: dict[str, PlannedRun], failed: str) -> None:
    """Remove the jobs that depend on a failed one."""
    for key in [key for key in todo if failed in plan.ancestors(key)]:
        del todo[key]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of runs.jsonl; a last line that was cut off when its process was killed is left out."""
    lines = []
    texts = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            if number < len(texts):
                raise InputError(f"{str(file)!r}, line {number} is not valid JSON; remove the line") from None
            file.write_text("".join(f"{line}\n" for line in texts[:-1]), encoding="utf-8")
    return lines


def fingerprint(path: Path) -> str:
    """Return a hash of a file, or of all files of a folder with their names."""
    if not path.exists():
        raise InputError(f"{str(path)!r} does not exist; --data must be the folder that contains it")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    digest = hashlib.sha256()
    for file in files:
        digest.update(b"" if file == path else file.relative_to(path).as_posix().encode())
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]


def _expand(names: Sequence[str]) -> list[str]:
    """Return the tables of blocks and names, each once."""
    if not names:
        raise InputError("no table is given; give names (bertsmith reproduce --list) or .toml files")
    expanded = [table for name in names for table in (block_tables(name) if name.startswith(BLOCK) else [name])]
    return list(dict.fromkeys(expanded))


def _check(tables: Sequence[ExperimentTable], plan: RunPlan, data: Path | None) -> ReproduceResult:
    for table in tables:
        runs = len(plan.keys_of(table.name))
        print_plain(f"{table.name}: {len(table.rows)} rows, {runs} runs, {len(table.claims)} claims: valid")
    if data is None:
        print_plain("not rehearsed: give --data to run every distinct run for a few steps")
        return ReproduceResult()
    errors = rehearse(tables, data, print_plain)
    for label, error in errors.items():
        print_plain(f"{label}: {error}", style="red")
    print_plain(f"rehearsal: {len(errors)} runs failed" if errors else "rehearsal: all runs work")
    return ReproduceResult(missing={"rehearsal": tuple(errors)} if errors else {})


def _write_tables(tables: Sequence[ExperimentTable], plan: RunPlan, store: RunStore, seconds: float) -> ReproduceResult:
    """Evaluate every table, write its files and print its verdicts."""
    verdicts, missing = {}, {}
    for table in tables:
        evaluation = evaluate_table(table, plan, store.lines)
        write_table(evaluation, store.out / table.name)
        _print_verdicts(evaluation)
        verdicts[table.name] = {one.claim.text: one.status for one in evaluation.claims}
        if not evaluation.is_complete:
            missing[table.name] = unfinished_runs(table, plan, store.lines)
            print_plain(f"{table.name}: {len(missing[table.name])} runs missing; repeat the command to run them")
    print_plain(f"written to {store.out}: one folder per table, {LINES}")
    return ReproduceResult(tables=verdicts, missing=missing, seconds=round(seconds, 1))


def unfinished_runs(table: ExperimentTable, plan: RunPlan, lines: Lines) -> tuple[str, ...]:
    """Return the runs of a table without a result, with the error of failed ones."""
    texts = []
    for key, job in plan.jobs.items():
        if key in plan.keys_of(table.name) and (key not in lines or "error" in lines[key]):
            error = lines.get(key, {}).get("error")
            texts.append(job.label + (": not run" if error is None else f": {error}"))
    return tuple(texts)


def write_table(evaluation: TableEvaluation, folder: Path) -> None:
    """Write table.md, report.html, table.toml and result.json of a table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(table_markdown(evaluation), encoding="utf-8")
    (folder / "table.toml").write_text(to_toml(evaluation.table.plain()), encoding="utf-8")
    (folder / REPORT).write_text(render_table_page(evaluation), encoding="utf-8")
    write_result(folder, evaluation.to_json())


def _print_verdicts(evaluation: TableEvaluation) -> None:
    printed = ConsoleTable("claim", "metric", "difference", "verdict", title=evaluation.table.title, box=None)
    for row in claim_rows(evaluation):
        printed.add_row(row.text, row.metric, "\n".join(row.differences), row.status)
    Console(width=None if sys.stdout.isatty() else 160).print(printed)


def _print_list() -> None:
    printed = ConsoleTable("table", "block", "rows", "runs", "planned", "title", box=None, pad_edge=False)
    for name in table_names():
        table = read_table(name)
        plan = RunPlan([table])
        planned = sum(job.seconds for job in plan.jobs.values())
        block = "" if table.block is None else f"{BLOCK}{table.block}"
        cost = f"{planned / 60:.1f} min {'GPU' if table.device == 'cuda' else 'CPU'}"
        printed.add_row(name, block, str(len(table.rows)), str(len(plan.jobs)), cost, table.title)
    Console(width=None if sys.stdout.isatty() else 160).print(printed)
