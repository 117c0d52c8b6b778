"""Speed of whole pre-training steps: tokens per second, MFU, and time spent waiting for data.

    python benchmarks/pretrain.py --data CORPUS                  # on a GPU: every family, small and base
    python benchmarks/pretrain.py --data CORPUS --device cpu --sizes tiny --families bert,electra
    python benchmarks/pretrain.py --data CORPUS --sizes small --families bert --trace trace.json.gz
    python benchmarks/pretrain.py --data CORPUS --sizes base --families bert --turn turn.lock --pause 1234

CORPUS is a folder that `bertsmith corpus` wrote. Each row is the beginning of an ordinary run of the trainer, with
`run.compile = "auto"` unless --compile is given: batches read from disk and packed, masks and generator samples drawn
on the device, forward, backward, clipping, AdamW. BERT and Performer are trained with masked tokens, the others with
replaced tokens and the generator of their paper. "20th step" is the time from the start, model and data included, to
the end of step 20; caches of torch.compile and Triton make it shorter in a second run. --trace writes a profiler trace
of some steps, counts the calls that wait for the device and lists the kernels that take the most time. --peer measures
a plain loop with `transformers`: the same networks, vocabulary and objective, compiled, tokens already on the device,
logits only at masked positions.

--turn FILE lets several processes measure on one device: each builds, compiles and takes its first steps at any time,
and waits for its turn before the other warm-up steps and the timed ones. --pause PID stops another process that uses
the device meanwhile (benchmarks/turns.py). The wait does not count as start-up, but the start-up is longer while
others use the device. "product_tflops" is the speed of a large bfloat16 product at the beginning of the turn.
"""

import argparse
import gc
import json
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bertsmith.models.model import Model
from bertsmith.training.pretraining import PretrainSettings, corpus_tokenizer, make_trainer
from turns import Turn, add_options

Take = Callable[[str, str, argparse.Namespace], dict[str, Any] | None]
"""Measures a family and size; None if the side does not support the family."""
SIZES = {
    "tiny": {"width": 128, "layers": 2, "heads": 2},
    "small": {"width": 256, "layers": 12, "heads": 4},
    "base": {"width": 768, "layers": 12, "heads": 12},
}
RUN_STEPS = 100_000
"""Length of the run whose beginning is measured; the choice of run.compile depends on it."""
START_STEP = 20
"""The step whose end counts as the end of the start-up: a row of the log, which waits for the device."""
TURN_STEP = 5
"""The step before which a turn begins: the steps until then compile, and record CUDA graphs."""
TRACED_STEPS = 6
TRACED_KERNELS = 25
SYNCHRONISATIONS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""CUDA calls that wait for the device; the asynchronous copy is called cudaMemcpyAsync."""
MASKED = {"kind": "masked_lm", "masking": {"rate": 0.15}}
REPLACED = {"kind": "replaced_tokens", "masking": {"rate": 0.15}}
ALWAYS_MASKED = {"kind": "replaced_tokens", "masking": {"rate": 0.15, "mask": 1.0, "random": 0.0}}

# preset, objective, generator; sizes as above
FAMILIES: dict[str, tuple[str, dict, dict]] = {
    "bert": ("bert-base", MASKED, {}),
    "electra": ("electra-base", REPLACED, {"width": 0.25}),
    "convbert": ("convbert-base", REPLACED, {"width": 0.25}),
    "deberta-v3": ("deberta-v3-base", ALWAYS_MASKED, {"width": 1.0, "depth": 0.5, "sharing": "gradient_disentangled"}),
    "performer": ("performer-base", MASKED, {}),
}


def settings_of(family: str, size: str, options: argparse.Namespace) -> PretrainSettings:
    """Return the settings of one row."""
    name, objective, generator = FAMILIES[family]
    overrides: dict[str, Any] = {**SIZES[size], "dropout": 0.0, "max_length": options.length}
    if family in ("electra", "convbert"):
        overrides["embedding_width"] = 128 if size != "base" else 768
    return PretrainSettings.parse(
        {
            "data": options.data,
            "model": {"preset": name, "overrides": overrides},
            "sequences": {"length": options.length, "micro_tokens": options.tokens},
            "objective": objective,
            **({"generator": generator} if generator else {}),
            "batch": {"tokens": options.tokens},
            "optimizer": {"learning_rate": 5e-4},
            "run": {
                "steps": RUN_STEPS,
                "compile": options.compile,
                "deterministic": options.deterministic,
                "workers": options.workers,
                "log_every": 10,
                "evaluate_every": RUN_STEPS,
                "checkpoint_every": RUN_STEPS,
                "keep": 0,
            },
        },
        source=f"{family} {size}",
    )


def measure(family: str, size: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the metrics of one family and size, without the first log rows, which include compilation."""
    settings = settings_of(family, size, options)
    watch = Watch(options)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(settings, Path(folder), device=options.device, show=False)
        trainer.before_step = watch
        trainer.train_step.notices = notices = Notices()
        with watch.turn.ended():
            trainer.run()
        rows = [row for row in trainer.log.of_kind("training") if row["step"] > options.warmup]
        weights = sum(parameter.numel() for parameter in trainer.model.parameters())
        trainer.close()
    return {
        "family": family,
        "size": size,
        "parameters": weights,
        "tokens_per_second": round(statistics.median(row["tokens_per_second"] for row in rows)),
        "utilisation": statistics.median(row.get("utilisation", 0.0) for row in rows),
        "data_wait": statistics.median(row["data_wait"] for row in rows),
        "mode": trainer.train_step.mode,
        **watch.metrics(begin),
        **({"notices": notices.all} if notices.all else {}),
    }


