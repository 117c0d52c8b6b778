"""Questions with their passages → windows: [CLS] question [SEP] a stretch of the passage [SEP]."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bertsmith.errors import InputError
from bertsmith.runtime.sequences import IGNORED, Features, Ragged, TextEncoding


@dataclass(frozen=True)
class SpanExample:
    """A question about a passage, with the answers that are right where these are known."""

    id: str
    question: str
    context: str
    golds: tuple[str, ...] | None = None
    """All right answers; empty where the passage answers nothing, None where they are not known."""
    begin: int = -1
    """Where the first of them lies in the characters of the passage …"""
    end: int = -1
    is_repaired: bool = False
    """Whether that was found by searching because the data named another place."""


@dataclass(frozen=True, kw_only=True)
class WindowFeatures(Features):
    """Windows as items, with what leads from a token back to the characters of its passage."""

    context: np.ndarray
    """The passage of every example, by its number in `characters`, (examples,)."""
    characters: tuple[np.ndarray, ...]
    """Where the tokens of every passage begin and end, (tokens, 2) each; examples may share one."""
    first: np.ndarray
    """The place of the first passage token in a window, (items,) …"""
    shown: np.ndarray
    """… and how many passage tokens the window shows, (items,)."""
    skipped: np.ndarray
    """How many passage tokens lie before the window, (items,)."""
    may_start: Ragged
    """As the tokens: 1 at passage tokens that no other window shows with more context around them."""

    def span(self, item: int, start: int, end: int) -> tuple[int, int]:
        """Where the characters of a window's tokens start … end lie in the passage."""
        characters = self.characters[self.context[self.example[item]]]
        shift = self.skipped[item] - self.first[item]
        return int(characters[start + shift, 0]), int(characters[end + shift, 1])


def window_starts(tokens: int, room: int, stride: int) -> np.ndarray:
    """Where the windows over so many tokens begin; the last one reaches the end. An empty passage has one window."""
    step = min(room, stride)
    return np.arange(0, max(0, tokens - room) + step, step)


def has_most_context(tokens: int, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Which tokens each window shows with the most context: min(left, right) + 0.01 · length; the first of equals.

    Shape: starts and lengths (windows,) -> (windows, tokens), bool.
    """
    place = np.arange(tokens)
    left = place - starts[:, None]
    right = (starts + lengths - 1)[:, None] - place
    score = np.minimum(left, right) + 0.01 * lengths[:, None]
    score[(left < 0) | (right < 0)] = -np.inf
    return np.arange(len(starts))[:, None] == score.argmax(0)


def window_features(
    examples: Sequence[SpanExample], encoding: TextEncoding, stride: int, question_length: int
) -> WindowFeatures:
    """All windows of all examples, in order; targets "start" and "end" where right answers are known.

    A window that does not show the whole answer, or whose passage has none, points at its first token.
    """
    frame = encoding.tokenizer.pair_frame()
    specials = len(frame.before) + len(frame.between) + len(frame.after)
    questions = encoding.tokenizer.encode_plain([example.question for example in examples])
    numbers: dict[str, int] = {}
    context = np.array([numbers.setdefault(example.context, len(numbers)) for example in examples], dtype=np.int64)
    passages = encoding.tokenizer.encode_offsets(list(numbers))
    before, between, after = (np.array(part, np.int32) for part in (frame.before, frame.between, frame.after))

    tokens: list[np.ndarray] = []
    types: list[np.ndarray] = []
    may_start: list[np.ndarray] = []
    rows: list[tuple[int, int, int, int]] = []
    targets: list[tuple[int, int]] = []
    cut = 0
    for index, example in enumerate(examples):
        ids, characters = passages[context[index]]
        question = np.array(questions[index][:question_length], np.int32)
        room = encoding.length - len(question) - specials
        if room < 1:
            raise InputError(
                f"sequences.length is {encoding.length}; at least {len(question) + specials + 1} is needed for the "
                f"question of {example.id!r} and one token of its passage"
            )
        starts = window_starts(len(ids), room, stride)
        lengths = np.minimum(room, len(ids) - starts)
        most = None if len(starts) == 1 else has_most_context(len(ids), starts, lengths)
        wanted = _answer_tokens(example, characters)
        begin = len(before) + len(question) + len(between)
        sizes = [len(before), len(question), len(between), 0, len(after)]
        cut += len(starts) if len(questions[index]) > question_length else 0
        for window, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            tokens.append(np.concatenate([before, question, between, ids[start : start + length], after]))
            sizes[3] = length
            types.append(np.repeat(np.array(frame.types, np.int32), sizes))
            allowed = np.zeros(len(tokens[-1]), np.int32)
            allowed[begin : begin + length] = 1 if most is None else most[window, start : start + length]
            may_start.append(allowed)
            rows.append((index, begin, length, start))
            targets.append(_target(wanted, start, length, begin))

    places = np.array(rows, dtype=np.int64).reshape(-1, 4)
    is_known = bool(examples) and examples[0].golds is not None
    both = np.array(targets, dtype=np.int64).reshape(-1, 2)
    laid = Ragged.of(tokens)
    return WindowFeatures(
        tokens=laid,
        types=Ragged(np.concatenate(types), laid.starts) if encoding.has_types and types else None,
        items=np.arange(len(places) + 1),
        example=places[:, 0],
        targets={"start": both[:, 0], "end": both[:, 1]} if is_known else {},
        cut=cut,
        context=context,
        characters=tuple(characters for _, characters in passages),
        first=places[:, 1],
        shown=places[:, 2],
        skipped=places[:, 3],
        may_start=Ragged.of(may_start),
    )


def _answer_tokens(example: SpanExample, characters: np.ndarray) -> tuple[int, int] | None:
    """The first and last passage token of the first right answer; None where there is none.

    (IGNORED, IGNORED) for an answer of which the tokenizer keeps nothing, such as one of control characters.
    """
    if not example.golds:
        return None
    inside = np.flatnonzero((characters[:, 0] < example.end) & (characters[:, 1] > example.begin))
    return (int(inside[0]), int(inside[-1])) if len(inside) else (IGNORED, IGNORED)


def _target(wanted: tuple[int, int] | None, start: int, length: int, begin: int) -> tuple[int, int]:
    """The places of the answer in a window; those of the first token where the window does not show all of it."""
    if wanted is None:
        return 0, 0
    if wanted[0] == IGNORED:
        return wanted
    if wanted[0] < start or wanted[1] >= start + length:
        return 0, 0
    return wanted[0] - start + begin, wanted[1] - start + begin
