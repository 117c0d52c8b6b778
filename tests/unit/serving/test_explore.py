"""/explore, /live and the files of the page: answers and maps of the requested network."""

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
from page_models import served
from task_cases import TASK_CASES

from bertsmith.data.examples import ExampleConfig
from bertsmith.data.layout import SequenceLayout
from bertsmith.engines.exit_runner import ModelRunner
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


class Asking:
    """A service of some models in this process."""

    def __init__(self, *models: ServedModel, settings: ServeSettings | None = None) -> None:
        self.schedulers = {model.name: Scheduler(model) for model in models}
        self.client = TestClient(make_app(self.schedulers, settings or ServeSettings()), raise_server_exceptions=False)

    def __enter__(self) -> "Asking":
        for scheduler in self.schedulers.values():
            scheduler.start()
        return self

    def __exit__(self, *_: object) -> None:
        for scheduler in self.schedulers.values():
            scheduler.close()

    def __call__(self, status: int = 200, **body: Any) -> dict[str, Any]:
        response = self.client.post("/explore", json=body)
        assert response.status_code == status, response.text
        found: dict[str, Any] = response.json()
        return found


@pytest.fixture(scope="module")
def elastic() -> Iterator[Asking]:
    with Asking(served("classification", name="elastic", is_elastic=True), served(None, name="masks")) as asking:
        yield asking


@pytest.mark.parametrize("case", INPUTS)
def test_answer_is_that_of_the_requested_network(case: str) -> None:
    family = "convbert-small" if "pairs" in case else "bert-tiny"
    own = served(case, family, name="own")
    assert own.model is not None
    assert own.task is not None
    record = TaskRecord(task=own.task, sequences=ExampleConfig(length=128))
    with Asking(own) as asking:
        for subnet in (None, HALF):
            share = 1.0 if subnet is None else 0.5
            found = asking(work="task", inputs=INPUTS[case], width=share, depth=share)
            model = own.model if subnet is None else extract(own.model, subnet)
            (said,) = Predictor(model, record).details([INPUTS[case]])
            answer = {name: value for name, value in found["answer"].items() if name != "positions"}
            assert _rounded(answer) == _rounded(said)
            assert found["parameters"] == parameters(model.config)
            assert (found["width"], found["depth"]) == (share, share)
            assert found["sequences"] == (3 if case == "choice" else 1)
    assert {name for name in INPUTS if name not in TASK_CASES} == set()


