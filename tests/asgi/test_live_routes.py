"""`/live` and `/live.json`: one page under a strict policy, and its numbers, taken seldom and in a thread."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import threading
from importlib.resources import files
from types import SimpleNamespace

import pytest

from aiokv.observe.live import LiveState
from aiokv.observe.metrics import Collector
from aiokv_asgi import KvRoutes
from tests.asgi.support import app_of, client_of, embedded, new_runtime, reached
from tests.runtime.support import granted, prompt


def directives_of(policy: str) -> dict[str, str]:
    return dict(part.strip().partition(" ")[::2] for part in policy.split(";"))


async def test_the_policy_allows_the_page_and_nothing_else() -> None:
    async with embedded() as case:
        answer = await case.client.get("/live")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = directives_of(answer.headers["content-security-policy"])
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


def test_the_page_is_one_file_that_names_no_other_place() -> None:
    page = files("aiokv_asgi").joinpath("live.html").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s'\"]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\bsrc=|@import|url\(|\bstyle=\"|\bon\w+=", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", page)


async def test_the_body_is_the_live_state() -> None:
    async with embedded() as case:
        lease = granted(case.kv, prompt(3), name="req-1")
        answer = await case.client.get("/live.json")
        assert answer.headers["content-type"] == "application/json"
        body, state = answer.json(), await asyncio.to_thread(case.kv.collector.live, cells=1024)
        expected = json.loads(json.dumps(state.as_json()))
        for moving in (body, expected):
            assert moving.pop("uptime_s") > 0
            assert moving["leases"]["oldest"][0].pop("age_s") > 0
        assert body == expected
        lease.release()


async def test_strange_request_ids_arrive_as_they_are() -> None:
    names = [
        "<script>alert(1)</script>",
        'quote " and \\ and \u2028',
        "日本語 🚀",
        "\x00\x1b[31m",
        "\ud800",
    ]
    async with embedded() as case:
        leases = [granted(case.kv, prompt(0, seed=seed), name=name) for seed, name in enumerate(names)]
        answer = await case.client.get("/live.json")
        shown = [lease["request_id"] for lease in answer.json()["leases"]["oldest"]]
        assert shown == [*names[:-1], "?"]
        for lease in leases:
            lease.release()


async def test_long_request_ids_make_no_state_that_nobody_can_read() -> None:
    """`aiokv top` reads 1 MiB at most."""
    async with embedded() as case:
        leases = [granted(case.kv, prompt(0, seed=seed), name="\x01" * 100_000) for seed in range(8)]
        answer = await case.client.get("/live.json")
        assert len(answer.content) < 32_000
        assert [lease["request_id"] for lease in answer.json()["leases"]["oldest"]] == ["\x01" * 256] * 8
        for lease in leases:
            lease.release()


async def test_before_it_is_open_there_is_nothing_to_show_and_afterwards_the_end() -> None:
    kv = new_runtime()
    kv_routes = KvRoutes(kv)
    app = app_of(kv_routes)
    async with client_of(app) as client:
        answer = await client.get("/live.json")
        assert answer.status_code == 503
        assert "not open" in answer.json()["error"]
        assert (await client.get("/live")).status_code == 200
        async with kv_routes.lifespan(app):
            assert (await client.get("/live.json")).json()["is_accepting"]
    async with client_of(app_of(KvRoutes(kv))) as client:
        assert not (await client.get("/live.json")).json()["is_accepting"]


async def test_many_who_watch_share_one_look_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    looking = threading.Event()
    may_end = threading.Event()
    take = Collector.live

    def watched(collector: Collector, *, cells: int = 512) -> LiveState:
        threads.append(threading.get_ident())
        looking.set()
        may_end.wait(20)
        return take(collector, cells=cells)

    monkeypatch.setattr(Collector, "live", watched)
    async with embedded() as case:
        watching = [asyncio.ensure_future(case.client.get("/live.json")) for _ in range(20)]
        await reached(looking)
        may_end.set()
        answers = await asyncio.gather(*watching)
    assert {answer.status_code for answer in answers} == {200}
    assert len(threads) < 20
    assert threading.get_ident() not in threads


async def test_a_state_is_shown_for_a_quarter_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("aiokv_asgi.live_page.time", SimpleNamespace(monotonic=lambda: clock[0]))
    async with embedded() as case:
        active, leases = [], []
        for number, now in enumerate((100.0, 100.2, 100.26, 100.5, 100.52)):
            clock[0] = now
            leases.append(granted(case.kv, prompt(0, seed=number)))
            active.append((await case.client.get("/live.json")).json()["leases"]["active"])
        assert active == [1, 1, 3, 3, 5]
        for lease in leases:
            lease.release()


async def test_one_who_leaves_takes_nothing_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    looking = threading.Event()
    may_end = threading.Event()
    take = Collector.live

    def watched(collector: Collector, *, cells: int = 512) -> LiveState:
        looking.set()
        may_end.wait(20)
        return take(collector, cells=cells)

    monkeypatch.setattr(Collector, "live", watched)
    async with embedded() as case:
        first = asyncio.ensure_future(case.client.get("/live.json"))
        await reached(looking)
        others = [asyncio.ensure_future(case.client.get("/live.json")) for _ in range(3)]
        first.cancel()
        await asyncio.wait([first])
        may_end.set()
        assert {answer.status_code for answer in await asyncio.gather(*others)} == {200}


@pytest.mark.parametrize("path", ["/live", "/live.json"])
async def test_head_and_other_methods(path: str) -> None:
    async with embedded() as case:
        head = await case.client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert (await case.client.post(path)).status_code == 405
