"""`KVRuntime`: the two tiers of one engine, awaited from one event loop.

Life cycle: new -> open (arenas ready) -> closing (no intake, drained under a deadline) -> closed. The drain is a task
of the loop; whoever awaits `aclose` only waits for it, so that a cancelled scope does not stop it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Self, Unpack, final

import anyio.to_thread

from aiokv.core.audit import Audit, Snapshot
from aiokv.core.cache import CacheState
from aiokv.core.fences import Fence
from aiokv.errors import ConfigError, UsageError
from aiokv.model.ids import Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.pinning import PinStatus
from aiokv.model.plan import Declined, Deferred, Outcome
from aiokv.model.tokens import TokenIds
from aiokv.observe.metrics import Collector
from aiokv.observe.publisher import DEFAULT_BACKLOG
from aiokv.runtime.acquire import Intake, RequestOptions, Ticket
from aiokv.runtime.backend_choice import build_core, choose_backend, describe_runtime, plan_layout
from aiokv.runtime.config import RuntimeConfig
from aiokv.runtime.deadline import Deadline
from aiokv.runtime.entry import AcquireCall
from aiokv.runtime.event_stream import EventStream
from aiokv.runtime.fencing import ComputeStream, Fencing
from aiokv.runtime.hashing import KeyOptions, prepare_keys
from aiokv.runtime.hint import HintOptions, HintRequest, ResidenceHint, keep
from aiokv.runtime.lease import Lease
from aiokv.runtime.offload import Offloader
from aiokv.runtime.opening import Opening, make_offloader
from aiokv.runtime.pinning_waits import quiesced, store_once_pinned, when_pinning_settled
from aiokv.runtime.shutdown import Shutdown
from aiokv.runtime.tracer_guard import find_tracer
from aiokv.runtime.transfer_stream import TransferStream
from aiokv.runtime.turns import foresee

__all__ = ["KVRuntime"]


@final
class KVRuntime:
    """Keeps the KV blocks of one engine in two tiers and lets its requests await them.

    `arenas` names, per group, the engine's KV tensors (see `aiokv.backends.arena`); a backend without memory needs
    none. Use it as an async context manager, or call `open()` and `aclose()`. It belongs to the event loop that
    opened it.
    """

    __slots__ = ("_arenas", "_config", "_offloader", "_opened", "_shutdown", "collector")

    def __init__(self, config: RuntimeConfig, *, arenas: Mapping[str, Sequence[object]] | None = None) -> None:
        if not isinstance(config, RuntimeConfig):
            raise ConfigError(f"config must be a RuntimeConfig, not {type(config).__name__}")
        if arenas is not None and not isinstance(arenas, Mapping):
            raise ConfigError(f"arenas must map each group's name to its tensors, not be a {type(arenas).__name__}")
        self._config = config
        self._arenas = dict(arenas or {})
        self._offloader: Offloader | None = None
        self._shutdown: Shutdown | None = None
        self._opened = False
        self.collector = Collector()
        """A prometheus_client collector: register it where the host wants its metrics."""

    # Life.

    async def open(self) -> None:
        """Make the arenas, in a worker thread, and start. `ConfigError` for what cannot be used; once only."""
        if self._opened:
            raise UsageError("an aiokv runtime is opened once")
        self._opened = True
        layout = plan_layout(self._config, self._arenas)
        backend = choose_backend(self._config, device=layout.device)
        core = await anyio.to_thread.run_sync(partial(build_core, self._config, layout=layout))
        fencing = Fencing(core, backend=backend, compute=ComputeStream(self._config.compute_stream))
        tracer = await find_tracer(self._config.tracer_provider)
        await Opening(backend, layout).run()
        offloader = make_offloader(self._config, core=core, backend=backend, fencing=fencing, tracer=tracer)
        store_once_pinned(offloader)
        self._shutdown = Shutdown(offloader)
        self._offloader = offloader
        self.collector.attach(core, stats=offloader.stats, facts=describe_runtime(offloader, layout))
        try:
            fencing.check_compute_stream()
        except Exception:  # the backend may be lost by now, too
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Stop intake, give leases back, drain under `close_grace_s`, free the arenas. Idempotent, safe to cancel."""
        if self._shutdown is not None:
            await self._shutdown.close(grace_s=self._config.close_grace_s)

    def close(self) -> None:
        """Finish what a dead loop left: waits a few seconds for running copies, then frees or leaks. Idempotent."""
        if self._shutdown is not None:
            self._shutdown.close_now()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def ready(self) -> None:
        """Wait until the CPU arena is pinned, or known to stay unpinned (`pinning`); `UsageError` if closed before."""
        offloader = self._entered()
        if await when_pinning_settled(offloader.backend.pinning):
            offloader.enter_for_intake()

    @property
    def pinning(self) -> PinStatus:
        """How the CPU arena stands with the device, and how far it has got."""
        return self._entered().backend.pinning.status

    # Requests.

    def acquire(
        self,
        request_id: str,
        token_ids: TokenIds | BlockKeys,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AcquireCall:
        """Pin what the prompt hits, reserve what it needs, wait for its loads: coroutine and async context manager.

        `options` are those of `RequestOptions`; `timeout` in seconds covers waiting for capacity and loading. Raises
        `UsageError`, `CapacityError`, `AcquireTimeout`; whatever it raises, everything has been given back.
        """
        make_intake = partial(Intake, request_id=request_id, token_ids=token_ids, **options)
        return AcquireCall(self._let_in(Ticket.acquire, make_intake, timeout=timeout))

    def admit(
        self,
        request_id: str,
        token_ids: TokenIds | BlockKeys,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AcquireCall:
        """Like `acquire`, but back as soon as the request is pinned and reserved; then `await lease.ready()`."""
        make_intake = partial(Intake, request_id=request_id, token_ids=token_ids, **options)
        return AcquireCall(self._let_in(Ticket.admit, make_intake, timeout=timeout))

    def try_acquire(
        self, request_id: str, token_ids: TokenIds | BlockKeys, **options: Unpack[RequestOptions]
    ) -> Lease | Deferred:
        """For schedulers that poll: a lease whose loads are running, or `Deferred` and nothing has changed.

        Hashes raw tokens in one go: pass keys from `prepare_keys` to keep the loop free. Its blocks are named in the
        next turns, `is_named` tells when. Worth another try when `capacity_generation` has changed.
        """
        offloader = self._entered()
        offloader.enter_for_intake()
        return Ticket(offloader, Intake(request_id=request_id, token_ids=token_ids, **options)).try_acquire()

    @property
    def capacity_generation(self) -> int:
        """Changes whenever GPU capacity has been given back, or blocks were confirmed that others may share."""
        return self._entered().core.capacity_generation

    def keys(self, token_ids: TokenIds, **identity: Unpack[KeyOptions]) -> BlockKeys:
        """Keys of a prompt, hashed when first needed, in one go. They grow with `append` and may be used many times."""
        return BlockKeys(token_ids, hash_block_size=self._config.geometry.hash_block_size, **identity)

    async def prepare_keys(self, token_ids: TokenIds, **identity: Unpack[KeyOptions]) -> BlockKeys:
        """Like `keys`, converted and hashed in slices, so that the loop turns in between. Where the blocks of a long
        prompt are is found out beforehand as well, which makes `try_acquire` shorter.
        """
        keys = await prepare_keys(token_ids, hash_block_size=self._config.geometry.hash_block_size, **identity)
        if self._offloader is not None:
            await foresee(self._offloader.core, keys)
        return keys

    def fence(self, stream: object = None) -> Fence | None:
        """A point of the engine's stream (default: `compute_stream`), for the `after=` of a lease's calls: it stands
        for all that was launched there so far. In host memory it is None, which says the same.

        `UsageError` inside `quiesce` and for what is no stream; `StreamCaptured` for one that is being captured.
        """
        offloader = self._entered()
        offloader.enter_for_intake()
        if offloader.is_quiet:
            raise UsageError("no fence can be taken inside quiesce(): take it before or after the capture")
        return offloader.fencing.record(stream)

    # Residence hints.

    def keep(self, token_ids: TokenIds | BlockKeys, **options: Unpack[HintOptions]) -> ResidenceHint | Declined:
        """Keep a prefix in a tier while the answer is held: `with kv.keep(system_prompt, tenant="a") as hint:`.

        It holds what is resident of it, and what becomes so later; a request that needs the room revokes it. `options`
        are those of `HintOptions`. `Declined(QUOTA)` if it, or what the tenant holds with it, is more than `hint_quota`
        of the tier, `Declined(POOL_FULL)` if its blocks are promised to requests; nothing has changed then. Hashes raw
        tokens in one go: pass keys from `prepare_keys` to keep the loop free.
        """
        offloader = self._entered()
        offloader.enter_for_intake()
        return keep(offloader, HintRequest(token_ids=token_ids, **options))

    def revoke_hints(self, *, tenant: str | None = None) -> int:
        """Take everything back from all hints, or from those of one tenant; returns from how many. For operators."""
        offloader = self._entered()
        hints = offloader.core.hints
        revoked = [record for record in hints.live() if tenant in (None, record.tenant)]
        for record in revoked:
            hints.revoke(record)
        offloader.progress()
        return len(revoked)

    # Ranks in other processes.

    def transfers(self) -> TransferStream:
        """The copies that remote ranks have to make, each handed out once: `async for transfer in kv.transfers()`.

        Each remote rank makes them in its own arenas; its answer goes to `report`. `UsageError` if no rank is remote.
        """
        offloader = self._entered()
        if not offloader.outlet.remote_ranks:
            raise UsageError("every rank of this runtime is local: its backend makes all copies")
        return TransferStream(offloader)

    def report(  # noqa: PLR0917  # as in the contract
        self, transfer_id: int, rank: int, outcome: Outcome, *, corrupt: Collection[int] = ()
    ) -> None:
        """A remote rank's copies of a transfer have ended: OK, CORRUPT, FAILED, or LOST (they may still be running).

        CORRUPT is for loads: `corrupt` names the copies, by their place in the batch, whose CPU block the rank found
        changed. Those blocks are findable no more from now on; what was hit in them is computed again.

        In any order, from the loop's thread; the last rank ends the transfer, the worst outcome counts. The same report
        again changes nothing. `UsageError`, and nothing has changed, for an unknown or local rank, a transfer that is
        unknown or has ended, an unknown copy, and for something else than the rank reported before.
        """
        self._entered().transfers.report(transfer_id, rank=rank, outcome=outcome, corrupt=corrupt)

    def lose_rank(self, rank: int) -> None:
        """A remote rank is gone: what it has not reported is LOST there, and nothing is copied any more."""
        self._entered().transfers.lose_rank(rank)

    # The whole.

    async def reset(self, tier: Tier | None = None) -> None:
        """Forget every block of a tier (default: both); back when it answers nothing and its slots are swept.

        While the runtime is quiet nothing is swept: then it is back at once, and the slots come back afterwards.
        """
        offloader = self._entered()
        if tier is not None and not isinstance(tier, Tier):
            raise UsageError(f"tier must be a Tier or None, not {tier!r}")
        offloader.core.reset(tuple(Tier) if tier is None else (tier,))
        offloader.progress()
        while offloader.core.is_sweeping and not offloader.is_quiet:  # noqa: ASYNC110  # the sweep itself runs a slice a turn
            await asyncio.sleep(0)

    async def drain(self) -> None:
        """Wait until nothing is queued, sliced or running. Intake goes on."""
        await self._entered().when_drained()

    @asynccontextmanager
    async def quiesce(self) -> AsyncIterator[None]:
        """No call of the backend inside, for the capture of a CUDA graph: what is due waits, fences of leases too.

        Nothing is polled, pinned or submitted. Do not await inside what waits for that: a drain, a request, an
        extension, loads. `UsageError` once closing.
        """
        async with quiesced(self._entered()):
            yield

    def events(self, *, backlog: int = DEFAULT_BACKLOG) -> EventStream:
        """Cache events from now on: `async with kv.events() as stream: async for event in stream`.

        Keeps `backlog` events for a slow reader, who then gets an `EventsDropped`; the cache never waits for it.
        """
        return EventStream(self._entered(), backlog=backlog)

    def snapshot(self) -> Snapshot:
        """The state as a frozen value without counters and times: equal states print equal. Looks at every slot."""
        return self._entered().core.snapshot()

    def audit(self) -> Audit:
        """Who holds which pins and reservations since when, and which invariants are violated, in one hold of the loop.

        Looks at every slot: `audit_sliced` lets the loop turn. Raises nothing of its own. Times are `time.monotonic()`.
        """
        offloader = self._entered()
        return offloader.core.audit(offloader.clock.read())

    async def audit_sliced(self) -> Audit:
        """`audit`, a slice a turn, while requests go on: what `aiokv.core.audit_run` says of the answer holds.

        In short: whatever it reports was so at one moment, what was wrong all the while is reported, holders and claims
        are those of the end. May be cancelled, and asked for several times at once.
        """
        offloader = self._entered()
        with offloader.core.audit_in_slices(clock=offloader.clock.read()) as run:
            while run.run_slice():  # noqa: ASYNC110  # a slice a turn
                await asyncio.sleep(0)
            return run.result

    def progress(self) -> None:
        """Carry out what the core wants done, after its `placement` was used by hand."""
        self._entered().progress()

    @property
    def core(self) -> CacheState:
        """The synchronous core, for `aiokv.testing` and metrics; not to be changed behind the runtime's back."""
        return self._entered().core

    @property
    def config(self) -> RuntimeConfig:
        """As given."""
        return self._config

    async def _let_in(
        self, how: Callable[[Ticket], Awaitable[Lease]], make_intake: Callable[[], Intake], *, timeout: float | None
    ) -> Lease:
        offloader = self._entered()
        offloader.enter_for_intake()
        intake = make_intake()
        deadline = Deadline(offloader.loop, request_id=intake.request_id, timeout=timeout)
        ticket = Ticket(offloader, intake, deadline=deadline)
        if offloader.tracing is None:  # asked here, so that who is not traced pays for no more than that
            return await how(ticket)
        with ticket.traced():
            return await how(ticket)

    def _entered(self) -> Offloader:
        if self._offloader is None:
            raise UsageError("this aiokv runtime is not open: use 'async with' or await open()")
        self._offloader.enter()
        return self._offloader
