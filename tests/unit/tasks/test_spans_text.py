"""From scores to texts: the same answers as a plain transcription of BERT's rules gives, on thousands of random cases.

The transcription works on words between spaces and finds its way back to the passage by aligning the joined pieces with
the tokenised words. Ours cuts the passage by offsets. Where one letter may stand for another (case, accents, unknown
characters), the old alignment can fail or pick another place, so there the chosen tokens are compared, not the texts.
"""

import random

import numpy as np
import pytest
from tokenizers.pre_tokenizers import BertPreTokenizer

from bertsmith.answers.spans import NO_CANDIDATE, Span, SpanExample, best_spans, with_no_answer
from bertsmith.tasks.base import Encoding
from bertsmith.tasks.spans import SpanAnswers
from bertsmith.text.learn import learn_tokenizer
from bertsmith.text.tokenizer import Tokenizer

PLAIN = [
    "smith",
    "forges",
    "iron",
    "gates",
    "banana",
    "nana",
    "x",
    "1998",
    "24-10",
    "(near)",
    "u.s.",
    "'harbour'",
    "a,b",
]
VARIED = [
    *PLAIN,
    "Smith",
    "Banana",
    "café",
    "NAÏVE",
    "東京",
    "straße",
    "🙂",
    "x🙂y",
    "e\u0301t",
    "İx",
    "ﬁn",
    "Zürich's",
]
LENGTH, STRIDE, QUESTION, N_BEST, LONGEST = 28, 6, 4, 7, 5


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn_tokenizer([" ".join(PLAIN[::step]) for step in (1, 2, 3)] * 4, "wordpiece", 62, progress=False)


def _cases(words: list[str], spaces: list[str], count: int) -> list[SpanExample]:
    rng = random.Random(3)
    found = []
    for index in range(count):
        context = "".join(rng.choice(words) + rng.choice(spaces) for _ in range(rng.randint(0, 22)))
        question = " ".join(rng.choice(words) for _ in range(rng.randint(1, 5)))
        found.append(SpanExample(str(index), question, context))
    return found


def _scores(features, *, digits: int) -> list[np.ndarray]:
    """Random scores, rounded so that many are equal."""
    rng = np.random.default_rng(4)
    return [rng.normal(size=(length, 2)).round(digits).astype(np.float32) for length in features.tokens.lengths]


