"""Deep equilibrium encoder against ordinary stacks: held-out loss after the same data, training memory and speed.

    python benchmarks/equilibrium.py --data CORPUS --out FOLDER --seeds 0 1 2
    python benchmarks/equilibrium.py --data CORPUS --out FOLDER --rows equilibrium shared-12 --set run.steps=3000
    python benchmarks/equilibrium.py --cost                                # memory and tokens per second only

CORPUS is what `bertsmith corpus` wrote. Every row is the recipe equilibrium with other layers: one layer repeated to
a fixed point, with and without Jacobian regularisation; 6 and 12 layers that share the weights of one, post-norm and
pre-norm; and 2 layers without sharing. Finished runs in FOLDER are not repeated; table.json gets all of them. --cost
measures forward and backward passes of fresh encoders; memory is the peak of allocated GPU memory beyond weights and
gradients.
"""

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import bertsmith
from bertsmith.data.layout import SequenceLayout
from bertsmith.models.build import build
from bertsmith.models.published import preset
from bertsmith.recipes import FILES
from bertsmith.runs.result import StoppedRun
from bertsmith.settings import Plain
from bertsmith.toml import read_toml, to_toml

RECIPE = FILES["equilibrium"]
ROWS: dict[str, Plain] = {
    "equilibrium": {},
    "equilibrium-24": {"equilibrium": {"steps": 24, "backward_steps": 24}},
    "equilibrium-jacobian": {"equilibrium": {"jacobian_weight": 0.5}},
    "shared-12": {"layers": 12, "sharing": "all", "equilibrium": None},
    "shared-6": {"layers": 6, "sharing": "all", "equilibrium": None},
    "shared-12-pre": {"layers": 12, "sharing": "all", "placement": "pre", "equilibrium": None},
    "shared-6-pre": {"layers": 6, "sharing": "all", "placement": "pre", "equilibrium": None},
    "unshared-2": {"layers": 2, "equilibrium": None},
}
"""Changes of the recipe's overrides; those of `equilibrium` are added to its settings, None removes them."""
METRICS = ("loss", "masked_tokens_accuracy", "jacobian_residual", "jacobian_iterations")


def main() -> None:
    options = _options()
    if options.cost:
        _print_costs(options)
        return
    table = {row: [_run(row, seed, options) for seed in options.seeds] for row in options.rows}
    _print(table)
    (options.out / "table.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="corpus folder")
    parser.add_argument("--out", type=Path, help="folder of the runs")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--set", nargs="*", default=[], help="settings such as run.steps=3000")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cost", action="store_true", help="measure memory and speed instead")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence, for --cost")
    parser.add_argument("--batch", type=int, default=32, help="sequences, for --cost")
    parser.add_argument("--repeats", type=int, default=10, help="timed passes, for --cost")
    options = parser.parse_args()
    if not options.cost and (options.data is None or options.out is None):
        parser.error("--data and --out are required without --cost")
    return options


def _overrides(row: str) -> Plain:
    """Return the overrides of the preset for a row."""
    recipe, changes = read_toml(RECIPE)["model"]["overrides"], dict(ROWS[row])
    solver = changes.pop("equilibrium", {})
    overrides = {**recipe, **changes}
    if solver is None:
        del overrides["equilibrium"]
    else:
        overrides["equilibrium"] = {**recipe["equilibrium"], **solver}
    return overrides


def _run(row: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Pre-train a row with one seed unless the folder has it already; return its figures on the held-out split."""
    folder = options.out / f"{row}-seed-{seed}"
    if not (folder / "result.json").is_file():
        recipe = read_toml(RECIPE)
        recipe["model"]["overrides"] = _overrides(row)
        options.out.mkdir(parents=True, exist_ok=True)
        file = options.out / f"{row}.toml"
        file.write_text(to_toml(recipe), encoding="utf-8")
        is_begun = (folder / "recipe.toml").is_file()
        result = bertsmith.pretrain(
            None if is_begun else file,
            data=options.data,
            out=folder,
            seed=seed,
            set=options.set,
            device=options.device,
            resume=is_begun,
        )
        if isinstance(result, StoppedRun):
            raise SystemExit(f"{folder} was stopped; run the same command again to resume it")
    found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    figures = {name: found["held_out"][name] for name in METRICS if name in found["held_out"]}
    return {**figures, "parameters": found["parameters"], "seconds": found["seconds"]}


def _print(table: dict[str, list[dict[str, float]]]) -> None:
    print(f"{'':24}{'parameters':>12}{'held-out loss':>18}{'residual':>12}{'iterations':>12}{'runs':>6}")
    for row, runs in table.items():
        cells = f"{row:24}{runs[0]['parameters']:>12,.0f}{_spread([run['loss'] for run in runs]):>18}"
        for name in METRICS[2:]:
            values = [run[name] for run in runs if name in run]
            cells += f"{statistics.fmean(values):>12.4g}" if values else f"{'':>12}"
        print(f"{cells}{len(runs):>6}")


def _spread(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{deviation}"


def _print_costs(options: argparse.Namespace) -> None:
    device = "cuda" if options.device == "auto" and torch.cuda.is_available() else options.device.replace("auto", "cpu")
    print(f"torch {torch.__version__}, {device}, {options.batch} sequences of {options.length} tokens")
    print("| row | memory, MiB | tokens/s |")
    print("|---|---|---|")
    for row in options.rows:
        memory, speed = _cost(row, device, options)
        print(f"| {row} | {memory / 2**20:,.1f} | {speed:,.0f} |", flush=True)


def _cost(row: str, device: str, options: argparse.Namespace) -> tuple[float, float]:
    """Return the peak memory in bytes (NaN on a CPU) and the tokens per second of training passes."""
    overrides = {**_overrides(row), "max_length": options.length}
    encoder = build(preset("bert-mini", **overrides).changed(heads=()), seed=0).encoder.to(device).train()
    tokens = torch.randint(0, 8000, (options.batch, options.length), device=device)
    layout, is_gpu = SequenceLayout.full(options.batch, options.length), device.startswith("cuda")

    def train() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16) if is_gpu else nullcontext():
            hidden = encoder(tokens, layout)
        hidden.float().square().mean().backward()
        if is_gpu:
            torch.cuda.synchronize()

    train()  # allocates the gradients
    memory, seconds = float("nan"), []
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train()
        memory = torch.cuda.max_memory_allocated() - before
    for _ in range(options.repeats):
        begin = time.perf_counter()
        train()
        seconds.append(time.perf_counter() - begin)
    return memory, tokens.numel() / statistics.median(seconds)


if __name__ == "__main__":
    main()
