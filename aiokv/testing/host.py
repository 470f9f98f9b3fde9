"""A host that steps a cache through a driver, and beside it a model of what every slot really holds.

`Host.check()` asks, after any step, whether what leases read, what transfers read and what a lookup can find is the
right content, and whether nobody was written over (laws 3, 4 and 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from aiokv.core.counters import Phase
from aiokv.core.fences import Fence
from aiokv.core.hints import HINT_QUOTA
from aiokv.core.inflight import Transfer, TransferState
from aiokv.core.lease_table import AcquireRequest, LeaseRecord, LeaseState
from aiokv.core.store_policy import EAGER_STORES, StoreSettings
from aiokv.errors import CapacityError, UsageError
from aiokv.model.ids import Tier
from aiokv.model.plan import Deferred
from aiokv.model.spec import CacheGeometry
from aiokv.testing.contents import Content, names_of
from aiokv.testing.driver import Driver, Setup, Witness
from aiokv.testing.hint_host import HintHost
from aiokv.testing.promises import Promises
from aiokv.testing.streams import STREAM_TOKENS, stream_tokens
from aiokv.testing.verdict import require

__all__ = ["Host", "host_of", "state_of"]


def state_of(thing: LeaseRecord | Transfer) -> LeaseState | TransferState:
    """Its state; a call, so that a type checker does not take it for settled."""
    return thing.state


def host_of(setup: Setup, *, make_driver: Callable[[Setup, Witness], Driver]) -> Host:
    """A host over a cache that was drawn."""
    return Host(
        setup.geometry,
        gpu_blocks=setup.gpu_blocks,
        cpu_blocks=setup.cpu_blocks,
        watermark=setup.watermark,
        slice_blocks=setup.slice_blocks,
        stores=setup.stores,
        world_size=setup.world_size,
        hint_quota=setup.hint_quota,
        make_driver=make_driver,
    )


@final
class Host(HintHost):
    """Takes requests through their lives; the work between two steps is done when it says so."""

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        gpu_blocks: int,
        cpu_blocks: int = 0,
        watermark: float = 0.0,
        slice_blocks: int = 1024,
        stores: StoreSettings = EAGER_STORES,
        world_size: int = 1,
        hint_quota: float = HINT_QUOTA,
        make_driver: Callable[[Setup, Witness], Driver] = Driver,
    ) -> None:
        setup = Setup(
            geometry=geometry,
            gpu_blocks=gpu_blocks,
            cpu_blocks=cpu_blocks,
            watermark=watermark,
            slice_blocks=slice_blocks,
            stores=stores,
            world_size=world_size,
            hint_quota=hint_quota,
        )
        super().__init__(setup, make_driver=make_driver)
        self.preempted: list[AcquireRequest] = []
        self._promises = Promises(self.cache, streams=self.streams, checks=self._checks, seen=self.seen)

    # Ways in.

    def acquire(
        self,
        stream: int,
        num_tokens: int,
        *,
        reserve_tokens: int = 0,
        first_chunk: int | None = None,
        align: int = 1,
        request_id: str | None = None,
    ) -> LeaseRecord | Deferred:
        """Ask for admission; what is promised is compared with the oracle, a refusal must change nothing."""
        request = AcquireRequest(
            request_id=request_id or f"s{stream}n{num_tokens}",
            keys=self.keys(stream, num_tokens),
            prompt_tokens=num_tokens,
            reserve_tokens=reserve_tokens,
            first_chunk=first_chunk,
            align=align,
        )
        return self._ask(request, stream=stream, attempt=self.driver.try_acquire)

    def admit(
        self,
        stream: int,
        num_tokens: int,
        *,
        reserve_tokens: int = 0,
        first_chunk: int | None = None,
        request_id: str | None = None,
    ) -> LeaseRecord:
        """`acquire`, which must succeed."""
        record = self.acquire(
            stream, num_tokens, reserve_tokens=reserve_tokens, first_chunk=first_chunk, request_id=request_id
        )
        if isinstance(record, Deferred):
            raise LookupError(f"request s{stream}n{num_tokens} is not admitted: {record.reason.value}")
        return record

    def preempt(self, record: LeaseRecord) -> None:
        """The request gives its blocks back and waits in `preempted`."""
        request = self.driver.preempt(record)
        tokens = request.keys.tokens(0, request.prompt_tokens).tolist()
        require(tokens == stream_tokens(self.stream_of(record), 0, len(tokens)), "preemption lost tokens")
        require(request.phase is Phase.RESUMED, "a resumption is told as a first admission")
        self.preempted.append(request)
        self.seen["preempted"] += 1
        self.settle()

    def resume(self, pick: int) -> LeaseRecord | Deferred:
        """A preempted request asks for all its tokens again."""
        request = self.preempted[pick]
        stream = self.streams.stream_of(request.keys.tokens(0, request.prompt_tokens).tolist())
        record = self._ask(request, stream=stream, attempt=self.driver.try_resume)
        if isinstance(record, LeaseRecord):
            del self.preempted[pick]
            self.seen["resumed"] += 1
            self.seen["resumed with a prefix"] += record.length > 0
        return record

    def fork(self, record: LeaseRecord, num_tokens: int) -> LeaseRecord | Deferred:
        """A second lease over the first tokens of a lease; a refusal must change nothing."""
        before = self.cache.snapshot()
        name = f"{record.request.request_id}f{num_tokens}"
        try:
            forked = self.driver.fork(record, request_id=name, num_tokens=num_tokens)
        except (UsageError, CapacityError):
            self.require_unchanged(before, "a refused fork")
            raise
        if isinstance(forked, Deferred):
            self.require_unchanged(before, "a deferred fork")
            self.seen["fork deferred"] += 1
            return forked
        self._stream_of_new(forked, self.stream_of(record))
        self._promises.check_fork(forked, parent=record)
        self.settle()
        return forked

    # What a lease does.

    def extend(self, record: LeaseRecord, tokens: int) -> int | Deferred:
        """Ask for more room; a refusal must change nothing."""
        before = self.cache.snapshot()
        try:
            granted = self.driver.try_extend(record, tokens)
        except CapacityError:
            self.require_unchanged(before, "a refused extension")
            raise
        if isinstance(granted, Deferred):
            self.require_unchanged(before, "a deferred extension")
            self.seen["extension deferred"] += 1
        return granted

    def undo_extend(self, record: LeaseRecord, capacity: Sequence[int]) -> None:
        """Nobody took the extension that came after `capacity`."""
        self.driver.undo_extend(record, capacity)
        self.seen["extension undone"] += 1

    def append(self, record: LeaseRecord, tokens: int) -> None:
        """The request's stream goes on."""
        start = record.keys.num_tokens
        stop = min(start + tokens, STREAM_TOKENS)
        self.driver.append(record, stream_tokens(self.stream_of(record), start, stop))
        require(record.keys.num_tokens == max(start, stop), "tokens after an append", record.keys.num_tokens)

    def truncate(self, record: LeaseRecord, num_tokens: int, *, stream: int | None = None) -> int | Deferred:
        """Forget the tokens from `num_tokens` on; what follows is of `stream`. A refusal must change nothing."""
        before, kept = self.cache.snapshot(), (record.confirmed, record.keys.num_tokens)
        in_flight = [(transfer, names_of(transfer, self.streams)) for transfer in self.cache.transfers()]
        try:
            confirmed = self.driver.truncate(record, num_tokens)
        except (UsageError, CapacityError):
            require((record.confirmed, record.keys.num_tokens) == kept, "a refused truncation forgot something")
            self.require_unchanged(before, "a refused truncation")
            raise
        lost = [transfer for transfer, names in in_flight if names_of(transfer, self.streams) != names]
        require(not lost, "a copy lost its names", lost)
        if isinstance(confirmed, Deferred):
            require((record.confirmed, record.keys.num_tokens) == kept, "a deferred truncation forgot something")
            self.require_unchanged(before, "a deferred truncation")
            self.seen["truncation deferred"] += 1
            return confirmed
        require(record.length <= confirmed == record.confirmed <= num_tokens, "confirmed after truncation", confirmed)
        require(record.keys.num_tokens == num_tokens, "tokens after truncation", record.keys.num_tokens, num_tokens)
        if confirmed < kept[0]:
            self._checks.states(record, stream=self.stream_of(record))
        mine = stream_tokens(self.stream_of(record), 0, num_tokens)
        if stream is not None and mine == stream_tokens(stream, 0, num_tokens):
            self._stream_of_new(record, stream)
        self.seen["truncated"] += 1
        self.seen["truncated what was written"] += confirmed < kept[0]
        self.settle()
        return confirmed

    def confirm(
        self,
        record: LeaseRecord,
        num_tokens: int,
        *,
        publish_to: int | None = None,
        states: Sequence[int] = (),
        after: Fence | None = None,
    ) -> None:
        """Compute up to `num_tokens` tokens and say so."""
        if record.state is LeaseState.READY and num_tokens > record.confirmed:
            self._compute(record, num_tokens, states=states)
        self.driver.confirm(record, num_tokens, publish_to=publish_to, states=states, after=after)
        self.settle()

    def release(self, record: LeaseRecord) -> None:
        """The request leaves, and nobody else does."""
        others = [other for other in self.cache.leases() if other is not record]
        self.driver.release(record)
        require(record.state is LeaseState.RELEASED or record.is_finishing, "a lease that was released is still held")
        gone = [other.request.request_id for other in others if other.state is LeaseState.RELEASED]
        require(not gone, "leases were given back with another one", gone)
        self.settle()

    def finish(self, record: LeaseRecord) -> None:
        """The request is complete."""
        self.driver.finish(record)
        require(record.state is LeaseState.RELEASED or record.is_finishing, "a lease that was finished is still held")
        self.settle()

    # Helpers: admission.

    def _ask(
        self, request: AcquireRequest, *, stream: int, attempt: Callable[[AcquireRequest], LeaseRecord | Deferred]
    ) -> LeaseRecord | Deferred:
        layout = self._promises.layout(stream)
        before = self.cache.snapshot()
        busy = self.cache.live_leases or self.cache.unfinished_transfers or self.driver.waiting
        try:
            record = attempt(request)
        except CapacityError:
            self.require_unchanged(before, "a refused request")
            self.seen["never fits"] += 1
            raise
        if isinstance(record, Deferred):
            self.require_unchanged(before, "a deferred request")
            require(busy, f"deferred by {record.reason.value} though nothing is held")
            self.seen[f"deferred {record.reason.value}"] += 1
            return record
        self._stream_of_new(record, stream)
        self._promises.check(record, layout)
        self.settle()
        return record

    def _stream_of_new(self, record: LeaseRecord, stream: int) -> None:
        """The tokens are those of several streams so far; it goes on as this one."""
        self.look()
        self._stream_of[record.lease_id] = stream

    # Helpers: the forward pass.

    def _compute(self, record: LeaseRecord, num_tokens: int, *, states: Sequence[int]) -> None:
        """The forward pass: writes the blocks of tokens `[confirmed, num_tokens)`."""
        written: dict[int, Content | None] = {}
        for group in range(len(self.sizes)):
            written |= self._written(record, group=group, stop=num_tokens, states=states)
        self._checks.not_findable(written)
        for slot, content in written.items():
            require(slot, "there is no slot to compute into")
            self._checks.writable(slot, leases=self.leases.values(), readers={record.lease_id})
            self.contents.write(Tier.GPU, [slot], content=content)

    def _written(
        self, record: LeaseRecord, *, group: int, stop: int, states: Sequence[int]
    ) -> dict[int, Content | None]:
        """What each slot of one group holds once tokens `[confirmed, stop)` are computed; None for part of a block."""
        stream, fresh = self.stream_of(record), self.is_of_this_epoch(record)
        block = self.sizes[group]
        written: dict[int, Content | None] = {}
        if group in record.state_slots:
            working, capture = self.driver.state_slots(record, group=group)
            written[working] = None
            for length in states:
                digest = self.streams.digest(stream, group, length // block - 1)
                written[capture] = Content(group, digest, fresh=fresh)
            return written
        for position in range(record.confirmed // block, -(-stop // block)):
            is_full = (position + 1) * block <= stop
            content = Content(group, self.streams.digest(stream, group, position), fresh=fresh) if is_full else None
            written[self._slot(record, group=group, position=position)] = content
        return written

    def _slot(self, record: LeaseRecord, *, group: int, position: int) -> int:
        """The slot of a block; reads the table, which finishes the naming, only if it has no name yet."""
        slot = int(record.tables[group].view()[position])
        return slot or int(self.driver.block_ids(record, group=group)[position])
