"""The core under everything at once: requests, copies, faults, resets and pressure in any order."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import settings

from aiokv.testing.run import run_cache_machine

EXAMPLES: Final = 300
STEPS: Final = 80
LEAST: Final = 5
"""Of each rare situation; some 30 or more are met, so that other draws do not fail the test."""
RARE: Final = (
    "load corrupt",
    "load error",
    "load ok",
    "store ok",
    "replanned",
    "waited",
    "crowded",
    "joins",
    "captured",
    "sliced",
    "reset",
    "left while loading",
    "truncated what was written",
    "forked with a prefix",
    "resumed with a prefix",
    "rank ok",
    "rank error",
    "report repeated",
    "report refused",
    "hint kept",
    "hint held again",
    "hint declined quota",
    "hints revoked capacity",
)


@pytest.mark.timeout(480)
def test_the_core_keeps_its_invariants_under_everything_at_once() -> None:
    """Invariants 1 to 13, after every step."""
    seen = run_cache_machine(max_examples=max(EXAMPLES, settings().max_examples), steps=STEPS)
    missed = {kind: seen[kind] for kind in RARE if seen[kind] < LEAST}
    assert not missed, (missed, seen)
