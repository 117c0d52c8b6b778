"""State of the service: /info, /health, /metrics, /live and OpenAI's list of models."""

from dataclasses import asdict

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from bertsmith import __version__
from bertsmith.serving.http.openapi import INFO_RESPONSES, OPENAI_INFO_RESPONSES
from bertsmith.serving.http.service import service_of, unknown_model
from bertsmith.serving.http.wire import (
    HealthResponse,
    Info,
    Live,
    LoadInfo,
    ModelInfo,
    OpenAIModel,
    OpenAIModels,
    SizeInfo,
)
from bertsmith.serving.scheduler import Scheduler

router = APIRouter(tags=["service"])
_PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METRICS_RESPONSE = {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Metrics"}


@router.get(
    "/health",
    summary="Whether the service accepts requests",
    response_model=HealthResponse,
    responses={503: {"model": HealthResponse, "description": "The service is shutting down; send no new requests."}},
)
async def health(request: Request) -> Response:
    """Return `ready` with 200, or `draining` with 503; needs no key."""
    is_draining = service_of(request).is_draining
    return JSONResponse({"status": "draining" if is_draining else "ready"}, 503 if is_draining else 200)


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses=INFO_RESPONSES | {200: _METRICS_RESPONSE},
)
async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus' text format: requests, latencies, tokens, queues, batches and sizes."""
    return Response(service_of(request).metrics.text(), media_type=_PROMETHEUS_TYPE)


@router.get("/live", summary="The current load of every model", tags=["page"], responses=INFO_RESPONSES)
async def live(request: Request) -> Live:
    """Return queue, throughput, latency and current size of every model."""
    schedulers = service_of(request).schedulers
    return Live(models={name: _live_stats(scheduler) for name, scheduler in schedulers.items()})


def _live_stats(scheduler: Scheduler) -> dict[str, int | float | None]:
    stats = asdict(scheduler.stats())
    subnet = stats.pop("subnet")
    return stats | {"width": 1.0 if subnet is None else subnet.width, "depth": 1.0 if subnet is None else subnet.depth}


@router.get("/info", summary="Models and limits", responses=INFO_RESPONSES)
async def info(request: Request) -> Info:
    """Return properties and operations of every model, and the limits on one request."""
    service = service_of(request)
    models = [_model_info(scheduler) for scheduler in service.schedulers.values()]
    limits = service.settings.limits
    return Info(
        model_id=models[0].name,
        version=__version__,
        max_input_length=models[0].max_length,
        max_client_batch_size=limits.texts,
        max_batch_tokens=limits.tokens,
        max_concurrent_requests=limits.requests,
        auto_truncate=service.settings.truncate,
        models=models,
    )


def _model_info(scheduler: Scheduler) -> ModelInfo:
    served, stats = scheduler.served, scheduler.stats()
    task = served.task
    subnets = [size.subnet for size in served.schedule.sizes]
    return ModelInfo(
        name=served.name,
        family=served.runner.config.family,
        works=sorted(served.operations),
        task=None if task is None else task.kind,
        labels=list(getattr(task, "labels", None) or ()) or None,
        columns=None if task is None else task.input_columns,
        max_length=served.encoding.length,
        is_elastic=len(subnets) > 1,
        sizes=[
            SizeInfo(width=1.0 if one is None else one.width, depth=1.0 if one is None else one.depth)
            for one in subnets
        ],
        device=served.runner.device.type,
        precision=served.precision,
        cuda_graphs=0 if scheduler.captured is None else len(scheduler.captured),
        engine=LoadInfo(
            waiting_sequences=stats.waiting_sequences,
            waiting_tokens=stats.waiting_tokens,
            sequences_per_second=stats.sequences_per_second,
            answered=stats.answered,
            refused=stats.refused,
            late=stats.late,
        ),
    )


@router.get("/v1/models", summary="OpenAI's list of models", responses=OPENAI_INFO_RESPONSES)
async def models(request: Request) -> OpenAIModels:
    """Return the names of all models, which requests use in the field `model`."""
    return OpenAIModels(data=[OpenAIModel(id=name) for name in service_of(request).schedulers])


@router.get("/v1/models/{name}", summary="One entry of OpenAI's list of models", responses=OPENAI_INFO_RESPONSES)
async def model(name: str, request: Request) -> OpenAIModel:
    """Return one model; 404 if it is not served."""
    service = service_of(request)
    if name not in service.schedulers:
        raise unknown_model(name, service.schedulers)
    return OpenAIModel(id=name)
