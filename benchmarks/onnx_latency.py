"""Latency of our ONNX graphs and those of `transformers` in the same ONNX Runtime, in one run.

    python benchmarks/onnx_latency.py                            # the size of MiniLM: 6 layers of width 384, one thread
    python benchmarks/onnx_latency.py --threads 2 --shapes 1x16 1x128 8x128

Each round runs every candidate once, so that other load affects all alike. The table has the median, the minimum, and
the median over rounds of the ratio to the graph of transformers (its eager attention, which ONNX Runtime fuses best);
below 1 is faster.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.artefact import open_runner, write_artefact
from bertsmith.engines.base import Artefact, Inputs
from bertsmith.engines.onnx_graph import feed
from bertsmith.engines.onnx_trace import OPSET, quiet
from bertsmith.models.build import build
from bertsmith.models.model import Model
from bertsmith.models.published import preset

PEER = "transformers onnx"
NAMES = ("input_ids", "attention_mask", "token_type_ids")
Run = Callable[[Inputs], object]


class Peer(nn.Module):
    """A transformers BERT as a function of three tensors."""

    def __init__(self, options: argparse.Namespace, attention: str) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            hidden_size=options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            intermediate_size=4 * options.width,
            attn_implementation=attention,
        )
        self.model = BertModel(config, add_pooling_layer=False).eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        return self.model(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).last_hidden_state


def main() -> None:
    options = _options()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    with TemporaryDirectory() as folder, torch.inference_mode():
        candidates = _candidates(options, Path(folder))
        rows = [row for shape in options.shapes for row in _measured(candidates, shape, options.rounds)]
    print(f"{'batch':>6} {'length':>6}  {'candidate':22} {'median ms':>10} {'least ms':>10} {'ratio':>7}")
    for row in rows:
        print(
            f"{row['batch']:>6} {row['length']:>6}  {row['candidate']:22} {row['median_ms']:10.2f} "
            f"{row['least_ms']:10.2f} {row['ratio']:7.3f}"
        )
    if options.out:
        Path(options.out).write_text(json.dumps(rows, indent=2), encoding="utf-8")


def _candidates(options: argparse.Namespace, folder: Path) -> dict[str, Run]:
    with torch.inference_mode(False):
        sizes = {"width": options.width, "layers": options.layers, "heads": options.heads}
        model = build(preset("bert-base", **sizes), seed=0).eval()
        eager = Peer(options, "sdpa")
        session = _peer_session(Peer(options, "eager"), folder / "peer.onnx", options.threads)
    candidates: dict[str, Run] = {
        PEER: lambda batch: session.run(None, feed(batch, NAMES)),
        "transformers eager": lambda batch: eager(*_tensors(batch)),
        "bertsmith eager": lambda batch: model(*_tensors(batch)),
    }
    for precision in ("float32", "int8"):
        candidates[f"bertsmith onnx {precision}"] = _ours(model, folder / precision, precision, options.threads)
    return candidates


def _ours(model: Model, folder: Path, precision: str, threads: int) -> Run:
    folder.mkdir()
    with torch.inference_mode(False):
        write_artefact(model, folder, Artefact(engine="onnxruntime", precision=precision))
    runner = open_runner(folder, threads=threads)
    return lambda batch: runner.outputs(*batch)


def _peer_session(peer: Peer, path: Path, threads: int) -> object:
    import onnxruntime

    tokens = torch.zeros(2, 6, dtype=torch.long)
    free = {0: torch.export.Dim("batch", max=2**15), 1: torch.export.Dim("length", max=512)}
    with torch.no_grad(), quiet():
        example = (tokens, torch.ones_like(tokens), tokens)
        program = torch.onnx.export(
            peer,
            example,
            dynamo=True,
            dynamic_shapes=(free, free, free),
            input_names=NAMES,
            opset_version=OPSET,
            verbose=False,
        )
        program.save(path)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = threads, 3
    return onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])


def _tensors(batch: Inputs) -> tuple[Tensor, ...]:
    assert batch.layout.is_token is not None
    return batch.tokens, batch.layout.is_token.long(), batch.types


def _measured(candidates: dict[str, Run], shape: tuple[int, int], rounds: int) -> list[dict]:
    batch, length = shape
    lengths = torch.linspace(length, max(1, length // 2), batch).long()  # the first row is full
    layout = SequenceLayout.padded(torch.arange(length) < lengths[:, None])
    tokens = torch.randint(1000, 20000, shape)
    given = Inputs(tokens, layout, torch.zeros_like(tokens))
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 3):
        for name, run in candidates.items():
            begin = time.perf_counter()
            run(given)
            if number >= 3:  # the first rounds warm up
                taken[name].append(1e3 * (time.perf_counter() - begin))
    rows = []
    for name, times in taken.items():
        ratio = statistics.median(own / peers for own, peers in zip(times, taken[PEER], strict=True))
        metrics = {"median_ms": statistics.median(times), "least_ms": min(times), "ratio": ratio}
        rows.append({"batch": batch, "length": length, "candidate": name, **metrics})
    return rows


def _shape(text: str) -> tuple[int, int]:
    batch, _, length = text.partition("x")
    return int(batch), int(length)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", type=_shape, nargs="+", default=[(1, 16), (1, 128), (8, 64)])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
