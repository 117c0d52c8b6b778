"""finetune, evaluate and predict on trees, with an encoder and with an encoder-decoder."""

import json
from pathlib import Path

import pytest
from task_cases import TASK_CASES

import bertsmith
from bertsmith.answers.trees import leaves, read_tree
from bertsmith.errors import InputError
from bertsmith.runtime import load

TREES = [row["tree"] for row in TASK_CASES["parsing"].rows]
TEXT = "Bert Smith forges gates in New Rome"
CHART = ["model.overrides={width=32,layers=1,heads=2,max_length=32,dropout=0.0}", "tokenizer.vocabulary=300"]
CHART += ["sequences.length=32"]
PAIRS = ["model.overrides={width=64,layers=1,heads=2,neurons=64,max_length=64,dropout=0.0}", "tokenizer.vocabulary=300"]
PAIRS += ["sequences.length=64", "sequences.micro_tokens=256", "batch.tokens=512", "task.generation.beam=3"]
PAIRS += ["optimizer.learning_rate=2e-3", "schedule.kind=linear", "task.smoothing=0.0"]


def write_rows(folder: Path, **splits: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    for split, trees in splits.items():
        lines = [json.dumps({"id": index, "tree": tree}) for index, tree in enumerate(trees)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    unseen = "(SBARQ (WHNP (WP who)) (SQ (VBZ forges) (NP (NNS gates))))"
    return write_rows(tmp_path_factory.mktemp("trees"), train=TREES * 8, dev=[*TREES, unseen], test=TREES)


@pytest.fixture(scope="module")
def chart(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("chart") / "run"
    changes = [*CHART, "run.epochs=15", "optimizer.learning_rate=5e-3"]
    bertsmith.finetune("bert-tiny", data=str(data), out=out, set=changes, batch=8, device="cpu")
    return out


def test_encoder_learns_trees(chart: Path, data: Path, tmp_path: Path) -> None:
    result = bertsmith.evaluate(chart, data=str(data), split="test", out=tmp_path / "test", device="cpu")
    assert (result.metric, result.score) == ("f1", 100.0)
    assert result["exact_match"] == 100.0
    gold, ours = ((tmp_path / "test" / "official" / f"{name}.ptb").read_text() for name in ("gold", "predictions"))
    assert gold == ours
    assert gold.startswith("(TOP (S (NP (NNP Anna)) (VP (VBZ forges) (NP (NNS gates)))))\n")


def test_unseen_labels_of_dev_count_as_missed(chart: Path) -> None:
    result = json.loads((chart / "result.json").read_text())
    assert result["labels"]["SBARQ"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    assert 50 < result["score"] < 100
    assert 'class="constituent marked"' in (chart / "report.html").read_text()
    task = json.loads((chart / "task.json").read_text())["task"]
    assert task["kind"] == "parsing"
    assert "SBARQ" not in task["labels"]
    assert {"FRAG", "INTJ", "NP", "PP", "S", "VP"} == set(task["labels"])


def test_predictions_are_trees_of_the_words(chart: Path, data: Path, tmp_path: Path) -> None:
    result = bertsmith.predict(chart, text=[TEXT, "no (really)"], out=tmp_path / "texts", device="cpu")
    trees = [read_tree(tree) for tree in result["predictions"]]
    assert [leaf.word for leaf in leaves(trees[0])] == TEXT.split()
    assert [leaf.word for leaf in leaves(trees[1])] == ["no", "-LRB-", "really", "-RRB-"]
    bertsmith.predict(chart, data=str(data), split="test", out=tmp_path / "rows", device="cpu")
    rows = [json.loads(line) for line in (tmp_path / "rows" / "predictions.jsonl").read_text().splitlines()]
    assert [row["words"] for row in rows] == [row["tokens"] for row in TASK_CASES["parsing"].rows]
    assert rows[0]["constituents"][0] == {"label": "S", "begin": 0, "end": 3}


def test_onnx_folder_predicts_the_same_trees(chart: Path, tmp_path: Path) -> None:
    model = bertsmith.load(chart)
    bertsmith.export(model, tmp_path / "onnx", to="onnx", task=chart)
    assert (
        load(tmp_path / "onnx", threads=1).predict([TEXT, "no", ""])
        == bertsmith.predict(chart, text=[TEXT, "no", ""], out=tmp_path / "texts", device="cpu")["predictions"]
    )
    (tmp_path / "onnx" / "chart.npz").unlink()
    with pytest.raises(InputError, match=r"chart\.npz"):
        load(tmp_path / "onnx", threads=1)


def test_long_sentences_raise(data: Path, tmp_path: Path) -> None:
    long = "(S " + "(NN gate) " * 40 + ")"
    folder = write_rows(tmp_path / "data", train=[*TREES, long], dev=TREES)
    with pytest.raises(InputError, match=r"sequences\.length is 32: increase it or split the sentence"):
        bertsmith.finetune("bert-tiny", data=str(folder), out=tmp_path / "run", set=CHART, device="cpu")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tree": "(S (NN a)"}, "is not closed"),
        ({"tree": "(S (NN a))", "tokens": ["a", "b"]}, "2 words that are not the 1 words of 'tree'"),
        ({"tree": None}, "must be a string"),
    ],
)
def test_bad_rows_raise(row: dict, message: str, tmp_path: Path) -> None:
    rows = [{"tree": TREES[0]}, {"tree": TREES[1]}, row]
    with pytest.raises(InputError, match=message):
        bertsmith.finetune("bert-tiny", train=rows, dev=rows[:2], set=CHART, device="cpu", out=tmp_path / "run")


@pytest.fixture(scope="module")
def pairs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pairs") / "run"
    changes = [*PAIRS, "run.steps=120"]
    bertsmith.finetune("transformer-tiny", data=str(data), out=out, set=changes, device="cpu")
    return out


def test_encoder_decoder_learns_trees(pairs: Path, data: Path, tmp_path: Path) -> None:
    result = bertsmith.evaluate(pairs, data=str(data), split="test", out=tmp_path / "test", device="cpu")
    assert result.score == 100.0
    assert result["repaired"] == 0.0
    assert result["accuracy"] > 0.95
    task = json.loads((pairs / "task.json").read_text())["task"]
    assert (task["kind"], task["generation"]["beam"], task["generation"]["extra_length"]) == ("parsing", 3, 300)
    (tree,) = bertsmith.predict(pairs, text=[TEXT], out=tmp_path / "text", beam=2, device="cpu")["predictions"]
    assert [leaf.word for leaf in leaves(read_tree(tree))] == TEXT.split()


@pytest.mark.parametrize(("is_constrained", "leaf_symbols"), [(True, "tags"), (True, "words"), (False, "XX")])
def test_search_writes_trees_only_if_constrained(
    is_constrained: bool, leaf_symbols: str, data: Path, tmp_path: Path
) -> None:
    """A model that has learned nothing writes trees if the search admits nothing else, and is repaired otherwise."""
    changes = ["run.steps=1", f"task.leaves={leaf_symbols}", f"task.is_constrained={str(is_constrained).lower()}"]
    changes += ["model.overrides.max_length=256"]  # room for all constituents that the search may open
    result = bertsmith.finetune(
        "transformer-tiny", data=str(data), out=tmp_path / "run", set=[*PAIRS, *changes], device="cpu"
    )
    assert result["repaired"] == (0.0 if is_constrained else 100.0)
    rows = [json.loads(line) for line in (tmp_path / "run" / "dev.predictions.jsonl").read_text().splitlines()]
    assert [len(list(leaves(read_tree(row["answer"])))) for row in rows] == [3, 1, 7, 2, 3]


def test_models_without_tree_symbols_are_refused(data: Path, tmp_path: Path, pairs_folder: Path) -> None:
    run = tmp_path / "translation"
    changes = [one for one in PAIRS if not one.startswith(("task", "schedule"))] + ["run.steps=1"]
    bertsmith.finetune("transformer-tiny", data=str(pairs_folder), out=run, set=changes, device="cpu")
    with pytest.raises(InputError, match="a symbol of trees"):
        bertsmith.finetune(run, data=str(data), out=tmp_path / "run", set=["run.steps=1"], device="cpu")


def test_defaults_depend_on_the_model(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bertsmith.finetune("bert-tiny", data=str(data), explain=True)
    printed = capsys.readouterr().out
    assert "epochs = 20.0" in printed
    assert "length = 512" in printed
    bertsmith.finetune("transformer-tiny", data=str(data), explain=True)
    printed = capsys.readouterr().out
    assert "beam = 21" in printed
    assert "defaults from             the Transformer's paper" in printed
