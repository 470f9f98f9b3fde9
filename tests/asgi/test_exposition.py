"""`/metrics`: the registry in the format asked for, never rendered on the event loop."""

from __future__ import annotations

import asyncio
import gzip
import threading

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from prometheus_client.registry import Collector as BaseCollector

from aiokv.observe.pools import PoolsCollector
from aiokv_asgi import KvRoutes
from tests.asgi.support import app_of, client_of, embedded, new_runtime, reached
from tests.runtime.support import prompt, turns

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
PLAIN = {"Accept": "text/plain", "Accept-Encoding": "identity"}


def leases_opened(text: str) -> float:
    families = {family.name: family for family in read_text(text)}
    return families["aiokv_leases_opened"].samples[0].value


class Witness(BaseCollector):
    """Notes in which thread it is read; may be told to wait there."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.reached = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        self.threads.append(threading.get_ident())
        self.reached.set()
        self.may_end.wait(20)
        return [GaugeMetricFamily("witness", "Of a scrape.", value=len(self.threads))]


# Formats.


async def test_text_is_what_a_scraper_gets_that_asks_for_nothing() -> None:
    async with embedded() as case:
        answer = await case.client.get("/metrics", headers={"Accept": "*/*"})
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert leases_opened(answer.text) == 0
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_openmetrics_is_given_to_who_asks_for_it() -> None:
    async with embedded() as case:
        answer = await case.client.get("/metrics", headers={"Accept": f"text/plain;q=0.5, {OPENMETRICS}"})
        assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert answer.text.endswith("# EOF\n")
        assert "aiokv_leases_opened" in {family.name for family in read_openmetrics(answer.text)}  # type: ignore[no-untyped-call]  # so in 0.26


@pytest.mark.parametrize(
    "accept",
    [
        "text/plain; version=abc",
        "text/plain; version=99999999999999999999.1.1.1.1, text/plain; version=abc",
        "application/openmetrics-text; version=1..0; escaping=",
        "application/openmetrics-text; version=; q=nan,,;;=",
        "application/openmetrics-text; version=2.abc; escaping=zzz",
        "version=-1.0.0; \\",
        "\x80\xff",
    ],
)
async def test_an_accept_header_that_makes_no_sense_is_answered_all_the_same(accept: str) -> None:
    async with embedded() as case:
        headers = [(b"host", b"localhost"), (b"accept", accept.encode("latin-1"))]
        answer = await case.client.get("/metrics", headers=headers)
        assert answer.status_code == 200
        assert "aiokv_build_info" in answer.text


@pytest.mark.parametrize(
    ("asked", "is_packed"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("identity", False),
        ("gzip;q=0", False),
        ("gzip; q=0.0, br", False),
        ("xgzip", False),
        ("", False),
    ],
)
async def test_gzip_is_used_where_it_is_understood(asked: str, *, is_packed: bool) -> None:
    async with embedded() as case, case.client.stream("GET", "/metrics", headers={"Accept-Encoding": asked}) as answer:
        raw = b"".join([part async for part in answer.aiter_raw()])
        assert (answer.headers.get("content-encoding") == "gzip") == is_packed
        text = gzip.decompress(raw) if is_packed else raw
        assert b"aiokv_build_info" in text
        assert (len(raw) < len(text) / 2) == is_packed
        assert "Accept-Encoding" in answer.headers["vary"]


async def test_single_names_can_be_asked_for() -> None:
    async with embedded() as case:
        answer = await case.client.get("/metrics", params={"name[]": ["aiokv_leases_opened_total", "no_such_name"]})
        assert [line for line in answer.text.splitlines() if not line.startswith("#")] == [
            "aiokv_leases_opened_total 0.0"
        ]


async def test_head_has_the_headers_only_and_other_methods_are_refused() -> None:
    async with embedded() as case:
        answer = await case.client.head("/metrics")
        assert (answer.status_code, answer.content) == (200, b"")
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            refused = await case.client.request(method, "/metrics")
            assert refused.status_code == 405
            assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD"}


# Life and threads.


async def test_it_is_empty_before_opening_and_keeps_the_last_values_after_closing() -> None:
    kv = new_runtime()
    kv_routes = KvRoutes(kv)
    app = app_of(kv_routes)
    async with client_of(app) as client:
        before = await client.get("/metrics", headers=PLAIN)
        assert (before.status_code, before.text) == (200, "")
        async with kv_routes.lifespan(app), kv.acquire("a", prompt(2)):
            pass
        after = await client.get("/metrics", headers=PLAIN)
        assert leases_opened(after.text) == 1


async def test_it_is_never_rendered_in_the_thread_of_the_loop() -> None:
    witness = Witness()
    registry = CollectorRegistry()
    registry.register(witness)
    async with embedded(registry=registry) as case:
        for accept in ("text/plain", OPENMETRICS):
            assert (await case.client.get("/metrics", headers={"Accept": accept})).status_code == 200
    assert len(witness.threads) == 2
    assert threading.get_ident() not in witness.threads


async def test_requests_are_served_while_many_scrape() -> None:
    asyncio.get_running_loop().set_debug(False)
    async with embedded() as case:
        scrapes = [asyncio.ensure_future(case.client.get("/metrics", headers=PLAIN)) for _ in range(24)]
        for seed in range(30):
            async with case.kv.acquire(f"{seed}", prompt(2, seed=seed % 5)) as lease:
                lease.confirm(lease.num_tokens)
        answers = await asyncio.gather(*scrapes)
        assert {answer.status_code for answer in answers} == {200}
        assert all(0 <= leases_opened(answer.text) <= 30 for answer in answers)
        assert leases_opened((await case.client.get("/metrics", headers=PLAIN)).text) == 30


async def test_a_stuck_collector_holds_neither_the_loop_nor_the_probes() -> None:
    witness = Witness()
    witness.may_end.clear()
    registry = CollectorRegistry()
    registry.register(witness)
    async with embedded(registry=registry) as case:
        stuck = asyncio.ensure_future(case.client.get("/metrics"))
        try:
            await reached(witness.reached)
            assert (await case.client.get("/ready")).status_code == 200
            assert (await case.client.get("/live.json")).status_code == 200
            assert not stuck.done()
        finally:
            witness.may_end.set()
        assert (await stuck).status_code == 200


async def test_a_scrape_that_is_cancelled_leaves_at_once() -> None:
    witness = Witness()
    witness.may_end.clear()
    registry = CollectorRegistry()
    registry.register(witness)
    async with embedded(registry=registry) as case:
        stuck = asyncio.ensure_future(case.client.get("/metrics"))
        try:
            await reached(witness.reached)
            stuck.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stuck
        finally:
            witness.may_end.set()
        assert (await case.client.get("/metrics")).status_code == 200


async def test_a_collector_that_fails_is_an_error_and_the_next_scrape_works() -> None:
    class Failing(Witness):
        def collect(self) -> list[Metric]:
            if not self.threads:
                self.threads.append(0)
                raise LookupError("no such counter")
            return []

    registry = CollectorRegistry()
    registry.register(Failing())
    async with embedded(registry=registry) as case:
        with pytest.raises(LookupError):
            await case.client.get("/metrics")
        assert (await case.client.get("/metrics")).status_code == 200


# Registries.


async def test_a_registry_that_is_given_is_shown_as_it_is() -> None:
    registry = CollectorRegistry()
    registry.register(Witness())
    async with embedded(registry=registry) as case:
        text = (await case.client.get("/metrics", headers=PLAIN)).text
        assert "witness 1.0" in text
        assert "aiokv_" not in text


async def test_two_runtimes_share_a_registry_with_a_label_each() -> None:
    chat, batch = new_runtime(), new_runtime(cpu_blocks=0)
    registry = CollectorRegistry()
    registry.register(PoolsCollector({"chat": chat.collector, "batch": batch.collector}))
    async with embedded(chat, registry=registry) as first, embedded(batch, registry=registry) as second:
        async with chat.acquire("a", prompt(1)):
            pass
        await turns(4)  # until nothing is left to be done that would count
        texts: list[httpx.Response] = [await case.client.get("/metrics", headers=PLAIN) for case in (first, second)]
        assert texts[0].text == texts[1].text
        assert 'aiokv_leases_opened_total{pool="chat"} 1.0' in texts[0].text
        assert 'aiokv_leases_opened_total{pool="batch"} 0.0' in texts[0].text
