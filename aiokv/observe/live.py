"""The state of one runtime for people who watch it: pools as maps, hits by source, copies, the oldest leases.

Rules: read like a scrape, from any thread, without a lock and never on the loop's account; what may change under a
reader is read again. Totals are cumulative: whoever shows rates takes differences. No tokens, hashes, salts or tenants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Final, final

from aiokv.core.counters import EvictReason
from aiokv.model.ids import Direction, Tier
from aiokv.model.pinning import NOT_NEEDED, PinStatus
from aiokv.observe import pool_readers, readers, request_readers, transfer_readers
from aiokv.observe.readers import Reading, View
from aiokv.observe.stats import LeaseTerm

__all__ = [
    "LIVE_SCHEMA", "NOT_OPEN", "LiveLease", "LiveLeases", "LiveState", "LiveTier", "LiveTransfers", "Standing",
    "take_live", "take_standing",
]  # fmt: skip

LIVE_SCHEMA: Final = 1
"""Goes up when something in `LiveState.as_json` is taken away or changes its meaning."""
_OLDEST_LEASES: Final = 8
_ID_CHARACTERS: Final = 256
"""Clients choose the ids of their requests: the longest ones must not make the state too large to be read."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Whether a runtime serves, from any thread and at no cost."""

    is_open: bool
    """It was opened; stays so after it is closed."""
    is_accepting: bool
    """It lets requests in."""
    pinning: PinStatus
    degraded: tuple[str, ...]
    """Why it serves less well than it was built to: values of `Degradation`."""


