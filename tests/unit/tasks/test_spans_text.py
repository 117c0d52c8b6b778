"""Answers decoded from scores equal a plain implementation of BERT's rules on thousands of random cases.

BERT splits at spaces and maps tokens to the passage by aligning joined tokens with the original words; Bertsmith uses
character offsets. With case, accents or unknown characters the alignment can fail or find another position, so those
tests compare the selected tokens instead of texts.
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
LENGTH, STRIDE, QUESTION, N_BEST, MAX_ANSWER = 28, 6, 4, 7, 5


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn_tokenizer([" ".join(PLAIN[::step]) for step in (1, 2, 3)] * 4, "wordpiece", 62, progress=False)


def _cases(words: list[str], spaces: list[str], count: int) -> list[SpanExample]:
    rng = random.Random(3)
    examples = []
    for index in range(count):
        context = "".join(rng.choice(words) + rng.choice(spaces) for _ in range(rng.randint(0, 22)))
        question = " ".join(rng.choice(words) for _ in range(rng.randint(1, 5)))
        examples.append(SpanExample(str(index), question, context))
    return examples


def _scores(features, *, digits: int) -> list[np.ndarray]:
    """Random scores, rounded to produce ties."""
    rng = np.random.default_rng(4)
    return [rng.normal(size=(length, 2)).round(digits).astype(np.float32) for length in features.tokens.lengths]


class PlainDecoder:
    """BERT's decoding rules for one question, in plain loops."""

    def __init__(self, example: SpanExample, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        for space in "\t\r\n\u202f":
            example = SpanExample(example.id, example.question, example.context.replace(space, " "))
        self.words = example.context.split(" ")
        self.words = [word for word in self.words if word]
        self.tokens: list[str] = []
        self.word_of: list[int] = []
        for index, word in enumerate(self.words):
            for token in tokenizer.tokens(tokenizer.encode_plain([word])[0]):
                self.tokens.append(token)
                self.word_of.append(index)
        question_length = len(tokenizer.encode_plain([example.question])[0][:QUESTION])
        self.first = question_length + 2
        room = LENGTH - question_length - 3
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
        """Window, start, end and their scores, in descending order of the sum."""
        spans = []
        for window, (start, length) in enumerate(self.windows):
            logits = scores[window].tolist()
            firsts = sorted(range(len(logits)), key=lambda position: logits[position][0], reverse=True)[:N_BEST]
            lasts = sorted(range(len(logits)), key=lambda position: logits[position][1], reverse=True)[:N_BEST]
            for first in firsts:
                for last in lasts:
                    if not self.first <= first < self.first + length or not self.first <= last < self.first + length:
                        continue
                    if not self.is_max_context(window, first - self.first + start):
                        continue
                    if last < first or last - first + 1 > MAX_ANSWER:
                        continue
                    spans.append((window, first, last, logits[first][0], logits[last][1]))
        return sorted(spans, key=lambda span: span[3] + span[4], reverse=True)

    def text(self, window: int, first: int, last: int) -> str:
        shift = self.windows[window][0] - self.first
        tokens = self.tokens[first + shift : last + shift + 1]
        joined = " ".join(" ".join(tokens).replace(" ##", "").replace("##", "").split())
        original = " ".join(self.words[self.word_of[first + shift] : self.word_of[last + shift] + 1])
        return self.align(joined, original)

    def align(self, joined: str, original: str) -> str:
        normal = self.tokenizer.normalizer.normalize_str(original)
        tokenised = " ".join(word for word, _ in BertPreTokenizer().pre_tokenize_str(normal))
        begin = tokenised.find(joined)
        if begin < 0:
            return original
        positions = [position for position, character in enumerate(tokenised) if character != " "]
        originals = [position for position, character in enumerate(original) if character != " "]
        if len(positions) != len(originals):
            return original
        return original[originals[positions.index(begin)] : originals[positions.index(begin + len(joined) - 1)] + 1]

    def n_best(self, scores: list[np.ndarray], *, has_null: bool) -> list[tuple[str, float, float]]:
        entries = [(self.text(*span[:3]), *span[3:]) for span in self.candidates(scores)]
        null = min((tuple(logits[0].tolist()) for logits in scores), key=sum)
        if has_null:
            entries = sorted([*entries, ("", *null)], key=lambda entry: entry[1] + entry[2], reverse=True)
        best: list[tuple[str, float, float]] = []
        for entry in entries:
            if len(best) == N_BEST:
                break
            if entry[0] not in [text for text, _, _ in best]:
                best.append(entry)
        if has_null and "" not in [text for text, _, _ in best]:
            best.append(("", *null))
        return best


def _score_cases(cases, tokenizer, *, has_null: bool, digits: int = 1):
    task = SpanAnswers(
        may_be_unanswered=has_null,
        stride=STRIDE,
        question_length=QUESTION,
        n_best=N_BEST,
        max_answer_length=MAX_ANSWER,
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
def test_n_best_and_answers_equal_the_plain_decoder(tokenizer: Tokenizer, has_null: bool, digits: int) -> None:
    cases = _cases(PLAIN, [" "], 1500)
    task, features, scores, by_case = _score_cases(cases, tokenizer, has_null=has_null, digits=digits)
    answers = task.answers(cases, features, scores)
    windows = no_answers = 0
    for case, logits, answer in zip(cases, by_case, answers, strict=True):
        plain = PlainDecoder(case, tokenizer)
        windows += len(plain.windows) > 1
        expected = plain.n_best(logits, has_null=has_null)
        texts = [entry for entry in expected if entry[0]]
        ours = [(span["text"], span["start_logit"], span["end_logit"]) for span in answer["n_best"]]
        null = min(float(first[0].astype(np.float64).sum()) for first in logits)
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
        assert [span["probability"] for span in answer["n_best"]] == pytest.approx((sums / sums.sum()).tolist())
        if not is_null:
            assert case.context[answer["begin"] : answer["end"]] == answer["answer"]
    assert windows > 500
    assert no_answers > 0


def test_selected_tokens_equal_the_plain_decoder_in_any_script(tokenizer: Tokenizer) -> None:
    cases = _cases(VARIED, [" ", "  ", "\n", "\t", "\u202f"], 1500)
    _, features, scores, by_case = _score_cases(cases, tokenizer, has_null=False)
    ours = best_spans(features, scores, N_BEST, MAX_ANSWER)
    begins = np.searchsorted(features.example, np.arange(len(cases)))
    for index, (case, logits) in enumerate(zip(cases, by_case, strict=True)):
        expected = PlainDecoder(case, tokenizer).candidates(logits)
        spans = range(ours.bounds[index], ours.bounds[index + 1])
        assert [
            (ours.item[i] - begins[index], ours.start[i], ours.end[i], ours.start_score[i], ours.end_score[i])
            for i in spans
        ] == expected


def test_offsets_are_exact_where_the_alignment_fails(tokenizer: Tokenizer) -> None:
    """The alignment selects an earlier occurrence of the same letters in the word; offsets do not."""
    case = SpanExample("0", "x", "Nana")
    tokens = tokenizer.tokens(tokenizer.encode_plain(["Nana"])[0])
    task = SpanAnswers()
    features = task.features([case], Encoding(tokenizer, LENGTH, has_types=True))
    scores = np.zeros((int(features.tokens.lengths[0]), 2), np.float32)
    last = int(features.first[0]) + len(tokens) - 1
    scores[last] = 9
    plain = PlainDecoder(case, tokenizer).text(0, last, last)
    (answer,) = task.answers([case], features, [scores])
    letters = len(tokens[-1].removeprefix("##"))
    assert (answer["begin"], answer["end"]) == (4 - letters, 4)
    assert answer["answer"] == "Nana"[4 - letters :] != plain
    assert plain == "Nana"[:letters]


def test_no_answer_is_ranked_by_its_score() -> None:
    spans = [Span("a", 3, 0), Span("b", 2, 0), Span("c", 1, 0)]
    assert [span.text for span in with_no_answer(spans, Span("", 2, 0), 3)] == ["a", "b", ""]
    assert [span.text for span in with_no_answer(spans, Span("", 9, 0), 3)] == ["", "a", "b"]
    assert [span.text for span in with_no_answer(spans, Span("", -9, 0), 3)] == ["a", "b", "c", ""]
    assert [span.text for span in with_no_answer([], Span("", -9, 0), 3)] == [""]
