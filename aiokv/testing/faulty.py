"""A backend that fails now and then, around one that works: what faults do to your own scheduler, on real memory.

A copy that is to fail is really made, but only for the first half of its blocks (of a single one: for none), and then
ends with an error. So its targets are torn, as after a real fault: whoever believes them serves wrong bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from aiokv.backends.base import Backend, DeviceEvent, EventStatus, WakeMode
from aiokv.errors import ConfigError, CopyFailed
from aiokv.model.numbers import is_number
from aiokv.model.plan import CopyBatch
from aiokv.testing.passing_backend import PassingBackend

__all__ = ["FaultyBackend", "InjectedFaults"]


_DETAIL: Final = "a test wanted this copy to fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFaults:
    """How many copies a `FaultyBackend` has spoilt so far."""

    failed: int = 0
    """Ended with an error, their targets torn."""
    refused: int = 0
    """Not accepted: `submit` raised, nothing was started."""
    late: int = 0
    """Ended well, and said so later than they had."""


@final
class FaultyBackend(PassingBackend):
    """Passes everything on to `inner`, but for the fractions of copies (0 to 1) that are to go wrong.

    `fail`: the copy ends with an error. `refuse`: `submit` raises `CopyFailed`. `late`: the copy's end is seen only
    when its event has been asked `late_queries` times more. Which copies these are depends on `seed` and on the order
    of `submit` alone. The threads are those of `Backend`.
    """

    __slots__ = (
        "_fractions",
        "_is_healed",
        "_late_queries",
        "_random",
        "_ring",
        "_submitted",
        "injected",
    )

    def __init__(
        self,
        inner: Backend,
        *,
        seed: int = 0,
        fail: float = 0.0,
        refuse: float = 0.0,
        late: float = 0.0,
        late_queries: int = 20,
    ) -> None:
        """`ConfigError` for fractions that are none, or that are more than 1 together."""
        super().__init__(inner)
        self._fractions = {"fail": fail, "refuse": refuse, "late": late}
        _require_fractions(self._fractions)
        self._random = random.Random(seed)
        self._late_queries = late_queries
        self._ring: Callable[[], None] = _ring_nothing
        self._submitted = 0
        self._is_healed = False
        self.injected = InjectedFaults()

    def heal(self) -> None:
        """From now on every copy goes well."""
        self._is_healed = True

    # The `Backend` protocol, as far as faults show in it.

    def attach_doorbell(self, ring: Callable[[], None]) -> None:
        """See `Backend`. A copy that is late rings by itself."""
        self._ring = ring
        super().attach_doorbell(ring)

    def submit(self, batch: CopyBatch) -> DeviceEvent:
        """See `Backend`."""
        self._submitted += 1
        match self._draw():
            case "refuse":
                self.injected = replace(self.injected, refused=self.injected.refused + 1)
                raise CopyFailed(self._submitted, detail="a test wanted this copy to be refused")
            case "fail":
                self.injected = replace(self.injected, failed=self.injected.failed + 1)
                return self._submit_half(batch)
            case "late":
                self.injected = replace(self.injected, late=self.injected.late + 1)
                return _LateEvent(super().submit(batch), queries=self._late_queries, ring=self._ring_if_needed)
            case _:
                return super().submit(batch)

    def wait(self, stream: object, fence_or_event: object) -> None:
        """See `Backend`. There is nothing to wait for where nothing is copied."""
        if isinstance(fence_or_event, _FailingEvent | _LateEvent):
            fence_or_event = fence_or_event.inner
        if not isinstance(fence_or_event, _FailedEvent):
            super().wait(stream, fence_or_event)

    def _submit_half(self, batch: CopyBatch) -> DeviceEvent:
        half = len(batch) // 2
        if half:
            torn = replace(batch, source_blocks=batch.source_blocks[:half], target_blocks=batch.target_blocks[:half])
            return _FailingEvent(super().submit(torn))
        self._ring_if_needed()
        return _FailedEvent()

    def _draw(self) -> str:
        drawn = self._random.random()
        if not self._is_healed:
            for fault, fraction in self._fractions.items():
                if drawn < fraction:
                    return fault
                drawn -= fraction
        return ""

    def _ring_if_needed(self) -> None:
        if self.wake_mode is WakeMode.DOORBELL:
            self._ring()


@final
class _FailingEvent:
    """Ends with an error when the copy behind it has ended well."""

    __slots__ = ("inner",)

    def __init__(self, inner: DeviceEvent) -> None:
        self.inner = inner

    def query(self) -> EventStatus:
        status = self.inner.query()
        return EventStatus.FAILED if status is EventStatus.DONE else status

    def detail(self) -> str:
        return self.inner.detail() or _DETAIL

    def corrupt_copies(self) -> Sequence[int]:
        return self.inner.corrupt_copies()


@final
class _FailedEvent:
    """Has ended with an error before anything was copied."""

    __slots__ = ()

    def query(self) -> EventStatus:
        return EventStatus.FAILED

    def detail(self) -> str:
        return _DETAIL

    def corrupt_copies(self) -> Sequence[int]:
        return ()


@final
class _LateEvent:
    """Says that it is pending for some queries after the copy has ended."""

    __slots__ = ("_queries", "_ring", "inner")

    def __init__(self, inner: DeviceEvent, *, queries: int, ring: Callable[[], None]) -> None:
        self.inner = inner
        self._queries = queries
        self._ring = ring

    def query(self) -> EventStatus:
        status = self.inner.query()
        if status is not EventStatus.DONE or self._queries <= 0:
            return status
        self._queries -= 1
        self._ring()  # nobody else will: the copy itself has ended
        return EventStatus.PENDING

    def detail(self) -> str:
        return self.inner.detail()

    def corrupt_copies(self) -> Sequence[int]:
        return self.inner.corrupt_copies()


def _require_fractions(fractions: dict[str, float]) -> None:
    for name, fraction in fractions.items():
        if not is_number(fraction) or not 0.0 <= fraction <= 1.0:
            raise ConfigError(f"{name} must be a fraction from 0 to 1, not {fraction!r}")
    if sum(fractions.values()) > 1.0:
        raise ConfigError(f"the fractions {fractions} are more than 1 together")


def _ring_nothing() -> None:
    """Stands for the doorbell until the bridge attaches its own."""