def _rounded(value: Any) -> Any:
    """Numbers as far as float32 has them, and by what they are about."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: _rounded(own) for name, own in value.items()}
    return [_rounded(own) for own in value] if isinstance(value, list) else value


@pytest.mark.parametrize("family", ["bert-tiny", "deberta-base", "convbert-small"])
def test_maps_are_those_of_the_requested_network(family: str) -> None:
    own = served("regression", family, name="own")
    assert own.model is not None
    with Asking(own) as asking:
        found = asking(work="task", inputs={"sentence": "an iron gate"}, width=0.5, depth=0.5, maps=True)
    small = extract(own.model, HALF)
    ids = torch.from_numpy(own.tokenizer.encode(["an iron gate"])["input_ids"])
    with torch.inference_mode():
        layers = small.encoder.run(
            EncoderInputs(ids, SequenceLayout.full(*ids.shape), torch.zeros_like(ids)), Want(maps=True)
        ).maps
    data = found["maps"]["data"]
    assert data["layers"] == len(layers) == 2
    assert {one["label"].replace(" ", "_") for one in data["maps"]} == set(layers[0])
    for one in data["maps"]:
        right = torch.cat([layer[one["label"].replace(" ", "_")][0] for layer in layers]).numpy()
        levels = np.frombuffer(base64.b64decode(one["levels"]), dtype=np.uint8).reshape(right.shape).astype(float)
        values = (levels - 128) / 127 * one["scale"] if one["isScore"] else levels / 255
        np.testing.assert_allclose(values, right, atol=0.006 * one["scale"])


def test_markup_has_no_text_and_no_style(elastic: Asking) -> None:
    found = elastic(work="task", inputs={"text": "harbour <b>lanterns</b>"}, maps=True)
    assert "harbour" in found["maps"]["data"]["tokens"]
    assert not re.search(r"harbour|lanterns|<script|style=|\son\w+=", found["maps"]["markup"])


def test_similarities_and_masks(elastic: Asking) -> None:
    found = elastic(model="masks", work="vectors", inputs=["the smith", "the river", "the smith"])
    table = np.array(found["answer"]["similarities"])
    np.testing.assert_allclose(table, table.T)
    assert table[0, 2] == pytest.approx(1)
    assert table[0, 1] < 0.999
    model = elastic.schedulers["masks"].served.model
    assert model is not None
    right = model.fill_mask("the [MASK] forges", top=8)[0]
    (mask,) = elastic(model="masks", work="fill_mask", inputs="the [MASK] forges")["answer"]["masks"]
    assert [one["piece"] for one in mask] == [piece for piece, _ in right]
    assert [one["score"] for one in mask] == pytest.approx([share for _, share in right], abs=1e-5)
    assert all(one["starts_word"] != one["piece"].startswith("##") for one in mask)
    assert all(not one["text"].startswith("##") for one in mask)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"work": "task", "inputs": {"text": "a"}, "width": 0.3}, "width × depth is 0.3 × 1; 'elastic' was trained"),
        ({"work": "task", "inputs": {"text": " "}}, "one of the inputs is empty"),
        ({"work": "task", "inputs": {"texts": "a"}}, "field 'texts'"),
        ({"work": "vectors", "inputs": {"text": "a"}}, "it must be a text or a list of texts"),
        ({"work": "vectors", "inputs": ["a"] * 25}, "at most 24 are accepted here"),
        ({"work": "task", "inputs": {"text": "a"}, "sequence": 3}, "the input has 1"),
        ({"work": "fill_mask", "inputs": "no mask", "model": "masks"}, r"text 0 has no \[MASK\] to fill"),
        ({"work": "fill_mask", "inputs": "a [MASK]"}, "cannot fill masks"),
        ({"work": "task", "inputs": {"text": "a"}, "width": 2}, "width: "),
    ],
)
def test_invalid_requests_return_422(elastic: Asking, body: dict[str, Any], sentence: str) -> None:
    assert re.search(sentence, elastic(422, **body)["error"])


def test_limits_of_the_service_apply() -> None:
    settings = ServeSettings(limits=Limits(tokens=40))
    with Asking(served("choice", name="own"), settings=settings) as asking:
        inputs = {**INPUTS["choice"], "choices": ["by the river"] * 9}
        assert "tokens; at most 40 are accepted" in asking(413, work="task", inputs=inputs)["error"]
        assert asking(404, work="task", inputs="a", model="none")["error_type"] == "NotFound"


class _Exported(ModelRunner):
    """Stands for a runner without a PyTorch model."""

    torch_model = None


def test_exported_model_has_one_size_and_no_maps() -> None:
    own = served("classification", name="own")
    assert own.model is not None
    exported = replace(own, runner=_Exported(own.model))
    assert exported.choose_subnet(1, 1) is None
    with pytest.raises(InputError, match="has one size"):
        exported.choose_subnet(0.5, 1)
    with Asking(exported) as asking:
        (told,) = asking.client.get("/explore").json()["models"]
        assert told["sizes"] == {"kind": "one"}
        assert told["maps"] is False
        found = asking(work="task", inputs={"text": "a"}, maps=True)
        assert found["maps"] is None
        assert "not run by PyTorch" in found["maps_refused"]


def test_whole_model_is_requested_as_a_subnet(elastic: Asking) -> None:
    own = elastic.schedulers["elastic"].served
    assert own.model is not None
    assert own.choose_subnet(1, 1) == Subnet()
    assert own.parameters(Subnet()) == parameters(own.model.config)


def test_live_has_the_stats_of_every_scheduler(elastic: Asking) -> None:
    elastic(work="task", inputs={"text": "an iron gate"})
    states = elastic.client.get("/live").json()["models"]
    assert set(states) == {"elastic", "masks"}
    assert states["elastic"]["answered"] >= 1
    assert states["elastic"]["median_seconds"] > 0
    assert (states["masks"]["width"], states["masks"]["depth"]) == (1, 1)


def test_page_files_have_a_strict_policy(elastic: Asking) -> None:
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
