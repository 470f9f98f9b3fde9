"""What one request needs done in turns of its own, so that its admission and reading its tables are short (law 8)."""

from __future__ import annotations

import asyncio

from aiokv.core.cache import CacheState
from aiokv.core.lease_table import LeaseRecord
from aiokv.model.keys import BlockKeys
from aiokv.runtime.offload import Offloader

__all__ = ["foresee", "name_in_slices"]


async def foresee(core: CacheState, keys: BlockKeys) -> None:
    """Find out where the blocks of a long prompt are, a slice a turn, before it is admitted."""
    for _ in core.foresight.look(keys):
        await asyncio.sleep(0)


async def name_in_slices(offloader: Offloader, record: LeaseRecord) -> None:
    """Name all claims of a lease, a slice a turn, before other sliced work.

    Back at once while the runtime is quiet, and when the lease is closed: whoever reads a table names what is left.
    """
    while record.claims and not offloader.is_quiet:
        is_unfinished = offloader.core.name_slice(record)
        offloader.progress()
        if is_unfinished:
            await asyncio.sleep(0)
