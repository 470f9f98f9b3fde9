"""What the benchmarks measure with: steps of the loop's thread, memory over time, bytes that can be judged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np
import pytest

from aiokv import CacheGeometry, ChunkedLocal, FullAttention, KVRuntime, SlidingWindow
from aiokv.cli.bench import memory
from aiokv.cli.bench.garbage import frozen_garbage
from aiokv.cli.bench.hold import HoldMeter, Metered, run_metered
from aiokv.cli.bench.kv_bytes import KvBytes, codes_of
from aiokv.cli.bench.memory import MemoryTrend
from aiokv.testing import FakeBackend
from tests.runtime.support import config_of, prompt

# Steps.


@pytest.fixture
def spend(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """CPU time passes only when a test says so."""
    now = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def test_percentiles_are_within_two_percent_and_the_longest_step_is_exact(spend: Callable[[float], None]) -> None:
    meter = HoldMeter()
    assert meter.percentile_s(0.99) == 0.0
    for milliseconds in range(1, 101):
        meter.call(spend, milliseconds / 1e3)
    assert meter.steps == 100
    assert meter.percentile_s(0.5) == pytest.approx(0.050, rel=0.021)
    assert meter.percentile_s(0.99) == pytest.approx(0.099, rel=0.021)
    assert meter.longest_s == pytest.approx(0.1)


def test_what_the_host_does_within_a_step_is_left_out(spend: Callable[[float], None]) -> None:
    meter = HoldMeter()

    def step() -> None:
        spend(0.001)
        meter.exclude(spend, 5.0)

    meter.call(step)
    assert meter.longest_s == pytest.approx(0.001)


def test_a_step_that_raises_is_counted_and_its_exception_goes_on() -> None:
    meter = HoldMeter()
    with pytest.raises(ZeroDivisionError):
        meter.call(lambda: 1 / 0)
    assert meter.steps == 1


async def test_each_stretch_of_a_coroutine_is_a_step() -> None:
    meter = HoldMeter()

    async def three_naps() -> str:
        for _ in range(3):
            await asyncio.sleep(0)
        return "rested"

    assert await Metered(meter, three_naps()) == "rested"
    assert meter.steps == 4


async def test_a_cancellation_reaches_the_coroutine_inside() -> None:
    ended = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    async def metered() -> None:
        await Metered(HoldMeter(), waits())

    task = asyncio.create_task(metered())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cleaned up"]


def test_a_runtime_on_a_watched_loop_works_and_its_callbacks_are_steps() -> None:
    meter = HoldMeter()

    async def main() -> None:
        async with KVRuntime(config_of(backend=FakeBackend(manual=False))) as kv:
            for seed in range(4):
                async with kv.acquire("request", prompt(3, seed=seed)) as lease:
                    lease.confirm(lease.num_tokens)
                await kv.drain()

    run_metered(main, meter=meter)
    assert meter.steps >= 8  # at least one slice and one tick per request: no call above is a step by itself
    assert meter.longest_step


def test_collections_are_told_and_their_time_is_left_out(spend: Callable[[float], None]) -> None:
    meter = HoldMeter()
    with frozen_garbage(meter) as pauses:

        def step() -> None:
            pauses.note("start", {})
            spend(0.5)
            pauses.note("stop", {})
            spend(0.001)

        meter.call(step)
        assert pauses.longest_s == pytest.approx(0.5)
        before = pauses.count
        pauses.collect()
        assert pauses.count > before
    assert meter.longest_s == pytest.approx(0.001)


# Memory.


def trend_of(sizes: list[float], monkeypatch: pytest.MonkeyPatch) -> MemoryTrend:
    trend = MemoryTrend()
    for second, size in enumerate(sizes):
        monkeypatch.setattr(memory, "resident_bytes", lambda size=size: size)
        trend.sample(float(second))
    return trend


@pytest.mark.parametrize(
    ("sizes", "percent"),
    [
        ([], 0.0),
        ([100.0], 0.0),
        ([100.0] * 31, 0.0),
        ([50.0 + 5 * n for n in range(10)] + [100.0] * 21, 0.0),  # all of it in the warm-up
        ([90.0 + n for n in range(31)], 100 * 20 / 110),  # 100 to 120 after it
        ([110.0 - n for n in range(31)], -100 * 20 / 90),
    ],
)
def test_the_slope_is_that_of_a_line_after_the_first_third(
    sizes: list[float], percent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trend_of(sizes, monkeypatch).slope_percent == pytest.approx(percent, abs=1e-6)


def test_resident_memory_grows_with_what_is_touched() -> None:
    before = memory.resident_bytes()
    touched = np.ones(64 * 2**20, np.uint8)
    assert memory.resident_bytes() - before > 32 * 2**20
    assert touched[-1] == 1


# Bytes.

BLOCK, LENGTH = 16, 100
FULL = FullAttention("full", block_size=BLOCK)
WINDOW = SlidingWindow("window", block_size=BLOCK, window=33)
CHUNK = ChunkedLocal("chunk", block_size=BLOCK, chunk=64)
TABLE = [3, 1, 4, 9, 5, 2, 6]
TOKENS = [n * n for n in range(LENGTH)]


@pytest.fixture
def written() -> KvBytes:
    """A hundred tokens of tenant 1, the last block half filled, in all groups."""
    kv_bytes = KvBytes(CacheGeometry(groups=(FULL, WINDOW, CHUNK), hash_block_size=BLOCK), gpu_blocks=12, token_words=3)
    for group in kv_bytes.arenas:
        kv_bytes.poison(group, TABLE, start=0, stop=len(TABLE) * BLOCK)
        assert kv_bytes.write(group, TABLE, codes=codes_of(1, TOKENS), start=0, stop=LENGTH) == 0
    return kv_bytes


def wrong_blocks(kv_bytes: KvBytes, *, tenant: int = 1, table: list[int] = TABLE, length: int = LENGTH) -> int:
    return kv_bytes.compare(FULL, table, codes=codes_of(tenant, TOKENS), length=length).wrong


def test_what_was_written_is_right(written: KvBytes) -> None:
    verdict = written.compare(FULL, TABLE, codes=codes_of(1, TOKENS), length=LENGTH)
    assert (verdict.compared, verdict.wrong) == (len(TABLE), 0)


@pytest.mark.parametrize("arena", [0, 1])
def test_one_flipped_bit_is_one_wrong_block(written: KvBytes, arena: int) -> None:
    written.arenas["full"][arena].view(np.uint8).reshape(-1, 12 * BLOCK * 24)[-1, 4 * BLOCK * 24 + 5] ^= 1
    assert wrong_blocks(written) == 1


def test_swapped_blocks_other_tenants_and_other_groups_are_wrong(written: KvBytes) -> None:
    assert wrong_blocks(written, table=[1, 3, *TABLE[2:]]) == 2
    assert wrong_blocks(written, tenant=2) == len(TABLE)
    assert written.compare(WINDOW, TABLE, codes=codes_of(1, TOKENS), length=LENGTH).wrong == 0
    for window, full in zip(written.arenas["window"], written.arenas["full"], strict=True):
        window[:] = full
    assert written.compare(WINDOW, TABLE, codes=codes_of(1, TOKENS), length=LENGTH).wrong == len(TABLE)


def test_what_was_not_computed_is_wrong(written: KvBytes) -> None:
    more = [*TOKENS, 7]
    assert written.compare(FULL, TABLE, codes=codes_of(1, more), length=LENGTH + 1).wrong == 1


def test_another_first_token_changes_every_byte_after_it() -> None:
    one, other = codes_of(1, TOKENS), codes_of(1, [TOKENS[0] + 1, *TOKENS[1:]])
    assert not (one == other).any()
    assert (codes_of(1, TOKENS[:50]) == one[:50]).all()


@pytest.mark.parametrize(
    ("group", "needed"),
    [(FULL, 0), (WINDOW, (LENGTH - 32) // BLOCK), (CHUNK, 64 // BLOCK)],
    ids=["full", "window", "chunk"],
)
def test_only_blocks_that_the_next_query_reads_must_be_there(
    written: KvBytes, group: FullAttention | SlidingWindow | ChunkedLocal, needed: int
) -> None:
    codes = codes_of(1, TOKENS)
    enough = [0] * needed + TABLE[needed:]
    too_few = [0] * (needed + 1) + TABLE[needed + 1 :]
    assert written.compare(group, enough, codes=codes, length=LENGTH).wrong == 0
    assert written.compare(group, too_few, codes=codes, length=LENGTH).wrong == 1


def test_the_null_block_is_never_written(written: KvBytes) -> None:
    lost = written.write("full", [0, 0, *TABLE[2:]], codes=codes_of(1, TOKENS), start=0, stop=LENGTH)
    assert lost == 2 * BLOCK
    assert not any(arena[..., 0, :, :].any() for arena in written.arenas["full"])
