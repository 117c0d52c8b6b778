"""Make a fine-tuned model elastic, then pick the best size for a latency budget on this machine.

    python examples/elastic_and_fit.py runs/reviews --data reviews.csv --latency-ms 5

Start from the folder that examples/classify_csv.py writes.
"""

import argparse
from pathlib import Path

import bertsmith


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a fine-tuned model")
    parser.add_argument("--data", required=True, help="the data it was fine-tuned on")
    parser.add_argument("--latency-ms", type=float, default=5.0, help="milliseconds per text, median")
    parser.add_argument("--epochs", type=float, help="epochs of each elastic stage")
    parser.add_argument("--engine", action="append", help="engines to try (default: torch)")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="parent folder of the results")
    options = parser.parse_args()

    # DynaBERT: sort heads and neurons by importance, then distil the full model into every width and depth
    elastic = bertsmith.shrink(
        options.model, data=options.data, out=options.out / "elastic", epochs=options.epochs, force=True
    )
    for size in elastic.grid:
        print(f"width {size.width:.2f}  depth {size.depth:.2f}  {elastic.metric} {size.score:.1f}")

    fitted = bertsmith.fit(
        options.out / "elastic",
        data=options.data,
        latency_ms=options.latency_ms,
        engine=options.engine,
        out=options.out / "fitted",
        force=True,
    )
    if fitted.chosen is None:
        nearest = fitted.outcome.best
        print(f"no candidate takes at most {options.latency_ms} ms; the nearest takes {nearest.latency_ms:.1f} ms")
    else:
        print(f"{fitted.chosen.words}: {elastic.metric} {fitted.chosen.score:.1f} at {fitted.chosen.latency_ms:.2f} ms")


if __name__ == "__main__":
    main()
