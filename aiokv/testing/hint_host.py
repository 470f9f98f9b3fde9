"""The part of a host that keeps prefixes: residence hints, and what must hold of them after any step.

What a hint holds is asked from outside the core: by masks, by the oracle, by what a lookup finds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiokv.core.hint_table import HintRecord, HintState
from aiokv.errors import UsageError
from aiokv.model.ids import Tier
from aiokv.model.plan import Declined
from aiokv.testing.copy_host import CopyHost
from aiokv.testing.driver import Driver, Setup, Witness
from aiokv.testing.oracle import exhaustive_hit
from aiokv.testing.streams import is_covered
from aiokv.testing.verdict import require

__all__ = ["Hint", "HintHost"]


@dataclass(slots=True, kw_only=True, eq=False)
class Hint:
    """A hint of this host, and which tokens it is for."""

    record: HintRecord
    stream: int
    num_tokens: int


class HintHost(CopyHost):
    """Keeps prefixes of streams; `hints` are those that were not released, revoked ones too."""

    def __init__(self, setup: Setup, *, make_driver: Callable[[Setup, Witness], Driver]) -> None:
        super().__init__(setup, make_driver=make_driver)
        self.hints: list[Hint] = []

    def keep(
        self, stream: int, num_tokens: int, *, tenant: str = "a", tier: Tier = Tier.GPU, align: int = 1
    ) -> HintRecord | Declined:
        """Keep what a tier has of a prefix; a refusal must change nothing."""
        before = self.cache.snapshot()
        try:
            record = self.driver.keep(self.keys(stream, num_tokens), tenant=tenant, tier=tier, align=align)
        except UsageError:
            self.require_unchanged(before, "a refused hint")
            raise
        if isinstance(record, Declined):
            self.require_unchanged(before, "a declined hint")
            self.seen[f"hint declined {record.reason.value}"] += 1
            return record
        self.hints.append(Hint(record=record, stream=stream, num_tokens=num_tokens))
        self._check_length(self.hints[-1])
        self.seen["hint kept"] += record.length > 0
        return record

    def update_hint(self, hint: Hint, stream: int, num_tokens: int) -> int | Declined:  # noqa: PLR0917  # a prefix
        """Keep another prefix instead; a refusal must change nothing."""
        before, was = self.cache.snapshot(), hint.record.state
        held = self.driver.update_hint(hint.record, self.keys(stream, num_tokens))
        if isinstance(held, Declined):
            self.require_unchanged(before, "a declined update")
            require(hint.record.state is was, "a declined update has changed the state of its hint")
            return held
        hint.stream, hint.num_tokens = stream, num_tokens
        self._check_length(hint)
        self.seen["hint held again"] += was is HintState.REVOKED
        return held

    def revoke_hint(self, hint: Hint) -> None:
        """An operator takes everything back."""
        self.driver.revoke_hint(hint.record)
        require(hint.record.state is HintState.REVOKED, "a revoked hint is held")

    def release_hint(self, hint: Hint) -> None:
        """Its owner gives it back."""
        self.hints.remove(hint)
        self.driver.release_hint(hint.record)
        require(hint.record.state is HintState.RELEASED, "a released hint is held")
        require(not len(hint.record.slots), "a released hint has slots")

    def check(self) -> None:
        """Everything that must hold after any step."""
        super().check()
        for hint in self.hints:
            if hint.record.state is HintState.HELD:
                self._check_held(hint)
            elif self.cache.hints.is_settled:
                require(not len(hint.record.slots), "a revoked hint has slots")
        self._check_quotas()
        wrong = self.cache.hints.check_invariants()
        require(not wrong, "the books of hints are wrong", wrong)

    def tear_down(self) -> None:
        """Requests and copies end, one request takes the whole pool from the hints, then those end (invariant 12)."""
        super().tear_down()
        for hint in list(self.hints):
            self.release_hint(hint)
        for record in self.cache.hints.live():  # kept behind the host's back
            self.driver.release_hint(record)
        audit = self.cache.audit()
        require(not audit.hints, "hints were never given back", audit.hints)
        require(not audit.violations, "hints gave back otherwise than they held", audit.violations)

    def _check_length(self, hint: Hint) -> None:
        """A hint has just taken hold: it holds the longest prefix that its tier can serve alone, by the oracle."""
        letters = {Tier.GPU: "gb", Tier.CPU: "cb"}[hint.record.tier]
        layout = {
            spec.name: "".join("g" if one in letters else "-" for one in self.letters(hint.stream, index))[
                : hint.num_tokens // self.sizes[index]
            ]
            for index, spec in enumerate(self.geometry.groups)
        }
        longest = exhaustive_hit(self.geometry, hint.num_tokens + 1, layout, align=hint.record.align)
        if hint.record.tier is Tier.CPU and self.cache.is_backend_lost:
            longest = 0
        require(hint.record.length == longest, "a hint holds another prefix", hint.record.length, longest)
        self._check_held(hint)

    def _check_held(self, hint: Hint) -> None:
        """What queries after the held prefix read is pinned by the hint and can be found; nothing else is pinned."""
        record, slots = hint.record, set(hint.record.slots.tolist())
        require(len(slots) == len(record.slots), "a hint names a slot twice")
        if not self.cache.hints.is_settled:
            return
        needed: set[int] = set()
        for group, (spec, block) in enumerate(zip(self.geometry.groups, self.sizes, strict=True)):
            found = self.cache.find_blocks(self.keys(hint.stream, hint.num_tokens), group=group, tier=record.tier)
            for position in range(record.length // block + bool(spec.lookahead and record.length)):
                is_probed = position == record.length // block
                if is_probed or is_covered(spec, block, length=record.length, position=position):
                    require(found.present[position], "a kept block cannot be found", group, position)
                    needed.add(int(found.slots[position]))
        require(slots == needed, "a hint holds other blocks than its prefix needs", slots, needed)

    def _check_quotas(self) -> None:
        """The hints of one tenant hold no more than its quota of a tier."""
        held: dict[tuple[str, Tier], set[int]] = {}
        for hint in self.hints:
            if hint.record.state is HintState.HELD:
                held.setdefault((hint.record.tenant, hint.record.tier), set()).update(hint.record.slots.tolist())
        for (tenant, tier), slots in held.items():
            quota = self.cache.hints.quota_blocks(tier)
            require(len(slots) <= quota, f"tenant {tenant} holds {len(slots)} blocks of {quota}")
