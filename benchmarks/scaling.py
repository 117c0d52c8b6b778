"""What to expect of several GPUs, by arithmetic: step time, time for the gradients, share of the ideal speed, memory.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --gpus 8 64 --batch-tokens 4194304 --network 400

Nothing is measured here. Times for gradients are bytes over bandwidth, as if nothing were hidden behind the backward
pass: a run does better, because most of it is, and worse where a network is shared. Replace the rows by your own log.
"""

import argparse
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bertsmith.models.cost import parameters, training_flops, training_memory
from bertsmith.models.published import preset

PEAK = 989e12
"""Operations a second, dense bfloat16, H100 and H200."""
NVLINK = 450e9
"""Bytes a second from one GPU to the others of its machine; the data sheet's 900 GB/s count both directions."""
TARGETS = 0.2
SIZES = ("bert-small", "bert-base", "bert-large", "deberta-v3-large", "deberta-v2-xxlarge")
GIB = 2**30


@dataclass(frozen=True)
class Expected:
    """One model on so many GPUs."""

    compute: float
    """Seconds of a step without any exchange."""
    exchange: float
    """Seconds in which gradients cross the slowest wire."""
    copies: float
    """Bytes on each GPU with a whole copy (DDP), activations among them."""
    shares: float
    """Likewise with shares (FSDP2)."""

    @property
    def efficiency(self) -> float:
        """The share of the ideal speed if nothing is hidden behind the backward pass."""
        return self.compute / (self.compute + self.exchange)


def utilisation(width: int) -> float:
    """The share of the peak a GPU reaches: estimates for packed, compiled runs (small widths wait for memory)."""
    return {256: 0.12, 384: 0.18, 512: 0.25, 768: 0.40}.get(width, 0.45)


def expect(name: str, gpus: int, *, batch: int, micro: int, length: int, network: float) -> Expected:
    """The figures of a preset; machines have eight GPUs, and `network` is the bytes a second that leave one machine."""
    config = preset(name)
    weights, width = parameters(config), config.encoder.width
    compute = batch * training_flops(config, length, TARGETS) / (gpus * PEAK * utilisation(width))
    # every GPU sends and gets 2 · (N-1)/N of the gradient in float32, however the sum is taken
    moved = 2 * 4 * weights * (gpus - 1) / gpus
    exchange = moved / (NVLINK if gpus <= 8 else network)
    copies = training_memory(config, micro, TARGETS, half=True)
    # layers come and go, two at a time; embeddings and heads stay, in bfloat16; gradients wait for the last micro-batch
    layer = (weights - config.encoder.vocabulary * config.encoder.embedding_width) / len(config.encoder.layers)
    gathered = 2 * (config.encoder.vocabulary * config.encoder.embedding_width + 2 * layer)
    waiting = 4 * weights if batch > micro * gpus else 0
    return Expected(compute, exchange, copies, copies - 16 * weights * (1 - 1 / gpus) + gathered + waiting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 16, 64])
    parser.add_argument("--batch-tokens", type=int, default=2**20)
    parser.add_argument("--micro-tokens", type=int, default=2**14)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--network", type=float, default=50, help="GB/s that leave a machine; 8 adapters: 400")
    arguments = parser.parse_args()
    table = Table(title=f"ESTIMATES: {arguments.batch_tokens:,} tokens a step, H100 or H200, nothing overlapped")
    for heading in ("model", "parameters", "GPUs", "compute ms", "gradients ms", "efficiency", "DDP GiB", "FSDP2 GiB"):
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    for name in SIZES:
        for gpus in arguments.gpus:
            found = expect(
                name,
                gpus,
                batch=arguments.batch_tokens,
                micro=arguments.micro_tokens,
                length=arguments.length,
                network=arguments.network * 1e9,
            )
            table.add_row(
                name,
                f"{parameters(preset(name)) / 1e6:.0f} M",
                str(gpus),
                f"{found.compute * 1e3:.1f}",
                f"{found.exchange * 1e3:.2f}",
                f"{found.efficiency:.0%}",
                f"{found.copies / GIB:.1f}",
                "–" if gpus == 1 else f"{found.shares / GIB:.1f}",
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
