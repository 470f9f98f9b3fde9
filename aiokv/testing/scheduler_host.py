"""A host whose requests are a scheduler's: the scheduler computes on a device that knows what every slot holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

from aiokv.testing.accounts import Growth
from aiokv.testing.copy_host import CopyHost
from aiokv.testing.driver import Setup
from aiokv.testing.forward import ForwardPass, Row
from aiokv.testing.scheduler import Scheduler, SchedulerDriver, SchedulerWitness

__all__ = ["SchedulerHost"]

_STEPS: Final = 4


@final
class SchedulerHost(CopyHost):
    """Keeps the books about what a scheduler does."""

    def __init__(self, setup: Setup, *, make_driver: Callable[[Setup, SchedulerWitness], SchedulerDriver]) -> None:
        drivers: list[SchedulerDriver] = []

        def make(setup: Setup, witness: object) -> SchedulerDriver:
            drivers.append(make_driver(setup, self))
            return drivers[0]

        super().__init__(setup, make_driver=make)
        self.scheduler: Scheduler = drivers[0].scheduler
        self._forward = ForwardPass(self.cache, streams=self.streams, contents=self.contents, checks=self._checks)

    def make_accounts(self) -> Growth:
        """In one step a lease may come and go."""
        return Growth(self.cache)

    def run_slices(self) -> None:
        """Some steps: what is sliced is the scheduler's business, and it may make more work in each of them."""
        for _ in range(_STEPS):
            self.run_slice()

    def compute(self, row: Row) -> int:
        """See `Device.compute`."""
        self.look()
        fresh = {record.request.request_id for record in self.leases.values() if self.is_of_this_epoch(record)}
        token = self._forward.compute(row, leases=self.leases, is_fresh=row.request_id in fresh)
        self.seen["rows"] += 1
        return token
