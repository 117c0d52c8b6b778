"""Speed of the data path: tokens a second of packed (or padded), masked batches, ready for a model.

python benchmarks/loader.py                        # on text the benchmark makes itself
python benchmarks/loader.py --data CORPUS          # on a folder that `bertsmith corpus` wrote
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from bertsmith.batches.build_corpus import build_corpus
from bertsmith.batches.corruption import MaskingConfig
from bertsmith.batches.loader import BatchReader, SpecialTokens, load_batches
from bertsmith.batches.plan import Cursor, Plan, SequenceConfig
from bertsmith.batches.shards import TokenCorpus
from bertsmith.objectives.masked_lm import MaskedLMConfig
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.small_world import small_world
from bertsmith.text.tokenizer import Tokenizer


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or _made(Path(folder))
        corpus, tokenizer = TokenCorpus(data), Tokenizer.load(data)
        mean = corpus.tokens / corpus.documents
        print(f"{corpus.tokens:,} tokens, {mean:.0f} a document; sequences of up to {options.length}")
        print(
            f"{'cut':<19}{'layout':<9}{'unit':<7}{'draw':<18}{'workers':>7}{'tokens/s':>12}{'filled':>9}{'masked':>9}"
        )
        for cut, layout, masking, workers in _cases(options.workers):
            _measure(corpus, tokenizer, cut, layout, masking, workers, options)


def _cases(workers: list[int]) -> list[tuple[str, str, MaskingConfig, int]]:
    """Every rule of masking on one cut, then every cut with one rule."""
    rules = [
        MaskingConfig(unit=unit, draw=draw) for draw in ("exact", "windows") for unit in ("token", "word", "ngram")
    ]
    rules.append(MaskingConfig(draw="with_replacement"))
    cuts = [("pieces", "padded"), ("sentence_pairs", "packed"), ("segments", "packed"), ("convbert_segments", "packed")]
    return [
        *(("pieces", "packed", rule, count) for rule in rules for count in workers),
        *((*cut, MaskingConfig(), workers[-1]) for cut in cuts),
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
    config = SequenceConfig(length=options.length, micro_tokens=options.micro_tokens, cut=cut, layout=layout)
    plan = Plan(corpus, config, seed=0)
    reader = BatchReader(corpus, config, SpecialTokens(tokenizer.pad, tokenizer.start, tokenizer.separator), plan.slots)
    objective = MaskedLMConfig(masking=masking).build(tokenizer)
    batches = iter(load_batches(reader, plan.from_cursor(Cursor()), workers=workers))
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
    torch.set_num_threads(1)  # masking takes one core and reading the other
    return parser.parse_args()


if __name__ == "__main__":
    main()
