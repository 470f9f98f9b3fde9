"""Law 5 under random engines: on one stream or on several, no copy and no kernel overlaps another use of its slots.

An engine reads what its lease covers and writes what comes after, on a stream of its own. On one stream it needs no
more than the configured one; on several it lets each wait for a lease before kernels use it.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Collection
from typing import final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiokv import (
    AiokvError,
    CacheGeometry,
    ChunkedLocal,
    Deferred,
    Direction,
    FullAttention,
    InvalidTransition,
    KVRuntime,
    Lease,
    LeaseState,
    Preempted,
    RecurrentState,
    RuntimeConfig,
    SlidingWindow,
    StorePolicy,
    Tier,
)
from aiokv.core.coverage import coverage_start
from aiokv.core.fences import Fence
from aiokv.testing import FakeBackend
from aiokv.testing.fenced_backend import FencedBackend

BLOCK = 4
GEOMETRIES = {
    "full": CacheGeometry(groups=(FullAttention("f", block_size=BLOCK),), hash_block_size=BLOCK),
    "hybrid": CacheGeometry(
        groups=(
            FullAttention("f", block_size=BLOCK),
            SlidingWindow("w", block_size=BLOCK, window=2 * BLOCK),
            ChunkedLocal("c", block_size=2 * BLOCK, chunk=4 * BLOCK),
        ),
        hash_block_size=BLOCK,
    ),
    "states": CacheGeometry(
        groups=(FullAttention("f", block_size=BLOCK), RecurrentState("r", block_size=BLOCK)), hash_block_size=BLOCK
    ),
}
STREAMS = ("main", "side", "third")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*garbage collected.*:ResourceWarning"),
    pytest.mark.parametrize("streams", [STREAMS[:1], STREAMS], ids=["one stream", "three streams"]),
    pytest.mark.parametrize("geometry", GEOMETRIES),
]
FAMILIES = 4
LONGEST = 5 * BLOCK
STEPS = 100


@final
class RandomEngine:
    """A scheduler that does whatever comes to its mind, as far as aiokv lets it, and launches kernels all the while."""

    def __init__(
        self, kv: KVRuntime, *, backend: FencedBackend, fake: FakeBackend, streams: Collection[str], rng: random.Random
    ) -> None:
        self.kv = kv
        self.backend = backend
        self.fake = fake
        self.streams = tuple(streams)
        self.rng = rng
        self.leases: list[tuple[Lease, str]] = []
        self.preempted: list[Preempted] = []
        self.admitted = 0
        self.launched = dict.fromkeys(STREAMS, 0)
        self.taken: dict[str, tuple[int, Fence]] = {}
        """Per stream a fence that was taken after so many kernels, and kept."""
        self.is_quiet = False

    async def run(self) -> None:
        often = (self.admit, self.admit, self.compute, self.compute, self.compute, self.end, self.truncate, self.grow)
        acts = (*often, self.resume, self.fork, self.copies, self.copies, self.reset, self.quiesce, self.cancel)
        await self.fill()
        for _ in range(STEPS):
            act = self.rng.choice(acts)
            await act()
            for _ in range(self.rng.randrange(4)):
                await asyncio.sleep(0)
        for lease, _ in self.leases:
            lease.finish()
        self.leases.clear()

    async def fill(self) -> None:
        """Every prompt that there may be, in the CPU tier alone."""
        for family in range(FAMILIES):
            async with self.kv.acquire("fill", [family] * LONGEST) as lease:
                for length in range(BLOCK, LONGEST + 1, BLOCK):
                    self._launch(lease, "main", start=length - BLOCK, stop=length)
                    lease.confirm(length, states=(length,) if self._may_capture(lease) else ())
            await self.settle()
        await self.kv.reset(Tier.GPU)

    async def settle(self) -> None:
        """Copies end until there is nothing to be done."""
        drained = asyncio.ensure_future(self.kv.drain())
        while not drained.done():
            self.fake.complete_all()
            await asyncio.sleep(0)

    async def admit(self) -> None:
        reserve = self.rng.choice((0, 2 * BLOCK))
        self._try(lambda: self._keep(self.kv.try_acquire("r", self._prompt(), reserve_tokens=reserve)))

    async def cancel(self) -> None:
        task = asyncio.ensure_future(self.kv.acquire("cancelled", self._prompt()))
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            self._keep(task.result())

    async def compute(self) -> None:
        """Kernels of one step of a lease; what they wrote is confirmed now, later or never."""
        if not self.leases:
            return
        lease, stream = self.rng.choice(self.leases)
        if not self._may_use(lease, stream):
            return
        if self.rng.random() < 0.5 and lease.num_tokens < lease.capacity_tokens:
            room = lease.capacity_tokens - lease.num_tokens
            lease.append([self.rng.randrange(3) for _ in range(self.rng.randint(1, min(room, 2 * BLOCK)))])
        stop = self.rng.randint(0, lease.num_tokens)
        start = lease.confirmed_tokens if lease.state is LeaseState.READY else lease.prefix_tokens
        if stop > start:
            self._launch(lease, stream, start=start, stop=stop)
            if lease.state is LeaseState.READY and self.rng.random() < 0.8:
                ends = [n for n in range(start + 1, stop + 1) if n % BLOCK == 0]
                states = ends[:1] if self._may_capture(lease) else ()
                lease.confirm(stop, after=self._fence(stream), states=states)

    async def end(self) -> None:
        if not self.leases:
            return
        lease, stream = self.leases.pop(self.rng.randrange(len(self.leases)))
        if not self.is_quiet and self._may_use(lease, stream):
            self._launch(lease, stream, start=lease.confirmed_tokens, stop=lease.num_tokens)
        how = self.rng.choice(("release", "finish", "preempt", "garbage"))
        if how == "release":
            lease.release(after=self._fence(stream))
        elif how == "finish":
            lease.finish(after=self._fence(stream))
        elif how == "preempt":
            self.preempted.append(lease.preempt(after=self._fence(stream)))
        else:
            del lease
            gc.collect(0)

    async def truncate(self) -> None:
        if self.leases:
            lease, stream = self.rng.choice(self.leases)
            length = self.rng.randint(0, lease.num_tokens)
            self._try(lambda: lease.truncate(length, after=self._fence(stream)))

    async def grow(self) -> None:
        if self.leases:
            lease, _ = self.rng.choice(self.leases)
            self._try(lambda: lease.try_extend(self.rng.randint(1, 2 * BLOCK)))

    async def fork(self) -> None:
        if self.leases:
            lease, _ = self.rng.choice(self.leases)
            self._try(lambda: self._keep(lease.try_fork("fork")))

    async def resume(self) -> None:
        if self.preempted:
            preempted = self.preempted.pop()
            self._try(lambda: self._keep(preempted.try_resume()))

    async def copies(self) -> None:
        """Some copies end, a few of them badly, and streams go on."""
        if self.rng.random() < 0.2:
            self.fake.fail(1, direction=self.rng.choice(("load", "store")))
        self.fake.complete(self.rng.randrange(4))
        if self.rng.random() < 0.5:
            self.backend.advance(self.rng.choice(self.streams))

    async def reset(self) -> None:
        if self.rng.random() < 0.3:
            await self.kv.reset(None if self.rng.random() < 0.05 else Tier.GPU)

    async def quiesce(self) -> None:
        async with self.kv.quiesce():
            before = self.backend.calls
            self.is_quiet = True
            self.backend.capturing.add(self.streams[0])
            await self.end()
            await asyncio.sleep(0)
            self.backend.capturing.clear()
            self.is_quiet = False
            assert self.backend.calls == before

    def _prompt(self) -> list[int]:
        """One of few, so that prompts share blocks."""
        return [self.rng.randrange(FAMILIES)] * self.rng.randint(2 * BLOCK, LONGEST)

    def _keep(self, got: Lease | Deferred) -> None:
        if isinstance(got, Lease):
            self.admitted += 1
            self.leases.append((got, self.rng.choice(self.streams)))

    def _fence(self, stream: str) -> object:
        """The stream's own, one that was taken before and still says as much, or what the runtime takes by itself."""
        kernels, taken = self.taken.get(stream, (-1, None))
        if self.rng.random() < 0.5 and kernels == self.launched[stream]:
            return taken
        if self.is_quiet or self.rng.random() < 0.3:
            return None
        fence = self.kv.fence(stream)
        assert fence is not None
        self.taken[stream] = (self.launched[stream], fence)
        return fence

    def _may_use(self, lease: Lease, stream: str) -> bool:
        """Whether kernels may be launched: on several streams, and before its loads have ended, these have to wait."""
        if len(self.streams) == 1 and lease.state is LeaseState.READY:
            return True
        try:
            lease.wait_on(stream)
        except InvalidTransition:
            return False
        return True

    def _may_capture(self, lease: Lease) -> bool:
        geometry = self.kv.config.geometry
        states = [spec.name for spec in geometry.groups if isinstance(spec, RecurrentState)]
        return bool(states) and all(lease.state_slots(name)[1] for name in states)

    def _launch(self, lease: Lease, stream: str, *, start: int, stop: int) -> None:
        """Tokens `[start, stop)` are computed: they read what they cover before `start`."""
        geometry = self.kv.config.geometry
        for index, (spec, block) in enumerate(zip(geometry.groups, geometry.block_sizes, strict=True)):
            table = lease.block_table(spec.name)
            first = coverage_start(geometry, index, start)
            if isinstance(spec, RecurrentState):
                reads = table[start // BLOCK - 1 : start // BLOCK] if start % BLOCK == 0 and start else ()
                writes: Collection[int] = lease.state_slots(spec.name)
            else:
                reads, writes = table[first : start // block], table[start // block : -(-stop // block)]
            self.backend.launch(
                stream, reads=[slot for slot in reads if slot], writes=[slot for slot in writes if slot]
            )
        self.launched[stream] += 1

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except AiokvError:
            return  # refused: nothing has changed


async def run_engine(
    rng: random.Random, *, geometry: str, streams: Collection[str], deaf_to: Collection[Direction] = ()
) -> tuple[RandomEngine, list[str]]:
    """One random life; what the oracle has found."""
    fake = FakeBackend()
    backend = FencedBackend(fake, deaf_to=deaf_to)
    config = RuntimeConfig(
        geometry=GEOMETRIES[geometry],
        gpu_blocks=20 if geometry == "hybrid" else 10,
        cpu_blocks=80,
        watermark=0.0,
        backend=backend,
        compute_stream="main",
        close_grace_s=5.0,
        store_policy=rng.choice((StorePolicy.EAGER, StorePolicy.LAZY)),
    )
    async with KVRuntime(config) as kv:
        engine = RandomEngine(kv, backend=backend, fake=fake, streams=streams, rng=rng)
        await engine.run()
        await engine.settle()
        audit = kv.audit()
        assert (audit.leases, audit.pins, audit.reservations, audit.violations) == ((), (), (), ())
    return engine, backend.order.violations


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_no_use_of_a_slot_overlaps_another(geometry: str, streams: tuple[str, ...], seed: int) -> None:
    engine, violations = asyncio.run(run_engine(random.Random(seed), geometry=geometry, streams=streams))
    assert not violations
    assert engine.admitted
    assert sum(engine.launched.values()) > FAMILIES


@pytest.mark.parametrize("direction", Direction)
def test_copies_that_heed_no_fence_are_found(geometry: str, streams: tuple[str, ...], direction: Direction) -> None:
    """The same engines over a backend that ignores the fences of one direction: so the test above can fail."""
    found: list[str] = []
    for seed in range(8):
        _, violations = asyncio.run(
            run_engine(random.Random(seed), geometry=geometry, streams=streams, deaf_to=(direction,))
        )
        found += [violation for violation in violations if violation.startswith(f"a {direction.value} ")]
    assert found
