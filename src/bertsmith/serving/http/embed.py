"""Vectors of texts: /embed as text-embeddings-inference has it, /v1/embeddings as OpenAI has it."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Response

from bertsmith.serving.http.errors import invalid
from bertsmith.serving.http.inputs import check_count, ids_asked, texts_asked
from bertsmith.serving.http.openapi import OPENAI_ERRORS, WORK_ERRORS
from bertsmith.serving.http.service import HttpRequest, RequestHere, StrictRoute
from bertsmith.serving.http.wire import EmbedRequest, OpenAIAnswer, OpenAIRequest

router = APIRouter(route_class=StrictRoute, tags=["vectors"])


@router.post("/embed", summary="One vector for each text", responses=WORK_ERRORS, response_model=list[list[float]])
async def embed(body: EmbedRequest, call: RequestHere) -> Response:
    """The vectors of texts, in their order; a list also for a single text."""
    vectors = await vectors_of(
        call,
        _rows(call, body.inputs, "inputs"),
        body.model,
        truncate=body.truncate,
        normalizes=body.normalize is not False,
        dimensions=body.dimensions,
    )
    return await call.answer(vectors.tolist)


@router.post("/v1/embeddings", summary="OpenAI's embeddings", responses=OPENAI_ERRORS, response_model=OpenAIAnswer)
async def embeddings(body: OpenAIRequest, call: RequestHere) -> Response:
    """The vectors of texts as OpenAI's clients read them; they have length 1."""
    rows = _rows(call, body.input, "input")
    vectors = await vectors_of(call, rows, body.model, normalizes=True, dimensions=body.dimensions)
    tokens = int(call.headers["X-Compute-Tokens"])

    def made() -> dict[str, Any]:
        rows = _base64(vectors) if body.encoding_format == "base64" else vectors.tolist()
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": call.served.name, "usage": usage}

    return await call.answer(made)


async def vectors_of(
    call: HttpRequest,
    rows: Sequence[Any],
    model: str | None,
    *,
    normalizes: bool,
    truncate: bool | None = None,
    dimensions: int | None = None,
) -> np.ndarray:
    """The vector of every text, or of every list of token ids.

    Shape: (texts, width).
    """
    served = call.model(model, "vectors")
    read = texts_asked if isinstance(rows[0], str) else ids_asked
    asked = await call.read(read, served, rows, call.truncates(truncate), call.settings.limits)
    vectors = np.stack(await call.work("vectors", asked))
    if dimensions is not None:
        if dimensions > vectors.shape[1]:
            width = vectors.shape[1]
            raise invalid(f"dimensions is {str(dimensions)[:20]}; the vectors of {served.name!r} have {width}")
        vectors = vectors[:, :dimensions]
    return unit(vectors) if normalizes else vectors


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length 1; one of length 0 stays as it is."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    found: np.ndarray = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return found


def _rows(call: HttpRequest, inputs: Any, name: str) -> Sequence[Any]:
    """The texts of a request, or its lists of token ids, as a list, if they are not too many."""
    rows = [inputs] if isinstance(inputs, str) or (inputs and isinstance(inputs[0], int)) else inputs
    check_count(rows, call.settings.limits, name)
    return rows


def _base64(vectors: np.ndarray) -> list[str]:
    """Every vector as OpenAI packs it: little-endian float32."""
    return [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
