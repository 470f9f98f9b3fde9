"""The same machine over the asynchronous runtime: every step is one of `KVRuntime` and `Lease`, on a real event loop.

The loop turns only when a step says so. A backend ends copies when the machine says so; the ranks but the first are
remote and report by themselves. Whoever embeds a `KVRuntime` overrides the steps that their own code takes.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Coroutine, Sequence
from typing import Any

from aiokv.backends.fake import FakeBackend
from aiokv.core.cache import CacheState
from aiokv.core.fences import Fence
from aiokv.core.hint_table import HintRecord
from aiokv.core.inflight import Transfer, TransferState
from aiokv.core.lease_table import AcquireRequest, LeaseRecord
from aiokv.errors import AcquireTimeout, CapacityError, LeaseReleased
from aiokv.model.events import CacheEvent
from aiokv.model.ids import TableArray, Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import CopyBatch, Declined, Deferred, Outcome
from aiokv.runtime.config import RuntimeConfig
from aiokv.runtime.hint import ResidenceHint
from aiokv.runtime.lease import Lease
from aiokv.runtime.preempted import Preempted
from aiokv.runtime.runtime import KVRuntime
from aiokv.testing.driver import Step, WaitingDriver
from aiokv.testing.stepped_loop import SteppedLoop
from aiokv.testing.verdict import BrokenInvariant
from aiokv.testing.watched_backend import WatchedBackend

__all__ = ["RuntimeDriver"]


class RuntimeDriver(WaitingDriver):
    """Drives one `KVRuntime` over a manual `FakeBackend`. `kv` is the runtime, `loop` the loop that is stepped."""

    steps = frozenset({Step.REPORT})

    def open(self) -> CacheState:
        """See `Driver`."""
        setup = self.setup
        self.loop = SteppedLoop()
        self.backend = FakeBackend(manual=True)
        self.kv = self.build_runtime(
            RuntimeConfig(
                geometry=setup.geometry,
                gpu_blocks=setup.gpu_blocks,
                cpu_blocks=setup.cpu_blocks or None,
                store_policy=setup.stores.policy,
                lazy_fraction=setup.stores.lazy_fraction,
                selective_count=setup.stores.selective_count,
                watermark=setup.watermark,
                backend=WatchedBackend(self.backend, on_submit=self._note_submission),
                world_size=setup.world_size,
                remote_ranks=range(1, setup.world_size),
                close_grace_s=0.0,
                hint_quota=setup.hint_quota,
            )
        )
        self._leases: dict[int, Lease] = {}
        self._hints: dict[HintRecord, ResidenceHint] = {}
        self._preempted: dict[int, Preempted] = {}
        self._tasks: list[asyncio.Task[Any]] = []
        self._running: list[Transfer] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # small CPU pools are drawn on purpose
            self.loop.finish(self.kv.open())
        self._events = aiter(self.kv.events(backlog=1 << 20))
        self.loop.watch(self.witness.look)
        return self.kv.core

    def build_runtime(self, config: RuntimeConfig) -> KVRuntime:
        """Override this to have copies made by something else; the backend of `config` still says when they end."""
        return KVRuntime(config)

    def close(self) -> None:
        """Cancel who still waits, end what still runs, close the runtime and its loop."""
        self.loop.watch(None)
        for task in self._tasks:
            task.cancel()
        self.backend.complete_all()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a run that failed may have left leases
            self.loop.run_until_complete(self.kv.aclose())
        self.loop.close()

    def has_lease(self, record: LeaseRecord) -> bool:
        """Whether it has been handed out: the lease of a coroutine that still awaits its loads has not."""
        return record.lease_id in self._leases

    # Requests.

    def try_acquire(self, request: AcquireRequest) -> LeaseRecord | Deferred:
        """See `Driver`."""
        granted = self.kv.try_acquire(
            request.request_id,
            request.keys,
            reserve_tokens=request.reserve_tokens,
            first_chunk=request.first_chunk,
            align=request.align,
            priority=request.priority,
        )
        return granted if isinstance(granted, Deferred) else self._keep(granted)

    def fork(self, record: LeaseRecord, *, request_id: str, num_tokens: int) -> LeaseRecord | Deferred:
        """See `Driver`."""
        granted = self._lease(record).try_fork(request_id, at=num_tokens)
        return granted if isinstance(granted, Deferred) else self._keep(granted)

    def preempt(self, record: LeaseRecord) -> AcquireRequest:
        """See `Driver`."""
        request = record.resumption()
        self._preempted[id(request)] = self._lease(record).preempt()
        return request

    def try_resume(self, request: AcquireRequest) -> LeaseRecord | Deferred:
        """See `Driver`."""
        granted = self._preempted[id(request)].try_resume()
        return granted if isinstance(granted, Deferred) else self._keep(granted)

    def append(self, record: LeaseRecord, token_ids: Sequence[int]) -> None:
        """See `Driver`."""
        self._lease(record).append(list(token_ids))

    def try_extend(self, record: LeaseRecord, tokens: int) -> int | Deferred:
        """See `Driver`."""
        return self._lease(record).try_extend(tokens)

    def truncate(self, record: LeaseRecord, num_tokens: int) -> int | Deferred:
        """See `Driver`."""
        return self._lease(record).truncate(num_tokens)

    def block_ids(self, record: LeaseRecord, *, group: int) -> TableArray:
        """See `Driver`."""
        return self._lease(record).block_ids(self.setup.geometry.groups[group].name)

    def state_slots(self, record: LeaseRecord, *, group: int) -> tuple[int, int]:
        """See `Driver`."""
        return self._lease(record).state_slots(self.setup.geometry.groups[group].name)

    def confirm(
        self,
        record: LeaseRecord,
        num_tokens: int,
        *,
        publish_to: int | None = None,
        states: Sequence[int] = (),
        after: Fence | None = None,
    ) -> None:
        """See `Driver`."""
        self._lease(record).confirm(num_tokens, publish_to=publish_to, states=states, after=after)

    def release(self, record: LeaseRecord) -> None:
        """See `Driver`."""
        self._lease(record).release()

    def finish(self, record: LeaseRecord) -> None:
        """See `Driver`."""
        self._lease(record).finish()

    # Who waits.

    @property
    def waiting(self) -> int:
        """How many coroutines have not come back."""
        self._collect()
        return len(self._tasks)

    def wait_acquire(self, request: AcquireRequest, *, timeout: float | None) -> None:
        """See `WaitingDriver`."""
        call = self.kv.acquire(
            request.request_id,
            request.keys,
            reserve_tokens=request.reserve_tokens,
            first_chunk=request.first_chunk,
            align=request.align,
            priority=request.priority,
            timeout=timeout,
        )
        self._start(call)

    def wait_resume(self, request: AcquireRequest, *, timeout: float | None) -> None:
        """See `WaitingDriver`."""
        self._start(self._preempted[id(request)].resume(timeout=timeout))

    def wait_extend(self, record: LeaseRecord, tokens: int, *, timeout: float | None) -> None:
        """See `WaitingDriver`."""
        self._start(self._lease(record).extend(tokens, timeout=timeout))

    def give_up(self, pick: int) -> None:
        """See `WaitingDriver`."""
        self._tasks[pick % len(self._tasks)].cancel()

    # Residence hints.

    def keep(self, keys: BlockKeys, *, tenant: str, tier: Tier, align: int = 1) -> HintRecord | Declined:
        """See `Driver`. Of those that are held, the newest is the last."""
        hint = self.kv.keep(keys, tenant=tenant, tier=tier, align=align)
        if isinstance(hint, Declined):
            return hint
        record = self.cache.hints.live()[-1]
        self._hints[record] = hint
        return record

    def update_hint(self, hint: HintRecord, keys: BlockKeys) -> int | Declined:
        """See `Driver`."""
        return self._hints[hint].update(keys)

    def revoke_hint(self, hint: HintRecord) -> None:
        """See `Driver`."""
        self._hints[hint].revoke()

    def release_hint(self, hint: HintRecord) -> None:
        """See `Driver`."""
        self._hints.pop(hint).release()

    # Copies.

    def take_submissions(self) -> list[Transfer]:
        """None: the runtime starts them."""
        return []

    def endable(self, running: Sequence[Transfer]) -> Sequence[Transfer]:
        """The heads of both streams, and what only waits for remote ranks."""
        heads: dict[object, Transfer] = {}
        for transfer in self._running:
            heads.setdefault(transfer.direction, transfer)
        return [transfer for transfer in running if transfer in heads.values() or transfer not in self._running]

    def report(self, transfer: Transfer, rank: int, *, outcome: Outcome) -> None:
        """The first rank is the backend, the others are remote."""
        if rank or transfer not in self._running:
            if rank or transfer.reports.get(rank) is not outcome:
                self.kv.report(transfer.transfer_id, rank, outcome)
            return
        self._running.remove(transfer)
        end = self.backend.complete if outcome is Outcome.OK else self.backend.fail
        end(1, direction=transfer.direction.value)
        self.turn()

    def complete(self, transfer: Transfer, outcome: Outcome) -> None:
        """See `Driver`."""
        for rank in self.cache.missing_ranks(transfer):
            self.report(transfer, rank, outcome=outcome)

    # Turns and tiers.

    def turn(self) -> None:
        """One turn of the loop."""
        self.loop.turn()
        self._collect()

    def run_slice(self) -> None:
        """See `Driver`: a turn runs one slice at most."""
        self.turn()

    def retry_replans(self) -> None:
        """The runtime does so when capacity has come back."""
        self.turn()

    def reset(self, tiers: Sequence[Tier]) -> None:
        """The reset has happened when this returns; its sweep goes on in later turns."""
        self._start(self.kv.reset(tiers[0] if len(tiers) == 1 else None))
        self.turn()

    def progress(self) -> None:
        """See `Driver`."""
        self.kv.progress()

    def take_events(self) -> list[CacheEvent]:
        """See `Driver`."""
        return self._events.take()

    # Helpers.

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        self._tasks.append(self.loop.create_task(work))

    def _collect(self) -> None:
        """Keep the leases that tasks came back with; a wait may end in no other ways than these."""
        ended = [task for task in self._tasks if task.done()]
        self._tasks = [task for task in self._tasks if not task.done()]
        for task in ended:
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, AcquireTimeout | CapacityError | LeaseReleased):
                raise BrokenInvariant(f"a wait ended with {error!r}") from error
            if not task.cancelled() and error is None and isinstance(lease := task.result(), Lease):
                self._keep(lease)

    def _lease(self, record: LeaseRecord) -> Lease:
        return self._leases[record.lease_id]

    def _keep(self, lease: Lease) -> LeaseRecord:
        """The newest lease of its request is meant."""
        record = [one for one in self.kv.core.leases() if one.request.request_id == lease.request_id][-1]
        self._leases[record.lease_id] = lease
        return record

    def _note_submission(self, batch: CopyBatch) -> None:
        """The transfer that the runtime has just marked as submitted."""
        for transfer in self.kv.core.transfers():
            if transfer.sources is batch.source_blocks and transfer.state is TransferState.SUBMITTED:
                self._running.append(transfer)
                try:
                    self.witness.copy_started(transfer)
                except BrokenInvariant as broken:
                    self.loop.keep(broken)  # the runtime takes what a backend raises for a fault of the backend
