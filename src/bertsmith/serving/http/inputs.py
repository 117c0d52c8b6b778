"""From what a request holds to the sequences an engine works on, within the limits. Runs beside the event loop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from bertsmith.answers.sequences import Features, Ragged
from bertsmith.answers.texts import whole_lengths
from bertsmith.errors import InputError
from bertsmith.serving.http.errors import invalid, too_large
from bertsmith.serving.requests import TokenSequence
from bertsmith.serving.settings import Limits
from bertsmith.tasks.base import Task
from bertsmith.tasks.embedding import Embedding
from bertsmith.text.rows import table_of

if TYPE_CHECKING:
    from bertsmith.serving.model import ServedModel


def check_count(texts: Sequence[Any], limits: Limits, name: str = "inputs") -> None:
    """Raises if there are no texts, or too many."""
    if not texts:
        raise invalid(f"{name} is empty; at least one text is needed")
    if len(texts) > limits.texts:
        raise too_large(f"{name} holds {len(texts)} texts; at most {limits.texts} are taken in one request")


def check_tokens(asked: Sequence[TokenSequence], limits: Limits) -> None:
    """Raises if the sequences of a request are too long together."""
    tokens = sum(len(one.tokens) for one in asked)
    if tokens > limits.tokens:
        raise too_large(f"the request has {tokens} tokens; at most {limits.tokens} are taken in one")


def texts_asked(served: "ServedModel", texts: Sequence[str], truncates: bool, limits: Limits) -> list[TokenSequence]:
    """A sequence for every text."""
    encoding = served.encoding
    made = encoding.tokenizer.encode(texts, None, encoding.length if truncates else None, padding=False)
    tokens, types = made["input_ids"], made["token_type_ids"]
    for index, row in enumerate(tokens):
        if len(row) > encoding.length:
            raise _too_long(f"text {index} has {len(row)} tokens", encoding.length)
    asked = [TokenSequence(row, own if encoding.has_types else None) for row, own in zip(tokens, types, strict=True)]
    check_tokens(asked, limits)
    return asked


def ids_asked(
    served: "ServedModel", rows: Sequence[Sequence[int]], truncates: bool, limits: Limits
) -> list[TokenSequence]:
    """A sequence for every list of token ids, which are those of a text without the marks around it."""
    encoding = served.encoding
    before, after = marks(served)
    room = encoding.length - len(before) - len(after)
    known = served.runner.config.encoder.vocabulary
    asked = []
    for index, row in enumerate(rows):
        wrong = next((token for token in row if not 0 <= token < known), None)
        if wrong is not None:
            raise invalid(f"list {index} holds the token id {str(wrong)[:20]}; allowed: 0 to {known - 1}")
        if len(row) > room and not truncates:
            raise _too_long(f"list {index} has {len(row)} token ids", room)
        tokens = np.array([*before, *row[:room], *after], dtype=np.int64)
        asked.append(TokenSequence(tokens, np.zeros_like(tokens) if encoding.has_types else None))
    check_tokens(asked, limits)
    return asked


def marks(served: "ServedModel") -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before a text and after it."""
    tokenizer = served.encoding.tokenizer
    whole = tokenizer.encode(["a"], padding=False)["input_ids"][0].tolist()
    (plain,) = tokenizer.encode_plain(["a"])
    begin = next(place for place in range(len(whole)) if whole[place : place + len(plain)] == plain)
    return whole[:begin], whole[begin + len(plain) :]


@dataclass(frozen=True)
class TaskInputs:
    """Inputs of a task as its own code knows them, and the sequences they became."""

    task: Task[Any]
    examples: list[Any]
    features: Features
    asked: list[TokenSequence]

    def outputs(self, outputs: Sequence[np.ndarray], *, is_for_tokens: bool) -> list[np.ndarray]:
        """What was said of the sequences, item by item, as `Task.answers` reads it."""
        bounds = self.features.items.tolist()
        parts = [outputs[begin:end] for begin, end in pairwise(bounds)]
        return [part[0] if len(part) == 1 or is_for_tokens else np.stack(part) for part in parts]


def listed(task: Task[Any], inputs: Any) -> tuple[list[Any], bool]:
    """The inputs of a request one by one, and whether there was one that stood for itself.

    For a task on several texts a flat list of as many strings is one input.
    """
    if not isinstance(inputs, list):
        return [inputs], True
    columns = len(task.input_columns)
    is_one = columns > 1 and len(inputs) == columns and all(isinstance(value, str) for value in inputs)
    return ([inputs], True) if is_one else (inputs, False)


def task_asked(served: "ServedModel", inputs: Sequence[Any], truncates: bool, limits: Limits) -> TaskInputs:
    """The sequences of inputs of the model's task."""
    assert served.kept is not None
    task, encoding = served.kept.task, served.encoding
    examples = task.examples(table_of([_row(task, given) for given in inputs], "inputs"), has_targets=False)
    features = task.features(examples, encoding)
    if features.cut and not truncates:
        lengths = features.whole_lengths
        if isinstance(task, Embedding):  # it counts as cut what just fits
            lengths = whole_lengths(features.tokens.lengths, list(task.texts(examples)), None, encoding)
        if lengths is None:
            raise _too_long("an input has more tokens", encoding.length)
        if lengths.max(initial=0) > encoding.length:
            raise _too_long(f"an input has {lengths.max()} tokens", encoding.length)
    asked = [
        TokenSequence(_whole(features.tokens, index), None if features.types is None else _whole(features.types, index))
        for index in range(len(features.tokens))
    ]
    check_tokens(asked, limits)
    return TaskInputs(task, examples, features, asked)


def _row(task: Task[Any], given: Any) -> dict[str, Any]:
    if isinstance(task, Embedding) and isinstance(given, str):
        return {str(task.text): given}  # one of the two texts it was trained with is enough
    if isinstance(given, Mapping):
        # the rest of a row could only be what is right, which nobody asks for
        extra = [name for name in given if name not in _columns(task, given)]
        if extra:
            raise InputError(
                f"an input has the field {extra[0][:80]!a}; this task reads {', '.join(task.input_columns)}"
            )
    return task.row(given)


def _columns(task: Task[Any], given: Mapping[str, Any]) -> set[str]:
    columns = set(task.input_columns)
    if task.kind == "choice":  # choices may be numbered columns
        columns |= {name for name in given if name.startswith(str(getattr(task, "choices", "")))}
    return columns | {str(getattr(task, role)) for role in ("document", "id") if hasattr(task, role)}


def _whole(ragged: Ragged, index: int) -> np.ndarray:
    return ragged[index].astype(np.int64)


def _too_long(what: str, length: int) -> Exception:
    return too_large(f"{what}; at most {length} are taken, marks included; send truncate: true to have it cut")
