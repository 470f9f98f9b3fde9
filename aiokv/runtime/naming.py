"""Naming the slots that a request has claimed, in turns of its own, so that reading its tables is short (law 8)."""

from __future__ import annotations

import asyncio

from aiokv.core.lease_table import LeaseRecord
from aiokv.runtime.offload import Offloader

__all__ = ["name_in_slices"]


async def name_in_slices(offloader: Offloader, record: LeaseRecord) -> None:
    """Name all claims of a lease, a slice a turn, before other sliced work.

    Back at once while the runtime is quiet, and when the lease is closed: whoever reads a table names what is left.
    """
    while record.claims and not offloader.is_quiet:
        is_unfinished = offloader.core.name_slice(record)
        offloader.progress()
        if is_unfinished:
            await asyncio.sleep(0)
