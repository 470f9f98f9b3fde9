"""`Preempted`: a request that gave its blocks back and goes on later.

It holds nothing in the pools, so whoever drops it leaks nothing. Resuming lets the request in anew, with all its
tokens, those generated so far included, as the prompt: what is still cached is hit, the rest is computed again.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, final

from aiokv.core.lease_table import AcquireRequest
from aiokv.errors import InvalidTransition
from aiokv.model.plan import Deferred
from aiokv.observe.stats import CancelStage
from aiokv.runtime.deadline import Deadline
from aiokv.runtime.entry import AcquireCall, Entry
from aiokv.runtime.hashing import hash_in_slices
from aiokv.runtime.offload import Offloader

if TYPE_CHECKING:
    from aiokv.runtime.lease import Lease

__all__ = ["Preempted"]


class _State(Enum):
    WAITING = "preempted"
    RESUMING = "being resumed"
    RESUMED = "resumed"
    CLOSED = "closed"


@final
class Preempted:
    """One request between two leases. It is resumed once; a resumption that fails or is cancelled may be repeated."""

    __slots__ = ("_entry", "_offloader", "_request", "_state")

    def __init__(self, offloader: Offloader, request: AcquireRequest, *, entry: Entry) -> None:
        self._offloader = offloader
        self._request = request
        self._entry = entry
        self._state = _State.WAITING

    def __repr__(self) -> str:
        return f"<Preempted {self.request_id!r} {self._state.value}>"

    @property
    def request_id(self) -> str:
        """As given to `acquire`."""
        return self._request.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens known when it was preempted: the prompt of the resumption."""
        return self._request.prompt_tokens

    def try_resume(self) -> Lease | Deferred:
        """A new lease whose loads are running, or `Deferred` and nothing has changed. See `KVRuntime.try_acquire`."""
        self._offloader.enter_for_intake()
        self._check_waiting("be resumed")
        self._request.keys.hash_more(self._request.keys.num_blocks)
        granted = self._entry.try_now(self._request)
        if not isinstance(granted, Deferred):
            self._state = _State.RESUMED
        return granted

    def resume(self, *, timeout: float | None = None) -> AcquireCall:
        """Wait for a new lease: coroutine and async context manager, like `KVRuntime.acquire`.

        Whatever it raises, everything has been given back and the request can be resumed again.
        """
        return AcquireCall(self._resume(timeout))

    def close(self) -> None:
        """It will not be resumed. Nothing has to be given back. Idempotent; `InvalidTransition` while it is resumed."""
        self._offloader.enter()
        if self._state is _State.RESUMING:
            self._check_waiting("be closed")
        if self._state is _State.WAITING:
            self._state = _State.CLOSED

    async def _resume(self, timeout: float | None) -> Lease:
        self._offloader.enter_for_intake()
        self._check_waiting("be resumed")
        deadline = Deadline(self._offloader.loop, request_id=self.request_id, timeout=timeout)
        self._state = _State.RESUMING
        try:
            with self._entry.traced(self.request_id):
                await self._hashed()
                lease = await self._entry.acquire(self._request, deadline=deadline)
        except BaseException:
            self._state = _State.WAITING
            raise
        self._state = _State.RESUMED
        return lease

    async def _hashed(self) -> None:
        try:
            await hash_in_slices(self._request.keys)
        except BaseException as error:
            self._entry.count_cancellation(error, stage=CancelStage.LOOKUP)
            raise

    def _check_waiting(self, event: str) -> None:
        if self._state is not _State.WAITING:
            raise InvalidTransition(f"the request {self.request_id!r}", state=self._state.value, event=event)
