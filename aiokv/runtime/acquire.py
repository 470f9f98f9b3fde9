"""Letting a request in: check its input, hash its tokens in slices, wait in line, be granted, wait for the loads.

Rules
- Nothing happens before the first step of the coroutine.
- Whatever ends the wait (a cancellation, a timeout, an error), everything is given back by a plain call before the
  exception goes on (law 4); a grant that came in the same turn is found in the future and given back too.
- A coroutine that is closed instead (by hand, or by the collector after its loop has died) gives nothing back itself:
  the finaliser of its lease leaves word.
- A request has its own copy of the caller's `BlockKeys`: what the caller does to them later changes no hash of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypedDict, Unpack, final

from aiokv.core.counters import Closing
from aiokv.core.lease_table import AcquireRequest
from aiokv.errors import AcquireTimeout, UsageError
from aiokv.model.keys import BlockKeys, MediaSpan
from aiokv.model.plan import Deferred
from aiokv.model.tokens import TokenIds, as_tokens
from aiokv.observe.stats import CancelStage
from aiokv.runtime.deadline import Deadline
from aiokv.runtime.lease import Lease
from aiokv.runtime.offload import Offloader
from aiokv.runtime.waiting import Rank, stand_in_line

__all__ = ["AcquireCall", "Intake", "KeyOptions", "RequestOptions", "Ticket", "prepare_keys"]

_SLICE_TOKENS: Final = 8192
"""Tokens converted and hashed in one step: under a millisecond."""


class KeyOptions(TypedDict, total=False):
    """What else is part of the identity of every block (law 10)."""

    salt: str | None
    """Tenants with different salts share nothing."""
    adapter: str | None
    """Name of the adapter (LoRA) that computes the KV."""
    media: Iterable[MediaSpan]
    """Images and the like, by digest and position; part of the blocks they overlap and of all that follow."""


class RequestOptions(KeyOptions, total=False):
    """What a request may say beside its id and tokens."""

    reserve_tokens: int
    """Tokens to be generated, for which blocks are claimed as well."""
    first_chunk: int | None
    """Windowed groups claim their coverage and so many tokens only; `extend` claims the rest."""
    align: int
    """Hits end at multiples of so many tokens."""
    priority: int
    """Lower numbers are admitted first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Intake:
    """What the caller asked for, checked at construction; `UsageError` names what is wrong."""

    request_id: str
    token_ids: TokenIds | BlockKeys
    salt: str | None = None
    adapter: str | None = None
    media: Iterable[MediaSpan] = ()
    reserve_tokens: int = 0
    first_chunk: int | None = None
    align: int = 1
    priority: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise UsageError(f"request_id must be a non-empty string, not {self.request_id!r}")
        _check_whole("reserve_tokens", self.reserve_tokens, at_least=0)
        _check_whole("align", self.align, at_least=1)
        if self.first_chunk is not None:
            _check_whole("first_chunk", self.first_chunk, at_least=1)
        if not isinstance(self.priority, int) or isinstance(self.priority, bool):
            raise UsageError(f"priority must be an integer, not {self.priority!r}")
        if not isinstance(self.media, Iterable):
            raise UsageError(f"media must be MediaSpan values, not {self.media!r}")
        object.__setattr__(self, "media", tuple(self.media))
        if self.has_keys and (self.salt is not None or self.adapter is not None or self.media):
            raise UsageError("salt, adapter and media belong to the BlockKeys: give them to kv.keys()")

    @property
    def identity(self) -> KeyOptions:
        """What the hashes depend on beside the tokens."""
        return {"salt": self.salt, "adapter": self.adapter, "media": self.media}

    @property
    def has_keys(self) -> bool:
        """Whether the tokens came as `BlockKeys`."""
        return isinstance(self.token_ids, BlockKeys)

    def request(self, keys: BlockKeys, *, hash_block_size: int) -> AcquireRequest:
        """The core's request; `UsageError` for an empty prompt or keys of another geometry."""
        if not keys.num_tokens:
            raise UsageError(f"request {self.request_id!r} has an empty prompt")
        if keys.hash_block_size != hash_block_size:
            raise UsageError(f"these keys hash blocks of {keys.hash_block_size} tokens, the geometry {hash_block_size}")
        return AcquireRequest(
            request_id=self.request_id,
            keys=keys,
            prompt_tokens=keys.num_tokens,
            reserve_tokens=self.reserve_tokens,
            first_chunk=self.first_chunk,
            align=self.align,
            priority=self.priority,
        )


async def prepare_keys(token_ids: TokenIds, *, hash_block_size: int, **identity: Unpack[KeyOptions]) -> BlockKeys:
    """Keys of a prompt, converted and hashed in slices so that the loop turns in between (law 8)."""
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
        keys = BlockKeys(token_ids, hash_block_size=hash_block_size, **identity)
        await hash_in_slices(keys)
        return keys
    keys = BlockKeys(token_ids[:0], hash_block_size=hash_block_size, **identity)
    for start in range(0, len(token_ids), _SLICE_TOKENS):
        if start:
            await asyncio.sleep(0)
        _append(keys, token_ids[start : start + _SLICE_TOKENS], whole=token_ids)
        await hash_in_slices(keys)
    return keys


