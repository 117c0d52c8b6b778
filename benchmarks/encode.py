"""Texts per second of `model.encode` and of sentence-transformers with the same weights, in one run.

    python benchmarks/encode.py FOLDER --texts FILE              # a folder of sentence-transformers, a .jsonl(.xz) file
    python benchmarks/encode.py FOLDER --texts FILE --count 1500 --batch-sizes 32 256 --threads 2

Each round runs both sides once, so that other load affects both alike. The table has the medians, and the median over
rounds of the ratio (above 1: ours is faster). Both sides truncate to the same length and return the mean of the final
hidden states, normalised; the last column is the largest difference between the vectors.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

import bertsmith
from bertsmith.text.readers import first_texts


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    texts = first_texts(options.texts, options.count, options.column)
    model, peer = bertsmith.load(options.folder).eval(), SentenceTransformer(options.folder, device="cpu")
    peer.max_seq_length = model.config.encoder.embedding.max_length
    print(f"{len(texts):,} texts, {options.threads} threads, median of {options.rounds} rounds")
    print("| batch size | ours, texts/s | sentence-transformers, texts/s | ratio | largest difference |")
    print("|---|---|---|---|---|")
    for batch_size in options.batch_sizes:

        def ours(batch_size: int = batch_size) -> Tensor:
            return torch.nn.functional.normalize(model.encode(texts, batch_size=batch_size), dim=-1)

        def theirs(batch_size: int = batch_size) -> Tensor:
            return peer.encode(texts, batch_size=batch_size, convert_to_tensor=True, normalize_embeddings=True)

        rounds = [(_seconds(ours), _seconds(theirs)) for _ in range(options.rounds)]
        own, other = (len(texts) / statistics.median(times) for times in zip(*rounds, strict=True))
        ratio = statistics.median(other_time / own_time for own_time, other_time in rounds)
        difference = (ours() - theirs()).abs().max().item()
        print(f"| {batch_size} | {own:.0f} | {other:.0f} | {ratio:.2f} | {difference:.0e} |", flush=True)


def _seconds(function: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder of sentence-transformers with mean pooling")
    parser.add_argument("--texts", type=Path, required=True, help=".jsonl or .jsonl.xz file")
    parser.add_argument("--column", default="sentence", help="column of the texts")
    parser.add_argument("--count", type=int, default=1500, help="number of texts")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


if __name__ == "__main__":
    main()
