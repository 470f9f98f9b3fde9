"""What a pool costs before it is used: little memory, and pages that can be touched ahead in slices."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from aiokv.core.pool import Pool
from aiokv.model.ids import DigestArray, SlotArray, Tier

KEYS: DigestArray = np.random.default_rng(0).integers(0, 2**64, (64, 4), dtype=np.uint64)


def fill(pool: Pool) -> SlotArray:
    pool.claim(len(KEYS))
    slots = pool.name_claimed(len(KEYS), 0).slots
    pool.register(slots, KEYS, 0)
    pool.unpin(slots)
    return slots


def test_warming_in_slices_ends_and_changes_nothing() -> None:
    pool = Pool(Tier.CPU, capacity=20_000)
    slots = fill(pool)
    before = pool.fingerprint()
    left = [pool.warm(1000)]
    while left[-1]:
        left.append(pool.warm(1000))
    assert left == sorted(left, reverse=True)
    assert len(left) > 5
    assert pool.warm(1000) == 0
    assert pool.fingerprint() == before
    assert pool.find(KEYS, 0).slots.tolist() == slots.tolist()


def test_a_slot_that_was_never_used_costs_at_most_40_bytes() -> None:
    before = resident_bytes()
    pool = Pool(Tier.CPU, capacity=4_000_000)
    fill(pool)
    assert resident_bytes() - before < 4_000_000 * 40
    assert pool.find(KEYS, 0).present.all()


def resident_bytes() -> int:
    """Memory of this process; skips where the system does not tell."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs /proc")
    return int(statm.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
