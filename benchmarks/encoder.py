"""Speed of our encoders beside `transformers`, same size, same tokens, same run.

    python benchmarks/encoder.py --family bert                    # on a GPU; convbert, deberta-v3, performer, …
    python benchmarks/encoder.py --device cpu --size tiny --tokens 2048 --lengths 64

Training is forward and backward under bfloat16 autocast with float32 weights and dropout 0, the loss the mean square of
the states; inference has bfloat16 weights. Medians of device times; the ratio is to the best of the peer's rows.
"""

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from bertsmith.batches.layout import SequenceLayout
from bertsmith.checkpoint.hf import TWINS
from bertsmith.models.build import build
from bertsmith.models.config import ModelConfig
from bertsmith.models.encoder import Encoder
from bertsmith.models.published import overridable, preset

SIZES = {"base": (768, 12, 12), "small": (512, 4, 8), "tiny": (128, 2, 2)}
VOCABULARY = 30522


@dataclass(frozen=True)
class Candidate:
    """One way to run an encoder on given token ids."""

    name: str
    make: Callable[[int], nn.Module]
    inputs: Callable[[Tensor], tuple]
    mode: str
    """"eager", "compiled", or "graphs": compiled, and replayed as CUDA graphs."""


def main() -> None:
    options = _options()
    torch.backends.cuda.matmul.allow_tf32 = True
    warnings.filterwarnings("ignore")
    rows: list[dict] = []
    for length in options.lengths:
        for candidate in _candidates(options, length):
            rows.append(_measure(candidate, length, options))
            print(json.dumps(rows[-1]), flush=True)
            gc.collect()
            torch._dynamo.reset()
            if options.device == "cuda":
                torch.cuda.empty_cache()
    mixed = _mixed_lengths(options) if options.mixed else []
    _print_table(rows, options)
    _print_mixed(mixed)
    if options.out:
        Path(options.out).write_text(json.dumps({"rows": rows, "mixed": mixed}, indent=2), encoding="utf-8")


def _candidates(options: argparse.Namespace, length: int) -> list[Candidate]:
    forms = {
        "transformers": (lambda n: _peer(options, n), lambda ids: (ids,)),
        "bertsmith padded": (lambda n: _ours(options, n), _padded),
        "bertsmith packed": (lambda n: _ours(options, n), _packed),
    }
    candidates = [
        Candidate(f"{name} {mode}", make, inputs, mode)
        for name, (make, inputs) in forms.items()
        for mode in options.modes
    ]
    return [candidate for candidate in candidates if options.only in candidate.name]


def _ours(options: argparse.Namespace, length: int) -> Encoder:
    return build(_config(options, length), seed=0).encoder


def _config(options: argparse.Namespace, length: int) -> ModelConfig:
    """The family in the size that was asked for, without heads and dropout."""
    width, layers, heads = SIZES[options.size]
    name = f"{options.family}-base"
    sizes = {"width": width, "layers": layers, "heads": heads, "dropout": 0.0, "longest": max(512, length)}
    sizes |= {"vocabulary": VOCABULARY, "embedding_width": width}
    config = preset(name, **{key: value for key, value in sizes.items() if key in overridable(name)})
    return config.changed(heads=())


def _peer(options: argparse.Namespace, length: int) -> nn.Module:
    """The same network by `transformers`; where it has none (Performer), its BERT of that size with SDPA."""
    from transformers import AutoConfig, AutoModel

    twins = {twin.family: twin for twin in TWINS.values()}
    family = options.family if _config(options, length).family in twins else "bert"
    config = _config(argparse.Namespace(**{**vars(options), "family": family}), length)
    data = twins[config.family].write_config(config)
    return AutoModel.from_config(AutoConfig.for_model(**data))


def _padded(ids: Tensor) -> tuple:
    return ids, SequenceLayout.full(*ids.shape)


def _packed(ids: Tensor) -> tuple:
    batch, length = ids.shape
    starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=ids.device)
    return ids.flatten(), SequenceLayout.packed(starts, length)


