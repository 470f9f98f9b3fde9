"""What the admin routes show: a snapshot and an audit for JSON, of each list the first entries and how many there are.

Rules: no prompt tokens, no hashes. Times are ages in seconds, so that nobody has to know our clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import Enum
from functools import partial
from itertools import islice
from typing import Final, TypeVar

from aiokv import KVRuntime, LeaseState
from aiokv.core.audit import Audit, HintView, Holding, LeaseView, view_hint
from aiokv.core.cache import CacheState
from aiokv.core.inflight import Transfer
from aiokv.core.lease_table import LeaseRecord

__all__ = ["ADMIN_SCHEMA", "JsonObject", "show_audit", "take_snapshot"]

ADMIN_SCHEMA: Final = 1
"""Goes up when something is taken away or changes its meaning."""
_SLICE: Final = 32
"""Entries looked at in one turn of the loop."""
_WAITERS: Final = 10
"""Requests named that wait for one transfer."""

JsonObject = dict[str, object]
T = TypeVar("T")


async def take_snapshot(kv: KVRuntime, *, limit: int) -> JsonObject:
    """Pools, and up to `limit` leases, transfers and hints, the oldest first.

    Each entry is as it was at one moment, but not all at the same: the loop turns in between, and leases that have
    gone meanwhile are left out. It looks at no slot, so a larger pool takes no longer (with `kv.snapshot()` it does).
    """
    core, now = kv.core, time.monotonic()
    leases, transfers, hints = core.leases(), core.transfers(), core.hints.live()
    return {
        "schema_version": ADMIN_SCHEMA,
        "pools": {tier.value: asdict(counts) for tier, counts in core.pools().items()},
        "leases": await _list_in_slices(leases, partial(_show_record, now=now), limit=limit),
        "transfers": await _list_in_slices(transfers, partial(_show_transfer, core=core, now=now), limit=limit),
        "hints": await _list_in_slices(hints, lambda hint: _show_hint(view_hint(hint)), limit=limit),
    }


def show_audit(audit: Audit, *, limit: int) -> JsonObject:
    """An audit, with up to `limit` entries of each list: the oldest leases, the largest holdings. For any thread."""
    leases = sorted(audit.leases, key=lambda lease: lease.lease_id)
    pins = sorted(audit.pins, key=lambda holding: -holding.blocks)
    reservations = sorted(audit.reservations, key=lambda holding: -holding.blocks)
    return {
        "schema_version": ADMIN_SCHEMA,
        "violations": _list(audit.violations, str, limit=limit),
        "leases": _list(leases, lambda lease: _show_lease(lease, now=audit.taken_at), limit=limit),
        "overdue": len(audit.overdue),
        "pins": _list(pins, lambda holding: _show_holding(holding, now=audit.taken_at), limit=limit),
        "reservations": _list(reservations, lambda holding: _show_holding(holding, now=audit.taken_at), limit=limit),
        "hints": _list(audit.hints, _show_hint, limit=limit),
    }


async def _list_in_slices(items: Sequence[T], show: Callable[[T], object], *, limit: int) -> JsonObject:
    """`_list`, a slice a turn; leases that have gone meanwhile are left out."""
    listed: list[object] = []
    for start in range(0, min(len(items), limit), _SLICE):
        listed += [show(item) for item in items[start : min(start + _SLICE, limit)] if not _has_ended(item)]
        await asyncio.sleep(0)
    return {"count": len(items), "listed": listed}


def _has_ended(item: object) -> bool:
    return isinstance(item, LeaseRecord) and item.state is LeaseState.RELEASED


def _list(items: Sequence[T], show: Callable[[T], object], *, limit: int) -> JsonObject:
    return {"count": len(items), "listed": [show(item) for item in islice(items, limit)]}


def _show_record(record: LeaseRecord, *, now: float) -> JsonObject:
    return {
        "lease_id": record.lease_id,
        "request_id": record.request.request_id,
        "state": record.state.value,
        "prefix_tokens": record.length,
        "confirmed_tokens": record.confirmed,
        "gpu_blocks": record.count_held(),
        "unnamed_claims": record.unnamed_claims,
        **_show_age(record.opened_at, now=now),
    }


def _show_lease(lease: LeaseView, *, now: float | None) -> JsonObject:
    shown = asdict(lease)
    return {**shown, **_show_age(shown.pop("since"), now=now)}


def _show_transfer(transfer: Transfer, *, core: CacheState, now: float) -> JsonObject:
    return {
        "transfer_id": transfer.transfer_id,
        "direction": transfer.direction.value,
        "group": core.geometry.groups[transfer.group].name,
        "state": transfer.state.value,
        "blocks": len(transfer),
        "waiters": len(transfer.waiters),
        "reported_by": sorted(transfer.reports),
        **_show_age(transfer.since, now=now),
    }


def _show_holding(holding: Holding, *, now: float | None) -> JsonObject:
    shown = {name: value.value if isinstance(value, Enum) else value for name, value in asdict(holding).items()}
    waiters = _list(holding.waiters, str, limit=_WAITERS)
    return {**shown, "waiters": waiters, **_show_age(shown.pop("since"), now=now)}


def _show_hint(hint: HintView) -> JsonObject:
    return {**asdict(hint), "tier": hint.tier.value}


def _show_age(since: float | None, *, now: float | None) -> JsonObject:
    """How long it lasts; nothing where the host wrote down no time."""
    if since is None or now is None:
        return {}
    return {"age_s": round(max(now - since, 0.0), 3)}
