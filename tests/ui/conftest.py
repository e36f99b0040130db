"""A Chromium for the dashboard's tests; where there is none they are skipped, and the reason is told."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

CHROMIUM = next(filter(None, (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))), None)
FAULTS_ALLOWED = ("Failed to load resource",)  # an answer with an error status; whether it should be one is the test's affair

# Runs before the page: what a strict policy refused, and how long each painting took.
WATCH = """
window.refused = [];
window.draws = [];
document.addEventListener('securitypolicyviolation', event => window.refused.push(`${event.violatedDirective} ${event.blockedURI}`));
const ours = list => list.getEntries().filter(one => one.name === 'greenroom-draw').map(one => one.duration);
new PerformanceObserver(list => window.draws.push(...ours(list)))
  .observe({type: 'measure'});
"""

Open = Callable[..., AbstractAsyncContextManager[Any]]


def missing() -> str:
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return "" if CHROMIUM else "no chromium on PATH (Debian: apt-get install chromium)"


def axe_source() -> str | None:
    """axe-core, from where somebody put it: $GREENROOM_AXE, or the Python package that carries it."""
    named = os.environ.get("GREENROOM_AXE")
    places = [Path(named)] if named else []
    found = importlib.util.find_spec("axe_playwright_python")
    if found is not None and found.origin:
        places += sorted(Path(found.origin).parent.rglob("axe.min.js"))
    return next((one.read_text(encoding="utf-8") for one in places if one.is_file()), None)


async def axe_findings(page: Any, url: str, places: Sequence[str]) -> list[str]:
    """What axe-core, loaded into the page, has against these places of it."""
    found = []
    for at in places:
        await page.goto(f"{url}/ui/#/{at}")
        await page.wait_for_timeout(400)
        told = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        for one in told["violations"]:
            found += [f"{at}: {one['id']}: {node['target']} {node['failureSummary']}" for node in one["nodes"][:3]]
    return found


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def chromium() -> AsyncIterator[Any]:
    if reason := missing():
        pytest.skip(reason)
    from playwright.async_api import async_playwright

    async with async_playwright() as player:
        browser = await player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="session")
async def visit(chromium: Any) -> AsyncIterator[Open]:
    """`async with visit(url, "stage") as page`: leaves only when the page raised nothing, and nothing was refused to it.

    The page has been told how things stand, or why it is not told, unless `is_early`.
    """

    @asynccontextmanager
    async def opened(
        base: str,
        at: str = "stage",
        *,
        width: int = 1440,
        height: int = 900,
        theme: str = "dark",
        script: str = "",
        is_early: bool = False,
        **more: Any,
    ) -> AsyncIterator[Any]:
        size = {"width": width, "height": height}
        context = await chromium.new_context(viewport=size, color_scheme=theme, reduced_motion="reduce", **more)
        context.set_default_timeout(15_000)
        await context.add_init_script(WATCH + script)
        page = await context.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(f"raised: {error}"))
        page.on("dialog", lambda dialog: faults.append(f"a dialog: {dialog.message}"))
        page.on("console", lambda said: said.type == "error" and not said.text.startswith(FAULTS_ALLOWED) and faults.append(said.text))
        page.on("request", lambda asked: asked.url.startswith((base, "blob:", "data:")) or faults.append(f"asked elsewhere: {asked.url}"))
        await page.goto(f"{base}/ui/#/{at}")
        await page.locator("#view > div").first.wait_for()
        if not is_early:
            await page.locator(".meta .link", has_not_text="connecting").wait_for()
        try:
            yield page
            faults += [f"refused: {one}" for one in await page.evaluate("window.refused")]
            assert not faults
        finally:
            await context.close()

    yield opened
