"""The API of huggingface_hub's InferenceClient: pipelines in Hugging Face's shapes.

The client posts to its base URL: `InferenceClient("http://host:8080")` calls `POST /`, the pipeline of the first model.
Other models and pipelines have the same paths as on Hugging Face's own service.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from fastapi import APIRouter, Response

from bertsmith.answers.texts import softmax
from bertsmith.serving.http.embed import embed_rows
from bertsmith.serving.http.errors import invalid
from bertsmith.serving.http.inputs import check_count
from bertsmith.serving.http.openapi import MODEL_RESPONSES
from bertsmith.serving.http.service import CurrentRequest, HttpRequest, StrictRoute
from bertsmith.serving.http.tasks import TaskOutputs, fill_masks, make_predictions, run_task, sort_labels
from bertsmith.serving.http.wire import (
    FillMaskRequest,
    FillParameters,
    HubParameters,
    HubRequest,
    HubSpan,
    HubTag,
    LabelScore,
    Prediction,
    SpanAnswerResponse,
    TagsResponse,
    Value,
)
from bertsmith.serving.model import ServedModel

router = APIRouter(route_class=StrictRoute, tags=["hugging_face_hub"])

Pipeline = Literal[
    "feature-extraction",
    "sentence-similarity",
    "text-classification",
    "token-classification",
    "question-answering",
    "fill-mask",
]
_PIPELINES: dict[str, Pipeline] = {
    "classification": "text-classification",
    "multi_label": "text-classification",
    "regression": "text-classification",
    "tagging": "token-classification",
    "spans": "question-answering",
    "embedding": "feature-extraction",
}
_DEFAULT_IGNORED_LABELS = ["O"]


@router.post("/", summary="The first model's pipeline", responses=MODEL_RESPONSES, response_model=None)
async def run_first_model(body: HubRequest, request: CurrentRequest) -> Response:
    """Run the pipeline of the model's task, or feature extraction if it has no task."""
    return await run_pipeline(request, body, None, None)


@router.post("/models/{name}", summary="A model's pipeline", responses=MODEL_RESPONSES, response_model=None)
async def run_model(name: str, body: HubRequest, request: CurrentRequest) -> Response:
    """Run the pipeline of a model by name."""
    return await run_pipeline(request, body, name, None)


@router.post(
    "/models/{name}/pipeline/{pipeline}",
    summary="A pipeline of a model",
    responses=MODEL_RESPONSES,
    response_model=None,
)
async def run_named_pipeline(name: str, pipeline: Pipeline, body: HubRequest, request: CurrentRequest) -> Response:
    """Run a pipeline by name, if the model supports it."""
    return await run_pipeline(request, body, name, pipeline)


async def run_pipeline(request: HttpRequest, body: HubRequest, name: str | None, pipeline: Pipeline | None) -> Response:
    """Run a pipeline; by default, choose it by the model's task and the request."""
    served = request.service.find(name).served
    if pipeline is None and isinstance(body.inputs, dict) and "source_sentence" in body.inputs:
        pipeline = "sentence-similarity"
    pipeline = pipeline or default_pipeline(served)
    if pipeline is None:
        assert served.task is not None
        kind = served.task.kind
        raise invalid(f"Hugging Face has no pipeline for the task of {served.name!r} ({kind}); use /predict")
    if pipeline == "feature-extraction":
        return await _extract_features(request, body, served.name)
    if pipeline == "sentence-similarity":
        return await _compare_sentences(request, body, served.name)
    if pipeline == "fill-mask":
        return await _fill_masks(request, body, served.name)
    return await _run_task(request, body, served.name, pipeline)


def default_pipeline(served: ServedModel) -> Pipeline | None:
    """Return the pipeline of a model's task, or feature extraction without a task; None if there is none."""
    return "feature-extraction" if served.task is None else _PIPELINES.get(served.task.kind)


def pipelines(served: ServedModel) -> list[Pipeline]:
    """Return the pipelines that a model supports."""
    supported: list[Pipeline] = ["fill-mask"] if "fill_mask" in served.operations else []
    supported += ["feature-extraction", "sentence-similarity"] if "vectors" in served.operations else []
    task = None if served.task is None else _PIPELINES.get(served.task.kind)
    return supported if task is None or task in supported else [*supported, task]


async def _extract_features(request: HttpRequest, body: HubRequest, name: str) -> Response:
    if isinstance(body.inputs, dict):
        raise invalid("inputs: feature-extraction needs a text or a list of texts")
    rows = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    check_count(rows, request.settings.limits)
    vectors = await embed_rows(
        request, rows, name, truncate=body.truncate, normalise=bool(body.normalize), dimensions=body.dimensions
    )
    return await request.respond(vectors.tolist)


