"""Texts in the order in which they fit a query: /rerank as text-embeddings-inference has it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import APIRouter, Response

from bertsmith.answers.texts import softmax
from bertsmith.serving.http.embed import unit, vectors_of
from bertsmith.serving.http.errors import invalid
from bertsmith.serving.http.inputs import check_count
from bertsmith.serving.http.openapi import WORK_ERRORS
from bertsmith.serving.http.predict import task_outputs
from bertsmith.serving.http.service import HttpRequest, RequestHere, StrictRoute
from bertsmith.serving.http.wire import Ranked, RerankRequest
from bertsmith.tasks.base import Task
from bertsmith.tasks.classification import Classification
from bertsmith.tasks.embedding import Embedding
from bertsmith.tasks.regression import Regression

if TYPE_CHECKING:
    from bertsmith.serving.model import ServedModel

router = APIRouter(route_class=StrictRoute, tags=["tasks"])
_CAN = "a model of pairs with one number or two labels, a model for embeddings, or one without a task"


@router.post(
    "/rerank", summary="Texts in the order they fit a query", responses=WORK_ERRORS, response_model=list[Ranked]
)
async def rerank(body: RerankRequest, call: RequestHere) -> Response:
    """The texts with their scores, the best first.

    A model of pairs reads the query with each text: two labels give the share of the positive one (raw: how far its
    score is above the other's), a number gives its place between the lowest and the highest known (raw: the number).
    Other models compare vectors: the cosine, raw or not.
    """
    check_count(body.texts, call.settings.limits, "texts")
    served, _ = call.service.find(body.model)
    score = _pair_scores(served)
    if score is None:
        scores = await _cosines(call, body)
    else:
        pairs = [[body.query, text] for text in body.texts]
        made, outputs, _ = await task_outputs(call, pairs, body.model, body.truncate)
        answers = made.task.answers(made.examples, made.features, outputs)
        scores = score(outputs, answers, body.raw_scores)

    def found() -> list[dict[str, Any]]:
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        ranked = [{"index": index, "score": scores[index]} for index in order]
        return [one | {"text": body.texts[int(one["index"])]} for one in ranked] if body.return_text else ranked

    return await call.answer(found)


Scores = Callable[[Sequence[np.ndarray], Sequence[Mapping[str, Any]], bool], list[float]]


def _pair_scores(served: "ServedModel") -> Scores | None:
    """How outputs for pairs become scores; None for a model whose vectors are compared."""
    task: Task[Any] | None = None if served.kept is None else served.kept.task
    if task is None or isinstance(task, Embedding):
        return None
    if isinstance(task, Classification) and task.pair is not None and len(task.labels) == 2:
        place = 1 if task.positive is None else task.labels.index(task.positive)
        return lambda outputs, _, raw: [
            float(own[place] - own[1 - place]) if raw else float(softmax(own)[place]) for own in outputs
        ]
    if isinstance(task, Regression) and task.pair is not None:
        low, high = task.lowest or 0.0, 1.0 if task.highest is None else task.highest
        return lambda _, answers, raw: [
            answer["answer"] if raw else min(max((answer["answer"] - low) / (high - low), 0.0), 1.0)
            for answer in answers
        ]
    raise invalid(f"the model {served.name!r} ({task.kind}) cannot rank; it takes {_CAN}")


async def _cosines(call: HttpRequest, body: RerankRequest) -> list[float]:
    vectors = unit(
        await vectors_of(call, [body.query, *body.texts], body.model, truncate=body.truncate, normalizes=False)
    )
    cosines: list[float] = (vectors[1:] @ vectors[0]).astype(float).tolist()
    return cosines
