"""Tokenise the inputs of a request, within the limits. Runs in threads beside the event loop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bertsmith.answers.chart import span_tables
from bertsmith.answers.sequences import Answer, Features, Ragged
from bertsmith.answers.texts import whole_lengths
from bertsmith.engines.base import Runner
from bertsmith.errors import InputError
from bertsmith.serving.http.errors import ApiError, invalid, too_large
from bertsmith.serving.http.wire import TaskInput
from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import TokenSequence
from bertsmith.serving.settings import Limits
from bertsmith.tasks import AnyTask
from bertsmith.tasks.choice import Choice
from bertsmith.tasks.embedding import TextEmbedding
from bertsmith.text.rows import table_of
from bertsmith.text.tokenizer import Tokenizer

_WHOLE_TEXT_TASKS = frozenset({"tagging", "parsing", "spans", "choice"})
"""Tasks that tokenise their texts to the end; others only the tokens that the model reads."""
_CHARACTERS_PER_TOKEN = 8
"""Maximum mean length of the tokens of a request, so that a text with too many tokens is not tokenised first."""
InputRow = Mapping[str, str | list[str] | None]
"""One input of a task: texts or lists of words by column."""


def check_count(texts: Sequence[object], limits: Limits, name: str = "inputs") -> None:
    """Raise if there are no texts or too many."""
    if not texts:
        raise invalid(f"{name} is empty; at least one text is needed")
    if len(texts) > limits.texts:
        raise too_large(f"{name} has {len(texts)} texts; at most {limits.texts} are accepted in one request")


def check_tokens(tokens: int, limits: Limits) -> None:
    """Raise if a request has too many tokens in total."""
    if tokens > limits.tokens:
        raise too_large(f"the request has {tokens} tokens; at most {limits.tokens} are accepted in one request")


def check_characters(characters: int, limits: Limits) -> None:
    """Raise if texts that are tokenised to their end have too many characters in total."""
    allowed = _CHARACTERS_PER_TOKEN * limits.tokens
    if characters > allowed:
        raise too_large(f"the texts of the request have {characters} characters; at most {allowed} are accepted")


def text_sequences(served: ServedModel, texts: Sequence[str], *, truncate: bool, limits: Limits) -> list[TokenSequence]:
    """Tokenise texts; each becomes one sequence."""
    encoding = served.encoding
    length = encoding.length if truncate else encoding.length + 1  # one more shows that a text is too long
    encoded = encoding.tokenizer.encode(texts, None, length, padding=False)
    tokens, types = encoded["input_ids"], encoded["token_type_ids"]
    for index, row in enumerate(tokens):
        if len(row) > encoding.length:
            raise _too_long(f"text {index} has more than {encoding.length} tokens", encoding.length)
    check_tokens(sum(len(row) for row in tokens), limits)
    return [
        TokenSequence(row, row_types if encoding.has_types else None)
        for row, row_types in zip(tokens, types, strict=True)
    ]


def id_sequences(
    served: ServedModel, rows: Sequence[Sequence[int]], *, truncate: bool, limits: Limits
) -> list[TokenSequence]:
    """Return a sequence for every list of token ids, with special tokens added."""
    encoding = served.encoding
    before, after = special_tokens(served)
    room = encoding.length - len(before) - len(after)
    vocabulary = served.runner.config.encoder.vocabulary
    sequences = []
    for index, row in enumerate(rows):
        unknown = next((token for token in row if not 0 <= token < vocabulary), None)
        if unknown is not None:
            raise invalid(f"list {index} has the token id {str(unknown)[:20]}; allowed: 0 to {vocabulary - 1}")
        if len(row) > room and not truncate:
            raise _too_long(f"list {index} has {len(row)} token ids", room)
        tokens = np.array([*before, *row[:room], *after], dtype=np.int64)
        sequences.append(TokenSequence(tokens, np.zeros_like(tokens) if encoding.has_types else None))
    check_tokens(sum(len(one.tokens) for one in sequences), limits)
    return sequences


def mask_sequences(served: ServedModel, texts: Sequence[str], *, truncate: bool, limits: Limits) -> list[TokenSequence]:
    """Tokenise texts that each have at least one mask."""
    mask = served.tokenizer.mask
    sequences = []
    for index, one in enumerate(text_sequences(served, texts, truncate=truncate, limits=limits)):
        positions = np.flatnonzero(one.tokens == mask)
        if not len(positions):
            where = f" in its first {served.encoding.length} tokens" if truncate else ""
            raise invalid(f"text {index} has no {served.tokenizer.tokens([mask])[0]} to fill{where}")
        sequences.append(TokenSequence(one.tokens, one.types, positions))
    masks = sum(len(one.mask_positions) for one in sequences)
    if masks > limits.masks:
        raise too_large(f"the request has {masks} masks; at most {limits.masks} are accepted in one request")
    return sequences


def special_tokens(served: ServedModel) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer adds before and after a text."""
    tokenizer = served.encoding.tokenizer
    whole = tokenizer.encode(["a"], padding=False)["input_ids"][0].tolist()
    (plain,) = tokenizer.encode_plain(["a"])
    begin = next(index for index in range(len(whole)) if whole[index : index + len(plain)] == plain)
    return whole[:begin], whole[begin + len(plain) :]


