"""What a soak has found, and what it must have found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client.core import Metric

from aiokv import Direction, KVRuntime, Outcome, Tier
from aiokv.cli.bench.garbage import GarbagePauses
from aiokv.cli.bench.hold import HoldMeter
from aiokv.cli.bench.memory import MemoryTrend
from aiokv.cli.bench.soak.settings import SoakSettings
from aiokv.core.counters import Closing
from aiokv.model.plan import Checksum
from aiokv.testing import InjectedFaults

__all__ = [
    "COUNTED",
    "HELD",
    "MIX",
    "ZEROS",
    "complaints_about",
    "core_figures",
    "end_figures",
    "fault_figures",
    "find_violations",
    "measured_figures",
    "pools_conserved",
]

HELD: Final = ("leases", "pins", "reservations", "orphans", "hints")
"""What may be held."""
COUNTED: Final = (
    "loaded_blocks", "failed_loads", "stores", "failed_stores", "evicted", "leaked", "found", "accounting_errors",
)  # fmt: skip
"""What the runtime itself counts."""
ZEROS: Final = (*HELD, "violations", "corrupt", "errors", "hung", "leaked")
"""Must be nothing, always."""

MIX: Final = (
    "granted", "granted_to_pollers", "cancelled", "scopes_cancelled", "timed_out", "expired", "failed_by_themselves",
    "failed_loads", "failed_stores", "planned_again", "loaded_blocks", "compared_blocks", "gpu_tokens", "cpu_tokens",
    "computed_tokens", "generated", "extended", "extensions_waited", "truncated", "forked", "preempted", "resumed",
    "resets_gpu", "resets_cpu", "resets_both", "stores", "evicted", "harvested_gpu_tokens", "harvested_cpu_tokens",
    "audits_sliced", "hints_kept", "hints_checked", "hints_revoked",
)  # fmt: skip
"""Must have happened in a run that is long enough to be judged by it."""

LONG_ENOUGH_S: Final = 30.0
MOST_GROWTH_PERCENT: Final = 2.0


def find_violations(kv: KVRuntime) -> tuple[str, ...]:
    """What the audit says now, and pools whose states do not sum to their capacity."""
    found = kv.audit().violations
    return found if pools_conserved(kv) else (*found, "a pool's slots do not sum to its capacity")


def pools_conserved(kv: KVRuntime) -> bool:
    """Whether free, reserved, resident and quarantined slots sum to the capacity of each pool."""
    capacity = {Tier.GPU: kv.config.gpu_blocks - 1, Tier.CPU: kv.config.cpu_blocks}
    return all(sum(counts.by_state().values()) == capacity[tier] for tier, counts in kv.core.pools().items())


def end_figures(kv: KVRuntime) -> dict[str, int]:
    """What is held now; `orphans` are unfinished transfers that no live lease waits for."""
    audit = kv.audit()
    live = {record.lease_id for record in kv.core.leases()}
    return {
        "leases": len(audit.leases),
        "pins": sum(pin.blocks for pin in audit.pins),
        "reservations": sum(reservation.blocks for reservation in audit.reservations),
        "hints": sum(hint.blocks for hint in audit.hints),
        "orphans": sum(live.isdisjoint(transfer.waiters) for transfer in kv.core.transfers()),
    }


def core_figures(kv: KVRuntime) -> dict[str, int]:
    """What the runtime itself has counted."""
    counters = kv.core.counters
    return {
        "loaded_blocks": counters.transferred_blocks[Direction.LOAD, Outcome.OK],
        "failed_loads": counters.transferred_blocks[Direction.LOAD, Outcome.FAILED],
        "stores": counters.transferred_blocks[Direction.STORE, Outcome.OK],
        "failed_stores": counters.transferred_blocks[Direction.STORE, Outcome.FAILED],
        "evicted": sum(counters.evicted_blocks.values()),
        "leaked": counters.leases_closed[Closing.FINALIZER],
        "found": counters.corrupt_blocks,
        "accounting_errors": _accounting_errors(kv),
    }


def fault_figures(injected: InjectedFaults) -> dict[str, int]:
    """Copies that were spoilt on purpose."""
    return {"copies_failed": injected.failed, "copies_refused": injected.refused, "copies_late": injected.late}


def measured_figures(meter: HoldMeter, *, memory: MemoryTrend, pauses: GarbagePauses) -> dict[str, object]:
    """Times in milliseconds of CPU, memory in MiB and percent."""
    return {
        "steps": meter.steps,
        "hold_ms_p50": round(1e3 * meter.percentile_s(0.5), 4),
        "hold_ms_p99": round(1e3 * meter.percentile_s(0.99), 4),
        "hold_ms_p999": round(1e3 * meter.percentile_s(0.999), 4),
        "hold_ms_max": round(1e3 * meter.longest_s, 4),
        "hold_longest_step": meter.longest_step,
        "gc_pauses": pauses.count,
        "gc_ms_max": round(1e3 * pauses.longest_s, 4),
        "rss_mib": round(memory.mean_bytes / 2**20, 1),
        "rss_slope_percent": round(memory.slope_percent, 3),
    }


def complaints_about(figures: Mapping[str, object], *, settings: SoakSettings) -> tuple[str, ...]:
    """Each promise that was not kept, in words."""
    found = [f"{name} must be 0 at the end, it is {figures[name]}" for name in ZEROS if figures[name]]
    found += [f"{name} cannot be told" for name in ZEROS if figures[name] is None]
    found += [f"{name} is not so" for name in ("pools_conserved", "whole_pool") if not figures[name]]
    if figures["found"] not in (None, figures["flipped_loaded"]):
        found.append(f"{figures['flipped_loaded']} changed blocks were loaded, {figures['found']} were found")
    if settings.seconds < LONG_ENOUGH_S:
        return tuple(found)
    if missing := [name for name in _mix_of(settings) if not figures[name]]:
        found.append(f"too little was tried: no {', no '.join(missing)}")
    growth = figures["rss_slope_percent"]
    if isinstance(growth, float) and growth >= MOST_GROWTH_PERCENT:
        found.append(f"memory grew by {growth} % after the warm-up, the limit is {MOST_GROWTH_PERCENT} %")
    return tuple(found)


def _mix_of(settings: SoakSettings) -> tuple[str, ...]:
    """What must happen with these groups, this checksum and these ranks."""
    states = ("captured", "compared_states") if settings.recurrent else ()
    damage = ("flipped", "found") if settings.checksum is not Checksum.OFF else ()
    ranks = ("rank_reports", "rank_failures") if settings.remote_ranks else ()
    return (*MIX, *states, *damage, *ranks)


def _accounting_errors(kv: KVRuntime) -> int:
    """Of the metrics: reading them asks for a check of the books, the next step makes it, reading again tells."""
    list(kv.collector.collect())
    kv.progress()
    families: list[Metric] = list(kv.collector.collect())
    totals = [
        sample.value
        for family in families
        if family.name == "aiokv_accounting_errors"
        for sample in family.samples
        if sample.name.endswith("_total")
    ]
    return int(sum(totals))
