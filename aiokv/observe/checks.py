"""Invariants that a handful of integers can show, checked while the runtime serves.

Only the loop's thread can see all counts at one moment, between two steps of the core: another thread may read in the
middle of a step. So a scrape from elsewhere sets `Stats.check_due`, and the loop's thread checks after its next step.
"""

from __future__ import annotations

from aiokv.core.cache import CacheState
from aiokv.core.counters import COPY_ENDS, Counters
from aiokv.core.pool_values import SlotState
from aiokv.model.ids import Direction
from aiokv.observe.stats import Invariant, Stats

__all__ = ["check_invariants", "count_in_flight"]


def check_invariants(core: CacheState, stats: Stats) -> None:
    """Count every invariant that does not hold now. In the loop's thread, between two steps; raises nothing."""
    stats.check_due = False
    try:
        violated = _find_violated(core)
    except Exception:  # law 7: a fault here is counted and stops no request
        violated = [Invariant.METRICS]
    for invariant in violated:
        stats.violations[invariant] += 1


def count_in_flight(counters: Counters, direction: Direction) -> int:
    """Blocks submitted that have not ended. What ended is read first, so that a copy ending meanwhile still counts."""
    ended = sum(counters.transferred_blocks[direction, outcome] for outcome in COPY_ENDS)
    return counters.submitted_blocks[direction] - ended


def _find_violated(core: CacheState) -> list[Invariant]:
    counters = core.counters
    pools = [pool.by_state() for pool in core.pools().values()]
    in_flight = [count_in_flight(counters, direction) for direction in Direction]
    is_idle = not core.live_leases and not core.unfinished_transfers and core.hints.is_settled
    violated = {
        Invariant.LEASES: counters.leases_opened - sum(counters.leases_closed.values()) != core.live_leases,
        Invariant.POOLS: any(min(states.values()) < 0 for states in pools),
        Invariant.IDLE: is_idle and any(states[SlotState.RESERVED] for states in pools),
        Invariant.TRANSFERS: min(in_flight) < 0 or (not core.unfinished_transfers and any(in_flight)),
    }
    return [invariant for invariant, is_violated in violated.items() if is_violated]
