"""`bertsmith compare`: recipes trained with equal budgets, resumed and summarised."""

import json
import shutil
from pathlib import Path

import pytest

import bertsmith
from bertsmith import InputError

MASKED = """
[model]
preset = "bert-tiny"
overrides = { width = 32, heads = 2, layers = 1, max_length = 32, dropout = 0.0 }
[sequences]
length = 32
micro_tokens = 256
[batch]
tokens = 256
[optimizer]
learning_rate = 5e-3
[run]
log_every = 3
evaluate_batches = 1
"""
WIDER = MASKED.replace("width = 32", "width = 64").replace("tokens = 256", "tokens = 512", 2)
REPLACED = MASKED.replace("bert-tiny", "electra-small").replace("dropout", "embedding_width = 16, dropout")
REPLACED += '[objective]\nkind = "replaced_tokens"\n[generator]\nwidth = 0.5\n'


@pytest.fixture
def recipes(tmp_path: Path) -> list[str]:
    texts = {"masked": MASKED, "wider": WIDER, "replaced": REPLACED}
    for name, text in texts.items():
        (tmp_path / f"{name}.toml").write_text(text)
    return [str(tmp_path / f"{name}.toml") for name in texts]


def compare(recipes: list[str], corpus: Path, out: Path, **changes: object) -> dict:
    given = {"data": corpus, "out": out, "budget": "3k tokens", "evaluations": 3, "device": "cpu", **changes}
    return bertsmith.compare(recipes, **given)


@pytest.mark.slow
def test_recipes_get_equal_tokens_and_are_resumed(recipes: list[str], corpus_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    metrics = compare(recipes, corpus_folder, out, seeds=2)
    rows = metrics["recipes"]
    assert set(rows) == {"masked", "wider", "replaced"}
    steps = json.loads((out / "comparison.json").read_text())["steps"]
    assert steps == {"masked": 11, "wider": 5, "replaced": 11}
    for row in rows.values():
        assert row["seeds"] == 2
        assert 2000 < row["tokens"] <= 3000
        assert row["token_loss"]["spread"] > 0
    assert "replaced_recall" in rows["replaced"]
    assert "replaced_recall" not in rows["masked"]
    assert rows["wider"]["flops"] > 2 * rows["masked"]["flops"]
    page = (out / "report.html").read_text()
    assert "Token loss by training operations" in page
    assert "small generator" in page
    curve = metrics["curves"]["masked"][0]
    assert [row["step"] for row in curve] == [3, 6, 9, 11]
    assert curve[0]["tokens"] < curve[-1]["tokens"] == pytest.approx(rows["masked"]["tokens"], rel=0.05)

    # one run is lost and one interrupted: only these are repeated, with the same result
    times = {path: path.stat().st_mtime_ns for path in out.rglob("model.safetensors") if "checkpoints" not in str(path)}
    shutil.rmtree(out / "masked" / "seed-1")
    (out / "wider" / "seed-0" / "result.json").unlink()
    again = compare(recipes, corpus_folder, out, seeds=2, resume=True)
    assert {name: row["token_loss"] for name, row in again["recipes"].items()} == {
        name: row["token_loss"] for name, row in rows.items()
    }
    untouched = out / "replaced" / "seed-1" / "model.safetensors"
    assert untouched.stat().st_mtime_ns == times[untouched]
    with pytest.raises(InputError, match=r"seeds is 3, but the comparison in .* was started with 2"):
        compare(recipes, corpus_folder, out, seeds=3, resume=True)


def test_larger_network_gets_fewer_steps_for_equal_flops(
    recipes: list[str], corpus_folder: Path, tmp_path: Path
) -> None:
    metrics = compare(recipes[:2], corpus_folder, tmp_path / "out", budget="1e9 flops")
    masked, wider = (metrics["recipes"][name] for name in ("masked", "wider"))
    assert masked["steps"] > 2 * wider["steps"]
    assert masked["flops"] == pytest.approx(wider["flops"], rel=0.2)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "has the lowest loss" in page
    assert "--seeds 3" in page


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": "soon"}, "the budget is 'soon'"),
        ({"seeds": 0}, "--seeds is 0; allowed: 1 or more"),
        ({"evaluations": 0}, "--evaluations is 0"),
        ({"data": None}, "data is not given"),
        ({"set": ["model.overrides.max_length=16"]}, "sequences.length is 32; the model takes at most 16"),
    ],
)
def test_invalid_comparison_raises_and_writes_nothing(
    changes: dict, message: str, recipes: list[str], corpus_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        compare(recipes, corpus_folder, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_several_processes_raise(
    recipes: list[str], corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="compare runs in 1 process, but 2 were started"):
        compare(recipes, corpus_folder, tmp_path / "out")


def test_recipe_names_must_differ(recipes: list[str], corpus_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least two recipes are required"):
        compare(recipes[:1], corpus_folder, tmp_path / "out")
    with pytest.raises(InputError, match="two recipes have the name 'masked'"):
        compare([recipes[0], recipes[0]], corpus_folder, tmp_path / "out")


def test_each_run_prints_one_line(
    recipes: list[str], corpus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(recipes[:2], corpus_folder, tmp_path / "out")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["masked, seed 0: 11 steps", "wider, seed 0: 5 steps"]
    assert sum("written to" in line for line in lines) == 1


def test_corpus_without_held_out_split_raises(recipes: list[str], texts: Path, tmp_path: Path) -> None:
    bertsmith.tokenizer([texts], out=tmp_path / "tokenizer", vocabulary=160)
    bertsmith.corpus([texts], tokenizer=tmp_path / "tokenizer", out=tmp_path / "corpus", held_out=0.0, workers=1)
    with pytest.raises(InputError, match="has no held-out split"):
        compare(recipes, tmp_path / "corpus", tmp_path / "out")
    assert not (tmp_path / "out").exists()
