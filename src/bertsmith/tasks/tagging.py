"""Token classification: named entities, chunks, parts of speech."""

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
    document_indices,
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
from bertsmith.tasks.base import AnswerData, Encoding, Evaluation, PredictedLabel, PredictedLabels, RowData, Task
from bertsmith.tasks.default_heads import tagger_head
from bertsmith.tasks.metrics.base import main_metric
from bertsmith.tasks.texts import ClassWeights, loss_weights
from bertsmith.text.rows import Table

_RATES = ("f1", "precision", "recall")


def evaluate_tags(
    predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]], metric: str | None, *, has_chunks: bool
) -> Evaluation:
    """Compute the metrics of tagged sentences; the default main metric is f1 if tags mark chunks, else accuracy.

    f1, precision and recall are micro averages over all chunks, then per type, such as f1_PER; accuracy is per tag.
    """
    main = main_tag_metric(metric, has_chunks=has_chunks)
    hits = np.array([_hits(ours, theirs) for ours, theirs in zip(predicted, gold, strict=True)])
    metrics: dict[str, float] = {}
    counts = np.zeros((len(hits), 3), dtype=np.int64)
    if has_chunks:
        counts, by_type = chunk_counts(predicted, gold)
        metrics |= _rates(counts.sum(0))
        for kind, type_counts in sorted(by_type.items()):
            metrics |= {f"{name}_{kind}": value for name, value in _rates(type_counts).items() if kind}
    metrics["accuracy"] = _percent(*hits.sum(0))

    def measure(chosen: np.ndarray) -> float:
        return _percent(*hits[chosen].sum(0)) if main == "accuracy" else _rates(counts[chosen].sum(0))[main]

    return Evaluation(main, metrics, measure)


def main_tag_metric(metric: str | None, *, has_chunks: bool) -> str:
    """Return the name of the main metric; raise InputError if these tags do not have it."""
    return main_metric(metric, (*_RATES, "accuracy") if has_chunks else ("accuracy",))


