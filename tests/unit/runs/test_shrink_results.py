"""Summary of an elastic training: the grid in the terminal, and report.html with the same numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers_finetune import tune, write_task

import bertsmith
from bertsmith.runs.shrink_results import fit_command, load_line, print_elastic
from bertsmith.shrinking.elastic_metadata import ElasticMetadata


def record(widths: int = 4, depths: int = 3, **changes: Any) -> ElasticMetadata:
    shares = [[(number + 1) / count for number in range(count)] for count in (widths, depths)]
    grid = [
        {"width": width, "depth": depth, "score": 100 * width * depth, "parameters": 4_000_000}
        | {"flops": 2.5e9, "latency_ms": 10 * width * depth}
        for depth in shares[1]
        for width in shares[0]
    ]
    plain = {"metric": "accuracy", "teacher_score": 100.0, "depth_rule": "keep_last", "length": 17, "grid": grid}
    plain |= {"head_scores": [[1.0, 0.5]], "head_order": [[0, 1]], "neuron_order": [[0]]}
    return ElasticMetadata.parse({**plain, **changes}, source="test")


@pytest.mark.parametrize("sizes", [(4, 3), (1, 1), (4, 1), (1, 3), (5, 6)])
def test_grid_fits_the_terminal(
    sizes: tuple[int, int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    of = record(*sizes)
    print_elastic(of, Path("out"), "data")
    *lines, last = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    shown = "\n".join(lines)
    for member in of.grid:
        assert f"{member.score:.2f}" in shown
        assert f"{member.score / 100:.1%}" in shown
    assert "…" not in shown
    assert last.endswith("bertsmith fit out --data data --latency-ms 5 --out out-fit")
    assert ("smallest: 4.00 M parameters, 2.5 GFLOP" in shown) == (len(of.grid) > 1)


def test_score_of_zero_has_no_share(capsys: pytest.CaptureFixture[str]) -> None:
    print_elastic(record(teacher_score=0.0), Path("out"))
    assert "%" not in capsys.readouterr().out


def test_suggested_commands_can_be_pasted() -> None:
    strange = Path('a "b" c')
    assert fit_command(record(), strange).startswith("bertsmith fit 'a \"b\" c' --data DATA --latency-ms 5 ")
    slow = [{**member.plain(), "latency_ms": 6543.0} for member in record().grid]
    assert " --latency-ms 3300 " in fit_command(record(grid=slow), strange)
    line = load_line(record(depth_rule="drop_last"), strange)
    assert line == ('bertsmith.load("a \\"b\\" c", subnet=bertsmith.Subnet(width=1, depth=1, depth_rule="drop_last"))')
    compile(line, "line", "eval")


def test_run_writes_a_report_with_its_scores(tmp_path: Path) -> None:
    data = write_task(tmp_path / "data")
    tune(data, tmp_path / "tuned", "model.overrides={width=16,layers=2,heads=2,max_length=32}", "run.epochs=1")
    out = tmp_path / "elastic"
    metrics = bertsmith.shrink(
        tmp_path / "tuned", data=str(data), out=out, widths=[1, 0.5], depths=[1, 0.5], epochs=1, device="cpu"
    )
    assert metrics.to_json() == json.loads((out / "result.json").read_text(encoding="utf-8"))
    page = (out / "report.html").read_text(encoding="utf-8")
    assert f"Accuracy {metrics['score']:.2f} on average over 4 sizes of one model" in page
    assert '<div class="alert" role="alert">\n<p>degenerate: ' in page  # the tuned model always answers the same
    for member in metrics["grid"]:
        assert f"<b>{member['score']:.2f}</b>" in page
        assert f"{member['parameters']:,} parameters, {member['flops']:,.0f} FLOP" in page
    for part in ("Training curves", "Surviving heads", "mean entropy", "bertsmith fit", "bertsmith.load("):
        assert part in page
