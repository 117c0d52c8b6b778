"""The web application: models and their schedulers behind HTTP endpoints."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI

from bertsmith import __version__
from bertsmith.serving.http import embed, errors, explore, hub, info, openapi, page, tasks
from bertsmith.serving.http.middleware import RequestMiddleware
from bertsmith.serving.http.schemas import describe_models
from bertsmith.serving.http.service import Service
from bertsmith.serving.scheduler import Scheduler
from bertsmith.serving.settings import ServeSettings


def make_app(schedulers: Mapping[str, Scheduler], settings: ServeSettings) -> FastAPI:
    """Return the application; the first model is used by requests that name none."""
    service = Service(schedulers, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.drain()

    app = FastAPI(
        title="Bertsmith",
        description="Text encoders as a service: embeddings, predictions, reranking and mask filling.",
        version=__version__,
        docs_url=None,  # FastAPI's page loads scripts from other hosts; openapi.py has one that does not
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.service = service
    errors.install_handlers(app)
    for module in (embed, tasks, hub, info, openapi, page):
        app.include_router(module.router)
    app.include_router(explore.make_router(schedulers))
    app.add_middleware(RequestMiddleware, service=service)
    if schedulers:
        describe_models(app, service)
    if settings.key is not None:
        openapi.document_key(app)
    return app
