"""What a plan says of its parts and which limits it finds in the way; sizes are held against what a core takes."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aiokv.backends.arena import Layout
from aiokv.backends.host_memory import HostMemory
from aiokv.backends.memory_plan import Demand, LimitKind, MemoryPlan, Registration, plan_memory
from aiokv.core.cache import CacheState
from aiokv.errors import ConfigError
from aiokv.model.plan import Checksum
from tests.backends.support import geometry_of

MIB, GIB, TIB = 1024**2, 1024**3, 1024**4
HOST = HostMemory(
    memory_total=64 * GIB,
    memory_available=48 * GIB,
    memory_limit=None,
    memlock_limit=None,
    transparent_huge_pages="madvise",
    huge_pages_free=0,
    huge_page_size=2 * MIB,
)


def demand_of(arena_bytes: int, *, slot_bytes: int = MIB, registration: Registration = Registration.NONE) -> Demand:
    slots = arena_bytes // slot_bytes
    return Demand(
        gpu_slots=1000,
        cpu_slots=slots,
        arena_bytes=slots * slot_bytes,
        block_tokens=16,
        registration=registration,
    )


def pinned(arena_bytes: int, *, slot_bytes: int = MIB, host: HostMemory = HOST) -> MemoryPlan:
    return plan_memory(demand_of(arena_bytes, slot_bytes=slot_bytes, registration=Registration.PINNED), host)


def size_of(plan: MemoryPlan, name: str) -> int:
    (size,) = (part.num_bytes for part in plan.parts if part.name == name)
    return size


def broken(plan: MemoryPlan) -> list[str]:
    return [limit.name for limit in plan.limits if not limit.is_kept]


def test_a_layout_is_planned_to_the_byte() -> None:
    arenas = {"full": [np.zeros((4, 100), np.uint8)], "r": [np.zeros((4, 300), np.uint8)]}
    layout = Layout(geometry=geometry_of("full", "r"), gpu_blocks=4, cpu_blocks=7, arenas=arenas)
    plan = plan_memory(Demand.of(layout), HOST)
    assert plan.arena_bytes == size_of(plan, "CPU arena") == 7 * 300, "a slot is as large as the largest group's block"
    assert plan.total_bytes == sum(part.num_bytes for part in plan.parts if not part.only_while)
    assert plan.chunks is None
    plan.require_fit()


@pytest.mark.parametrize(("gpu", "cpu"), [(20_000, 1), (1000, 20_000), (8192, 8192)])
def test_the_books_take_no_more_than_is_planned_and_no_less_than_half_of_it(gpu: int, cpu: int) -> None:
    demand = replace(demand_of(0), gpu_slots=gpu, cpu_slots=cpu)
    tracemalloc.start()
    try:
        core = CacheState(geometry_of("full"), gpu_blocks=gpu, cpu_blocks=cpu)
        core.warm()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    planned = size_of(plan_memory(demand, HOST), "index and slot state")
    assert planned / 2 < taken <= planned


def test_checksums_are_a_part_only_where_they_are_kept() -> None:
    plain, summed = (
        plan_memory(replace(demand_of(GIB), checksum=checksum), HOST) for checksum in (Checksum.OFF, Checksum.FULL)
    )
    assert [part.name for part in plain.parts if part not in summed.parts] == []
    assert summed.total_bytes - plain.total_bytes == size_of(summed, "checksums") == 9 * 1024


def test_what_is_taken_only_while_events_are_read_is_told_and_not_counted() -> None:
    plan = plan_memory(demand_of(GIB), HOST)
    assert size_of(plan, "cache events") >= 1000 * 4 * 16, "4 bytes for each token of a GPU block"
    assert plan.total_bytes == GIB + size_of(plan, "index and slot state")


@pytest.mark.parametrize(
    ("arena", "changes", "name", "kind"),
    [
        (65 * GIB, {}, "the machine's memory", LimitKind.FIXED),
        (9 * GIB, {"memory_limit": 8 * GIB}, "the cgroup's memory limit", LimitKind.FIXED),
        (50 * GIB, {}, "the memory available now", LimitKind.NOW),
        (7 * GIB, {"memory_limit": 8 * GIB, "memory_left": 6 * GIB}, "the room left in the cgroup", LimitKind.NOW),
        (7 * GIB, {"memory_limit": 8 * GIB, "memory_left": 0}, "the room left in the cgroup", LimitKind.NOW),
        (7 * GIB, {"commit_left": 5 * GIB}, "what may be mapped without overcommit", LimitKind.NOW),
    ],
)
def test_the_limit_in_the_way_is_named(arena: int, changes: dict[str, Any], name: str, kind: LimitKind) -> None:
    plan = plan_memory(demand_of(arena), replace(HOST, **changes))
    assert plan.broken(kind)[0].name == name
    with pytest.raises(ConfigError, match=f"CPU arena .*, but {name}" if kind is LimitKind.FIXED else "but the|what"):
        plan.require_fit()


def test_what_fits_only_with_swap_is_let_through() -> None:
    plan_memory(demand_of(50 * GIB), replace(HOST, swap_free=4 * GIB)).require_fit()


def test_a_system_that_says_nothing_limits_nothing() -> None:
    silent = replace(HOST, memory_total=0, memory_available=0)
    plan = plan_memory(demand_of(TIB), silent)
    assert broken(plan) == []
    plan.require_fit()


def test_a_large_arena_is_registered_in_calls_that_the_driver_takes() -> None:
    plan = pinned(TIB, host=replace(HOST, memory_total=2 * TIB, memory_available=2 * TIB))
    assert plan.chunks is not None
    assert (plan.chunks.count, plan.chunks.largest_bytes) == (16, 64 * GIB)
    assert broken(plan) == []


def test_blocks_that_end_on_no_page_may_be_too_large_for_the_driver_and_still_fit() -> None:
    """Such chunks end on a page after 4,096 slots only: the arena works unpinned."""
    plan = pinned(TIB, slot_bytes=256 * MIB + 1, host=replace(HOST, memory_total=2 * TIB, memory_available=2 * TIB))
    assert broken(plan) == ["one registration with the driver"]
    plan.require_fit()


def test_memlock_may_keep_an_arena_from_being_pinned_and_refuses_nothing() -> None:
    plan = pinned(GIB, host=replace(HOST, memlock_limit=8 * MIB))
    assert broken(plan) == ["memlock"]
    plan.require_fit()
    assert broken(plan_memory(demand_of(GIB), replace(HOST, memlock_limit=8 * MIB))) == [], "nothing is pinned"


def test_nothing_is_registered_of_an_empty_pool() -> None:
    assert pinned(0).chunks is None
