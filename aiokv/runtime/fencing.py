"""Law 5 at work: fences of the engine's streams are recorded, and copies and streams made to wait for them.

Rules
- Every use of a slot ends with a fence: the caller's `after=`, else one of the configured compute stream and one of
  each stream that was made to wait for the lease. What is promised is recorded in the loop's next turn, and before any
  copy is handed over: once for all that a turn has promised on one stream.
- While a stream is being captured nothing can be recorded on it: promises are kept later then, and copies wait.
- An exit never fails for want of a fence. A backend that cannot record one counts as lost: nothing is copied any more,
  so nothing can overtake what still runs. So does one that refuses a stream for longer than `PATIENCE_S`: an engine may
  have destroyed it, and copies would wait for ever.
- Where the backend needs no fences nothing is recorded, and nothing is asked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, final

from aiokv.backends.base import Backend
from aiokv.core.cache import CacheState
from aiokv.core.fences import Fence
from aiokv.core.inflight import Transfer
from aiokv.core.lease_table import LeaseRecord
from aiokv.errors import ConfigError, StreamCaptured, UsageError
from aiokv.model.ids import Tier

__all__ = ["PATIENCE_S", "RETRY_S", "ComputeStream", "Fencing"]

_log = logging.getLogger(__name__)

RETRY_S: Final = 2e-3
"""How often what could not be recorded is tried again."""

PATIENCE_S: Final = 5.0
"""How long a stream may be refused that is not being captured."""


@final
class ComputeStream:
    """The engine's stream as it was configured: one, or whatever a callable says it is now."""

    __slots__ = ("_find", "_is_failing", "_last")

    def __init__(self, stream: object) -> None:
        self._find: Callable[[], object] | None = stream if callable(stream) else None
        self._last = None if callable(stream) else stream
        self._is_failing = False

    @property
    def is_given(self) -> bool:
        """Whether there is one."""
        return self._find is not None or self._last is not None

    def current(self) -> object:
        """The stream; of a callable that fails or names none, which an exit must survive, the last one it named."""
        if self._find is not None:
            try:
                found = self._find()
                if found is None:
                    raise UsageError("it has named no stream")
                self._last, self._is_failing = found, False
            except Exception:
                self._note_failure()
        return self._last

    def _note_failure(self) -> None:
        """Said once, until it works again: each lease that ends asks."""
        if not self._is_failing:
            self._is_failing = True
            _log.exception("compute_stream() failed; the last stream that it named is used")


@final
class Fencing:
    """Records the fences of one cache at its backend."""

    __slots__ = ("_backend", "_book", "_compute", "_core", "_is_lost", "_refused_at")

    def __init__(self, core: CacheState, *, backend: Backend, compute: ComputeStream) -> None:
        """`ConfigError` where fences are needed and there is no stream to take them from."""
        self._core = core
        self._book = core.fences
        self._backend = backend
        self._compute = compute
        self._refused_at: float | None = None
        """Since when a stream is refused."""
        self._is_lost = False
        if backend.needs_fences and not compute.is_given:
            raise ConfigError(
                f"backend {backend.name!r} needs RuntimeConfig(compute_stream=...): the engine's stream, or a callable "
                f"that returns it"
            )

    @property
    def is_needed(self) -> bool:
        """Whether compute runs behind the host's back."""
        return self._backend.needs_fences

    def check_compute_stream(self) -> None:
        """`ConfigError` unless the open backend takes fences of the compute stream: copies would wait in vain."""
        if self._backend.needs_fences:
            try:
                self.check_stream(self._compute.current())
            except UsageError as error:
                raise ConfigError(f"compute_stream cannot be used: {error}") from error

    def check_stream(self, stream: object) -> None:
        """`UsageError` for what the backend takes for no stream, `StreamCaptured` for one that is being captured."""
        self._backend.fence(stream)

    def record(self, stream: object) -> Fence | None:
        """A fence of `stream` (None: the compute stream) now; None where the backend has nothing to wait for.

        `UsageError` for what is no stream, `StreamCaptured` for one that is being captured.
        """
        if stream is None:
            stream = self._compute.current()
        mark = self._record(stream)
        return None if mark is None else self._book.add(stream, mark)

    def promise_end(self, record: LeaseRecord, after: object) -> Fence | None:
        """The fence behind which a lease gives slots back: `after`, or else the last of new ones, which are promised.

        None where nothing has to be waited for; `UsageError`, and nothing promised, for what is no fence.
        """
        if after is not None:
            return self._book.check(after)
        if not self._backend.needs_fences:
            return None
        fence = self._book.promise(self._compute.current())
        for stream in record.streams:
            fence = self._book.promise(stream)
        return fence

    def settle(self) -> bool:
        """Record what was promised. False while that is impossible: then no copy may be handed over."""
        if not self._book.promised:
            return True
        try:
            self._book.keep_promises(self._record)
        except StreamCaptured:
            self._refused_at = None
            return False
        except Exception as error:
            if isinstance(error, UsageError) and not self._is_lost and self._may_still_answer():
                return False
            self._lose()
        self._refused_at = None
        return True

    def find_waits(self, transfer: Transfer) -> tuple[object, ...] | None:
        """What the copies of a transfer wait for, in the backend's own words; everything promised is recorded."""
        fences = self._book.find_waits(transfer.slots(Tier.GPU))
        return tuple(fence.mark for fence in fences) if fences else None

    def make_wait(self, stream: object, record: LeaseRecord) -> None:
        """`stream` waits for what other streams still do with the slots of a lease."""
        for fence in self._book.find_waits(record.held_slots(), beside=stream):
            self._backend.wait(stream, fence.mark)

    def _may_still_answer(self) -> bool:
        """Whether a stream that is refused is to be asked again."""
        now = time.monotonic()
        self._refused_at = now if self._refused_at is None else self._refused_at
        return now - self._refused_at <= PATIENCE_S

    def _lose(self) -> None:
        """Nothing is copied any more; said once, since leases go on to end."""
        if not self._is_lost:
            self._is_lost = True
            _log.exception("no fence can be recorded: the backend is lost, blocks are no longer copied between tiers")
        self._core.lose_backend()
        self._book.forget_all()

    def _record(self, stream: object) -> object | None:
        """A new fence, at the backend; those that were passed are forgotten on the occasion."""
        mark = self._backend.fence(stream)
        self._book.forget_passed(self._backend.fence_done)
        return mark
