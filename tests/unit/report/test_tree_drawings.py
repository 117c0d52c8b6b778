"""The part of the report on trees."""

from bertsmith.answers.trees import read_tree
from bertsmith.report.finetuning import build_task_report, render_finetuning_page
from bertsmith.report.trees import draw_tree
from bertsmith.tasks.parsing import Parsing
from bertsmith.text.rows import table_of

GOLD = "(S (NP (NNP Anna)) (VP (VBZ forges) (NP (JJ iron) (NNS gates))) (. .))"
WRONG = "(S (NP (XX Anna)) (VP (XX forges) (XX iron) (NP (XX gates))) (XX .))"


def test_page_shows_labels_errors_and_trees() -> None:
    task = Parsing()
    table = table_of([{"tree": GOLD}, {"tree": "(FRAG (NN <iron>) (NN gate))"}], "rows")
    task, examples = task.resolve(table), task.examples(table)
    answers = [{"answer": WRONG}, {"answer": "(FRAG (XX <iron>) (XX gate))"}]
    evaluation = task.evaluate(examples, answers)
    report = build_task_report(task, examples, answers, evaluation, title="run", kind="Evaluation", split="dev")
    assert report.parsing is not None
    assert report.parsing.wrong == report.error_count == 1
    assert dict(report.parsing.errors) == {"NP missing": 1, "NP added": 1}
    assert [row[:3] for row in report.parsing.classes] == [("NP", 2, 2), ("FRAG", 1, 1), ("S", 1, 1), ("VP", 1, 1)]
    assert report.baseline is not None
    assert report.baseline[0] == "right-branching trees"
    page = render_finetuning_page(report)
    assert page.count('<svg class="tree"') == 2
    assert page.count('class="constituent marked"') == 2
    assert "Trees with the most errors" in page
    assert "NP missing" in page


def test_drawing_escapes_words_and_grows_with_depth() -> None:
    flat, deep = (draw_tree(read_tree(text), {}, "tree") for text in ("(S (NN <a>))", "(S (NP (NP (NN <a>))))"))  # type: ignore[arg-type]
    assert "&lt;a&gt;" in flat
    heights = [float(drawn.split('height="')[1].split('"')[0]) for drawn in (flat, deep)]
    assert heights[1] == heights[0] + 80
