"""Store policies as a user of the runtime meets them."""

from __future__ import annotations

import logging

import pytest

from aiokv import KVRuntime, RuntimeConfig, StorePolicy
from aiokv.testing import FakeBackend
from tests.runtime.support import BLOCK, GEOMETRY, Case, opened

PROMPT = list(range(6 * BLOCK + 1))
OTHER = list(range(10_000, 10_000 + 6 * BLOCK + 1))


async def serve(case: Case, name: str, prompt: list[int]) -> tuple[int, int]:
    """Blocks that came from the GPU and from the CPU tier."""
    async with case.kv.acquire(name, prompt) as lease:
        lease.confirm(len(prompt))
        hit = lease.hit
    await case.kv.drain()
    return hit.gpu_tokens // BLOCK, hit.cpu_tokens // BLOCK


@pytest.mark.parametrize("policy", StorePolicy)
async def test_every_policy_brings_an_evicted_prompt_back_from_the_cpu_tier(policy: StorePolicy) -> None:
    async with opened(gpu_blocks=9, cpu_blocks=32, manual=False, store_policy=policy) as case:
        for turn in range(3):
            await serve(case, f"a{turn}", PROMPT)
            await serve(case, f"b{turn}", OTHER)
        gpu, cpu = await serve(case, "again", PROMPT)
        assert gpu + cpu == 6
        assert cpu > 0
        assert not case.kv.audit().violations


async def test_selective_does_not_copy_what_was_seen_once() -> None:
    async with opened(gpu_blocks=9, manual=False, store_policy=StorePolicy.SELECTIVE) as case:
        await serve(case, "a", PROMPT)
        await serve(case, "b", OTHER)
        assert case.kv.snapshot().cpu is not None
        assert case.kv.core.pools().popitem()[1].resident == 0


async def test_a_drain_ends_under_lazy_though_every_copy_fails() -> None:
    async with opened(gpu_blocks=9, store_policy=StorePolicy.LAZY) as case:
        async with case.kv.acquire("a", PROMPT) as lease:
            lease.confirm(len(PROMPT))
        drained = case.kv.drain()
        waiting = case.kv.core
        for _ in range(50):
            waiting.run_slices()
            case.kv.progress()
            case.backend.fail(len(case.backend.pending))
        await drained
        assert not case.kv.core.unfinished_transfers


@pytest.mark.parametrize(
    ("policy", "cpu_blocks", "warnings"),
    [
        (StorePolicy.EAGER, 8, 1),
        (StorePolicy.EAGER, 3, 1),
        (StorePolicy.EAGER, 9, 0),
        (StorePolicy.EAGER, 0, 0),
        (StorePolicy.LAZY, 8, 0),
    ],
)
async def test_a_cpu_pool_not_larger_than_the_gpu_pool_is_told_at_start(
    policy: StorePolicy, cpu_blocks: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = RuntimeConfig(
        geometry=GEOMETRY, gpu_blocks=9, cpu_blocks=cpu_blocks, store_policy=policy, backend=FakeBackend()
    )
    with caplog.at_level(logging.WARNING, logger="aiokv"):
        async with KVRuntime(config):
            pass
    told = [record for record in caplog.records if "eager stores cannot help" in record.getMessage()]
    assert len(told) == warnings
