"""Storms over whole lives: truncations, forks, preemptions, resumptions, extensions, resets, ranks, and cancellations.

On the fake backend copies end in any order, well or not, on several ranks; what compute writes must never be what a
copy touches. On the host backend every token's KV names the whole prefix that it was computed from, so a block that is
reused, registered, shared or written on too early, or found under another prompt's hash, shows.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, final

import numpy as np
import pytest
from numpy.typing import NDArray

from aiokv import (
    CacheGeometry,
    CopyBatch,
    Direction,
    KVRuntime,
    Lease,
    Outcome,
    RankTransfer,
    RuntimeConfig,
    StorePolicy,
    UsageError,
)
from aiokv.backends.base import EventStatus
from aiokv.backends.host import HostBackend, HostEvent, HostFaults
from aiokv.testing import FakeBackend
from tests.cancellation.moods import assert_enough, find_lacking
from tests.cancellation.storms import ENOUGH, Storm, kv_of
from tests.runtime.support import BLOCK, GEOMETRY, HYBRID, assert_nothing_held, turns

WORLD_SIZE: Final = 3
FAULTS: Final = HostFaults(fail=frozenset(range(3, 1000, 7)))


@final
class WritesAndCopies:
    """Where a lease may write, no copy reads or writes; what it may read, no copy writes."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend

    def compute(self, lease: Lease, stop: int) -> None:
        self.check(lease)

    def check(self, lease: Lease) -> None:
        for copy in self._backend.pending:
            table = lease.block_table(copy.group)
            writable = set(table[-(-lease.confirmed_tokens // BLOCK) :]) - {0}
            touched, filled = set(copy.source_blocks), set[int]()
            if copy.direction == "load":
                touched = filled = set(copy.target_blocks)
            assert not writable & touched
            assert not set(table) & filled


@final
class Bytes:
    """Every token's KV is a checksum of all tokens up to it, in every group's tensors: shape `[blocks, BLOCK, 16]`."""

    def __init__(self, geometry: CacheGeometry, *, gpu_blocks: int) -> None:
        self._arenas = {group.name: np.zeros((gpu_blocks, BLOCK, 16), np.uint32) for group in geometry.groups}

    @property
    def arenas(self) -> Mapping[str, list[NDArray[np.uint32]]]:
        return {group: [arena] for group, arena in self._arenas.items()}

    def compute(self, lease: Lease, stop: int) -> None:
        start = lease.confirmed_tokens
        values = kv_of(lease, stop)
        for group, arena in self._arenas.items():
            slots = np.repeat(lease.block_ids(group), BLOCK)[start:stop]
            assert slots.all(), "there is a slot for every token that is computed"
            arena[slots, np.arange(start, stop) % BLOCK] = values[start:, None]

    def check(self, lease: Lease) -> None:
        stop = lease.confirmed_tokens
        values = kv_of(lease, stop)
        for group, arena in self._arenas.items():
            slots = np.repeat(lease.block_ids(group), BLOCK)[:stop]
            held = np.flatnonzero(slots)
            assert (arena[slots[held], held % BLOCK] == values[held, None]).all()


@final
class TornEvent:
    """A host copy of which nothing is left in its target when it has failed."""

    def __init__(self, event: HostEvent, *, tear: Callable[[], None]) -> None:
        self._event = event
        self._tear = tear

    def query(self) -> EventStatus:
        status = self._event.query()
        if status is EventStatus.FAILED:
            self._tear()
        return status

    def detail(self) -> str:
        return self._event.detail()


@final
class TornCopies:
    """The host backend; its failed copies leave no right byte behind. The transfer still holds the target then."""

    def __init__(self, engine: Bytes, *, faults: HostFaults) -> None:
        self._engine = engine
        self._host = HostBackend(faults=faults)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever else a backend does
        return getattr(self._host, name)

    def submit(self, batch: CopyBatch) -> TornEvent:
        return TornEvent(self._host.submit(batch), tear=partial(self._tear, batch))

    def _tear(self, batch: CopyBatch) -> None:
        for slot in batch.target_blocks.tolist():
            if batch.direction is Direction.LOAD:
                self._engine.arenas[batch.group][0][slot] = 0
            else:
                self._host.cpu_slot(slot)[:] = 0


@final
class RemoteRanks:
    """Ranks in other processes: each makes each transfer some time, in any order, and says so, sometimes twice."""

    def __init__(self, kv: KVRuntime, *, seed: int) -> None:
        self._kv = kv
        self._random = random.Random(seed)
        self._due: list[tuple[RankTransfer, int]] = []
        self.seen: Counter[str] = Counter()

    async def turn(self) -> None:
        self.take()
        self._random.shuffle(self._due)
        while self._due and self._random.random() < 0.7:
            self._report(*self._due.pop())

    def take(self) -> None:
        self._due += [(transfer, rank) for transfer in self._kv.transfers().take() for rank in range(1, WORLD_SIZE)]

    def report_all(self) -> None:
        self.take()
        while self._due:
            self._report(*self._due.pop())

    def _report(self, transfer: RankTransfer, rank: int) -> None:
        outcome = self._random.choice((Outcome.OK,) * 12 + (Outcome.FAILED,))
        self._kv.report(transfer.transfer_id, rank, outcome)
        self.seen[outcome.value] += 1
        if self._random.random() < 0.2:
            try:
                self._kv.report(transfer.transfer_id, rank, outcome)
                self.seen["twice"] += 1
            except UsageError:  # it was the last report
                self.seen["too late"] += 1


@asynccontextmanager
async def opened(backend: Any, *, geometry: CacheGeometry, **settings: Any) -> AsyncIterator[KVRuntime]:  # noqa: ANN401
    arenas = settings.pop("arenas", {})
    config = RuntimeConfig(geometry=geometry, backend=backend, watermark=0.05, **settings)
    async with KVRuntime(config, arenas=arenas) as kv:
        yield kv


every_geometry = pytest.mark.parametrize("geometry", [GEOMETRY, HYBRID], ids=["one group", "two groups"])


@every_geometry
@pytest.mark.parametrize("seed", range(2))
async def test_lives_on_three_ranks_leave_nothing_behind(seed: int, geometry: CacheGeometry) -> None:
    """Laws 3 and 4, invariants 2, 4, 10 and 12: copies end in any order on ranks, late, failed and twice."""
    asyncio.get_running_loop().set_debug(False)
    backend, chance, gpu_blocks = FakeBackend(), random.Random(seed), 30 * len(geometry.groups) + 1
    settings = {"gpu_blocks": gpu_blocks, "cpu_blocks": 240, "world_size": WORLD_SIZE, "remote_ranks": (1, 2)}
    async with opened(backend, geometry=geometry, **settings) as kv:
        storm, ranks = Storm(kv, WritesAndCopies(backend), seed=seed, within=50), RemoteRanks(kv, seed=seed)

        async def end_local_copies() -> None:
            end = chance.choice((backend.complete,) * 9 + (backend.fail,))
            end(chance.randrange(1, 4))

        await asyncio.wait_for(storm.blow(end_local_copies, ranks.turn), 50.0)
        drained = asyncio.ensure_future(kv.drain())
        while not drained.done():
            backend.complete_all()
            ranks.report_all()
            await turns(1)
        assert_nothing_held(kv)
        assert_enough(storm.seen, ENOUGH)
        assert_enough(ranks.seen, {"ok": 150, "error": 8, "twice": 15})


@pytest.mark.parametrize(
    ("policy", "geometry", "faults"),
    [
        pytest.param(StorePolicy.EAGER, GEOMETRY, HostFaults(), id="eager"),
        pytest.param(StorePolicy.EAGER, HYBRID, FAULTS, id="eager, two groups, failing"),
        pytest.param(StorePolicy.LAZY, HYBRID, FAULTS, id="lazy, two groups, failing"),
        pytest.param(StorePolicy.SELECTIVE, GEOMETRY, FAULTS, id="selective, failing"),
    ],
)
async def test_every_token_of_a_life_reads_what_was_computed_for_its_prefix(
    policy: StorePolicy, geometry: CacheGeometry, faults: HostFaults
) -> None:
    """Laws 1, 3, 4 and 10 on real bytes, for every store policy."""
    gpu_blocks = 30 * len(geometry.groups) + 1
    asyncio.get_running_loop().set_debug(False)
    engine = Bytes(geometry, gpu_blocks=gpu_blocks)
    settings = {"gpu_blocks": gpu_blocks, "cpu_blocks": 240, "store_policy": policy, "arenas": engine.arenas}
    async with opened(TornCopies(engine, faults=faults), geometry=geometry, **settings) as kv:
        seen: Counter[str] = Counter()
        for seed in range(7, 12):  # real copies take real time: on a busy machine one storm may try little of something
            storm = Storm(kv, engine, seed=seed, within=20)
            await asyncio.wait_for(storm.blow(), 50.0)
            await kv.drain()
            assert_nothing_held(kv)
            seen += storm.seen
            if not find_lacking(seen, ENOUGH):
                break
        assert_enough(seen, ENOUGH)