NOT_OPEN: Final = Standing(is_open=False, is_accepting=False, pinning=NOT_NEEDED, degraded=())
"""Before there is anything to ask."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTier:
    """The slots of one tier. The states sum to `slots`; `pinned` is a part of the resident ones."""

    slots: int
    states: Mapping[str, int]
    pinned: int
    cell_slots: int
    """Slots of one cell; the last cell may have fewer."""
    cells: str
    """One character per cell, of adjacent slots from the first usable one on. It says what most of them are: `.` free,
    `r` reserved, `c` resident and evictable, `p` resident and pinned; `q` if any of them is quarantined."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTransfers:
    """The copies in one direction."""

    queued_blocks: int
    inflight_blocks: int
    ended_blocks: Mapping[str, int]
    """By outcome."""
    bytes: int
    """Of those that ended well."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLease:
    """One lease: who holds how many GPU blocks, and for how long."""

    request_id: str
    """The beginning of it, at most 256 characters."""
    age_s: float
    state: str
    blocks: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLeases:
    """Leases that are held: `overdue` ones longer than allowed, `active` the others; and who waits to get one."""

    active: int
    overdue: int
    waiting: int
    oldest: tuple[LiveLease, ...]
    """The oldest ones, at most eight."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """One runtime at one moment; a tier that is not configured is absent."""

    version: str
    backend: str
    block_tokens: int
    uptime_s: float
    degraded: tuple[str, ...]
    is_accepting: bool
    tiers: Mapping[Tier, LiveTier]
    prompt_tokens: Mapping[str, int]
    """By source."""
    transfers: Mapping[Direction, LiveTransfers]
    leases: LiveLeases
    evictions: Mapping[Tier, int]
    """Blocks that had to make room for others; those that a reset or a fault took away are none of them."""

    def as_json(self) -> dict[str, object]:
        """The same for `json.dumps`."""
        return {
            "schema_version": LIVE_SCHEMA,
            "version": self.version,
            "backend": self.backend,
            "block_tokens": self.block_tokens,
            "uptime_s": round(self.uptime_s, 3),
            "degraded": list(self.degraded),
            "is_accepting": self.is_accepting,
            "tiers": {tier.value: asdict(state) for tier, state in self.tiers.items()},
            "prompt_tokens": dict(self.prompt_tokens),
            "transfers": {direction.value: asdict(state) for direction, state in self.transfers.items()},
            "leases": _show_leases(self.leases),
            "evictions": {tier.value: blocks for tier, blocks in self.evictions.items()},
        }


def take_standing(view: View) -> Standing:
    """Whether the runtime serves."""
    return Standing(
        is_open=True,
        is_accepting=view.facts.read_accepting(),
        pinning=view.facts.read_pinning(),
        degraded=_name_degraded(view),
    )


def take_live(view: View, *, cells: int, uptime_s: float) -> LiveState:
    """The whole, with at most `cells` cells per tier."""
    return LiveState(
        version=view.facts.version,
        backend=view.facts.backend,
        block_tokens=view.core.geometry.hash_block_size,
        uptime_s=uptime_s,
        degraded=_name_degraded(view),
        is_accepting=view.facts.read_accepting(),
        tiers={tier: _take_tier(view, tier, cells=cells) for tier in view.capacities},
        prompt_tokens=_sum_by_label(request_readers.read_prompt_tokens(view)),
        transfers=_take_transfers(view),
        leases=_take_leases(view),
        evictions=_take_evictions(view),
    )


def _name_degraded(view: View) -> tuple[str, ...]:
    return tuple(reading.labels[0] for reading in readers.read_degraded(view) if reading.value)


def _take_tier(view: View, tier: Tier, *, cells: int) -> LiveTier:
    counts = view.core.peek.pools()[tier]
    cell_map = view.core.peek.take_map(tier, cells=cells)
    return LiveTier(
        slots=view.capacities[tier],
        states={state.value: slots for state, slots in counts.by_state().items()},
        pinned=counts.resident - counts.evictable,
        cell_slots=cell_map.cell_slots,
        cells=cell_map.cells,
    )


def _take_transfers(view: View) -> dict[Direction, LiveTransfers]:
    queued = _sum_by_label(transfer_readers.read_queue_blocks(view))
    running = _sum_by_label(transfer_readers.read_inflight_blocks(view))
    size = _sum_by_label(transfer_readers.read_transfer_bytes(view))
    ended: dict[str, dict[str, int]] = {direction.value: {} for direction in view.directions}
    for reading in transfer_readers.read_transfer_blocks(view):
        direction, outcome = reading.labels
        ended[direction][outcome] = _whole(reading)
    return {
        direction: LiveTransfers(
            queued_blocks=queued[direction.value],
            inflight_blocks=running[direction.value],
            ended_blocks=ended[direction.value],
            bytes=size[direction.value],
        )
        for direction in view.directions
    }


def _take_leases(view: View) -> LiveLeases:
    by_state = _sum_by_label(request_readers.read_leases(view))
    return LiveLeases(
        active=by_state[LeaseTerm.ACTIVE.value],
        overdue=by_state[LeaseTerm.OVERDUE.value],
        waiting=view.facts.read_waiting(),
        oldest=readers.read_steadily(lambda: _list_oldest(view)),
    )


def _take_evictions(view: View) -> dict[Tier, int]:
    for_room = EvictReason.CAPACITY.value
    readings = (reading for reading in pool_readers.read_evictions(view) if reading.labels[1] == for_room)
    return {Tier(tier): blocks for tier, blocks in _sum_by_label(readings).items()}


def _list_oldest(view: View) -> tuple[LiveLease, ...]:
    opened_at = list(islice(view.stats.opened_at.items(), _OLDEST_LEASES))
    return tuple(
        LiveLease(
            request_id=record.request.request_id[:_ID_CHARACTERS],
            age_s=max(view.now - opened, 0.0),
            state=record.state.value,
            blocks=record.count_held(),
        )
        for lease_id, opened in opened_at
        if (record := view.core.find_lease(lease_id)) is not None
    )


def _sum_by_label(readings: Iterable[Reading]) -> dict[str, int]:
    """The sums by the first label."""
    sums: Counter[str] = Counter()
    for reading in readings:
        sums[reading.labels[0]] += _whole(reading)
    return dict(sums)


def _whole(reading: Reading) -> int:
    return int(reading.value) if isinstance(reading.value, int | float) else 0


def _show_leases(leases: LiveLeases) -> dict[str, object]:
    oldest = [asdict(lease) | {"age_s": round(lease.age_s, 3)} for lease in leases.oldest]
    return asdict(leases) | {"oldest": oldest}
