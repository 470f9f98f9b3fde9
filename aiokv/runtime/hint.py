"""`ResidenceHint`: a prefix that stays in one tier while its owner wants, and nobody needs the room.

A hint makes nobody wait: the runtime revokes it when a request needs the room, and its owner may take hold again. It is
released with its scope; one that is dropped without is noticed by the loop, warned about and released.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, final

from aiokv.core.hint_table import HintRecord, HintState
from aiokv.errors import UsageError
from aiokv.model.ids import Tier
from aiokv.model.keys import BlockKeys, MediaSpan
from aiokv.model.plan import Declined
from aiokv.model.tokens import TokenIds
from aiokv.runtime.arguments import Prompt, check_name, check_whole
from aiokv.runtime.hashing import KeyOptions
from aiokv.runtime.offload import Offloader

__all__ = ["HintOptions", "HintRequest", "ResidenceHint", "keep"]


class HintOptions(KeyOptions, total=False):
    """What a residence hint may say beside its tokens."""

    tenant: str
    """Whose quota counts its blocks."""
    tier: Tier
    """Where the prefix is to stay."""
    align: int
    """As in the requests it is for: their hits end at multiples of so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HintRequest(Prompt):
    """What the caller asked for, checked at construction; `UsageError` names what is wrong."""

    tenant: str = "default"
    tier: Tier = Tier.GPU
    align: int = 1

    def __post_init__(self) -> None:
        check_name("tenant", self.tenant)
        if not isinstance(self.tier, Tier):
            raise UsageError(f"tier must be a Tier, not {self.tier!r}")
        check_whole("align", self.align, at_least=1)
        Prompt.__post_init__(self)  # not super(): `slots` replaces the class that it would look for


@final
class ResidenceHint:
    """A hold on a prefix. While it is HELD, a longer request of the same beginning hits `held_tokens` tokens at least.

    In recurrent groups that is so for requests that end their prefix where a state was captured.
    """

    __slots__ = ("__weakref__", "_is_closed", "_offloader", "_record")

    def __init__(self, offloader: Offloader, record: HintRecord) -> None:
        self._offloader = offloader
        self._record = record
        self._is_closed = False

    def __del__(self) -> None:
        if not self._is_closed:
            self._offloader.leaks.put_hint(self._record)

    def __repr__(self) -> str:
        return f"<ResidenceHint of {self.tenant!r} in {self.tier.value}: {self.blocks} blocks, {self.state.value}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    # What it is.

    @property
    def tenant(self) -> str:
        """Whose quota counts its blocks."""
        return self._record.tenant

    @property
    def tier(self) -> Tier:
        """Where it holds them."""
        return self._record.tier

    @property
    def state(self) -> HintState:
        """HELD, REVOKED or RELEASED."""
        return self._record.state

    @property
    def blocks(self) -> int:
        """Blocks that it holds now, those of all groups."""
        return len(self._record.slots) if self.state is HintState.HELD else 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix that it is for."""
        return self._record.keys.num_tokens

    @property
    def held_tokens(self) -> int:
        """Leading tokens that it holds now; they grow by themselves as blocks of the prefix become resident.

        0 for a moment after a block was lost, to a wrong checksum say, until the rest has been looked at.
        """
        return self._record.length

    @property
    def is_whole(self) -> bool:
        """Whether it holds all of the prefix that could ever be hit."""
        return self._record.is_whole

    # What can be done with it.

    def update(self, token_ids: TokenIds | BlockKeys, *, media: Iterable[MediaSpan] | None = None) -> int | Declined:
        """Hold another prefix, say that of the session's next turn, in one step: the tokens of it that are held now.

        `Declined`, and it holds what it held, if that is more than the tenant's quota. A revoked hint takes hold again.
        Raw tokens are hashed in one go, with the salt and adapter of the hint, and its media unless others are given:
        pass `lease.keys` or keys from `prepare_keys` to keep the loop free. `UsageError` for another salt or adapter,
        `InvalidTransition` once it is released.
        """
        self._offloader.enter_for_intake()
        own = self._record.keys
        if not isinstance(token_ids, BlockKeys):
            token_ids = own.sibling(token_ids, media=media)
        elif media is not None:
            raise UsageError("media belong to the BlockKeys: give them to kv.keys()")
        if token_ids.identity != own.identity:
            raise UsageError("these tokens have another salt or adapter than the hint: keep another one")
        token_ids.hash_more(token_ids.num_blocks)
        return self._hold(token_ids)

    def refresh(self) -> int | Declined:
        """Take hold again, of what is resident now: for a hint that was revoked, or that its quota stopped."""
        self._offloader.enter_for_intake()
        return self._hold(self._record.keys)

    def revoke(self) -> None:
        """Take everything back, for an operator: its owner sees REVOKED, and may take hold again. Idempotent."""
        self._offloader.enter()
        self._offloader.core.hints.revoke(self._record)
        self._offloader.progress()

    def release(self) -> None:
        """Give everything back. Idempotent, also after the runtime was closed."""
        if not self._is_closed:
            self._offloader.enter()
            self._is_closed = True
            self._offloader.core.hints.release(self._record)
            self._offloader.progress()

    def _hold(self, keys: BlockKeys) -> int | Declined:
        held = self._offloader.core.hints.update(self._record, keys)
        self._offloader.progress()
        return held


def keep(offloader: Offloader, request: HintRequest) -> ResidenceHint | Declined:
    """Take hold of what is resident of a prefix, and of what becomes so."""
    keys = request.token_ids
    if not isinstance(keys, BlockKeys):
        keys = BlockKeys(keys, hash_block_size=offloader.core.geometry.hash_block_size, **request.identity)
    keys.hash_more(keys.num_blocks)
    record = offloader.core.hints.keep(keys, tenant=request.tenant, tier=request.tier, align=request.align)
    offloader.progress()
    return record if isinstance(record, Declined) else ResidenceHint(offloader, record)
