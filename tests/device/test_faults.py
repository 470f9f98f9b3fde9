"""What a storm leaves when the device fails in the middle of it, when a copy hangs at the end, and inside `quiesce`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, final

import pytest

from aiokv import BackendLost, Direction, Lease, UsageError
from aiokv.backends.cuda import CudaBackend
from aiokv.core.fences import Fence
from aiokv.testing import evict
from tests.backends.cuda.rig import Rig
from tests.cancellation.moods import assert_enough
from tests.cancellation.storms import Storm
from tests.device.engine import DeviceEngine
from tests.device.weather import opened
from tests.runtime.support import BLOCK, GEOMETRY, GROUP, granted, prompt, turns, until

GPU_BLOCKS: Final = 31
AFTER_LOADS: Final = 8
ILLEGAL_ADDRESS: Final = 700
CALLS: Final = (
    "cuCtxPushCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cuMemcpyBatchAsync",
    "cuEventRecord",
    "cuEventQuery",
    "cuStreamQuery",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
)


@final
class SurvivingEngine:
    """Goes on without kernels once its context is lost: requests have to come to an end all the same."""

    def __init__(self, engine: DeviceEngine) -> None:
        self.engine = engine
        self.refused = 0

    def compute(self, lease: Lease, stop: int) -> Fence | None:
        try:
            return self.engine.compute(lease, stop)
        except (RuntimeError, BackendLost, UsageError):
            self.refused += 1
            return None

    def check(self, lease: Lease) -> None:
        try:
            self.engine.check(lease)
        except (RuntimeError, BackendLost, UsageError):
            self.refused += 1


def lose_the_context(rig: Rig, cuda: CudaBackend) -> None:
    """Everything that is pending is gone, every call fails: the engine's too."""
    rig.fake.fail_next_copy(cuda.stream_of(Direction.LOAD), ILLEGAL_ADDRESS)


def lose_an_event(rig: Rig, cuda: CudaBackend) -> None:
    """Only aiokv is told, the engine's kernels go on."""
    rig.fake.inject("cuEventQuery", code=ILLEGAL_ADDRESS)


@pytest.mark.parametrize("lose", [lose_the_context, lose_an_event])
async def test_a_context_that_is_lost_in_a_storm_costs_the_cpu_tier_and_no_request(
    rig: Rig, lose: Callable[[Rig, CudaBackend], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Laws 3 and 4: slots in flight are quarantined, everybody is told, nothing is unmapped."""
    asyncio.get_running_loop().set_debug(False)
    rig.fake.adversaries()
    rig.fake.set_timing(latency_us=60)
    rig.fake.set_queue_depth(0)
    engine, cuda = DeviceEngine(rig, GEOMETRY, gpu_blocks=GPU_BLOCKS), CudaBackend()
    surviving = SurvivingEngine(engine)
    async with opened(engine, cuda, geometry=GEOMETRY, gpu_blocks=GPU_BLOCKS, cpu_blocks=240, close_grace_s=0.2) as kv:
        storm = Storm(kv, surviving, seed=7, within=20)

        async def fail_once() -> None:
            if storm.seen["loaded"] >= AFTER_LOADS and not storm.seen["lost"]:
                storm.seen["lost"] += 1
                lose(rig, cuda)

        await asyncio.wait_for(storm.blow(fail_once), 50.0)
        await asyncio.wait_for(kv.drain(), 10.0)
        assert_enough(storm.seen, {"granted": 100, "lost": 1, "CancelledError": 5})
        audit = kv.audit()
        assert (audit.leases, audit.pins, audit.reservations, audit.violations) == ((), (), (), ())
        loads = storm.seen["loaded"]
        lease = await kv.acquire("afterwards", prompt(6, seed=77))
        assert (lease.delivered.cpu_tokens, kv.snapshot().transfers) == (0, ())
        lease.release()
        rig.fake.unwatch_loop_thread()
    assert loads >= AFTER_LOADS
    assert engine.wrong == []
    assert rig.fake.violations() == []
    assert rig.fake.registered_bytes() > 0, "a copy may still touch it"
    assert any("no longer copied" in record.message or "leaked" in record.message for record in caplog.records)


async def test_closing_with_hung_copies_keeps_what_they_may_touch(
    watched_rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Law 4, for the loop's end: the copies run into memory that is still there."""
    engine, cuda = DeviceEngine(watched_rig, GEOMETRY, gpu_blocks=9), CudaBackend()
    async with opened(engine, cuda, geometry=GEOMETRY, gpu_blocks=9, cpu_blocks=16, close_grace_s=0.1) as kv:
        lease = granted(kv, prompt(4, extra=0))
        lease.confirm(4 * BLOCK, after=engine.compute(lease, 4 * BLOCK))
        lease.finish()
        await kv.drain()
        evict(kv, prompt(4, extra=0), {GROUP: (1, 2)})
        watched_rig.fake.hold()
        loading = granted(kv, prompt(4, extra=1))
        storing = granted(kv, prompt(2, seed=3, extra=0))
        storing.confirm(2 * BLOCK, after=engine.compute(storing, 2 * BLOCK))
        await until(lambda: watched_rig.fake.inflight() >= 2)
        loading.release()
        storing.release()
        watched_rig.fake.unwatch_loop_thread()
    assert watched_rig.fake.registered_bytes() > 0
    assert kv.snapshot().gpu.quarantined > 0
    with caplog.at_level(logging.ERROR):
        assert any("leaked on purpose" in record.message for record in caplog.records)
    watched_rig.fake.release()
    assert watched_rig.fake.drain()


async def test_inside_quiesce_the_driver_is_not_called_at_all(watched_rig: Rig) -> None:
    """Loads and stores run meanwhile, leases end, requests wait; afterwards all goes on by itself."""
    engine, cuda, fake = DeviceEngine(watched_rig, GEOMETRY, gpu_blocks=9), CudaBackend(), watched_rig.fake
    async with opened(engine, cuda, geometry=GEOMETRY, gpu_blocks=9, cpu_blocks=16) as kv:
        lease = granted(kv, prompt(4, extra=0))
        lease.confirm(4 * BLOCK, after=engine.compute(lease, 4 * BLOCK))
        lease.finish()
        await kv.drain()
        evict(kv, prompt(4, extra=0), {GROUP: (1, 2)})
        fake.hold()
        loading = granted(kv, prompt(4, extra=1))
        await until(lambda: fake.inflight() > 0)
        waiting = asyncio.create_task(loading.ready())
        async with kv.quiesce():
            fake.begin_capture(engine.spare, mode=0)
            before = [fake.calls(api) for api in CALLS]
            fake.release()
            for _ in range(50):
                await turns(20)
                await asyncio.sleep(0.001)
            assert not waiting.done()
            assert [fake.calls(api) for api in CALLS] == before
            fake.end_capture(engine.spare)
        await asyncio.wait_for(waiting, 10.0)
        assert loading.delivered.cpu_tokens == 2 * BLOCK
        loading.release()
        await kv.drain()
