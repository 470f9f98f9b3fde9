"""One round: the prefix lies in the CPU tier alone, clients ask for it, and hold what they got until all have it."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from aiokv import BlockKeys, KVRuntime, Lease, Tier
from aiokv.backends.host import Stall
from aiokv.cli.bench.backends import TallyingBackend
from aiokv.cli.bench.convoy.settings import BLOCK, GEOMETRY, GROUP, ConvoySettings
from aiokv.cli.bench.kv_bytes import Codes, KvBytes, codes_of

__all__ = ["Rounds", "Tally"]

_TENANT = 0
_VOCABULARY = 50_000


@dataclass(slots=True, kw_only=True)
class Tally:
    """What the rounds of one kind saw, all together."""

    rounds: int = 0
    seconds: list[float] = field(default_factory=list)
    """Per client, from the moment all asked until its prefix was valid."""
    served: int = 0
    cancelled: int = 0
    """Leaders that were cancelled while the copy they had asked for was running."""
    batches: int = 0
    copies: int = 0
    """Block copies that the backend was asked for."""
    most_copies_of_a_block: int = 0
    loaded_bytes: int = 0
    """As the runtime's own metric counts them."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Of the prompts that were served, by source."""
    wrong_blocks: int = 0
    """Blocks of the prefix that do not hold what was computed for it, or clients that were given others."""


@final
class Rounds:
    """Runs rounds on one runtime."""

    __slots__ = ("_backend", "_codes", "_kv", "_memory", "_prefix", "_settings", "_stalls")

    def __init__(
        self,
        kv: KVRuntime,
        *,
        memory: KvBytes,
        backend: TallyingBackend,
        stalls: dict[int, Stall],
        settings: ConvoySettings,
    ) -> None:
        self._kv = kv
        self._memory = memory
        self._backend = backend
        self._stalls = stalls
        self._settings = settings
        source = random.Random(0)
        self._prefix = [source.randrange(_VOCABULARY) for _ in range(settings.blocks * BLOCK)]
        self._codes: Codes = codes_of(_TENANT, self._prefix)

    async def compute_prefix(self) -> None:
        """Let one request compute it and be stored."""
        async with self._kv.acquire("the prefix", self._prefix) as lease:
            length = len(self._prefix)
            self._memory.write(GROUP, lease.block_ids(GROUP), codes=self._codes, start=0, stop=length)
            lease.confirm(length)
        await self._kv.drain()

    async def crowd(self, clients: int, *, tally: Tally) -> None:
        """So many clients ask at once, with tokens, which are hashed for each of them."""
        await self._crowd([self._prompt(number) for number in range(clients)], tally=tally)

    async def prepared_crowd(self, clients: int, *, tally: Tally) -> None:
        """So many clients ask at once, with keys that were prepared before."""
        prompts = [await self._kv.prepare_keys(self._prompt(number)) for number in range(clients)]
        await self._crowd(prompts, tally=tally)

    async def _crowd(self, prompts: Sequence[list[int] | BlockKeys], *, tally: Tally) -> None:
        await self._empty_the_gpu_tier()
        before = self._loaded_bytes()
        began = time.perf_counter()
        asking = [asyncio.create_task(self._ask(prompt, began, tally=tally)) for prompt in prompts]
        self._look(await asyncio.gather(*asking), tally=tally)
        await self._note_copies(tally, before=before)

    async def leaderless(self, clients: int, *, tally: Tally) -> None:
        """So many clients ask at once; the first, whose copy the others have joined, is cancelled while it runs."""
        await self._empty_the_gpu_tier()
        before = self._loaded_bytes()
        stall = self._stalls[self._backend.submitted] = Stall()
        try:
            began = time.perf_counter()
            leader, *others = [self._prompt(number) for number in range(clients)]
            first = asyncio.create_task(self._ask(leader, began, tally=Tally()))
            await self._until_copying()
            asking = [asyncio.create_task(self._ask(prompt, began, tally=tally)) for prompt in others]
            while self._kv.core.live_leases < clients:  # noqa: ASYNC110  # nobody tells when
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first])
            tally.cancelled += first.cancelled()
        finally:
            stall.release.set()
        self._look(await asyncio.gather(*asking), tally=tally)
        await self._note_copies(tally, before=before)

    async def _until_copying(self) -> None:
        while not self._backend.batches:  # noqa: ASYNC110  # nobody tells when
            await asyncio.sleep(0)

    async def _empty_the_gpu_tier(self) -> None:
        await self._kv.drain()
        await self._kv.reset(Tier.GPU)
        slots = range(1, self._settings.gpu_blocks)
        self._memory.poison(GROUP, slots, start=0, stop=len(slots) * BLOCK)
        self._backend.start()

    def _prompt(self, number: int) -> list[int]:
        """The prefix and one client's question."""
        return self._prefix + [_VOCABULARY + number] * BLOCK

    async def _ask(self, prompt: list[int] | BlockKeys, began: float, *, tally: Tally) -> Lease:
        lease = await self._kv.acquire("client", prompt)
        tally.seconds.append(time.perf_counter() - began)
        return lease

    def _look(self, leases: list[Lease], *, tally: Tally) -> None:
        """All hold the same blocks now, which hold what was computed."""
        tables = [lease.block_ids(GROUP)[: self._settings.blocks] for lease in leases]
        verdict = self._memory.compare(GEOMETRY.groups[0], tables[0], codes=self._codes, length=len(self._prefix))
        tally.wrong_blocks += verdict.wrong + sum(int((table != tables[0]).sum()) for table in tables)
        for lease in leases:
            hit = lease.delivered
            tally.served += lease.prefix_tokens == len(self._prefix)
            tally.tokens.update(
                gpu=hit.gpu_tokens, cpu=hit.cpu_tokens, compute=hit.compute_tokens, prompt=hit.prompt_tokens
            )
            lease.release()

    async def _note_copies(self, tally: Tally, *, before: int) -> None:
        await self._kv.drain()
        tally.rounds += 1
        tally.batches += self._backend.batches
        tally.copies += int(self._backend.loads.sum())
        tally.most_copies_of_a_block = max(tally.most_copies_of_a_block, int(self._backend.loads.max()))
        tally.loaded_bytes += self._loaded_bytes() - before

    def _loaded_bytes(self) -> int:
        samples = (sample for family in self._kv.collector.collect() for sample in family.samples)
        return int(
            sum(s.value for s in samples if s.name == "aiokv_transfer_bytes_total" and s.labels["direction"] == "load")
        )
