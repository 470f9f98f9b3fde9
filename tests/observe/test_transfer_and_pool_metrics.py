"""Transfers, pools, evictions and stores: what the metrics say equals what the runtime did."""

from __future__ import annotations

import pytest

from aiokv import CopyFailed, Lease, Tier
from aiokv.testing import evict, make_resident
from tests.observe.support import BLOCK_BYTES, Scrape, opened
from tests.runtime.support import GROUP, Case, finish_copies, prompt, turns, until


def states_of(scrape: Scrape, tier: str) -> dict[str, float]:
    return scrape.by("state", "aiokv_pool_blocks", tier=tier)


async def computed(case: Case, blocks: int, *, seed: int = 0) -> Lease:
    lease = await case.kv.acquire(f"request {seed}", prompt(blocks, seed=seed))
    lease.confirm(lease.num_tokens)
    return lease


async def test_a_store_is_queued_blocks_in_flight_then_bytes() -> None:
    async with opened() as case:
        lease = await computed(case, 3)
        await until(lambda: bool(case.backend.pending))
        running = Scrape(case.kv.collector)
        assert running.by("direction", "aiokv_transfer_inflight_blocks") == {"store": 3}
        assert running.by("direction", "aiokv_transfer_submitted_blocks_total") == {"store": 3}
        assert running.sum("aiokv_transfer_blocks_total") == running.sum("aiokv_transfer_bytes_total") == 0
        await finish_copies(case)
        ended = Scrape(case.kv.collector)
        assert ended.sum("aiokv_transfer_inflight_blocks") == 0
        assert ended.by("outcome", "aiokv_transfer_blocks_total", direction="store") == {"ok": 3}
        assert ended.by("direction", "aiokv_transfer_bytes_total") == {"store": 3 * BLOCK_BYTES}
        assert ended.by("direction", "aiokv_transfer_duration_seconds_count") == {"store": 1}
        assert ended.by("direction", "aiokv_transfer_queue_wait_seconds_count") == {"store": 1}
        assert ended("aiokv_bridge_polls_total", result="progress") == 1
        assert states_of(ended, "cpu") == {"free": 13, "resident": 3}
        lease.release()


async def test_blocks_that_wait_for_room_in_their_stream_are_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiokv.runtime.transfers.STREAM_DEPTH", 1)
    async with opened() as case:
        leases = [await computed(case, blocks, seed=blocks) for blocks in (1, 2, 3)]
        await until(lambda: Scrape(case.kv.collector).sum("aiokv_transfer_queue_blocks") == 5)
        scrape = Scrape(case.kv.collector)
        assert scrape.by("direction", "aiokv_transfer_queue_blocks") == {"store": 5}
        assert scrape.by("direction", "aiokv_transfer_inflight_blocks") == {"store": 1}
        leases[1].release()
        await finish_copies(case)
        scrape = Scrape(case.kv.collector)
        assert scrape.sum("aiokv_transfer_queue_blocks") == 0
        assert scrape.by("direction", "aiokv_transfer_submitted_blocks_total") == {"store": 4}
        for lease in leases:
            lease.release()


async def test_a_copy_that_could_not_be_started_is_an_error() -> None:
    async with opened() as case:
        case.backend.fail_next_submit(CopyFailed(1, detail="the test refused it"))
        lease = await computed(case, 2)
        await finish_copies(case)
        scrape = Scrape(case.kv.collector)
        assert scrape.by("outcome", "aiokv_transfer_blocks_total", direction="store") == {"error": 2}
        assert scrape.by("direction", "aiokv_transfer_submitted_blocks_total") == {"store": 2}
        assert scrape.sum("aiokv_transfer_duration_seconds_count") == 0
        assert not scrape.errors
        lease.release()


async def test_a_lost_backend_shows_in_outcomes_and_in_quarantine() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        lease = await case.kv.admit("a", prompt(2))
        await until(lambda: bool(case.backend.pending))
        case.backend.lose()
        await lease.ready()
        lease.release()
        await finish_copies(case)
        scrape = Scrape(case.kv.collector)
        assert scrape.by("outcome", "aiokv_transfer_blocks_total", direction="load") == {"lost": 2}
        assert scrape("aiokv_pool_blocks", tier="gpu", state="quarantined") == 2
        assert scrape.sum("aiokv_pool_blocks", tier="cpu") == 16
        assert not scrape.errors


