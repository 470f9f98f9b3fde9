"""Forks: a second lease over the first tokens of another, without a lookup.

Rules
- A fork shares what its parent holds, findable or private, in whole blocks of confirmed tokens: it pins them, and
  whoever of the two goes on writing writes into other slots. It starts at the last length at which every group's
  coverage is held; the rest of its prompt, the tail of the last block included, it computes itself.
- It is admitted like any request (law 2), and its prompt is attributed like any: what it shares came from the GPU tier.
- A lease of an older epoch forks nothing.
"""

from __future__ import annotations

from typing import final

import numpy as np

from aiokv.core.admission import Admission
from aiokv.core.lease_table import AcquireRequest, LeaseRecord
from aiokv.core.loads import Loads
from aiokv.core.lookup import Residency, longest_valid
from aiokv.core.probing import GroupResidency
from aiokv.core.world import World
from aiokv.errors import UsageError
from aiokv.model.ids import NULL_SLOT
from aiokv.model.plan import DeferReason, Deferred

__all__ = ["Forks"]


@final
class Forks:
    """Lets forks in."""

    __slots__ = ("_admission", "_loads", "_world")

    def __init__(self, world: World, *, admission: Admission, loads: Loads) -> None:
        self._world = world
        self._admission = admission
        self._loads = loads

    def plan(self, record: LeaseRecord, *, request_id: str, num_tokens: int) -> AcquireRequest:
        """What a fork over the first `num_tokens` tokens of a lease asks for. Changes nothing."""
        self._check(record)
        return record.branch(request_id=request_id, num_tokens=num_tokens)

    def try_fork(self, record: LeaseRecord, request: AcquireRequest) -> LeaseRecord | Deferred:
        """Pin what `record` holds of the tokens that `plan` asked for, claim the rest, all or nothing.

        `CapacityError` for what can never fit.
        """
        self._check(record)
        self._admission.check(request)
        if self._loads.waits_for_capacity:
            return self._world.defer(DeferReason.QUEUED)
        forked = self._admission.try_admit(request, self._held(record, request))
        self._world.counters.forks += isinstance(forked, LeaseRecord)
        return forked

    def _check(self, record: LeaseRecord) -> None:
        record.check_open()
        record.check_ready("be forked")
        if not self._world.may_register(record):
            raise UsageError(f"{record.name} is older than the last reset of the GPU tier: it cannot be forked")

    def _held(self, record: LeaseRecord, request: AcquireRequest) -> Residency:
        limit = min(request.prompt_tokens, record.confirmed)
        groups = []
        for table, block in zip(record.tables, record.block_sizes, strict=True):
            slots = table.view()[: limit // block].astype(np.int64)
            is_held, nowhere = slots != NULL_SLOT, np.zeros(len(slots), np.bool_)
            groups.append(GroupResidency(is_held, slots, nowhere, np.zeros_like(slots), is_held))
        length = longest_valid(
            self._world.geometry,
            num_tokens=limit + 1,
            present=[group.present for group in groups],
            align=request.align,
        )
        return Residency(length=length, groups=tuple(groups))
