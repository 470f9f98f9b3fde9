"""Every prompt token of every admitted request is counted once, from the source the oracle gives (law 7).

Requests come in any order: they retry, are preempted and resumed, forked, cancelled, and their loads fail.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv import CacheGeometry, Deferred, KVRuntime, Lease, RuntimeConfig, Tier
from aiokv.testing import FakeBackend, exhaustive_hit, exhaustive_sources, make_resident
from tests.observe.support import Scrape
from tests.runtime.support import BLOCK, GEOMETRY, HYBRID, Case, finish_copies, granted, prompt, turns, until

GPU_BLOCKS = 257
HOLDER = 99
MOST_BLOCKS = 5
Layout = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, what is made resident for it, and what befalls it."""

    fate: str
    seed: int
    blocks: int
    extra: int
    letters: tuple[str, str]

    @property
    def tokens(self) -> list[int]:
        return prompt(self.blocks, seed=self.seed, extra=self.extra)


@dataclass(slots=True)
class Books:
    """What must have been counted: tokens and full blocks by source and phase."""

    geometry: CacheGeometry
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)
    blocks: Counter[tuple[str, str]] = field(default_factory=Counter)
    prompt_tokens: int = 0
    prompt_blocks: int = 0
    admitted: int = 0

    def admit(self, num_tokens: int, sources: tuple[str, ...], *, phase: str = "first") -> None:
        assert len(sources) == num_tokens
        self.admitted += 1
        self.prompt_tokens += num_tokens
        self.prompt_blocks += num_tokens // BLOCK
        for start in range(0, num_tokens, BLOCK):
            of_block = set(sources[start : start + BLOCK])
            assert len(of_block) == 1, "a prefix ends at the end of a block"
            if start + BLOCK <= num_tokens:
                self.blocks[of_block.pop(), phase] += 1
        self.tokens.update((source, phase) for source in sources)

    def expect(self, num_tokens: int, layout: Layout, *, phase: str = "first") -> None:
        """A request that finds this layout and gets all it is promised."""
        self.admit(num_tokens, tuple(exhaustive_sources(self.geometry, num_tokens, layout)), phase=phase)

    def check(self, kv: KVRuntime) -> None:
        scrape = Scrape(kv.collector)
        for name, expected, total in (
            ("aiokv_prompt_tokens_total", self.tokens, self.prompt_tokens),
            ("aiokv_prompt_blocks_total", self.blocks, self.prompt_blocks),
        ):
            found = Counter(
                {
                    (source, phase): int(scrape(name, source=source, phase=phase))
                    for source in ("gpu", "cpu", "compute")
                    for phase in ("first", "resumed")
                }
            )
            assert +found == +expected, name
            assert found.total() == total, name
        assert scrape("aiokv_leases_opened_total") == self.admitted
        assert not scrape.errors


def layout_of(kv: KVRuntime, tokens: list[int]) -> dict[str, str]:
    """Where each full block is now, by group."""
    keys = kv.keys(tokens)
    layout = {}
    for index, group in enumerate(kv.core.geometry.groups):
        on = {tier: kv.core.find_blocks(keys, group=index, tier=tier).present for tier in Tier}
        pairs = zip(on[Tier.GPU].tolist(), on[Tier.CPU].tolist(), strict=True)
        layout[group.name] = "".join("-cgb"[2 * gpu + cpu] for gpu, cpu in pairs)
    return layout


async def through(case: Case, task: asyncio.Future[Lease]) -> Lease:
    """The lease, once its copies are made."""
    while not task.done():
        case.backend.complete_all()
        await asyncio.sleep(0)
    return await task


def started(case: Case, ask: Ask) -> asyncio.Future[Lease]:
    return asyncio.ensure_future(case.kv.acquire(ask.fate, ask.tokens))


async def all_held(case: Case, books: Books) -> Lease:
    """A request that holds the whole pool; what it evicts is gone when this is back."""
    room = (GPU_BLOCKS - 1) // len(books.geometry.groups) * BLOCK
    holder = granted(case.kv, prompt(1, seed=HOLDER), reserve_tokens=room - BLOCK - 1)
    books.expect(BLOCK + 1, {})
    await until(lambda: holder.is_named)
    return holder


async def is_served(case: Case, ask: Ask, books: Books) -> None:
    books.expect(len(ask.tokens), layout_of(case.kv, ask.tokens))
    lease = await through(case, started(case, ask))
    lease.confirm(lease.num_tokens)
    lease.finish()


async def retries(case: Case, ask: Ask, books: Books) -> None:
    """Somebody else has the whole pool at first."""
    holder = await all_held(case, books)
    task = started(case, ask)
    for _ in range(3):
        await turns(5)
        assert isinstance(case.kv.try_acquire("polls", ask.tokens), Deferred)
    books.check(case.kv)
    books.expect(len(ask.tokens), layout_of(case.kv, ask.tokens))
    holder.release()
    (await through(case, task)).release()


