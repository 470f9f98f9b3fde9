"""The live page in a real browser, on a real server: it shows what is so, says when it does not know, and is safe."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from playwright.async_api import Error as BrowserError
from playwright.async_api import Route

from aiokv import KVRuntime, Lease, RuntimeConfig, Tier
from aiokv_asgi import KvRoutes
from tests.asgi.browser import Shown, answer_with, needs_chromium, shown
from tests.asgi.support import app_of, new_runtime, served
from tests.runtime.support import GEOMETRY, GROUP, granted, prompt

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_factories=["asyncio"])]

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"
PIXEL = """([tier, cell]) => {
  const canvas = document.querySelector(`[data-name=${tier}] canvas`), side = canvas.width / 64;
  const [x, y] = [(cell % 64 + .35) * side, (Math.floor(cell / 64) + .12) * side];
  return [...canvas.getContext("2d").getImageData(x, y, 1, 1).data];
}"""


def host_runtime(*, gpu_blocks: int = 257, cpu_blocks: int = 512) -> KVRuntime:
    """Copies real bytes between arrays."""
    config = RuntimeConfig(geometry=GEOMETRY, gpu_blocks=gpu_blocks, cpu_blocks=cpu_blocks, backend="host")
    return KVRuntime(config, arenas={GROUP: [np.zeros((gpu_blocks, 4096), np.uint8)]})


async def serve_load(kv: KVRuntime) -> list[Lease]:
    """Requests that hit each tier and evict; what is still held at the end."""
    for seed in (*range(24), 23, 22, *range(24)):
        async with kv.acquire(f"request {seed}", prompt(16, seed=seed), reserve_tokens=16) as lease:
            lease.confirm(lease.num_tokens)
    held = [granted(kv, prompt(12, seed=seed), name=f"held {seed}") for seed in (1, 2)]
    for lease in held:
        await lease.ready()
        lease.confirm(lease.num_tokens)
    await kv.drain()
    return held


async def test_it_shows_the_numbers_of_the_snapshot_and_draws_the_pools() -> None:
    kv = host_runtime()
    async with served(app_of(KvRoutes(kv))) as server, shown(f"{server.origin}/live") as page:
        held = await serve_load(kv)
        snapshot, state = kv.snapshot(), await asyncio.to_thread(kv.collector.live, cells=1024)
        assert snapshot.cpu is not None
        await page.until_newer(state)
        assert await page.texts("#leases-active") == ["2"]
        for tier, counts in (("gpu", snapshot.gpu), ("cpu", snapshot.cpu)):
            expected = {
                "pinned": counts.resident - counts.evictable,
                "cached": counts.evictable,
                "reserved": counts.reserved,
                "free": counts.free,
                "quarantined": counts.quarantined,
            }
            for name, count in expected.items():
                assert await page.texts(f"[data-name={tier}] [data-count={name}]") == [f"{count:,}"], (tier, name)
        rows = [row.split("\t") for row in (await page.page.locator("#sources").inner_text()).splitlines()]
        assert [row[-1] for row in rows] == [f"{tokens:,}" for tokens in state.prompt_tokens.values()]
        assert min(state.prompt_tokens.values()) > 0
        assert await page.texts("#leases .request") == ["held 1", "held 2"]
        assert page.complaints == []
        assert {address.split("/")[2] for address in page.requested if not address.startswith("data:")} == {
            f"127.0.0.1:{server.port}"
        }
        await check_pixels(page, state.tiers[Tier.GPU].cells)
        for lease in held:
            lease.release()


async def check_pixels(page: Shown, cells: str) -> None:
    """Each state that occurs has the colour of its legend."""
    seen = {}
    for letter, name in (("p", "gpu"), ("c", "gpu-soft"), ("r", "held"), (".", "empty")):
        if letter in cells:
            pixel = await page.page.evaluate(PIXEL, ["gpu", cells.index(letter)])
            assert tuple(pixel[:3]) == await page.colour(name), letter
            seen[letter] = tuple(pixel)
    assert {"p", "c"} <= seen.keys()
    assert len(set(seen.values())) == len(seen)


async def test_a_hostile_request_id_is_text_and_the_policy_holds() -> None:
    kv = new_runtime()
    async with served(app_of(KvRoutes(kv))) as server, shown(f"{server.origin}/live") as page:
        lease = granted(kv, prompt(2), name=EVIL)
        await page.until_text("#leases .request", EVIL)
        assert await page.page.locator("main img, main script").count() == 0
        assert page.complaints == []
        with pytest.raises(BrowserError, match="TrustedHTML"):
            await page.page.evaluate("(html) => { document.body.innerHTML = html; }", EVIL)
        blocked = await page.page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'answered', () => 'blocked')")
        assert blocked == "blocked"
        assert any("Content Security Policy" in complaint for complaint in page.complaints)
        lease.release()


async def test_it_says_when_the_server_is_gone_and_goes_on_when_another_one_is_there() -> None:
    first = new_runtime()
    async with served(app_of(KvRoutes(first))) as server:
        port = server.port
        browsing = shown(f"{server.origin}/live")
        page = await browsing.__aenter__()
        await page.until_text("#standing", "Serving")
        async with first.acquire("before", prompt(3)):
            pass
    try:
        await page.until_text("#standing", "No answer")
        assert "gives no answer that can be shown since" in (await page.texts("#lost-text"))[0]
        assert await page.page.locator("#lost").is_visible()
        second = new_runtime(cpu_blocks=0)
        async with served(app_of(KvRoutes(second)), port=port):
            await page.until_text("#standing", "Serving")
            assert await page.page.locator("#lost").is_hidden()
            lease = granted(second, prompt(1), name="after")
            await page.until_text("#leases .request", "after")
            assert [said for said in page.complaints if "ERR_CONNECTION" not in said] == []
            lease.release()
    finally:
        await browsing.__aexit__(None, None, None)


async def test_it_asks_each_second_seldom_while_hidden_and_not_at_all_while_paused() -> None:
    kv = new_runtime()
    async with served(app_of(KvRoutes(kv))) as server, shown(f"{server.origin}/live", is_clocked=True) as page:
        await page.until_it_has_asked()
        await asks_after(page, milliseconds=1000)
        hide = "(is) => { Object.defineProperty(document, 'hidden', {configurable: true, get: () => is}); }"
        await page.page.evaluate(hide, True)  # noqa: FBT003  # an argument of the script
        await asks_after(page, milliseconds=1000)
        await asks_after(page, milliseconds=15_000)
        await page.page.evaluate(hide, False)  # noqa: FBT003
        async with page.page.expect_request("**/live.json"):
            await page.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        await page.page.get_by_role("button", name="Pause").focus()
        await page.page.keyboard.press("Space")
        assert await page.page.locator("#pause").get_attribute("aria-pressed") == "true"
        await page.until_text("#standing", "Paused")
        before = len(page.requested)
        await page.page.clock.run_for(60_000)
        assert len(page.requested) == before
        async with page.page.expect_request("**/live.json"):
            await page.page.keyboard.press("Space")
        await page.until_text("#standing", "Serving")


async def test_an_answer_that_comes_after_the_pause_leaves_it_paused() -> None:
    kv, is_late = new_runtime(), asyncio.Event()

    async def answer_late(route: Route) -> None:
        await is_late.wait()
        await route.continue_()

    async with served(app_of(KvRoutes(kv))) as server, shown(f"{server.origin}/live", is_clocked=True) as page:
        await page.until_it_has_asked()
        await page.page.route("**/live.json", answer_late)
        async with page.page.expect_request("**/live.json"):
            await page.page.clock.run_for(1000)
        await page.page.get_by_role("button", name="Pause").click()
        assert await page.texts("#standing") == ["Paused"]
        is_late.set()
        await page.until_it_has_asked()
        assert await page.texts("#standing") == ["Paused"]


async def asks_after(page: Shown, *, milliseconds: int) -> None:
    """The next request comes then and not before."""
    before = len(page.requested)
    await page.page.clock.run_for(milliseconds - 1)
    assert len(page.requested) == before
    async with page.page.expect_response("**/live.json") as answered:
        await page.page.clock.run_for(1)
    await (await answered.value).finished()
    await page.until_it_has_asked()


async def test_it_backs_off_while_nobody_answers_unless_told_to_try() -> None:
    kv = new_runtime()
    async with served(app_of(KvRoutes(kv))) as server, shown(f"{server.origin}/live", is_clocked=True) as page:
        await page.until_it_has_asked()
        await answer_with(page, {"error": "broken"}, status=500)
        for milliseconds in (1000, 1000, 2000, 4000, 8000, 15_000, 15_000):
            await asks_after(page, milliseconds=milliseconds)
            await page.until_text("#standing", "No answer")
        assert "HTTP 500" in (await page.texts("#lost-text"))[0]
        await page.page.unroute_all()
        await page.page.get_by_role("button", name="Try now").press("Enter")
        await page.until_text("#standing", "Serving")


async def test_degraded_closed_and_not_open_are_said() -> None:
    kv = new_runtime()
    async with served(app_of(KvRoutes(kv))) as server, shown(f"{server.origin}/live") as page:
        await page.until_text("#standing", "Serving")
        body: Any = (await asyncio.to_thread(kv.collector.live)).as_json()
        await answer_with(page, {**body, "degraded": ["unpinned", "something_new"]})
        await page.until_text("#standing", "Degraded")
        notices = await page.texts("#degraded .notice")
        assert "not pinned" in notices[0]
        assert notices[1] == "Degraded: something_new"
        await answer_with(page, {**body, "is_accepting": False})
        await page.until_text("#standing", "Closed")
        assert await page.texts("#degraded .notice") == []
        await answer_with(page, {"error": "not open"}, status=503)
        await page.until_text("#standing", "Not open yet")
        assert [said for said in page.complaints if "503" not in said] == []


async def test_what_cannot_be_shown_is_said_and_the_page_goes_on() -> None:
    kv = new_runtime()
    async with served(app_of(KvRoutes(kv))) as server, shown(f"{server.origin}/live") as page:
        await page.until_text("#standing", "Serving")
        body: Any = (await asyncio.to_thread(kv.collector.live)).as_json()
        for spoilt, said in (
            ({**body, "schema_version": 2}, "another version: reload this page"),
            ("<html>", "another version"),
            (None, "another version"),
            ({**body, "leases": None}, "leases"),
        ):
            await answer_with(page, spoilt)
            await page.until_text("#standing", "No answer")
            await page.page.wait_for_function("said => document.body.textContent.includes(said)", arg=said)
            await answer_with(page, body)
            await page.page.get_by_role("button", name="Try now").click()
            await page.until_text("#standing", "Serving")
        await answer_with(page, {**body, "uptime_s": 1e300, "prompt_tokens": {"gpu": 2**62, "compute": -1}})
        await page.until_text("#sources tr[data-source=compute] td:last-child", "-1")
        assert page.complaints == []


async def test_tiers_and_copies_that_another_process_has_not_are_shown_no_longer() -> None:
    kv = new_runtime()
    async with served(app_of(KvRoutes(kv))) as server, shown(f"{server.origin}/live") as page:
        await page.until_text("#standing", "Serving")
        assert await page.page.locator("section.tier, .direction").count() == 4
        body: Any = (await asyncio.to_thread(kv.collector.live)).as_json()
        await answer_with(page, {**body, "transfers": {}, "tiers": {"gpu": body["tiers"]["gpu"]}, "version": "other"})
        await page.until_text("#version", "other")
        await page.until_it_has_asked()
        assert await page.page.locator("section.tier[data-name=gpu]").count() == 1
        assert await page.page.locator("section.tier, .direction").count() == 1
        assert await page.page.locator("#no-copies").is_visible()


INJECTED = """() => {
  const policy = window.trustedTypes.createPolicy("attack", {createScript: (text) => text, createHTML: (text) => text});
  const script = document.createElement("script");
  script.text = policy.createScript("window.owned = 'script'");
  const holder = document.createElement("div");
  holder.innerHTML = policy.createHTML(
    `<img src=x onerror="window.owned = 'handler'"><iframe srcdoc="<script>parent.owned = 'frame'</script>"></iframe>`);
  const form = Object.assign(document.createElement("form"), {action: "/kv/reset?tier=all", method: "post"});
  document.body.append(script, holder, form);
  form.submit();
}"""


async def test_a_script_that_got_into_the_page_does_not_run_and_sends_no_form() -> None:
    kv = new_runtime()
    async with served(app_of(KvRoutes(kv))) as server, shown(f"{server.origin}/live") as page:
        await page.until_text("#standing", "Serving")
        await page.page.evaluate(INJECTED)
        for refused in ("inline script", "event handler", "the image", "form data"):
            await page.until_complaint(refused)
        assert await page.page.evaluate("String(window.owned)") == "undefined"
        assert not [address for address in page.requested if "reset" in address]
        assert page.page.url.endswith("/live")


async def test_without_a_cpu_tier_there_is_no_panel_for_it() -> None:
    kv = new_runtime(cpu_blocks=0)
    async with served(app_of(KvRoutes(kv))) as server, shown(f"{server.origin}/live") as page:
        await page.until_text("#standing", "Serving")
        assert await page.page.locator("section.tier").count() == 1
        assert await page.page.locator("#no-copies").is_visible()
        assert await page.texts("#sources td:first-child") == ["GPU memory", "computed"]


@pytest.mark.parametrize("scheme", ["dark", "light"])
async def test_it_can_be_read_in_both_schemes_and_at_the_width_of_a_phone(scheme: str) -> None:
    kv = host_runtime()
    viewport = {"width": 360, "height": 740}
    async with (
        served(app_of(KvRoutes(kv))) as server,
        shown(f"{server.origin}/live", color_scheme=scheme, viewport=viewport) as page,
    ):
        held = await serve_load(kv)
        held.append(granted(kv, prompt(1, seed=77), name="a-request-id-without-a-break-" * 20))
        await page.until_text("#leases-active", "3")
        assert await page.page.evaluate("document.documentElement.scrollWidth") <= 360
        panel, beneath = await page.colour("panel"), await page.colour("page")
        for name in ("text", "muted", "bad", "warn", "good"):
            ink = await page.colour(name)
            assert min(contrast(ink, panel), contrast(ink, beneath)) >= 4.5, name
        for name in ("good", "warn", "bad"):
            assert contrast(await page.colour(name), await page.colour(f"{name}-tint")) >= 4.5, name
        for lease in held:
            lease.release()


def contrast(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    """The ratio of WCAG 2.1, from 1 to 21: https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: tuple[int, int, int]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (value / 255 for value in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


async def test_who_does_not_see_the_drawings_is_told_what_they_show() -> None:
    kv = host_runtime()
    async with served(app_of(KvRoutes(kv))) as server, shown(f"{server.origin}/live") as page:
        held = await serve_load(kv)
        await page.until_newer(await asyncio.to_thread(kv.collector.live))
        label = await page.page.get_by_role("img", name="GPU tier").get_attribute("aria-label")
        pinned = (await page.texts("[data-name=gpu] [data-count=pinned]"))[0]
        assert f"of 256 blocks {pinned} are pinned" in str(label)
        assert await page.page.locator("canvas:not([aria-label])").count() == 0
        assert await page.page.locator("[aria-live], [role=status]").count() == 1, (
            "only a change of standing is read out"
        )
        assert await page.page.locator("th:not([scope])").count() == 0
        assert await page.page.get_by_role("table", name="The oldest leases").count() == 1
        assert await page.page.locator("html[lang=en]").count() == 1
        for lease in held:
            lease.release()
