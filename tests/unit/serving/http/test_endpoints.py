"""Endpoints say what the models themselves say, in the shapes that clients know."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving_cases import LENGTH, TEXTS, schedulers, serving
from task_cases import TASK_CASES

import bertsmith
from bertsmith.runs.exchange import export_model


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    with httpx.Client(base_url=url, timeout=20) as found:
        yield found


def _inputs(case: str) -> list[dict[str, Any]]:
    found = TASK_CASES[case]
    return [{name: row[name] for name in row if name not in found.targets} for row in found.rows]


def _details(folder: Path, inputs: list[Any]) -> list[dict[str, Any]]:
    return bertsmith.Predictor.load(folder).details(inputs)


def _post(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _labels(said: list[dict[str, Any]]) -> dict[str, Any]:
    """Scores by label, comparable up to rounding."""
    return {one["label"]: pytest.approx(one["score"], abs=1e-5) for one in said}


def test_embed_returns_the_vectors_of_the_model(client: httpx.Client, folders: dict[str, Path]) -> None:
    right = bertsmith.load(folders["encoder"]).encode(TEXTS).numpy()
    found = np.array(_post(client, "/embed", inputs=TEXTS, normalize=False, model="encoder"))
    assert np.abs(found - right).max() < 1e-5
    unit = right / np.linalg.norm(right, axis=1, keepdims=True)
    assert np.abs(np.array(_post(client, "/embed", inputs=TEXTS, model="encoder")) - unit).max() < 1e-5
    one = _post(client, "/embed", inputs=TEXTS[0], model="encoder", dimensions=3)
    cut = right[0, :3] / np.linalg.norm(right[0, :3])
    assert np.abs(np.array(one) - cut).max() < 1e-5


def test_token_ids_give_the_same_vectors(client: httpx.Client) -> None:
    rows = _post(client, "/tokenize", inputs=TEXTS, model="encoder", add_special_tokens=False)
    ids = [[token["id"] for token in row] for row in rows]
    assert "".join(TEXTS[0][token["start"] : token["stop"]] for token in rows[0]) == TEXTS[0].replace(" ", "")
    said, given = (_post(client, "/embed", inputs=inputs, model="encoder") for inputs in (TEXTS, ids))
    assert np.abs(np.array(said) - np.array(given)).max() < 1e-6
    assert _post(client, "/decode", ids=ids[0], model="encoder") == [TEXTS[0]]
    whole = _post(client, "/tokenize", inputs=TEXTS[1], model="encoder")[0]
    assert [token["text"] for token in whole if token["special"]] == ["[CLS]", "[SEP]"]


@pytest.mark.parametrize("case", ["classification", "multi_label"])
def test_labels_are_sorted_by_score(client: httpx.Client, folders: dict[str, Path], case: str) -> None:
    right = _details(folders[case], TEXTS)
    found = _post(client, "/predict", inputs=TEXTS, model=case)
    for said, own in zip(found, right, strict=True):
        scores = [one["score"] for one in said]
        assert scores == sorted(scores, reverse=True)
        assert _labels(said) == own["scores"]
    alone = _post(client, "/predict", inputs=TEXTS[0], model=case)
    assert _labels(alone) == {one["label"]: one["score"] for one in found[0]}
    raw = _post(client, "/predict", inputs=TEXTS[0], model=case, raw_scores=True)
    assert [one["label"] for one in raw] == [one["label"] for one in found[0]]
    assert raw != found[0]


def test_pairs_as_columns_and_lists(client: httpx.Client, folders: dict[str, Path]) -> None:
    rows = _inputs("classification of pairs")
    right = [own["answer"] for own in _details(folders["pairs"], rows)]
    by_column = _post(client, "/predict", inputs=rows, model="pairs")
    as_lists = _post(client, "/predict", inputs=[list(row.values()) for row in rows], model="pairs")
    assert by_column == as_lists
    assert [said[0]["label"] for said in by_column] == right
    alone = _post(client, "/predict", inputs=list(rows[0].values()), model="pairs")
    assert _labels(alone) == {one["label"]: one["score"] for one in by_column[0]}


def test_predictions_of_other_tasks(client: httpx.Client, folders: dict[str, Path]) -> None:
    found = {
        kind: (_post(client, "/predict", inputs=_inputs(case), model=kind), _details(folders[kind], _inputs(case)))
        for kind, case in (("regression", "regression"), ("choice", "choice"), ("spans", "spans"))
    }
    for said, own in zip(*found["regression"], strict=True):
        assert said == {"value": pytest.approx(own["answer"], abs=1e-5)}
    for said, own in zip(*found["choice"], strict=True):
        assert (said["index"], said["text"]) == (own["answer"], own["text"])
        assert said["scores"] == pytest.approx(own["scores"], abs=1e-5)
    for row, said, own in zip(_inputs("spans"), *found["spans"], strict=True):
        assert said["text"] == own["answer"] == row["context"][said["start"] : said["end"]]
        assert said["score"] == pytest.approx(own["score"], abs=1e-5)


def test_tags_have_offsets(client: httpx.Client, folders: dict[str, Path]) -> None:
    text = "in New Rome, Bert Smith forgets"
    (own,) = _details(folders["tagging"], [text])
    said = _post(client, "/predict", inputs=text, model="tagging")
    assert [one["tag"] for one in said["tags"]] == own["answer"]
    assert [text[one["start"] : one["end"]] for one in said["tags"]] == own["words"]
    assert [one["text"] for one in said["entities"]] == [one["text"] for one in own["entities"]]
    words = _post(client, "/predict", inputs=[["New", "Rome"], "New Rome"], model="tagging")
    assert [one["tag"] for one in words[0]["tags"]] == [one["tag"] for one in words[1]["tags"]]
    assert _post(client, "/predict", inputs=[[]], model="tagging") == [{"tags": [], "entities": []}]


def test_embedding_model_predicts_similarity(client: httpx.Client, folders: dict[str, Path]) -> None:
    rows = _inputs("embedding of alike texts")
    right = [own["answer"] for own in _details(folders["texts"], rows)]
    assert [one["similarity"] for one in _post(client, "/predict", inputs=rows, model="texts")] == pytest.approx(
        right, abs=1e-5
    )
    assert set(_post(client, "/predict", inputs=TEXTS[0], model="texts")) == {"vector"}


def test_reranking(client: httpx.Client, folders: dict[str, Path]) -> None:
    query, texts = TEXTS[0], [TEXTS[3], TEXTS[0], TEXTS[2]]
    vectors = bertsmith.load(folders["encoder"]).encode([query, *texts]).numpy()
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = _post(client, "/rerank", query=query, texts=texts, model="encoder", return_text=True)
    assert found[0]["index"] == 1
    assert found[0]["text"] == query
    right = vectors[1:] @ vectors[0]
    assert [one["index"] for one in found] == np.argsort(-right).tolist()
    assert [one["score"] for one in found] == pytest.approx(sorted(right, reverse=True), abs=1e-5)
    refused = client.post("/rerank", json={"query": query, "texts": texts, "model": "pairs"})
    assert refused.status_code == 422  # it has three labels
    assert "cannot rerank" in refused.json()["error"]


def test_fill_mask_equals_the_model(client: httpx.Client, folders: dict[str, Path]) -> None:
    text = "the smith forges an iron [MASK]"
    (right,) = bertsmith.load(folders["encoder"]).fill_mask(text, top=3)
    found = _post(client, "/fill-mask", inputs=text, top_k=3, model="encoder")
    assert [(one["token_str"], pytest.approx(one["score"], abs=1e-5)) for one in found] == right
    assert _post(client, "/fill-mask", inputs=text, parameters={"top_k": 3}, model="encoder") == found
    two = _post(client, "/fill-mask", inputs=["[MASK] no [MASK]", text], targets=["the", "no"], model="encoder")
    assert [[len(one) for one in two[0]], len(two[1])] == [[2, 2], 2]
    assert {one["token_str"] for one in two[1]} == {"the", "no"}


def test_timing_and_model_headers(client: httpx.Client) -> None:
    headers = client.post("/predict", json={"inputs": TEXTS}).headers
    assert (headers["X-Bertsmith-Width"], headers["X-Bertsmith-Depth"]) == ("1", "1")
    assert headers["X-Bertsmith-Model"] == "classification"  # the first one
    tokens = _post(client, "/tokenize", inputs=TEXTS)
    assert int(headers["X-Compute-Tokens"]) == sum(map(len, tokens))
    times = [float(headers[f"X-{name}-Time"]) for name in ("Tokenization", "Queue", "Inference", "Total")]
    assert min(times) >= 0
    assert times[3] >= times[2] > 0


def test_info_health_and_docs(client: httpx.Client, folders: dict[str, Path]) -> None:
    assert client.get("/health").json() == {"status": "ready"}
    info = client.get("/info").json()
    assert [model["name"] for model in info["models"]] == list(folders)
    assert info["models"][0]["labels"] == ["a", "b"]
    assert info["max_input_length"] == LENGTH
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == list(folders)
    assert client.get("/v1/models/spans").json()["id"] == "spans"
    assert client.get("/v1/models/none").status_code == 404
    page = client.get("/docs").text
    assert "POST /rerank" in page
    assert "<script" not in page
    assert "https://" not in page


def test_prometheus_reads_the_metrics(client: httpx.Client) -> None:
    def value(name: str, **labels: str) -> float:
        families = text_string_to_metric_families(client.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    asked, tokens = value("bertsmith_requests_total", endpoint="/embed", status="200"), value("bertsmith_tokens_total")
    _post(client, "/embed", inputs=TEXTS, model="encoder")
    assert client.post("/embed", json={}).status_code == 422
    assert client.get("/made/up").status_code == 404
    assert value("bertsmith_requests_total", endpoint="/embed", status="200") == asked + 1
    assert value("bertsmith_requests_total", endpoint="other", status="404") >= 1
    assert value("bertsmith_tokens_total") > tokens
    assert value("bertsmith_engine_batches_total", model="encoder") >= 1
    assert value("bertsmith_width", model="encoder") == 1
    assert value("bertsmith_request_seconds_count", endpoint="/embed") >= 2


@pytest.mark.slow
def test_onnx_folder_answers_like_its_model(folders: dict[str, Path], tmp_path: Path) -> None:
    export_model(folders["classification"], out=tmp_path / "onnx", to="onnx")
    export_model(folders["encoder"], out=tmp_path / "vectors", to="onnx")
    own = {"onnx": tmp_path / "onnx", "vectors": tmp_path / "vectors"}
    with schedulers(own) as models, serving(models) as url, httpx.Client(base_url=url, timeout=20) as client:
        said = _post(client, "/predict", inputs=TEXTS, model="onnx")
        right = _details(folders["classification"], TEXTS)
        assert [_labels(one) for one in said] == [own["scores"] for own in right]
        vectors = np.array(_post(client, "/embed", inputs=TEXTS, normalize=False, model="vectors"))
        assert np.abs(vectors - bertsmith.load(folders["encoder"]).encode(TEXTS).numpy()).max() < 1e-4
