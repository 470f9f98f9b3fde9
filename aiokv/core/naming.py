"""Names for what leases have claimed: which slots they get, a slice at a time, and the sharing of load targets.

Rules
- Slots are named from the front of a lease's claims. When the last target of a load has a name, the load pins them all
  and is queued.
- A load can be joined before that. Whoever joins names targets of it in its own slices too, so those who have joined so
  are few, and in the step that gives the last target its name each of them gets its positions and pins.

State: that of the records and transfers.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Final, final

import numpy as np

from aiokv.core.block_table import ClaimSegment
from aiokv.core.inflight import Follower, Transfer
from aiokv.core.lease_table import LeaseRecord
from aiokv.core.planner import GroupPlan
from aiokv.core.world import World
from aiokv.model.ids import IntArray

__all__ = ["Naming"]

_NO_POSITIONS: Final[IntArray] = np.zeros(0, np.int64)


@final
class Naming:
    """Names claims."""

    __slots__ = ("_world",)

    def __init__(self, world: World) -> None:
        self._world = world

    def name_some(self, record: LeaseRecord, *, limit: int) -> int:
        """Name up to `limit` claims of a lease; returns how many were looked at.

        Loads whose targets are all named are queued. With the last name the slots that are leaving go back.
        """
        done = 0
        while record.claims and done < limit:
            joined = self._find_unbound(record.claims[0].joined_id)
            if joined is None:
                done += self._name_run(record, limit=limit - done)
                if record.claims and record.claims[0].unnamed:
                    break
            else:
                done += self._name_load(joined, limit=limit - done)
                if joined.targets is None:
                    break
                record.claims.popleft()
        self._let_go(record)
        return done

    def join(self, record: LeaseRecord, *, index: int, plan: GroupPlan) -> None:
        """Share the targets of loads under way: one copy per block, every lease pins and waits for itself."""
        inflight, table = self._world.inflight, record.tables[index]
        ids = inflight.loading_ids(plan.join_sources)
        for transfer_id in np.unique(ids).tolist():
            transfer, is_its = inflight.find(transfer_id), ids == transfer_id
            inflight.join(transfer, record.lease_id)
            record.waiting.add(transfer_id)
            follower = Follower(record.lease_id, table, plan.join_positions[is_its], plan.join_sources[is_its])
            if transfer.targets is None:
                transfer.followers.append(follower)
                record.claims.appendleft(ClaimSegment(table=table, positions=_NO_POSITIONS, joined_id=transfer_id))
            else:
                self._share(follower)

    def finish_for_others(self, record: LeaseRecord) -> None:
        """A lease is about to leave: targets of its loads that others have joined get their names in this hold.

        That is rare: they joined within the few turns since it was admitted.
        """
        for segment in tuple(record.claims):
            load = self._find_unbound(segment.transfer_id)
            while load is not None and load.followers and load.targets is None:
                self._name_load(load, limit=self._world.slice_blocks)

    def _name_load(self, transfer: Transfer, *, limit: int) -> int:
        """Name up to `limit` targets of a load before what else its owner has claimed; how many were looked at."""
        owner = self._world.leases.find(transfer.owner)
        segment = next(s for s in owner.claims if s.transfer_id == transfer.transfer_id)
        done = self._name_segment(owner, segment, limit=limit)
        if not segment.unnamed:
            owner.claims.remove(segment)
            self._let_go(owner)
        return done

    def _name_run(self, record: LeaseRecord, *, limit: int) -> int:
        """Name up to `limit` claims that come before those for which another's load has to be named, all in one go.

        Returns how many were looked at.
        """
        run = list(takewhile(lambda segment: self._find_unbound(segment.joined_id) is None, record.claims))
        unnamed = sum(segment.unnamed for segment in run)
        slots = self._world.name_gpu(min(unnamed, limit)) if unnamed else _NO_POSITIONS
        start = 0
        for segment in run:
            if segment.unnamed:
                part = slots[start : start + segment.unnamed]
                start += len(part)
                self._bind(record, segment, part)
                if segment.unnamed:
                    break
            record.claims.popleft()
        return max(len(slots), 1)

    def _name_segment(self, record: LeaseRecord, segment: ClaimSegment, *, limit: int) -> int:
        """Name up to `limit` claims of a segment; returns how many were looked at."""
        slots = self._world.name_gpu(min(segment.unnamed, limit))
        self._bind(record, segment, slots)
        return max(len(slots), 1)

    def _bind(self, record: LeaseRecord, segment: ClaimSegment, slots: IntArray) -> None:  # noqa: PLR0917
        """The next claims of a segment get these names; a load is queued with its last one."""
        positions = segment.positions[segment.named : segment.named + len(slots)]
        segment.table.put(positions, slots)
        segment.named += len(slots)
        if not segment.unnamed and segment.transfer_id is not None:
            self._bind_load(record, self._world.inflight.find(segment.transfer_id))

    def _bind_load(self, record: LeaseRecord, transfer: Transfer) -> None:
        """All targets of a load are named: it pins them and can be submitted, and whoever has joined it pins them."""
        world = self._world
        targets = record.tables[transfer.group].view()[transfer.positions].astype(np.int64)
        world.gpu.pin(targets)
        world.inflight.bind_targets(transfer, targets)
        for follower in transfer.followers:
            self._share(follower)
        transfer.followers.clear()
        world.outbox.submissions.append(transfer)

    def _share(self, follower: Follower) -> None:
        """One more lease pins targets of a load that have names."""
        targets = self._world.inflight.loading_targets(follower.sources)
        self._world.gpu.pin(targets)
        follower.table.put(follower.positions, targets)

    def _find_unbound(self, transfer_id: int | None) -> Transfer | None:
        """The load with this id, if not all its targets have names."""
        if transfer_id is None or transfer_id not in self._world.inflight:
            return None
        transfer = self._world.inflight.find(transfer_id)
        return transfer if transfer.targets is None else None

    def _let_go(self, record: LeaseRecord) -> None:
        """Once all its claims have names, the slots go back that have left its tables."""
        if len(record.leaving) and not record.claims:
            self._world.take_back(record, record.take_leaving())
