"""The page of a fine-tuning: well-formed, escaped, self-contained, and true to the answers it was given."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from helpers_pages import HOSTILE, Outline

from bertsmith.answers.sequences import Features
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.objectives.supervised import Supervised
from bertsmith.report.answers import WORST, TaskReport, as_text, shortened, task_report
from bertsmith.report.confusion import MOST_LABELS, class_table, cut, matrix_table, most_confused
from bertsmith.report.finetuning import finetuning_page, metric_name
from bertsmith.report.points import POINTS, interval_bar, scatter, strip
from bertsmith.tasks.base import Encoding, Judgement, Task
from bertsmith.tasks.classification import Classification, LabelledText
from bertsmith.tasks.metrics.classes import ClassCounts
from bertsmith.text.rows import Table


class Anything(Task[tuple[str, Any]]):
    """A task of no known kind: examples are a text and what is right."""

    kind: str = "anything"
    roles: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def recognised(cls, row: Mapping[str, Any]) -> dict[str, str] | None:
        return None

    def settled(self, train: Table) -> "Anything":
        return self

    def head(self, model: ModelConfig) -> HeadConfig:
        raise NotImplementedError

    def examples(self, table: Table, *, has_targets: bool = True) -> list[tuple[str, Any]]:
        return [(row["text"], row["right"]) for row in table]

    def texts(self, examples: Sequence[tuple[str, Any]]) -> Iterator[str]:
        return (text for text, _ in examples)

    def features(self, examples: Sequence[tuple[str, Any]], encoding: Encoding) -> Features:
        raise NotImplementedError

    def objective(self, examples: Sequence[tuple[str, Any]]) -> Supervised:
        raise NotImplementedError

    def answers(
        self, examples: Sequence[tuple[str, Any]], features: Features, outputs: Sequence[np.ndarray]
    ) -> list[dict[str, Any]]:
        raise NotImplementedError

    def judged(self, examples: Sequence[tuple[str, Any]], answers: Sequence[Mapping[str, Any]]) -> Judgement:
        hits = np.array([one["answer"] == right for (_, right), one in zip(examples, answers, strict=True)])
        return Judgement("hits", {"hits": 100 * float(hits.mean())}, lambda chosen: 100 * float(hits[chosen].mean()))

    def right(self, example: tuple[str, Any]) -> Any:
        return example[1]

    def shown(self, example: tuple[str, Any]) -> str:
        return example[0]


class Amounts(Anything):
    """A task whose answers are numbers."""

    def mistake(self, example: tuple[str, Any], answer: Mapping[str, Any]) -> float:
        return abs(float(answer["answer"]) - float(example[1]))


LABELS = ("bad", HOSTILE, "good")


def classified(examples: int = 60, labels: tuple[str, ...] = LABELS, **told: Any) -> TaskReport:
    """The report of answers of which every third is wrong, the later the surer."""
    task = Classification(labels=labels)
    given = [LabelledText(f"text {number}", None, number % len(labels)) for number in range(examples)]
    answers = [
        {"answer": labels[(one.label + (number % 3 == 0)) % len(labels)], "score": 0.5 + number / (2 * examples)}
        for number, one in enumerate(given)
    ]
    judgement = task.judged(given, answers)
    return task_report(task, given, answers, judgement, title=HOSTILE, kind="Fine-tuning", part="dev", **told)


def log_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"kind": "training", "step": step, "loss": 1 / step} for step in range(1, 40)]
    rows += [{"kind": "held_out", "step": step, "loss": 0.5, "score": 60.0 + step} for step in (13, 26, 39)]
    return rows


def full(**told: Any) -> TaskReport:
    return classified(
        interval=(50.0, 80.0),
        rows=log_rows(),
        runs=[{"seed": seed, "learning_rate": 1e-4, "score": 60.0 + seed} for seed in range(5)],
        notices=[HOSTILE],
        facts={HOSTILE: HOSTILE},
        settings=f"# {HOSTILE}",
        **told,
    )


def check_page(text: str) -> Outline:
    """The outline of a page that is whole, needs no script and names no address."""
    outline = Outline(text)
    assert outline.count("script") == outline.count("link") == outline.count("img") == outline.count("a") == 0
    assert outline.count("b") == 1  # the name in the masthead: nothing of a text became an element
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\son\w+=", re.sub(r"http-equiv", "", text))
    return outline


def test_page_is_whole_and_escaped() -> None:
    outline = check_page(finetuning_page(full()))
    assert outline.visible.count(HOSTILE) >= 6  # title, notice, facts, settings, label
    assert "Accuracy 66.7 on 60 dev examples" in outline.visible
    assert "The best evaluation is that after step 39." in outline.visible
    for heading in ("Over seeds", "How it learned", "What was taken for what", "The most confident mistakes"):
        assert heading in outline.visible


def test_all_counts_of_the_matrix_are_shown() -> None:
    report = classified()
    assert report.confusion is not None
    counts = report.confusion[1]
    assert counts.sum() == 60
    cell = r'<td class="(right|wrong)" style="--share:([\d.]+)" title="[^"]*">(\d+)<'
    shown = re.findall(cell, finetuning_page(report))
    assert [int(count) for _, _, count in shown] == counts.flatten().tolist()
    assert [kind == "right" for kind, _, _ in shown] == np.eye(3, dtype=bool).flatten().tolist()
    shares = np.array([float(share) for _, share, _ in shown]).reshape(3, 3)
    np.testing.assert_allclose(shares.sum(1), 100, atol=0.2)


def test_the_surest_mistakes_come_first() -> None:
    report = classified(120)
    assert report.wrong == 40
    assert [one.text for one in report.mistakes] == [f"text {number}" for number in range(117, 57, -3)]
    assert report.mistakes[0].sure == "98.8 %"
    assert len(report.mistakes) == WORST
    outline = check_page(finetuning_page(classified(120, ("no", "yes"))))
    assert outline.count("li", "panel") == WORST
    assert "40 of 120 answers are not right; here the 20 surest of them." in outline.visible


def test_the_baseline_is_the_commonest_label() -> None:
    task = Classification(labels=("no", "yes"), metric="f1")
    given = [LabelledText("t", None, int(number < 6)) for number in range(8)]
    answers = [{"answer": "yes", "score": 0.9}] * 8
    report = task_report(task, given, answers, task.judged(given, answers), title="t", kind="Evaluation", part="test")
    assert report.baseline == ("always “yes”", pytest.approx(100 * 12 / 14))
    assert report.baseline[1] == pytest.approx(report.figures["f1"])
    visible = check_page(finetuning_page(report)).visible
    assert "one and the same answer, yes, to every example" in visible
    assert "8 examples tell little" in visible


def test_a_figure_no_better_than_one_answer_is_said_to_be_so() -> None:
    told = "that the model does better than no model is not shown"
    assert told in Outline(finetuning_page(classified(interval=(30.0, 80.0)))).visible
    assert told not in Outline(finetuning_page(classified(interval=(50.0, 80.0)))).visible


def test_labels_without_an_example_are_named() -> None:
    assert (
        "Dev has no example of 2 of the labels: c, d."
        in Outline(finetuning_page(classified(2, ("a", "b", "c", "d")))).visible
    )


def test_many_labels_show_the_most_confused() -> None:
    counts = np.diag(np.full(50, 10))
    counts[40, 45] = 7
    counts[3, 49] = 2
    chosen = most_confused(counts)
    assert len(chosen) == MOST_LABELS
    assert {3, 40, 45, 49} <= set(chosen.tolist())
    assert list(chosen) == sorted(chosen)
    labels = tuple(f"label {number}" for number in range(50))
    outline = check_page(finetuning_page(classified(200, labels)))
    assert outline.count("td", "right") == MOST_LABELS
    assert "The 30 of 50 labels with most mistakes." in outline.visible


def test_shares_are_of_all_examples_of_a_label_even_where_columns_are_left_out() -> None:
    text = matrix_table(["a"], np.array([[3]]), np.array([12]))
    assert "3<small>25.0 %</small>" in text
    table = class_table(["a", "b"], ClassCounts.of_confusion(np.array([[3, 9], [0, 4]])), [0])
    assert Outline(table).visible.endswith("a123100.025.040.0")


def test_numbers_are_drawn_as_points() -> None:
    task = Amounts()
    generator = np.random.default_rng(0)
    right = generator.uniform(0, 5, size=80)
    given = [(f"text {number} {HOSTILE}", float(value)) for number, value in enumerate(right)]
    answers: list[dict[str, Any]] = [{"answer": value + 0.1} for value in right]
    answers[7]["answer"] += 3.0
    report = task_report(task, given, answers, task.judged(given, answers), title="t", kind="Evaluation", part="dev")
    assert len(report.values) == 80
    assert report.mistakes[0].text.startswith("text 7 ")
    assert report.mistakes[0].sure == "3.1"
    outline = check_page(finetuning_page(report))
    assert outline.count("circle") == 80
    assert "The answers farthest off" in outline.visible
    assert "surest" not in outline.visible


@pytest.mark.parametrize(
    ("right", "said", "shown"),
    [
        (["B-PER", "O"], ["O", "O"], "B-PER, O"),
        ([], ["a"], "none"),
        ("", "Paris", "none"),
        (None, "x", "none"),
        (2, 0, "2"),
        ({"start": 1, "end": 4}, {"start": 0, "end": 4}, "start: 1, end: 4"),
    ],
)
def test_answers_of_any_kind_open(right: Any, said: Any, shown: str) -> None:
    task = Anything()
    given = [(HOSTILE, right), ("fine", right)]
    answers = [{"answer": said}, {"answer": right}]
    report = task_report(task, given, answers, task.judged(given, answers), title="t", kind="Evaluation", part="dev")
    assert report.confusion is None
    assert not report.values
    assert [one.right for one in report.mistakes] == [shown]
    outline = check_page(finetuning_page(report))
    assert HOSTILE in outline.visible
    assert "Hits 50.0 on 2 dev examples" in outline.visible


def test_long_texts_are_cut() -> None:
    task = Anything()
    given = [("word " * 4000, "x" * 999)]
    answers = [{"answer": "y" * 999}]
    report = task_report(task, given, answers, task.judged(given, answers), title="t", kind="Evaluation", part="dev")
    assert len(finetuning_page(report)) < 30_000
    assert shortened("a" * 30 + " | " + "b" * 30, 33) == "a" * 19 + " … " + "b" * 11
    assert shortened("abc", 3) == "abc"
    assert cut("abcdef", 4) == "abc…"
    assert cut("abcd", 4) == "abcd"


def test_an_evaluation_without_log_or_mistakes_opens() -> None:
    report = TaskReport("t", "Evaluation", "test", 1, "exact_match", {"exact_match": 100.0})
    outline = check_page(finetuning_page(report))
    assert "Exact match 100.0 on 1 test example" in outline.visible
    assert "How it learned" not in outline.visible


def test_runs_stand_in_a_line_for_every_learning_rate() -> None:
    runs = [{"seed": seed, "learning_rate": rate, "score": 70.0 + seed} for rate in (1e-4, 3e-5) for seed in (0, 2)]
    outline = check_page(finetuning_page(classified(runs=runs)))
    assert outline.count("circle", "run") == 4
    assert "learning rate 0.0001: 71.00 ± 1.41" in outline.visible
    assert "72.00 (seed 2)" in outline.visible
    assert Outline(strip([("one", [50.0])], x_label="x")).count("circle") == 1


def test_interval_bar_places_what_it_is_given() -> None:
    text = interval_bar(80.0, (75.0, 85.0), ("always “a”", 60.0))
    assert 'class="band" style="left:75.0%;width:10.0%"' in text
    assert 'class="dot" style="left:80.0%"' in text
    assert 'class="base" style="left:60.0%"' in text
    assert 'class="dot" style="left:45.0%"' in interval_bar(-10.0, None)  # a correlation may be negative
    assert interval_bar(250.0, None) == ""  # no share: it has no scale


def test_scatter_stays_light_and_skips_what_is_no_number() -> None:
    many = [(float(number), float(number)) for number in range(POINTS + 500)]
    assert Outline(scatter(many)).count("circle") == POINTS
    assert Outline(scatter([(1.0, float("nan")), (1.0, 1.0)])).count("circle") == 1
    assert "No values yet" in scatter([])


def test_answers_read_in_one_line() -> None:
    assert as_text("a\n b") == "a b"
    assert as_text(2.71828182) == "2.718"
    assert as_text(0) == "0"
    assert as_text(False) == "False"


@pytest.mark.parametrize(("figures", "said"), [({"f1": 50.0}, "Macro F1"), ({"f1": 50.0, "recall": 50.0}, "F1")])
def test_f1_of_chunks_is_no_mean_over_labels(figures: dict[str, float], said: str) -> None:
    counts = np.ones((3, 3), dtype=np.int64)
    report = TaskReport("run", "Fine-tuning", "dev", 9, "f1", figures, confusion=(("O", "B-X", "I-X"), counts))
    assert metric_name("f1", report) == said
    assert metric_name("f1_PER") == "F1 PER"
    assert metric_name("micro_f1") == "Micro F1"
