"""The rules of drivers whose requests can stand in line: priorities, timeouts, cancellation. Needs hypothesis."""

from __future__ import annotations

from typing import Final

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from aiokv.core.lease_table import AcquireRequest
from aiokv.testing.driver import WaitingDriver
from aiokv.testing.machine import CacheMachine
from aiokv.testing.strategies import CHUNKS, PICKS, PROMPTS, STREAMS

__all__ = ["WaitMachine"]

_TIMEOUTS: Final = st.sampled_from([None, None, None, 0.0])
_STAYS: Final = st.sampled_from([True, True, False])


class WaitMachine(CacheMachine):
    """The whole machine: what a driver cannot do is not asked of it."""

    @precondition(lambda self: isinstance(self.host.driver, WaitingDriver))
    @rule(
        stream=STREAMS,
        tokens=PROMPTS,
        reserve=st.sampled_from([0, 0, 9]),
        first_chunk=CHUNKS,
        priority=st.integers(0, 2),
        timeout=_TIMEOUTS,
        stays=_STAYS,
    )
    def wait_acquire(
        self,
        stream: int,
        tokens: int,
        reserve: int,
        first_chunk: int | None,
        priority: int,
        timeout: float | None,
        *,
        stays: bool,
    ) -> None:
        """A request stands in line, and is perhaps cancelled soon."""
        self.asked += 1
        request = AcquireRequest(
            request_id=f"waits {self.asked}",
            keys=self.host.keys(stream, tokens),
            prompt_tokens=tokens,
            reserve_tokens=reserve,
            first_chunk=first_chunk,
            priority=priority,
        )
        self.line.wait_acquire(request, timeout=timeout)
        self.turns(1)
        if not stays and self.line.waiting:
            self.give_up([self.line.waiting - 1], 1)

    @precondition(lambda self: isinstance(self.host.driver, WaitingDriver) and self.ready())
    @rule(pick=PICKS, tokens=st.integers(1, 24), timeout=_TIMEOUTS, stays=_STAYS)
    def wait_extend(self, pick: int, tokens: int, timeout: float | None, *, stays: bool) -> None:
        """A lease stands in line for more room, and is perhaps cancelled soon."""
        record = self.ready()[pick % len(self.ready())]
        self.line.wait_extend(record, tokens, timeout=timeout)
        self.turns(1)
        if not stays and self.line.waiting:
            self.give_up([self.line.waiting - 1], 1)

    @precondition(lambda self: isinstance(self.host.driver, WaitingDriver) and self.host.preempted)
    @rule(pick=PICKS, timeout=_TIMEOUTS)
    def wait_resume(self, pick: int, timeout: float | None) -> None:
        """A preempted request stands in line. Whatever becomes of it, it is not resumed again."""
        request = self.host.preempted.pop(pick % len(self.host.preempted))
        self.line.wait_resume(request, timeout=timeout)
        self.turns(1)

    @precondition(lambda self: self.host.driver.waiting)
    @rule(picks=st.lists(PICKS, min_size=1, max_size=3), count=st.integers(0, 2))
    def give_up(self, picks: list[int], count: int) -> None:
        """Some of those who wait are cancelled, one perhaps twice, and the loop turns or not."""
        for pick in picks:
            self.line.give_up(pick)
        self.seen["gave up"] += 1
        self.turns(count)

    @precondition(lambda self: self.host.driver.waiting)
    @rule(count=st.integers(1, 4))
    def turns(self, count: int) -> None:
        """The loop turns; who waits may be granted."""
        for _ in range(count):
            before = self.host.driver.waiting
            self.line.turn()
            self.host.settle()
            self.seen["stood in line"] += bool(before and before == self.host.driver.waiting)
            self.seen["came back"] += max(before - self.host.driver.waiting, 0)

    # Helpers.

    asked = 0

    @property
    def line(self) -> WaitingDriver:
        """The driver, as one that can wait."""
        driver = self.host.driver
        if not isinstance(driver, WaitingDriver):
            raise TypeError(f"{type(driver).__name__} lets nobody wait")
        return driver
