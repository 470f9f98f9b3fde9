"""Of which time the live page speaks: what it has watched itself, else all since the start, and no rate of one look."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import FloatRect

from aiokv.model.sizes import format_bytes
from aiokv_asgi import KvRoutes
from tests.asgi.browser import Shown, answer_with, needs_chromium, shown
from tests.asgi.support import app_of, new_runtime, served

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_factories=["asyncio"])]

WIDTHS = "[...document.getElementById('share').children].map((part) => part.style.width)"
LEAST_ROOM = """() => Math.min(...[...document.querySelectorAll(".panel")].flatMap((panel) => {
  const style = getComputedStyle(panel), edge = panel.getBoundingClientRect().right - parseFloat(style.paddingRight);
  return [...panel.querySelectorAll("dt, dd, h2, .small, .axis span")].map((node) => {
    const text = document.createRange();
    text.selectNodeContents(node);
    return edge - text.getBoundingClientRect().right;
  });
}))"""


def tokens(*, gpu: int, cpu: int, compute: int) -> dict[str, int]:
    return {"gpu": gpu, "cpu": cpu, "compute": compute}


@asynccontextmanager
async def watching(first: dict[str, Any], **context: Any) -> AsyncIterator[tuple[Shown, dict[str, Any]]]:  # noqa: ANN401
    """A page that has looked once, at a state with these members; and that state."""
    kv = new_runtime()
    async with (
        served(app_of(KvRoutes(kv))) as server,
        shown(f"{server.origin}/live", is_clocked=True, **context) as page,
    ):
        await page.until_it_has_asked()
        state = {**(await asyncio.to_thread(kv.collector.live)).as_json(), **first}
        await answer_with(page, state)
        await page.page.reload()
        await page.until_it_has_asked()
        yield page, state


async def look(page: Shown, state: dict[str, Any]) -> None:
    """The page looks again, and sees this."""
    await answer_with(page, state)
    async with page.page.expect_response("**/live.json") as answered:
        await page.page.clock.run_for(1000)
    await (await answered.value).finished()
    await page.page.wait_for_function("(then) => shown.uptime_s === then && !isAsking", arg=state["uptime_s"])


async def test_after_one_look_shares_are_since_the_start_and_there_is_no_rate() -> None:
    async with watching({"uptime_s": 39, "prompt_tokens": tokens(gpu=80, cpu=3920, compute=4000)}) as (page, _):
        assert await page.texts("#hit-share, #hit-label") == ["50.0 %", "from cache, since start"]
        assert await page.page.evaluate(WIDTHS) == ["1%", "49%", "50%"]
        assert await page.texts("#share-basis") == ["share, since\u00a0start"]
        assert await page.texts("#sources td:nth-child(2)") == ["1.0 %", "49.0 %", "50.0 %"]
        assert await page.texts("#sources td:nth-child(3)") == ["–", "–", "–"]
        assert await page.texts(".rate") == ["–", "–"]
        assert [text.rpartition(", ")[2] for text in await page.texts(".evicted")] == ["–", "–"]


async def test_the_time_that_is_named_is_the_time_that_was_watched() -> None:
    async with watching({"uptime_s": 1000, "prompt_tokens": tokens(gpu=80, cpu=3920, compute=4000)}) as (page, state):
        seen = []
        for seconds in (1, 10, 80, 294, 310, 3000):
            grown = tokens(gpu=80, cpu=3920 + 3 * seconds, compute=4000 + seconds)
            await look(page, {**state, "uptime_s": 1000 + seconds, "prompt_tokens": grown})
            (label,) = await page.texts("#hit-label")
            assert await page.texts("#share-basis") == ["share, " + label.partition(", ")[2].replace(" ", "\u00a0")]
            assert await page.texts("#hit-share") == ["75.0 %"]
            assert await page.texts("#sources td:nth-child(2)") == ["0.0 %", "75.0 %", "25.0 %"]
            assert await page.texts("#sources td:nth-child(3)") == ["0", "3", "1"]
            seen.append(label.partition(", ")[2])
        assert seen == ["last 1 s", "last 10 s", "last 80 s", "last 294 s", "last 5 min", "last 5 min"]


async def test_while_no_prompt_comes_shares_are_since_the_start_and_rates_are_zero() -> None:
    async with watching({"uptime_s": 39, "prompt_tokens": tokens(gpu=100, cpu=100, compute=200)}) as (page, state):
        await look(page, {**state, "uptime_s": 49})
        assert await page.texts("#hit-share, #hit-label") == ["50.0 %", "from cache, since start"]
        assert await page.texts("#sources td:nth-child(3)") == ["0", "0", "0"]
        assert await page.texts(".rate") == ["0 B/s", "0 B/s"]


async def test_without_any_prompt_there_is_no_share() -> None:
    async with watching({"uptime_s": 1, "prompt_tokens": tokens(gpu=0, cpu=0, compute=0)}) as (page, _):
        assert await page.texts("#hit-share, #hit-label") == ["–", "from cache, since start"]
        assert await page.page.evaluate(WIDTHS) == ["0px", "0px", "0px"]


async def test_totals_that_fall_are_those_of_another_process_which_is_watched_anew() -> None:
    async with watching({"uptime_s": 100, "prompt_tokens": tokens(gpu=0, cpu=0, compute=5000)}) as (page, state):
        await look(page, {**state, "uptime_s": 101, "prompt_tokens": tokens(gpu=0, cpu=0, compute=6000)})
        assert await page.texts("#hit-label") == ["from cache, last 1 s"]
        seen = []
        for uptime, total in ((102, 10), (103, 20)):
            await look(page, {**state, "uptime_s": uptime, "prompt_tokens": tokens(gpu=0, cpu=total, compute=total)})
            rates = await page.texts("#sources td:nth-child(3)")
            seen.append([*await page.texts("#hit-share, #hit-label"), rates[-1]])
        assert seen == [["50.0 %", "from cache, since start", "–"], ["50.0 %", "from cache, last 1 s", "10"]]


@pytest.mark.parametrize(("active", "said"), [(2, "the oldest first"), (12, "oldest 2 of 12")])
async def test_it_says_how_many_of_the_leases_it_lists(active: int, said: str) -> None:
    listed = [{"request_id": f"req-{number}", "age_s": 1, "state": "ready", "blocks": 1} for number in range(2)]
    leases = {"active": active, "overdue": 0, "waiting": 0, "oldest": listed}
    async with watching({"leases": leases}) as (page, _):
        assert await page.texts("#leases-listed") == [said]


async def test_bytes_are_written_as_everywhere_else() -> None:
    sizes = [0, 1, 1023, 1024, 1536, 10**6, 123_456_789, 2**30 - 1, 2**40, 5 * 2**50]
    async with watching({}) as (page, _):
        assert await page.page.evaluate("(sizes) => sizes.map(showBytes)", sizes) == list(map(format_bytes, sizes))


@pytest.mark.parametrize("width", [360, 390, 860, 1280])
async def test_every_caption_stands_in_its_card_and_beside_its_figure(width: int) -> None:
    many = tokens(gpu=10**9, cpu=10**10, compute=10**11)
    async with watching({"prompt_tokens": many}, viewport={"width": width, "height": 844}) as (page, _):
        assert await page.page.evaluate(LEAST_ROOM) >= 0
        figure, table = [await box(page, selector) for selector in ("#hit-share", "#sources")]
        caption = await box(page, "text=Tokens per second")
        if width < 860:
            assert caption["y"] > table["y"] + table["height"] > figure["y"]
            assert await page.page.evaluate("document.documentElement.scrollWidth") <= width
        else:
            assert caption["x"] > table["x"] + table["width"] > figure["x"] + figure["width"]


async def box(page: Shown, selector: str) -> FloatRect:
    """Where an element that is shown stands."""
    found = await page.page.locator(selector).bounding_box()
    assert found is not None
    return found
