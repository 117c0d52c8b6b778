"""Sample data of every task kind: a new kind is tested by adding an entry here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TaskCase:
    """Rows of a task kind, at least four, with different lengths and targets."""

    rows: Sequence[Mapping[str, Any]]
    targets: tuple[str, ...]
    """Target columns; missing in rows for prediction."""
    kind: str
    task: Mapping[str, Any] = field(default_factory=dict)
    """Task settings that cannot be inferred from the rows."""
    is_recognised: bool = True
    """Whether the kind is inferred from the rows; otherwise it must be set."""
    is_scored_alone: bool = True
    """Whether the targets, scored against themselves, get the best score."""
    settings: tuple[str, ...] = ()
    """Settings of the run, such as sequences.length=32."""


_TEXTS = ["the smith forges an iron gate", "no", "a broken clock, by the river", "seven old lanterns near the harbour"]
_WORDS = [["Anna", "forges", "gates"], ["no"], ["in", "New", "Rome", ",", "Bert", "Smith", "forgets"], ["Oslo", "."]]
_NAMES = [
    ["B-PER", "O", "O"],
    ["O"],
    ["O", "B-LOC", "I-LOC", "O", "B-PER", "I-PER", "O"],
    ["B-LOC", "O"],
]
_TREES = [
    "(S (NP-SBJ (NNP Anna)) (VP (VBZ forges) (NP (NNS gates))))",
    "(INTJ (UH no))",
    "( (S (PP-LOC (IN in) (NP (NNP New) (NNP Rome))) (, ,) (NP-SBJ (NNP Bert) (NNP Smith)) (VP (VBZ forgets) "
    "(NP (-NONE- *)))))",
    "(FRAG (NP (NNP Oslo)) (. .))",
]
_SUBJECTS = [["iron", "work"], [], ["time"], ["light", "work"]]

TASK_CASES: dict[str, TaskCase] = {
    "classification": TaskCase(
        [{"text": text, "label": label} for text, label in zip(_TEXTS, "abba", strict=True)],
        ("label",),
        "classification",
    ),
    "classification of pairs": TaskCase(
        [{"sentence1": text, "sentence2": text[::-1], "label": index % 3} for index, text in enumerate(_TEXTS)],
        ("label",),
        "classification",
        {"class_weights": "balanced", "both_orders": True},
    ),
    "tagging": TaskCase(
        [{"tokens": words, "ner": tags} for words, tags in zip(_WORDS, _NAMES, strict=True)], ("ner",), "tagging"
    ),
    "tagging in windows": TaskCase(
        [{"tokens": words * 5, "ner": tags * 5} for words, tags in zip(_WORDS, _NAMES, strict=True)],
        ("ner",),
        "tagging",
        {"class_weights": "balanced"},
        settings=("sequences.length=12",),
    ),
    "tagging in documents": TaskCase(
        [
            {"words": words, "pos": [word[0] for word in words], "document": index // 3}
            for index, words in enumerate(_WORDS)
        ],
        ("pos",),
        "tagging",
        {"context": "document"},
    ),
    "parsing": TaskCase(
        [{"tokens": words, "tree": tree} for words, tree in zip(_WORDS, _TREES, strict=True)], ("tree",), "parsing"
    ),
    "regression": TaskCase(
        [{"sentence": text, "label": 1.25 * index} for index, text in enumerate(_TEXTS)], ("label",), "regression"
    ),
    "multi_label": TaskCase(
        [{"text": text, "label": names} for text, names in zip(_TEXTS, _SUBJECTS, strict=True)],
        ("label",),
        "multi_label",
    ),
    "choice": TaskCase(
        [
            {"context": text, "question": "what?", "choices": [text[:4], "a clock", "no"], "label": index % 3}
            for index, text in enumerate(_TEXTS)
        ],
        ("label",),
        "choice",
    ),
    "spans": TaskCase(
        [
            {
                "id": str(index),
                "question": "which?",
                "context": text,
                "answers": {"text": [text[:2]], "answer_start": [0]},
            }
            for index, text in enumerate(_TEXTS)
        ],
        ("answers",),
        "spans",
    ),
    "embedding of alike texts": TaskCase(
        [{"anchor": text, "positive": f"{text} again"} for text in _TEXTS],
        (),
        "embedding",
        is_scored_alone=False,
    ),
    "embedding of scored pairs": TaskCase(
        [{"sentence1": text, "sentence2": text[:9], "label": 1.0 / (1 + i)} for i, text in enumerate(_TEXTS)],
        ("label",),
        "embedding",
        is_recognised=False,
        is_scored_alone=False,
    ),
}
