"""The server's own metrics: there from the start, closed labels, every request once."""

from __future__ import annotations

import asyncio

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from aiokv import Tier
from aiokv.testing import evict
from aiokv_engine.model_file import LoadedModel
from aiokv_engine.scheduler import GROUP
from aiokv_engine.server.errors import RequestOutcome
from tests.serve.cases import Running, running

SOURCES = ("gpu", "cpu", "compute")


async def families_of(server: Running) -> dict[str, Metric]:
    text = (await server.client.get("/metrics")).text
    found = {family.name: family for family in text_string_to_metric_families(text)}
    return {name: family for name, family in found.items() if name.startswith("aiokv_serve")}


async def test_every_series_is_there_before_the_first_request(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        found = await families_of(server)
    assert found.keys() == {
        "aiokv_serve_requests",
        "aiokv_serve_time_to_first_token_seconds",
        "aiokv_serve_queue_requests",
        "aiokv_serve_running_requests",
        "aiokv_serve_generated_tokens",
    }
    requests = found["aiokv_serve_requests"].samples
    assert {sample.labels["outcome"] for sample in requests} == set(RequestOutcome)
    first_tokens = found["aiokv_serve_time_to_first_token_seconds"].samples
    assert {sample.labels["source"] for sample in first_tokens} == set(SOURCES)
    assert not any(sample.value for family in found.values() for sample in family.samples)


async def test_the_helps_say_what_is_counted(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        helps = {name: family.documentation for name, family in (await families_of(server)).items()}
    assert "a request may hold several" in helps["aiokv_serve_queue_requests"]
    assert "a request may hold several" in helps["aiokv_serve_running_requests"]
    first_token = helps["aiokv_serve_time_to_first_token_seconds"]
    assert "cpu if any of the prompt was loaded, else gpu if any was a GPU hit, else compute" in first_token


async def test_the_runtimes_metrics_stand_beside_them(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        usage = (await server.complete([9] * 70)).json()["usage"]
        assert (
            await server.metric("aiokv_prompt_tokens_total", source="compute", phase="first") == usage["prompt_tokens"]
        )


async def test_the_usages_of_all_requests_sum_to_what_the_runtime_counts(tiny: LoadedModel) -> None:
    """A pool for a few prompts at a time, so that some come back from the CPU tier."""
    async with running(tiny, gpu_blocks=33) as server:
        answers = [
            await asyncio.gather(
                *(server.complete([9 + kind] * (70 + 64 * kind), max_tokens=1 + kind) for kind in range(5))
            )
            for _ in range(4)
        ]
        await server.assert_all_given_back()
        counted = [await server.metric("aiokv_prompt_tokens_total", source=each, phase="first") for each in SOURCES]
        generated = await server.metric("aiokv_serve_generated_tokens_total")
    usages = [answer.json()["usage"] for batch in answers for answer in batch]
    found = [usage["prompt_tokens_details"] for usage in usages]
    sums = [sum(each[f"{source}_cached_tokens"] for each in found) for source in ("gpu", "cpu")]
    assert [*sums, sum(usage["prompt_tokens"] for usage in usages) - sum(sums)] == counted
    assert all(counted), "a source that has given nothing shows nothing"
    assert generated == sum(usage["completion_tokens"] for usage in usages)


async def test_every_request_is_counted_once_by_how_it_ended(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        answers = [await server.complete(prompt) for prompt in ("a", ["a", "b"], "", "a" * 5000)]
        await server.client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
        await server.client.post("/v1/completions", json={"model": "another", "prompt": "a"})
        await server.client.get("/v1/models")
        await server.client.get("/v1/completions")
        server.server_app.start_draining()
        refused = await server.complete("a")
        counted = {
            outcome.value: await server.metric("aiokv_serve_requests_total", outcome=outcome)
            for outcome in RequestOutcome
        }
    assert [answer.status_code for answer in (*answers, refused)] == [200, 200, 400, 400, 503]
    assert counted == {"ok": 2, "invalid": 4, "rejected": 1, "cancelled": 0, "failed": 0}


async def test_the_first_token_is_timed_once_a_request_by_where_its_prompt_came_from(tiny: LoadedModel) -> None:
    prompt = [9] * 140
    name = "aiokv_serve_time_to_first_token_seconds"
    async with running(tiny) as server:
        await server.complete([prompt, [8] * 20], max_tokens=3)
        await server.complete(prompt, max_tokens=3)
        await server.until_idle()
        evict(server.serving.kv, prompt, {GROUP: range(4, 8)}, tier=Tier.GPU)
        await server.complete(prompt, max_tokens=3)
        counts = [await server.metric(f"{name}_count", source=source) for source in SOURCES]
        sums = [await server.metric(f"{name}_sum", source=source) for source in SOURCES]
        last = [await server.metric(f"{name}_bucket", source=source, le="+Inf") for source in SOURCES]
    assert counts == last == [1, 1, 1]
    assert all(total > 0 for total in sums)
