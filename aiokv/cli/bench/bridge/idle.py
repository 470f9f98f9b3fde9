"""What a loop does while a runtime has nothing in flight: it sleeps, and nothing wakes it."""

from __future__ import annotations

import asyncio
import resource
import time
from dataclasses import dataclass

from aiokv import KVRuntime

__all__ = ["Idle", "listen_to_idle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """How often something woke the loop's thread while there was nothing to do."""

    seconds: float
    polls: int
    """Looks of the bridge, as the runtime's own metric counts them."""
    wakeups: int
    """How often the thread slept and was woken, as the system counts it; the end of the silence is one."""
    loop_s: float
    """CPU time of the loop's thread."""


async def listen_to_idle(kv: KVRuntime, *, seconds: float) -> Idle:
    """Wait until nothing is in flight, then let time pass."""
    await kv.drain()
    polls, wakeups, began = _polls(kv), _wakeups(), time.thread_time()
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    loop.call_later(seconds, over.set_result, None)
    await over
    loop_s, wakeups = time.thread_time() - began, _wakeups() - wakeups
    return Idle(seconds=seconds, polls=_polls(kv) - polls, wakeups=wakeups, loop_s=loop_s)


def _polls(kv: KVRuntime) -> int:
    samples = (sample for family in kv.collector.collect() for sample in family.samples)
    return int(sum(sample.value for sample in samples if sample.name == "aiokv_bridge_polls_total"))


def _wakeups() -> int:
    """Voluntary context switches: of this thread where the system tells it (Linux), else of the process."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw
