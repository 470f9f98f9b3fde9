"""The OpenAPI document: what `schema` says, with the limits of the model that is served.

Bodies are read by `body`, not by FastAPI, so that their size is bounded while they come and large ones are checked in a
thread; that is why their schemas are put into the document here.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from aiokv_engine.server.schema import ChatRequest, CompletionRequest
from aiokv_engine.server.service import Service

__all__ = ["GENERATION_RESPONSES", "LOOKUP_RESPONSES", "ModelCard", "ModelList", "body_of", "describe"]

_REF: Final = "#/components/schemas/{model}"


class ModelCard(BaseModel):
    """The served model. `max_model_len` bounds prompt and answer together, in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "aiokv"
    max_model_len: int


class ModelList(BaseModel):
    """All models there are."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer with an error status."""

    error: ErrorDetail


def _error(description: str) -> dict[str, Any]:
    return {"description": description, "model": ErrorBody}


GENERATION_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "The answer, whole or as server-sent events.", "content": {"text/event-stream": {}}},
    400: _error("The request cannot be answered; `param` names what is wrong."),
    404: _error("No such model."),
    408: _error("The body did not come in time."),
    413: _error("The body is too large."),
    415: _error("The body is not JSON by its header."),
    429: _error("Too many requests wait; `Retry-After` says when to try again."),
    500: _error("A fault of the server."),
    503: _error("The server is shutting down."),
}
LOOKUP_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {404: _error("No such model.")}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Returns what a route says about its body, for `openapi_extra`."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, *, service: Service) -> None:
    """Makes `app` answer its document with the bodies in it. Call once, when all routes are there."""
    document = app.openapi()
    _, found = models_json_schema([(CompletionRequest, "validation"), (ChatRequest, "validation")], ref_template=_REF)
    schemas = found["$defs"]
    for name in (CompletionRequest.__name__, ChatRequest.__name__):
        properties = schemas[name]["properties"]
        properties["model"]["anyOf"][0] = {"type": "string", "enum": [service.name]}
        for key in ("max_tokens", "max_completion_tokens"):
            if key in properties:
                del properties[key]["anyOf"][0]["exclusiveMaximum"]
                properties[key]["anyOf"][0]["maximum"] = service.prompts.limit - 1
    _limit_tokens(schemas[CompletionRequest.__name__], service=service)
    document["components"]["schemas"].update(schemas)


def _limit_tokens(schema: dict[str, Any], *, service: Service) -> None:
    """Narrows token ids to the vocabulary."""
    for form in schema["properties"]["prompt"]["anyOf"]:
        items = form.get("items", {})
        for ids in (items, items.get("items", {})):
            if ids.get("type") == "integer":
                del ids["exclusiveMaximum"]
                ids["maximum"] = service.loaded.tokenizer.vocab_size - 1
