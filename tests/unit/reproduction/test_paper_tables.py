"""Every table of the papers is valid, its networks have the planned sizes, and its page is current."""

import importlib.util
from pathlib import Path

import pytest

from bertsmith.reproduction.plan import RunPlan
from bertsmith.reproduction.table import block_tables, read_table, table_names
from bertsmith.runs.reproduce_check import check_table, narrow

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    """Check all tables; return the parameters of every fresh network by run."""
    tables = [read_table(name) for name in table_names()]
    plan, found = RunPlan(tables), {}
    for table in tables:
        found |= check_table(table, plan)
    return found


def test_networks_differ_as_planned(sizes: dict[str, int]) -> None:
    def size(row: str) -> float:
        # the vocabulary is 30,522 without a corpus instead of 24,576: 129 parameters a token
        whole = next(count for label, count in sizes.items() if f"pretrained of {row}" in label)
        return (whole - 129 * (30522 - 24576)) / 1e6

    assert size("BERT (RoBERTa-ReImp)") == pytest.approx(12.67, abs=0.1)
    assert size("dynamic convolution") == pytest.approx(11.91, abs=0.1)
    assert size("kernel size 3") == pytest.approx(12.30, abs=0.1)
    assert size("ConvBERT, feed-forwards in 2 groups") == pytest.approx(9.19, abs=0.1)
    assert size("everything shared") == pytest.approx(3.99, abs=0.1)
    assert size("DeBERTa") == pytest.approx(14.3, abs=0.2)


def test_tables_share_runs_and_blocks_fit_into_28_minutes() -> None:
    tables = [read_table(name) for name in table_names()]
    together = len(RunPlan(tables).jobs)
    assert together < sum(len(RunPlan([table]).jobs) for table in tables) - 100
    for block in range(1, 7):
        plan = RunPlan([read_table(name) for name in block_tables(f"block-{block}")])
        assert sum(job.seconds for job in plan.jobs.values()) < 28 * 60


def test_rehearsal_is_narrow_and_short() -> None:
    plan = RunPlan([read_table("deberta-ablation")])
    for job in plan.jobs.values():
        settings = narrow(job, job.settings)
        if job.command == "pretrain":
            assert settings["run"]["steps"] == 2
            assert settings["model"]["overrides"]["width"] == 64
        elif job.command == "finetune":
            assert settings["run"]["epochs"] < 1


def test_example_of_the_documentation_is_the_tested_file() -> None:
    example = (ROOT / "docs" / "examples" / "corpora.toml").read_text(encoding="utf-8")
    assert example in (ROOT / "docs" / "how-to" / "reproduce.md").read_text(encoding="utf-8")


def test_pages_of_the_documentation_are_current() -> None:
    spec = importlib.util.spec_from_file_location("papers", ROOT / "docs" / "results" / "papers" / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    papers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(papers)
    folder = ROOT / "docs" / "results" / "papers"
    pages = papers.pages()
    assert {path.name for path in folder.glob("*.md")} == set(pages), "run python docs/results/papers/pages.py"
    for name, text in pages.items():
        assert (folder / name).read_text(encoding="utf-8") == text, "run python docs/results/papers/pages.py"
