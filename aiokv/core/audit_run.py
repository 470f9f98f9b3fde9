"""One audit of a cache, a slice at a time: who holds what, and which invariants do not hold.

Duty: run the audits of the holders and of the pools over everything once, and over what has changed meanwhile.

What the answer means, though the world changes between two slices
- A slot is judged within one slice, against the holders and the free stack as they are in that slice: these are brought
  up to date first, from what the tables and the stack have noted. So what is reported was wrong at one moment.
- A slot that changed after it was judged is noted by the pool and judged again, for `_PATIENCE` slices after the first
  pass; if the world never rests, the others keep their last verdict, and counts are compared only as closely as so many
  slots in doubt allow. In a world that rests, the answer is that of the last slice as a whole.
- Holdings and claims are those of the end of the last slice. What was wrong from beginning to end is reported. A fault
  that goes past the calls of pools and tables is seen if it was there when the audit came by.

The work of a slice is bounded by `slice_slots`, whatever the pools' size. Only where holders change faster than that
for long does the bound double, slice by slice, so that an audit always ends.
"""

from __future__ import annotations

from typing import Final, Self, final

from aiokv.core.audit import Audit, AuditClock
from aiokv.core.holder_audit import HolderAudit
from aiokv.core.pool_audit import PoolAudit
from aiokv.core.world import World
from aiokv.errors import UsageError
from aiokv.model.ids import Tier

__all__ = ["SLICE_SLOTS", "AuditRun", "take_audit"]

SLICE_SLOTS: Final = 1024
"""Slots looked at in one slice: about 0.3 ms of the loop's thread."""
_AT_ONCE: Final = 1 << 16
_PATIENCE: Final = 64
"""Slices that follow what has changed after the first pass. Also how many slices in a row may go by in which holders
leave no time for slots, before slices grow; in the beginning one more for each holder that there is."""


@final
class AuditRun:
    """Call `run_slice` until it answers False, then read `result`; `close` it if you stop before."""

    __slots__ = ("_clock", "_error", "_followed", "_holders", "_kept", "_limit", "_pools", "_result")

    def __init__(self, world: World, *, slice_slots: int = SLICE_SLOTS, clock: AuditClock | None = None) -> None:
        if isinstance(slice_slots, bool) or not isinstance(slice_slots, int) or slice_slots < 1:
            raise UsageError(f"slice_slots must be a whole number of at least 1, not {slice_slots!r}")
        self._limit = slice_slots
        self._clock = clock if clock is not None else AuditClock()
        pools = {tier: world.pool(tier) for tier in Tier}
        self._pools = {tier: PoolAudit(pool) for tier, pool in pools.items() if pool is not None}
        self._holders = HolderAudit(world, pools=self._pools, clock=self._clock)
        self._followed = 0
        self._kept = -self._holders.due_count
        self._error = ""
        self._result: Audit | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def result(self) -> Audit:
        """The answer; `UsageError` before the last slice."""
        if self._result is None:
            raise UsageError("this audit has not ended: call run_slice() until it answers False")
        return self._result

    def run_slice(self) -> bool:
        """Look at some more; False once the audit has ended. Raises nothing: a fault of its own is a violation."""
        if self._result is None:
            try:
                self._look()
            except Exception as error:  # a broken state may break any reader of it, and the audit must tell of it
                self._error = f"the state cannot be read: {error!r}"
            if self._error or self._has_seen_all:
                self._end()
        return self._result is None

    def close(self) -> None:
        """Look at nothing any more. Idempotent."""
        self._holders.close()
        for pool in self._pools.values():
            pool.close()

    @property
    def _is_behind(self) -> bool:
        """Whether what slots are judged by is not known as it is now."""
        return self._holders.is_due or any(pool.is_behind for pool in self._pools.values())

    @property
    def _has_seen_all(self) -> bool:
        if self._is_behind or any(pool.is_first_pass for pool in self._pools.values()):
            return False
        return self._followed > _PATIENCE or not any(pool.changed_count for pool in self._pools.values())

    def _look(self) -> None:
        for pool in self._pools.values():
            pool.settle()
        left = self._limit - self._holders.visit_some(self._limit)
        for pool in self._pools.values():
            left -= pool.read_stack(max(left, 0)) if pool.is_behind else 0
        if self._is_behind:
            self._kept += 1
            self._limit *= 2 if self._kept > _PATIENCE else 1
            return
        self._kept = 0
        self._judge(max(left, self._limit // 2))

    def _judge(self, limit: int) -> None:
        """Spend a slice on what was never looked at; once there is no such, on what has changed."""
        for pool in self._pools.values():
            while pool.is_first_pass and limit > 0:
                limit -= pool.look_on(limit)
        if limit > 0:
            self._followed += 1
        for pool in self._pools.values():
            limit -= pool.look_again(max(limit, 0))

    def _end(self) -> None:
        self.close()
        violations = [self._error] if self._error else self._holders.find_violations()
        for pool in self._pools.values():
            violations += [] if self._error else pool.find_violations()
        self._result = Audit(
            leases=self._holders.leases(),
            pins=self._holders.pins(),
            reservations=self._holders.reservations(),
            violations=tuple(violations),
            taken_at=self._clock.now,
            hints=self._holders.hints.views(),
        )


def take_audit(world: World, *, clock: AuditClock | None = None) -> Audit:
    """The whole audit in one hold."""
    with AuditRun(world, slice_slots=_AT_ONCE, clock=clock) as run:
        while run.run_slice():
            pass
        return run.result
