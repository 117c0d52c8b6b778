"""What may stand at masks: /fill-mask as Hugging Face's pipeline has it."""

from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import APIRouter, Response

from bertsmith.serving.http.errors import invalid, too_large
from bertsmith.serving.http.inputs import check_count, texts_asked
from bertsmith.serving.http.openapi import WORK_ERRORS
from bertsmith.serving.http.service import HttpRequest, RequestHere, StrictRoute
from bertsmith.serving.http.wire import Filled, FillMaskRequest, FillParameters
from bertsmith.serving.requests import TokenSequence
from bertsmith.serving.settings import Limits

if TYPE_CHECKING:
    from bertsmith.serving.model import ServedModel

router = APIRouter(route_class=StrictRoute, tags=["tasks"])
_TOP = 5


@router.post(
    "/fill-mask",
    summary="What may stand at masks",
    responses=WORK_ERRORS,
    response_model=list[Filled] | list[list[Filled]] | list[list[list[Filled]]],
)
async def fill_mask(body: FillMaskRequest, call: RequestHere) -> Response:
    """The likeliest pieces for a mask, the best first, with the text they make.

    A list for each mask where a text has several; a list for each text where several are given.
    """
    return await filled(call, body)


async def filled(call: HttpRequest, body: FillMaskRequest) -> Response:
    """The answer to a request for what stands at masks."""
    served = call.model(body.model, "fill_mask")
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    limits = call.settings.limits
    check_count(texts, limits)
    nested = body.parameters or FillParameters()
    top = body.top_k or nested.top_k or _TOP
    targets = nested.targets if body.targets is None else body.targets
    asked = await call.read(_masked, served, texts, call.truncates(body.truncate), limits)
    allowed = None if targets is None else _ids(served, targets)
    outputs = await call.work("fill_mask", asked)

    def found() -> Any:
        answers = [_filled(served, *parts, top, allowed) for parts in zip(asked, outputs, strict=True)]
        return answers[0] if isinstance(body.inputs, str) else answers

    return await call.answer(found)


def _masked(served: "ServedModel", texts: list[str], truncates: bool, limits: Limits) -> list[TokenSequence]:
    """The sequences of texts with the places of their masks."""
    mask = served.tokenizer.mask
    asked = [
        TokenSequence(own.tokens, own.types, np.flatnonzero(own.tokens == mask))
        for own in texts_asked(served, texts, truncates, limits)
    ]
    for index, own in enumerate(asked):
        if own.places is None or not len(own.places):
            raise invalid(f"text {index} has no {served.tokenizer.pieces([mask])[0]} to fill")
    masks = sum(len(own.places) for own in asked if own.places is not None)
    if masks > limits.masks:
        raise too_large(f"the request has {masks} masks; at most {limits.masks} are taken in one")
    return asked


def _ids(served: "ServedModel", targets: list[str]) -> np.ndarray:
    """The ids of the pieces to choose among."""
    vocabulary = served.tokenizer.vocabulary
    unknown = next((target for target in targets if target not in vocabulary), None)
    if unknown is not None or not targets:
        raise invalid(f"targets has {unknown!a:.80}; allowed: pieces of the model's vocabulary")
    return np.unique([vocabulary[target] for target in targets])


def _filled(
    served: "ServedModel", asked: TokenSequence, shares: np.ndarray, top: int, allowed: np.ndarray | None
) -> Any:
    """What may stand at the masks of one text; a list of lists if it has several.

    Shape: shares (places, vocabulary).
    """
    assert asked.places is not None
    tokenizer = served.tokenizer
    found = []
    for place, own in zip(asked.places.tolist(), shares, strict=True):
        ids = np.arange(len(own)) if allowed is None else allowed
        best = ids[np.argsort(-own[ids], kind="stable")[:top]]
        pieces = []
        for token, piece in zip(best.tolist(), tokenizer.pieces(best), strict=True):
            tokens = asked.tokens.copy()
            tokens[place] = token
            score, sequence = float(own[token]), tokenizer.decode(tokens)
            pieces.append({"score": score, "token": token, "token_str": piece, "sequence": sequence})
        found.append(pieces)
    return found[0] if len(found) == 1 else found
