"""One lease and the model behind it: what is read is compared first, what is written is written token by token.

A session never waits without a deadline: who holds blocks and waits for more may wait for somebody who does the same.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Final, final

from aiokv import Deferred, Lease, UsageError
from aiokv.cli.bench.kv_bytes import Codes, codes_of
from aiokv.cli.bench.soak.settings import LONGEST_TOKENS
from aiokv.cli.bench.soak.states import States
from aiokv.cli.bench.soak.world import Tenant, World, turns

__all__ = ["Session"]

_EXTEND_TIMEOUT_S: Final = 0.3
_RESUME_TIMEOUT_S: Final = 2.0
_VOCABULARY: Final = 50_000


@final
class Session:
    """Computes on one lease at a time; after a preemption on another one over the same tokens."""

    __slots__ = ("_codes", "_random", "_states", "_tenant", "_world", "lease", "tokens")

    def __init__(
        self, world: World, *, lease: Lease, tenant: Tenant, tokens: Sequence[int], source: random.Random
    ) -> None:
        self._world = world
        self._tenant = tenant
        self._random = source
        self.lease = lease
        self.tokens = list(tokens)
        self._codes = self._coded()
        self._states = States(world, source=source)

    def arrive(self) -> None:
        """The lease is ready: everything in its tables before its prefix is compared, everything after it spoilt."""
        delivered = self._world.call(lambda: self.lease.delivered)
        self._world.seen["planned_again"] += delivered != self.lease.hit
        self._world.seen["gpu_tokens"] += delivered.gpu_tokens
        self._world.seen["cpu_tokens"] += delivered.cpu_tokens
        self._states.take_up(self.lease, codes=self._codes)
        self.compare()
        self._poison(self.lease.confirmed_tokens)

    def compare(self) -> None:
        """Every block that holds confirmed tokens, and so whatever the next query reads."""
        length = self.lease.confirmed_tokens
        self._states.compare(self.lease, codes=self._codes)
        for group in self._world.memory.positional:
            table = self._world.call(self.lease.block_ids, group.name)
            verdict = self._world.memory.compare(group, table, codes=self._codes, length=length)
            self._world.seen["compared_blocks"] += verdict.compared
            self._world.note_corrupt(verdict.wrong, where=f"{self.lease!r}, group {group.name}, {length} tokens")

    async def prefill(self) -> None:
        """Compute what is known and not yet confirmed, in some chunks; others run in between."""
        while (done := self.lease.confirmed_tokens) < len(self.tokens):
            stop = min(len(self.tokens), done + self._random.choice((32, 100, 400)))
            self._states.ask_for_captures(self.lease)
            await self._make_room(stop)
            await self._compute(done, stop)

    async def generate(self) -> None:
        """Some tokens more, as a decoder or a speculating one makes them."""
        count = min(self._random.choice((1, 5, 40)), LONGEST_TOKENS - len(self.tokens))
        if count <= 0:
            return
        made = [self._random.randrange(_VOCABULARY) for _ in range(count)]
        self._world.call(self.lease.append, made)
        self.tokens += made
        self._codes = self._coded()
        await self.prefill()
        self._world.seen["generated"] += count

    async def edit(self) -> None:
        """Forget some of the last tokens, rejected or rewritten ones, and compute others in their place."""
        least = max(self.lease.prefix_tokens, 1)
        keep = self._choose_length(least)
        before = self.lease.confirmed_tokens
        try:
            confirmed = self._world.call(self.lease.truncate, keep)
        except UsageError:  # a window has given back what is read from there on, or no state of that length is held
            self._world.seen["truncations_refused"] += 1
            return
        if isinstance(confirmed, Deferred):
            self._world.seen["truncations_deferred"] += 1
            return
        self._world.seen["truncated"] += 1
        del self.tokens[keep:]
        self._codes = self._coded()
        if confirmed < before:
            self._states.take_up(self.lease, codes=self._codes)
        self.compare()
        self._poison(confirmed)
        await self.generate()

    async def fork(self) -> None:
        """Let a second lease go on from here with tokens of its own, while this one goes on too."""
        at = self._random.choice((None, max(1, self.lease.confirmed_tokens - self._random.randrange(40))))
        try:
            forked = self._world.call(self.lease.try_fork, f"{self.lease.request_id} forked", at=at)
        except UsageError:  # the GPU tier was reset since
            self._world.seen["forks_refused"] += 1
            return
        if isinstance(forked, Deferred):
            self._world.seen["forks_deferred"] += 1
            return
        self._world.seen["forked"] += 1
        try:
            tokens = self.tokens[: forked.num_tokens]
            other = Session(self._world, lease=forked, tenant=self._tenant, tokens=tokens, source=self._random)
            other.arrive()
            await other.prefill()
            await other.generate()
            self.compare()
            await self.generate()
            other.compare()
        finally:
            self._world.call(self._random.choice((forked.finish, forked.release)))

    async def step_back(self) -> None:
        """Be preempted, wait a little, and come back; the new lease is this session's from then on."""
        preempted = self._world.call(self.lease.preempt)
        self._world.seen["preempted"] += 1
        await asyncio.sleep(self._random.random() * 0.01)
        if self._random.random() < 0.3:
            resumed = self._world.call(preempted.try_resume)
            if not isinstance(resumed, Deferred):
                self.lease = resumed
                await self._world.wait(self.lease.ready(timeout=_RESUME_TIMEOUT_S))
                self._back()
                return
        self.lease = await self._world.wait(preempted.resume(timeout=_RESUME_TIMEOUT_S))
        self._back()

    def _back(self) -> None:
        self._world.seen["resumed"] += 1
        self.arrive()

    async def _compute(self, start: int, stop: int) -> None:
        for group in self._world.memory.positional:
            table = self._world.call(self.lease.block_ids, group.name)
            lost = self._world.memory.write(group.name, table, codes=self._codes, start=start, stop=stop)
            self._world.note_corrupt(lost, where=f"{self.lease!r}, group {group.name}: no block to write to")
        states = self._states.advance(self.lease, codes=self._codes, stop=stop)
        await turns(self._random.randrange(3))
        publish_to = self._random.choice((None, None, None, stop - stop % 64))
        self._world.call(self.lease.confirm, stop, publish_to=publish_to, states=states)
        self._world.seen["computed_tokens"] += stop - start
        if self._random.random() < 0.3:
            self.compare()

    def _choose_length(self, least: int) -> int:
        """How many tokens to keep; with recurrent groups often one whose state is held, as no other can be kept."""
        lengths = self._states.held_lengths(self.lease, least=least)
        if lengths and self._random.random() < 0.7:
            return self._random.choice(lengths)
        return max(least, len(self.tokens) - self._random.randrange(1, 60))

    async def _make_room(self, stop: int) -> None:
        """Blocks for all tokens before `stop`; a lease that claimed its first chunk only has to ask for them."""
        room = self.lease.capacity_tokens
        if room >= stop:
            return
        wanted = min(stop - room + self._random.choice((0, 0, 30)), LONGEST_TOKENS - room)
        if isinstance(self._world.call(self.lease.try_extend, wanted), Deferred):
            self._world.seen["extensions_waited"] += 1
            await self._world.wait(self.lease.extend(wanted, timeout=_EXTEND_TIMEOUT_S))
        self._world.seen["extended"] += 1
        self._poison(room)

    def _poison(self, start: int) -> None:
        """Spoil what is reserved and not computed, from token `start` on."""
        begin = max(start, self.lease.confirmed_tokens)
        for group in self._world.memory.positional:
            table = self._world.call(self.lease.block_ids, group.name)
            self._world.memory.poison(group.name, table, start=begin, stop=self.lease.capacity_tokens)

    def _coded(self) -> Codes:
        return codes_of(self._tenant.number, self.tokens)
