"""Operations and runs whose results differ between two calls on a GPU, and the cost of the deterministic mode.

    python benchmarks/determinism.py                                     # single operations
    python benchmarks/determinism.py --data CORPUS                       # also whole pre-training runs of each family
    python benchmarks/determinism.py --data CORPUS --families bert --sizes small --compile off

Operations: outputs and gradients of 20 calls with the same inputs are compared bit by bit, and timed, by default and in
PyTorch's deterministic mode. Runs: two runs of one seed, with the default settings and with run.deterministic; "differ"
is the share of weights whose bits differ after the last step. With --turn, only the steps of the runs that are timed
are in a turn of this process (benchmarks/turns.py).
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# before the first matrix product: cuBLAS is deterministic only with a fixed workspace
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import embedding, scaled_dot_product_attention

from bertsmith.data.layout import SequenceLayout
from bertsmith.ops.attention import attention
from bertsmith.ops.favor import RandomFeatures, draw, favor
from bertsmith.training.pretraining import make_trainer
from pretrain import FAMILIES, Watch, settings_of
from turns import add_options

Results = Callable[[], Sequence[Tensor]]
CALLS = 20


@contextmanager
def mode(deterministic: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def results_of(function: Callable[..., Tensor], *tensors: Tensor) -> Results:
    """Return a call that computes the output and the gradient of every tensor."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    with torch.no_grad():
        upstream = torch.randn_like(function(*leaves))

    def call() -> list[Tensor]:
        output = function(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]

    return call


def operations() -> dict[str, Callable[[], Results]]:
    """Return operations by name; each is built when it is measured."""
    layout = SequenceLayout.packed(torch.arange(65, dtype=torch.int32, device="cuda") * 512, 512)

    def states(*shape: int) -> list[Tensor]:
        return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    def sdpa(backend: SDPBackend) -> Results:
        def attend(*tensors: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*tensors)

        return results_of(attend, *states(64, 12, 512, 64))

    def packed() -> Results:
        return results_of(lambda q, k, v: attention(q, k, v, layout), *states(64 * 512, 12, 64))

    def linear(is_causal: bool) -> Results:
        features = RandomFeatures(draw(256, 64).float().cuda())
        return results_of(
            lambda q, k, v: favor(q, k, v, features, layout, is_causal=is_causal), *states(64 * 512, 12, 64)
        )

    def table(is_compiled: bool) -> Results:
        tokens = torch.randint(0, 30522, (65536,), device="cuda") % 997
        look_up = torch.compile(embedding, dynamic=False) if is_compiled else embedding
        return results_of(lambda weight: look_up(tokens, weight), torch.randn(30522, 768, device="cuda"))

    def pooled() -> Results:
        return results_of(layout.means, torch.randn(64 * 512, 768, device="cuda"))

    return {
        "attention, packed": packed,
        "attention, cuDNN": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
        "attention, flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
        "attention, memory-efficient": lambda: sdpa(SDPBackend.EFFICIENT_ATTENTION),
        "FAVOR+ kernels": lambda: linear(False),
        "FAVOR+ kernels, causal": lambda: linear(True),
        "embedding": lambda: table(False),
        "embedding, compiled": lambda: table(True),
        "mean over sequences": pooled,
    }


def compare_calls(call: Results) -> tuple[float, float]:
    """Return the share of numbers that differ in some call from the first call, and the median milliseconds."""
    first, times = [tensor.clone() for tensor in call()], []
    differs = [torch.zeros_like(tensor, dtype=torch.bool) for tensor in first]
    for _ in range(CALLS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        result = call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
        for seen, one, other in zip(differs, first, result, strict=True):
            seen |= one != other
    share = sum(int(seen.sum()) for seen in differs) / sum(seen.numel() for seen in differs)
    return share, statistics.median(times)


def print_operations() -> None:
    print("\n| operation, forward and backward | differ, default | ms | differ, deterministic | ms |")
    print("|---|---|---|---|---|")
    for name, build in operations().items():
        cells = []
        for deterministic in (False, True):
            torch._dynamo.reset()
            try:
                with mode(deterministic):
                    torch.manual_seed(0)
                    share, spent = compare_calls(build())
                cells += [f"{share:.2%}", f"{spent:.3f}"]
            except RuntimeError as error:
                cells += [str(error).splitlines()[0][:60], ""]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def train(family: str, size: str, options: argparse.Namespace) -> tuple[list[Tensor], float]:
    """Return the weights after a run, and its tokens per second without the first steps."""
    settings = settings_of(family, size, options)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(settings, Path(folder), device=options.device, show=False)
        trainer.before_step = watch = Watch(options)
        with watch.turn.ended():
            trainer.run()
        rows = [row for row in trainer.log.of_kind("training") if row["step"] > options.warmup]
        weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        trainer.close()
    gc.collect()
    torch._dynamo.reset()
    return weights, statistics.median(row["tokens_per_second"] for row in rows)


def print_runs(options: argparse.Namespace) -> None:
    print(f"\n{options.warmup + options.steps} steps of {options.tokens} tokens of length {options.length}")
    print("\n| run | compile | differ, default | tokens/s | differ, deterministic | tokens/s | cost |")
    print("|---|---|---|---|---|---|---|")
    for size in options.sizes:
        for family in options.families:
            for compile in options.compiles:
                cells, speeds = [], []
                for deterministic in (False, True):
                    changed = argparse.Namespace(
                        **{**vars(options), "compile": compile, "deterministic": deterministic}
                    )
                    (first, _), (second, speed) = (train(family, size, changed) for _ in range(2))
                    differ = sum(int((one != other).sum()) for one, other in zip(first, second, strict=True))
                    speeds.append(speed)
                    cells += [f"{differ / sum(weight.numel() for weight in first):.2%}", f"{speed:,.0f}"]
                cost = f"{speeds[0] / speeds[1] - 1:+.0%}"
                print(f"| {family} {size} | {compile} | {' | '.join(cells)} | {cost} |", flush=True)


def main() -> None:
    options = _options()
    warnings.filterwarnings("ignore")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    if options.operations:
        print_operations()
    if options.data:
        print_runs(options)


def _options() -> argparse.Namespace:
    def listed(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a corpus folder that `bertsmith corpus` wrote")
    parser.add_argument("--families", default=list(FAMILIES), type=listed)
    parser.add_argument("--sizes", default=["small"], type=listed)
    parser.add_argument("--compile", default=["off", "on"], type=listed, dest="compiles")
    parser.add_argument("--length", default=512, type=int)
    parser.add_argument("--tokens", default=65536, type=int, help="tokens per step, one micro-batch")
    parser.add_argument("--workers", default=4, type=int)
    parser.add_argument("--warmup", default=10, type=int, help="warm-up steps, a multiple of 10")
    parser.add_argument("--steps", default=20, type=int, help="timed steps, a multiple of 10")
    parser.add_argument("--no-operations", action="store_false", dest="operations", help="only runs")
    add_options(parser)
    parser.set_defaults(device="cuda", trace=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
