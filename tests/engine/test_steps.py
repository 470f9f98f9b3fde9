"""Forward steps: who runs together, in what order, and who keeps blocks until when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from aiokv_engine.llama import LlamaModel
from aiokv_engine.paged_attention import DecodeRow, make_arenas
from aiokv_engine.steps import EngineClosed, PrefillChunk, StepQueue
from aiokv_engine.torch_worker import TorchWorker
from tests.engine.cases import PATIENCE, Gate


@asynccontextmanager
async def queue_of(model: LlamaModel) -> AsyncIterator[StepQueue]:
    config = model.config
    shape = (32, 16, config.num_kv_heads, config.head_dim)
    arenas = make_arenas(shape, layers=config.num_layers, dtype=model.dtype)
    worker = TorchWorker()
    queue = StepQueue(model, arenas=arenas, worker=worker)
    try:
        yield queue
        queue.close()
        await queue.wait_idle()
    finally:
        worker.close()


def chunk(start: int = 0) -> PrefillChunk:
    return PrefillChunk(token_ids=[1, 2, 3], start=start, blocks=torch.arange(1, 9))


def row(position: int = 3) -> DecodeRow:
    return DecodeRow(token_id=5, position=position, blocks=torch.arange(1, 9))


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def started(gate: Gate, *, steps: int) -> None:
    """Waits until the thread has begun `steps` steps."""
    for _ in range(steps):
        assert await asyncio.to_thread(gate.begun.acquire, timeout=PATIENCE)


async def test_a_step_returns_its_token_and_logits(tiny_llama: LlamaModel) -> None:
    async with queue_of(tiny_llama) as queue:
        token = await queue.compute(chunk(), owner="a")
        assert token.logits.shape == (tiny_llama.config.vocab_size,)
        assert token.token_id == int(token.logits.argmax())


async def test_sequences_that_decode_together_stay_together(tiny_llama: LlamaModel, gate: Gate) -> None:
    async def decode(queue: StepQueue, owner: str) -> None:
        for position in range(3, 6):
            await queue.compute(row(position), owner=owner)

    async with queue_of(tiny_llama) as queue, asyncio.TaskGroup() as tasks:
        for owner in "abcde":
            tasks.create_task(decode(queue, owner))
    assert gate.log == ["decode 5"] * 3


async def test_more_sequences_than_rows_take_turns(tiny_llama: LlamaModel, gate: Gate) -> None:
    async with queue_of(tiny_llama) as queue, asyncio.TaskGroup() as tasks:
        for owner in range(11):
            tasks.create_task(queue.compute(row(), owner=owner))
    assert gate.log == ["decode 8", "decode 3"]


async def test_prefill_and_decode_alternate(tiny_llama: LlamaModel, gate: Gate) -> None:
    async def many(queue: StepQueue, *, work: PrefillChunk | DecodeRow, owner: str) -> None:
        for _ in range(3):
            await queue.compute(work, owner=owner)

    async with queue_of(tiny_llama) as queue, asyncio.TaskGroup() as tasks:
        tasks.create_task(many(queue, work=chunk(), owner="long prompt"))
        tasks.create_task(many(queue, work=row(), owner="answering"))
    assert gate.log == ["prefill 0", "decode 1"] * 3


@pytest.mark.parametrize("cancels", [1, 2])
async def test_who_is_cancelled_in_a_step_keeps_its_blocks_until_the_step_ends(
    cancels: int, tiny_llama: LlamaModel, gate: Gate
) -> None:
    given_back: list[str] = []

    async def request(queue: StepQueue) -> None:
        try:
            await queue.compute(chunk(), owner="a")
        finally:
            queue.leave("a", give_back=lambda: given_back.append("a"))

    async with queue_of(tiny_llama) as queue:
        gate.close()
        task = asyncio.create_task(request(queue))
        await started(gate, steps=1)
        for _ in range(cancels):
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await turns()
        assert given_back == []
        gate.open()
        await queue.wait_idle()
        assert given_back == ["a"]


async def test_who_leaves_before_its_step_gives_back_at_once_and_is_never_computed(
    tiny_llama: LlamaModel, gate: Gate
) -> None:
    given_back: list[str] = []
    async with queue_of(tiny_llama) as queue:
        gate.close()
        running = asyncio.create_task(queue.compute(chunk(), owner="a"))
        await started(gate, steps=1)
        waiting = asyncio.create_task(queue.compute(chunk(64), owner="b"))
        await turns()
        waiting.cancel()
        await turns()
        queue.leave("b", give_back=lambda: given_back.append("b"))
        assert given_back == ["b"]
        gate.open()
        await running
        await turns()
    assert gate.log == ["prefill 0"]


async def test_a_failed_step_fails_its_sequences_and_no_others(tiny_llama: LlamaModel, gate: Gate) -> None:
    async with queue_of(tiny_llama) as queue:
        gate.fault = ArithmeticError("broken")
        pair = await asyncio.gather(*(queue.compute(row(), owner=name) for name in "ab"), return_exceptions=True)
        assert [str(error) for error in pair] == ["broken", "broken"]
        gate.fault = None
        await queue.compute(row(), owner="c")


async def test_closing_fails_who_waits_and_lets_the_running_step_end(tiny_llama: LlamaModel, gate: Gate) -> None:
    async with queue_of(tiny_llama) as queue:
        gate.close()
        running = asyncio.create_task(queue.compute(chunk(), owner="a"))
        await started(gate, steps=1)
        waiting = asyncio.create_task(queue.compute(row(), owner="b"))
        await turns()
        queue.close()
        with pytest.raises(EngineClosed):
            await waiting
        with pytest.raises(EngineClosed):
            await queue.compute(row(), owner="c")
        gate.open()
        assert (await running).logits.isfinite().all()


async def test_the_worker_uses_one_torch_thread() -> None:
    worker = TorchWorker()
    assert await worker.run(torch.get_num_threads) == 1
    worker.close()


async def test_what_the_worker_raises_reaches_who_waits() -> None:
    worker = TorchWorker()
    with pytest.raises(ZeroDivisionError):
        await worker.run(lambda: 1 // 0)
    worker.close()
