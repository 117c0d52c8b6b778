"""Train a small Transformer to copy, reverse or sort sequences of numbers, and print the exact match.

python benchmarks/number_sequences.py --task sort
python benchmarks/number_sequences.py --task copy --out runs/copy --set run.steps=500
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from random import Random

import bertsmith
from bertsmith.recipes import FILES

TASKS = {"copy": list, "reverse": lambda numbers: numbers[::-1], "sort": sorted}


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder) / "run"
        data = write_task(Path(folder) / "data", options.task, seed=options.seed)
        begin, begin_busy = time.perf_counter(), time.process_time()
        metrics = bertsmith.finetune(
            recipe=FILES["transformer-numbers"],
            data=data,
            out=out,
            set=options.set,
            seed=options.seed,
            device=options.device,
            force=options.force,
        )
        seconds, busy = time.perf_counter() - begin, time.process_time() - begin_busy
    print(
        f"{options.task}: exact match {metrics['exact_match']:.1f} % of "
        f"{metrics['data']['dev']['rows']} unseen sequences, "
        f"loss {metrics['loss']:.5f}, {metrics['steps']} steps, {seconds:.0f} s in total, {busy:.0f} s of CPU time"
    )


def write_task(
    folder: Path,
    task: str,
    *,
    train: int = 30_000,
    dev: int = 1_000,
    max_length: int = 12,
    limit: int = 20,
    seed: int = 0,
) -> Path:
    """Write a task folder with random sequences of 3 to `longest` numbers below `limit`; the splits are disjoint."""
    draw = Random(seed)
    folder.mkdir(parents=True)
    seen: set[tuple[int, ...]] = set()
    while len(seen) < train + dev:
        seen.add(tuple(draw.randrange(limit) for _ in range(draw.randint(3, max_length))))
    rows = sorted(seen)
    draw.shuffle(rows)
    for part, chosen in (("dev", rows[:dev]), ("train", rows[dev:])):
        with (folder / f"{part}.jsonl").open("w", encoding="utf-8") as file:
            for numbers in chosen:
                pair = {"numbers": _text(numbers), "answer": _text(TASKS[task](numbers))}
                file.write(json.dumps(pair) + "\n")
    return folder


def _text(numbers: tuple[int, ...] | list[int]) -> str:
    return " ".join(map(str, numbers))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="sort", choices=TASKS)
    parser.add_argument("--out", type=Path, help="output folder of the run")
    parser.add_argument("--set", action="append", default=[], help="change one setting of the recipe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--force", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
