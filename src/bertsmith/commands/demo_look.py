"""What an encoder can do before it is trained for a task: fill masks, and find texts that mean the same."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from bertsmith.models.model import Model

Rows = Sequence[Mapping[str, str]]

MASK = "[MASK]"  # in the sentences here, whatever the model's own looks like
SHOWN = 3  # pieces for a mask, and messages that are near


def described(model: "Model", name: str) -> dict[str, Any]:
    """What kind of network it is."""
    from bertsmith.models.cost import parameters_by_part

    encoder = model.config.encoder
    return {
        "name": name,
        "family": model.config.family,
        "layers": len(encoder.layers),
        "width": encoder.width,
        "vocabulary": model.require_tokenizer().size,
        **parameters_by_part(model.config),
    }


def filled(model: "Model", sentences: Sequence[str]) -> list[dict[str, Any]]:
    """For every sentence the likeliest pieces for its mask; nothing where neither model nor generator fills masks."""
    if "masked_tokens" not in model.heads and model.generator is None:
        return []
    tokenizer = model.require_tokenizer()
    mask = tokenizer.pieces([tokenizer.mask])[0]
    return [{"text": text, "pieces": model.fill_mask(text.replace(MASK, mask), top=SHOWN)[0]} for text in sentences]


def neighbours(model: "Model", questions: Sequence[str], known: Rows, asked: Rows) -> dict[str, Any]:
    """For every question the labelled messages nearest to it, and how often the nearest one is about the same.

    "alike" is the share in per cent of the rows of `asked` whose nearest row of `known` has their label.
    """
    texts = [row["text"] for row in known]
    vectors = _vectors(model, [*texts, *(row["text"] for row in asked), *questions])
    own, others = vectors[: len(known)], vectors[len(known) :]
    similar = others @ own.T  # (texts, known)
    nearest = similar[: len(asked)].argmax(-1).tolist()
    alike = [known[place]["label"] == row["label"] for place, row in zip(nearest, asked, strict=True)]
    found = similar[len(asked) :].topk(min(SHOWN, len(known)))
    near = [
        {
            "text": question,
            "near": [
                {**known[place], "similarity": round(similarity, 4)}
                for place, similarity in zip(places, similarities, strict=True)
            ],
        }
        for question, places, similarities in zip(questions, found.indices.tolist(), found.values.tolist(), strict=True)
    ]
    return {"near": near, "alike": 100 * sum(alike) / len(alike)}


def _vectors(model: "Model", texts: Sequence[str]) -> "Tensor":
    """A vector of length 1 for every text.

    Shape: (texts, width).
    """
    import torch

    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))  # so that batches hold few pads
    found = torch.nn.functional.normalize(model.encode([texts[place] for place in order]), dim=-1)
    vectors = torch.empty_like(found)
    vectors[order] = found
    return vectors


def print_look(figures: Mapping[str, Any]) -> None:
    """Shows the masks and the nearest messages."""
    from rich.console import Console

    console = Console()
    for one in figures["filled"]:
        pieces = ", ".join(f"{piece} {100 * share:.0f} %" for piece, share in one["pieces"])
        console.print(f"{one['text']} → {pieces}", markup=False, highlight=False, soft_wrap=True)
    if not figures["filled"]:
        console.print("this model fills no masks", highlight=False)
    for one in figures["near"]:
        nearest = one["near"][0]
        console.print(f"{one['text']}", markup=False, highlight=False, soft_wrap=True)
        told = f"  nearest: {nearest['text']} ({nearest['similarity']:.2f}, {nearest['label']})"
        console.print(told, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"the nearest of all labelled messages is about the same for {figures['alike']:.1f} % of dev, untrained",
        highlight=False,
    )
