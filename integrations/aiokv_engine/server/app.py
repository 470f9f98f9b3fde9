"""The server as a FastAPI app: OpenAI's routes, and aiokv's own beside them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from aiokv_asgi import LOOPBACK_HOSTS, KvRoutes
from aiokv_asgi.guards import check_host
from aiokv_engine.server.answers import ChatWire, CompletionWire
from aiokv_engine.server.errors import ApiError, RequestOutcome
from aiokv_engine.server.exchange import Exchange, Kind
from aiokv_engine.server.openapi import (
    GENERATION_RESPONSES,
    LOOKUP_RESPONSES,
    ModelCard,
    ModelList,
    body_of,
    describe,
)
from aiokv_engine.server.schema import ChatRequest, CompletionRequest
from aiokv_engine.server.service import Service

__all__ = ["Access", "ServerApp", "make_app"]

_log = logging.getLogger(__name__)

_API_VERSION: Final = "1"
_ANY_HOST: Final = ("*",)
"""The app checks hosts itself, for all its paths alike."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may do what. `allowed_hosts` as in `KvRoutes`; without a token there are no admin routes."""

    allowed_hosts: Sequence[str] = LOOPBACK_HOSTS
    admin_token: str | None = None

    def __post_init__(self) -> None:
        """Refuse hosts that are none; raises `ConfigError`."""
        check_host(self.allowed_hosts)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerApp:
    """The app, and what ends its intake."""

    app: FastAPI
    service: Service
    kv_routes: KvRoutes

    def start_draining(self) -> None:
        """From now on new requests and `/ready` get 503; what runs goes on."""
        self.kv_routes.start_draining()
        self.service.gate.close()


def make_app(service: Service, *, access: Access | None = None, created: int = 0) -> ServerApp:
    """Returns the app of an open engine, which it neither opens nor closes. `created` is a time in Unix seconds."""
    access = access or Access()
    registry = CollectorRegistry()
    registry.register(service.serving.kv.collector)
    registry.register(service.metrics)
    kv_routes = KvRoutes(
        service.serving.kv,
        registry=registry,
        admin_token=access.admin_token,
        allowed_hosts=_ANY_HOST,
    )
    app = FastAPI(
        title="aiokv serve",
        version=_API_VERSION,
        docs_url=None,  # it would load scripts of another site
        redoc_url=None,
        redirect_slashes=False,
        middleware=[check_host(access.allowed_hosts, refusal=_answer(ApiError.unknown_host()))],
        exception_handlers={ApiError: _show_error, HTTPException: _show_http_error, Exception: _show_fault},
    )
    app.include_router(_generation_routes(service))
    app.include_router(_model_routes(service, created=created))
    describe(app, service=service)
    app.router.routes.extend(kv_routes.routes)
    return ServerApp(app=app, service=service, kv_routes=kv_routes)


def _generation_routes(service: Service) -> APIRouter:
    router = APIRouter(responses=GENERATION_RESPONSES)
    completions = Kind(CompletionRequest, plan=service.prompts.of_completion, make_wire=CompletionWire, prefix="cmpl")
    chats = Kind(ChatRequest, plan=service.prompts.of_chat, make_wire=ChatWire, prefix="chatcmpl")

    @router.post("/v1/completions", response_model=None, openapi_extra=body_of(CompletionRequest))
    async def complete() -> Response:
        """Goes on with a text."""
        return Exchange(service, kind=completions)

    @router.post("/v1/chat/completions", response_model=None, openapi_extra=body_of(ChatRequest))
    async def chat() -> Response:
        """Answers the last message of a conversation."""
        return Exchange(service, kind=chats)

    return router


def _model_routes(service: Service, *, created: int) -> APIRouter:
    router = APIRouter()
    places = {"model": service.name, "api": "/v1", "openapi": "/openapi.json", "live": "/live", "metrics": "/metrics"}
    card = ModelCard(id=service.name, created=created, max_model_len=service.prompts.limit)

    @router.get("/", include_in_schema=False)
    async def show_places() -> dict[str, str]:
        """Shows who looks at the address alone where to go on."""
        return places

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        """Lists the one model."""
        return ModelList(data=[card])

    @router.get("/v1/models/{model:path}", responses=LOOKUP_RESPONSES)
    async def show_model(model: str) -> ModelCard:
        """Shows the one model."""
        service.check_model(model)
        return card

    return router


async def _show_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return _answer(error)


async def _show_http_error(request: Request, error: Exception) -> Response:
    """What the router raises: no such path, or another method."""
    if not isinstance(error, HTTPException):
        raise error
    shown = ApiError(error.detail, status=error.status_code, outcome=RequestOutcome.INVALID, headers=error.headers)
    return await _show_error(request, shown)


async def _show_fault(request: Request, error: Exception) -> Response:
    _log.error("a request has failed: %s", type(error).__name__)
    return await _show_error(request, ApiError.internal())


def _answer(error: ApiError) -> Response:
    return JSONResponse(error.as_json(), status_code=error.status, headers=error.headers)
