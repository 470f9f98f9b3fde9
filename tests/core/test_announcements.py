"""Capacity that comes back is announced, by whatever way it comes: otherwise whoever waits for it waits for ever."""

from __future__ import annotations

from aiokv.model.plan import DeferReason, Deferred
from aiokv.model.spec import FullAttention, SlidingWindow
from aiokv.testing.host import Host
from aiokv.testing.streams import geometry_of

FULL = geometry_of(FullAttention("full", block_size=4))


def test_claims_that_never_had_a_name_are_announced() -> None:
    """An extension that nobody took, before any of it was named."""
    h = Host(FULL, gpu_blocks=33, cpu_blocks=4, slice_blocks=1)
    record = h.admit(0, 41)
    before = list(record.capacity_tokens)
    assert not isinstance(h.extend(record, 40), Deferred)
    assert h.acquire(1, 61) == Deferred(DeferReason.CAPACITY)
    generation = h.cache.capacity_generation
    h.undo_extend(record, before)
    assert h.cache.capacity_generation > generation
    h.check()
    h.tear_down()


def test_a_lease_that_holds_nothing_is_announced_when_it_leaves() -> None:
    """It kept the watermark in force, and nothing else; who was deferred by that is worth another try."""
    h = Host(geometry_of(SlidingWindow("window", block_size=4, window=1)), gpu_blocks=11, cpu_blocks=0, watermark=0.2)
    record = h.admit(0, 8)
    h.confirm(record, 8)
    h.run_slices()
    assert not len(record.held_slots())
    assert h.acquire(1, 4, reserve_tokens=32) == Deferred(DeferReason.WATERMARK)
    generation = h.cache.capacity_generation
    h.release(record)
    assert h.cache.capacity_generation > generation
    h.release(h.admit(1, 4, reserve_tokens=32))
    h.tear_down()