def chunk_counts(
    predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Count correct, predicted and gold chunks, per sentence and per type.

    Shape: (sentences, 3) and (3,) each.
    """
    counts = np.zeros((len(gold), 3), dtype=np.int64)
    by_type: Counter[tuple[str, int]] = Counter()
    for index, (ours, theirs) in enumerate(zip(predicted, gold, strict=True)):
        predicted_chunks, gold_chunks = set(chunks(ours)), set(chunks(theirs))
        for column, group in enumerate((predicted_chunks & gold_chunks, predicted_chunks, gold_chunks)):
            counts[index, column] = len(group)
            by_type.update((chunk.type, column) for chunk in group)
    kinds = {kind for kind, _ in by_type}
    return counts, {kind: np.array([by_type[kind, column] for column in range(3)]) for kind in kinds}


def _hits(predicted: Sequence[str], gold: Sequence[str]) -> tuple[int, int]:
    """Number of correct tags, and of all tags."""
    return sum(ours == theirs for ours, theirs in zip(predicted, gold, strict=True)), len(gold)


def _rates(counts: np.ndarray) -> dict[str, float]:
    """F1, precision and recall from the numbers of correct, predicted and gold chunks; 0 without chunks."""
    correct, predicted, gold = counts.tolist()
    return {
        "f1": _percent(2 * correct, predicted + gold),
        "precision": _percent(correct, predicted),
        "recall": _percent(correct, gold),
    }


def _percent(count: float, total: float) -> float:
    return 100.0 * float(count) / float(total) if total else 0.0


_WORD_COLUMNS = ("tokens", "words", "text", "sentence")
_TAG_COLUMNS = ("ner", "ner_tags", "chunk", "chunk_tags", "pos", "pos_tags", "tags", "labels", "label")


class Tagging(Task[TaggedWords]):
    """Assign a tag to each word of a sentence."""

    kind: Literal["tagging"] = "tagging"
    words: str = "tokens"
    """Column with the list of words; for prediction, plain text works as well."""
    tags: str = "ner"
    """Column with the list of tags, one per word."""
    document: str = "document"
    """Optional column of the document id, used by context = "document"."""
    labels: tuple[str, ...] = ()
    """The tag set by index; empty to collect it from the training data."""
    scheme: Scheme | None = None
    """Scheme by which tags mark chunks: "iob" (IOB1 is converted to IOB2), "bioes", or "plain" for tags of single
    words. None decides by the tag set."""
    context: Literal["sentence", "document"] = "sentence"
    """Context of a word: its sentence, or as much of the surrounding document as fits into a sequence (as BERT's
    NER)."""
    class_weights: ClassWeights = "none"
    """Weight of each tag in the loss: "none" for equal weights, "balanced" for weights inversely proportional to the
    tag frequencies, or one number per tag."""

    roles: ClassVar[tuple[str, ...]] = ("words",)
    target_roles: ClassVar[tuple[str, ...]] = ("tags", "document")

    @classmethod
    def find_columns(cls, row: RowData) -> dict[str, str] | None:
        words = next((name for name in _WORD_COLUMNS if _is_words(row.get(name))), None)
        tags = next((name for name in _TAG_COLUMNS if isinstance(row.get(name), list | tuple)), None)
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
                f"{train.name}: column {self.tags!r} has only one tag, {labels[0]!r}; at least 2 are needed"
            )
        return self.changed(labels=labels, scheme=scheme)

    def head(self, model: ModelConfig) -> TaggerConfig:
        return tagger_head(model, self.labels)

    def examples(self, table: Table, *, has_targets: bool = True) -> list[TaggedWords]:
        label_index = {name: index for index, name in enumerate(self.labels)}
        examples: list[TaggedWords] = []
        for index, document in enumerate(document_indices(table, self.words, self.document)):
            if not has_targets:
                examples.append(read_sentence(table, index, self.words, document))
                continue
            words = read_words(table, index, self.words)
            original = self._tags(table, index, len(words))
            tags = to_iob2(original) if self.scheme == "iob" else original
            for position, tag in enumerate(tags):
                if tag not in label_index:
                    raise InputError(
                        f"{table.location(index)}: {self.tags!r} has {tag!r} for word {position + 1}, "
                        f"{words[position]!r}, which is not a tag of this task; {nearest(tag, self.labels)}"
                    )
            targets = tuple(label_index[tag] for tag in tags)
            examples.append(TaggedWords(words, targets, document, is_changed=tags != original))
        return examples

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
        return Tags(weights=loss_weights(self.class_weights, self.labels, _targets(examples)))

    def answers(
        self, examples: Sequence[TaggedWords], features: Features, outputs: Sequence[np.ndarray]
    ) -> Sequence[Answer]:
        return tag_answers(examples, features, outputs, self.labels, has_chunks=self.has_chunks)

    def evaluate(self, examples: Sequence[TaggedWords], answers: Sequence[AnswerData]) -> Evaluation:
        predicted = [answer["answer"] for answer in answers]
        gold = [self.gold(example) for example in examples]
        return evaluate_tags(predicted, gold, self.metric, has_chunks=self.has_chunks)

    def gold(self, example: TaggedWords) -> list[str]:
        return [self.labels[tag] for tag in example.tags]

    def describe(self, example: TaggedWords) -> str:
        return " ".join(" ".join(example.words).split())

    def error(self, example: TaggedWords, answer: AnswerData) -> float:
        """Return the highest confidence in a wrong tag."""
        words = zip(self.gold(example), answer["answer"], answer["scores"], strict=True)
        return max((score for gold, predicted, score in words if predicted != gold), default=0.0)

    def predicted_labels(self, examples: Sequence[TaggedWords], answers: Sequence[AnswerData]) -> PredictedLabels:
        label_index = {name: index for index, name in enumerate(self.labels)}
        return PredictedLabels(
            self.labels,
            [
                PredictedLabel(target, label_index[tag], float(score), index, word)
                for index, (example, answer) in enumerate(zip(examples, answers, strict=True))
                for word, (target, tag, score) in enumerate(
                    zip(example.tags, answer["answer"], answer["scores"], strict=True)
                )
            ],
        )

    def describe_label(self, example: TaggedWords, label: PredictedLabel) -> tuple[str, str, str]:
        assert label.word is not None
        words = [" ".join(word.split()) for word in example.words]
        return " ".join(words[: label.word]), words[label.word], " ".join(words[label.word + 1 :])

    def label_counts(self, examples: Sequence[TaggedWords]) -> Counter[str]:
        return Counter(tag for example in examples for tag in self.gold(example))

    def notices(self, examples: Sequence[TaggedWords]) -> list[str]:
        notices = []
        changed = sum(example.is_changed for example in examples)
        if changed:
            notices.append(f"{changed} of {len(examples)} sentences have IOB1 tags, which are converted to IOB2")
        chunk_tags = [name for name in self.labels if name[:2] in ("B-", "I-")]
        if not self.has_chunks and chunk_tags:
            notices.append(
                f"some tags mark chunks, such as {chunk_tags[0]!r}, and others do not: all are treated as plain tags"
            )
        if self.context == "document" and len({example.document for example in examples}) == 1:
            notices.append(f"no column {self.document!r} separates documents: all rows are treated as one document")
        return notices

    def files(self, examples: Sequence[TaggedWords], answers: Sequence[AnswerData]) -> dict[str, str]:
        sentences = []
        for example, answer in zip(examples, answers, strict=True):
            words = ("_".join(word.split()) or "_" for word in example.words)
            columns = (words, self.gold(example), answer["answer"]) if example.tags else (words, answer["answer"])
            sentences.append("".join(" ".join(line) + "\n" for line in zip(*columns, strict=True)))
        return {"predictions.conll": "\n".join(sentences)}

    def row(self, value: Any) -> dict[str, Any]:
        # a single sentence has no document as context
        return dict(value) if isinstance(value, Mapping) else {self.words: value, self.document: None}

    @property
    def has_chunks(self) -> bool:
        """Whether tags mark chunks of words."""
        return (self.scheme or tagging_scheme(self.labels)) != "plain"

    def _tags(self, table: Table, index: int, words: int) -> list[str]:
        tags = table.value(index, self.tags)
        if not isinstance(tags, list | tuple):
            raise InputError(f"{table.location(index)}: {self.tags!r} is {tags!r:.60}; it must be a list of tags")
        if len(tags) != words:
            raise InputError(
                f"{table.location(index)} has {words} words in {self.words!r} but {len(tags)} tags in {self.tags!r}"
            )
        if not words:
            raise InputError(f"{table.location(index)}: {self.words!r} is empty; a sentence needs at least one word")
        for position, tag in enumerate(tags):
            if isinstance(tag, bool) or not isinstance(tag, str | int) or tag == "":
                raise InputError(
                    f"{table.location(index)}: {self.tags!r} has {tag!r} for word {position + 1}; a tag must be a "
                    "string or an integer"
                )
        return [str(tag) for tag in tags]


def _targets(examples: Sequence[TaggedWords]) -> Iterator[int]:
    return (tag for example in examples for tag in example.tags)


def _is_words(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(word, str) for word in value)
