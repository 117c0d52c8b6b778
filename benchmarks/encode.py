"""Texts per second of `model.encode` and of sentence-transformers with the same weights, in one run.

    python benchmarks/encode.py FOLDER --texts FILE              # a folder of sentence-transformers, a .jsonl(.xz) file
    python benchmarks/encode.py FOLDER --texts FILE --count 1500 --batch-sizes default 32 256 --threads 2
    python benchmarks/encode.py FOLDER --texts FILE --device cuda --count 20000 --precisions float32 bfloat16

Each round runs both sides once, so that other load affects both alike. The table has the medians, and the median over
rounds of the ratio (above 1: ours is faster) of wall-clock time and, on a CPU, of the processor time of all threads,
which other load disturbs less. "default" leaves batch size and precision to each side; with a precision, the peer's
weights have it as well. Both sides read truncation, pooling and normalisation from the folder; the last column is the
largest difference between the vectors. `--exported` compares the folder that `bertsmith export` writes with our model;
the peer runs the modelling code of the folder if no class of transformers computes the same.
With --turn, only the rounds of a row are in a turn of this process (benchmarks/turns.py).
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

import bertsmith
from bertsmith.models.model import Model
from bertsmith.text.readers import first_texts
from turns import Turn, add_options

DEFAULT = "default"


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    texts = first_texts(options.texts, options.count, options.column)
    model = bertsmith.load(options.folder, device=options.device).eval()
    if options.exported:
        options.folder = str(Path(tempfile.mkdtemp()) / "exported")
        model.save_pretrained(options.folder)
    where = f"{options.threads} threads" if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"{len(texts):,} texts, {where}, median of {options.rounds} rounds")
    print(
        "| batch size | precision | ours, texts/s | sentence-transformers, texts/s | ratio | ratio of processor time "
        "| largest difference |"
    )
    print("|---|---|---|---|---|---|---|")
    for precision in options.precisions:
        peer = _peer(options.folder, options.device, precision)
        for batch_size in options.batch_sizes:
            print(_row(texts, model, peer, batch_size, precision, options), flush=True)


def _peer(folder: str, device: str, precision: str) -> SentenceTransformer:
    settings = {} if precision == DEFAULT else {"dtype": getattr(torch, precision)}
    return SentenceTransformer(folder, device=device, model_kwargs=settings, trust_remote_code=True)


def _row(
    texts: list[str],
    model: Model,
    peer: SentenceTransformer,
    batch_size: str,
    precision: str,
    options: argparse.Namespace,
) -> str:
    """Measure both sides in turns and return a row of the table."""
    rows = {} if batch_size == DEFAULT else {"batch_size": int(batch_size)}
    own_precision = {} if precision == DEFAULT else {"precision": precision}

    def ours() -> Tensor:
        return model.encode(texts, **rows, **own_precision)

    def theirs() -> Tensor:
        return peer.encode(texts, **rows, convert_to_tensor=True).float()

    difference = (ours() - theirs()).abs().max().item()  # also warms up
    with Turn.of(options):
        rounds = [(_seconds(ours), _seconds(theirs)) for _ in range(options.rounds)]
    own, other = (len(texts) / statistics.median(wall for wall, _ in times) for times in zip(*rounds, strict=True))
    ratio, processor = (
        statistics.median(other_times[kind] / own_times[kind] for own_times, other_times in rounds) for kind in (0, 1)
    )
    by_processor = f"{processor:.2f}" if options.device == "cpu" else "–"
    cells = [batch_size, precision, f"{own:.0f}", f"{other:.0f}", f"{ratio:.2f}", by_processor, f"{difference:.0e}"]
    return f"| {' | '.join(cells)} |"


def _seconds(function: Callable[[], Tensor]) -> tuple[float, float]:
    """Return the wall-clock and the processor seconds of a call."""
    start, processor_start = time.perf_counter(), time.process_time()
    vectors = function()
    if vectors.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - processor_start


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="bundled model, or folder of ours or of sentence-transformers")
    parser.add_argument("--texts", type=Path, required=True, help=".jsonl or .jsonl.xz file")
    parser.add_argument("--exported", action="store_true", help="the peer opens our export of the model")
    parser.add_argument("--column", default="sentence", help="column of the texts")
    parser.add_argument("--count", type=int, default=1500, help="number of texts")
    parser.add_argument("--batch-sizes", nargs="+", default=[DEFAULT, "32", "256"], help="numbers, or default")
    parser.add_argument("--precisions", nargs="+", default=[DEFAULT], choices=(DEFAULT, "float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    add_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
