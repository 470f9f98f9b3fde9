"""Every error that a client of the server can get, in the shape that OpenAI's API gives errors.

Messages name parameters and limits. They never repeat what a client has sent, and never tell about files or code.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, final

from aiokv.errors import AiokvError

__all__ = ["RETRY_AFTER_S", "ApiError", "RequestOutcome"]

RETRY_AFTER_S: Final = 1


class RequestOutcome(StrEnum):
    """How a request to generate has ended, for metrics."""

    OK = "ok"
    CANCELLED = "cancelled"
    """Its client has left, or the server was shut down before it was done."""
    REJECTED = "rejected"
    """The queue was full, or the server takes no more requests."""
    FAILED = "failed"
    INVALID = "invalid"


@final
class ApiError(AiokvError):
    """An answer with an error status. `param` is the parameter at fault, `code` is for programs."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        outcome: RequestOutcome = RequestOutcome.INVALID,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.outcome = outcome
        self.headers = dict(headers or {})

    @classmethod
    def queue_full(cls) -> ApiError:
        """Too many requests wait already."""
        return cls(
            "too many requests are waiting; try again later",
            status=429,
            code="queue_full",
            outcome=RequestOutcome.REJECTED,
            headers={"Retry-After": str(RETRY_AFTER_S)},
        )

    @classmethod
    def draining(cls) -> ApiError:
        """The server is about to end and takes no new requests."""
        return cls(
            "the server is shutting down",
            status=503,
            code="draining",
            outcome=RequestOutcome.REJECTED,
            headers={"Retry-After": str(RETRY_AFTER_S)},
        )

    @classmethod
    def cut_off(cls) -> ApiError:
        """The server has ended before the answer was complete."""
        message = "the server was shut down before the answer was complete"
        return cls(message, status=503, code="cut_off", outcome=RequestOutcome.CANCELLED)

    @classmethod
    def internal(cls) -> ApiError:
        """A fault of the server: its log says more."""
        return cls("internal error", status=500, code="internal_error", outcome=RequestOutcome.FAILED)

    @classmethod
    def too_long(cls, *, tokens: int, limit: int, param: str) -> ApiError:
        """Prompt and answer together have more tokens than one request can ever have."""
        message = f"prompt and answer would have {tokens} tokens; at most {limit} fit"
        return cls(message, param=param, code="context_length_exceeded")

    @classmethod
    def too_large(cls, *, limit: int) -> ApiError:
        """The body is too large. The rest of it is not read: the connection ends."""
        message = f"the body of a request has at most {limit} bytes"
        return cls(message, status=413, code="request_too_large", headers={"Connection": "close"})

    @classmethod
    def unknown_host(cls) -> ApiError:
        """A page of another site may have pointed its name at our address."""
        return cls("requests for this host are not answered here", code="unknown_host")

    @classmethod
    def unknown_model(cls) -> ApiError:
        """Only the one model that is served exists, whatever was asked for."""
        message = "this model does not exist; GET /v1/models lists the one that does"
        return cls(message, status=404, param="model", code="model_not_found")

    @property
    def kind(self) -> str:
        """OpenAI's `type` of the error."""
        match self.status:
            case 429:
                return "rate_limit_error"
            case status if status >= 500:
                return "server_error"
            case _:
                return "invalid_request_error"

    def as_json(self) -> dict[str, object]:
        """The body of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
