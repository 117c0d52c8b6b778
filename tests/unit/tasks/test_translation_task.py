"""BLEU from the statistics of sentences: equal to sacrebleu on any subset, with a bootstrap interval."""

import numpy as np
import pytest

from bertsmith.answers.texts import TextExample
from bertsmith.tasks.metrics.base import confidence_interval
from bertsmith.tasks.translation import Translation

sacrebleu = pytest.importorskip("sacrebleu")

REFERENCES = [
    "the smith forges a long iron blade",
    "cold water, hot iron!",
    "one two three four five",
    "a",
    "no match at all",
]
HYPOTHESES = [
    "the smith forges the long iron blade",
    "cold water , hot iron!",
    "one two three",
    "",
    "something else here",
]


def evaluation(task: Translation) -> object:
    examples = [TextExample(text="", pair=reference) for reference in REFERENCES]
    return task.evaluate(examples, [{"answer": hypothesis} for hypothesis in HYPOTHESES])


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [0], [1, 1, 2, 0], [4], [3]])
def test_bleu_of_a_subset_is_that_of_sacrebleu(rows: list[int]) -> None:
    measured = evaluation(Translation())
    expected = sacrebleu.corpus_bleu([HYPOTHESES[row] for row in rows], [[REFERENCES[row] for row in rows]])
    assert measured.measure(np.array(rows)) == pytest.approx(expected.score)
    if len(rows) == len(REFERENCES):
        assert measured.score == pytest.approx(expected.score)
        assert "tok:13a" in measured.details["signature"]


def test_main_metric_can_be_exact_match() -> None:
    measured = evaluation(Translation(metric="exact_match"))
    assert measured.metric == "exact_match"
    assert measured.measure(np.array([0, 1])) == 0
    interval = confidence_interval(evaluation(Translation()), len(REFERENCES), resamples=50)
    assert interval is not None
    assert interval[0] < interval[1]