def _measure(candidate: Candidate, length: int, options: argparse.Namespace) -> dict:
    batch = max(1, options.tokens // length)
    ids = torch.randint(5, VOCABULARY, (batch, length), device=options.device)
    module = candidate.make(length).to(options.device).train()
    inputs = candidate.inputs(ids)
    return {"name": candidate.name, "length": length} | _speeds(module, inputs, batch * length, candidate.mode, options)


def _speeds(module: nn.Module, inputs: tuple, tokens: int, mode: str, options: argparse.Namespace) -> dict:
    how = {"compiled": "default", "graphs": "reduce-overhead"}
    call = module if mode == "eager" else torch.compile(module, mode=how[mode])

    def train() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(options.device, torch.bfloat16):
            loss = _states(call(*inputs)).float().pow(2).mean()
        loss.backward()
        for parameter in module.parameters():
            parameter.grad = None

    def infer() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.inference_mode():
            call(*inputs)

    row = {"train_ms": _median_ms(train, options)}
    module.eval().to(torch.bfloat16)
    row["infer_ms"] = _median_ms(infer, options)
    row["train_tokens_per_second"] = round(tokens / row["train_ms"] * 1e3)
    row["infer_tokens_per_second"] = round(tokens / row["infer_ms"] * 1e3)
    return row


def _states(output: object) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]  # type: ignore[index]


def _median_ms(function: Callable[[], None], options: argparse.Namespace) -> float:
    for _ in range(3):
        function()
    times = []
    for _ in range(options.repeats):
        if options.device == "cuda":
            begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
            torch.cuda.synchronize()
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            function()
            times.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(times), 3)


def _mixed_lengths(options: argparse.Namespace) -> list[dict]:
    """Training on sequences of mixed lengths, padded against packed."""
    longest = options.mixed
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(longest // 16, longest + 1, (max(2, options.tokens * 2 // longest),), generator=generator)
    real = int(lengths.sum())
    ids = torch.randint(5, VOCABULARY, (len(lengths), longest), device=options.device)
    is_token = torch.arange(longest, device=options.device) < lengths.to(options.device)[:, None]
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int().to(options.device)
    forms = {
        "bertsmith padded": (ids, SequenceLayout.padded(is_token)),
        "bertsmith packed": (ids[is_token], SequenceLayout.packed(starts, longest)),
    }
    rows = []
    for name, inputs in forms.items():
        for mode in [mode for mode in options.modes if mode != "graphs"]:
            module = _ours(options, longest).to(options.device).train()
            row = {"name": f"{name} {mode}", "padding_share": 1 - real / is_token.numel()}
            rows.append(row | _speeds(module, inputs, real, mode, options))
            torch._dynamo.reset()
            gc.collect()
    return rows


def _print_table(rows: list[dict], options: argparse.Namespace) -> None:
    print(f"\ntorch {torch.__version__}, {options.device}, {options.size} size, {options.tokens} tokens a batch")
    print(f"{'':<28}{'length':>7}{'training tokens/s':>19}{'ratio':>7}{'inference tokens/s':>20}{'ratio':>7}")
    for row in rows:
        peers = [r for r in rows if r["length"] == row["length"] and r["name"].startswith("transformers")]
        line = f"{row['name']:<28}{row['length']:>7}"
        for kind, width in (("train", 19), ("infer", 20)):
            best = max((peer[f"{kind}_tokens_per_second"] for peer in peers), default=None)
            ratio = "" if best is None else f"{row[f'{kind}_tokens_per_second'] / best:.2f}"
            line += f"{row[f'{kind}_tokens_per_second']:>{width},}{ratio:>7}"
        print(line)


def _print_mixed(rows: list[dict]) -> None:
    if not rows:
        return
    print(f"\nmixed lengths, {rows[0]['padding_share']:.0%} of the padded batch is padding; tokens/s of real tokens")
    for row in rows:
        print(f"{row['name']:<28}{row['train_tokens_per_second']:>26,}{row['infer_tokens_per_second']:>27,}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    families = ["bert", "convbert", "deberta", "deberta-v3", "electra", "modern", "performer"]
    parser.add_argument("--family", default="bert", choices=families)
    parser.add_argument("--size", default="base", choices=SIZES)
    parser.add_argument("--lengths", default=[128, 512, 2048], type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--tokens", default=32768, type=int)
    parser.add_argument("--mixed", default=512, type=int, help="longest of the mixed lengths; 0 to leave that part out")
    parser.add_argument("--modes", default=["eager", "compiled", "graphs"], type=lambda text: text.split(","))
    parser.add_argument("--repeats", default=20, type=int)
    parser.add_argument("--only", default="", help="measure only rows whose name holds this")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", help="write the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
