"""What huggingface_hub's InferenceClient speaks: one address for a model, and its pipelines in Hugging Face's shapes.

The client posts to the address it is given and to no path under it, so that `InferenceClient("http://host:8080")` ends
at `POST /`: the first model's own pipeline. Other models and pipelines have addresses as on Hugging Face's own service.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Response

from bertsmith.answers.texts import softmax
from bertsmith.serving.http.embed import vectors_of
from bertsmith.serving.http.errors import invalid
from bertsmith.serving.http.fill import filled
from bertsmith.serving.http.inputs import TaskInputs, check_count
from bertsmith.serving.http.openapi import WORK_ERRORS
from bertsmith.serving.http.predict import labelled, said, task_outputs
from bertsmith.serving.http.service import HttpRequest, RequestHere, StrictRoute
from bertsmith.serving.http.wire import FillMaskRequest, FillParameters, HubParameters, HubRequest

router = APIRouter(route_class=StrictRoute, tags=["huggingface_hub"])

Pipeline = Literal[
    "feature-extraction",
    "sentence-similarity",
    "text-classification",
    "token-classification",
    "question-answering",
    "fill-mask",
]
_OF_KIND: dict[str, Pipeline] = {
    "classification": "text-classification",
    "multi_label": "text-classification",
    "regression": "text-classification",
    "tagging": "token-classification",
    "spans": "question-answering",
    "embedding": "feature-extraction",
}
_OUTSIDE = ["O"]


@router.post("/", summary="The first model's own pipeline", responses=WORK_ERRORS, response_model=None)
async def first(body: HubRequest, call: RequestHere) -> Response:
    """What InferenceClient asks for, in Hugging Face's shapes: the task of the model, or vectors where it has none."""
    return await answered(call, body, None, None)


@router.post("/models/{name}", summary="A model's own pipeline", responses=WORK_ERRORS, response_model=None)
async def named(name: str, body: HubRequest, call: RequestHere) -> Response:
    """The same of another model."""
    return await answered(call, body, name, None)


@router.post(
    "/models/{name}/pipeline/{pipeline}", summary="A pipeline of a model", responses=WORK_ERRORS, response_model=None
)
async def piped(name: str, pipeline: Pipeline, body: HubRequest, call: RequestHere) -> Response:
    """The same by the name of the pipeline."""
    return await answered(call, body, name, pipeline)


async def answered(call: HttpRequest, body: HubRequest, name: str | None, pipeline: Pipeline | None) -> Response:
    """The answer of a pipeline; of that which the model and the shape of the request show, if none is named."""
    served, _ = call.service.find(name)
    if pipeline is None and isinstance(body.inputs, dict) and "source_sentence" in body.inputs:
        pipeline = "sentence-similarity"
    if pipeline is None:
        kind = "embedding" if served.kept is None else served.kept.task.kind
        if kind not in _OF_KIND:
            raise invalid(f"{served.name!r} has a task ({kind}) that Hugging Face has no pipeline for; use /predict")
        pipeline = _OF_KIND[kind]
    if pipeline == "feature-extraction":
        return await _features(call, body, served.name)
    if pipeline == "sentence-similarity":
        return await _similarity(call, body, served.name)
    if pipeline == "fill-mask":
        return await _fill(call, body, served.name)
    return await _task(call, body, served.name, pipeline)


async def _features(call: HttpRequest, body: HubRequest, name: str) -> Response:
    if isinstance(body.inputs, dict):
        raise invalid("inputs: for feature-extraction a text or a list of texts is needed")
    rows = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    check_count(rows, call.settings.limits)
    normalizes = bool(body.normalize)
    vectors = await vectors_of(
        call, rows, name, truncate=body.truncate, normalizes=normalizes, dimensions=body.dimensions
    )
    return await call.answer(vectors.tolist)


async def _similarity(call: HttpRequest, body: HubRequest, name: str) -> Response:
    inputs = body.inputs if isinstance(body.inputs, dict) else {}
    source, others = inputs.get("source_sentence"), inputs.get("sentences")
    if not isinstance(source, str) or not isinstance(others, list):
        raise invalid('inputs: sentence-similarity needs {"source_sentence": a text, "sentences": a list of texts}')
    check_count(others, call.settings.limits, "inputs.sentences")
    vectors = await vectors_of(call, [source, *others], name, truncate=body.truncate, normalizes=True)
    return await call.answer(lambda: (vectors[1:] @ vectors[0]).tolist())


