"""Where each prompt token came from, counted beside the core: by the copies that really arrived (law 7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import final

from aiokv.core.cache import CacheState
from aiokv.core.counters import Phase, Source
from aiokv.core.inflight import Transfer
from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.model.ids import Tier
from aiokv.model.plan import Hit
from aiokv.testing.streams import Streams, hit_of, is_covered
from aiokv.testing.verdict import require

__all__ = ["Accounts", "Growth"]


class Growth:
    """Follows what it is told and asks no more than that counters never fall (invariant 13).

    Enough where leases may come and go between two looks.
    """

    def __init__(self, cache: CacheState) -> None:
        self._cache = cache
        self._counted: dict[object, int] = {}

    def open(self, record: LeaseRecord) -> None:
        """A lease was admitted."""

    def note_arrival(self, transfer: Transfer, *, waiters: Iterable[LeaseRecord]) -> None:
        """Its copies have ended well; who joins it while it is completed in slices has them too."""

    def note_failure(self, waiters: Iterable[LeaseRecord]) -> None:
        """A load of these leases has failed: what they promised need not come true."""

    def settle(self, record: LeaseRecord) -> None:
        """A lease became ready or left: from now on its prompt is attributed, once."""

    def check(self) -> None:
        """Nothing has been counted back, and no copy goes on unwanted where none goes on."""
        now = _flattened(self._cache)
        fallen = {name: value for name, value in self._counted.items() if now.get(name, 0) < value}
        require(not fallen, "counters have fallen", fallen)
        self._counted = now
        orphans = {tier.value: self._cache.meters.orphan_blocks(tier) for tier in Tier}
        require(min(orphans.values()) >= 0, "fewer than no blocks are orphans", orphans)
        require(bool(self._cache.transfers()) or not any(orphans.values()), "orphans of no copy", orphans)


@final
class Accounts(Growth):
    """What the counters must say of every token, where nothing is missed."""

    def __init__(self, cache: CacheState, *, streams: Streams, seen: Counter[str]) -> None:
        super().__init__(cache)
        self._streams = streams
        self._seen = seen
        self._arrived: dict[int, set[tuple[int, int]]] = {}
        self._expected: Counter[tuple[Source, Phase]] = Counter()
        self._blocks: Counter[Phase] = Counter()
        self._attributed: set[int] = set()
        self._failed: set[int] = set()

    def open(self, record: LeaseRecord) -> None:
        """See `Growth`."""
        self._arrived[record.lease_id] = set()

    def note_arrival(self, transfer: Transfer, *, waiters: Iterable[LeaseRecord]) -> None:
        """See `Growth`."""
        for record in waiters:
            self._arrived[record.lease_id] |= _shared(record, transfer)

    def note_failure(self, waiters: Iterable[LeaseRecord]) -> None:
        """See `Growth`."""
        self._failed |= {record.lease_id for record in waiters}

    def settle(self, record: LeaseRecord) -> None:
        """See `Growth`. What is delivered is what has arrived."""
        if record.lease_id in self._attributed:
            return
        self._attributed.add(record.lease_id)
        hit = record.hit
        if record.state is LeaseState.READY and record.lease_id in self._failed:
            self._seen["replanned"] += 1
            self._seen["replanned to less"] += record.length < record.hit.gpu_tokens + record.hit.cpu_tokens
            self._seen["replanned with loads"] += record.delivered.cpu_tokens > 0
            hit = self._outcome(record)
            require(record.delivered == hit, "delivered is not what arrived", record.delivered, hit)
        elif record.state is LeaseState.READY:
            require(record.delivered == record.hit, "delivered is not what was promised", record.delivered)
        else:
            hit = record.delivered
            self._seen["left while loading"] += 1
        phase = record.request.phase
        self._expected[Source.GPU, phase] += hit.gpu_tokens
        self._expected[Source.CPU, phase] += hit.cpu_tokens
        self._expected[Source.COMPUTE, phase] += hit.compute_tokens
        self._blocks[phase] += hit.prompt_tokens // self._streams.geometry.hash_block_size

    def check(self) -> None:
        """See `Growth`; and the tokens of all admitted requests are attributed by source (invariant 13)."""
        totals = Counter(self._cache.counters.prompt_tokens)
        require(+totals == +self._expected, "tokens are attributed otherwise", totals, self._expected)
        blocks: Counter[Phase] = Counter()
        for (_, phase), count in self._cache.counters.prompt_blocks.items():
            blocks[phase] += count
        require(+blocks == +self._blocks, "blocks do not sum to the prompts", blocks, self._blocks)
        super().check()

    def _outcome(self, record: LeaseRecord) -> Hit:
        """Where the tokens of a lease came from, by the copies that arrived for it."""
        totals: Counter[str] = Counter(compute=record.request.prompt_tokens - record.length)
        following = "gpu"
        groups = list(enumerate(zip(self._streams.geometry.groups, self._streams.sizes, strict=True)))
        for token in reversed(range(record.length)):
            covered = [
                (group, token // block) in self._arrived[record.lease_id]
                for group, (spec, block) in groups
                if is_covered(spec, block, length=record.length, position=token // block)
            ]
            if covered:
                following = "cpu" if any(covered) else "gpu"
            totals[following] += 1
        return hit_of(totals)


def _shared(record: LeaseRecord, transfer: Transfer) -> set[tuple[int, int]]:
    """Which blocks of a lease this load brings; those of slices that were completed before it came are hits."""
    table = record.tables[transfer.group].view()
    copies = zip(transfer.bound_targets.tolist(), transfer.positions.tolist(), strict=True)
    targets = dict(list(copies)[: transfer.open_copies])
    return {(transfer.group, targets[slot]) for slot in table.tolist() if slot in targets}


def _flattened(cache: CacheState) -> dict[object, int]:
    counters = cache.counters
    numbers: dict[object, int] = {"generation": cache.capacity_generation}
    for name in counters.__slots__:
        value = getattr(counters, name)
        if isinstance(value, dict):
            numbers.update({(name, key): number for key, number in value.items() if number})
        else:
            numbers[name] = value
    return numbers
