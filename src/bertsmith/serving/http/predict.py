"""What a fine-tuned model says: /predict for every kind of task, labels as text-embeddings-inference has them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Response

from bertsmith.serving.http.inputs import TaskInputs, check_count, listed, task_asked
from bertsmith.serving.http.openapi import WORK_ERRORS
from bertsmith.serving.http.service import HttpRequest, RequestHere, StrictRoute
from bertsmith.serving.http.wire import Labelled, PredictRequest

router = APIRouter(route_class=StrictRoute, tags=["tasks"])


@router.post(
    "/predict",
    summary="The model's task, done on inputs",
    responses=WORK_ERRORS,
    response_model=list[Labelled] | dict[str, Any] | list[list[Labelled] | dict[str, Any]],
)
async def predict(body: PredictRequest, call: RequestHere) -> Response:
    """What the model says of an input, or of each of a list of them.

    Labels (classification, several labels at a time) come as `[{"label", "score"}, …]`, the best first. Other tasks
    answer with an object: `{"value"}` of regression, `{"tags", "entities"}` of tagging, `{"text", "start", "end",
    "score", "others"}` of answer spans, `{"index", "text", "score", "scores"}` of choices, `{"vector"}` or
    `{"similarity"}` of embedding.
    """
    made, outputs, is_single = await task_outputs(call, body.inputs, body.model, body.truncate)

    def found() -> Any:
        answers = said(made, outputs, raw=body.raw_scores)
        return answers[0] if is_single else answers

    return await call.answer(found)


async def task_outputs(
    call: HttpRequest, inputs: Any, model: str | None, truncate: bool | None
) -> tuple[TaskInputs, list[np.ndarray], bool]:
    """Inputs as their task knows them, what the head said item by item, and whether there was one input alone."""
    served = call.model(model, "task")
    assert served.kept is not None
    given, is_single = listed(served.kept.task, inputs)
    check_count(given, call.settings.limits)
    made = await call.read(task_asked, served, given, call.truncates(truncate), call.settings.limits)
    outputs = made.outputs(await call.work("task", made.asked), is_for_tokens=served.runner.is_for_tokens)
    return made, outputs, is_single


def said(made: TaskInputs, outputs: Sequence[np.ndarray], *, raw: bool = False) -> list[Any]:
    """What the outputs of a task's head mean, input by input, as clients read it."""
    answers = made.task.answers(made.examples, made.features, outputs)
    if made.task.kind in ("classification", "multi_label"):
        if raw:
            names = getattr(made.task, "labels", ())
            return [labelled(dict(zip(names, own.tolist(), strict=True))) for own in outputs]
        return [labelled(answer["scores"]) for answer in answers]
    form = _FORMS[made.task.kind]
    return [form(example, answer) for example, answer in zip(made.examples, answers, strict=True)]


def labelled(scores: dict[str, float]) -> list[dict[str, Any]]:
    """Labels with their scores, the best first."""
    ordered = sorted(scores.items(), key=lambda item: -item[1])
    return [{"label": label, "score": score} for label, score in ordered]


def _value(_: Any, answer: Mapping[str, Any]) -> dict[str, Any]:
    return {"value": answer["answer"]}


def _tags(example: Any, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Words with their tags, by characters where running text was given; and the stretches that tags stand for."""
    parts = zip(answer["words"], answer["answer"], answer["scores"], strict=True)
    tags = [{"word": word, "tag": tag, "score": score} for word, tag, score in parts]
    for tag, (start, end) in zip(tags, example.places, strict=False):  # no places where words were given
        tag |= {"start": start, "end": end}
    found: dict[str, Any] = {"tags": tags}
    if "entities" in answer:
        found["entities"] = [
            {"type": one["type"], "text": one["text"], "start": one["begin"], "end": one["end"], "score": one["score"]}
            for one in answer["entities"]
        ]
    return found


def _span(_: Any, answer: Mapping[str, Any]) -> dict[str, Any]:
    """The answer, which is empty where the passage gives none, and all that were nearly as good."""
    best = {"text": answer["answer"], "start": answer["begin"], "end": answer["end"], "score": answer["score"]}
    others = [
        {"text": one["text"], "start": one["begin"], "end": one["end"], "score": one["probability"]}
        for one in answer["n_best"]
    ]
    return {**best, "others": others}


def _choice(_: Any, answer: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": answer["answer"], "text": answer["text"], "score": answer["score"], "scores": answer["scores"]}


def _embedding(example: Any, answer: Mapping[str, Any]) -> dict[str, Any]:
    """The vector of a text, or how alike two are."""
    return {"vector" if len(example.texts) == 1 else "similarity": answer["answer"]}


_FORMS = {"regression": _value, "tagging": _tags, "spans": _span, "choice": _choice, "embedding": _embedding}
