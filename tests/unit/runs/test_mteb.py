"""`bertsmith evaluate --mteb` on local stand-ins of MTEB's data sets, with MTEB's own tasks."""

import json
from pathlib import Path
from random import Random

import pytest

import bertsmith
import bertsmith.hf  # opens the exported folder in sentence-transformers
from bertsmith import InputError
from bertsmith.cli import main
from bertsmith.runs import mteb_tasks

WORDS = ["sea", "ship", "river", "house", "stone", "old", "new", "cat", "dog", "runs", "sleeps", "eats", "red", "blue"]
CARDS = {
    "format": ["configs:", "- config_name: default", "  data_files:", "  - {split: test, path: qrels.jsonl}"],
    "corpus": ["- config_name: corpus", "  data_files:", "  - {split: corpus, path: corpus.jsonl}"],
    "queries": ["- config_name: queries", "  data_files:", "  - {split: queries, path: queries.jsonl}"],
}


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Data sets of a similarity and a retrieval task under their hub names."""
    folder, draw = tmp_path / "data", Random(0)
    pairs = []
    for _ in range(40):
        first, same = draw.choices(WORDS, k=6), draw.randint(0, 6)
        second = [*first[:same], *draw.choices(WORDS, k=6 - same)]
        pairs.append({"sentence1": " ".join(first), "sentence2": " ".join(second), "score": 5 * same / 6})
    write(folder / "mteb" / "stsbenchmark-sts" / "test.jsonl", pairs)
    texts = [" ".join(draw.choices(WORDS, k=8)) for _ in range(30)]
    corpus = folder / "nfcorpus"  # the last part of the name is enough
    write(corpus / "corpus.jsonl", [{"_id": f"d{n}", "title": "", "text": text} for n, text in enumerate(texts)])
    write(corpus / "queries.jsonl", [{"_id": f"q{n}", "text": texts[n][:20]} for n in range(10)])
    write(corpus / "qrels.jsonl", [{"query-id": f"q{n}", "corpus-id": f"d{n}", "score": 1} for n in range(10)])
    (corpus / "README.md").write_text("\n".join(["---", *(line for card in CARDS.values() for line in card), "---"]))
    return folder


@pytest.mark.slow  # imports mteb and sentence-transformers
@pytest.mark.filterwarnings("ignore")  # MTEB's own warnings
def test_scores_are_those_of_sentence_transformers(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mteb = pytest.importorskip("mteb", reason="needs pip install 'bertsmith[mteb]'")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    names = ["STSBenchmark", "NFCorpus"]
    main(["evaluate", "small", "--mteb", *names, "--data", str(data), "--out", str(tmp_path / "out")])
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert list(result["tasks"]) == names
    assert result["tasks"]["NFCorpus"]["metric"] == "ndcg_at_10"
    assert result["score"] == pytest.approx(sum(one["score"] for one in result["tasks"].values()) / 2, abs=1e-3)
    assert "cosine_spearman" in capsys.readouterr().out
    bertsmith.export("small", tmp_path / "model", to="hf")
    other = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    for name in names:
        task = mteb.get_task(name)
        mteb_tasks._use_local_data(task, data)
        (expected,) = mteb.evaluate(other, task, cache=None, co2_tracker=False, show_progress_bar=False).task_results
        assert result["tasks"][name]["score"] == pytest.approx(100 * expected.get_score(), abs=1e-2)
        assert 20 < result["tasks"][name]["score"] <= 100
        assert (tmp_path / "out" / "mteb" / f"{name}.json").is_file()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["STSBenchmrk"], "--mteb names 'STSBenchmrk', which mteb does not have; use 'STSBenchmark'"),
        (["STS12"], "has no folder 'mteb/sts12-sts' with the data of STS12"),
        (["CIFAR10"], "whose inputs are image; allowed: tasks on text"),
    ],
)
def test_unknown_tasks_and_missing_data_are_named(names: list[str], message: str, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("mteb", reason="needs pip install 'bertsmith[mteb]'")
    with pytest.raises(InputError, match=message):
        bertsmith.evaluate("small", mteb=names, data=str(data), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_flags_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--column is given with --mteb, which does not use it"):
        bertsmith.evaluate("small", mteb=["STS12"], column=["a=b"])
    with pytest.raises(InputError, match="--data is not given; give a data set, or --mteb"):
        bertsmith.evaluate("small")
    monkeypatch.setattr(mteb_tasks, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"pip install 'bertsmith\[mteb\]'"):
        bertsmith.evaluate("small", mteb=["STS12"])
