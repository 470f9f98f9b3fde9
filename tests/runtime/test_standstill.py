"""A failed load of a prefix that many share, in a pool that has no room to compute it for each at once."""

from __future__ import annotations

import asyncio

import pytest

from aiokv import Lease
from aiokv.testing import make_resident
from tests.runtime.support import BLOCK, GROUP, assert_all_given_back, opened, prompt, turns, until

PROMPT = 5
"""Full blocks; one more is begun."""


@pytest.mark.parametrize("clients", [2, 4])
async def test_clients_whose_shared_load_failed_go_on_one_after_the_other(clients: int) -> None:
    """None of them has a deadline, and none has room for all it must compute while the others hold what they hold."""
    async with opened(gpu_blocks=4 + 2 * clients + 1, cpu_blocks=8) as case:
        make_resident(case.kv, prompt(PROMPT), {GROUP: "cggg-"})
        served: list[Lease] = []

        async def serve(name: str) -> None:
            async with case.kv.acquire(name, prompt(PROMPT)) as lease:
                served.append(lease)
                assert lease.delivered.compute_tokens >= BLOCK
                lease.confirm(PROMPT * BLOCK)

        tasks = [asyncio.create_task(serve(f"{n}")) for n in range(clients)]
        await until(lambda: len(case.kv.audit().leases) == clients)
        await until(lambda: any(copy.direction == "load" for copy in case.backend.pending))
        for _ in range(len(case.backend.pending)):
            if case.backend.pending[0].direction == "load":
                case.backend.fail()
            else:
                case.backend.complete()
        for _ in range(100):
            case.backend.complete_all()
            await turns()
        assert all(task.done() for task in tasks), case.kv.audit()
        await asyncio.gather(*tasks)
        assert len(served) == clients
        await assert_all_given_back(case)
