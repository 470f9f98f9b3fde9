"""A scheduler as an embedder would write it: continuous batching over the synchronous core, with preemption.

One step: hear of copies that have ended, compute a chunk of each running request and confirm it, make room by
preempting the youngest, let requests in, start copies, run slices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from aiokv.core import CacheState
from aiokv.core.counters import Closing
from aiokv.core.lease_table import AcquireRequest, LeaseRecord, LeaseState
from aiokv.errors import CapacityError
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import Deferred
from aiokv.testing.forward import Row
from aiokv.testing.scheduler import Device

CHUNK: Final = 16


@dataclass(slots=True)
class Job:
    """One request on its way."""

    request: AcquireRequest
    tokens: list[int]
    last: int
    """It ends with so many tokens."""
    lease: LeaseRecord | None = field(default=None)


class BatchingScheduler:
    """Runs all requests that fit; the others wait, and those that grow too large for the pool are dropped."""

    def __init__(self, core: CacheState, device: Device) -> None:
        self.core = core
        self.device = device
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []

    @property
    def unfinished(self) -> Collection[str]:
        return [job.request.request_id for job in (*self.waiting, *self.running)]

    def add(self, request_id: str, token_ids: Sequence[int], *, max_new_tokens: int) -> None:
        keys = BlockKeys(token_ids, hash_block_size=self.core.geometry.hash_block_size)
        request = AcquireRequest(request_id=request_id, keys=keys, prompt_tokens=len(token_ids))
        try:
            self.core.check(request)
        except CapacityError:
            return
        self.waiting.append(Job(request, list(token_ids), last=len(token_ids) + max_new_tokens))

    def cancel(self, request_id: str) -> None:
        self.waiting = deque(job for job in self.waiting if job.request.request_id != request_id)
        for job in [job for job in self.running if job.request.request_id == request_id]:
            self.leave(job)

    def step(self) -> None:
        self.hear()
        self.resolve()
        for job in list(self.running):
            if job in self.running and self.is_ready(job):
                self.advance(job)
        self.let_in()  # last: the blocks of who was preempted are for the one that needed them
        self.start_copies()
        self.core.run_slices()

    def hear(self) -> None:
        for ended in self.device.take_ended():
            self.core.complete(ended.transfer_id, ended.outcome)
        self.core.retry_replans()

    def let_in(self) -> None:
        while self.waiting:
            try:
                lease = self.core.try_acquire(self.waiting[0].request)
            except CapacityError:
                self.waiting.popleft()
                continue
            if isinstance(lease, Deferred):
                return
            job = self.waiting.popleft()
            job.lease = lease
            self.running.append(job)

    def resolve(self) -> None:
        """Requests whose loads have failed wait for slots that only others of them hold: the youngest makes room."""
        held = [job for job in self.running if self.lease_of(job).state is LeaseState.HELD]
        if len(held) == len(self.running) > 1:
            self.preempt(held[-1])

    def is_ready(self, job: Job) -> bool:
        return self.lease_of(job).state is LeaseState.READY

    def advance(self, job: Job) -> None:
        """Compute a chunk; a request whose last token is known has ended."""
        lease = self.lease_of(job)
        if min(lease.capacity_tokens) == lease.confirmed and not self.grow(job):
            return
        stop = min(lease.confirmed + CHUNK, len(job.tokens), *lease.capacity_tokens)
        if stop > lease.confirmed:
            token = self.compute(job, stop)
            if stop == len(job.tokens):
                self.append(job, token)
        if len(job.tokens) >= job.last:
            self.running.remove(job)
            self.core.finish(lease)

    def compute(self, job: Job, stop: int) -> int:
        lease = self.lease_of(job)
        row = Row(
            request_id=job.request.request_id,
            token_ids=tuple(job.tokens),
            start=lease.confirmed,
            stop=stop,
            tables=self.tables(job),
        )
        token = self.device.compute(row)
        self.core.confirm(lease, stop)
        return token

    def tables(self, job: Job) -> dict[str, list[int]]:
        lease = self.lease_of(job)
        groups = enumerate(self.core.geometry.groups)
        return {spec.name: self.core.block_ids(lease, group=index).tolist() for index, spec in groups}

    def append(self, job: Job, token: int) -> None:
        lease = self.lease_of(job)
        if lease.keys is job.request.keys:
            lease.keys = lease.keys.copy()
        lease.keys.append([token])
        job.tokens.append(token)

    def grow(self, job: Job) -> bool:
        """Room for one more token, if need be that of the youngest request; False if it has to wait or was dropped."""
        lease = self.lease_of(job)
        while min(lease.capacity_tokens) < len(job.tokens):
            try:
                granted = self.core.try_extend(lease, 1)
            except CapacityError:
                self.leave(job)
                return False
            if isinstance(granted, Deferred):
                if len(self.running) == 1:
                    return False
                self.preempt(self.running[-1])
                if job not in self.running:
                    return False
        return True

    def preempt(self, job: Job) -> None:
        lease = self.lease_of(job)
        job.request = lease.resumption()
        self.core.finish(lease, how=Closing.PREEMPTED)
        job.lease = None
        self.running.remove(job)
        self.waiting.appendleft(job)

    def leave(self, job: Job) -> None:
        self.running.remove(job)
        self.core.release(self.lease_of(job))

    def start_copies(self) -> None:
        self.core.outbox.take_settled()
        for transfer in self.core.outbox.take_submissions():
            self.core.mark_submitted(transfer)
            self.device.submit(transfer)

    def lease_of(self, job: Job) -> LeaseRecord:
        assert job.lease is not None
        return job.lease
