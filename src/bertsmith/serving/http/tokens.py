"""Texts to tokens and back: /tokenize and /decode as text-embeddings-inference has them."""

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response

from bertsmith.serving.http.errors import invalid, too_large
from bertsmith.serving.http.inputs import check_count, marks
from bertsmith.serving.http.openapi import READ_ERRORS
from bertsmith.serving.http.service import RequestHere, StrictRoute
from bertsmith.serving.http.wire import DecodeRequest, Token, TokenizeRequest
from bertsmith.serving.settings import Limits

if TYPE_CHECKING:
    from bertsmith.serving.model import ServedModel

router = APIRouter(route_class=StrictRoute, tags=["tokens"])


@router.post("/tokenize", summary="The tokens of texts", responses=READ_ERRORS, response_model=list[list[Token]])
async def tokenize(body: TokenizeRequest, call: RequestHere) -> Response:
    """The tokens of every text, with where in its characters each begins and ends; marks stand nowhere."""
    served, _ = call.service.find(body.model)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    check_count(texts, call.settings.limits)
    tokens = await call.read(_tokens, served, texts, body.add_special_tokens, call.settings.limits)
    return await call.answer(lambda: tokens)


@router.post("/decode", summary="The texts of token ids", responses=READ_ERRORS, response_model=list[str])
async def decode(body: DecodeRequest, call: RequestHere) -> Response:
    """The text of every list of ids, without marks."""
    served, _ = call.service.find(body.model)
    rows: list[Any] = [body.ids] if body.ids and isinstance(body.ids[0], int) else list(body.ids)
    check_count(rows, call.settings.limits, "ids")
    size = served.tokenizer.size
    wrong = next((token for row in rows for token in row if not 0 <= token < size), None)
    if wrong is not None:
        raise invalid(f"ids has {str(wrong)[:20]}; allowed: 0 to {size - 1}")
    texts = await call.read(lambda: [served.tokenizer.decode(row) for row in rows])
    return await call.answer(lambda: texts)


def _tokens(served: "ServedModel", texts: list[str], adds_marks: bool, limits: Limits) -> list[list[dict[str, Any]]]:
    before, after = marks(served) if adds_marks else ([], [])
    special = set(served.tokenizer.special_ids)
    pieces = served.tokenizer.pieces
    rows = served.tokenizer.encode_offsets(texts)
    tokens = sum(len(ids) for ids, _ in rows)
    if tokens > limits.tokens:
        raise too_large(f"the request has {tokens} tokens; at most {limits.tokens} are taken in one")

    def marked(ids: list[int]) -> list[dict[str, Any]]:
        named = zip(ids, pieces(ids), strict=True)
        return [{"id": token, "text": piece, "special": True, "start": None, "stop": None} for token, piece in named]

    found = []
    for ids, offsets in rows:
        parts = zip(ids.tolist(), pieces(ids), offsets.tolist(), strict=True)
        own = [
            {"id": token, "text": piece, "special": token in special, "start": start, "stop": stop}
            for token, piece, (start, stop) in parts
        ]
        found.append([*marked(before), *own, *marked(after)])
    return found
