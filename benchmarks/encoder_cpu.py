"""Our encoders and those of `transformers` on a CPU: inference with every engine in float32 and int8, and training.

    python benchmarks/encoder_cpu.py                                   # base size, two threads: about ten minutes
    python benchmarks/encoder_cpu.py --layers 2 --families deberta-v3  # quick
    python benchmarks/encoder_cpu.py --families bundled,bert --width 256 --heads 4 --lengths 16,128   # bundled model
    python benchmarks/encoder_cpu.py --families bundled,bert --width 256 --heads 4 --lengths 128 --training

Both sides have the same architecture with random weights; batches have no padding. "bundled" is the shape of the
bundled model (pre-norm DeBERTa, token vectors of half the width), compared with the DeBERTa-v3 of transformers.
--training times forward and backward pass, with dropout if --dropout is given. Every round runs every candidate once,
so that noise affects all alike; the minimum over rounds is reported. The ONNX graphs of transformers are written by
`torch.onnx.export` and run by the same ONNX Runtime; for int8 they are quantised with `quantize_dynamic`. A ratio is
the best time of transformers divided by ours: above 1, ours is faster.
"""

import argparse
import gc
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from bertsmith.checkpoint.hf.reading import ADAPTERS
from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.artefact import open_runner, write_artefact
from bertsmith.engines.base import Artefact
from bertsmith.engines.onnx_trace import OPSET, quiet
from bertsmith.models.build import build
from bertsmith.models.config import ModelConfig
from bertsmith.models.model import Model
from bertsmith.models.published import overridable, preset

Run = Callable[[Tensor], object]
FLOAT, INT8 = "float32", "int8"
THEIRS: dict[str, str] = {"transformers eager": FLOAT, "transformers ORT": FLOAT, "transformers ORT int8": INT8}
OURS: dict[str, str] = {
    "torch padded": FLOAT,
    "torch packed": FLOAT,
    "ORT": FLOAT,
    "torch int8": INT8,
    "ORT int8": INT8,
}
"""Candidates and their precisions."""
PLAIN = ("torch padded", "torch packed")
VOCABULARY = 30522
BUNDLED = "bundled"
_PAUSE = 0.05  # seconds until the threads of the previous candidate stop spinning


class Peer(nn.Module):
    """A transformers model as a function of token ids."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids)[0]


def main() -> None:
    options = _options()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    rows: list[dict] = []
    for family in options.families:
        with TemporaryDirectory() as folder, torch.inference_mode(not options.training):
            candidates, notices = _candidates(family, Path(folder), options)
            for notice in notices:
                print(f"{family}: {notice}", flush=True)
            for length in options.lengths:
                for batch in options.batches:
                    rows.append({"family": family, "batch": batch, "length": length})
                    rows[-1]["ms"] = _measure(candidates, batch, length, options)
                    print(json.dumps(rows[-1]), flush=True)
                    if options.out:
                        Path(options.out).write_text(json.dumps(rows, indent=2), encoding="utf-8")
        del candidates
        gc.collect()
    _print_tables(rows, options)


def _candidates(family: str, folder: Path, options: argparse.Namespace) -> tuple[dict[str, Run], list[str]]:
    """Return all candidates of a family, and notices about failures."""
    with torch.inference_mode(False):
        config = _config(family, options)
        candidates, notices = _theirs(config, family, folder, options)
        model = build(config, seed=0).train(options.training)
        candidates["torch padded"] = lambda ids: model.encoder(ids, SequenceLayout.full(*ids.shape))
        candidates["torch packed"] = lambda ids: model.encoder(ids.flatten(), _packed(*ids.shape))
        for name, engine, precision in (
            ("ORT", "onnxruntime", FLOAT),
            ("torch int8", "torch", INT8),
            ("ORT int8", "onnxruntime", INT8),
        ):
            artefact = folder / name.replace(" ", "-")
            if options.training or not any(word in name for word in options.only):
                continue
            try:
                candidates[name] = _ours(model, artefact, engine, precision, options.threads)
            except Exception as error:
                notices.append(f"no {name}: {_short(error)}")
    return {name: run for name, run in candidates.items() if any(word in name for word in options.only)}, notices


def _config(family: str, options: argparse.Namespace) -> ModelConfig:
    """Return the config of a family in the requested size, without heads."""
    name = "disentangled-small" if family == BUNDLED else f"{family}-base"
    sizes = {"width": options.width, "layers": options.layers, "heads": options.heads, "max_length": 512}
    sizes |= {"vocabulary": VOCABULARY, "embedding_width": options.width // 2 if family == BUNDLED else options.width}
    sizes["dropout"] = options.dropout if options.training else 0.0
    return preset(name, **{key: value for key, value in sizes.items() if key in overridable(name)}).changed(heads=())


def _theirs(
    config: ModelConfig, family: str, folder: Path, options: argparse.Namespace
) -> tuple[dict[str, Run], list[str]]:
    """Return the same network in transformers; its DeBERTa for the bundled model, its BERT for Performer."""
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from transformers import AutoConfig, AutoModel

    notices = []
    adapters = {adapter.family: adapter for adapter in ADAPTERS.values()}
    if config.family not in adapters:
        nearest = "deberta-v3" if family == BUNDLED else "bert"
        notices.append(f"transformers has no such model; compared with its {nearest} of that size")
        config = _config(nearest, options)
    model = AutoModel.from_config(AutoConfig.for_model(**adapters[config.family].write_config(config)))
    model.train(options.training)
    peer = Peer(model)
    candidates: dict[str, Run] = {"transformers eager": lambda ids: peer(ids)}
    graph, small = folder / "theirs.onnx", folder / "theirs-int8.onnx"
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = options.threads, 3

    def open_graph(path: Path) -> Run:
        session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        return lambda ids: session.run(None, {"input_ids": ids.numpy()})

    free = {0: torch.export.Dim("batch", max=2**15), 1: torch.export.Dim("length", max=512)}
    is_wanted = any("transformers ORT" in name and word in name for name in THEIRS for word in options.only)
    if options.training or not is_wanted:
        return candidates, notices
    try:
        with torch.no_grad(), quiet():
            _export(model, peer, free).save(graph, external_data=False)
            candidates["transformers ORT"] = open_graph(graph)
            quantize_dynamic(str(graph), str(small), weight_type=QuantType.QInt8)
            candidates["transformers ORT int8"] = open_graph(small)
    except Exception as error:
        missing = [name for name in THEIRS if name not in candidates]
        notices.append(f"no {', '.join(missing)}: {_short(error)}")
    return candidates, notices


def _export(model: nn.Module, peer: nn.Module, free: dict) -> object:
    """Export a transformers model with eager attention, which ONNX Runtime fuses best."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        example = torch.randint(5, VOCABULARY, (2, 64))
        return torch.onnx.export(
            peer,
            (example,),
            dynamo=True,
            dynamic_shapes=(free,),
            input_names=["input_ids"],
            opset_version=OPSET,
            verbose=False,
        )
    finally:
        model.set_attn_implementation(before)


