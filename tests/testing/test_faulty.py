"""`FaultyBackend`: which copies go wrong, how, and what a runtime makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from aiokv import ConfigError, CopyBatch, CopyFailed, Direction, KVRuntime
from aiokv.backends.arena import Layout
from aiokv.backends.base import EventStatus
from aiokv.testing import FakeBackend, FaultyBackend, make_resident
from tests.runtime.support import BLOCK, GEOMETRY, GROUP, assert_nothing_held, config_of, prompt

BLOCKS = 64


@contextmanager
def opened(inner: FakeBackend, backend: FaultyBackend) -> Iterator[FaultyBackend]:
    backend.open(Layout(geometry=GEOMETRY, gpu_blocks=BLOCKS + 1, cpu_blocks=BLOCKS))
    yield backend
    inner.complete_all()


def batch(*slots: int) -> CopyBatch:
    return CopyBatch(
        direction=Direction.LOAD,
        group=GROUP,
        source_blocks=np.array(slots, np.int32),
        target_blocks=np.array(slots, np.int32) + 1,
    )


def test_a_failing_copy_copies_the_first_half_only_and_ends_with_an_error() -> None:
    inner = FakeBackend()
    with opened(inner, FaultyBackend(inner, fail=1.0)) as backend:
        event = backend.submit(batch(0, 1, 2, 3, 4))
        assert event.query() is EventStatus.PENDING
        assert inner.pending[0].source_blocks == (0, 1)
        assert inner.pending[0].target_blocks == (1, 2)
        inner.complete()
        assert event.query() is EventStatus.FAILED
        assert event.detail()
    assert backend.injected.failed == 1


def test_of_a_single_block_nothing_is_copied() -> None:
    inner = FakeBackend()
    with opened(inner, FaultyBackend(inner, fail=1.0)) as backend:
        assert backend.submit(batch(7)).query() is EventStatus.FAILED
        assert inner.history == ()


def test_what_fails_inside_stays_failed_in_its_own_words() -> None:
    inner = FakeBackend()
    with opened(inner, FaultyBackend(inner, fail=1.0)) as backend:
        event = backend.submit(batch(0, 1))
        inner.fail()
        assert (event.query(), event.detail()) == (EventStatus.FAILED, "the test failed this copy")


def test_a_refused_copy_starts_nothing() -> None:
    inner = FakeBackend()
    with opened(inner, FaultyBackend(inner, refuse=1.0)) as backend:
        with pytest.raises(CopyFailed):
            backend.submit(batch(0, 1))
        assert inner.history == ()
    assert backend.injected.refused == 1


def test_a_late_copy_is_pending_for_so_many_queries_more_and_rings_itself() -> None:
    inner = FakeBackend()
    with opened(inner, FaultyBackend(inner, late=1.0, late_queries=3)) as backend:
        rings: list[None] = []
        backend.attach_doorbell(lambda: rings.append(None))
        event = backend.submit(batch(0))
        assert event.query() is EventStatus.PENDING
        assert not rings
        inner.complete()
        assert [event.query() for _ in range(4)] == [EventStatus.PENDING] * 3 + [EventStatus.DONE]
        assert len(rings) == 1 + 3
    assert backend.injected.late == 1


def fates(seed: int) -> list[str]:
    inner = FakeBackend()
    found = []
    with opened(inner, FaultyBackend(inner, seed=seed, fail=0.2, refuse=0.2, late=0.2)) as backend:
        for slot in range(BLOCKS):
            before = backend.injected
            try:
                backend.submit(batch(slot))
            except CopyFailed:
                found.append("refused")
            else:
                found.append("failed" if backend.injected.failed > before.failed else "late or well")
    return found


def test_the_seed_decides_which_copies_go_wrong() -> None:
    assert fates(1) == fates(1)
    assert fates(1) != fates(2)
    assert {"refused", "failed", "late or well"} == set(fates(1))


def test_after_healing_every_copy_goes_well() -> None:
    inner = FakeBackend()
    with opened(inner, FaultyBackend(inner, fail=0.5, refuse=0.5)) as backend:
        backend.heal()
        events = [backend.submit(batch(slot)) for slot in range(BLOCKS)]
        inner.complete_all()
        assert {event.query() for event in events} == {EventStatus.DONE}


@pytest.mark.parametrize("fractions", [{"fail": -0.1}, {"late": 1.5}, {"refuse": True}, {"fail": 0.6, "late": 0.6}])
def test_fractions_are_checked(fractions: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        FaultyBackend(
            FakeBackend(),
            fail=fractions.get("fail", 0.0),
            refuse=fractions.get("refuse", 0.0),
            late=fractions.get("late", 0.0),
        )


async def test_a_runtime_on_it_plans_again_and_keeps_nothing() -> None:
    """Law 4, invariant 12: a load that failed leads to a shorter prefix, not to wrong blocks."""
    backend = FaultyBackend(FakeBackend(manual=False), fail=1.0, late_queries=2)
    async with KVRuntime(config_of(backend=backend)) as kv:
        make_resident(kv, prompt(3), {GROUP: "ccc"})
        async with kv.acquire("request", prompt(3)) as lease:
            assert lease.hit.cpu_tokens == 3 * BLOCK
            assert lease.delivered.cpu_tokens == 0
        await kv.drain()
        assert_nothing_held(kv)


async def test_late_copies_end_on_a_backend_that_rings() -> None:
    backend = FaultyBackend(FakeBackend(manual=False), late=1.0)
    async with KVRuntime(config_of(backend=backend)) as kv:
        make_resident(kv, prompt(3), {GROUP: "ccc"})
        async with asyncio.timeout(10), kv.acquire("request", prompt(3)) as lease:
            assert lease.delivered.cpu_tokens == 3 * BLOCK


async def test_a_single_block_that_fails_ends_on_a_backend_that_rings() -> None:
    backend = FaultyBackend(FakeBackend(manual=False), fail=1.0)
    async with KVRuntime(config_of(backend=backend)) as kv:
        make_resident(kv, prompt(1), {GROUP: "c"})
        async with asyncio.timeout(10), kv.acquire("request", prompt(1)) as lease:
            assert lease.delivered.cpu_tokens == 0
