"""Every error aiokv raises, in one tree.

`AiokvError` is the root. A message is built by the class from its fields, which stay readable on the instance.
Foreign exceptions (driver, operating system) are translated once, in `aiokv.backends`.
"""

from __future__ import annotations

__all__ = [
    "AcquireTimeout",
    "AiokvError",
    "BackendLost",
    "CapacityError",
    "ConfigError",
    "CopyFailed",
    "ForeignBlock",
    "InvalidTransition",
    "LeaseReleased",
    "StreamCaptured",
    "TransferError",
    "UsageError",
]


class AiokvError(Exception):
    """Root of all errors of aiokv."""


class UsageError(AiokvError):
    """The caller broke a rule of the API. Nothing was changed."""


class LeaseReleased(UsageError):
    """A lease was used after `release()` or `finish()`."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(f"the lease of request {request_id!r} has been released")


class InvalidTransition(UsageError):
    """A life cycle has no such step from the state it is in. The state is unchanged."""

    def __init__(self, subject: str, *, state: str, event: str) -> None:
        self.subject = subject
        self.state = state
        self.event = event
        super().__init__(f"{subject} cannot {event} while it is {state}")


class ForeignBlock(UsageError):
    """A slot was named that the caller does not hold."""

    def __init__(self, slot: int, *, tier: str) -> None:
        self.slot = slot
        self.tier = tier
        super().__init__(f"{tier} slot {slot} is not held by the caller")


class StreamCaptured(UsageError):
    """No fence can be taken of a stream that is being captured into a graph. Once it is not, asking again will do."""

    def __init__(self, stream: object) -> None:
        self.stream = stream
        super().__init__(f"the stream {stream!r} is being captured into a graph: a fence would become part of it")


class CapacityError(AiokvError):
    """The request can never fit, even into an empty pool."""

    def __init__(self, request_id: str, *, needed: int, capacity: int) -> None:
        self.request_id = request_id
        self.needed = needed
        self.capacity = capacity
        super().__init__(f"request {request_id!r} needs {needed} GPU blocks at once, the pool has {capacity}")


class AcquireTimeout(AiokvError, TimeoutError):
    """Waiting for capacity or for loads took longer than `timeout`. Everything was given back."""

    def __init__(self, request_id: str, *, timeout: float) -> None:
        self.request_id = request_id
        self.timeout = timeout
        super().__init__(f"request {request_id!r} was not ready within {timeout:g} s")


class TransferError(AiokvError):
    """A copy between the tiers did not end well."""


class CopyFailed(TransferError):
    """The backend reported that one copy ended with an error."""

    def __init__(self, transfer_id: int, *, detail: str) -> None:
        self.transfer_id = transfer_id
        self.detail = detail
        super().__init__(f"transfer {transfer_id} failed: {detail}")


class BackendLost(TransferError):
    """The backend cannot copy any more; slots in flight are quarantined."""

    def __init__(self, backend: str, *, detail: str) -> None:
        self.backend = backend
        self.detail = detail
        super().__init__(f"backend {backend!r} is lost: {detail}")


class ConfigError(AiokvError):
    """A configuration, geometry, tensor or file cannot be used as given."""
