"""/explore, /live and the files of the page: answers and maps of the requested size."""

import base64
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi")

from fastapi.testclient import TestClient
from page_models import Exported, served
from task_cases import TASK_CASES

from bertsmith.data.examples import ExampleConfig
from bertsmith.data.layout import SequenceLayout
from bertsmith.errors import InputError
from bertsmith.layers.subnet import Subnet
from bertsmith.models.build import extract
from bertsmith.models.cost import parameters
from bertsmith.models.encoder import EncoderInputs, Want
from bertsmith.serving.http.app import make_app
from bertsmith.serving.http.explore import MapDrawer
from bertsmith.serving.http.page import page_files
from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import QueueFull
from bertsmith.serving.scheduler import Scheduler
from bertsmith.serving.settings import Limits, ServeSettings
from bertsmith.tasks.predictor import Predictor, TaskRecord

HALF = Subnet(width=0.5, depth=0.5)
INPUTS: dict[str, dict[str, Any]] = {
    "classification": {"text": "my parcel was due on monday"},
    "classification of pairs": {"sentence1": "my parcel", "sentence2": "where is my order"},
    "tagging": {"tokens": "Anna carries lanterns to the harbour."},
    "regression": {"sentence": "the smith forges an iron gate"},
    "multi_label": {"text": "the smith forges an iron gate"},
    "choice": {"context": "the smith", "question": "where", "choices": ["by the river", "at all", "in the harbour"]},
    "spans": {"question": "where does the smith forge", "context": "the smith forges a gate by the river"},
}


class ServiceClient:
    """A service of some models in this process, and requests to its /explore."""

    def __init__(self, *models: ServedModel, settings: ServeSettings | None = None) -> None:
        self.schedulers = {model.name: Scheduler(model) for model in models}
        app = make_app(self.schedulers, settings or ServeSettings())
        self.client = TestClient(app, "http://127.0.0.1", raise_server_exceptions=False)

    def __enter__(self) -> "ServiceClient":
        for scheduler in self.schedulers.values():
            scheduler.start()
        return self

    def __exit__(self, *_: object) -> None:
        for scheduler in self.schedulers.values():
            scheduler.close()

    def __call__(self, status: int = 200, **body: Any) -> dict[str, Any]:
        response = self.client.post("/explore", json=body)
        assert response.status_code == status, response.text
        answer: dict[str, Any] = response.json()
        return answer


@pytest.fixture(scope="module")
def elastic() -> Iterator[ServiceClient]:
    with ServiceClient(
        served("classification", name="elastic", is_elastic=True), served(None, name="masks")
    ) as service:
        yield service


@pytest.mark.parametrize("case", INPUTS)
def test_answer_equals_the_predictor_of_the_requested_size(case: str) -> None:
    family = "convbert-small" if "pairs" in case else "bert-tiny"
    served_model = served(case, family, name="model")
    assert served_model.model is not None
    assert served_model.task is not None
    record = TaskRecord(task=served_model.task, sequences=ExampleConfig(length=128))
    with ServiceClient(served_model) as service:
        for subnet in (None, HALF):
            share = 1.0 if subnet is None else 0.5
            response = service(work="task", inputs=INPUTS[case], width=share, depth=share)
            model = served_model.model if subnet is None else extract(served_model.model, subnet)
            (expected,) = Predictor(model, record).details([INPUTS[case]])
            answer = {name: value for name, value in response["answer"].items() if name != "positions"}
            assert _rounded(answer) == _rounded(expected)
            assert response["parameters"] == parameters(model.config)
            assert (response["width"], response["depth"]) == (share, share)
            assert response["sequences"] == (3 if case == "choice" else 1)
    assert {name for name in INPUTS if name not in TASK_CASES} == set()


