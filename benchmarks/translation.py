"""Train English to German on a small corpus, translate dev and test, and print BLEU beside a copy baseline.

    python benchmarks/translation.py --data multi30k --out results            # train, translate, score
    python benchmarks/translation.py --score results                          # only score existing translations

Training does not need sacrebleu: the translations in --out can be scored on another machine.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import bertsmith
from bertsmith.recipes import FILES
from bertsmith.tasks.data_source import task_splits
from bertsmith.tasks.translation import NO_BLEU, bleu_counts, corpus_bleu, has_bleu

SPLITS = ("dev", "test")


def main() -> None:
    options = _options()
    if options.score is None:
        _train(options)
    _score(options.score or options.out)


def _train(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        # checkpoints are large and stay there; translations and metrics go to --out
        run = options.run or Path(folder) / "run"
        begin = time.perf_counter()
        result = bertsmith.finetune(
            recipe=options.recipe,
            data=options.data,
            out=run,
            source=options.source,
            target=options.target,
            set=options.set,
            seed=options.seed,
            device=options.device,
        )
        print(f"{result['steps']} steps, {result['tokens']:,} tokens, {time.perf_counter() - begin:.0f} s in total")
        test = bertsmith.evaluate(
            run, data=options.data, split="test", out=Path(folder) / "test", device=options.device
        )
        for split, answers in (
            ("dev", run / "dev.predictions.jsonl"),
            ("test", Path(folder) / "test/predictions.jsonl"),
        ):
            _write_translations(options, split, answers, test["source"], test["target"])
        for name in ("log.jsonl", "recipe.toml"):
            shutil.copy(run / name, options.out / name)
    metrics = {**result.to_json(), "test": test.to_json()}
    (options.out / "result.json").write_text(json.dumps(metrics, indent=2, ensure_ascii=False), encoding="utf-8")


def _write_translations(options: argparse.Namespace, split: str, answers: Path, source: str, target: str) -> None:
    """Write source, reference and hypothesis of every row."""
    lines = answers.read_text(encoding="utf-8").splitlines()
    with (options.out / f"{split}.translations.jsonl").open("w", encoding="utf-8") as file:
        for row, line in zip(task_splits(options.data).read(split), lines, strict=True):
            texts = {"source": row[source], "reference": row[target], "hypothesis": json.loads(line)["answer"]}
            file.write(json.dumps(texts, ensure_ascii=False) + "\n")


def _score(folder: Path) -> None:
    for split in SPLITS:
        path = folder / f"{split}.translations.jsonl"
        with path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        if not has_bleu():
            print(f"{split}: {NO_BLEU}; score {path} elsewhere with --score {folder}")
            continue
        references = [row["reference"] for row in rows]
        counts, signature = bleu_counts([row["hypothesis"] for row in rows], references)
        copied, _ = bleu_counts([row["source"] for row in rows], references)
        print(
            f"{split}: BLEU {corpus_bleu(counts):.2f}, source copied {corpus_bleu(copied):.2f}, {len(rows)} sentences, "
            f"{signature}"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with train, dev and test as .jsonl or .jsonl.xz")
    parser.add_argument("--out", type=Path, default=Path("translation-results"))
    parser.add_argument("--run", type=Path, help="keep the whole run with its checkpoints in this folder")
    parser.add_argument("--score", type=Path, help="folder with translations to score")
    parser.add_argument("--recipe", type=Path, default=FILES["transformer-multi30k"])
    parser.add_argument("--source", default="en")
    parser.add_argument("--target", default="de")
    parser.add_argument("--set", action="append", default=[], help="change one setting of the recipe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    options = parser.parse_args()
    if options.data is None and options.score is None:
        parser.error("--data or --score is needed")
    return options


if __name__ == "__main__":
    main()
