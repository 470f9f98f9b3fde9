"""What an admission promises, compared with the oracle: how long the hit is, and where each token comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import final

from aiokv.core.cache import CacheState
from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.model.ids import Tier
from aiokv.testing.checks import Checks
from aiokv.testing.oracle import exhaustive_hit, exhaustive_sources
from aiokv.testing.streams import Streams, hit_of, is_covered, letters_of
from aiokv.testing.verdict import require

__all__ = ["Promises"]


@final
class Promises:
    """Checks admissions against what could be found just before (invariants 7, 8 and 13)."""

    def __init__(self, cache: CacheState, *, streams: Streams, checks: Checks, seen: Counter[str]) -> None:
        self._cache = cache
        self._streams = streams
        self._geometry = streams.geometry
        self._checks = checks
        self._seen = seen

    def layout(self, stream: int) -> dict[str, str]:
        """Per group one letter per block, as a lookup finds them."""
        layout = {
            spec.name: letters_of(self._cache, self._streams, stream=stream, group=index)
            for index, spec in enumerate(self._geometry.groups)
        }
        if self._cache.is_backend_lost:
            layout = {name: letters.replace("c", "-").replace("b", "g") for name, letters in layout.items()}
        return layout

    def check(self, record: LeaseRecord, layout: Mapping[str, str]) -> None:
        """The hit of a new lease is what the oracle says of the layout it was admitted to."""
        request = record.request
        length = exhaustive_hit(self._geometry, request.prompt_tokens, layout, align=request.align)
        counts = self._cache.pools()[Tier.GPU]
        usable = counts.free + counts.reserved + counts.resident
        if self._checks.slots_for(request, length=length) > usable:
            require(record.length == 0, "a prefix that the pool cannot hold is used")
            self._seen["prefix too large"] += 1
            return
        require(record.length == length, f"the hit is {record.length} tokens, the oracle says {length}")
        totals: Counter[str] = Counter(
            exhaustive_sources(self._geometry, request.prompt_tokens, layout, align=request.align)
        )
        require(record.hit == hit_of(totals), "the hit has other sources", record.hit, totals)
        self._seen["hit" if length else "miss"] += 1
        self._seen["loads"] += record.state is LeaseState.LOADING
        waited_for = [t for t in self._cache.transfers() if t.transfer_id in record.waiting]
        self._seen["joins"] += any(t.owner != record.lease_id for t in waited_for)

    def check_fork(self, forked: LeaseRecord, *, parent: LeaseRecord) -> None:
        """It starts at the last length at which its parent holds all that is read, by the masks, and shares that."""
        tokens = min(forked.request.prompt_tokens, parent.confirmed)
        step = self._geometry.alignment(forked.request.align)
        valid = [length for length in range(0, tokens + 1, step) if length == 0 or self._holds(parent, length)]
        if any(spec.lookahead for spec in self._geometry.groups):
            valid = [length for length in valid if length <= forked.length]
        require(forked.length in (valid[-1], 0), "a fork starts elsewhere", forked.length, valid)
        computed = forked.request.prompt_tokens - forked.length
        require(forked.hit == hit_of(Counter(gpu=forked.length, compute=computed)), "a fork's hit", forked.hit)
        for mine, theirs, spec, block in zip(
            forked.tables, parent.tables, self._geometry.groups, self._streams.sizes, strict=True
        ):
            for position in range(forked.length // block):
                shared = mine.view()[position] == theirs.view()[position]
                is_read = is_covered(spec, block, length=forked.length, position=position)
                require(shared or not is_read, "a fork has another block than its parent", position)
        self._seen["forked"] += 1
        self._seen["forked with a prefix"] += forked.length > 0

    def _holds(self, record: LeaseRecord, length: int) -> bool:
        return all(
            record.tables[group].view()[position] or not is_covered(spec, block, length=length, position=position)
            for group, (spec, block) in enumerate(zip(self._geometry.groups, self._streams.sizes, strict=True))
            for position in range(length // block)
        )
