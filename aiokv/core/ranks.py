"""The end of a transfer: by one word for all ranks, or by the last of their reports.

Rules
- A transfer of a world of W ranks has ended when W distinct ranks have reported it, in any order; only then its slots
  go back (law 4). Reports are kept by rank, so that one that comes twice counts once.
- The outcome is the worst report: LOST before FAILED before CORRUPT before OK. From the first bad one on nobody joins a
  load any more.
- A block that one rank found corrupt leaves the CPU index with that rank's report, whatever the others say later. When
  the transfer ends, and leases are planned again, it is a miss; the good blocks of the load are hits as before.
- One lost rank is a lost backend: no copy can be made any more, as every block lies in parts on all ranks.
- A refused report changes nothing: `UsageError` for an unknown rank, an unknown or ended transfer, a contradiction.

State: how many transfers some ranks have reported and others have not; the reports themselves are with the transfer.
"""

from __future__ import annotations

from collections.abc import Collection
from operator import index
from typing import Final, final

import numpy as np

from aiokv.core.counters import COPY_ENDS
from aiokv.core.inflight import Transfer, TransferEvent, TransferState
from aiokv.core.loads import Loads
from aiokv.core.store_queue import StoreQueue
from aiokv.core.world import World
from aiokv.errors import ConfigError, InvalidTransition, UsageError
from aiokv.model.ids import Direction
from aiokv.model.plan import Outcome

__all__ = ["Ranks"]

_EVENTS: Final = {
    Outcome.OK: TransferEvent.FINISH,
    Outcome.CORRUPT: TransferEvent.SPOIL,
    Outcome.FAILED: TransferEvent.FAIL,
    Outcome.LOST: TransferEvent.LOSE,
    Outcome.DROPPED: TransferEvent.DROP,
}
_SEVERITY: Final = {outcome: severity for severity, outcome in enumerate(_EVENTS)}


