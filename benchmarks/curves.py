"""Compare loss curves of training with fused kernels and with reference ops, relative to the noise between seeds.

    python benchmarks/curves.py --out curves.json --picture curves.png   # on a GPU, 2 to 3 minutes per family
    python benchmarks/curves.py --device cpu --steps 5 --size tiny

Every family is trained on masked tokens in packed sequences of mixed lengths, under bfloat16 autocast: with the backend
"auto" (the kernels, on a GPU) and with "reference", on the same batches and for several seeds. Without dropout the seed
sets the initial weights; with dropout it sets only the dropout masks. The difference is the mean distance between
smoothed curves of kernels and references (without dropout from the same weights), the noise that between references
with different seeds. A difference of up to twice the noise counts as agreement.
"""

import argparse
import json
import time
import warnings
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bertsmith.data.layout import SequenceLayout
from bertsmith.data.shards import TokenCorpus, read_manifest
from bertsmith.models.build import build
from bertsmith.models.config import ModelConfig
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.models.heads import MaskedTokensConfig
from bertsmith.models.model import Model
from bertsmith.models.published import overridable, preset

FAMILIES = ("bert", "deberta", "deberta-v3", "convbert", "performer")
SIZES = {"tiny": (64, 2, 2), "small": (256, 4, 4), "medium": (256, 6, 4)}
KERNELS, REFERENCE = "auto", "reference"
_MASK, _FIRST = 0, 1
"""Id of the mask token, and the first id of the text."""
_SHOWN = (50, 100, 200, 300)
_AGREEMENT = 2.0
"""Maximum ratio of difference to noise; distances between single pairs vary."""

Curves = dict[str, list[float]]


@dataclass(frozen=True)
class Step:
    """One batch of packed sequences.

    Shape: tokens (tokens,), some of them masked; positions and targets (positions,).
    """

    tokens: Tensor
    layout: SequenceLayout
    positions: Tensor
    targets: Tensor


def main() -> None:
    options = _options()
    warnings.filterwarnings("ignore")
    torch.backends.cuda.matmul.allow_tf32 = True
    begin = time.perf_counter()
    text, vocabulary = _prepared(options) if options.data else _chain(options)
    steps = _steps(text, options)
    shares = np.bincount(text) / len(text)
    shares = shares[shares > 0]
    print(f"{vocabulary - _FIRST:,} words; loss of predicting by frequency alone: {-shares @ np.log(shares):.3f}")
    results: list[dict[str, Any]] = []
    print(f"{'':<12}{'dropout':>8}  {'run':<14}" + "".join(f"{f'step {step}':>10}" for step in _shown(options.steps)))
    for family in options.families:
        for dropout in options.dropouts:
            results.append(_compare(family, dropout, steps, vocabulary, options))
            if options.out:
                options.out.write_text(json.dumps(results), encoding="utf-8")
    _print_verdicts(results)
    if options.picture:
        _draw(results, options.picture)
    print(f"{time.perf_counter() - begin:.0f} s on {options.device}, torch {torch.__version__}")


