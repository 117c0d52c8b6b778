"""Tag the words of a sentence: names, chunks, parts of speech."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from bertsmith.answers.sequences import Answer, Features
from bertsmith.answers.tagging import (
    Scheme,
    TaggedWords,
    chunks,
    complete_labels,
    document_numbers,
    read_sentence,
    read_words,
    tag_answers,
    tag_features,
    tagging_scheme,
    to_iob2,
)
from bertsmith.errors import InputError, nearest
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads.task import TaggerConfig
from bertsmith.objectives.supervised import Tags
from bertsmith.tasks.base import AnswerData, Encoding, Evaluation, RowData, Task
from bertsmith.tasks.metrics.base import main_metric
from bertsmith.tasks.texts import ClassWeights, confusion_counts, weights_of
from bertsmith.text.rows import Table

_RATES = ("f1", "precision", "recall")


def evaluate_tags(
    said: Sequence[Sequence[str]], right: Sequence[Sequence[str]], metric: str | None, *, has_chunks: bool
) -> Evaluation:
    """The metrics of some sentences' tags; the main one is f1 where tags mark chunks and accuracy where not.

    f1, precision and recall are over all chunks together, then type by type, such as f1_PER; accuracy is of tags.
    """
    main = main_tag_metric(metric, has_chunks=has_chunks)
    hits = np.array([_hits(ours, theirs) for ours, theirs in zip(said, right, strict=True)])
    metrics: dict[str, float] = {}
    counts = np.zeros((len(hits), 3), dtype=np.int64)
    if has_chunks:
        counts, by_type = chunk_counts(said, right)
        metrics |= _rates(counts.sum(0))
        for kind, own in sorted(by_type.items()):
            metrics |= {f"{name}_{kind}": value for name, value in _rates(own).items() if kind}
    metrics["accuracy"] = _share(*hits.sum(0))

    def measure(chosen: np.ndarray) -> float:
        return _share(*hits[chosen].sum(0)) if main == "accuracy" else _rates(counts[chosen].sum(0))[main]

    return Evaluation(main, metrics, measure)


def main_tag_metric(metric: str | None, *, has_chunks: bool) -> str:
    """The name of the main figure, or a sentence if the one asked for is none of these tags."""
    return main_metric(metric, (*_RATES, "accuracy") if has_chunks else ("accuracy",))


def chunk_counts(
    said: Sequence[Sequence[str]], right: Sequence[Sequence[str]]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """How many chunks are right, were said, and are there: sentence by sentence, and type by type.

    Shape: (sentences, 3) and (3,) each.
    """
    counts = np.zeros((len(right), 3), dtype=np.int64)
    by_type: Counter[tuple[str, int]] = Counter()
    for index, (ours, theirs) in enumerate(zip(said, right, strict=True)):
        found, there = set(chunks(ours)), set(chunks(theirs))
        for position, group in enumerate((found & there, found, there)):
            counts[index, position] = len(group)
            by_type.update((chunk.type, position) for chunk in group)
    kinds = {kind for kind, _ in by_type}
    return counts, {kind: np.array([by_type[kind, position] for position in range(3)]) for kind in kinds}


def _hits(said: Sequence[str], right: Sequence[str]) -> tuple[int, int]:
    """How many tags are right, of how many."""
    return sum(ours == theirs for ours, theirs in zip(said, right, strict=True)), len(right)


def _rates(counts: np.ndarray) -> dict[str, float]:
    """F1, precision and recall from how many chunks are right, were said, and are there; 0 where there are none."""
    correct, found, there = counts.tolist()
    return {
        "f1": _share(2 * correct, found + there),
        "precision": _share(correct, found),
        "recall": _share(correct, there),
    }


def _share(part: float, whole: float) -> float:
    return 100.0 * float(part) / float(whole) if whole else 0.0


_WORDS = ("tokens", "words", "text", "sentence")
_TAGS = ("ner", "ner_tags", "chunk", "chunk_tags", "pos", "pos_tags", "tags", "labels", "label")


class Tagging(Task[TaggedWords]):
    """Say which tag each word of a sentence has."""

    kind: Literal["tagging"] = "tagging"
    words: str = "tokens"
    """The column of the words, a list; for predictions also running text."""
    tags: str = "ner"
    """The column of their tags, a list as long."""
    document: str = "document"
    """The column that names the document of a sentence, if there is one: what the context is taken from."""
    labels: tuple[str, ...] = ()
    """The tags to choose among; empty for those of the training data."""
    scheme: Scheme | None = None
    """How tags mark chunks of words: "iob" (IOB1 is read as IOB2), "bioes", or "plain" for not at all. None: see."""
    context: Literal["sentence", "document"] = "sentence"
    """What a word is seen in: its sentence, or as much of the document around it as a sequence holds (BERT's NER)."""
    class_weights: ClassWeights = "none"
    """How much each tag counts in the loss: all the same, the rarer the more, or the numbers given."""

    roles: ClassVar[tuple[str, ...]] = ("words",)
    target_roles: ClassVar[tuple[str, ...]] = ("tags", "document")

    @classmethod
    def find_columns(cls, row: RowData) -> dict[str, str] | None:
        words = next((name for name in _WORDS if _is_words(row.get(name))), None)
        tags = next((name for name in _TAGS if isinstance(row.get(name), list | tuple)), None)
        return None if words is None or tags is None else {"words": words, "tags": tags}

    def resolve(self, train: Table) -> "Tagging":
        if self.labels:
            main_tag_metric(self.metric, has_chunks=self.has_chunks)
            return self.changed(scheme=self.scheme or tagging_scheme(self.labels))
        rows = [self._tags(train, index, len(read_words(train, index, self.words))) for index in range(len(train))]
        seen = {tag for row in rows for tag in row}
        scheme = self.scheme or tagging_scheme(seen)
        if scheme == "iob":
            seen = {tag for row in rows for tag in to_iob2(row)}
        main_tag_metric(self.metric, has_chunks=scheme != "plain")
        labels = complete_labels(seen, scheme)
        if len(labels) < 2:
            raise InputError(
                f"{train.name}: column {self.tags!r} has one tag only, {labels[0]!r}; at least 2 are needed"
            )
        return self.changed(labels=labels, scheme=scheme)

    def head(self, model: ModelConfig) -> TaggerConfig:
        return TaggerConfig(labels=self.labels, dropout=model.encoder.embedding.dropout)

    def examples(self, table: Table, *, has_targets: bool = True) -> list[TaggedWords]:
        numbers = {name: number for number, name in enumerate(self.labels)}
        found: list[TaggedWords] = []
        for index, document in enumerate(document_numbers(table, self.words, self.document)):
            if not has_targets:
                found.append(read_sentence(table, index, self.words, document))
                continue
            words = read_words(table, index, self.words)
            given_tags = self._tags(table, index, len(words))
            tags = to_iob2(given_tags) if self.scheme == "iob" else given_tags
            for position, tag in enumerate(tags):
                if tag not in numbers:
                    raise InputError(
                        f"{table.location(index)}: {self.tags!r} has {tag!r} for word {position + 1}, "
                        f"{words[position]!r}, which no training row has; {nearest(tag, self.labels)}"
                    )
            found.append(
                TaggedWords(words, tuple(numbers[tag] for tag in tags), document, is_changed=tags != given_tags)
            )
        return found

    def texts(self, examples: Sequence[TaggedWords]) -> Iterator[str]:
        return (" ".join(example.words) for example in examples)

    def features(self, examples: Sequence[TaggedWords], encoding: Encoding) -> Features:
        has_targets = all(len(example.tags) == len(example.words) for example in examples)
        return tag_features(
            [example.words for example in examples],
            [example.document for example in examples],
            [example.tags for example in examples] if has_targets else None,
            encoding,
            has_context=self.context == "document",
        )

    def objective(self, examples: Sequence[TaggedWords]) -> Tags:
        return Tags(weights=weights_of(self.class_weights, self.labels, _tags_of(examples)))

    def answers(
        self, examples: Sequence[TaggedWords], features: Features, outputs: Sequence[np.ndarray]
    ) -> Sequence[Answer]:
        return tag_answers(examples, features, outputs, self.labels, has_chunks=self.has_chunks)

    def evaluate(self, examples: Sequence[TaggedWords], answers: Sequence[AnswerData]) -> Evaluation:
        said = [answer["answer"] for answer in answers]
        right = [self.gold(example) for example in examples]
        return evaluate_tags(said, right, self.metric, has_chunks=self.has_chunks)

    def gold(self, example: TaggedWords) -> list[str]:
        return [self.labels[tag] for tag in example.tags]

    def describe(self, example: TaggedWords) -> str:
        return " ".join(" ".join(example.words).split())

    def error(self, example: TaggedWords, answer: AnswerData) -> float:
        """How sure the model was of the surest wrong tag."""
        parts = zip(self.gold(example), answer["answer"], answer["scores"], strict=True)
        return max((score for right, said, score in parts if said != right), default=0.0)

    def confusion(
        self, examples: Sequence[TaggedWords], answers: Sequence[AnswerData]
    ) -> tuple[tuple[str, ...], np.ndarray]:
        said = (tag for answer in answers for tag in answer["answer"])
        return self.labels, confusion_counts(self.labels, _tags_of(examples), said)

    def label_counts(self, examples: Sequence[TaggedWords]) -> Counter[str]:
        return Counter(tag for example in examples for tag in self.gold(example))

    def notices(self, examples: Sequence[TaggedWords]) -> list[str]:
        found = []
        changed = sum(example.is_changed for example in examples)
        if changed:
            found.append(f"tags are IOB1 in {changed} of {len(examples)} sentences and are read as IOB2")
        chunk_like = [name for name in self.labels if name[:2] in ("B-", "I-")]
        if not self.has_chunks and chunk_like:
            found.append(
                f"tags such as {chunk_like[0]!r} stand beside others that mark no chunks: all count as plain tags"
            )
        if self.context == "document" and len({example.document for example in examples}) == 1:
            found.append(f"no column {self.document!r} tells documents apart: all rows count as one, in their order")
        return found

    def files(self, examples: Sequence[TaggedWords], answers: Sequence[AnswerData]) -> dict[str, str]:
        sentences = []
        for example, answer in zip(examples, answers, strict=True):
            words = ("_".join(word.split()) or "_" for word in example.words)
            columns = (words, self.gold(example), answer["answer"]) if example.tags else (words, answer["answer"])
            sentences.append("".join(" ".join(line) + "\n" for line in zip(*columns, strict=True)))
        return {"predictions.conll": "\n".join(sentences)}

    def row(self, given: Any) -> dict[str, Any]:
        # what is asked by itself stands in no document
        return dict(given) if isinstance(given, Mapping) else {self.words: given, self.document: None}

    @property
    def has_chunks(self) -> bool:
        """Whether tags mark chunks of words, not words alone."""
        return (self.scheme or tagging_scheme(self.labels)) != "plain"

    def _tags(self, table: Table, index: int, words: int) -> list[str]:
        given = table.value(index, self.tags)
        if not isinstance(given, list | tuple):
            raise InputError(f"{table.location(index)}: {self.tags!r} is {given!r:.60}; it must be a list of tags")
        if len(given) != words:
            raise InputError(
                f"{table.location(index)} has {words} words in {self.words!r} and {len(given)} tags in {self.tags!r}"
            )
        if not words:
            raise InputError(f"{table.location(index)}: {self.words!r} is empty; a sentence has at least one word")
        for position, tag in enumerate(given):
            if isinstance(tag, bool) or not isinstance(tag, str | int) or tag == "":
                raise InputError(
                    f"{table.location(index)}: {self.tags!r} has {tag!r} for word {position + 1}; a tag is a name"
                )
        return [str(tag) for tag in given]


def _tags_of(examples: Sequence[TaggedWords]) -> Iterator[int]:
    return (tag for example in examples for tag in example.tags)


def _is_words(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(word, str) for word in value)
