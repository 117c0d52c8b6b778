"""Whole searches over synthetic scores and latencies, compared with brute force."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers_fit import FakeMeasurer, run_search, synthetic_scores, write_folders

from bertsmith.engines.torch_engine import TorchEngine
from bertsmith.models.build import build
from bertsmith.models.model import Model
from bertsmith.shrinking.fit import search as run
from bertsmith.shrinking.fit.result import summarise_search
from bertsmith.shrinking.fit.search import SearchOutcome, prepare
from bertsmith.shrinking.fit.settings import FitSettings
from bertsmith.tasks.data_source import hold_out
from bertsmith.text.tables import read_file

__all__ = ["synthetic_scores"]
Folders = tuple[Path, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_folders(tmp_path_factory.mktemp("fit"))


def truth(found: SearchOutcome, measurer: FakeMeasurer) -> list[tuple[float, float, str]]:
    """Return the synthetic score, latency and name of every candidate."""
    rows = []
    for one in found.candidates:
        latency = 1.0 + sum(0.1 + shape.heads / 4 + shape.neurons / 64 for shape in one.shapes)
        loss = 1.0 if one.mode.precision == "bfloat16" else 0.0
        rows.append((one.float32_score - loss, 1.1 * latency * measurer.factors[one.mode.precision], one.name))
    return rows


@pytest.mark.usefixtures("synthetic_scores")
@pytest.mark.parametrize("limit", [3.5, 5.0, 7.0, 20.0])
@pytest.mark.parametrize("subnets", ["even", "layers"])
def test_search_equals_brute_force(folders: Folders, tmp_path: Path, limit: float, subnets: str) -> None:
    measurer = FakeMeasurer()
    found = run_search(folders, tmp_path, measurer, budget={"latency_ms": limit}, search={"subnets": subnets})
    best = max(score for score, latency, _ in truth(found, measurer) if latency <= limit)
    assert found.best is not None
    assert found.best.measured is not None
    assert found.best.measured.score == pytest.approx(best)
    assert found.best.measured.latency_ms is not None
    assert found.best.measured.latency_ms <= limit
    assert found.best.mode.precision == "float32"
    assert found.folder is not None
    assert (found.folder / "artefact.json").is_file()
    assert len(found.best.timings) == 5


@pytest.mark.usefixtures("synthetic_scores")
def test_unequal_layers_score_higher_than_equal_ones(folders: Folders, tmp_path: Path) -> None:
    scores = {}
    for subnets in ("even", "layers"):
        found = run_search(folders, tmp_path / subnets, budget={"latency_ms": 5.0}, search={"subnets": subnets})
        assert found.best is not None
        scores[subnets] = found.best.float32_score
    assert scores["layers"] > scores["even"]


@pytest.mark.usefixtures("synthetic_scores")
def test_minimum_score_gives_the_fastest_candidate(folders: Folders, tmp_path: Path) -> None:
    measurer = FakeMeasurer()
    found = run_search(folders, tmp_path, measurer, budget={"at_least": 54.0})
    assert found.best is not None
    assert found.best.measured is not None
    fastest = min(latency for score, latency, _ in truth(found, measurer) if score >= 54.0)
    assert found.best.measured.latency_ms == pytest.approx(fastest)


@pytest.mark.usefixtures("synthetic_scores")
def test_unequal_layers_are_faster_at_a_minimum_score(folders: Folders, tmp_path: Path) -> None:
    latencies = {}
    for subnets in ("even", "layers"):
        found = run_search(folders, tmp_path / subnets, budget={"at_least": 54.0}, search={"subnets": subnets})
        assert found.best is not None
        assert found.best.float32_score >= 54.0
        latencies[subnets] = found.best.costs.latency_ms or 0.0
    assert latencies["layers"] < latencies["even"]


@pytest.mark.usefixtures("synthetic_scores")
def test_size_and_memory_are_limits(folders: Folders, tmp_path: Path) -> None:
    free = run_search(folders, tmp_path, budget={"size_mb": 1e6})
    assert free.best is not None
    assert free.best.measured is not None
    assert free.best is free.reference
    sizes = sorted(one.estimate.size_mb or 0 for one in free.candidates)
    tight = run_search(folders, tmp_path, budget={"size_mb": sizes[len(sizes) // 2]})
    assert tight.best is not None
    assert tight.best.measured is not None
    assert (tight.best.measured.size_mb or 0) <= sizes[len(sizes) // 2]
    small = run_search(folders, tmp_path, budget={"memory_mb": 104.0})
    assert small.best is not None
    assert small.best.measured is not None
    assert (small.best.measured.memory_mb or 0) <= 104.0


@pytest.mark.usefixtures("synthetic_scores")
def test_unreliable_candidates_are_not_chosen(folders: Folders, tmp_path: Path) -> None:
    """Every other process is a third slower; the chosen candidate meets the limit in the slow ones, too."""
    found = run_search(folders, tmp_path, FakeMeasurer(noise=(1.0, 1.34)), budget={"latency_ms": 6.0})
    assert found.best is not None
    latencies = [timing.latency["data"]["p95"] for timing in found.best.timings]
    assert max(latencies) <= 6.0
    assert max(latencies) / min(latencies) > 1.3
    assert any(one.holds is False for one in found.candidates)


@pytest.mark.usefixtures("synthetic_scores")
def test_nearest_candidate_is_returned_if_nothing_fits(folders: Folders, tmp_path: Path) -> None:
    measurer = FakeMeasurer()
    found = run_search(folders, tmp_path, measurer, budget={"latency_ms": 1.0, "size_mb": 1000.0})
    assert found.best is None
    assert found.folder is None
    smallest = min(latency for _, latency, _ in truth(found, measurer))
    assert found.nearest.costs.latency_ms == pytest.approx(smallest)
    outcome = summarise_search(found)
    assert not outcome.fits
    assert outcome.chosen is None
    assert [miss.name for miss in outcome.misses] == ["latency"]
    assert outcome.best.is_measured


@pytest.mark.usefixtures("synthetic_scores")
def test_measurements_are_reused_for_another_budget(folders: Folders, tmp_path: Path) -> None:
    first, again, other = FakeMeasurer(), FakeMeasurer(), FakeMeasurer()
    budget = {"latency_ms": 5.0}
    found = run_search(folders, tmp_path, first, budget=budget)
    same = run_search(folders, tmp_path, again, budget=budget)
    assert first.calls > 0
    assert again.calls == 0
    assert same.measurements == 0
    assert found.best is not None
    assert same.best is not None
    assert same.best.name == found.best.name
    wider = run_search(folders, tmp_path, other, budget={"latency_ms": 7.0})
    assert wider.best is not None
    assert 0 < other.calls < first.calls
    assert all(len({str(path.parent)}) == 1 for path in other.measured)


@pytest.mark.usefixtures("synthetic_scores")
def test_interrupted_search_resumes(folders: Folders, tmp_path: Path) -> None:
    """Wherever it is interrupted, earlier measurements are reused and the result is the same."""
    budget: dict[str, Any] = {"latency_ms": 5.0}
    whole = FakeMeasurer()
    straight = run_search(folders, tmp_path / "straight", whole, budget=budget)

    class Stopped(FakeMeasurer):
        def __call__(self, *arguments: Any) -> Any:
            if self.calls == self.last:
                raise KeyboardInterrupt
            return super().__call__(*arguments)

        last = 0

    for last in range(1, whole.calls, 5):
        out = tmp_path / str(last)
        stopped, rest = Stopped(), FakeMeasurer()
        stopped.last = last
        with pytest.raises(KeyboardInterrupt):
            run_search(folders, out, stopped, budget=budget)
        found = run_search(folders, out, rest, budget=budget)
        assert rest.calls == whole.calls - last
        assert found.best is not None
        assert straight.best is not None
        assert found.best.name == straight.best.name


@pytest.mark.usefixtures("synthetic_scores")
def test_outcome_lists_every_candidate(folders: Folders, tmp_path: Path) -> None:
    found = run_search(folders, tmp_path, budget={"latency_ms": 5.0})
    outcome = summarise_search(found)
    assert found.best is not None
    assert found.best.artefact_score is not None
    assert outcome.chosen is not None
    assert outcome.fits
    assert outcome.chosen.name == found.best.name
    assert outcome.score == outcome.chosen.score == found.best.artefact_score.score
    assert len(outcome.candidates) == len(found.candidates) == 24
    assert outcome.chosen.name in outcome.front
    assert any("bfloat16 is slower than float32 here in torch" in notice for notice in outcome.notices)
    assert any("not elastic" in notice for notice in outcome.notices)


@pytest.mark.usefixtures("synthetic_scores")
def test_busy_machine_gives_a_notice(folders: Folders, tmp_path: Path) -> None:
    class Busy(FakeMeasurer):
        def __call__(self, *arguments: Any) -> Any:
            return replace(super().__call__(*arguments), processor_share=0.4)

    budget = {"latency_ms": 5.0}
    calm = run_search(folders, tmp_path / "calm", budget=budget)
    assert not any("other programs" in notice for notice in calm.notices)
    busy = run_search(folders, tmp_path / "busy", Busy(), budget=budget)
    assert any("other programs used the processor for up to 60% of the time" in notice for notice in busy.notices)


@pytest.mark.usefixtures("synthetic_scores")
def test_failing_run_mode_is_skipped(folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an engine raises any exception, the search continues with the other run modes and adds a notice."""
    write = TorchEngine.write

    def fragile(self: TorchEngine, model: Any, folder: Path, precision: str, samples: Any = ()) -> None:
        if precision == "bfloat16":
            raise KeyError("no such operator")
        write(self, model, folder, precision, samples)  # type: ignore[arg-type]

    monkeypatch.setattr(TorchEngine, "write", fragile)
    found = run_search(folders, tmp_path, budget={"latency_ms": 5.0})
    assert found.best is not None
    assert {one.mode.precision for one in found.candidates} == {"float32"}
    assert "torch bfloat16 is skipped: 'no such operator'" in found.notices


