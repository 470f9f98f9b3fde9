"""The official `openai` client, synchronous and asynchronous, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import openai
import pytest

from aiokv_engine.model_file import LoadedModel
from aiokv_engine.server.errors import RequestOutcome
from tests.engine.cases import Gate
from tests.serve.cases import MODEL, PATIENCE, Running, running

T = TypeVar("T")
PROMPT = "the quick brown fox " * 20
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "the end"}]


@asynccontextmanager
async def asked(tiny: LoadedModel, *, max_queue: int = 256) -> AsyncIterator[tuple[Running, openai.AsyncOpenAI]]:
    async with (
        running(tiny, max_queue=max_queue) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0) as client,
    ):
        yield server, client


async def test_completions_and_their_usage(tiny: LoadedModel) -> None:
    async with asked(tiny) as (_, client):
        first = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0)
        again = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, seed=1, top_p=1, n=1)
    assert first.choices[0].text == again.choices[0].text
    assert first.choices[0].finish_reason in ("length", "stop")
    assert again.usage is not None
    details = again.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == again.usage.prompt_tokens // 64 * 64
    assert details.model_extra == {"gpu_cached_tokens": details.cached_tokens, "cpu_cached_tokens": 0}


async def test_chats_whole_and_streamed(tiny: LoadedModel) -> None:
    async with asked(tiny) as (_, client):
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=8)
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_completion_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_the_helper_that_collects_a_stream_gets_the_whole_chat(tiny: LoadedModel) -> None:
    async with asked(tiny) as (_, client):
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8)
        text = whole.choices[0].message.content or ""
        async with client.chat.completions.stream(
            model=MODEL, messages=MESSAGES, max_tokens=8, stop=text[-1]
        ) as stream:
            collected = await stream.get_final_completion()
    assert collected.choices[0].message.content == text[: text.index(text[-1])]
    assert collected.choices[0].finish_reason == "stop"


async def test_an_answer_goes_back_into_the_conversation(tiny: LoadedModel) -> None:
    async with asked(tiny) as (_, client):
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4)
        said = answer.choices[0].message.model_dump()
        longer = [*MESSAGES, said, {"role": "user", "content": "and then?"}]
        reply = await client.chat.completions.create(model=MODEL, messages=longer, max_tokens=4)  # type: ignore[arg-type]  # as people pass answers on
    assert reply.choices[0].message.role == "assistant"


async def test_models_are_listed_and_retrieved(tiny: LoadedModel) -> None:
    async with asked(tiny) as (_, client):
        listed = [model.id async for model in client.models.list()]
        found = await client.models.retrieve(MODEL)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("another")
    assert listed == [found.id] == [MODEL]


async def test_errors_are_those_the_client_knows(tiny: LoadedModel) -> None:
    async with asked(tiny) as (_, client):
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="another", prompt="a")
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.completions.create(model=MODEL, prompt="a", max_tokens=5000)
        with pytest.raises(openai.BadRequestError) as sampled:
            await client.completions.create(model=MODEL, prompt="a", n=3)
    assert unknown.value.code == "model_not_found"
    assert too_long.value.code == "context_length_exceeded"
    assert sampled.value.param == "n"


async def test_a_full_queue_is_a_rate_limit_that_the_client_retries(tiny: LoadedModel, steps: Gate) -> None:
    async with asked(tiny, max_queue=1) as (server, client):
        gate = server.server_app.service.gate
        (seat,) = gate.take_seats(1)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model=MODEL, prompt="a")
        assert refused.value.response.headers["retry-after"]
        patient = asyncio.create_task(client.with_options(max_retries=2).completions.create(model=MODEL, prompt="a"))
        metrics = server.server_app.service.metrics
        await server.until(lambda: metrics.requests(RequestOutcome.REJECTED) == 2)
        seat.leave()
        assert (await patient).choices
    assert steps.log


async def test_a_stream_that_is_closed_early_ends_its_request(tiny: LoadedModel, steps: Gate) -> None:
    async with asked(tiny) as (server, client):
        stream = await client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
        await server.assert_all_given_back()
        assert await server.metric("aiokv_serve_requests_total", outcome="cancelled") == 1
        assert len(steps.log) < 500


async def test_the_synchronous_client_gets_the_same(tiny: LoadedModel) -> None:
    def ask(url: str) -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE, max_retries=0) as client:
            whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6).choices[0].text
            stream = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, stream=True)
            return whole, "".join(chunk.choices[0].text for chunk in stream)

    async with running(tiny) as server:
        whole, streamed = await in_thread(lambda: ask(server.url))
    assert whole == streamed


async def in_thread(work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work)
