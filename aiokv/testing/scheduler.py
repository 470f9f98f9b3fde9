"""What a scheduler plugs in to be run by the machine: itself, as four calls, over a cache and a device that are given.

It drives the cache as it would in production: it admits, confirms, preempts, releases, runs slices, hands transfers to
`device.submit`, tells `core.complete` what `device.take_ended` says. Instead of its model it calls `device.compute`,
which knows what every slot holds, and which refuses to read what is not there or to write what is not the request's.

A complete example, a server that fills the cache with one prompt after the other:

    from aiokv.core import CacheState
    from aiokv.core.lease_table import AcquireRequest, LeaseRecord, LeaseState
    from aiokv.errors import CapacityError
    from aiokv.model.keys import BlockKeys
    from aiokv.testing import Device, Row, run_scheduler_machine

    class OneByOne:
        def __init__(self, core: CacheState, device: Device) -> None:
            self.core, self.device = core, device
            self.requests: dict[str, AcquireRequest] = {}
            self.lease: LeaseRecord | None = None

        @property
        def unfinished(self):
            return list(self.requests)

        def add(self, request_id, token_ids, *, max_new_tokens):
            keys = BlockKeys(token_ids, hash_block_size=self.core.geometry.hash_block_size)
            self.requests[request_id] = AcquireRequest(request_id=request_id, keys=keys, prompt_tokens=len(token_ids))

        def cancel(self, request_id):
            del self.requests[request_id]
            if self.lease is not None and self.lease.request.request_id == request_id:
                self.core.release(self.lease)
                self.lease = None

        def step(self):
            for ended in self.device.take_ended():
                self.core.complete(ended.transfer_id, ended.outcome)
            self.core.retry_replans()
            if self.lease is None and self.requests:
                self.admit(next(iter(self.requests.values())))
            if self.lease is not None and self.lease.state is LeaseState.READY:
                self.compute(self.lease)
            for transfer in self.core.outbox.take_submissions():
                self.core.mark_submitted(transfer)
                self.device.submit(transfer)
            self.core.run_slices()

        def admit(self, request):
            try:
                lease = self.core.try_acquire(request)
            except CapacityError:
                del self.requests[request.request_id]
                return
            self.lease = lease if isinstance(lease, LeaseRecord) else None

        def compute(self, lease):
            groups = enumerate(self.core.geometry.groups)
            tables = {spec.name: self.core.block_ids(lease, group=index).tolist() for index, spec in groups}
            tokens = lease.keys.tokens(0, lease.keys.num_tokens).tolist()
            name = lease.request.request_id
            row = Row(request_id=name, token_ids=tokens, start=lease.confirmed, stop=len(tokens), tables=tables)
            self.device.compute(row)
            self.core.confirm(lease, len(tokens))
            self.core.finish(lease)
            del self.requests[name]
            self.lease = None

    run_scheduler_machine(OneByOne)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, final

from aiokv.core.cache import CacheState
from aiokv.core.inflight import Transfer
from aiokv.core.lease_table import LeaseRecord
from aiokv.model.plan import Outcome
from aiokv.testing.driver import Driver, Setup, Step, Witness
from aiokv.testing.forward import Row

__all__ = ["Device", "Ended", "Scheduler", "SchedulerDriver", "SchedulerWitness"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A copy that has ended, as the scheduler has to tell the cache: `core.complete(transfer_id, outcome)`."""

    transfer_id: int
    outcome: Outcome


class Scheduler(Protocol):
    """A scheduler that goes step by step."""

    def add(self, request_id: str, token_ids: Sequence[int], *, max_new_tokens: int) -> None:
        """A request arrives. What can never fit may be refused: then it is not unfinished."""
        ...

    def cancel(self, request_id: str) -> None:
        """An unfinished request is not wanted any more, whatever it is doing."""
        ...

    def step(self) -> None:
        """One step: copies that have ended, admissions, rows to compute, copies to start, slices. Any order."""
        ...

    @property
    def unfinished(self) -> Collection[str]:
        """Requests that have neither ended, been cancelled nor been refused. Each ends within some steps."""
        ...


class SchedulerWitness(Witness, Protocol):
    """A witness that also computes."""

    def compute(self, row: Row) -> int:
        """See `Device.compute`."""
        ...


@final
class Device:
    """The GPU that a scheduler believes in. Copies end when the machine says so."""

    __slots__ = ("_ended", "_witness")

    def __init__(self, witness: SchedulerWitness) -> None:
        self._witness = witness
        self._ended: list[Ended] = []

    def compute(self, row: Row) -> int:
        """Run a forward pass for one request; returns the token that follows, which belongs behind the last one.

        `BrokenInvariant` for reading blocks that are not there and for writing blocks that are not the request's own.
        """
        return self._witness.compute(row)

    def submit(self, transfer: Transfer) -> None:
        """Start a copy. The cache has been told so (`core.mark_submitted`)."""
        self._witness.copy_started(transfer)

    def take_ended(self) -> list[Ended]:
        """Copies that have ended since the last call, in the order in which they did."""
        self._witness.look()
        ended, self._ended = self._ended, []
        return ended

    def end(self, transfer: Transfer, outcome: Outcome) -> None:
        """For the machine: this copy has ended."""
        self._ended.append(Ended(transfer_id=transfer.transfer_id, outcome=outcome))


class SchedulerDriver(Driver):
    """Leaves everything to a scheduler but the ends of copies and what happens to tiers."""

    steps: ClassVar[frozenset[Step]] = frozenset()
    """Not even `LOSE`: it takes slots out of use, and a request that fitted may then wait for ever."""

    def __init__(
        self,
        setup: Setup,
        witness: SchedulerWitness,
        *,
        make_scheduler: Callable[[CacheState, Device], Scheduler],
    ) -> None:
        super().__init__(setup, witness)
        self.device = Device(witness)
        self.scheduler = make_scheduler(self.cache, self.device)

    @property
    def waiting(self) -> int:
        """Requests that have not ended."""
        return len(self.scheduler.unfinished)

    def has_lease(self, record: LeaseRecord) -> bool:
        """None: they are the scheduler's."""
        return False

    def take_submissions(self) -> list[Transfer]:
        """None: the scheduler starts them."""
        return []

    def complete(self, transfer: Transfer, outcome: Outcome) -> None:
        """The scheduler will hear of it."""
        self.device.end(transfer, outcome)

    def run_slice(self) -> None:
        """A step of the scheduler."""
        self.scheduler.step()

    def retry_replans(self) -> None:
        """A step of the scheduler."""
        self.scheduler.step()
