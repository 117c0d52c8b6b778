"""Report page of a fine-tuned model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from helpers_pages import HOSTILE, Outline, check_page

from bertsmith.answers.sequences import Features
from bertsmith.models.config import ModelConfig
from bertsmith.models.heads import HeadConfig
from bertsmith.objectives.supervised import Supervised
from bertsmith.report.finetuning import (
    MAX_CELL_ROWS,
    MAX_ERRORS,
    MAX_LABELS,
    Confusion,
    SeedRun,
    TaskReport,
    build_task_report,
    cut_middle,
    format_answer,
    metric_name,
    most_confused,
    render_finetuning_page,
)
from bertsmith.report.page import shorten
from bertsmith.tasks.base import Encoding, Evaluation, Task
from bertsmith.tasks.classification import Classification, LabelledText
from bertsmith.text.rows import Table


class Anything(Task[tuple[str, Any]]):
    """A task of an unknown kind: examples are a text and a target."""

    kind: str = "anything"
    roles: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def find_columns(cls, row: Mapping[str, Any]) -> dict[str, str] | None:
        return None

    def resolve(self, train: Table) -> "Anything":
        return self

    def head(self, model: ModelConfig) -> HeadConfig:
        raise NotImplementedError

    def examples(self, table: Table, *, has_targets: bool = True) -> list[tuple[str, Any]]:
        return [(row["text"], row["target"]) for row in table]

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

    def evaluate(self, examples: Sequence[tuple[str, Any]], answers: Sequence[Mapping[str, Any]]) -> Evaluation:
        hits = np.array([one["answer"] == target for (_, target), one in zip(examples, answers, strict=True)])
        return Evaluation("hits", {"hits": 100 * float(hits.mean())}, lambda chosen: 100 * float(hits[chosen].mean()))

    def gold(self, example: tuple[str, Any]) -> Any:
        return example[1]

    def describe(self, example: tuple[str, Any]) -> str:
        return example[0]


class Amounts(Anything):
    """A task whose answers are numbers."""

    def error(self, example: tuple[str, Any], answer: Mapping[str, Any]) -> float:
        return abs(float(answer["answer"]) - float(example[1]))


LABELS = ("bad", HOSTILE, "good")


def classified(examples: int = 60, labels: tuple[str, ...] = LABELS, **fields: Any) -> TaskReport:
    """Return a report with every third answer wrong, and increasing confidence."""
    task = Classification(labels=labels)
    labelled = [LabelledText(f"text {number}", None, number % len(labels)) for number in range(examples)]
    answers = [
        {"answer": labels[(one.label + (number % 3 == 0)) % len(labels)], "score": 0.5 + number / (2 * examples)}
        for number, one in enumerate(labelled)
    ]
    evaluation = task.evaluate(labelled, answers)
    return build_task_report(
        task, labelled, answers, evaluation, title=HOSTILE, kind="Fine-tuning", split="dev", **fields
    )


def log_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"kind": "training", "step": step, "loss": 1 / step} for step in range(1, 40)]
    rows += [{"kind": "held_out", "step": step, "loss": 0.5, "score": 60.0 + step} for step in (13, 26, 39)]
    return rows


def full() -> TaskReport:
    return classified(
        interval=(50.0, 80.0),
        rows=log_rows(),
        runs=[SeedRun(60.0 + seed, seed, 1e-4) for seed in range(5)],
        notices=[HOSTILE],
        facts={HOSTILE: HOSTILE},
        settings=f"# {HOSTILE}",
    )


def page_of(report: TaskReport) -> Outline:
    has_data = report.confusion is not None
    outline = check_page(render_finetuning_page(report), scripts=2 if has_data else 0)
    assert outline.count("b") == 1  # the title of the run; all other texts are escaped
    return outline


def evaluated(task: Task[Any], examples: Sequence[Any], answers: Sequence[Mapping[str, Any]]) -> TaskReport:
    evaluation = task.evaluate(examples, answers)
    return build_task_report(task, examples, answers, evaluation, title="t", kind="Evaluation", split="dev")


def test_page_is_complete_and_escaped() -> None:
    outline = page_of(full())
    assert outline.visible.count(HOSTILE) >= 6  # title, notice, facts, settings, label
    assert "Accuracy 66.7 on 60 dev examples" in outline.visible
    assert "The best evaluation was after step 39." in outline.visible
    for heading in ("All runs", "Training curves", "Confusion matrix", "Most confident errors"):
        assert heading in outline.visible


def test_all_counts_of_the_confusion_matrix_are_shown() -> None:
    report = classified(labels=("a", "b", "c"))
    assert report.confusion is not None
    counts = report.confusion.counts
    assert counts.sum() == 60
    cells = [attributes for tag, attributes in page_of(report).elements if tag == "td" and attributes.get("title")]
    cells = [attributes for attributes in cells if "style" in attributes]
    counted = [str(attributes["title"]).partition(": ")[2].partition(" of ")[0] for attributes in cells]
    assert [int(count) for count in counted] == counts.flatten().tolist()
    assert [attributes["class"] == "correct" for attributes in cells] == np.eye(3, dtype=bool).flatten().tolist()
    shares = np.array([float(str(attributes["style"]).partition(":")[2]) for attributes in cells]).reshape(3, 3)
    np.testing.assert_allclose(shares.sum(1), 100, atol=0.2)


def test_most_confident_errors_come_first() -> None:
    report = classified(120)
    assert report.error_count == 40
    assert [one.text for one in report.errors] == [f"text {number}" for number in range(117, 57, -3)]
    assert report.errors[0].confidence == "98.8 %"
    assert len(report.errors) == MAX_ERRORS
    outline = page_of(classified(120, ("no", "yes")))
    assert outline.count("td", "target") == MAX_ERRORS
    assert "40 of 120 predictions are wrong; the 20 most confident are listed." in outline.visible


def test_baseline_is_the_most_frequent_label() -> None:
    task = Classification(labels=("no", "yes"), metric="f1")
    examples = [LabelledText("t", None, int(number < 6)) for number in range(8)]
    report = evaluated(task, examples, [{"answer": "yes", "score": 0.9}] * 8)
    assert report.baseline == ("always “yes”", pytest.approx(100 * 12 / 14))
    assert report.baseline[1] == pytest.approx(report.score)
    visible = page_of(report).visible
    assert "The model predicts yes everywhere: it has not learned the task." in visible
    assert "only 8 examples" in visible


def test_cells_list_their_most_confident_errors_and_least_confident_hits() -> None:
    confusion = classified(120, ("no", "yes")).confusion
    assert confusion is not None
    errors, hits = confusion.rows[0, 1], confusion.rows[0, 0]
    assert [one.before for one in errors] == [f"text {number}" for number in range(114, -1, -6)]
    assert [one.before for one in hits] == [f"text {number}" for number in range(120) if number % 3 and not number % 2][
        :MAX_CELL_ROWS
    ]
    assert errors[0].confidence == "97.5 %"


def test_labels_are_sorted_by_f1() -> None:
    outline = page_of(classified(labels=("a", "b", "c")))
    header = next(attributes for tag, attributes in outline.elements if tag == "th" and "aria-sort" in attributes)
    assert header["aria-sort"] == "ascending"
    values = [float(str(attributes["data-value"])) for _, attributes in outline.elements if "data-value" in attributes]
    f1 = values[::5]  # F1, precision, recall, examples, predictions
    assert len(f1) == 3
    assert f1 == sorted(f1)


def test_undefined_scores_and_diverged_training_are_alerts() -> None:
    rows = [{"kind": "training", "step": 3, "loss": float("nan")}]
    metrics = {"pearson": float("nan"), "mse": 1.0}
    outline = page_of(TaskReport("t", "Fine-tuning", "dev", 500, "pearson", metrics, rows=rows))
    assert outline.count("div", "alert") == 1
    assert "Pearson undefined on 500 dev examples" in outline.visible
    assert "Not a finite number: Pearson." in outline.visible
    assert "The loss is nan at step 3: training diverged." in outline.visible
    assert page_of(classified()).count("div", "alert") == 0


def test_score_within_the_baseline_is_flagged() -> None:
    warning = "the model may be no better"
    assert warning in page_of(classified(interval=(30.0, 80.0))).visible
    assert warning not in page_of(classified(interval=(50.0, 80.0))).visible


def test_labels_without_an_example_are_listed() -> None:
    assert "Dev has no examples of 2 of the labels: c, d." in page_of(classified(2, ("a", "b", "c", "d"))).visible


def test_many_labels_show_the_most_confused() -> None:
    counts = np.diag(np.full(50, 10))
    counts[40, 45] = 7
    counts[3, 49] = 2
    chosen = most_confused(counts)
    assert len(chosen) == MAX_LABELS
    assert {3, 40, 45, 49} <= set(chosen.tolist())
    assert list(chosen) == sorted(chosen)
    outline = page_of(classified(200, tuple(f"label {number}" for number in range(50))))
    assert outline.count("td", "correct") == MAX_LABELS
    assert "The 30 of 50 labels with the most errors are shown." in outline.visible


def test_numbers_are_drawn_as_points() -> None:
    targets = np.random.default_rng(0).uniform(0, 5, size=80)
    examples = [(f"text {number} {HOSTILE}", float(value)) for number, value in enumerate(targets)]
    answers: list[dict[str, Any]] = [{"answer": value + 0.1} for value in targets]
    answers[7]["answer"] += 3.0
    report = evaluated(Amounts(), examples, answers)
    assert len(report.values) == 80
    assert report.errors[0].text.startswith("text 7 ")
    assert report.errors[0].confidence == "3.1"
    outline = page_of(report)
    assert outline.count("circle") == 80
    assert "Largest errors" in outline.visible
    assert "confident" not in outline.visible


@pytest.mark.parametrize(
    ("target", "prediction", "formatted"),
    [
        (["B-PER", "O"], ["O", "O"], "B-PER, O"),
        ([], ["a"], "none"),
        ("", "Paris", "none"),
        (None, "x", "none"),
        (2, 0, "2"),
        ({"start": 1, "end": 4}, {"start": 0, "end": 4}, "start: 1, end: 4"),
    ],
)
def test_page_accepts_answers_of_any_type(target: Any, prediction: Any, formatted: str) -> None:
    report = evaluated(Anything(), [(HOSTILE, target), ("fine", target)], [{"answer": prediction}, {"answer": target}])
    assert report.confusion is None
    assert not report.values
    assert [one.target for one in report.errors] == [formatted]
    outline = page_of(report)
    assert HOSTILE in outline.visible
    assert "Hits 50.0 on 2 dev examples" in outline.visible


def test_long_texts_are_cut() -> None:
    report = evaluated(Anything(), [("word " * 4000, "x" * 999)], [{"answer": "y" * 999}])
    assert len(render_finetuning_page(report)) < 30_000
    assert cut_middle("a" * 30 + " | " + "b" * 30, 33) == "a" * 19 + " … " + "b" * 11
    assert cut_middle("abc", 3) == "abc"
    assert shorten("abcdef", 4) == "abc…"
    assert shorten("abcd", 4) == "abcd"


def test_page_without_log_or_errors() -> None:
    outline = page_of(TaskReport("t", "Evaluation", "test", 1, "exact_match", {"exact_match": 100.0}))
    assert "Exact match 100.0 on 1 test example" in outline.visible
    assert "Training curves" not in outline.visible


def test_runs_are_grouped_by_learning_rate() -> None:
    runs = [SeedRun(70.0 + seed, seed, rate) for rate in (1e-4, 3e-5) for seed in (0, 2)]
    outline = page_of(classified(runs=runs))
    assert outline.count("circle", "run") == 4
    assert "learning rate 0.0001: 71.00 ± 1.41" in outline.visible
    assert "72.00 (seed 2)" in outline.visible


@pytest.mark.parametrize(
    ("score", "interval", "positions"),
    [(80.0, (75.0, 85.0), ["75.0%;width:10.0%", "80.0%"]), (-10.0, None, ["45.0%"]), (250.0, None, [])],
    ids=["share", "correlation", "neither"],
)
def test_score_bar_positions(score: float, interval: tuple[float, float] | None, positions: list[str]) -> None:
    report = TaskReport("t", "Evaluation", "test", 500, "m", {"m": score}, interval=interval)
    styles = [
        str(attributes.get("style"))
        for tag, attributes in page_of(report).elements
        if tag == "span" and "style" in attributes
    ]
    assert styles == [f"left:{position}" for position in positions]


def test_answers_are_formatted_in_one_line() -> None:
    assert format_answer("a\n b") == "a b"
    assert format_answer(2.71828182) == "2.718"
    assert format_answer(0) == "0"
    assert format_answer(False) == "False"


@pytest.mark.parametrize(("metrics", "name"), [({"f1": 50.0}, "Macro F1"), ({"f1": 50.0, "recall": 50.0}, "F1")])
def test_f1_of_chunks_is_not_a_macro_average(metrics: dict[str, float], name: str) -> None:
    counts = np.ones((3, 3), dtype=np.int64)
    confusion = Confusion(("O", "B-X", "I-X"), counts)
    report = TaskReport("run", "Fine-tuning", "dev", 9, "f1", metrics, confusion=confusion)
    assert metric_name("f1", report) == name
    assert metric_name("f1_PER") == "F1 PER"
    assert metric_name("micro_f1") == "Micro F1"