@final
class Ranks:
    """Ends the transfers of one cache."""

    __slots__ = ("_loads", "_stores", "_world", "partly_reported")

    def __init__(self, world: World, *, loads: Loads, stores: StoreQueue) -> None:
        if world.world_size < 1:
            raise ConfigError(f"world_size must be at least 1, not {world.world_size}")
        self._world = world
        self._loads = loads
        self._stores = stores
        self.partly_reported = 0

    def report(self, transfer_id: int, *, rank: int, outcome: Outcome, corrupt: Collection[int] = ()) -> None:
        """One rank's copies have ended this way; the last rank to say so ends the transfer."""
        transfer = self._world.inflight.find(transfer_id)
        copies = _checked_copies(transfer, corrupt, outcome=outcome)
        if self._is_known(transfer, rank=rank, outcome=outcome, copies=copies):
            return
        self.partly_reported += not transfer.reports
        transfer.reports[rank] = outcome
        self._world.counters.rank_reports[outcome] += 1
        if copies:
            self._forget_corrupt(transfer, copies)
            transfer.corrupt[rank] = copies
        if outcome is Outcome.LOST:
            self._world.is_backend_lost = True
        if len(transfer.reports) == self._world.world_size:
            self._end(transfer, outcome)
        elif outcome is not Outcome.OK and transfer.direction is Direction.LOAD:
            self._world.inflight.hide(transfer)

    def lose_rank(self, rank: int) -> None:
        """A rank is gone: all that it has not reported is LOST for it, and no copy can be made any more."""
        self._check_rank(rank)
        self._world.is_backend_lost = True
        for transfer in tuple(self._world.inflight):
            if transfer.state is TransferState.SUBMITTED and rank not in transfer.reports:
                self.report(transfer.transfer_id, rank=rank, outcome=Outcome.LOST)

    def complete(self, transfer_id: int, outcome: Outcome, *, corrupt: Collection[int] = ()) -> None:
        """The copies have ended this way on every rank that has not reported."""
        transfer = self._world.inflight.find(transfer_id)
        copies = _checked_copies(transfer, corrupt, outcome=outcome)
        if copies:
            _require_submitted(transfer)
            self._forget_corrupt(transfer, copies)
        self._end(transfer, outcome)

    def _end(self, transfer: Transfer, outcome: Outcome) -> None:
        """Nothing is copied any more. The pins go back here, nowhere else."""
        decided = outcome
        if transfer.reports:
            decided = max((*transfer.reports.values(), outcome), key=_SEVERITY.__getitem__)
        blocks = len(transfer.bound_targets)
        transfer.advance(_EVENTS[decided])
        self.partly_reported -= bool(transfer.reports)
        self._world.counters.transferred_blocks[transfer.direction, decided] += blocks
        if decided is Outcome.LOST:
            self._world.is_backend_lost = True
        kind = self._loads if transfer.direction is Direction.LOAD else self._stores
        self._world.slices.start(kind.complete(transfer, decided))

    def missing(self, transfer: Transfer) -> tuple[int, ...]:
        """Ranks that have not reported a transfer, ascending."""
        return tuple(rank for rank in range(self._world.world_size) if rank not in transfer.reports)

    def _forget_corrupt(self, transfer: Transfer, copies: frozenset[int]) -> None:
        """These blocks are findable no more. One that several ranks find corrupt is counted once."""
        new = copies.difference(*transfer.corrupt.values())
        if new:
            self._world.counters.corrupt_blocks += len(new)
            self._world.forget_corrupt(transfer.sources[np.array(sorted(new), np.int64)])

    def _is_known(self, transfer: Transfer, *, rank: int, outcome: Outcome, copies: frozenset[int]) -> bool:
        """Whether this rank has said just that before. `UsageError` for what no rank may say."""
        self._check_rank(rank)
        if outcome not in COPY_ENDS:
            raise UsageError(f"a rank reports its copies as ok, corrupt, failed or lost, not as {outcome!r}")
        _require_submitted(transfer)
        known = transfer.reports.get(rank, outcome)
        if known is not outcome:
            told = f"rank {rank} has reported transfer {transfer.transfer_id} as {known.value}"
            raise UsageError(f"{told}, it cannot be {outcome.value} as well")
        if rank in transfer.reports and transfer.corrupt.get(rank, frozenset()) != copies:
            raise UsageError(f"rank {rank} has named other corrupt copies of transfer {transfer.transfer_id} before")
        return rank in transfer.reports

    def _check_rank(self, rank: int) -> None:
        if isinstance(rank, bool) or rank not in range(self._world.world_size):
            raise UsageError(f"there is no rank {rank!r} in a world of {self._world.world_size}")


def _require_submitted(transfer: Transfer) -> None:
    if transfer.state is not TransferState.SUBMITTED:
        name = f"transfer {transfer.transfer_id}"
        raise InvalidTransition(name, state=transfer.state.value, event="be reported")


def _checked_copies(transfer: Transfer, corrupt: Collection[int], *, outcome: Outcome) -> frozenset[int]:
    """Which copies are corrupt: of a load that is reported so at least one, otherwise none."""
    if isinstance(corrupt, frozenset) and not corrupt and outcome is Outcome.OK:
        return corrupt
    if not isinstance(corrupt, Collection):
        raise UsageError(f"corrupt must be the places of copies, not {corrupt!r}")
    if outcome is Outcome.CORRUPT and transfer.direction is Direction.STORE:
        raise UsageError(f"transfer {transfer.transfer_id} is a store: only what is loaded is checked")
    if (outcome is Outcome.CORRUPT) != (len(corrupt) > 0):
        raise UsageError(
            f"corrupt copies are named with Outcome.CORRUPT and only then, not {len(corrupt)} of {outcome}"
        )
    copies = frozenset(map(_read_copy, corrupt))
    if copies and max(copies) >= len(transfer):
        raise UsageError(f"transfer {transfer.transfer_id} has {len(transfer)} copies, not one at place {max(copies)}")
    return copies


def _read_copy(copy: int) -> int:
    try:
        place = index(copy)
    except TypeError:
        place = -1
    if isinstance(copy, bool) or place < 0:  # truth values would be those of a mask
        raise UsageError(f"a corrupt copy is named by its place in the batch, not by {copy!r}")
    return place