async def _fill(call: HttpRequest, body: HubRequest, name: str) -> Response:
    if isinstance(body.inputs, dict):
        raise invalid("inputs: for fill-mask a text or a list of texts is needed")
    nested = FillParameters(top_k=body.parameters.top_k, targets=body.parameters.targets)
    return await filled(
        call, FillMaskRequest(inputs=body.inputs, parameters=nested, truncate=body.truncate, model=name)
    )


async def _task(call: HttpRequest, body: HubRequest, name: str, pipeline: Pipeline) -> Response:
    served = call.model(name, "task")
    assert served.kept is not None
    own = _OF_KIND.get(served.kept.task.kind)
    if own != pipeline:
        raise invalid(f"{served.name!r} cannot do {pipeline}; its own pipeline is {own}")
    made, outputs, is_single = await task_outputs(call, body.inputs, name, body.truncate)

    def found() -> Any:
        shaped = [_SHAPES[pipeline](made, *parts, body.parameters) for parts in _parts(made, outputs)]
        # the client takes the first of a list of texts, also where one was sent
        return shaped if pipeline == "text-classification" or not is_single else shaped[0]

    return await call.answer(found)


def _parts(made: TaskInputs, outputs: list[np.ndarray]) -> list[tuple[Any, np.ndarray | None]]:
    """For every input what `said` makes of it, and what the head said where that is one row of numbers."""
    answers = said(made, outputs)
    rows = outputs if len(outputs) == len(answers) else [None] * len(answers)
    return list(zip(answers, rows, strict=True))


def _labels(made: TaskInputs, answer: Any, scores: np.ndarray | None, asked: HubParameters) -> list[dict[str, Any]]:
    if made.task.kind == "regression":
        return [{"label": getattr(made.task, "label", "label"), "score": answer["value"]}]
    if asked.function_to_apply is not None and scores is not None:
        told = _FUNCTIONS[asked.function_to_apply](scores).tolist()
        answer = labelled(dict(zip(getattr(made.task, "labels", ()), told, strict=True)))
    found: list[dict[str, Any]] = answer[: asked.top_k]
    return found


def _sigmoid(scores: np.ndarray) -> np.ndarray:
    shares: np.ndarray = 0.5 * (1 + np.tanh(scores.astype(np.float64) / 2))
    return shares


_FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "softmax": softmax,
    "sigmoid": _sigmoid,
    "none": lambda scores: scores,
}


def _tags(made: TaskInputs, answer: Any, _: np.ndarray | None, asked: HubParameters) -> list[dict[str, Any]]:
    ignored = _OUTSIDE if asked.ignore_labels is None else asked.ignore_labels
    is_by_word = asked.aggregation_strategy == "none" or "entities" not in answer
    if not is_by_word:
        found = [
            {"entity_group": one["type"], "word": one["text"], **{key: one[key] for key in ("score", "start", "end")}}
            for one in answer["entities"]
        ]
        return [one for one in found if one["entity_group"] not in ignored]
    key = "entity" if asked.aggregation_strategy == "none" else "entity_group"
    return [
        {key: tag["tag"], "index": index, "word": tag["word"], "score": tag["score"]}
        | {side: tag[side] for side in ("start", "end") if side in tag}
        for index, tag in enumerate(answer["tags"], start=1)
        if tag["tag"] not in ignored
    ]


def _spans(made: TaskInputs, answer: Any, _: np.ndarray | None, asked: HubParameters) -> Any:
    spans = [answer, *(one for one in answer["others"] if one["text"] != answer["text"])]
    found = [{"answer": one["text"], "score": one["score"], "start": one["start"], "end": one["end"]} for one in spans]
    return found[0] if asked.top_k is None or asked.top_k == 1 else found[: asked.top_k]


_SHAPES = {"text-classification": _labels, "token-classification": _tags, "question-answering": _spans}
