"""Prompts that wait for room: in order, none forgotten, and room for others once they have left."""

from __future__ import annotations

import asyncio

from aiokv_engine.model_file import LoadedModel
from tests.engine.cases import Gate
from tests.serve.cases import running

LARGE = {"prompt": [5] * 100, "max_tokens": 20}  # needs the whole pool
SMALL = {"prompt": [6] * 4, "max_tokens": 1}


async def test_a_prompt_that_needs_the_whole_pool_is_not_overtaken_by_small_ones(
    tiny: LoadedModel, steps: Gate
) -> None:
    async with running(tiny, gpu_blocks=9, max_queue=3) as server:
        gate = server.server_app.service.gate
        ended: list[str] = []

        async def ask(name: str, said: dict[str, object]) -> int:
            answer = await server.complete(**said)
            ended.append(name)
            return answer.status_code

        steps.close()
        tasks = [asyncio.create_task(ask("first", SMALL))]
        await server.until(lambda: gate.running == 1)
        for queued, (name, said) in enumerate((("large", LARGE), ("small", SMALL), ("last", SMALL)), start=1):
            tasks.append(asyncio.create_task(ask(name, said)))
            await server.until(lambda queued=queued: gate.queued == queued)  # type: ignore[misc]  # bound now, not later
        assert await ask("refused", SMALL) == 429
        steps.open()
        assert await asyncio.gather(*tasks) == [200] * 4
        assert ended[:3] == ["refused", "first", "large"]
        assert await ask("again", SMALL) == 200
        await server.assert_all_given_back()
        counted = [await server.metric("aiokv_serve_requests_total", outcome=each) for each in ("ok", "rejected")]
    assert counted == [5, 1]
