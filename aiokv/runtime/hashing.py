"""Hashing a prompt in slices, so that the loop turns in between (law 8)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final, SupportsIndex, TypedDict, TypeGuard, Unpack

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import UsageError
from aiokv.model.keys import BlockKeys, MediaSpan
from aiokv.model.tokens import TokenIds, as_tokens

__all__ = ["KeyOptions", "hash_in_slices", "prepare_keys"]

_SLICE_TOKENS: Final = 8192
"""Tokens converted and hashed in one step: under a millisecond."""


_Sliceable = Sequence[int] | Sequence[SupportsIndex] | NDArray[np.integer[Any]]


class KeyOptions(TypedDict, total=False):
    """What else is part of the identity of every block (law 10)."""

    salt: str | None
    """Tenants with different salts share nothing."""
    adapter: str | None
    """Name of the adapter (LoRA) that computes the KV."""
    media: Iterable[MediaSpan]
    """Images and the like, by digest and position; part of the blocks they overlap and of all that follow."""


async def prepare_keys(token_ids: TokenIds, *, hash_block_size: int, **identity: Unpack[KeyOptions]) -> BlockKeys:
    """Keys of a prompt, converted and hashed in slices so that the loop turns in between (law 8)."""
    if not _has_slices(token_ids):
        keys = BlockKeys(token_ids, hash_block_size=hash_block_size, **identity)
        await hash_in_slices(keys)
        return keys
    keys = BlockKeys(token_ids[:0], hash_block_size=hash_block_size, **identity)
    keys.make_room(len(token_ids))
    for start in range(0, len(token_ids), _SLICE_TOKENS):
        if start:
            await asyncio.sleep(0)
        _append(keys, token_ids[start : start + _SLICE_TOKENS], whole=token_ids)
        await hash_in_slices(keys)
    if len(token_ids) > _SLICE_TOKENS:
        await asyncio.sleep(0)
    return keys


def _has_slices(token_ids: TokenIds) -> TypeGuard[_Sliceable]:
    """Whether parts of these token ids are token ids, without converting all of them first."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.ndim == 1
    return isinstance(token_ids, Sequence) and not isinstance(token_ids, str | bytes)


def _append(keys: BlockKeys, part: TokenIds, *, whole: TokenIds) -> None:
    try:
        keys.append(part)
    except UsageError:
        as_tokens(whole)  # says at which position of the prompt
        raise


async def hash_in_slices(keys: BlockKeys) -> None:
    """Hash what is missing, a slice a turn; what the caller does next is not in the turn of the last of many slices."""
    limit = max(_SLICE_TOKENS // keys.hash_block_size, 1)
    is_long = keys.num_blocks - keys.num_hashed > limit
    while keys.hash_more(limit):  # noqa: ASYNC110  # a slice a turn
        await asyncio.sleep(0)
    if is_long:
        await asyncio.sleep(0)