async def _compare_sentences(request: HttpRequest, body: HubRequest, name: str) -> Response:
    inputs = body.inputs if isinstance(body.inputs, dict) else {}
    source, others = inputs.get("source_sentence"), inputs.get("sentences")
    if not isinstance(source, str) or not isinstance(others, list) or len(inputs) != 2:
        raise invalid('inputs: sentence-similarity needs {"source_sentence": a text, "sentences": a list of texts}')
    check_count(others, request.settings.limits, "inputs.sentences")
    vectors = await embed_rows(request, [source, *others], name, truncate=body.truncate, normalise=True)
    return await request.respond(lambda: (vectors[1:] @ vectors[0]).tolist())


async def _fill_masks(request: HttpRequest, body: HubRequest, name: str) -> Response:
    if isinstance(body.inputs, dict):
        raise invalid("inputs: fill-mask needs a text or a list of texts")
    parameters = FillParameters(top_k=body.parameters.top_k, targets=body.parameters.targets)
    fill = FillMaskRequest(inputs=body.inputs, parameters=parameters, truncate=body.truncate, model=name)
    return await fill_masks(request, fill)


async def _run_task(request: HttpRequest, body: HubRequest, name: str, pipeline: Pipeline) -> Response:
    served = request.select_model(name, "task")
    assert served.task is not None
    supported = _PIPELINES.get(served.task.kind)
    if supported != pipeline:
        raise invalid(f"{served.name!r} cannot do {pipeline}; its pipeline is {supported}")
    task = await run_task(request, body.inputs, name, body.truncate)

    def make() -> object:
        predictions = make_predictions(task)
        # logits per input, for function_to_apply; an item of several sequences has none
        rows = task.outputs if len(task.outputs) == len(predictions) else [None] * len(predictions)
        shaped = [
            _shape(task, prediction, row, body.parameters) for prediction, row in zip(predictions, rows, strict=True)
        ]
        # text-classification returns a list even for a single text
        return shaped if pipeline == "text-classification" or not task.is_single else shaped[0]

    return await request.respond(make)


def _shape(
    task: TaskOutputs, prediction: Prediction, logits: np.ndarray | None, parameters: HubParameters
) -> list[LabelScore] | list[HubTag] | HubSpan | list[HubSpan]:
    """Convert a prediction to the shape of its pipeline."""
    if isinstance(prediction, Value):
        return [LabelScore(label=getattr(task.inputs.task, "label", "label"), score=prediction.value)]
    if isinstance(prediction, TagsResponse):
        return _hub_tags(prediction, parameters)
    if isinstance(prediction, SpanAnswerResponse):
        return _hub_spans(prediction, parameters)
    assert isinstance(prediction, list)
    if parameters.function_to_apply is not None and logits is not None:
        scores = _FUNCTIONS[parameters.function_to_apply](logits).tolist()
        prediction = sort_labels(dict(zip(getattr(task.inputs.task, "labels", ()), scores, strict=True)))
    return prediction[: parameters.top_k]


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    probabilities: np.ndarray = 0.5 * (1 + np.tanh(logits.astype(np.float64) / 2))
    return probabilities


_FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "softmax": softmax,
    "sigmoid": _sigmoid,
    "none": lambda logits: logits,
}


def _hub_tags(prediction: TagsResponse, parameters: HubParameters) -> list[HubTag]:
    ignored = _DEFAULT_IGNORED_LABELS if parameters.ignore_labels is None else parameters.ignore_labels
    is_by_word = parameters.aggregation_strategy == "none"
    if prediction.entities is not None and not is_by_word:
        return [
            HubTag(entity_group=one.type, word=one.text, score=one.score, start=one.start, end=one.end)
            for one in prediction.entities
            if one.type not in ignored
        ]
    return [
        HubTag(
            entity=tag.tag if is_by_word else None,
            entity_group=None if is_by_word else tag.tag,
            index=index,
            word=tag.word,
            score=tag.score,
            start=tag.start,
            end=tag.end,
        )
        for index, tag in enumerate(prediction.tags, start=1)
        if tag.tag not in ignored
    ]


def _hub_spans(prediction: SpanAnswerResponse, parameters: HubParameters) -> HubSpan | list[HubSpan]:
    spans = [prediction, *(one for one in prediction.others if one.text != prediction.text)]
    answers = [HubSpan(answer=one.text, score=one.score, start=one.start, end=one.end) for one in spans]
    return answers[0] if parameters.top_k is None or parameters.top_k == 1 else answers[: parameters.top_k]