class Notices(list[str]):
    """Messages of the training step, such as a mode that failed; they are kept when the trainer has shown them."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []

    def append(self, text: str) -> None:
        super().append(text)
        self.all.append(text)


class Watch:
    """Called before every step: begins the turn, takes the time of the start-up, traces some steps and ends the run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.turn = Turn.of(options)
        self.last = options.warmup + options.steps - 1
        # between two rows of the log, which wait for the device
        self.traced = (options.warmup + 2, options.warmup + 2 + TRACED_STEPS) if options.trace else (-1, -1)
        self.trace, self.started = options.trace, float("nan")
        self.profile: Any = None

    def __call__(self, model: Model, step: int) -> None:
        if step == TURN_STEP:
            self.turn.begin()
        if step == START_STEP:
            self.started = time.perf_counter() - self.turn.waited
        if step == self.traced[0]:
            self.profile = torch.profiler.profile()
            self.profile.start()
        if step == self.traced[1]:
            self.profile.stop()
        if step == self.last:
            signal.raise_signal(signal.SIGTERM)  # the run stops after this step as if it was interrupted

    def metrics(self, begin: float) -> dict[str, Any]:
        """Return the times since `begin`, and the synchronisations of the trace."""
        return {
            "start_up": round(self.started - begin, 1),
            **times_of(begin, self.turn),
            **({} if self.profile is None else self._examine_trace()),
        }

    def _examine_trace(self) -> dict[str, float]:
        """Write the trace, print the longest kernels and count the calls that wait for the device."""
        counts = Counter(call.name for call in self.profile.events() if call.name in SYNCHRONISATIONS)
        table = self.profile.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=TRACED_KERNELS, max_name_column_width=80
        )
        print(f"{TRACED_STEPS} steps\n{table}", file=sys.stderr)
        self.profile.export_chrome_trace(self.trace)
        return {f"{name} per step": round(counts[name] / TRACED_STEPS, 2) for name in SYNCHRONISATIONS}


def times_of(begin: float, turn: Turn) -> dict[str, float]:
    """Return the seconds of a row without the wait for its turn, and the speed of the device at its beginning."""
    return {
        "seconds": round(time.perf_counter() - begin - turn.waited, 1),
        **({} if turn.tflops is None else {"product_tflops": turn.tflops}),
    }


