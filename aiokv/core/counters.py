"""What the core counts: plain integers, one writer, read by the metrics collector at scrape time.

Rules: counts only grow (invariant 13); every decision is counted where it is taken; nothing is derived by subtraction.
"""

from __future__ import annotations

from typing import Final, final

from aiokv.model.ids import Direction, KeyEnum, Tier
from aiokv.model.plan import DeclineReason, DeferReason, Hit, Outcome

__all__ = [
    "COPY_ENDS",
    "HINT_DECLINES",
    "INTERLEAVED_RUNS_CAP",
    "LOAD_FAILURES",
    "STORE_SKIPS",
    "Closing",
    "Counters",
    "EventRefusal",
    "EvictReason",
    "HintClosing",
    "HintExtent",
    "LookupResult",
    "Phase",
    "RevokeReason",
    "Source",
]


INTERLEAVED_RUNS_CAP: Final = 64
"""Switch counts at or above this share one bucket."""


class Source(KeyEnum):
    """Where a prompt token came from."""

    GPU = "gpu"
    CPU = "cpu"
    COMPUTE = "compute"


class Phase(KeyEnum):
    """Whether a request was admitted for the first time or resumed after a preemption."""

    FIRST = "first"
    RESUMED = "resumed"


class LookupResult(KeyEnum):
    """What one admission attempt found."""

    HIT = "hit"
    PARTIAL = "partial"
    MISS = "miss"
    DEFERRED = "deferred"


class EvictReason(KeyEnum):
    """Why a block stopped being findable."""

    CAPACITY = "capacity"
    RESET = "reset"
    INVALIDATED = "invalidated"
    CORRUPT = "corrupt"


class EventRefusal(KeyEnum):
    """Why blocks became findable and no event says so."""

    UNKNOWN_TOKENS = "unknown_tokens"
    """They came from blocks that were registered while nobody listened: their run cannot be told (law 9)."""


class Closing(KeyEnum):
    """How a lease ended."""

    FINISHED = "finished"
    RELEASED = "released"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    FINALIZER = "finalizer"
    SHUTDOWN = "shutdown"


class RevokeReason(KeyEnum):
    """Why a residence hint was revoked."""

    CAPACITY = "capacity"
    RESET = "reset"
    OPERATOR = "operator"


class HintExtent(KeyEnum):
    """How much of its prefix a residence hint holds."""

    WHOLE = "whole"
    PARTIAL = "partial"


class HintClosing(KeyEnum):
    """How a residence hint ended."""

    RELEASED = "released"
    FINALIZER = "finalizer"
    SHUTDOWN = "shutdown"


HINT_DECLINES: Final[tuple[DeclineReason, ...]] = (DeclineReason.QUOTA, DeclineReason.POOL_FULL)
"""Why a residence hint is declined."""
STORE_SKIPS: Final[tuple[DeclineReason, ...]] = tuple(
    reason for reason in DeclineReason if reason is not DeclineReason.QUOTA
)
"""Why a block is not stored."""
COPY_ENDS: Final = (Outcome.OK, Outcome.CORRUPT, Outcome.FAILED, Outcome.LOST)
"""How copies end that were submitted; dropped ones never were."""
LOAD_FAILURES: Final = (Outcome.LOST, Outcome.FAILED, Outcome.CORRUPT, Outcome.DROPPED)
"""How loads fail, the worst first."""

_SOURCES_IN: Final = {phase: ((Source.GPU, phase), (Source.CPU, phase), (Source.COMPUTE, phase)) for phase in Phase}
"""Keys of `Counters.prompt_tokens` and of `prompt_blocks`."""


@final
class Counters:
    """All counts of one `CacheState`. Dictionaries are keyed by enums and complete from the start."""

    __slots__ = (
        "alloc_failures",
        "corrupt_blocks",
        "events_refused",
        "evicted_blocks",
        "forks",
        "hints_closed",
        "hints_declined",
        "hints_opened",
        "hints_revoked",
        "interleaved_runs",
        "leases_closed",
        "leases_opened",
        "load_failed_tokens",
        "lookups",
        "prompt_blocks",
        "prompt_tokens",
        "rank_reports",
        "store_skipped_blocks",
        "submitted_blocks",
        "transferred_blocks",
        "truncated_tokens",
    )

    def __init__(self) -> None:
        self.prompt_tokens = {(source, phase): 0 for source in Source for phase in Phase}
        self.prompt_blocks = dict.fromkeys(self.prompt_tokens, 0)
        self.lookups = dict.fromkeys(LookupResult, 0)
        self.interleaved_runs: dict[int, int] = dict.fromkeys(range(INTERLEAVED_RUNS_CAP + 1), 0)
        self.alloc_failures = dict.fromkeys(DeferReason, 0)
        self.load_failed_tokens = dict.fromkeys(LOAD_FAILURES, 0)
        self.corrupt_blocks = 0
        self.events_refused = dict.fromkeys(EventRefusal, 0)
        self.submitted_blocks = dict.fromkeys(Direction, 0)
        self.transferred_blocks = {(direction, outcome): 0 for direction in Direction for outcome in Outcome}
        self.rank_reports = dict.fromkeys(COPY_ENDS, 0)
        self.store_skipped_blocks = dict.fromkeys(STORE_SKIPS, 0)
        self.evicted_blocks = {(tier, reason): 0 for tier in Tier for reason in EvictReason}
        self.truncated_tokens = 0
        self.forks = 0
        self.leases_opened = 0
        self.leases_closed = dict.fromkeys(Closing, 0)
        self.hints_opened = 0
        self.hints_declined = dict.fromkeys(HINT_DECLINES, 0)
        self.hints_revoked = dict.fromkeys(RevokeReason, 0)
        self.hints_closed = dict.fromkeys(HintClosing, 0)

    def count_delivered(self, hit: Hit, *, phase: Phase, block_tokens: int) -> None:
        """Attribute the prompt of one admitted request, once (law 7): its tokens, and its full hash blocks.

        A prefix ends at the end of a hash block: of what is computed only the tail may be less than a block.
        """
        from_gpu, from_cpu, computed = _SOURCES_IN[phase]
        tokens, blocks = self.prompt_tokens, self.prompt_blocks
        if hit.gpu_tokens:
            tokens[from_gpu] += hit.gpu_tokens
            blocks[from_gpu] += hit.gpu_tokens // block_tokens
        if hit.cpu_tokens:
            tokens[from_cpu] += hit.cpu_tokens
            blocks[from_cpu] += hit.cpu_tokens // block_tokens
        tokens[computed] += hit.compute_tokens
        if hit.compute_tokens >= block_tokens:
            blocks[computed] += hit.compute_tokens // block_tokens

    def record_switches(self, switches: int) -> None:
        """Record how often one matched prefix switched between the tiers."""
        self.interleaved_runs[min(switches, INTERLEAVED_RUNS_CAP)] += 1
