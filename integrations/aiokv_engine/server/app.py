"""The server as a FastAPI app: OpenAI's routes, and aiokv's own beside them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from aiokv_asgi import LOOPBACK_HOSTS, KvRoutes
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request

from aiokv_engine.server.answers import ChatWire, CompletionWire
from aiokv_engine.server.errors import ApiError
from aiokv_engine.server.exchange import Exchange, Kind
from aiokv_engine.server.openapi import GENERATION_RESPONSES, LOOKUP_RESPONSES, body_of, describe
from aiokv_engine.server.schema import ChatRequest, CompletionRequest
from aiokv_engine.server.service import Service

__all__ = ["ServerApp", "make_app"]