def measure_peer(family: str, size: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Measure the same with `transformers`, if it supports the objective: BERT's and ELECTRA's."""
    from pretrain_peer import peer_step

    if family not in ("bert", "electra", "convbert"):
        return None
    begin = time.perf_counter()
    vocabulary = corpus_tokenizer(Path(options.data)).size
    step = peer_step(family, SIZES[size], vocabulary, options.length, options.tokens, options.device)
    for _ in range(TURN_STEP):
        step()
    with Turn.of(options) as turn:
        for _ in range(TURN_STEP, START_STEP):
            step()
        _synchronise(options.device)
        started = time.perf_counter() - turn.waited
        times = []
        for _ in range(3):
            start = time.perf_counter()
            for _ in range(10):
                step()
            _synchronise(options.device)
            times.append((time.perf_counter() - start) / 10)
    return {
        "family": f"{family} (transformers)",
        "size": size,
        "tokens_per_second": round(options.tokens / statistics.median(times)),
        "start_up": round(started - begin, 1),
        **times_of(begin, turn),
    }


def main() -> None:
    options = _options()
    warnings.filterwarnings("ignore")
    torch.backends.cuda.matmul.allow_tf32 = True
    sides = {"": [measure], "also": [measure, measure_peer], "only": [measure_peer]}[options.peer]
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        for family in options.families:
            for take in sides:
                row = _row(take, family, size, options)
                if row is not None:
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                    if options.out:
                        Path(options.out).write_text(json.dumps(rows, indent=2), encoding="utf-8")
                gc.collect()
                torch._dynamo.reset()
                if options.device == "cuda":
                    torch.cuda.empty_cache()
    _print_table([row for row in rows if "error" not in row], options)
    if any("error" in row for row in rows):
        raise SystemExit(1)


def _row(take: Take, family: str, size: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return a row, or its error if it fails, which does not stop the others."""
    try:
        return take(family, size, options)
    except Exception as error:
        traceback.print_exc()
        side = "" if take is measure else " (transformers)"
        return {"family": family + side, "size": size, "error": f"{type(error).__name__}: {error}"}


def _print_table(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    print(
        f"\ntorch {torch.__version__}, {options.device}, length {options.length}, {options.tokens} tokens per step, "
        f"compile {options.compile}, {options.workers} workers"
    )
    names = f"{'':<24}{'size':<7}{'mode':<8}{'parameters':>13}"
    print(f"{names}{'tokens/s':>12}{'MFU':>8}{'data wait':>11}{'20th step, s':>14}")
    for row in rows:
        shares = "".join(f"{row[key]:>{width}.1%}" if key in row else " " * width for key, width in _SHARES)
        weights = f"{row['parameters']:>13,}" if "parameters" in row else " " * 13
        name = f"{row['family']:<24}{row['size']:<7}{row.get('mode', ''):<8}"
        print(f"{name}{weights}{row['tokens_per_second']:>12,}{shares}{row['start_up']:>14}")
        for call in SYNCHRONISATIONS:
            if f"{call} per step" in row:
                print(f"    {call}: {row[f'{call} per step']:g} per step")


_SHARES = (("utilisation", 8), ("data_wait", 11))


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _options() -> argparse.Namespace:
    def listed(text: str) -> list[str]:
        return text.split(",")

    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a corpus folder")
    parser.add_argument("--families", default=list(FAMILIES), type=listed)
    parser.add_argument("--sizes", default=["small", "base"], type=listed)
    parser.add_argument("--length", default=128, type=int)
    parser.add_argument(
        "--tokens", default=65536 if has_gpu else 2048, type=int, help="tokens per step, one micro-batch"
    )
    parser.add_argument("--compile", default="auto", help="run.compile")
    parser.add_argument("--trace", help="write a profiler trace of some steps and count synchronisations")
    parser.add_argument("--workers", default=8 if has_gpu else 0, type=int)
    parser.add_argument("--warmup", default=20, type=int, help="warm-up steps, a multiple of 10")
    parser.add_argument("--steps", default=50, type=int, help="timed steps after them, a multiple of 10")
    parser.add_argument("--deterministic", action="store_true", help="with run.deterministic")
    parser.add_argument(
        "--peer", nargs="?", default="", const="also", choices=("also", "only"), help="measure a loop with transformers"
    )
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--out", help="write the metrics as JSON")
    add_options(parser)
    options = parser.parse_args()
    if options.warmup < START_STEP:
        parser.error(f"--warmup: {options.warmup}; allowed: {START_STEP} or more")
    return options


if __name__ == "__main__":
    main()
