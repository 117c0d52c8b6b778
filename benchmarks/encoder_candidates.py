"""Batches and candidates of benchmarks/encoder.py: our encoders in every layout and mode."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import bertsmith.layers.mixers.favor as favor_mixer
from bertsmith.data.layout import SequenceLayout
from bertsmith.models.build import build
from bertsmith.models.config import ModelConfig
from bertsmith.models.published import overridable, preset

SIZES = {"base": (768, 12, 12), "small": (512, 4, 8), "tiny": (128, 2, 2)}
FAMILIES = ("bert", "deberta", "deberta-v3", "convbert", "performer")
MORE_FAMILIES = ("electra", "modern")
FORMS = ("packed", "padded")
MODES = ("eager", "layers", "compiled", "graphs")
"""Eager; every layer compiled, as in the trainer; compiled as a whole; compiled with CUDA graphs."""
VOCABULARY = 30522
OURS, NO_ATTENTION = "bertsmith", "no-attention"


@dataclass(frozen=True)
class Work:
    """A batch of sequences.

    Shape: ids and is_token (batch, max_length); is_token is None if all sequences have the same length.
    """

    column: str
    """Length as text, or "mixed"."""
    ids: Tensor
    lengths: tuple[int, ...]
    is_token: Tensor | None = None

    @property
    def max_length(self) -> int:
        return self.ids.shape[1]

    @property
    def tokens(self) -> int:
        """Number of real tokens."""
        return sum(self.lengths)

    def padded(self) -> tuple[Tensor, SequenceLayout]:
        return self.ids, SequenceLayout.rows(self.ids, self.is_token)

    def packed(self) -> tuple[Tensor, SequenceLayout]:
        starts = torch.tensor([0, *self.lengths]).cumsum(0).int().to(self.ids.device)
        tokens = self.ids.flatten() if self.is_token is None else self.ids[self.is_token]
        return tokens, SequenceLayout.packed(starts, self.max_length)


def even_work(length: int, tokens: int, device: str) -> Work:
    """Return a batch of sequences of one length."""
    batch = max(1, tokens // length)
    return Work(str(length), torch.randint(5, VOCABULARY, (batch, length), device=device), (length,) * batch)


def mixed_work(max_length: int, tokens: int, device: str) -> Work:
    """Return a batch with uniformly drawn lengths and about `tokens` real tokens."""
    max_length = min(max_length, max(16, tokens // 4))
    count = max(2, tokens * 2 // max_length)
    lengths = torch.randint(
        max(1, max_length // 16), max_length + 1, (count,), generator=torch.Generator().manual_seed(0)
    )
    is_token = torch.arange(max_length, device=device) < lengths.to(device)[:, None]
    ids = torch.randint(5, VOCABULARY, (count, max_length), device=device)
    return Work("mixed", ids, tuple(lengths.tolist()), is_token)


@dataclass(frozen=True)
class Candidate:
    """One way to run an encoder; rows are filtered by the words of its name."""

    family: str
    maker: str
    """Library: "bertsmith" or another one."""
    form: str
    mode: str
    training: Callable[[Work], nn.Module]
    """Builds a module in train mode with float32 weights."""
    inputs: Callable[[Work], tuple[tuple[Any, ...], dict[str, Any]]]
    inference: Callable[[Work], nn.Module] | None = None
    """Builds a module in eval mode with bfloat16 weights; None to convert the one from training."""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context manager that is active during the measurement."""

    @property
    def name(self) -> str:
        return " ".join(word for word in (self.maker, self.form, self.mode) if word)


def config_of(family: str, size: str, max_length: int) -> ModelConfig:
    """Return the config of a family in a size, without heads and dropout."""
    width, layers, heads = SIZES[size]
    name = f"{family}-base"
    sizes = {"width": width, "layers": layers, "heads": heads, "dropout": 0.0, "max_length": max(512, max_length)}
    sizes |= {"vocabulary": VOCABULARY, "embedding_width": width}
    config = preset(name, **{key: value for key, value in sizes.items() if key in overridable(name)})
    return config.changed(heads=())


def ours(family: str, size: str, device: str, forms: list[str], modes: list[str]) -> list[Candidate]:
    """Return our encoder in every layout and mode; for Performer also without attention."""

    def make(work: Work) -> nn.Module:
        with torch.device(device):  # initialisation is much faster on a GPU
            encoder = build(config_of(family, size, work.max_length)).encoder
        return encoder.to(device).train()

    candidates = []
    for form in forms:
        inputs = _inputs(form)
        candidates += [Candidate(family, OURS, form, mode, make, inputs) for mode in modes]
        if family == "performer":
            candidates += [
                Candidate(family, NO_ATTENTION, form, mode, make, inputs, around=_without_attention) for mode in modes
            ]
    return candidates


def _inputs(form: str) -> Callable[[Work], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda work: (work.packed() if form == "packed" else work.padded(), {})


@contextmanager
def _without_attention() -> Iterator[None]:
    """Replace attention by the identity on values: a lower bound on the time with linear attention."""
    original = favor_mixer.favor

    def values(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Tensor:
        return value

    favor_mixer.favor = values
    try:
        yield
    finally:
        favor_mixer.favor = original
