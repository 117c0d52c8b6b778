"""Report page of recipes trained with an equal budget."""

from typing import Any

import pytest
from helpers_pages import HOSTILE, check_page

from bertsmith.report.charts import LABEL_HEIGHT
from bertsmith.report.comparison import ComparedRun, read_run, render_comparison_page, summarize

COSTS = {"training_flops": 1.0, "parameters": 1, "steps": 1, "tokens": 1, "seconds": 1.0, "tokens_per_second": 1.0}


def run(loss: float = 1.0, *, seed: int = 0, term: str = "masked_tokens", **metrics: float) -> ComparedRun:
    row = {"step": 1, "tokens": 1.0, "flops": 1.0, "seconds": 1.0, "token_loss": loss, "token_accuracy": 0.5, **metrics}
    return ComparedRun(seed, {"token_term": term, **COSTS}, [row])


def test_costs_are_interpolated_between_log_rows() -> None:
    training = [
        {"kind": "training", "step": step, "tokens": 100 * step, "seconds": step / 10, "flops": flops}
        for step, flops in ((10, 2000.0), (20, 6000.0))  # a later phase may cost more per token
    ]
    held_out: list[dict[str, Any]] = [
        {"kind": "held_out", "step": step, "masked_tokens_loss": 5.0, "masked_tokens_accuracy": 0.1}
        for step in (5, 15, 20)
    ]
    record = read_run(0, {"token_term": "masked_tokens"}, [*training, *held_out])
    assert [row["tokens"] for row in record.held_out] == [500, 1500, 2000]
    assert [row["flops"] for row in record.held_out] == [1000, 4000, 6000]


@pytest.mark.parametrize(("other", "is_close"), [(1.2, True), (2.0, False)])
def test_headline_mentions_a_runner_up_within_the_standard_deviation(other: float, is_close: bool) -> None:
    runs = {
        name: [run(loss + 0.4 * seed, seed=seed) for seed in (0, 1)]
        for name, loss in (("first", 1.0), ("other", other))
    }
    text = check_page(render_comparison_page("x", runs, {}, None)).visible
    assert "first has the lowest loss, 1.200 nats per token" in text
    assert ("but other is within one standard deviation of the seeds" in text) == is_close
    assert "1.200 ± 0.283" in text


def test_bands_and_labels_of_seeds_and_one_chart_at_a_time() -> None:
    first, second = ([run(loss, seed=0), run(loss + 0.2, seed=1)] for loss in (1.0, 1.01))
    for one in (*first, *second):
        one.held_out.append({**one.held_out[0], "tokens": 2.0, "flops": 2.0, "seconds": 2.0, "token_loss": 0.5})
    outline = check_page(render_comparison_page("x", {"first": first, "other": second}, {}, None))
    assert outline.count("path", "band") == 2 * 3
    assert outline.count("text", "end") == 2 * 3
    heights = [float(str(attributes["y"])) for tag, attributes in outline.elements if attributes.get("dx") == "9"]
    assert abs(heights[0] - heights[1]) >= LABEL_HEIGHT  # equal losses, but names that do not overlap
    switches = [attributes for tag, attributes in outline.elements if tag == "input"]
    assert ["checked" in one for one in switches] == [True, False, False]
    single = {"first": first[:1], "other": second[:1]}
    assert check_page(render_comparison_page("x", single, {}, None)).count("path", "band") == 0


def test_different_objectives_have_no_winner() -> None:
    runs = {term: [run(term=term)] for term in ("masked_tokens", "next_token")}
    text = check_page(render_comparison_page("x", runs, {}, None)).visible
    assert "2 recipes with an equal budget." in text
    assert "Compare such recipes on a task." in text


def test_recall_of_replaced_tokens_is_drawn() -> None:
    runs = {"bert": [run()], "electra": [run(term="generator", replaced_recall=0.25, replaced_precision=0.5)]}
    text = check_page(render_comparison_page("x", runs, {"budget": "1M tokens"}, 7.0)).visible
    for expected in ("Recall of replaced tokens", "25.0%", "unigram level 7.00", "1M tokens"):
        assert expected in text


def test_hostile_names_are_escaped() -> None:
    check_page(render_comparison_page(HOSTILE, {HOSTILE: [run()], "b": [run()]}, {HOSTILE: HOSTILE}, None))


def test_summary_is_json_ready() -> None:
    record = summarize({"b": [run()]})["b"].plain()
    assert record["token_loss"] == {"mean": 1.0, "spread": None}
    assert record["flops"] == 1.0
    assert (record["seeds"], record["tier"]) == (1, "custom")
