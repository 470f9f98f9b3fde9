"""The engine over a real runtime: reuse that is exact, and blocks that come back whatever happens to a request."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import anyio
import pytest

from aiokv import CapacityError, Tier, UsageError
from aiokv.testing import evict
from aiokv_engine.llama import LlamaModel
from aiokv_engine.paged_attention import DECODE_ROWS
from aiokv_engine.scheduler import GROUP, Answer, Ready, Request
from aiokv_engine.selfcheck import Comparison
from aiokv_engine.serving import Serving
from aiokv_engine.steps import EngineClosed
from tests.engine.cases import BLOCK_SIZE, PATIENCE, Gate, logits_of, prompt_of, serving

PROMPT = prompt_of(3 * 64 + 9)
HIT = 3 * 64
NEW = 6


async def ask(
    case: Serving, prompt: list[int], *, name: str = "request", new: int = NEW, salt: str | None = None
) -> Answer:
    return await case.engine.generate(Request(request_id=name, token_ids=prompt, max_new_tokens=new, salt=salt))


async def assert_all_given_back(case: Serving) -> None:
    """Nothing is pinned or reserved, and one request can have the whole pool."""
    await case.kv.drain()
    audit = case.kv.audit()
    assert (audit.leases, audit.pins, audit.reservations, audit.violations) == ((), (), (), ())
    tokens = (case.kv.config.gpu_blocks - 1) * BLOCK_SIZE
    async with case.kv.acquire("all of it", prompt_of(tokens, seed=99)):
        pass


async def test_a_cold_and_a_gpu_hit_answer_are_the_same(tiny_llama: LlamaModel, comparison: Comparison) -> None:
    async with serving(tiny_llama) as case:
        cold = await ask(case, PROMPT)
        warm = await ask(case, PROMPT)
    assert (cold.hit.gpu_tokens, cold.hit.cpu_tokens, cold.hit.compute_tokens) == (0, 0, len(PROMPT))
    assert (warm.hit.gpu_tokens, warm.hit.cpu_tokens, warm.hit.compute_tokens) == (HIT, 0, len(PROMPT) - HIT)
    assert len(cold.tokens) == NEW
    assert comparison.are_equal(logits_of(cold), logits_of(warm))


async def test_an_answer_from_the_cpu_tier_is_the_same_over_a_poisoned_gpu_arena(
    tiny_llama: LlamaModel, comparison: Comparison
) -> None:
    async with serving(tiny_llama) as case:
        cold = await ask(case, PROMPT)
        await case.kv.drain()
        evict(case.kv, PROMPT, {GROUP: range(HIT // BLOCK_SIZE)}, tier=Tier.GPU)
        for arena in case.arenas:
            arena[:, 1:] = 1e4
        warm = await ask(case, PROMPT)
    assert (warm.hit.gpu_tokens, warm.hit.cpu_tokens) == (0, HIT)
    assert comparison.are_equal(logits_of(cold), logits_of(warm))


async def test_one_wrong_loaded_block_shows_in_the_answer(tiny_llama: LlamaModel, comparison: Comparison) -> None:
    async with serving(tiny_llama) as case:
        cold = await ask(case, PROMPT)
        await case.kv.drain()
        evict(case.kv, PROMPT, {GROUP: range(HIT // BLOCK_SIZE)}, tier=Tier.GPU)

        def corrupt(ready: Ready) -> None:
            case.arenas[0][:, ready.lease.block_table(GROUP)[5]] = 0.5

        request = Request(request_id="wrong", token_ids=PROMPT, max_new_tokens=NEW, on_ready=corrupt)
        wrong = await case.engine.generate(request)
    assert not comparison.are_equal(logits_of(cold), logits_of(wrong))


async def test_many_conversations_at_once_answer_as_each_alone(tiny_llama: LlamaModel, comparison: Comparison) -> None:
    prompts = [prompt_of(70 + 23 * index, seed=index) for index in range(DECODE_ROWS + 3)]
    async with serving(tiny_llama, gpu_blocks=512) as case:
        alone = [await ask(case, prompt, salt="alone") for prompt in prompts]
    async with serving(tiny_llama, gpu_blocks=48) as case:
        calls = [ask(case, prompt, name=f"request {index}") for index, prompt in enumerate(prompts)]
        crowd = await asyncio.gather(*calls)
        await assert_all_given_back(case)
    for expected, found in zip(alone, crowd, strict=True):
        assert found.token_ids == expected.token_ids
        assert comparison.are_equal(logits_of(found), logits_of(expected))


async def test_an_answer_ends_with_a_stop_token(tiny_llama: LlamaModel) -> None:
    async with serving(tiny_llama) as case:
        full = (await ask(case, PROMPT)).token_ids
        request = Request(request_id="b", token_ids=PROMPT, max_new_tokens=NEW, stop_ids=frozenset({full[2]}))
        stopped = (await case.engine.generate(request)).token_ids
    assert stopped == full[: full.index(full[2]) + 1]


async def test_an_answer_ends_as_soon_as_it_is_enough_and_its_prompt_is_stored(tiny_llama: LlamaModel) -> None:
    async with serving(tiny_llama) as case:
        seen: list[int] = []
        request = Request(request_id="b", token_ids=PROMPT, max_new_tokens=NEW, is_enough=lambda: len(seen) == 3)
        async for token in case.engine.stream(request):
            seen += [token.token_id]
        await assert_all_given_back(case)
        assert len(seen) == 3
        keys = case.kv.keys(PROMPT)
        assert case.kv.core.find_blocks(keys, group=0, tier=Tier.CPU).present[: HIT // BLOCK_SIZE].all()


async def test_tokens_are_streamed_and_a_reader_may_leave(tiny_llama: LlamaModel) -> None:
    async with serving(tiny_llama) as case:
        full = (await ask(case, PROMPT)).token_ids
        seen = []
        async with aclosing(
            case.engine.stream(Request(request_id="b", token_ids=PROMPT, max_new_tokens=NEW))
        ) as stream:
            async for token in stream:
                seen.append(token.token_id)
                if len(seen) == 2:
                    break
        assert tuple(seen) == full[:2]
        await assert_all_given_back(case)


@pytest.mark.parametrize("cancels", [1, 2])
@pytest.mark.parametrize("step", [1, 2, 5, 7])
async def test_a_request_cancelled_in_any_step_gives_everything_back_after_the_step(
    step: int, cancels: int, tiny_llama: LlamaModel, gate: Gate
) -> None:
    async with serving(tiny_llama) as case:
        gate.close_at(step)
        task = asyncio.create_task(ask(case, PROMPT))
        for _ in range(step):
            assert await asyncio.to_thread(gate.begun.acquire, timeout=PATIENCE)
        for _ in range(cancels):
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert case.kv.audit().pins, "the step still writes these blocks"
        gate.open()
        await case.engine.run(lambda: None)
        await asyncio.sleep(0)
        await assert_all_given_back(case)


async def test_scopes_and_timeouts_around_a_request_give_everything_back(tiny_llama: LlamaModel, gate: Gate) -> None:
    async with serving(tiny_llama) as case:
        gate.close()
        with anyio.move_on_after(0.01) as scope:
            await ask(case, PROMPT)
        assert scope.cancelled_caught
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await ask(case, PROMPT, name="second")
        gate.open()
        await case.engine.run(lambda: None)
        await asyncio.sleep(0)
        await assert_all_given_back(case)


async def test_a_failed_step_ends_its_request_and_serving_goes_on(tiny_llama: LlamaModel, gate: Gate) -> None:
    async with serving(tiny_llama) as case:
        gate.fault = ArithmeticError("broken")
        with pytest.raises(ArithmeticError):
            await ask(case, PROMPT)
        gate.fault = None
        assert len((await ask(case, PROMPT)).tokens) == NEW
        await assert_all_given_back(case)


async def test_a_closed_engine_refuses_and_gives_back(tiny_llama: LlamaModel) -> None:
    async with serving(tiny_llama) as case:
        await case.engine.__aexit__()
        with pytest.raises(EngineClosed):
            await ask(case, PROMPT)
        await assert_all_given_back(case)


@pytest.mark.parametrize(
    ("prompt", "new", "problem"),
    [
        ([], 1, "at least one token"),
        ([1, -1], 1, "each in"),
        ([1, 10**6], 1, "each in"),
        ([1], 0, "max_new_tokens"),
        ([1] * 2048, 1, "the model holds 2048"),
    ],
)
async def test_a_bad_request_is_refused_and_changes_nothing(
    prompt: list[int], new: int, problem: str, tiny_llama: LlamaModel
) -> None:
    async with serving(tiny_llama) as case:
        before = case.kv.snapshot()
        with pytest.raises(UsageError, match=problem):
            await ask(case, prompt, new=new)
        assert case.kv.snapshot() == before


async def test_a_request_that_can_never_fit_is_refused(tiny_llama: LlamaModel) -> None:
    async with serving(tiny_llama, gpu_blocks=8) as case:
        with pytest.raises(CapacityError):
            await ask(case, PROMPT)
        await assert_all_given_back(case)
