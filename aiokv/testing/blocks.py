"""Put blocks where a test wants them, through the real pools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

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

    Adds and never removes. The memory behind the blocks is left as it is. `UsageError` for an unknown letter, for more
    letters than the prompt has full blocks, or when a tier has not enough slots; `ConfigError` for an unknown group.
    """
    keys = _keys(kv, token_ids, salt=salt, adapter=adapter)
    groups = {name: kv.config.geometry.group_index(name) for name in layout}
    for name, letters in layout.items():
        unknown = set(letters) - _TIERS.keys()
        if unknown:
            raise UsageError(f"unknown letters {sorted(unknown)} in the layout of group {name!r}: use g, c, b and -")
    for name, letters in layout.items():
        for tier in Tier:
            positions = np.array([i for i, letter in enumerate(letters) if tier in _TIERS[letter]], np.int64)
            if len(positions):
                kv.core.placement.place(keys, group=groups[name], positions=positions, tier=tier)


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

    `UsageError` for a block that is pinned or not resident.
    """
    keys = _keys(kv, token_ids, salt=salt, adapter=adapter)
    for name, positions in blocks.items():
        group = kv.config.geometry.group_index(name)
        kv.core.placement.evict(keys, group=group, positions=tuple(positions), tier=tier)


def _keys(kv: KVRuntime, token_ids: TokenIds | BlockKeys, *, salt: str | None, adapter: str | None) -> BlockKeys:
    if isinstance(token_ids, BlockKeys):
        return token_ids
    return kv.keys(token_ids, salt=salt, adapter=adapter)
