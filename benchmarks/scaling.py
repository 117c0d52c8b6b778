"""Estimate training on several GPUs: step time, gradient communication, efficiency and memory.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --gpus 8 64 --batch-tokens 4194304 --network 400

These are estimates, not measurements. Communication time is bytes over bandwidth without overlap with the backward
pass: a real run is faster, because most of it overlaps, and slower on a shared network.
"""

import argparse
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bertsmith.models.cost import parameters, training_flops, training_memory
from bertsmith.models.published import preset

PEAK = 989e12
"""Peak FLOP/s in dense bfloat16 of an H100 or H200."""
NVLINK = 450e9
"""Bytes per second from one GPU to the others of its machine; the data sheet's 900 GB/s count both directions."""
TARGETS = 0.2
SIZES = ("bert-small", "bert-base", "bert-large", "deberta-v3-large", "deberta-v2-xxlarge")
GIB = 2**30


@dataclass(frozen=True)
class Expected:
    """One model on a number of GPUs."""

    compute: float
    """Seconds of a step without communication."""
    exchange: float
    """Seconds of gradient communication over the slowest link."""
    copies: float
    """Bytes per GPU with DDP, including activations."""
    shares: float
    """Bytes per GPU with FSDP2, including activations."""

    @property
    def efficiency(self) -> float:
        """Share of the ideal speed without overlap of communication and backward pass."""
        return self.compute / (self.compute + self.exchange)


def utilisation(width: int) -> float:
    """Return the estimated share of the peak in packed, compiled runs (small widths are memory-bound)."""
    return {256: 0.12, 384: 0.18, 512: 0.25, 768: 0.40}.get(width, 0.45)


def expect(name: str, gpus: int, *, batch: int, micro: int, length: int, network: float) -> Expected:
    """Estimate a preset; machines have eight GPUs, `network` is the bandwidth of one machine in bytes per second."""
    config = preset(name)
    weights, width = parameters(config), config.encoder.width
    compute = batch * training_flops(config, length, TARGETS) / (gpus * PEAK * utilisation(width))
    # every GPU sends and receives 2 · (N-1)/N of the gradient in float32, whatever the all-reduce algorithm
    moved = 2 * 4 * weights * (gpus - 1) / gpus
    exchange = moved / (NVLINK if gpus <= 8 else network)
    copies = training_memory(config, micro, TARGETS, half=True)
    # in bfloat16 two layers are gathered at a time, embeddings and heads stay; gradients wait for the last micro-batch
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
    parser.add_argument(
        "--network", type=float, default=50, help="network bandwidth of a machine in GB/s; 8 adapters: 400"
    )
    arguments = parser.parse_args()
    table = Table(title=f"ESTIMATES: {arguments.batch_tokens:,} tokens per step, H100 or H200, no overlap")
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
