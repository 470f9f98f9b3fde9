"""Put blocks where a test wants them, through the real pools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, final

import numpy as np

from aiokv.errors import UsageError
from aiokv.model.ids import Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.tokens import TokenIds
from aiokv.runtime.runtime import KVRuntime

__all__ = ["evict", "make_resident"]

_TIERS: Final = {"g": (Tier.GPU,), "c": (Tier.CPU,), "b": (Tier.GPU, Tier.CPU), "-": ()}


def make_resident(  # noqa: PLR0917  # positional by contract
    kv: KVRuntime,
    token_ids: TokenIds | BlockKeys,
    layout: Mapping[str, str],
    *,
    salt: str | None = None,
    adapter: str | None = None,
) -> None:
    """Make blocks of a prompt findable: per group one letter per block, g GPU, c CPU, b both, - neither.

    Adds and never removes. The memory behind the blocks is left as it is. `UsageError`, and nothing has changed, for an
    unknown letter, for more letters than the prompt has full blocks, or when a tier has not enough free slots;
    `ConfigError` for an unknown group.
    """
    keys = _keys(kv, token_ids, salt=salt, adapter=adapter)
    wanted = [_Wanted(kv, name, letters, tier=tier, keys=keys) for name, letters in layout.items() for tier in Tier]
    for tier in Tier:
        needed = sum(part.count_missing(kv, keys) for part in wanted if part.tier is tier)
        pools = kv.core.pools()
        free = pools[tier].free if tier in pools else 0
        if needed > free:
            raise UsageError(f"{needed} blocks do not fit: {free} {tier.value} slots are free")
    for part in wanted:
        if len(part.positions):
            kv.core.placement.place(keys, group=part.group, positions=part.positions, tier=part.tier)
    kv.progress()


def evict(  # noqa: PLR0917  # positional by contract
    kv: KVRuntime,
    token_ids: TokenIds | BlockKeys,
    blocks: Mapping[str, Iterable[int]],
    *,
    tier: Tier = Tier.GPU,
    salt: str | None = None,
    adapter: str | None = None,
) -> None:
    """Evict these unpinned blocks, by group and block position, as pressure would; on any backend.

    `UsageError`, and nothing has changed, for a block that is pinned or not resident.
    """
    keys = _keys(kv, token_ids, salt=salt, adapter=adapter)
    wanted = {kv.config.geometry.group_index(name): tuple(positions) for name, positions in blocks.items()}
    placement = kv.core.placement
    for group, positions in wanted.items():
        placement.check_evict(keys, group=group, positions=positions, tier=tier)
    for group, positions in wanted.items():
        placement.evict(keys, group=group, positions=positions, tier=tier)
    kv.progress()


@final
class _Wanted:
    """Blocks of one group that are to be findable in one tier."""

    __slots__ = ("group", "positions", "tier")

    def __init__(self, kv: KVRuntime, name: str, letters: str, *, tier: Tier, keys: BlockKeys) -> None:  # noqa: PLR0917  # one entry
        self.group = kv.config.geometry.group_index(name)
        self.tier = tier
        blocks = keys.num_blocks // kv.config.geometry.hashes_per_block(self.group)
        if unknown := set(letters) - _TIERS.keys():
            raise UsageError(f"unknown letters {sorted(unknown)} in the layout of group {name!r}: use g, c, b and -")
        if len(letters) > blocks:
            raise UsageError(f"{len(letters)} letters for group {name!r}, but the prompt has {blocks} full blocks")
        self.positions = np.array([i for i, letter in enumerate(letters) if tier in _TIERS[letter]], np.int64)

    def count_missing(self, kv: KVRuntime, keys: BlockKeys) -> int:
        """How many of them are not there yet."""
        present = kv.core.find_blocks(keys, group=self.group, tier=self.tier).present
        return int(np.count_nonzero(~present[self.positions]))


def _keys(kv: KVRuntime, token_ids: TokenIds | BlockKeys, *, salt: str | None, adapter: str | None) -> BlockKeys:
    if isinstance(token_ids, BlockKeys):
        return token_ids
    return kv.keys(token_ids, salt=salt, adapter=adapter)
