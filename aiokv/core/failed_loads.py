"""What failed loads leave behind: which blocks they were to bring a lease, and which are not to be loaded again."""

from __future__ import annotations

import numpy as np

from aiokv.core.counters import LOAD_FAILURES
from aiokv.core.inflight import Transfer
from aiokv.core.lease_table import FailedLoad, LeaseRecord
from aiokv.model.ids import BoolArray
from aiokv.model.plan import Outcome

__all__ = ["failed_masks", "failed_positions", "missing_masks", "worst_outcome"]


def failed_positions(record: LeaseRecord, transfer: Transfer) -> BoolArray:
    """Which blocks of the prefix this load was to bring: a joined one may bring others as well."""
    is_failed = np.zeros_like(record.loaded[transfer.group])
    count = int(transfer.positions.searchsorted(len(is_failed)))
    positions = transfer.positions[:count]
    is_failed[positions] = record.tables[transfer.group].view()[positions] == transfer.bound_targets[:count]
    return is_failed


def failed_masks(record: LeaseRecord) -> list[BoolArray]:
    """Per group, over the blocks of the prefix: this position was in a load that failed; its target holds nothing."""
    return _masks_of(record, record.failed)


def missing_masks(record: LeaseRecord) -> list[BoolArray]:
    """Per group, over the blocks of the prefix: this position is not to be loaded again.

    Where blocks were corrupt the index knows which: those have left it.
    """
    return _masks_of(record, [failed for failed in record.failed if failed.outcome is not Outcome.CORRUPT])


def worst_outcome(record: LeaseRecord) -> Outcome:
    """How the loads of a lease failed, of which one has; of several the worst, by which the whole is counted."""
    return min((failed.outcome for failed in record.failed), key=LOAD_FAILURES.index)


def _masks_of(record: LeaseRecord, loads: list[FailedLoad]) -> list[BoolArray]:
    masks = [np.zeros_like(loaded) for loaded in record.loaded]
    for load in loads:
        masks[load.group] |= load.positions
    return masks
