"""The pre-trained model of the demo before fine-tuning: filled masks and nearest messages."""

from collections.abc import Mapping, Sequence

from bertsmith.checkpoint.store import load
from bertsmith.models.cost import parameters_by_part
from bertsmith.models.model import Model
from bertsmith.report.demo import FilledSentence, Look, NearestMessages, Neighbour, NetworkFacts
from bertsmith.runs.result import print_plain
from bertsmith.text import support_desk

MASK = "[MASK]"
"""Mask token in the sentences of the demo; replaced by the mask token of the model."""
SHOWN = 3
"""Number of candidates shown per mask, and of nearest messages."""

Row = Mapping[str, str]


def look_at(name: str, masks: Sequence[str], questions: Sequence[str]) -> Look:
    """Fill masks and find the nearest labelled messages before fine-tuning; print a summary."""
    model = load(name)
    filled = fill_sentences(model, masks)
    near, alike = find_neighbours(
        model, questions, support_desk.support_desk("train"), support_desk.support_desk("dev")
    )
    for sentence in filled:
        candidates = ", ".join(f"{token} {100 * share:.0f} %" for token, share in sentence.tokens)
        print_plain(f"{sentence.text} → {candidates}")
    if not filled:
        print_plain("this model cannot fill masks")
    print_plain(f"nearest-neighbour accuracy on dev, before fine-tuning: {alike:.1f} %")
    return Look(model=_network_facts(model, name), filled=filled, near=near, alike=alike)


def _network_facts(model: Model, name: str) -> NetworkFacts:
    encoder, counts = model.config.encoder, parameters_by_part(model.config)
    return NetworkFacts(
        name=name,
        family=model.config.family,
        layers=len(encoder.layers),
        width=encoder.width,
        vocabulary=model.require_tokenizer().size,
        parameters=counts["parameters"],
        generator_parameters=counts.get("generator_parameters"),
    )


def fill_sentences(model: Model, sentences: Sequence[str]) -> list[FilledSentence]:
    """Return the most probable tokens for the mask of every sentence; an empty list if the model has no MLM head."""
    if "masked_tokens" not in model.heads and model.generator is None:
        return []
    tokenizer = model.require_tokenizer()
    mask = tokenizer.tokens([tokenizer.mask])[0]
    return [FilledSentence(text, model.fill_mask(text.replace(MASK, mask), top_k=SHOWN)[0]) for text in sentences]


def find_neighbours(
    model: Model, questions: Sequence[str], known: Sequence[Row], queries: Sequence[Row]
) -> tuple[list[NearestMessages], float]:
    """Return the nearest `known` messages of every question, and the nearest-neighbour accuracy on `queries` (%)."""
    texts = [row["text"] for row in known]
    vectors = model.encode([*texts, *(row["text"] for row in queries), *questions], normalize=True)
    similarity = vectors[len(known) :] @ vectors[: len(known)].T  # (texts, known)
    nearest = similarity[: len(queries)].argmax(-1).tolist()
    hits = [known[index]["label"] == row["label"] for index, row in zip(nearest, queries, strict=True)]
    top = similarity[len(queries) :].topk(min(SHOWN, len(known)))
    near = [
        NearestMessages(
            question,
            [
                Neighbour(**known[index], similarity=round(cosine, 4))
                for index, cosine in zip(rows, cosines, strict=True)
            ],
        )
        for question, rows, cosines in zip(questions, top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    return near, 100 * sum(hits) / len(hits)
