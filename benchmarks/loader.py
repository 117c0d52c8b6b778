"""Speed of the data pipeline: tokens per second of packed or padded, masked batches, ready for a model.

python benchmarks/loader.py                        # on generated text
python benchmarks/loader.py --data CORPUS          # on a folder that `bertsmith corpus` wrote
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from itertools import islice, takewhile
from pathlib import Path

import torch

from bertsmith.data.build_corpus import build_corpus
from bertsmith.data.corruption import MaskingConfig, corrupt
from bertsmith.data.loader import BatchReader, SpecialTokens, load_batches
from bertsmith.data.plan import Cursor, Plan, SequenceConfig
from bertsmith.data.shards import TokenCorpus
from bertsmith.objectives.masked_lm import MaskedLMConfig, vocabulary_of
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.tokenizer import Tokenizer
from small_world import small_world

CUTS = ("chunks", "sentence_pairs", "segments", "convbert_segments")
UNITS = ("token", "word", "ngram")
RULES = [MaskingConfig(unit=unit, draw=draw) for draw in ("exact", "windows") for unit in UNITS]
RULES.append(MaskingConfig(draw="with_replacement"))


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or _made(Path(folder))
        corpus, tokenizer = TokenCorpus(data), Tokenizer.load(data)
        mean = corpus.tokens / corpus.documents
        print(f"{corpus.tokens:,} tokens, {mean:.0f} per document; sequences of up to {options.length}")
        names = f"{'cut':<19}{'layout':<9}{'unit':<7}{'draw':<18}"
        print(f"{names}{'workers':>7}{'tokens/s':>12}{'filled':>9}{'masked':>9}")
        for cut, layout, masking, workers in _cases(options.workers):
            _measure(corpus, tokenizer, cut, layout, masking, workers, options)
        print(f"\ntokens per second of CPU time, each step alone\n{'cut':<19}{'plan':>14}{'read':>14}")
        for cut in CUTS:
            _measure_cut(corpus, tokenizer, cut, options)
        print(f"{'unit':<7}{'draw':<18}{'mask':>14}{'places':>9}")
        for masking in RULES:
            _measure_rule(corpus, tokenizer, masking, options)


def _cases(workers: list[int]) -> list[tuple[str, str, MaskingConfig, int]]:
    """Measure every masking rule on one cut, then every other cut with one rule."""
    return [
        *(("chunks", "packed", rule, count) for rule in RULES for count in workers),
        ("chunks", "padded", MaskingConfig(), workers[-1]),
        *((cut, "packed", MaskingConfig(), workers[-1]) for cut in CUTS[1:]),
    ]


def _measure(
    corpus: TokenCorpus,
    tokenizer: Tokenizer,
    cut: str,
    layout: str,
    masking: MaskingConfig,
    workers: int,
    options: argparse.Namespace,
) -> None:
    plan, reader = _source(corpus, tokenizer, cut, layout, options)
    objective = MaskedLMConfig(masking=masking).build(tokenizer)
    batches = load_batches(reader, plan, workers=workers)
    for _ in range(4):
        objective.prepare(next(batches).batch, 0)
    real = room = targets = 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < options.seconds:
        batch = next(batches).batch
        prepared = objective.prepare(batch, 0)
        real, room = real + batch.real_tokens, room + batch.tokens.numel()
        targets += int(objective.counts(prepared)["masked_tokens"])
    speed = real / (time.perf_counter() - begin)
    case = f"{cut:<19}{layout:<9}{masking.unit:<7}{masking.draw:<18}{workers:>7}"
    print(f"{case}{speed:>12,.0f}{real / room:>9.1%}{targets / real:>9.1%}", flush=True)


def _measure_cut(corpus: TokenCorpus, tokenizer: Tokenizer, cut: str, options: argparse.Namespace) -> None:
    plan, reader = _source(corpus, tokenizer, cut, "packed", options)
    plans = list(takewhile(lambda item: (item.cursor.epoch, item.cursor.window) == (0, 0), plan.from_cursor(Cursor())))
    tokens = sum(reader[item].batch.real_tokens for item in plans)
    planning = _seconds(lambda: list(islice(plan.from_cursor(Cursor()), len(plans))))
    reading = _seconds(lambda: [reader[item] for item in plans])
    print(f"{cut:<19}{tokens / planning:>14,.0f}{tokens / reading:>14,.0f}", flush=True)


def _measure_rule(
    corpus: TokenCorpus, tokenizer: Tokenizer, masking: MaskingConfig, options: argparse.Namespace
) -> None:
    plan, reader = _source(corpus, tokenizer, "chunks", "packed", options)
    batches = [reader[item].batch for item in islice(plan.from_cursor(Cursor()), 10)]
    vocabulary = vocabulary_of(tokenizer)
    positions = len(corrupt(batches[0], 0, masking, vocabulary).positions)
    seconds = _seconds(lambda: [corrupt(batch, 0, masking, vocabulary) for batch in batches])
    speed = sum(batch.real_tokens for batch in batches) / seconds
    print(f"{masking.unit:<7}{masking.draw:<18}{speed:>14,.0f}{positions:>9,}", flush=True)


def _seconds(work: Callable[[], object]) -> float:
    """Return the minimum CPU time of several tries, which other load affects little."""
    tries = []
    for _ in range(5):
        begin = time.process_time()
        work()
        tries.append(time.process_time() - begin)
    return min(tries)


def _source(
    corpus: TokenCorpus, tokenizer: Tokenizer, cut: str, layout: str, options: argparse.Namespace
) -> tuple[Plan, BatchReader]:
    config = SequenceConfig(length=options.length, micro_tokens=options.micro_tokens, cut=cut, layout=layout)
    plan = Plan(corpus, config, seed=0)
    special = SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator)
    return plan, BatchReader(corpus, config, special, plan.slots)


def _made(folder: Path) -> Path:
    text = folder / "stories.txt"
    text.write_text("\n\n".join(small_world(60_000)), encoding="utf-8")
    tokenizer = learn_tokenizer(small_world(4_000), "wordpiece", 600, progress=False)
    build_corpus([text], tokenizer, folder / "corpus", workers=2)
    return folder / "corpus"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--length", default=128, type=int)
    parser.add_argument("--micro-tokens", default=32768, type=int)
    parser.add_argument("--workers", default=[0, 1], type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--seconds", default=4.0, type=float)
    torch.set_num_threads(1)  # one core masks, the other reads
    return parser.parse_args()


if __name__ == "__main__":
    main()