async def fails_to_load(case: Case, ask: Ask, books: Books) -> None:
    """The first of its loads fails, the others arrive: the keys of that load count as missing."""
    layout = layout_of(case.kv, ask.tokens)
    length = exhaustive_hit(books.geometry, len(ask.tokens), layout)
    task = started(case, ask)
    await turns(20)
    loads = [copy for copy in case.backend.pending if copy.direction == "load"]
    if loads:
        failed = loads[0].group
        covered = layout[failed][: length // BLOCK]
        wanted = [position for position, letter in enumerate(covered) if letter == "c"][-len(loads[0].source_blocks) :]
        layout[failed] = "".join("-" if p in wanted else letter for p, letter in enumerate(layout[failed]))
        case.backend.fail(1, direction="load")
    books.expect(len(ask.tokens), layout)
    (await through(case, task)).release()


async def is_cancelled_while_loading(case: Case, ask: Ask, books: Books) -> None:
    books.expect(len(ask.tokens), layout_of(case.kv, ask.tokens))
    task = started(case, ask)
    await turns(20)
    if task.done():
        task.result().release()
        return
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def is_cancelled_in_the_queue(case: Case, ask: Ask, books: Books) -> None:
    """It was never admitted: no prompt at all."""
    holder = await all_held(case, books)
    task = started(case, ask)
    await turns(10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    holder.release()


async def is_preempted_and_resumed(case: Case, ask: Ask, books: Books) -> None:
    books.expect(len(ask.tokens), layout_of(case.kv, ask.tokens))
    lease = await through(case, started(case, ask))
    lease.append([7] * BLOCK)
    lease.confirm(min(len(ask.tokens), lease.capacity_tokens))
    tokens = ask.tokens + [7] * BLOCK
    preempted = lease.preempt()
    await finish_copies(case)
    books.expect(len(tokens), layout_of(case.kv, tokens), phase="resumed")
    (await through(case, asyncio.ensure_future(preempted.resume()))).release()


async def is_forked(case: Case, ask: Ask, books: Books) -> None:
    """What its parent holds is in the GPU tier, wherever it came from."""
    books.expect(len(ask.tokens), layout_of(case.kv, ask.tokens))
    lease = await through(case, started(case, ask))
    lease.confirm(lease.num_tokens)
    await turns(5)
    at = max(len(ask.tokens) - BLOCK // 2, 1)
    held = {
        group.name: "".join("g" if slot else "-" for slot in lease.block_table(group.name)[: at // BLOCK])
        for group in books.geometry.groups
    }
    length = exhaustive_hit(books.geometry, at + 1, held)
    books.admit(at, ("gpu",) * length + ("compute",) * (at - length))
    granted_fork = lease.try_fork("fork", at=at)
    assert isinstance(granted_fork, Lease)
    granted_fork.release()
    lease.release()


FATES: dict[str, Callable[[Case, Ask, Books], Awaitable[None]]] = {
    function.__name__: function
    for function in (
        is_served,
        retries,
        fails_to_load,
        is_cancelled_while_loading,
        is_cancelled_in_the_queue,
        is_preempted_and_resumed,
        is_forked,
    )
}
LETTERS = st.text("gcb-", min_size=MOST_BLOCKS, max_size=MOST_BLOCKS)
ASKS = st.builds(
    Ask,
    fate=st.sampled_from(sorted(FATES)),
    seed=st.integers(0, 2),
    blocks=st.integers(1, MOST_BLOCKS),
    extra=st.integers(0, BLOCK - 1),
    letters=st.tuples(LETTERS, LETTERS),
)


async def live(geometry: CacheGeometry, asks: list[Ask]) -> None:
    backend = FakeBackend(manual=True)
    config = RuntimeConfig(geometry=geometry, gpu_blocks=GPU_BLOCKS, cpu_blocks=400, watermark=0.0, backend=backend)
    async with KVRuntime(config) as kv:
        case, books = Case(kv=kv, backend=backend), Books(geometry)
        for ask in asks:
            letters = dict(zip((group.name for group in geometry.groups), ask.letters, strict=False))
            make_resident(kv, ask.tokens, {name: text[: ask.blocks] for name, text in letters.items()})
            await FATES[ask.fate](case, ask, books)
            await finish_copies(case)
            books.check(kv)


@pytest.mark.parametrize("geometry", [GEOMETRY, HYBRID], ids=["one group", "two groups"])
@settings(max_examples=40)
@given(asks=st.lists(ASKS, min_size=1, max_size=6))
def test_each_prompt_is_counted_once_by_the_sources_of_the_oracle(geometry: CacheGeometry, asks: list[Ask]) -> None:
    asyncio.run(live(geometry, asks))


@pytest.mark.parametrize("fate", FATES)
def test_every_fate_is_met_with_loads_hits_and_computed_blocks(fate: str) -> None:
    """The same, not by chance."""
    asks = [
        Ask(fate=fate, seed=seed, blocks=5, extra=3, letters=(letters, letters))
        for seed, letters in enumerate(["gcgcb", "ccccc", "gg-cc"])
    ]
    for geometry in (GEOMETRY, HYBRID):
        asyncio.run(live(geometry, asks))
