"""Answers over HTTP: every form of a prompt, whole and streamed, with the usage that says where tokens came from."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from aiokv import Tier
from aiokv.testing import evict
from aiokv_engine.model_file import LoadedModel, load_model
from aiokv_engine.scheduler import GROUP
from aiokv_engine.tokenizer import GgufTokenizer
from tests.engine.tiny_model import write_tiny_model
from tests.serve.cases import MODEL, running

TEXT = "the quick brown fox jumps over the lazy dog, and then the other way round. " * 3


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The documents of a complete stream."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_completion_is_what_the_model_says(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        answer = (await server.complete(TEXT, max_tokens=9)).json()
        await server.assert_all_given_back()
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    assert [choice["index"] for choice in answer["choices"]] == [0]
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    prompt = len(tiny.tokenizer.encode(TEXT))
    assert answer["usage"]["prompt_tokens"] == prompt
    assert answer["usage"]["total_tokens"] == prompt + answer["usage"]["completion_tokens"]


async def test_text_and_its_tokens_get_the_same_answer_and_a_list_gets_one_choice_each(tiny: LoadedModel) -> None:
    tokens = tiny.tokenizer.encode(TEXT)
    async with running(tiny) as server:
        text = (await server.complete(TEXT, max_tokens=5)).json()["choices"][0]["text"]
        by_tokens = (await server.complete(tokens, max_tokens=5)).json()["choices"][0]["text"]
        several = (await server.complete([TEXT, "other", TEXT], max_tokens=5)).json()
        arrays = (await server.complete([tokens, [5, 6]], max_tokens=5)).json()
        await server.assert_all_given_back()
    assert by_tokens == text
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert several["choices"][0]["text"] == several["choices"][2]["text"] == text
    assert several["usage"]["prompt_tokens"] == 2 * len(tokens) + len(tiny.tokenizer.encode("other"))
    assert len(arrays["choices"]) == 2


@pytest.mark.parametrize("prompt", [TEXT, [TEXT, "other"]])
async def test_a_stream_says_what_the_whole_answer_says(tiny: LoadedModel, prompt: object) -> None:
    async with running(tiny) as server:
        whole = (await server.complete(prompt, max_tokens=12)).json()
        streamed = await server.complete(prompt, max_tokens=12, stream=True)
    events = events_of(streamed)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["cache-control"] == "no-cache"
    texts = [""] * len(whole["choices"])
    finishes: list[str | None] = [None] * len(whole["choices"])
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        finishes[choice["index"]] = choice["finish_reason"]
        assert "usage" not in event
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert finishes == [choice["finish_reason"] for choice in whole["choices"]]
    assert len({event["id"] for event in events}) == 1


async def test_a_stream_ends_with_the_usage_if_asked_for(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        said = {"max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}
        *pieces, last = events_of(await server.complete(TEXT, **said))
        again = events_of(await server.complete(TEXT, **said))[-1]
    assert all(event["usage"] is None for event in pieces)
    assert last["choices"] == []
    prompt = len(tiny.tokenizer.encode(TEXT))
    assert last["usage"]["prompt_tokens"] == prompt
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["gpu_cached_tokens"] == prompt // 64 * 64


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_a_stream_tells_the_usage_so_far_with_every_piece_if_asked_for(tiny: LoadedModel, path: str) -> None:
    what = {"prompt": TEXT} if path == "completions" else {"messages": [{"role": "user", "content": TEXT}]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    said = {"model": MODEL, "max_tokens": 6, "ignore_eos": True, "stream": True, "stream_options": options, **what}
    async with running(tiny) as server:
        events = events_of(await server.client.post(f"/v1/{path}", json=said))
    completed = [event["usage"]["completion_tokens"] for event in events]
    assert completed == sorted(completed)
    assert completed[-1] == 6
    assert len({event["usage"]["prompt_tokens"] for event in events}) == 1


async def test_the_usage_says_how_many_tokens_came_from_which_tier(tiny: LoadedModel) -> None:
    tokens = tiny.tokenizer.encode(TEXT)
    cached = len(tokens) // 64 * 64
    assert cached
    async with running(tiny) as server:
        cold = (await server.complete(TEXT)).json()["usage"]["prompt_tokens_details"]
        warm = (await server.complete(TEXT)).json()["usage"]["prompt_tokens_details"]
        await server.until_idle()
        evict(server.serving.kv, tokens, {GROUP: range(cached // 16)}, tier=Tier.GPU)
        loaded = (await server.complete(TEXT)).json()["usage"]["prompt_tokens_details"]
    assert cold == {"cached_tokens": 0, "gpu_cached_tokens": 0, "cpu_cached_tokens": 0}
    assert warm == {"cached_tokens": cached, "gpu_cached_tokens": cached, "cpu_cached_tokens": 0}
    assert loaded == {"cached_tokens": cached, "gpu_cached_tokens": 0, "cpu_cached_tokens": cached}


async def test_requests_of_different_salts_share_no_blocks(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        first = (await server.complete(TEXT, cache_salt="a")).json()
        other = (await server.complete(TEXT, cache_salt="b")).json()
        again = (await server.complete(TEXT, cache_salt="a")).json()
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, other, again)]
    assert cached == [0, 0, len(tiny.tokenizer.encode(TEXT)) // 64 * 64]
    assert first["choices"] == other["choices"] == again["choices"]


async def test_a_chat_is_rendered_with_the_models_template(tiny: LoadedModel) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is\nthe?"}]
    parts = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": _parts("what is", "the?")}]
    async with running(tiny) as server:
        answer = (await server.chat(messages, max_tokens=6)).json()
        in_parts = (await server.chat(parts, max_completion_tokens=6)).json()
        completed = (await server.complete(tiny.template.render(messages), max_tokens=6)).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["choices"][0]["message"]["content"] == completed["choices"][0]["text"]
    assert in_parts["choices"] == answer["choices"]
    assert in_parts["usage"]["prompt_tokens"] == completed["usage"]["prompt_tokens"]


async def test_a_streamed_chat_begins_with_the_role(tiny: LoadedModel) -> None:
    messages = [{"role": "user", "content": TEXT}]
    async with running(tiny) as server:
        whole = (await server.chat(messages, max_tokens=7)).json()
        events = events_of(await server.chat(messages, max_tokens=7, stream=True))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


async def test_an_answer_ends_before_a_stop_string_wherever_tokens_are_cut(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        full = (await server.complete(TEXT, max_tokens=40, ignore_eos=True)).json()["choices"][0]["text"]
        stop = full[5:8]
        expected = full[: full.index(stop)]
        said = {"max_tokens": 40, "ignore_eos": True, "stop": [stop, "never said"]}
        whole = (await server.complete(TEXT, **said)).json()
        events = events_of(await server.complete(TEXT, stream=True, **said))
        await server.assert_all_given_back()
    assert whole["choices"][0] == {"index": 0, "text": expected, "logprobs": None, "finish_reason": "stop"}
    assert whole["usage"]["completion_tokens"] < 40
    assert "".join(event["choices"][0]["text"] for event in events) == expected
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_seed_repeats_what_was_drawn_whoever_else_runs(tiny: LoadedModel) -> None:
    said = {"max_tokens": 20, "temperature": 1.5, "ignore_eos": True}
    async with running(tiny) as server:
        alone = await server.complete(TEXT, seed=5, **said)
        crowd = await asyncio.gather(*(server.complete(TEXT, seed=seed, **said) for seed in (4, 5, 6)))
        greedy = await server.complete(TEXT, max_tokens=20, ignore_eos=True)
    texts = [answer.json()["choices"][0]["text"] for answer in (alone, *crowd, greedy)]
    assert texts[0] == texts[2]
    assert len(set(texts)) == 4


async def test_the_one_model_is_listed_and_shown(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        listed = (await server.client.get("/v1/models")).json()
        shown = (await server.client.get(f"/v1/models/{MODEL}")).json()
    assert listed["object"] == "list"
    assert listed["data"] == [shown]
    assert (shown["id"], shown["object"], shown["max_model_len"]) == (MODEL, "model", 2048)


async def test_what_was_generated_is_counted(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        usages = [(await server.complete(TEXT)).json()["usage"] for _ in range(2)]
        tokens = await server.metric("aiokv_serve_generated_tokens_total")
        ok = await server.metric("aiokv_serve_requests_total", outcome="ok")
        cold = await server.metric("aiokv_serve_time_to_first_token_seconds_count", source="compute")
        warm = await server.metric("aiokv_serve_time_to_first_token_seconds_count", source="gpu")
        prompt = await server.metric("aiokv_serve_running_requests")
    assert tokens == sum(usage["completion_tokens"] for usage in usages)
    assert (ok, cold, warm, prompt) == (2, 1, 1, 0)


async def test_an_answer_that_the_model_ends_says_so(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        answer = (await server.complete("a", max_tokens=200)).json()
    assert answer["usage"]["completion_tokens"] < 200
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_an_answer_is_as_long_as_was_asked_for_or_as_is_usual(tiny: LoadedModel) -> None:
    messages = [{"role": "user", "content": "the"}]
    cases: list[tuple[dict[str, object], int]] = [
        ({}, 256),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
    ]
    async with running(tiny) as server:
        for said, tokens in cases:
            answer = (await server.chat(messages, ignore_eos=True, **said)).json()
            assert answer["usage"]["completion_tokens"] == tokens, said
        answer = (await server.complete("the", ignore_eos=True)).json()
        assert answer["usage"]["completion_tokens"] == 16


@pytest.fixture
def padded(tmp_path: Path) -> LoadedModel:
    """Some models pad their embedding; here more than half of the rows are padding, so that some would win."""
    return load_model(write_tiny_model(tmp_path / "padded.gguf", padding=400).path)


async def test_rows_beyond_the_vocabulary_are_never_said(padded: LoadedModel) -> None:
    async with running(padded) as server:
        said = {"max_tokens": 50, "ignore_eos": True}
        answers = [await server.complete(TEXT, **said), await server.complete(TEXT, **said, temperature=2, seed=1)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [50, 50]


async def test_a_stop_string_may_be_what_a_broken_character_becomes_at_the_end(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GgufTokenizer, "token_bytes", lambda _, __: b"\xc3")
    async with running(tiny) as server:
        (choice,) = (await server.complete(TEXT, max_tokens=1, ignore_eos=True, stop="\ufffd")).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]
