"""The OpenAPI document lists what the served models accept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving_cases import schedulers, serving

from bertsmith.serving.http.app import make_app
from bertsmith.serving.scheduler import Scheduler
from bertsmith.serving.settings import Limits, ServeSettings


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=20) as opened:
        yield opened


def _bodies(details: dict[str, Any]) -> list[dict[str, Any]]:
    schema = details["requestBody"]["content"]["application/json"]["schema"]
    bodies: list[dict[str, Any]] = schema.get("anyOf", [schema])
    return bodies


def _body(document: dict[str, Any], path: str) -> dict[str, Any]:
    (body,) = _bodies(document["paths"][path]["post"])
    return body


def test_every_documented_example_is_accepted(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    posts = {path: methods["post"] for path, methods in document["paths"].items() if "post" in methods}
    assert {"/", "/predict", "/rerank", "/models/spans", "/models/encoder/pipeline/fill-mask"} <= set(posts)
    for path, details in posts.items():
        for body in _bodies(details):
            example = {name: body["properties"][name]["examples"][0] for name in body["required"]}
            response = client.post(path, json=example)
            assert response.status_code == 200, (path, example, response.text)


def test_several_models_have_bodies_of_their_own(client: httpx.Client, folders: dict[str, Path]) -> None:
    document = client.get("/openapi.json").json()
    by_model = {body["properties"]["model"]["enum"][0]: body for body in _bodies(document["paths"]["/predict"]["post"])}
    assert set(by_model) == set(folders) - {"encoder"}
    assert by_model["classification"]["required"] == ["inputs"]  # the first model answers without a name
    assert by_model["pairs"]["required"] == ["inputs", "model"]
    assert [body["properties"]["model"]["enum"] for body in _bodies(document["paths"]["/fill-mask"]["post"])] == [
        ["encoder"]
    ]
    (name,) = document["paths"]["/v1/models/{name}"]["get"]["parameters"]
    assert name["schema"]["enum"] == list(folders)


def test_bounds_are_those_of_the_model_and_the_settings(folders: dict[str, Path]) -> None:
    with schedulers({"only": folders["encoder"]}) as models:
        served = models["only"].served
        document = make_app(models, ServeSettings(limits=Limits(texts=7))).openapi()
    fields = _body(document, "/embed")["properties"]
    _, texts, ids, rows = fields["inputs"]["anyOf"]
    assert texts["maxItems"] == rows["maxItems"] == 7
    assert ids["items"]["maximum"] == served.runner.config.encoder.vocabulary - 1
    assert fields["dimensions"]["anyOf"][0]["maximum"] == 16
    assert fields["model"] == document["components"]["schemas"]["EmbedRequest"]["properties"]["model"]  # any name
    assert _body(document, "/fill-mask")["properties"]["inputs"]["anyOf"][0]["pattern"] == r"\[MASK\]"
    assert "/predict" not in document["paths"]  # the model has no task


def test_columns_are_those_of_the_task(running: dict[str, Scheduler]) -> None:
    document = make_app({"pairs": running["pairs"]}, ServeSettings()).openapi()
    texts, row, several = _body(document, "/predict")["properties"]["inputs"]["anyOf"]
    assert (texts["minItems"], texts["maxItems"]) == (2, 2)
    assert row["required"] == ["sentence1", "sentence2"]
    assert several["items"]["anyOf"] == [texts, row]
    assert "/fill-mask" not in document["paths"]
    assert "/rerank" not in document["paths"]  # it has three labels


def test_unsupported_methods_name_all_supported_ones(client: httpx.Client) -> None:
    response = client.put("/explore")
    assert (response.status_code, response.headers["Allow"]) == (405, "GET, POST")


def test_a_document_without_models_is_general() -> None:
    assert "/models/{name}" in make_app({}, ServeSettings()).openapi()["paths"]


def test_names_are_quoted_in_paths(folders: dict[str, Path]) -> None:
    name = "a model?"
    with schedulers({name: folders["encoder"]}) as models, serving(models) as url:
        assert "/models/a%20model%3F" in httpx.get(f"{url}/openapi.json").json()["paths"]
        assert httpx.post(f"{url}/models/a%20model%3F", json={"inputs": "a"}).status_code == 200