@pytest.mark.usefixtures("synthetic_scores")
@pytest.mark.parametrize("vocabulary", ["keep", "auto", "cut"])
def test_vocabulary_is_cut_if_the_size_limit_requires_it(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocabulary: str
) -> None:
    def cut_model(model: Model, *_: Any) -> tuple[Model, str]:
        encoder = model.config.encoder.changed(vocabulary=model.config.encoder.vocabulary - 40)
        small = build(model.config.changed(encoder=encoder), seed=0)
        small.tokenizer = model.tokenizer
        return small, "cut"

    monkeypatch.setattr(run, "cut_model", cut_model)
    run_modes: dict[str, Any] = {"precisions": ["float32"], "vocabulary": vocabulary}
    roomy = run_search(folders, tmp_path, budget={"size_mb": 1000.0}, search=run_modes)
    assert ("cut" in roomy.notices) == (vocabulary == "cut")
    smallest = min(one.estimate.size_mb or 0.0 for one in roomy.candidates if one.mode.vocabulary == "whole")
    tight = run_search(folders, tmp_path, budget={"size_mb": 0.98 * smallest}, search=run_modes)
    if vocabulary == "keep":
        assert tight.best is None
        return
    assert tight.best is not None
    assert tight.best.mode.vocabulary == "cut"
    rows = {(row.vocabulary, row.network): row.parameters for row in summarise_search(tight).candidates}
    assert rows["cut", "whole network"] == rows["whole", "whole network"] - 40 * 16


