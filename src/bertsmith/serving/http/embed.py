"""Embeddings and tokens: /embed, /tokenize and /decode of text-embeddings-inference, OpenAI's /v1/embeddings."""

import base64
from collections.abc import Sequence

import numpy as np
from fastapi import APIRouter, Response

from bertsmith.serving.http.errors import invalid
from bertsmith.serving.http.inputs import (
    check_characters,
    check_count,
    check_tokens,
    id_sequences,
    special_tokens,
    text_sequences,
)
from bertsmith.serving.http.openapi import MODEL_RESPONSES, OPENAI_RESPONSES, TEXT_RESPONSES
from bertsmith.serving.http.service import CurrentRequest, HttpRequest, StrictRoute
from bertsmith.serving.http.wire import (
    DecodeRequest,
    EmbedRequest,
    OpenAIAnswer,
    OpenAIRequest,
    OpenAIUsage,
    OpenAIVector,
    Token,
    TokenizeRequest,
)
from bertsmith.serving.model import ServedModel
from bertsmith.serving.settings import Limits

router = APIRouter(route_class=StrictRoute)


@router.post(
    "/embed",
    summary="One vector per text",
    tags=["vectors"],
    responses=MODEL_RESPONSES,
    response_model=list[list[float]],
)
async def embed(body: EmbedRequest, request: CurrentRequest) -> Response:
    """Return the vectors of texts in order, as a list even for a single text."""
    rows = _input_rows(body.inputs)
    check_count(rows, request.settings.limits)
    normalise = body.normalize is not False
    vectors = await embed_rows(
        request, rows, body.model, truncate=body.truncate, normalise=normalise, dimensions=body.dimensions
    )
    return await request.respond(vectors.tolist)


@router.post(
    "/v1/embeddings",
    summary="OpenAI's embeddings",
    tags=["vectors"],
    responses=OPENAI_RESPONSES,
    response_model=OpenAIAnswer,
)
async def embeddings(body: OpenAIRequest, request: CurrentRequest) -> Response:
    """Return the vectors of texts in OpenAI's shape, normalised to length 1."""
    rows = _input_rows(body.input)
    check_count(rows, request.settings.limits, "input")
    vectors = await embed_rows(request, rows, body.model, normalise=True, dimensions=body.dimensions)
    tokens = int(request.headers["X-Compute-Tokens"])

    def make() -> OpenAIAnswer:
        values = _base64(vectors) if body.encoding_format == "base64" else vectors.tolist()
        data = [OpenAIVector.model_construct(index=index, embedding=row) for index, row in enumerate(values)]
        usage = OpenAIUsage(prompt_tokens=tokens, total_tokens=tokens)
        return OpenAIAnswer.model_construct(data=data, model=request.served.name, usage=usage)

    return await request.respond(make)


async def embed_rows(
    request: HttpRequest,
    rows: Sequence[str | list[int]],
    model: str | None,
    *,
    normalise: bool,
    truncate: bool | None = None,
    dimensions: int | None = None,
) -> np.ndarray:
    """Return the vectors of texts, or of lists of token ids.

    Shape: (texts, width).
    """
    served = request.select_model(model, "vectors")
    limits, truncates = request.settings.limits, request.truncates(truncate)
    texts = [row for row in rows if isinstance(row, str)]
    ids = [row for row in rows if not isinstance(row, str)]
    if texts:
        sequences = await request.tokenise(lambda: text_sequences(served, texts, truncate=truncates, limits=limits))
    else:
        sequences = await request.tokenise(lambda: id_sequences(served, ids, truncate=truncates, limits=limits))
    vectors = np.stack((await request.submit("vectors", sequences)).outputs)
    if dimensions is not None:
        width = vectors.shape[1]
        if dimensions > width:
            raise invalid(f"dimensions is {str(dimensions)[:20]}; the vectors of {served.name!r} have {width}")
        vectors = vectors[:, :dimensions]
    return normalise_vectors(vectors) if normalise else vectors


def _input_rows(inputs: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Return the texts of a request, or its lists of token ids, as a list."""
    if isinstance(inputs, str):
        return [inputs]
    ids = [one for one in inputs if isinstance(one, int)]
    return [ids] if ids else [one for one in inputs if not isinstance(one, int)]


def normalise_vectors(vectors: np.ndarray) -> np.ndarray:
    """Scale vectors to length 1; zero vectors stay zero."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    scaled: np.ndarray = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return scaled


def _base64(vectors: np.ndarray) -> list[str]:
    """Encode vectors like OpenAI: little-endian float32."""
    return [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]


@router.post(
    "/tokenize",
    summary="The tokens of texts",
    tags=["tokens"],
    responses=TEXT_RESPONSES,
    response_model=list[list[Token]],
)
async def tokenize(body: TokenizeRequest, request: CurrentRequest) -> Response:
    """Return the tokens of every text with their character offsets; added special tokens have none."""
    served = request.service.find(body.model).served
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    limits = request.settings.limits
    check_count(texts, limits)
    check_characters(sum(map(len, texts)), limits)
    tokens = await request.tokenise(lambda: _tokens(served, texts, body.add_special_tokens, limits))
    return await request.respond(lambda: tokens)


@router.post(
    "/decode", summary="The texts of token ids", tags=["tokens"], responses=TEXT_RESPONSES, response_model=list[str]
)
async def decode(body: DecodeRequest, request: CurrentRequest) -> Response:
    """Return the text of every list of ids, without special tokens."""
    served = request.service.find(body.model).served
    rows = [one for one in _input_rows(body.ids) if not isinstance(one, str)]
    check_count(rows, request.settings.limits, "ids")
    size = served.tokenizer.size
    unknown = next((token for row in rows for token in row if not 0 <= token < size), None)
    if unknown is not None:
        raise invalid(f"ids has {str(unknown)[:20]}; allowed: 0 to {size - 1}")
    texts = await request.tokenise(lambda: [served.tokenizer.decode(row) for row in rows])
    return await request.respond(lambda: texts)


def _tokens(served: ServedModel, texts: list[str], adds_special: bool, limits: Limits) -> list[list[Token]]:
    tokenizer = served.tokenizer
    before, after = special_tokens(served) if adds_special else ([], [])
    special_ids = set(tokenizer.special_ids)
    rows = tokenizer.encode_offsets(texts, limits.tokens + 1)
    check_tokens(sum(len(ids) for ids, _ in rows), limits)

    def special(ids: Sequence[int]) -> list[Token]:
        pairs = zip(ids, tokenizer.tokens(ids), strict=True)
        return [Token(id=token, text=text, special=True, start=None, stop=None) for token, text in pairs]

    return [
        [
            *special(before),
            *(
                Token(id=token, text=text, special=token in special_ids, start=start, stop=stop)
                for token, text, (start, stop) in zip(
                    ids.tolist(), tokenizer.tokens(ids), offsets.tolist(), strict=True
                )
            ),
            *special(after),
        ]
        for ids, offsets in rows
    ]
