"""Room for tokens to come, waited for: an extension stands in line before every admission.

Rules
- An extension that is granted and cancelled in the same turn is undone, unless the lease has grown since: then it is
  not told apart, and stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from aiokv.core.lease_table import LeaseRecord
from aiokv.model.plan import Deferred
from aiokv.runtime.deadline import Deadline
from aiokv.runtime.offload import Offloader
from aiokv.runtime.waiting import Rank, refuse, stand_in_line

__all__ = ["extend", "try_extend"]


def try_extend(offloader: Offloader, record: LeaseRecord, *, tokens: int) -> int | Deferred:
    """Room for `tokens` more tokens now, whoever waits: the new room in tokens; or `Deferred`, and nothing changed."""
    granted = offloader.core.try_extend(record, tokens)
    offloader.progress()
    return granted


async def extend(offloader: Offloader, record: LeaseRecord, *, tokens: int, deadline: Deadline) -> int:
    """Wait for it; `LeaseReleased` if the lease is closed meanwhile."""
    before: list[int] = []

    def attempt() -> int | Deferred:
        before[:] = record.capacity_tokens
        return try_extend(offloader, record, tokens=tokens)

    future: asyncio.Future[int] = offloader.loop.create_future()
    gone = partial(refuse, future, request_id=record.request.request_id)
    offloader.notices.when_closed(record, gone)
    try:
        return await stand_in_line(
            offloader.queue,
            attempt,
            future=future,
            deadline=deadline,
            rank=Rank.EXTENSION,
            give_back=partial(_undo, offloader=offloader, record=record, before=before),
            on_leave=offloader.serve_soon,
        )
    finally:
        offloader.notices.forget(record, gone)


def _undo(granted: int, *, offloader: Offloader, record: LeaseRecord, before: Sequence[int]) -> None:
    """Nobody took the room that was granted."""
    if record.is_open and min(record.capacity_tokens) == granted:
        offloader.core.undo_extend(record, before)
        offloader.progress()
