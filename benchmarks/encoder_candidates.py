"""What benchmarks/encoder.py measures: batches, and our encoders in every form and mode."""

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
"""As it is; every layer compiled, as the trainer does it; compiled whole; the same replayed as CUDA graphs."""
VOCABULARY = 30522
OURS, NO_ATTENTION = "bertsmith", "no-attention"


@dataclass(frozen=True)
class Work:
    """Sequences to be worked on.

    Shape: ids (batch, longest); is_token the same, or None where all have one length.
    """

    column: str
    """The length, or "mixed"."""
    ids: Tensor
    lengths: tuple[int, ...]
    is_token: Tensor | None = None

    @property
    def max_length(self) -> int:
        return self.ids.shape[1]

    @property
    def tokens(self) -> int:
        """Those that count: without pads."""
        return sum(self.lengths)

    def padded(self) -> tuple[Tensor, SequenceLayout]:
        return self.ids, SequenceLayout.rows(self.ids, self.is_token)

    def packed(self) -> tuple[Tensor, SequenceLayout]:
        starts = torch.tensor([0, *self.lengths]).cumsum(0).int().to(self.ids.device)
        tokens = self.ids.flatten() if self.is_token is None else self.ids[self.is_token]
        return tokens, SequenceLayout.packed(starts, self.max_length)


def even_work(length: int, tokens: int, device: str) -> Work:
    """Sequences of one length."""
    batch = max(1, tokens // length)
    return Work(str(length), torch.randint(5, VOCABULARY, (batch, length), device=device), (length,) * batch)


def mixed_work(max_length: int, tokens: int, device: str) -> Work:
    """Sequences of lengths drawn evenly up to the longest, about as many real tokens; at least eight of them."""
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
    """One way to run an encoder; the words of its name are what the rows are filtered by."""

    family: str
    maker: str
    """Whose code: "bertsmith" or the name of a peer."""
    form: str
    mode: str
    training: Callable[[Work], nn.Module]
    """A module in train mode with float32 weights."""
    inputs: Callable[[Work], tuple[tuple[Any, ...], dict[str, Any]]]
    inference: Callable[[Work], nn.Module] | None = None
    """A module in eval mode with bfloat16 weights; None: the one that was trained, converted."""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """What holds while it runs."""

    @property
    def name(self) -> str:
        return " ".join(word for word in (self.maker, self.form, self.mode) if word)


def config_of(family: str, size: str, max_length: int) -> ModelConfig:
    """The family in the size that was asked for, without heads and dropout."""
    width, layers, heads = SIZES[size]
    name = f"{family}-base"
    sizes = {"width": width, "layers": layers, "heads": heads, "dropout": 0.0, "max_length": max(512, max_length)}
    sizes |= {"vocabulary": VOCABULARY, "embedding_width": width}
    config = preset(name, **{key: value for key, value in sizes.items() if key in overridable(name)})
    return config.changed(heads=())


def ours(family: str, size: str, device: str, forms: list[str], modes: list[str]) -> list[Candidate]:
    """Our encoder in every form and mode; for Performer the same without attention as well."""

    def make(work: Work) -> nn.Module:
        with torch.device(device):  # drawing weights on a GPU is a matter of milliseconds
            encoder = build(config_of(family, size, work.max_length)).encoder
        return encoder.to(device).train()

    made = []
    for form in forms:
        inputs = _inputs(form)
        made += [Candidate(family, OURS, form, mode, make, inputs) for mode in modes]
        if family == "performer":
            made += [
                Candidate(family, NO_ATTENTION, form, mode, make, inputs, around=_without_attention) for mode in modes
            ]
    return made


def _inputs(form: str) -> Callable[[Work], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda work: (work.packed() if form == "packed" else work.padded(), {})


@contextmanager
def _without_attention() -> Iterator[None]:
    """Every token gets its own value: what is left is what linear attention cannot be faster than."""
    kept = favor_mixer.favor

    def values(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Tensor:
        return value

    favor_mixer.favor = values
    try:
        yield
    finally:
        favor_mixer.favor = kept
