"""The other public coroutines, cancelled at every suspension: what they started goes on or ends, nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import cache, partial
from itertools import count
from typing import Any

import pytest

from aiokv import BlockKeys, KVRuntime, Lease, RuntimeConfig, Tier, UsageError
from aiokv.testing import FakeBackend, make_resident
from tests.cancellation.scenarios import World, hold
from tests.cancellation.ways import WAYS, Suspensions, Way
from tests.runtime.support import (
    BLOCK,
    GEOMETRY,
    GROUP,
    Case,
    assert_all_given_back,
    assert_nothing_held,
    is_shut,
    opened,
    prompt,
    turns,
    until,
)

MANY = 17_000
"""Blocks: more than a slice of a reset."""


@cache
def many_keys() -> BlockKeys:
    keys = BlockKeys(prompt(MANY, extra=0), hash_block_size=BLOCK)
    keys.hash_more(MANY)
    return keys


every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
Scene = Callable[[Case], "tuple[Coroutine[Any, Any, object], tuple[Callable[[], object], ...]]"]


async def sweep(scene: Scene, *, way: Way, suspensions: int, gpu_blocks: int = 9) -> None:
    """Cancel what `scene` makes at every suspension, each time in a runtime of its own."""
    for at in count(1):
        async with opened(gpu_blocks=gpu_blocks) as case:
            coroutine, moves = scene(case)
            run = Suspensions(coroutine, at=at)
            world = World(moves)
            world.start()
            await way(run)
            await turns(3 * len(moves) + 3)
            world.stop()
            await assert_all_given_back(case)
        if not run.struck:
            assert at > suspensions
            return


@every_way
async def test_extend(way: Way) -> None:
    def scene(case: Case) -> tuple[Coroutine[Any, Any, object], tuple[Callable[[], object], ...]]:
        other, mine = hold(case, blocks=4), hold(case, blocks=4, seed=901)

        async def extend() -> None:
            try:
                await mine.extend(16)
            finally:
                mine.release()

        return extend(), (other.release,)

    await sweep(scene, way=way, suspensions=1)


@every_way
async def test_ready_of_a_load_that_fails(way: Way) -> None:
    def scene(case: Case) -> tuple[Coroutine[Any, Any, object], tuple[Callable[[], object], ...]]:
        token_ids = prompt(3)
        make_resident(case.kv, token_ids, {GROUP: "ccc"})
        lease = case.kv.try_acquire("request", token_ids)
        assert isinstance(lease, Lease)

        async def ready() -> None:
            try:
                await lease.ready()
            finally:
                lease.release()

        return ready(), (case.backend.fail,)

    await sweep(scene, way=way, suspensions=1)


@every_way
async def test_resume(way: Way) -> None:
    """Waits for capacity, then for loads; cancelled in either, the request can be resumed again."""

    def scene(case: Case) -> tuple[Coroutine[Any, Any, object], tuple[Callable[[], object], ...]]:
        token_ids = prompt(3)
        lease = case.kv.try_acquire("request", token_ids)
        assert isinstance(lease, Lease)
        preempted = lease.preempt()
        make_resident(case.kv, token_ids, {GROUP: "ccc"})
        other = hold(case, blocks=8)

        async def resume() -> None:
            try:
                resumed = await preempted.resume()
            except BaseException:
                again = preempted.try_resume()
                if isinstance(again, Lease):
                    again.release()
                raise
            resumed.release()

        return resume(), (other.release, case.backend.complete)

    await sweep(scene, way=way, suspensions=2)


@every_way
async def test_a_resumption_as_context_manager(way: Way) -> None:
    def scene(case: Case) -> tuple[Coroutine[Any, Any, object], tuple[Callable[[], object], ...]]:
        token_ids = prompt(3)
        lease = case.kv.try_acquire("request", token_ids)
        assert isinstance(lease, Lease)
        preempted = lease.preempt()
        make_resident(case.kv, token_ids, {GROUP: "cc-"})

        async def serve() -> None:
            async with preempted.resume(timeout=3600.0) as resumed:
                resumed.confirm(resumed.num_tokens)
                await turns(2)
                resumed.preempt().close()

        return serve(), (case.backend.complete,)

    await sweep(scene, way=way, suspensions=3)


@every_way
async def test_drain(way: Way) -> None:
    def scene(case: Case) -> tuple[Coroutine[Any, Any, object], tuple[Callable[[], object], ...]]:
        lease = hold(case, blocks=4)
        lease.confirm(lease.num_tokens)
        lease.finish()
        return case.kv.drain(), (case.backend.complete, case.backend.complete)

    await sweep(scene, way=way, suspensions=1)


@every_way
async def test_reset(way: Way) -> None:
    asyncio.get_running_loop().set_debug(False)

    def scene(case: Case) -> tuple[Coroutine[Any, Any, object], tuple[Callable[[], object], ...]]:
        make_resident(case.kv, many_keys(), {GROUP: "g" * MANY})
        return case.kv.reset(Tier.GPU), ()

    await sweep(scene, way=way, suspensions=1, gpu_blocks=MANY + 1)


@every_way
async def test_prepare_keys(way: Way) -> None:
    def scene(case: Case) -> tuple[Coroutine[Any, Any, object], tuple[Callable[[], object], ...]]:
        return case.kv.prepare_keys(prompt(1200)), ()

    await sweep(scene, way=way, suspensions=2)


@every_way
async def test_audit_sliced(way: Way) -> None:
    """A cancelled audit leaves nothing behind; what it has seen of a request that leaves meanwhile does no harm."""

    def scene(case: Case) -> tuple[Coroutine[Any, Any, object], tuple[Callable[[], object], ...]]:
        other = hold(case, blocks=8)

        async def audit() -> None:
            assert (await case.kv.audit_sliced()).violations == ()

        return audit(), (other.release,)

    await sweep(scene, way=way, suspensions=3, gpu_blocks=3000)


@every_way
async def test_quiesce_polls_and_admits_again(way: Way) -> None:
    def scene(case: Case) -> tuple[Coroutine[Any, Any, object], tuple[Callable[[], object], ...]]:
        async def capture() -> None:
            async with case.kv.quiesce():
                await turns(3)

        return capture(), ()

    await sweep(scene, way=way, suspensions=3)


@every_way
async def test_aclose_goes_on_when_its_caller_is_cancelled(way: Way) -> None:
    for at in count(1):
        async with opened() as case:
            make_resident(case.kv, prompt(3), {GROUP: "ccc"})
            lease = case.kv.try_acquire("request", prompt(3))
            assert isinstance(lease, Lease)
            await turns(2)
            run = Suspensions(case.kv.aclose(), at=at)
            world = World((case.backend.complete,))
            world.start()
            await way(run)
            await until(partial(is_shut, case.backend))
            world.stop()
            await case.kv.aclose()
            assert_nothing_held(case.kv)
            with pytest.raises(UsageError):
                case.kv.try_acquire("late", prompt(1))
        if not run.struck:
            break
    assert at > 1


@every_way
async def test_open_closes_the_backend_when_its_caller_is_cancelled(way: Way) -> None:
    """A backend that was opened for nobody would keep its arena and its thread."""
    for at in count(1):
        backend = FakeBackend()
        kv = KVRuntime(RuntimeConfig(geometry=GEOMETRY, gpu_blocks=9, cpu_blocks=9, backend=backend))
        run = Suspensions(kv.open(), at=at)
        await way(run)
        await kv.aclose()
        await until(partial(is_shut, backend))
        if not run.struck:
            break
    assert at > 1


@every_way
async def test_reading_events(way: Way) -> None:
    """A reader that leaves takes nothing from the cache, nor from another reader."""

    def scene(case: Case) -> tuple[Coroutine[Any, Any, object], tuple[Callable[[], object], ...]]:
        lease = hold(case, blocks=3)

        async def read() -> None:
            async with case.kv.events() as stream:
                for _ in range(3):
                    await anext(stream)

        def confirm() -> None:
            lease.confirm(min(lease.confirmed_tokens + BLOCK, lease.num_tokens))

        return read(), (confirm, confirm, confirm, lease.release)

    await sweep(scene, way=way, suspensions=3)
