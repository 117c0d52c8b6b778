"""What the service says of itself: /info, /health, /metrics, and OpenAI's list of models."""

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from bertsmith import __version__
from bertsmith.serving.http.openapi import ASK_ERRORS, OPENAI_ASK_ERRORS
from bertsmith.serving.http.service import Service
from bertsmith.serving.http.wire import Health, Info, OpenAIModel, OpenAIModels
from bertsmith.serving.scheduler import Scheduler

if TYPE_CHECKING:
    from bertsmith.serving.model import ServedModel

router = APIRouter(tags=["the service"])
_TEXT_FORM = "text/plain; version=0.0.4; charset=utf-8"  # as Prometheus names it


@router.get(
    "/health",
    summary="Whether the service takes requests",
    response_model=Health,
    responses={503: {"model": Health, "description": "The service is ending and should get no new requests."}},
)
async def health(request: Request) -> Response:
    """`ready` with 200, or `draining` with 503; needs no key."""
    is_draining = request.app.state.service.is_draining
    return JSONResponse({"status": "draining" if is_draining else "ready"}, 503 if is_draining else 200)


@router.get(
    "/metrics",
    summary="Figures for Prometheus",
    response_class=Response,
    responses=ASK_ERRORS | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Figures"}},
)
async def metrics(request: Request) -> Response:
    """Requests, times, tokens, the queue, batches and the size that answers, in Prometheus' text form."""
    service: Service = request.app.state.service
    return Response(service.metrics.text(), media_type=_TEXT_FORM)


@router.get("/info", summary="The models and the limits", response_model=Info, responses=ASK_ERRORS)
async def info(request: Request) -> dict[str, Any]:
    """What every model is and can do, and what one request may hold."""
    service: Service = request.app.state.service
    models = [_described(served, engine) for served, engine in service.models.values()]
    limits = service.settings.limits
    return {
        "model_id": models[0]["name"],
        "version": __version__,
        "max_input_length": models[0]["max_length"],
        "max_client_batch_size": limits.texts,
        "max_batch_tokens": limits.tokens,
        "max_concurrent_requests": limits.requests,
        "auto_truncate": service.settings.truncate,
        "models": models,
    }


def _described(served: "ServedModel", engine: Scheduler) -> dict[str, Any]:
    task = None if served.kept is None else served.kept.task
    subnets = [size.subnet for size in served.schedule.sizes]
    state = engine.stats()
    labels = getattr(task, "labels", None)
    return {
        "name": served.name,
        "family": served.runner.config.family,
        "works": sorted(served.works),
        "task": None if task is None else task.kind,
        "labels": list(labels) if labels else None,
        "columns": None if task is None else task.input_columns,
        "max_length": served.encoding.length,
        "is_elastic": len(subnets) > 1,
        "sizes": [{"width": 1.0, "depth": 1.0} if s is None else {"width": s.width, "depth": s.depth} for s in subnets],
        "engine": {
            "waiting_sequences": state.waiting_sequences,
            "waiting_tokens": state.waiting_tokens,
            "sequences_per_second": state.sequences_per_second,
            "answered": state.answered,
            "refused": state.refused,
            "late": state.late,
        },
    }


@router.get("/v1/models", summary="OpenAI's list of models", response_model=OpenAIModels, responses=OPENAI_ASK_ERRORS)
async def models(request: Request) -> dict[str, Any]:
    """The names that the field `model` of a request may have."""
    service: Service = request.app.state.service
    return {"object": "list", "data": [_openai(name) for name in service.models]}


@router.get("/v1/models/{name}", summary="OpenAI's model", response_model=OpenAIModel, responses=OPENAI_ASK_ERRORS)
async def model(name: str, request: Request) -> dict[str, Any]:
    """One of them."""
    service: Service = request.app.state.service
    return _openai(service.find(name)[0].name)


def _openai(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "bertsmith"}