@dataclass(frozen=True)
class TaskInputs:
    """The inputs of a task: its examples, their features, and the token sequences to run."""

    task: AnyTask
    examples: Sequence[object]
    features: Features
    sequences: list[TokenSequence]

    def item_outputs(self, outputs: Sequence[np.ndarray], runner: Runner) -> list[np.ndarray]:
        """Group the outputs of sequences by item, as `Task.answers` expects."""
        bounds = self.features.items.tolist()
        items = [outputs[begin:end] for begin, end in pairwise(bounds)]
        grouped = [item[0] if len(item) == 1 or runner.is_for_tokens else np.stack(item) for item in items]
        weights = runner.span_weights
        return grouped if weights is None else span_tables(self.features, grouped, weights)

    def answers(self, item_outputs: Sequence[np.ndarray]) -> Sequence[Answer]:
        """Return the answer of every input."""
        return self.task.answers(self.examples, self.features, item_outputs)


def split_inputs(task: AnyTask, inputs: TaskInput | Sequence[TaskInput]) -> tuple[list[TaskInput], bool]:
    """Return the inputs of a request as a list, and whether the request has a single input outside a list.

    For a task that reads n texts, a flat list of n strings is one input.
    """
    if isinstance(inputs, str | Mapping):
        return [inputs], True
    columns = len(task.input_columns)
    texts = [value for value in inputs if isinstance(value, str)]
    is_one = columns > 1 and len(inputs) == len(texts) == columns
    return ([texts], True) if is_one else (list(inputs), False)


def task_inputs(served: ServedModel, inputs: Sequence[TaskInput], *, truncate: bool, limits: Limits) -> TaskInputs:
    """Tokenise inputs of the model's task."""
    assert served.task is not None
    task, encoding = served.task, served.encoding
    rows = [_row(task, value) for value in inputs]
    _check_whole_texts(task, rows, served.tokenizer, limits)
    examples = task.examples(table_of(rows, "inputs"), has_targets=False)
    features = task.features(examples, encoding)
    if features.cut and not truncate:
        lengths = features.whole_lengths
        if isinstance(task, TextEmbedding):  # its features count a text of exactly the maximum length as truncated
            lengths = whole_lengths(features.tokens.lengths, list(task.texts(examples)), None, encoding)
        if lengths is None:
            raise _too_long("an input has more tokens", encoding.length)
        if lengths.max(initial=0) > encoding.length:
            raise _too_long(f"an input has more than {encoding.length} tokens", encoding.length)
    types = features.types
    sequences = [
        TokenSequence(_sequence(features.tokens, index), None if types is None else _sequence(types, index))
        for index in range(len(features.tokens))
    ]
    check_tokens(sum(len(one.tokens) for one in sequences), limits)
    return TaskInputs(task, examples, features, sequences)


def _check_whole_texts(task: AnyTask, rows: Sequence[InputRow], tokenizer: Tokenizer, limits: Limits) -> None:
    """Raise if a text has more tokens than a request may have, before a task tokenises it to its end."""
    if task.kind not in _WHOLE_TEXT_TASKS:
        return
    texts = [value if isinstance(value, str) else " ".join(value or ()) for row in rows for value in row.values()]
    check_characters(sum(map(len, texts)) + sum(_repeated_characters(task, row) for row in rows), limits)
    for text in texts:
        if len(text) > limits.tokens:
            check_tokens(len(tokenizer.encode_offsets([text], limits.tokens + 1)[0][0]), limits)


def _repeated_characters(task: AnyTask, row: InputRow) -> int:
    """Return at least the number of characters that reading a row adds: the common start of all choices."""
    start = row.get(task.start) if isinstance(task, Choice) and task.start is not None else None
    choices = max([len(row), *(len(value) for value in row.values() if isinstance(value, list))])
    return len(start) * choices if isinstance(start, str) else 0


def _row(task: AnyTask, value: TaskInput) -> InputRow:
    if isinstance(task, TextEmbedding) and isinstance(value, str):
        return {str(task.text): value}  # the pair of texts is needed in training only
    if isinstance(value, Mapping):
        extra = [name for name in value if name not in _allowed_columns(task, value)]  # such as the target
        if extra:
            columns = ", ".join(task.input_columns)
            raise InputError(f"an input has the field {extra[0][:80]!a}; this task reads {columns}")
    return task.row(value)


def _allowed_columns(task: AnyTask, row: Mapping[str, object]) -> set[str]:
    columns = set(task.input_columns)
    if task.kind == "choice":  # choices may be numbered columns
        columns |= {name for name in row if name.startswith(str(getattr(task, "choices", "")))}
    return columns | {str(getattr(task, role)) for role in ("document", "id") if hasattr(task, role)}


def _sequence(ragged: Ragged, index: int) -> np.ndarray:
    return ragged[index].astype(np.int64)


def _too_long(subject: str, length: int) -> ApiError:
    return too_large(
        f"{subject}; at most {length} are accepted, special tokens included; send truncate: true to truncate it"
    )