def _compare(
    family: str, dropout: float, steps: list[Step], vocabulary: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the curves of one family, their difference, and the noise between seeds."""
    config = _config(family, dropout, vocabulary, options)
    curves: Curves = {}
    begin = time.perf_counter()
    for backend, seed in product((KERNELS, REFERENCE), range(options.seeds)):
        name = f"{backend} {seed}"
        # with dropout all runs start from the same weights, so that only the dropout masks differ
        model = build(config, seed=0 if dropout else seed)
        curves[name] = _train(model, steps, backend, seed, options)
        shown = "".join(f"{_smooth(curves[name])[step - 1]:>10.4f}" for step in _shown(options.steps))
        print(f"{family:<12}{dropout:>8}  {name:<14}{shown}", flush=True)
    kernels, references = (
        [curve for name, curve in curves.items() if name.startswith(backend)] for backend in (KERNELS, REFERENCE)
    )
    # kernels and references draw different dropout masks, so every pair is comparable
    pairs = product(kernels, references) if dropout else zip(kernels, references, strict=True)
    return {
        "family": family,
        "dropout": dropout,
        "first": abs(kernels[0][0] - references[0][0]),
        "difference": float(np.mean([_distance(*pair) for pair in pairs])),
        "noise": float(np.mean([_distance(*pair) for pair in combinations(references, 2)])),
        "learned": references[0][0] - _smooth(references[0])[-1],
        "seconds": round(time.perf_counter() - begin, 1),
        "curves": curves,
    }


def _config(family: str, dropout: float, vocabulary: int, options: argparse.Namespace) -> ModelConfig:
    width, layers, heads = SIZES[options.size]
    name = f"{family}-base"
    sizes = {"width": width, "layers": layers, "heads": heads, "dropout": dropout, "vocabulary": vocabulary}
    sizes |= {"embedding_width": width}
    config = preset(name, **{key: value for key, value in sizes.items() if key in overridable(name)})
    return config.changed(heads=(MaskedTokensConfig(),))


def _train(model: Model, steps: list[Step], backend: str, seed: int, options: argparse.Namespace) -> list[float]:
    """Train and return the loss of every step."""
    model = model.to(options.device).train()
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    warmup = max(1, len(steps) // 10)
    losses = torch.zeros(len(steps), device=options.device)  # read once at the end, to avoid synchronising
    for number, step in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, (number + 1) / warmup)
        with torch.autocast(options.device, torch.bfloat16):
            states = model.run(
                EncoderInputs(step.tokens, step.layout, backend=backend),
                Want(masked_positions=step.positions),
            ).masked_states
            scores = model.head("masked_tokens")(states, model.token_table)
        loss = cross_entropy(scores.float(), step.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[number] = loss.detach()
    return losses.tolist()


def _chain(options: argparse.Namespace) -> tuple[np.ndarray, int]:
    """Generate text of topics with separate vocabularies, so that context predicts the topic of a masked word."""
    generator = np.random.default_rng(0)
    topics, words = 32, 16
    count = options.steps * options.tokens
    follows = np.stack([np.arange(topics), *(generator.permutation(topics) for _ in range(2))], axis=1).tolist()
    chain, topic = [], 0
    for turn in generator.choice(3, count, p=[0.95, 0.04, 0.01]).tolist():
        topic = follows[topic][turn]
        chain.append(topic)
    weights = 1 / np.arange(1, words + 1)
    chosen = generator.choice(words, count, p=weights / weights.sum())
    return _FIRST + np.array(chain) * words + chosen, _FIRST + topics * words


def _prepared(options: argparse.Namespace) -> tuple[np.ndarray, int]:
    """Concatenate the first documents of a corpus folder; ids are shifted by one for the mask token."""
    corpus, needed = TokenCorpus(options.data), options.steps * options.tokens
    documents, count = [], 0
    for document, length in enumerate(corpus.lengths.tolist()):
        documents.append(corpus.read(document, 0, length).astype(np.int64) + _FIRST)
        count += length
        if count >= needed:
            return np.concatenate(documents)[:needed], read_manifest(options.data).vocabulary + _FIRST
    raise SystemExit(f"the corpus has {count:,} tokens, but {needed:,} are needed; use fewer --steps")


def _steps(text: np.ndarray, options: argparse.Namespace) -> list[Step]:
    """Return the batches of all steps, on the device: chunks of mixed lengths with 15 % of the tokens masked."""
    generator = torch.Generator().manual_seed(0)
    steps = []
    for batch in torch.from_numpy(text).split(options.tokens):
        cuts = torch.randint(max(1, options.length // 8), options.length + 1, (len(batch),), generator=generator)
        ends = cuts.cumsum(0)
        starts = torch.cat([torch.zeros(1, dtype=torch.long), ends[ends < len(batch)], torch.tensor([len(batch)])])
        positions = torch.randperm(len(batch), generator=generator)[: max(1, len(batch) * 15 // 100)].sort().values
        masked, targets = batch.clone(), batch[positions]
        masked[positions] = _MASK
        layout = SequenceLayout.packed(starts.int().to(options.device), options.length)
        steps.append(Step(masked.to(options.device), layout, positions.to(options.device), targets.to(options.device)))
    return steps


def _smooth(curve: list[float]) -> np.ndarray:
    """Moving average over the last 20 losses, or fewer at the start."""
    sums = np.concatenate([[0.0], np.cumsum(curve)])
    ends = np.arange(1, len(curve) + 1)
    begins = np.maximum(0, ends - 20)
    return (sums[ends] - sums[begins]) / (ends - begins)


def _distance(one: list[float], other: list[float]) -> float:
    return float(np.abs(_smooth(one) - _smooth(other)).mean())


def _shown(steps: int) -> list[int]:
    return [step for step in _SHOWN if step <= steps] or [steps]


def _print_verdicts(results: list[dict[str, Any]]) -> None:
    print(f"\n{'':<12}{'dropout':>8}{'first step':>12}{'difference':>12}{'noise':>10}{'learned':>9}{'seconds':>9}")
    for row in results:
        verdict = "ok" if row["difference"] <= _AGREEMENT * row["noise"] else "missed"
        print(
            f"{row['family']:<12}{row['dropout']:>8}{row['first']:>12.5f}{row['difference']:>12.5f}"
            f"{row['noise']:>10.5f}{row['learned']:>9.2f}{row['seconds']:>9}  {verdict}"
        )


def _draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draw one panel per family; solid lines without dropout, dashed lines with dropout."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    families = list(dict.fromkeys(row["family"] for row in results))
    figure = Figure(figsize=(3.2 * len(families), 3.2), layout="constrained")
    panels = figure.subplots(1, len(families), sharey=True, squeeze=False)[0]
    for family, panel in zip(families, panels, strict=True):
        for row in (row for row in results if row["family"] == family):
            style = "--" if row["dropout"] else "-"
            for name, curve in row["curves"].items():
                backend, seed = name.split()
                colour = {KERNELS: "tab:blue", REFERENCE: "tab:orange"}[backend]
                label = f"{backend}, dropout {row['dropout']}" if seed == "0" else None
                panel.plot(_smooth(curve), style, color=colour, linewidth=1, label=label)
        panel.set_title(family)
        panel.set_xlabel("step")
    panels[0].set_ylabel("loss at masked tokens (mean of 20 steps)")
    panels[-1].legend(fontsize=6)
    figure.savefig(path, dpi=130)


def _options() -> argparse.Namespace:
    def listed(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--families", default=list(FAMILIES), type=listed)
    add("--size", default="small", choices=SIZES)
    add("--steps", default=300, type=int)
    add("--tokens", default=4096, type=int, help="tokens per step")
    add("--length", default=128, type=int, help="maximum sequence length; the minimum is an eighth of it")
    add("--dropouts", default=[0.0, 0.1], type=lambda text: [float(item) for item in text.split(",")])
    add("--seeds", default=2, type=int, help="at least 2")
    add("--learning-rate", default=1e-3, type=float)
    add("--data", type=Path, help="corpus folder, instead of generated text")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, help="write the curves as JSON")
    add("--picture", type=Path, help="write a PNG with one panel per family")
    return parser.parse_args()


if __name__ == "__main__":
    main()
