"""Cut the vocabulary of a fine-tuned model to its training texts: tokens, megabytes and score of each cut.

    python benchmarks/vocabulary.py --model FOLDER --data TASK
    python benchmarks/vocabulary.py --model FOLDER --data TASK --texts corpus.jsonl.xz --tokens 12000 --out metrics.json

FOLDER is the output of `bertsmith finetune`, TASK the folder with train and dev that it was fine-tuned on. Tokens are
counted in the texts of train, and with --texts also in those of a file, which may contain words of dev that train
lacks. --tokens gives vocabulary sizes, instead of the default cuts. Scores are on dev, of the folders as written and
read again; nothing but the repair is trained.
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bertsmith.shrinking.vocabulary import VocabularyConfig, cut_vocabulary_folder
from bertsmith.tasks.data_source import task_splits
from bertsmith.tasks.predictor import Predictor, read_task_record
from bertsmith.text.cut import Cut, changed_tokens
from bertsmith.text.readers import find_files, read_documents
from bertsmith.text.rows import Table
from bertsmith.text.tokenizer import Tokenizer

CUTS: dict[str, dict[str, int]] = {
    "used once": {},
    "used three times": {"at_least": 3},
    "6,000 pieces": {"tokens": 6000},
    "rank 192": {"rank": 192},
    "rank 128": {"rank": 128},
    "rank 128, no repair": {"rank": 128, "repair_steps": 0},
}


def main() -> None:
    options = _options()
    parts, task = task_splits(options.data), read_task_record(options.model).task
    texts = [*task.texts(task.examples(parts.read("train")))]
    if options.texts:
        texts += read_documents(find_files([options.texts]))
    dev = parts.read("dev")
    whole = _score(options.model, dev)
    print(f"{len(texts):,} texts; the whole model: {whole:.2f}")
    columns = ("cut", "tokens", "MB", "tokens changed", "of dev", "embedding off by", "score", "seconds")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    rows = {}
    cuts = {f"{tokens:,} pieces": {"tokens": tokens} for tokens in options.tokens} or CUTS
    for name, settings in cuts.items():
        with tempfile.TemporaryDirectory() as folder:
            begin, out = time.perf_counter(), Path(folder) / "model"
            cut = cut_vocabulary_folder(options.model, texts, VocabularyConfig(**settings), out)
            metrics = {key: value for key, value in asdict(cut).items() if value is not None}
            metrics["seconds"] = time.perf_counter() - begin
            metrics["score"] = _score(out, dev)
            metrics["dev_tokens_changed_percent"] = _changed(options.model, out, [*task.texts(task.examples(dev))])
        rows[name] = metrics
        print(_row(name, metrics), flush=True)
    if options.out:
        options.out.write_text(json.dumps({"score": whole, "cuts": rows}, indent=2), encoding="utf-8")


def _score(folder: Path, dev: Table) -> float:
    return Predictor.load(folder).evaluate(dev)[0].score


def _changed(model: Path, out: Path, texts: list[str]) -> float:
    """Return the percentage of tokens that change because of a cut."""
    base, small = Tokenizer.load(model), Tokenizer.load(out)
    cut = Cut(small, tuple(base.vocabulary[piece] for piece in small.tokens(range(small.size))))
    changed, total = changed_tokens(base, cut, texts)
    return 100 * changed / total


def _row(name: str, metrics: dict[str, Any]) -> str:
    cells = [
        name,
        f"{metrics['tokens_before']:,} → {metrics['tokens_after']:,}",
        f"{metrics['megabytes_before']:.1f} → {metrics['megabytes_after']:.1f}",
        f"{metrics['tokens_changed_percent']:.1f} %",
        f"{metrics['dev_tokens_changed_percent']:.1f} %",
        f"{100 * metrics['embedding_error']:.1f} %" if "embedding_error" in metrics else "–",
        f"{metrics['score']:.2f}",
        f"{metrics['seconds']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--tokens", type=int, nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
