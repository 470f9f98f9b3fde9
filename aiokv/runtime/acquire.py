"""What a caller asks for: its input is checked and its tokens are hashed; `entry.py` lets it in.

Rules
- Nothing happens before the first step of the coroutine.
- A request has its own copy of the caller's `BlockKeys`: what the caller does to them later changes no hash of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import final

from aiokv.core.lease_table import AcquireRequest
from aiokv.errors import UsageError
from aiokv.model.keys import BlockKeys
from aiokv.model.numbers import is_whole
from aiokv.model.plan import Deferred
from aiokv.observe.stats import CancelStage
from aiokv.runtime.arguments import Prompt, check_name, check_whole
from aiokv.runtime.deadline import Deadline
from aiokv.runtime.entry import Entry
from aiokv.runtime.hashing import KeyOptions, hash_in_slices, prepare_keys
from aiokv.runtime.lease import Lease
from aiokv.runtime.offload import Offloader
from aiokv.runtime.turns import foresee

__all__ = ["Intake", "RequestOptions", "Ticket"]


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
class Intake(Prompt):
    """What the caller asked for, checked at construction; `UsageError` names what is wrong."""

    request_id: str
    reserve_tokens: int = 0
    first_chunk: int | None = None
    align: int = 1
    priority: int = 0

    def __post_init__(self) -> None:
        check_name("request_id", self.request_id)
        check_whole("reserve_tokens", self.reserve_tokens)
        check_whole("align", self.align, at_least=1)
        if self.first_chunk is not None:
            check_whole("first_chunk", self.first_chunk, at_least=1)
        if not is_whole(self.priority):
            raise UsageError(f"priority must be an integer, not {self.priority!r}")
        Prompt.__post_init__(self)  # not super(): `slots` replaces the class that it would look for

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


@final
class Ticket:
    """One request on its way in. A deadline is needed by the coroutines only."""

    __slots__ = ("_core", "_deadline", "_entry", "_intake")

    def __init__(self, offloader: Offloader, intake: Intake, *, deadline: Deadline | None = None) -> None:
        self._entry = Entry(offloader, make_lease=Lease)
        self._core = offloader.core
        self._intake = intake
        self._deadline = deadline

    def traced(self) -> AbstractContextManager[object]:
        """Around `admit` or `acquire`: a span, where there are spans."""
        return self._entry.traced(self._intake.request_id)

    def try_acquire(self) -> Lease | Deferred:
        """Admit now, unless somebody waits who comes first. Hashes what is missing in one go."""
        keys = self._intake.token_ids
        if isinstance(keys, BlockKeys):
            keys.hash_more(keys.num_blocks)
            keys = keys.copy()
        else:
            keys = BlockKeys(keys, hash_block_size=self._core.geometry.hash_block_size, **self._intake.identity)
        return self._entry.try_now(self._request(keys))

    async def admit(self) -> Lease:
        """Hash, wait in line, be granted: the lease is pinned and reserved, its loads are running."""
        return await self._entry.admit(await self._looked_up(), deadline=self._due)

    async def acquire(self) -> Lease:
        """`admit`, then wait until the loads have ended."""
        return await self._entry.acquire(await self._looked_up(), deadline=self._due)

    async def _looked_up(self) -> AcquireRequest:
        try:
            request = await self._hashed()
            await foresee(self._core, request.keys)
        except BaseException as error:
            self._entry.count_cancellation(error, stage=CancelStage.LOOKUP)
            raise
        return request

    async def _hashed(self) -> AcquireRequest:
        keys = self._intake.token_ids
        if isinstance(keys, BlockKeys):
            await hash_in_slices(keys)
            keys = keys.copy()
        else:
            keys = await prepare_keys(
                keys, hash_block_size=self._core.geometry.hash_block_size, **self._intake.identity
            )
        return self._request(keys)

    def _request(self, keys: BlockKeys) -> AcquireRequest:
        return self._intake.request(keys, hash_block_size=self._core.geometry.hash_block_size)

    @property
    def _due(self) -> Deadline:
        if self._deadline is None:
            raise UsageError("a ticket without a deadline cannot wait")
        return self._deadline
