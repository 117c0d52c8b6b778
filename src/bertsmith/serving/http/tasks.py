"""Tasks: /predict for every fine-tuned model, /rerank of text-embeddings-inference, Hugging Face's /fill-mask."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from fastapi import APIRouter, Response

from bertsmith.answers.sequences import Answer
from bertsmith.answers.texts import softmax
from bertsmith.serving.http.embed import embed_rows, normalise_vectors
from bertsmith.serving.http.errors import invalid, too_large
from bertsmith.serving.http.inputs import TaskInputs, check_count, mask_sequences, split_inputs, task_inputs
from bertsmith.serving.http.openapi import MODEL_RESPONSES
from bertsmith.serving.http.service import CurrentRequest, HttpRequest, StrictRoute
from bertsmith.serving.http.wire import (
    ChoiceResponse,
    ConstituentResponse,
    EntityResponse,
    FillMaskRequest,
    FillParameters,
    LabelScore,
    MaskToken,
    Prediction,
    PredictRequest,
    RankedText,
    RerankRequest,
    SimilarityResponse,
    SpanAnswerResponse,
    SpanResponse,
    Tag,
    TagsResponse,
    TaskInput,
    TreeResponse,
    Value,
    Vector,
)
from bertsmith.serving.model import ServedModel
from bertsmith.serving.requests import TokenSequence
from bertsmith.tasks.classification import Classification
from bertsmith.tasks.embedding import TextEmbedding
from bertsmith.tasks.regression import Regression

router = APIRouter(route_class=StrictRoute, tags=["tasks"])
_DEFAULT_TOP = 5


@router.post(
    "/predict",
    summary="Predictions of the model's task",
    responses=MODEL_RESPONSES,
    response_model=Prediction | list[Prediction],
)
async def predict(body: PredictRequest, request: CurrentRequest) -> Response:
    """Return the prediction for one input, or a list of predictions for a list of inputs.

    Classification and multi-label return `[{"label", "score"}, …]`, the best first. Other tasks return an object:
    `{"value"}` for regression, `{"tags", "entities"}` for tagging, `{"tree", "words", "constituents"}` for parsing,
    `{"text", "start", "end", "score", "others"}` for spans, `{"index", "text", "score", "scores"}` for choices,
    `{"vector"}` or `{"similarity"}` for embedding.
    """
    outputs = await run_task(request, body.inputs, body.model, body.truncate)

    def make() -> Prediction | list[Prediction]:
        predictions = make_predictions(outputs, raw_scores=body.raw_scores)
        return predictions[0] if outputs.is_single else predictions

    return await request.respond(make)


@dataclass(frozen=True)
class TaskOutputs:
    """The inputs of a request and the outputs of the task head for each input."""

    inputs: TaskInputs
    outputs: list[np.ndarray]
    is_single: bool
    """Whether the request has a single input outside a list."""


async def run_task(
    request: HttpRequest,
    inputs: TaskInput | Sequence[TaskInput],
    model: str | None,
    truncate: bool | None,
) -> TaskOutputs:
    """Run the task head of a model on the inputs of a request."""
    served = request.select_model(model, "task")
    assert served.task is not None
    rows, is_single = split_inputs(served.task, inputs)
    limits, truncates = request.settings.limits, request.truncates(truncate)
    check_count(rows, limits)
    tokenised = await request.tokenise(lambda: task_inputs(served, rows, truncate=truncates, limits=limits))
    result = await request.submit("task", tokenised.sequences)
    outputs = await request.run(lambda: tokenised.item_outputs(result.outputs, served.runner))
    return TaskOutputs(tokenised, outputs, is_single)


def make_predictions(task: TaskOutputs, *, raw_scores: bool = False) -> list[Prediction]:
    """Return the prediction for every input."""
    kind, examples = task.inputs.task.kind, task.inputs.examples
    answers = task.inputs.answers(task.outputs)
    if kind in ("classification", "multi_label"):
        if raw_scores:
            labels = getattr(task.inputs.task, "labels", ())
            return [sort_labels(dict(zip(labels, logits.tolist(), strict=True))) for logits in task.outputs]
        return [sort_labels(answer["scores"]) for answer in answers]
    return [_prediction(kind, example, answer) for example, answer in zip(examples, answers, strict=True)]


def sort_labels(scores: dict[str, float]) -> list[LabelScore]:
    """Return labels with their scores, the best first."""
    ordered = sorted(scores.items(), key=lambda item: -item[1])
    return [LabelScore(label=label, score=score) for label, score in ordered]


def _prediction(kind: str, example: object, answer: Answer) -> Prediction:
    match kind:
        case "regression":
            return Value(value=answer["answer"])
        case "tagging":
            return _tags(getattr(example, "offsets", ()), answer)
        case "parsing":
            spans = [ConstituentResponse(**span) for span in answer["constituents"]]
            return TreeResponse(tree=answer["answer"], words=answer["words"], constituents=spans)
        case "spans":
            others = [
                SpanResponse(text=one["text"], start=one["begin"], end=one["end"], score=one["probability"])
                for one in answer["n_best"]
            ]
            return SpanAnswerResponse(
                text=answer["answer"], start=answer["begin"], end=answer["end"], score=answer["score"], others=others
            )
        case "choice":
            return ChoiceResponse(
                index=answer["answer"], text=answer["text"], score=answer["score"], scores=answer["scores"]
            )
        case "embedding":
            is_vector = isinstance(answer["answer"], list)
            return Vector(vector=answer["answer"]) if is_vector else SimilarityResponse(similarity=answer["answer"])
    raise invalid(f"the task {kind} cannot be served; use bertsmith predict")


def _tags(offsets: Sequence[tuple[int, int]], answer: Answer) -> TagsResponse:
    """Return words with their tags, character offsets if the input was a text, and entities."""
    bounds: Sequence[tuple[int | None, int | None]] = offsets or [(None, None)] * len(answer["words"])
    tags = [
        Tag(word=word, tag=tag, score=score, start=start, end=end)
        for word, tag, score, (start, end) in zip(
            answer["words"], answer["answer"], answer["scores"], bounds, strict=True
        )
    ]
    if "entities" not in answer:
        return TagsResponse(tags=tags)
    entities = [
        EntityResponse(type=one["type"], text=one["text"], start=one["begin"], end=one["end"], score=one["score"])
        for one in answer["entities"]
    ]
    return TagsResponse(tags=tags, entities=entities)


@router.post(
    "/rerank",
    summary="Texts sorted by relevance to a query",
    responses=MODEL_RESPONSES,
    response_model=list[RankedText],
)
async def rerank(body: RerankRequest, request: CurrentRequest) -> Response:
    """Return the texts with their scores, the best first.

    A model for pairs reads the query with each text. With two labels, the score is the probability of the positive one
    (raw: the difference of the logits); with regression, the prediction scaled to the range of the training data (raw:
    the prediction). For other models the score is the cosine similarity of the vectors, raw or not.
    """
    check_count(body.texts, request.settings.limits, "texts")
    served = request.service.find(body.model).served
    if not can_rerank(served):
        kind = "no task" if served.task is None else served.task.kind
        allowed = "a model for pairs with two labels or one number, an embedding model, or a model without a task"
        raise invalid(f"the model {served.name!r} ({kind}) cannot rerank; use {allowed}")
    scores = await (_pair_scores if _scores_pairs(served) else _cosines)(request, body)

    def make() -> list[RankedText]:
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        return [
            RankedText(index=index, score=scores[index], text=body.texts[index] if body.return_text else None)
            for index in order
        ]

    return await request.respond(make)


def can_rerank(served: ServedModel) -> bool:
    """Whether a model scores pairs of texts, or compares vectors because it has no other task."""
    compares = served.task is None or isinstance(served.task, TextEmbedding)
    return _scores_pairs(served) or (compares and "vectors" in served.operations)


def _scores_pairs(served: ServedModel) -> bool:
    """Whether the task reads two texts and predicts one of two labels, or a number."""
    task = served.task
    is_binary = isinstance(task, Classification) and len(task.labels) == 2
    return (is_binary or isinstance(task, Regression)) and getattr(task, "pair", None) is not None


async def _pair_scores(request: HttpRequest, body: RerankRequest) -> list[float]:
    count, allowed = len(body.texts), request.settings.limits.body_bytes
    characters = count * len(body.query)
    if characters > allowed:  # the query is tokenised with each text
        raise too_large(f"{count} times the query has {characters} characters; at most {allowed} are accepted")
    outputs = await run_task(request, [[body.query, text] for text in body.texts], body.model, body.truncate)
    task = outputs.inputs.task
    if isinstance(task, Classification):
        index = 1 if task.positive is None else task.labels.index(task.positive)
        return [
            float(logits[index] - logits[1 - index]) if body.raw_scores else float(softmax(logits)[index])
            for logits in outputs.outputs
        ]
    assert isinstance(task, Regression)
    low, high = task.lowest or 0.0, 1.0 if task.highest is None else task.highest
    values = [float(answer["answer"]) for answer in outputs.inputs.answers(outputs.outputs)]
    return values if body.raw_scores else [min(max((value - low) / (high - low), 0.0), 1.0) for value in values]


async def _cosines(request: HttpRequest, body: RerankRequest) -> list[float]:
    texts = [body.query, *body.texts]
    vectors = normalise_vectors(await embed_rows(request, texts, body.model, truncate=body.truncate, normalise=False))
    cosines: list[float] = (vectors[1:] @ vectors[0]).astype(float).tolist()
    return cosines


@router.post(
    "/fill-mask",
    summary="Tokens for masks",
    responses=MODEL_RESPONSES,
    response_model=list[MaskToken] | list[list[MaskToken]] | list[list[list[MaskToken]]],
)
async def fill_mask(body: FillMaskRequest, request: CurrentRequest) -> Response:
    """Return the most probable tokens for a mask, the best first, each with the filled text.

    A text with several masks returns a list per mask; a request with several texts, a list per text.
    """
    return await fill_masks(request, body)


async def fill_masks(request: HttpRequest, body: FillMaskRequest) -> Response:
    """Return the response to a fill-mask request."""
    served = request.select_model(body.model, "fill_mask")
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    limits, truncates = request.settings.limits, request.truncates(body.truncate)
    check_count(texts, limits)
    nested = body.parameters or FillParameters()
    top = body.top_k or nested.top_k or _DEFAULT_TOP
    targets = [_target_ids(served, one) for one in (body.targets, nested.targets) if one is not None]
    allowed = targets[0] if targets else None
    sequences = await request.tokenise(lambda: mask_sequences(served, texts, truncate=truncates, limits=limits))
    outputs = (await request.submit("fill_mask", sequences)).outputs

    def make() -> object:
        filled = [
            _mask_tokens(served, sequence, probabilities, top, allowed)
            for sequence, probabilities in zip(sequences, outputs, strict=True)
        ]
        flat = [masks[0] if len(masks) == 1 else masks for masks in filled]
        return flat[0] if isinstance(body.inputs, str) else flat

    return await request.respond(make)


def _target_ids(served: ServedModel, targets: list[str]) -> np.ndarray:
    vocabulary = served.tokenizer.vocabulary
    unknown = next((target for target in targets if target not in vocabulary), None)
    if unknown is not None:
        raise invalid(f"targets has {unknown!a:.80}; allowed: tokens of the model's vocabulary")
    return np.unique([vocabulary[target] for target in targets])


def _mask_tokens(
    served: ServedModel, sequence: TokenSequence, probabilities: np.ndarray, top: int, allowed: np.ndarray | None
) -> list[list[MaskToken]]:
    """Return the best tokens for every mask of one text.

    Shape: probabilities (masks, vocabulary).
    """
    tokenizer = served.tokenizer
    masks = []
    for position, scores in zip(sequence.mask_positions.tolist(), probabilities, strict=True):
        ids = np.arange(len(scores)) if allowed is None else allowed
        best = ids[np.argsort(-scores[ids], kind="stable")[:top]]
        candidates = []
        for token, text in zip(best.tolist(), tokenizer.tokens(best), strict=True):
            tokens = sequence.tokens.copy()
            tokens[position] = token
            candidates.append(
                MaskToken(score=float(scores[token]), token=token, token_str=text, sequence=tokenizer.decode(tokens))
            )
        masks.append(candidates)
    return masks