def _packed(batch: int, length: int) -> SequenceLayout:
    return SequenceLayout.packed(torch.arange(0, (batch + 1) * length, length, dtype=torch.int32), length)


def _ours(model: Model, folder: Path, engine: str, precision: str, threads: int) -> Run:
    folder.mkdir()
    write_artefact(model, folder, Artefact(engine=engine, precision=precision))
    runner = open_runner(folder, threads=threads)
    if isinstance(runner, Model):
        return lambda ids: runner.encoder(ids, SequenceLayout.full(*ids.shape))
    return lambda ids: runner.outputs(ids, SequenceLayout.full(*ids.shape))


def _measure(candidates: dict[str, Run], batch: int, length: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the minimum milliseconds of every candidate over rounds; slow shapes get fewer rounds."""
    ids = torch.randint(5, VOCABULARY, (batch, length))
    best = dict.fromkeys(candidates, float("inf"))
    warm, stop = ids[:1], time.perf_counter() + options.seconds
    for run in candidates.values():
        run(warm)
    for number in range(options.rounds):
        for name, run in candidates.items():
            time.sleep(_PAUSE)
            begin = time.perf_counter()
            hidden = run(ids)
            if options.training:
                assert isinstance(hidden, Tensor)
                hidden.square().mean().backward()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - begin))
        if number >= 1 and time.perf_counter() > stop:
            break
    return {name: round(took, 1) for name, took in best.items()}


def _print_tables(rows: list[dict], options: argparse.Namespace) -> None:
    names = [name for name in (*THEIRS, *OURS) if any(name in row["ms"] for row in rows)]
    what = "forward and backward" if options.training else "forward"
    sizes = f"{options.layers} layers of width {options.width}, {options.threads} threads"
    print(f"\n{sizes}, torch {torch.__version__}; {what}, ms")
    print(f"| family | batch x length | {' | '.join(names)} |")
    print("|---" * (2 + len(names)) + "|")
    for row in rows:
        cells = [f"{row['ms'][name]:.1f}" if name in row["ms"] else "-" for name in names]
        print(f"| {row['family']} | {row['batch']} x {row['length']} | {' | '.join(cells)} |")
    print("\nSpeed-up: best of transformers / our best in each precision, and transformers eager / our PyTorch")
    print("| family | batch x length | float32 | our best | int8 | our best | PyTorch |")
    print("|---" * 7 + "|")
    for row in rows:
        cells = [cell for precision in (FLOAT, INT8) for cell in _ratio(row["ms"], precision)]
        plain = min((row["ms"][name] for name in PLAIN if name in row["ms"]), default=None)
        eager = row["ms"].get("transformers eager")
        cells.append("-" if plain is None or eager is None else f"{eager / plain:.2f}")
        print(f"| {row['family']} | {row['batch']} x {row['length']} | {' | '.join(cells)} |")


def _ratio(taken: dict[str, float], precision: str) -> tuple[str, str]:
    """Return the best time of transformers divided by our best, and the name of our best candidate."""
    theirs = [took for name, took in taken.items() if THEIRS.get(name) == precision]
    ours = {name: took for name, took in taken.items() if OURS.get(name) == precision}
    if not (theirs and ours):
        return "-", "-"
    best = min(ours, key=lambda name: ours[name])
    return f"{min(theirs) / ours[best]:.2f}", best


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120] if str(error).strip() else ''}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers, words = lambda text: [int(item) for item in text.split(",")], lambda text: text.split(",")
    parser.add_argument("--families", default=["bert", "deberta-v3", "convbert", "performer"], type=words)
    parser.add_argument("--lengths", default=[128, 512], type=numbers)
    parser.add_argument("--batches", default=[1, 8], type=numbers)
    parser.add_argument("--layers", default=12, type=int)
    parser.add_argument("--width", default=768, type=int)
    parser.add_argument("--heads", default=12, type=int)
    parser.add_argument("--training", action="store_true", help="forward and backward pass, PyTorch only")
    parser.add_argument("--dropout", default=0.0, type=float, help="with --training")
    parser.add_argument("--threads", default=min(2, os.cpu_count() or 1), type=int)
    parser.add_argument("--rounds", default=10, type=int)
    parser.add_argument("--seconds", default=8.0, type=float, help="seconds per shape, after at least two rounds")
    parser.add_argument(
        "--only", default=[""], type=words, help="measure only candidates whose name contains one of these"
    )
    parser.add_argument("--out", help="write the rows as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