async def test_states_of_a_pool_sum_to_its_capacity_at_every_step() -> None:
    async with opened(gpu_blocks=17, cpu_blocks=8) as case:
        seen = [Scrape(case.kv.collector)]
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        lease = await case.kv.admit("a", prompt(4))
        seen.append(Scrape(case.kv.collector))
        await until(lambda: bool(case.backend.pending))
        case.backend.complete_all()
        await lease.ready()
        lease.confirm(lease.num_tokens)
        seen.append(Scrape(case.kv.collector))
        lease.finish()
        await finish_copies(case)
        seen.append(Scrape(case.kv.collector))
        await case.kv.reset()
        seen.append(Scrape(case.kv.collector))
    assert [scrape.sum("aiokv_pool_blocks", tier="gpu") for scrape in seen] == [16] * 5
    assert [scrape.sum("aiokv_pool_blocks", tier="cpu") for scrape in seen] == [8] * 5
    assert [states_of(scrape, "gpu") for scrape in (seen[0], *seen[2:])] == [
        {"free": 16},
        {"free": 11, "resident": 4, "reserved": 1},
        {"free": 12, "resident": 4},
        {"free": 16},
    ]


async def test_capacity_in_bytes_is_that_of_the_usable_slots() -> None:
    async with opened(gpu_blocks=17, cpu_blocks=8) as case:
        bytes_by_tier = Scrape(case.kv.collector).by("tier", "aiokv_pool_capacity_bytes")
        assert bytes_by_tier == {"gpu": 16 * BLOCK_BYTES, "cpu": 8 * BLOCK_BYTES}
    async with opened(block_bytes=0) as case:
        assert "aiokv_pool_capacity_bytes" not in Scrape(case.kv.collector).text


async def test_evictions_are_counted_by_tier_and_reason() -> None:
    async with opened(gpu_blocks=5, cpu_blocks=2, manual=False) as case:
        for seed in range(2):
            lease = await computed(case, 3, seed=seed)
            lease.finish()
            await case.kv.drain()
        pressed = Scrape(case.kv.collector)
        assert pressed.by("reason", "aiokv_evictions_total", tier="gpu") == {"capacity": 3}
        assert pressed.by("reason", "aiokv_evictions_total", tier="cpu") == {"capacity": 2}
        evict(case.kv, prompt(3, seed=1), {GROUP: (2,)}, tier=Tier.GPU)
        await case.kv.reset(Tier.GPU)
        scrape = Scrape(case.kv.collector)
        assert scrape.by("reason", "aiokv_evictions_total", tier="gpu") == {"capacity": 4, "reset": 2}
        assert scrape.by("reason", "aiokv_evictions_total", tier="cpu") == {"capacity": 2}


async def test_stores_that_are_not_made_say_why() -> None:
    async with opened(cpu_blocks=2) as case:
        lease = await computed(case, 3)
        await until(lambda: bool(case.backend.pending))
        assert Scrape(case.kv.collector).by("reason", "aiokv_store_skipped_blocks_total") == {"pool_full": 1}
        again = await case.kv.acquire("the same", prompt(3))
        await turns(20)
        assert Scrape(case.kv.collector).by("reason", "aiokv_store_skipped_blocks_total")["in_flight"] == 2
        await finish_copies(case)
        third = await case.kv.acquire("once more", prompt(3))
        await turns(20)
        assert Scrape(case.kv.collector).by("reason", "aiokv_store_skipped_blocks_total")["already_cached"] == 2
        for open_lease in (lease, again, third):
            open_lease.release()


async def test_without_a_cpu_tier_nothing_is_said_about_one() -> None:
    async with opened(cpu_blocks=0) as case:
        lease = await computed(case, 3)
        lease.finish()
        await finish_copies(case)
        scrape = Scrape(case.kv.collector)
        assert scrape.values_of("tier") == {"gpu"}
        assert scrape.values_of("source") == {"gpu", "compute"}
        assert not scrape.values_of("direction")
        about_copies = ("aiokv_transfer", "aiokv_store", "aiokv_interleaved", "aiokv_load")
        assert not [name for name in scrape.types if name.startswith(about_copies)]
        assert scrape.sum("aiokv_prompt_tokens_total") == 49
        assert not scrape.errors


async def test_build_info_names_version_backend_and_block_size() -> None:
    async with opened() as case:
        scrape = Scrape(case.kv.collector)
        assert scrape("aiokv_build_info", version="0.1.0", backend="fake", block_tokens="16") == 1