def _append(keys: BlockKeys, part: TokenIds, *, whole: TokenIds) -> None:
    try:
        keys.append(part)
    except UsageError:
        as_tokens(whole)  # says at which position of the prompt
        raise


async def hash_in_slices(keys: BlockKeys) -> None:
    """Hash what is missing, a slice a turn."""
    while keys.hash_more(max(_SLICE_TOKENS // keys.hash_block_size, 1)):  # noqa: ASYNC110  # a slice a turn
        await asyncio.sleep(0)


@final
class Ticket:
    """One request on its way in. A deadline is needed by the coroutines only."""

    __slots__ = ("_deadline", "_intake", "_offloader")

    def __init__(self, offloader: Offloader, intake: Intake, *, deadline: Deadline | None = None) -> None:
        self._offloader = offloader
        self._intake = intake
        self._deadline = deadline

    def try_acquire(self) -> Lease | Deferred:
        """Admit now, unless somebody waits who comes first. Hashes what is missing in one go."""
        keys = self._intake.token_ids
        if isinstance(keys, BlockKeys):
            keys.hash_more(keys.num_blocks)
        else:
            keys = BlockKeys(keys, hash_block_size=self._hash_block_size, **self._intake.identity)
        return self._try_in_turn(self._request(keys))

    async def admit(self) -> Lease:
        """Hash, wait in line, be granted: the lease is pinned and reserved, its loads are running."""
        keys = self._intake.token_ids
        if isinstance(keys, BlockKeys):
            await hash_in_slices(keys)
        else:
            keys = await prepare_keys(keys, hash_block_size=self._hash_block_size, **self._intake.identity)
        request = self._request(keys)
        self._offloader.enter_for_intake()
        granted = self._try_in_turn(request)
        return granted if isinstance(granted, Lease) else await self._wait_in_line(request)

    async def acquire(self) -> Lease:
        """`admit`, then wait until the loads have ended."""
        lease = await self.admit()
        try:
            await lease.wait_ready(self._due)
        except GeneratorExit:
            raise
        except BaseException as error:
            self._count_cancellation(error, stage=CancelStage.INFLIGHT)
            lease.close(Closing.CANCELLED)
            raise
        return lease

    def _try_in_turn(self, request: AcquireRequest) -> Lease | Deferred:
        offloader = self._offloader
        offloader.core.check(request)
        if offloader.is_quiet or offloader.queue.blocks(rank=Rank.ADMISSION, priority=request.priority):
            return offloader.core.defer_queued()
        return self._try_now(request)

    def _try_now(self, request: AcquireRequest) -> Lease | Deferred:
        result = self._offloader.try_admit(request)
        if isinstance(result, Deferred):
            return result
        return Lease(self._offloader, result)

    async def _wait_in_line(self, request: AcquireRequest) -> Lease:
        try:
            return await stand_in_line(
                self._offloader.queue,
                partial(self._try_now, request),
                future=self._offloader.loop.create_future(),
                deadline=self._due,
                rank=Rank.ADMISSION,
                priority=request.priority,
                give_back=_cancel,
                on_leave=self._offloader.serve_soon,
            )
        except BaseException as error:
            self._count_cancellation(error, stage=CancelStage.QUEUED)
            raise

    def _request(self, keys: BlockKeys) -> AcquireRequest:
        return self._intake.request(keys.copy(), hash_block_size=self._hash_block_size)

    def _count_cancellation(self, error: BaseException, *, stage: CancelStage) -> None:
        if isinstance(error, asyncio.CancelledError | AcquireTimeout):
            self._offloader.stats.cancellations[stage] += 1

    @property
    def _hash_block_size(self) -> int:
        return self._offloader.core.geometry.hash_block_size

    @property
    def _due(self) -> Deadline:
        if self._deadline is None:
            raise UsageError("a ticket without a deadline cannot wait")
        return self._deadline


@final
class AcquireCall(Coroutine[Any, Any, Lease]):
    """What `acquire` and `admit` return: a coroutine to be awaited or scheduled, and an async context manager.

    As a context manager it finishes the lease on a clean exit and releases it on an exception.
    """

    __slots__ = ("_coroutine", "_lease")

    def __init__(self, coroutine: Coroutine[Any, Any, Lease]) -> None:
        self._coroutine = coroutine
        self._lease: Lease | None = None

    def send(self, value: object) -> object:
        """See `collections.abc.Coroutine`."""
        return self._coroutine.send(value)

    def throw(self, *args: Any) -> object:  # noqa: ANN401  # the three forms that coroutines take
        """See `collections.abc.Coroutine`."""
        return self._coroutine.throw(*args)

    def close(self) -> None:
        """See `collections.abc.Coroutine`."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Lease]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> Lease:
        self._lease = await self._coroutine
        return self._lease

    async def __aexit__(self, *exc_info: object) -> None:
        lease, self._lease = self._lease, None
        if lease is None:
            return
        _, error, _ = exc_info
        if error is None:
            lease.finish()
        elif isinstance(error, GeneratorExit):
            lease.abandon()
        else:
            lease.close(Closing.CANCELLED if isinstance(error, asyncio.CancelledError) else Closing.RELEASED)


def _cancel(lease: Lease) -> None:
    lease.close(Closing.CANCELLED)


def _check_whole(name: str, value: object, *, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise UsageError(f"{name} must be a whole number of at least {at_least}, not {value!r}")
