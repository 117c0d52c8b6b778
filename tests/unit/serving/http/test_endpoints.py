"""Endpoints return the outputs of the models, in the shapes that clients expect."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving_cases import LENGTH, RELEVANCE, TEXTS, schedulers, serving, write_task
from task_cases import TASK_CASES

import bertsmith
from bertsmith.runs.exchange import export_model
from bertsmith.serving.settings import Limits, ServeSettings


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    with httpx.Client(base_url=url, timeout=20) as opened:
        yield opened


def _inputs(case: str) -> list[dict[str, Any]]:
    sample = TASK_CASES[case]
    return [{name: row[name] for name in row if name not in sample.targets} for row in sample.rows]


def _details(folder: Path, inputs: list[Any]) -> list[dict[str, Any]]:
    return bertsmith.Predictor.load(folder).details(inputs)


def _post(client: httpx.Client, path: str, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def _labels(prediction: list[dict[str, Any]]) -> dict[str, Any]:
    """Return scores by label, compared approximately."""
    return {one["label"]: pytest.approx(one["score"], abs=1e-5) for one in prediction}


def test_embed_returns_the_vectors_of_the_model(client: httpx.Client, folders: dict[str, Path]) -> None:
    expected = bertsmith.load(folders["encoder"]).encode(TEXTS).numpy()
    vectors = np.array(_post(client, "/embed", inputs=TEXTS, normalize=False, model="encoder"))
    assert np.abs(vectors - expected).max() < 1e-5
    unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.abs(np.array(_post(client, "/embed", inputs=TEXTS, model="encoder")) - unit).max() < 1e-5
    one = _post(client, "/embed", inputs=TEXTS[0], model="encoder", dimensions=3)
    cut = expected[0, :3] / np.linalg.norm(expected[0, :3])
    assert np.abs(np.array(one) - cut).max() < 1e-5


def test_token_ids_give_the_same_vectors(client: httpx.Client) -> None:
    rows = _post(client, "/tokenize", inputs=TEXTS, model="encoder", add_special_tokens=False)
    ids = [[token["id"] for token in row] for row in rows]
    assert "".join(TEXTS[0][token["start"] : token["stop"]] for token in rows[0]) == TEXTS[0].replace(" ", "")
    from_texts, from_ids = (_post(client, "/embed", inputs=inputs, model="encoder") for inputs in (TEXTS, ids))
    assert np.abs(np.array(from_texts) - np.array(from_ids)).max() < 1e-6
    assert _post(client, "/decode", ids=ids[0], model="encoder") == [TEXTS[0]]
    whole = _post(client, "/tokenize", inputs=TEXTS[1], model="encoder")[0]
    assert [token["text"] for token in whole if token["special"]] == ["[CLS]", "[SEP]"]


@pytest.mark.parametrize("case", ["classification", "multi_label"])
def test_labels_are_sorted_by_score(client: httpx.Client, folders: dict[str, Path], case: str) -> None:
    expected = _details(folders[case], TEXTS)
    response = _post(client, "/predict", inputs=TEXTS, model=case)
    for prediction, detail in zip(response, expected, strict=True):
        scores = [one["score"] for one in prediction]
        assert scores == sorted(scores, reverse=True)
        assert _labels(prediction) == detail["scores"]
    alone = _post(client, "/predict", inputs=TEXTS[0], model=case)
    assert _labels(alone) == {one["label"]: one["score"] for one in response[0]}
    raw = _post(client, "/predict", inputs=TEXTS[0], model=case, raw_scores=True)
    assert [one["label"] for one in raw] == [one["label"] for one in response[0]]
    assert raw != response[0]


def test_pairs_are_accepted_as_columns_and_as_lists(client: httpx.Client, folders: dict[str, Path]) -> None:
    rows = _inputs("classification of pairs")
    expected = [detail["answer"] for detail in _details(folders["pairs"], rows)]
    by_column = _post(client, "/predict", inputs=rows, model="pairs")
    as_lists = _post(client, "/predict", inputs=[list(row.values()) for row in rows], model="pairs")
    assert by_column == as_lists
    assert [prediction[0]["label"] for prediction in by_column] == expected
    alone = _post(client, "/predict", inputs=list(rows[0].values()), model="pairs")
    assert _labels(alone) == {one["label"]: one["score"] for one in by_column[0]}


def test_predictions_of_other_tasks_equal_the_predictor(client: httpx.Client, folders: dict[str, Path]) -> None:
    results = {
        kind: (_post(client, "/predict", inputs=_inputs(case), model=kind), _details(folders[kind], _inputs(case)))
        for kind, case in (("regression", "regression"), ("choice", "choice"), ("spans", "spans"))
    }
    for prediction, detail in zip(*results["regression"], strict=True):
        assert prediction == {"value": pytest.approx(detail["answer"], abs=1e-5)}
    for prediction, detail in zip(*results["choice"], strict=True):
        assert (prediction["index"], prediction["text"]) == (detail["answer"], detail["text"])
        assert prediction["scores"] == pytest.approx(detail["scores"], abs=1e-5)
    for row, prediction, detail in zip(_inputs("spans"), *results["spans"], strict=True):
        assert prediction["text"] == detail["answer"] == row["context"][prediction["start"] : prediction["end"]]
        assert prediction["score"] == pytest.approx(detail["score"], abs=1e-5)


def test_tags_have_offsets(client: httpx.Client, folders: dict[str, Path]) -> None:
    text = "in New Rome, Bert Smith forgets"
    (detail,) = _details(folders["tagging"], [text])
    prediction = _post(client, "/predict", inputs=text, model="tagging")
    assert [one["tag"] for one in prediction["tags"]] == detail["answer"]
    assert [text[one["start"] : one["end"]] for one in prediction["tags"]] == detail["words"]
    assert [one["text"] for one in prediction["entities"]] == [one["text"] for one in detail["entities"]]
    words = _post(client, "/predict", inputs=[["New", "Rome"], "New Rome"], model="tagging")
    assert [one["tag"] for one in words[0]["tags"]] == [one["tag"] for one in words[1]["tags"]]
    assert _post(client, "/predict", inputs=[[]], model="tagging") == [{"tags": [], "entities": []}]


def test_trees_have_constituents(client: httpx.Client, folders: dict[str, Path]) -> None:
    text = "in New Rome, Bert Smith forgets"
    (detail,) = _details(folders["parsing"], [text])
    prediction = _post(client, "/predict", inputs=text, model="parsing")
    assert prediction["tree"] == detail["answer"]
    assert prediction["words"] == detail["words"]
    assert prediction["constituents"] == detail["constituents"]
    assert prediction["constituents"][0] | {"label": ""} == {"label": "", "begin": 0, "end": len(detail["words"])}
    empty = {"tree": "", "words": [], "constituents": []}
    assert _post(client, "/predict", inputs=[[]], model="parsing") == [empty]


def test_embedding_model_predicts_similarity(client: httpx.Client, folders: dict[str, Path]) -> None:
    rows = _inputs("embedding of alike texts")
    expected = [detail["answer"] for detail in _details(folders["texts"], rows)]
    assert [one["similarity"] for one in _post(client, "/predict", inputs=rows, model="texts")] == pytest.approx(
        expected, abs=1e-5
    )
    assert set(_post(client, "/predict", inputs=TEXTS[0], model="texts")) == {"vector"}


def test_rerank_sorts_texts_by_cosine(client: httpx.Client, folders: dict[str, Path]) -> None:
    query, texts = TEXTS[0], [TEXTS[3], TEXTS[0], TEXTS[2]]
    vectors = bertsmith.load(folders["encoder"]).encode([query, *texts]).numpy()
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    response = _post(client, "/rerank", query=query, texts=texts, model="encoder", return_text=True)
    assert response[0]["index"] == 1
    assert response[0]["text"] == query
    expected = vectors[1:] @ vectors[0]
    assert [one["index"] for one in response] == np.argsort(-expected).tolist()
    assert [one["score"] for one in response] == pytest.approx(sorted(expected, reverse=True), abs=1e-5)
    rejected = client.post("/rerank", json={"query": query, "texts": texts, "model": "pairs"})
    assert rejected.status_code == 422  # it has three labels
    assert "cannot rerank" in rejected.json()["error"]


def test_rerank_reads_the_query_with_each_text(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "relevance", RELEVANCE)
    query, texts = TEXTS[0], [TEXTS[3], TEXTS[0], TEXTS[2]]
    scores = [detail["scores"]["1"] for detail in _details(folder, [[query, text] for text in texts])]
    best = int(np.argmax(scores))
    with (
        schedulers({"relevance": folder}) as models,
        serving(models, ServeSettings(limits=Limits(body_bytes=20_000))) as url,
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        ranked = _post(client, "/rerank", query=query, texts=texts, return_text=True)
        assert {one["index"]: pytest.approx(one["score"], abs=1e-5) for one in ranked} == dict(enumerate(scores))
        assert (ranked[0]["index"], ranked[0]["text"]) == (best, texts[best])
        raw = _post(client, "/rerank", query=query, texts=texts, raw_scores=True)
        assert raw[0]["score"] == pytest.approx(np.log(scores[best] / (1 - scores[best])), abs=1e-3)
        refused = client.post("/rerank", json={"query": "a" * 10_000, "texts": ["a"] * 3, "truncate": True})
        assert refused.status_code == 413
        assert "3 times the query has 30000 characters; at most 20000" in refused.json()["error"]


def test_choices_with_a_common_start_are_limited(tmp_path: Path) -> None:
    choice = TASK_CASES["choice"]
    starts = replace(choice, task={"question": None, "start": "question"})
    folder = write_task(tmp_path / "choice", starts)
    row = {"context": TEXTS[0], "question": "no", "choices": ["a gate", "a clock"]}
    with (
        schedulers({"choice": folder}) as models,
        serving(models, ServeSettings(limits=Limits(tokens=1000))) as url,
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        assert _post(client, "/predict", inputs=row)["index"] == _details(folder, [row])[0]["answer"]
        long = {**row, "question": "no " * 1000, "choices": ["a"] * 5000}
        refused = client.post("/predict", json={"inputs": long})
        assert refused.status_code == 413
        assert "at most 8000 are accepted" in refused.json()["error"]


def test_fill_mask_equals_the_model(client: httpx.Client, folders: dict[str, Path]) -> None:
    text = "the smith forges an iron [MASK]"
    (expected,) = bertsmith.load(folders["encoder"]).fill_mask(text, top_k=3)
    response = _post(client, "/fill-mask", inputs=text, top_k=3, model="encoder")
    assert [(one["token_str"], pytest.approx(one["score"], abs=1e-5)) for one in response] == expected
    assert _post(client, "/fill-mask", inputs=text, parameters={"top_k": 3}, model="encoder") == response
    two = _post(client, "/fill-mask", inputs=["[MASK] no [MASK]", text], targets=["the", "no"], model="encoder")
    assert [[len(one) for one in two[0]], len(two[1])] == [[2, 2], 2]
    assert {one["token_str"] for one in two[1]} == {"the", "no"}


def test_responses_have_timing_and_model_headers(client: httpx.Client) -> None:
    headers = client.post("/predict", json={"inputs": TEXTS}).headers
    assert (headers["X-Bertsmith-Width"], headers["X-Bertsmith-Depth"]) == ("1", "1")
    assert headers["X-Bertsmith-Model"] == "classification"  # the first one
    tokens = _post(client, "/tokenize", inputs=TEXTS)
    assert int(headers["X-Compute-Tokens"]) == sum(map(len, tokens))
    times = [float(headers[f"X-{name}-Time"]) for name in ("Tokenization", "Queue", "Inference", "Total")]
    assert min(times) >= 0
    assert times[3] >= times[2] > 0


def test_info_health_and_docs_describe_the_service(client: httpx.Client, folders: dict[str, Path]) -> None:
    assert client.get("/health").json() == {"status": "ready"}
    info = client.get("/info").json()
    assert [model["name"] for model in info["models"]] == list(folders)
    assert info["models"][0]["labels"] == ["a", "b"]
    assert info["max_input_length"] == LENGTH
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == list(folders)
    assert client.get("/v1/models/spans").json()["id"] == "spans"
    assert client.get("/v1/models/none").status_code == 404
    page = client.get("/docs").text
    assert "<p>Return <code>ready</code> with 200" in page
    assert 'id="post /rerank"' in page
    assert "<script" not in page
    assert "https://" not in page


def test_metrics_are_in_prometheus_format(client: httpx.Client) -> None:
    def value(name: str, **labels: str) -> float:
        families = text_string_to_metric_families(client.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    requests = value("bertsmith_requests_total", endpoint="/embed", status="200")
    tokens = value("bertsmith_tokens_total")
    _post(client, "/embed", inputs=TEXTS, model="encoder")
    assert client.post("/embed", json={}).status_code == 422
    assert client.get("/made/up").status_code == 404
    assert value("bertsmith_requests_total", endpoint="/embed", status="200") == requests + 1
    assert value("bertsmith_requests_total", endpoint="other", status="404") >= 1
    assert value("bertsmith_tokens_total") > tokens
    assert value("bertsmith_engine_batches_total", model="encoder") >= 1
    assert value("bertsmith_width", model="encoder") == 1
    assert value("bertsmith_request_seconds_count", endpoint="/embed") >= 2


@pytest.mark.slow
def test_onnx_folder_returns_the_predictions_of_its_model(folders: dict[str, Path], tmp_path: Path) -> None:
    export_model(folders["classification"], out=tmp_path / "onnx", to="onnx")
    export_model(folders["encoder"], out=tmp_path / "vectors", to="onnx")
    exported = {"onnx": tmp_path / "onnx", "vectors": tmp_path / "vectors"}
    with schedulers(exported) as models, serving(models) as url, httpx.Client(base_url=url, timeout=20) as client:
        predictions = _post(client, "/predict", inputs=TEXTS, model="onnx")
        expected = _details(folders["classification"], TEXTS)
        assert [_labels(one) for one in predictions] == [detail["scores"] for detail in expected]
        vectors = np.array(_post(client, "/embed", inputs=TEXTS, normalize=False, model="vectors"))
        assert np.abs(vectors - bertsmith.load(folders["encoder"]).encode(TEXTS).numpy()).max() < 1e-4