class Transcription:
    """One question by BERT's rules, in plain loops."""

    def __init__(self, example: SpanExample, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        for space in "\t\r\n\u202f":
            example = SpanExample(example.id, example.question, example.context.replace(space, " "))
        self.words = example.context.split(" ")
        self.words = [word for word in self.words if word]
        self.tokens: list[str] = []
        self.word_of: list[int] = []
        for index, word in enumerate(self.words):
            for piece in tokenizer.tokens(tokenizer.encode_plain([word])[0]):
                self.tokens.append(piece)
                self.word_of.append(index)
        asked = len(tokenizer.encode_plain([example.question])[0][:QUESTION])
        self.first = asked + 2
        room = LENGTH - asked - 3
        self.windows: list[tuple[int, int]] = []
        start = 0
        while start < len(self.tokens):
            length = min(room, len(self.tokens) - start)
            self.windows.append((start, length))
            if start + length == len(self.tokens):
                break
            start += min(length, STRIDE)

    def is_max_context(self, window: int, position: int) -> bool:
        best, best_score = None, None
        for index, (start, length) in enumerate(self.windows):
            if not start <= position < start + length:
                continue
            score = min(position - start, start + length - 1 - position) + 0.01 * length
            if best_score is None or score > best_score:
                best, best_score = index, score
        return best == window

    def candidates(self, scores: list[np.ndarray]) -> list[tuple[int, int, int, float, float]]:
        """Window, start, end and their scores, the best sum first."""
        found = []
        for window, (start, length) in enumerate(self.windows):
            own = scores[window].tolist()
            firsts = sorted(range(len(own)), key=lambda position: own[position][0], reverse=True)[:N_BEST]
            lasts = sorted(range(len(own)), key=lambda position: own[position][1], reverse=True)[:N_BEST]
            for first in firsts:
                for last in lasts:
                    if not self.first <= first < self.first + length or not self.first <= last < self.first + length:
                        continue
                    if not self.is_max_context(window, first - self.first + start):
                        continue
                    if last < first or last - first + 1 > LONGEST:
                        continue
                    found.append((window, first, last, own[first][0], own[last][1]))
        return sorted(found, key=lambda one: one[3] + one[4], reverse=True)

    def text(self, window: int, first: int, last: int) -> str:
        shift = self.windows[window][0] - self.first
        tokens = self.tokens[first + shift : last + shift + 1]
        said = " ".join(" ".join(tokens).replace(" ##", "").replace("##", "").split())
        original = " ".join(self.words[self.word_of[first + shift] : self.word_of[last + shift] + 1])
        return self.aligned(said, original)

    def aligned(self, said: str, original: str) -> str:
        normal = self.tokenizer.normalizer.normalize_str(original)
        tokenised = " ".join(word for word, _ in BertPreTokenizer().pre_tokenize_str(normal))
        begin = tokenised.find(said)
        if begin < 0:
            return original
        positions = [position for position, character in enumerate(tokenised) if character != " "]
        own = [position for position, character in enumerate(original) if character != " "]
        if len(positions) != len(own):
            return original
        return original[own[positions.index(begin)] : own[positions.index(begin + len(said) - 1)] + 1]

    def n_best(self, scores: list[np.ndarray], *, has_null: bool) -> list[tuple[str, float, float]]:
        entries = [(self.text(*one[:3]), *one[3:]) for one in self.candidates(scores)]
        null = min((tuple(own[0].tolist()) for own in scores), key=sum)
        if has_null:
            entries = sorted([*entries, ("", *null)], key=lambda entry: entry[1] + entry[2], reverse=True)
        kept: list[tuple[str, float, float]] = []
        for entry in entries:
            if len(kept) == N_BEST:
                break
            if entry[0] not in [text for text, _, _ in kept]:
                kept.append(entry)
        if has_null and "" not in [text for text, _, _ in kept]:
            kept.append(("", *null))
        return kept


def _answered(cases, tokenizer, *, has_null: bool, digits: int = 1):
    task = SpanAnswers(
        may_be_unanswered=has_null,
        stride=STRIDE,
        question_length=QUESTION,
        n_best=N_BEST,
        max_answer_length=LONGEST,
        null_threshold=-0.4 if has_null else 0.0,
    )
    features = task.features(cases, Encoding(tokenizer, LENGTH, has_types=True))
    scores = _scores(features, digits=digits)
    by_case: list[list[np.ndarray]] = [[] for _ in cases]
    for item, example in enumerate(features.example.tolist()):
        by_case[example].append(scores[item])
    return task, features, scores, by_case


@pytest.mark.parametrize("has_null", [False, True])
@pytest.mark.parametrize("digits", [1, 6])
def test_n_best_and_answers_equal_the_transcription(tokenizer: Tokenizer, has_null: bool, digits: int) -> None:
    cases = _cases(PLAIN, [" "], 1500)
    task, features, scores, by_case = _answered(cases, tokenizer, has_null=has_null, digits=digits)
    answers = task.answers(cases, features, scores)
    windows = no_answers = 0
    for case, own, answer in zip(cases, by_case, answers, strict=True):
        plain = Transcription(case, tokenizer)
        windows += len(plain.windows) > 1
        expected = plain.n_best(own, has_null=has_null)
        texts = [entry for entry in expected if entry[0]]
        ours = [(one["text"], one["start_logit"], one["end_logit"]) for one in answer["n_best"]]
        null = min(float(first[0].astype(np.float64).sum()) for first in own)
        if not texts:
            assert answer["answer"] == ""
            assert answer["null_odds"] == NO_CANDIDATE
            no_answers += 1
            continue
        assert ours == expected
        odds = null - sum(texts[0][1:])
        assert answer["null_odds"] == pytest.approx(odds)
        is_null = has_null and answer["null_odds"] > task.null_threshold
        assert answer["answer"] == ("" if is_null else texts[0][0])
        sums = np.exp([entry[1] + entry[2] for entry in expected])
        assert [one["probability"] for one in answer["n_best"]] == pytest.approx((sums / sums.sum()).tolist())
        if not is_null:
            assert case.context[answer["begin"] : answer["end"]] == answer["answer"]
    assert windows > 500
    assert no_answers > 0


def test_chosen_tokens_equal_the_transcription_in_any_script(tokenizer: Tokenizer) -> None:
    cases = _cases(VARIED, [" ", "  ", "\n", "\t", "\u202f"], 1500)
    _, features, scores, by_case = _answered(cases, tokenizer, has_null=False)
    ours = best_spans(features, scores, N_BEST, LONGEST)
    begins = np.searchsorted(features.example, np.arange(len(cases)))
    for index, (case, own) in enumerate(zip(cases, by_case, strict=True)):
        expected = Transcription(case, tokenizer).candidates(own)
        found = range(ours.bounds[index], ours.bounds[index + 1])
        assert [
            (ours.item[one] - begins[index], ours.start[one], ours.end[one], ours.start_score[one], ours.end_score[one])
            for one in found
        ] == expected


def test_offsets_keep_what_the_alignment_loses(tokenizer: Tokenizer) -> None:
    """Letters of another case that occur earlier in the word: the alignment takes those, offsets do not."""
    case = SpanExample("0", "x", "Nana")
    tokens = tokenizer.tokens(tokenizer.encode_plain(["Nana"])[0])
    task = SpanAnswers()
    features = task.features([case], Encoding(tokenizer, LENGTH, has_types=True))
    scores = np.zeros((int(features.tokens.lengths[0]), 2), np.float32)
    last = int(features.first[0]) + len(tokens) - 1
    scores[last] = 9
    plain = Transcription(case, tokenizer).text(0, last, last)
    (answer,) = task.answers([case], features, [scores])
    letters = len(tokens[-1].removeprefix("##"))
    assert (answer["begin"], answer["end"]) == (4 - letters, 4)
    assert answer["answer"] == "Nana"[4 - letters :] != plain
    assert plain == "Nana"[:letters]


def test_no_answer_stands_at_the_place_of_its_score() -> None:
    found = [Span("a", 3, 0), Span("b", 2, 0), Span("c", 1, 0)]
    assert [one.text for one in with_no_answer(found, Span("", 2, 0), 3)] == ["a", "b", ""]
    assert [one.text for one in with_no_answer(found, Span("", 9, 0), 3)] == ["", "a", "b"]
    assert [one.text for one in with_no_answer(found, Span("", -9, 0), 3)] == ["a", "b", "c", ""]
    assert [one.text for one in with_no_answer([], Span("", -9, 0), 3)] == [""]
