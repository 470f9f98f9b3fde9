"""The part of the state machine that keeps prefixes while requests come and go. Needs hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from aiokv.model.ids import Tier
from aiokv.testing.hint_host import Hint, HintHost
from aiokv.testing.strategies import LONGEST_PROMPT, PICKS, RARELY, STREAMS
from aiokv.testing.tier_machine import TierMachine

__all__ = ["HintMachine"]

_PREFIXES = st.integers(0, LONGEST_PROMPT) | st.sampled_from([8, 16, 20, 24, 32])


class HintMachine(TierMachine):
    """Residence hints of two tenants, on prefixes that they share."""

    host: HintHost

    @rule(
        stream=STREAMS,
        tokens=_PREFIXES,
        tenant=st.sampled_from("ab"),
        tier=st.sampled_from([Tier.GPU, Tier.GPU, Tier.CPU]),
        align=st.sampled_from([1, 1, 1, 8, 12]),
    )
    def keep(self, stream: int, tokens: int, tenant: str, tier: Tier, align: int) -> None:
        """A prefix is kept, as far as it is there."""
        if len(self.host.hints) < 6 and self.host.capacity[tier]:
            self.host.keep(stream, tokens, tenant=tenant, tier=tier, align=align)

    @rule(stream=STREAMS, tokens=_PREFIXES, data=st.data())
    def keep_what_is_there(self, stream: int, tokens: int, data: st.DataObject) -> None:
        """Blocks of all groups are placed, then kept."""
        for group, block in enumerate(self.host.sizes):
            self.place(stream, list(range(tokens // block)), group=group, tier=Tier.GPU)
        self.keep(stream, tokens, data.draw(st.sampled_from("ab")), Tier.GPU, 1)

    @precondition(lambda self: self.host.hints)
    @rule(pick=PICKS, stream=STREAMS, tokens=_PREFIXES)
    def update_hint(self, pick: int, stream: int, tokens: int) -> None:
        """A session goes on, or another one takes its hint; a revoked one takes hold again."""
        self.host.update_hint(self.hint(pick), stream, tokens)

    @precondition(lambda self: self.host.hints)
    @rule(pick=PICKS)
    def refresh_hint(self, pick: int) -> None:
        """Hold what is there now of the same prefix."""
        hint = self.hint(pick)
        self.host.update_hint(hint, hint.stream, hint.num_tokens)

    @precondition(lambda self: self.host.hints)
    @rule(pick=PICKS, really=RARELY)
    def revoke_hint(self, pick: int, *, really: bool) -> None:
        """An operator takes everything back."""
        if really:
            self.host.revoke_hint(self.hint(pick))

    @precondition(lambda self: len(self.host.hints) > 1)
    @rule(pick=PICKS)
    def release_hint(self, pick: int) -> None:
        """Its scope ends."""
        self.host.release_hint(self.hint(pick))

    def hint(self, pick: int) -> Hint:
        """One of the hints that were not released."""
        return self.host.hints[pick % len(self.host.hints)]