@pytest.mark.usefixtures("synthetic_scores")
def test_cut_model_is_calibrated_with_its_own_tokenizer(folders: Folders, tmp_path: Path) -> None:
    """Token ids of the whole vocabulary would be out of range."""
    measurer = FakeMeasurer()
    measurer.factors = {"int8_static": 1.0}
    run_modes: dict[str, Any] = {"precisions": ["int8_static"], "vocabulary": "cut"}
    found = run_search(folders, tmp_path, measurer, budget={"size_mb": 1000.0}, search=run_modes)
    assert any(notice.startswith("the vocabulary is cut from") for notice in found.notices)
    assert {one.mode.vocabulary for one in found.candidates} == {"whole", "cut"}


@pytest.mark.parametrize("data", ["a folder", "the training file", "another file"])
def test_candidates_are_not_scored_on_training_rows(folders: Folders, tmp_path: Path, data: str) -> None:
    model, source = tmp_path / "model", tmp_path / "data"
    shutil.copytree(folders[0], model)
    source.mkdir()
    rows = (folders[1] / "train.jsonl").read_text(encoding="utf-8") * 3
    (source / "train.jsonl").write_text(rows, encoding="utf-8")
    named = str(source if data == "a folder" else source / "train.jsonl")
    learned_from = named if data != "another file" else str(tmp_path / "others.jsonl")
    (model / "recipe.toml").write_text(f"data = {json.dumps(learned_from)}\n", encoding="utf-8")
    inputs = prepare(FitSettings.parse({"model": str(model), "data": named, "budget": {"size_mb": 1.0}}))
    if data == "another file":
        assert len(inputs.table) == 24
        assert inputs.train is None
        return
    train, dev, notice = hold_out(inputs.record.task, read_file(source / "train.jsonl"), "there is no dev split")
    assert [dict(row) for row in inputs.table] == [dict(row) for row in dev]
    assert inputs.train is not None
    assert len(inputs.train) == len(train) < 24
    assert f"{notice}, as in fine-tuning" in inputs.notices
