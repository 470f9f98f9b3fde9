"""`Lease`: one request's blocks, as its coroutine sees them.

A lease is usable from admission on and holds its blocks until `finish()` or `release()`; both are synchronous and
idempotent, and every other use afterwards is a `LeaseReleased`. A lease that is dropped without either is noticed by
the loop, warned about and given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from aiokv.core.counters import Closing
from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.errors import InvalidTransition, LeaseReleased, UsageError
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import Deferred, Hit
from aiokv.model.tokens import TokenIds
from aiokv.runtime.arguments import check_name, check_whole
from aiokv.runtime.deadline import Deadline
from aiokv.runtime.entry import Entry
from aiokv.runtime.extension import extend, try_extend
from aiokv.runtime.offload import Offloader
from aiokv.runtime.preempted import Preempted
from aiokv.runtime.stream_wait import wait_on
from aiokv.runtime.turns import name_in_slices
from aiokv.runtime.waiting import Rank, resolve

__all__ = ["Lease"]


@final
class Lease:
    """Pins and reservations of one admitted request. All token counts are absolute: from the start of the prompt."""

    __slots__ = ("__weakref__", "_is_closed", "_offloader", "_record")

    def __init__(self, offloader: Offloader, record: LeaseRecord) -> None:
        self._offloader = offloader
        self._record = record
        self._is_closed = False

    def __del__(self) -> None:
        if not self._is_closed:
            self._offloader.leaks.put(self._record.lease_id)

    def __repr__(self) -> str:
        return f"<Lease {self._record.request.request_id!r} {self.state.value}>"

    # What it is.

    @property
    def request_id(self) -> str:
        """As given to `acquire`."""
        return self._record.request.request_id

    @property
    def state(self) -> LeaseState:
        """HELD, LOADING, READY or RELEASED."""
        return LeaseState.RELEASED if self._is_closed else self._record.state

    @property
    def hit(self) -> Hit:
        """The promise made at admission: where the tokens of the prompt come from."""
        self._check_open()
        return self._record.hit

    @property
    def delivered(self) -> Hit:
        """The outcome, known from READY on: differs from `hit` if a load failed."""
        self._check_open()
        if self._record.state is not LeaseState.READY:
            raise InvalidTransition(f"{self!r}", state=self._record.state.value, event="tell what was delivered")
        return self._record.delivered

    @property
    def prefix_tokens(self) -> int:
        """L: leading tokens that need no compute; shorter than promised after a failed load."""
        self._check_open()
        return self._record.length

    @property
    def keys(self) -> BlockKeys:
        """The tokens known so far and their hashes. Do not change it; use `append`."""
        self._check_open()
        return self._record.keys

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt and what was appended."""
        self._check_open()
        return self._record.keys.num_tokens

    @property
    def confirmed_tokens(self) -> int:
        """Tokens whose KV is written: the prefix and what was confirmed."""
        self._check_open()
        return self._record.confirmed

    @property
    def capacity_tokens(self) -> int:
        """Tokens for which every group has a block."""
        self._check_open()
        return min(self._record.capacity_tokens)

    # Blocks.

    @property
    def is_named(self) -> bool:
        """Whether all blocks are named, so that reading tables is short: they are some turns after `try_acquire`."""
        self._check_open()
        return not self._record.claims

    def block_table(self, group: str) -> tuple[int, ...]:
        """GPU slots of `group` by block position; 0 where it needs nothing. `ConfigError` for an unknown group."""
        return tuple(self.block_ids(group).tolist())

    def block_ids(self, group: str, start: int = 0) -> NDArray[np.int32]:
        """The table of `group` from block position `start` on: int32, a copy of the caller's own.

        Names what has no name yet, all in one hold: of 8,192 blocks up to 2 ms right after `try_acquire`, several times
        that where memory is used for the first time. `await ready()`, or poll `is_named`, and it is short.
        """
        index = self._group_index(group)
        check_whole("start", start)
        table = self._offloader.core.block_ids(self._record, group=index, start=start)
        self._offloader.progress()
        return table.copy()

    def state_slots(self, group: str) -> tuple[int, int]:
        """Of a recurrent group: the slot of its working state and that of the next captured one (0: none left)."""
        index = self._group_index(group)
        if index not in self._record.state_slots:
            raise UsageError(f"group {group!r} has no recurrent state")
        working, capture = self._offloader.core.state_slots(self._record, group=index).tolist()
        self._offloader.progress()
        return working, capture

    def append(self, token_ids: TokenIds) -> None:
        """Tokens generated since; their KV is confirmed separately."""
        self._check_open()
        self._record.keys.append(token_ids)

    def truncate(self, num_tokens: int, *, after: object = None) -> int | Deferred:
        """Forget the tokens from `num_tokens` on; returns how many are still confirmed: compute goes on from there.

        Room stays, block tables may change. Blocks that can be found stay in the cache and get a successor of this
        lease's own, so inside such a block what is confirmed shrinks to its beginning. `Deferred`, and nothing has
        changed, if there are no slots for that. `InvalidTransition` before READY; `UsageError` for less than
        `prefix_tokens`, inside a media span, for a window or chunk whose blocks have been given back already, and in
        recurrent groups for a length whose state is not held. The state of the new length is in the block table.
        """
        self._check_open()
        check_whole("num_tokens", num_tokens)
        offloader, fence = self._offloader, None
        if num_tokens < self._record.confirmed:
            if offloader.is_quiet:
                return offloader.core.defer_queued()
            fence = offloader.fencing.promise_end(self._record, after)
        confirmed = offloader.core.truncations.truncate(self._record, num_tokens, after=fence)
        offloader.progress()
        return confirmed

    def try_fork(self, request_id: str, *, at: int | None = None) -> Lease | Deferred:
        """A second lease over the first `at` tokens (default: all confirmed), with the same options; or `Deferred`.

        It shares the whole blocks of confirmed tokens that this lease holds, up to its own `prefix_tokens`: all `at`
        tokens where they end with a block (the logits are this lease's), else computes the last ones again. It needs
        no copy. `InvalidTransition` before READY; `UsageError` after a reset of the GPU tier; `CapacityError` if it
        could never fit.
        """
        self._check_open()
        offloader = self._offloader
        offloader.enter_for_intake()
        check_name("request_id", request_id)
        if at is not None:
            check_whole("at", at)
        tokens = self._record.confirmed if at is None else at
        request = offloader.core.forks.plan(self._record, request_id=request_id, num_tokens=tokens)
        attempt = partial(offloader.try_admission, partial(offloader.core.forks.try_fork, self._record, request))
        return self._entry().try_in_turn(request, attempt)

    def confirm(
        self, num_tokens: int, *, after: object = None, publish_to: int | None = None, states: Iterable[int] = ()
    ) -> None:
        """The KV of the first `num_tokens` tokens is written, as of the fence `after`.

        Their full blocks become findable, up to `publish_to` tokens if given, and are offered to the CPU tier.
        `states` are the lengths at which the recurrent groups' states were captured. No more than is confirmed
        already is a no-op. `UsageError` for more than is known or has room, `InvalidTransition` before READY.
        """
        self._check_open()
        check_whole("num_tokens", num_tokens)
        if publish_to is not None:
            check_whole("publish_to", publish_to)
        if not isinstance(states, Iterable):
            raise UsageError(f"states must be lengths, not {states!r}")
        states = tuple(states)
        for length in states:
            check_whole("a state's length", length)
        offloader, fence = self._offloader, None
        if after is not None or num_tokens > self._record.confirmed:
            fence = offloader.fencing.promise_end(self._record, after)
        offloader.core.confirm(self._record, num_tokens, publish_to=publish_to, states=states, after=fence)
        offloader.progress()

    def try_extend(self, tokens: int) -> int | Deferred:
        """Room for `tokens` more tokens now: the new room in tokens; or `Deferred`, and nothing has changed."""
        self._check_open()
        check_whole("tokens", tokens)
        offloader = self._offloader
        if offloader.is_quiet or offloader.queue.blocks(rank=Rank.EXTENSION):
            offloader.core.check_extend(self._record, tokens)
            return offloader.core.defer_queued()
        return try_extend(offloader, self._record, tokens=tokens)

    async def extend(self, tokens: int, *, timeout: float | None = None) -> int:
        """Wait for room for `tokens` more tokens; returns the new room in tokens. Goes before every admission.

        `AcquireTimeout` after `timeout` seconds, `CapacityError` if it can never fit.
        """
        granted = self.try_extend(tokens)
        if not isinstance(granted, Deferred):
            return granted
        return await extend(self._offloader, self._record, tokens=tokens, deadline=self._deadline(timeout))

    def wait_on(self, stream: object) -> None:
        """Make the engine's stream wait, on the device, for all loads of this lease, and for what other streams still
        do with its blocks: kernels that are launched from now on may use them, and tables may be read at once.

        Once more after an extension, where other streams use the cache. How loads end is known at `ready()`: if one
        fails the blocks change, and what was computed before is void. `InvalidTransition` then, until it is planned
        again, and before READY where copies are made in host memory; `UsageError` inside `quiesce()`.
        """
        self._check_open()
        wait_on(self._offloader, self._record, stream=stream)

    # Readiness.

    async def ready(self, *, timeout: float | None = None) -> None:
        """Wait until the loads have ended and the prefix is valid. Any number of tasks may wait, each by itself."""
        self._check_open()
        await self.wait_ready(self._deadline(timeout))

    async def wait_ready(self, deadline: Deadline) -> None:
        """Like `ready`, by a deadline that other waits share. `LeaseReleased` if the lease is closed meanwhile.

        Then all its slots have names: whoever reads a table next holds the loop no longer than that takes.
        """
        if self.state not in (LeaseState.READY, LeaseState.RELEASED):
            future: asyncio.Future[None] = self._offloader.loop.create_future()
            settled = partial(resolve, future)
            self._offloader.notices.when_settled(self._record, settled)
            try:
                await deadline.wait(future)
            finally:
                self._offloader.notices.forget(self._record, settled)
            self._offloader.note_wake(self._record)
        self._check_open()
        await name_in_slices(self._offloader, self._record)
        self._check_open()

    def add_done_callback(self, callback: Callable[[Lease], Any]) -> None:
        """Call `callback(lease)` in a turn of the loop, once the lease is ready or was released."""
        self._offloader.enter()
        if not callable(callback):
            raise UsageError(f"callback must be callable, not {callback!r}")
        loop = self._offloader.loop
        if self.state in (LeaseState.READY, LeaseState.RELEASED):
            loop.call_soon(callback, self)
        else:
            self._offloader.notices.when_settled(self._record, partial(_call_soon, loop, callback, lease=self))

    # The end.

    def finish(self, *, after: object = None) -> None:
        """The request is complete: flush what is still to be stored, then give everything back as `release` does."""
        self.close(Closing.FINISHED, after=after)

    def preempt(self, *, after: object = None) -> Preempted:
        """`finish`, and keep what it takes to go on later: the answer holds tokens and options, and no blocks.

        As with `finish`, a block that is being stored comes back when its copy has ended.
        """
        self._check_open()
        request = self._record.resumption()
        self.close(Closing.PREEMPTED, after=after)
        return Preempted(self._offloader, request, entry=self._entry())

    def release(self, *, after: object = None) -> None:
        """Give everything back now. Whatever takes the blocks next waits for the fence `after`, by default one of the
        compute stream and one of each stream that was made to wait for this lease.
        """
        self.close(Closing.RELEASED, after=after)

    def close(self, how: Closing, *, after: object = None) -> None:
        """Give everything back, counted as `how`. Idempotent; `UsageError`, nothing changed, for what is no fence."""
        if not self._is_closed:
            self._offloader.enter()
            if after is not None:
                self._offloader.core.fences.check(after)
            self._is_closed = True
            self._offloader.close_lease(self._record, how=how, after=after)

    def abandon(self) -> None:
        """The coroutine that holds it is being closed. Outside the loop that is the collector's doing: then nothing is
        touched, and the finaliser leaves word.
        """
        if self._offloader.is_in_loop:
            self.close(Closing.RELEASED)

    def _entry(self) -> Entry:
        return Entry(self._offloader, make_lease=Lease)

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._offloader.loop, request_id=self.request_id, timeout=timeout)

    def _group_index(self, group: str) -> int:
        self._check_open()
        return self._offloader.core.geometry.group_index(group)

    def _check_open(self) -> None:
        self._offloader.enter()
        if self._is_closed or self._record.state is LeaseState.RELEASED:
            raise LeaseReleased(self.request_id)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[Lease], Any], *, lease: Lease) -> None:
    loop.call_soon(callback, lease)