def _rounded(value: Any) -> Any:
    """Round all numbers to the precision of float32."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("family", ["bert-tiny", "deberta-base", "convbert-small"])
def test_maps_equal_those_of_the_requested_size(family: str) -> None:
    served_model = served("regression", family, name="model")
    assert served_model.model is not None
    with ServiceClient(served_model) as service:
        response = service(work="task", inputs={"sentence": "an iron gate"}, width=0.5, depth=0.5, maps=True)
    small = extract(served_model.model, HALF)
    ids = torch.from_numpy(served_model.tokenizer.encode(["an iron gate"])["input_ids"])
    with torch.inference_mode():
        layers = small.encoder.run(
            EncoderInputs(ids, SequenceLayout.full(*ids.shape), torch.zeros_like(ids)), Want(maps=True)
        ).maps
    data = response["maps"]["data"]
    assert data["layers"] == len(layers) == 2
    assert {one["label"].replace(" ", "_") for one in data["maps"]} == set(layers[0])
    for one in data["maps"]:
        expected = torch.cat([layer[one["label"].replace(" ", "_")][0] for layer in layers]).numpy()
        levels = np.frombuffer(base64.b64decode(one["levels"]), dtype=np.uint8).reshape(expected.shape).astype(float)
        values = (levels - 128) / 127 * one["scale"] if one["isScore"] else levels / 255
        np.testing.assert_allclose(values, expected, atol=0.006 * one["scale"])


def test_markup_has_no_text_and_no_style(elastic: ServiceClient) -> None:
    response = elastic(work="task", inputs={"text": "harbour <b>lanterns</b>"}, maps=True)
    assert "harbour" in response["maps"]["data"]["tokens"]
    assert not re.search(r"harbour|lanterns|<script|style=|\son\w+=", response["maps"]["markup"])


def test_similarities_and_mask_candidates(elastic: ServiceClient) -> None:
    response = elastic(model="masks", work="vectors", inputs=["the smith", "the river", "the smith"])
    table = np.array(response["answer"]["similarities"])
    np.testing.assert_allclose(table, table.T)
    assert table[0, 2] == pytest.approx(1)
    assert table[0, 1] < 0.999
    model = elastic.schedulers["masks"].served.model
    assert model is not None
    expected = model.fill_mask("the [MASK] forges", top_k=8)[0]
    (mask,) = elastic(model="masks", work="fill_mask", inputs="the [MASK] forges")["answer"]["masks"]
    assert [one["token"] for one in mask] == [token for token, _ in expected]
    assert [one["score"] for one in mask] == pytest.approx([probability for _, probability in expected], abs=1e-5)
    assert all(one["starts_word"] != one["token"].startswith("##") for one in mask)
    assert all(not one["text"].startswith("##") for one in mask)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"work": "task", "inputs": {"text": "a"}, "width": 0.3}, "width × depth is 0.3 × 1; 'elastic' was trained"),
        ({"work": "task", "inputs": {"text": " "}}, "one of the inputs is empty"),
        ({"work": "task", "inputs": {"texts": "a"}}, "field 'texts'"),
        ({"work": "vectors", "inputs": {"text": "a"}}, "it must be a text or a list of texts"),
        ({"work": "vectors", "inputs": ["a"] * 25}, "at most 24 are accepted here"),
        ({"work": "fill_mask", "inputs": "no mask", "model": "masks"}, r"text 0 has no \[MASK\] to fill"),
        ({"work": "fill_mask", "inputs": "a [MASK]"}, "cannot fill masks"),
        ({"work": "task", "inputs": {"text": "a"}, "width": 2}, "width: "),
    ],
)
def test_invalid_requests_return_422(elastic: ServiceClient, body: dict[str, Any], message: str) -> None:
    assert re.search(message, elastic(422, **body)["error"])


def test_limits_of_the_service_apply() -> None:
    settings = ServeSettings(limits=Limits(tokens=40), strict_names=True)
    with ServiceClient(served("choice", name="model"), settings=settings) as service:
        inputs = {**INPUTS["choice"], "choices": ["by the river"] * 9}
        assert "tokens; at most 40 are accepted" in service(413, work="task", inputs=inputs)["error"]
        assert service(404, work="task", inputs="a", model="none")["error_type"] == "NotFound"


def test_exported_model_has_one_size_and_no_maps() -> None:
    served_model = served("classification", name="model")
    assert served_model.model is not None
    exported = replace(served_model, runner=Exported(served_model.model))
    assert exported.choose_subnet("vectors", 1, 1) is None
    with pytest.raises(InputError, match="has one size"):
        exported.choose_subnet("vectors", 0.5, 1)
    with ServiceClient(exported) as service:
        (model,) = service.client.get("/explore").json()["models"]
        assert model["sizes"] == {"task": {"kind": "one"}, "vectors": {"kind": "one"}}
        assert model["maps"] is False
        response = service(work="task", inputs={"text": "a"}, maps=True)
        assert response["maps"] is None
        assert "does not run in PyTorch" in response["maps_refused"]


def test_maps_of_a_missing_sequence_are_refused(elastic: ServiceClient) -> None:
    response = elastic(work="task", inputs={"text": "a"}, sequence=3, maps=True)
    assert (response["maps"], response["maps_refused"]) == (None, "sequence is 3; the input has 1, counted from 0")


def test_whole_model_is_requested_as_a_subnet(elastic: ServiceClient) -> None:
    served_model = elastic.schedulers["elastic"].served
    assert served_model.model is not None
    assert served_model.choose_subnet("vectors", 1, 1) == Subnet()
    assert served_model.parameters(Subnet()) == parameters(served_model.model.config)


def test_live_has_the_stats_of_every_scheduler(elastic: ServiceClient) -> None:
    elastic(work="task", inputs={"text": "an iron gate"})
    states = elastic.client.get("/live").json()["models"]
    assert set(states) == {"elastic", "masks"}
    assert states["elastic"]["answered"] >= 1
    assert states["elastic"]["median_seconds"] > 0
    assert (states["masks"]["width"], states["masks"]["depth"]) == (1, 1)


def test_page_files_have_a_strict_policy(elastic: ServiceClient) -> None:
    page = elastic.client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    addresses = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
    assert len(addresses) >= 7
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)|https?:", page.text)
    assert {elastic.client.get(f"/{one}").status_code for one in addresses} == {200}
    for name, file in page_files().items():
        text = file.content.decode()
        assert not re.search(
            r"innerHTML|insertAdjacent|document\.write|\beval\b|https?://(?!www\.w3\.org/2000/svg)", text
        )
        again = elastic.client.get(f"/page/{name}", headers={"If-None-Match": file.etag})
        assert again.status_code == 304
        assert all(f"{other}.js" in page_files() for other in re.findall(r'from "\./(\w+)\.js"', text))
    for name in ("none.js", "..%2F..%2Fsettings.py", "%2Fetc%2Fpasswd", "__init__.py"):
        assert elastic.client.get(f"/page/{name}").status_code == 404


def test_too_many_waiting_maps_are_rejected() -> None:
    drawer = MapDrawer()
    drawer.waiting = 8
    with pytest.raises(QueueFull):
        drawer.draw(None, None, None).send(None)  # type: ignore[arg-type]
