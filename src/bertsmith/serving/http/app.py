"""The web application: models and their engines behind the endpoints that people's clients speak."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from bertsmith import __version__
from bertsmith.serving.http import embed, errors, fill, hub, page, predict, rerank, tokens
from bertsmith.serving.http import info as about
from bertsmith.serving.http import openapi as docs
from bertsmith.serving.http.middleware import RequestMiddleware
from bertsmith.serving.http.service import Service
from bertsmith.serving.scheduler import Scheduler
from bertsmith.serving.settings import ServeSettings

if TYPE_CHECKING:
    from bertsmith.serving.model import ServedModel


def make_app(models: "Mapping[str, tuple[ServedModel, Scheduler]]", settings: ServeSettings) -> FastAPI:
    """The application that answers with these models; the first is asked where a request names none."""
    service = Service(models, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.drain()

    app = FastAPI(
        title="Bertsmith",
        description="Encoders as a service: vectors, predictions, rankings and masks.",
        version=__version__,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; docs.py has one that does not
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.service = service
    errors.install(app)
    for part in (embed, predict, rerank, fill, tokens, hub, about, docs):
        app.include_router(part.router)
    app.include_router(page.router(models, settings))
    app.add_middleware(RequestMiddleware, service=service)
    if settings.key is not None:
        _document_key(app)
    return app


def _document_key(app: FastAPI) -> None:
    """Says in the OpenAPI document that a key is wanted; the guard is who asks for it."""
    document = app.openapi()
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]
    document["paths"]["/health"]["get"]["security"] = []
