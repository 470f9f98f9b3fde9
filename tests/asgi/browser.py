"""A headless Chromium for the tests of the live page; they are skipped where there is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from playwright.async_api import Page, Route, async_playwright

from aiokv.observe.live import LiveState

CHROMIUM: Final = shutil.which("chromium")
needs_chromium: Final = pytest.mark.skipif(CHROMIUM is None, reason="there is no `chromium` to show the live page in")
_ARGUMENTS: Final = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A page, and everything that it has said, asked for or thrown."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings in the console, exceptions, dialogs."""
    requested: list[str] = field(default_factory=list)
    """The address of every request."""

    async def until_text(self, selector: str, text: str) -> None:
        """Wait until an element shows exactly this."""
        await self.page.wait_for_function(
            "([selector, text]) => document.querySelector(selector)?.textContent === text", arg=[selector, text]
        )

    async def until_newer(self, state: LiveState) -> None:
        """Wait until it shows what was so after this."""
        await self.page.wait_for_function("(then) => shown && shown.uptime_s > then", arg=state.uptime_s)

    async def until_it_has_asked(self) -> None:
        """Wait until it has shown an answer and set its timer."""
        await self.page.wait_for_function("() => shown && !isAsking")

    async def until_complaint(self, words: str) -> None:
        """Wait until it has complained in these words."""
        while not any(words in complaint for complaint in self.complaints):
            await self.page.wait_for_event("console")

    async def texts(self, selector: str) -> list[str]:
        """What every such element shows."""
        return [text.strip() for text in await self.page.locator(selector).all_text_contents()]

    async def colour(self, name: str) -> tuple[int, int, int]:
        """A colour of the page's theme."""
        return _rgb(await self.page.evaluate(_READ_COLOUR, name))


@asynccontextmanager
async def shown(address: str, *, is_clocked: bool = False, **context: Any) -> AsyncIterator[Shown]:  # noqa: ANN401
    """The page at an address, in a browser of its own; `context` are options of Playwright's `new_context`.

    With `is_clocked` its time stands still but for `page.clock`.
    """
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(_ARGUMENTS))
        try:
            page = await (await browser.new_context(**context)).new_page()
            result = Shown(page=page)
            _listen(result)
            if is_clocked:
                await page.clock.install(time=0)
                await page.clock.pause_at(1000)
            await page.goto(address)
            yield result
        finally:
            await browser.close()


async def answer_with(page: Shown, body: Any, *, status: int = 200) -> None:  # noqa: ANN401  # JSON
    """From now on the page is told this."""

    async def fulfil(route: Route) -> None:
        await route.fulfill(status=status, content_type="application/json", body=json.dumps(body))

    await page.page.unroute_all()
    await page.page.route("**/live.json", fulfil)


def _listen(result: Shown) -> None:
    page, complaints = result.page, result.complaints
    page.on("request", lambda request: result.requested.append(request.url))
    page.on("pageerror", lambda error: complaints.append(f"exception: {error}"))
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))


_READ_COLOUR: Final = """(name) => {
  const pen = document.createElement("canvas").getContext("2d");
  pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return pen.fillStyle;
}"""


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
