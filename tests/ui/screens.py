"""Takes the pictures in docs/screens: `python -m tests.ui.screens`, with Chromium and Playwright; with `--live` also the last one.

The invented server's scenes, and one of a true greenroom with fake engines (tests/stories/rig.py) while a swap is under way.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.stories.rig import Rig, fake, vllm
from tests.ui import scenes
from tests.ui.conftest import CHROMIUM, missing
from tests.ui.stand import Stand

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "screens"
WIDE, PHONE = (1440, 900), (390, 844)


async def shot(browser: Any, url: str, name: str, at: str, theme: str, size: tuple[int, int] = WIDE, full: bool = True) -> Any:
    page = await browser.new_page(viewport={"width": size[0], "height": size[1]}, reduced_motion="reduce")
    await page.goto(f"{url}/ui/?theme={theme}#/{at}")
    await page.wait_for_timeout(1200)
    await page.screenshot(path=FOLDER / f"{name}.png", full_page=full)
    return page


async def invented(browser: Any) -> None:
    async with Stand(scenes.turns) as stand:
        for name, at, theme, size, full in (
            ("1-stage-dark", "stage", "dark", WIDE, True),
            ("2-stage-light", "stage", "light", WIDE, True),
            ("3-requests", "requests", "dark", WIDE, True),
            ("4-model", "model/agent-32b", "light", WIDE, True),
            ("5-advice", "advice", "dark", WIDE, True),
            ("6-phone-stage", "stage", "light", PHONE, False),
            ("6-phone-requests", "requests", "dark", PHONE, False),
        ):
            await (await shot(browser, stand.url, name, at, theme, size, full)).close()
        page = await shot(browser, stand.url, "7-question", "model/agent-32b", "dark")
        await page.get_by_role("button", name="Unload agent-32b").click()
        await page.wait_for_timeout(200)
        await page.screenshot(path=FOLDER / "7-question.png")
        await page.close()
        page = await shot(browser, stand.url, "8-playground", "play?model=coder-14b", "light")
        await page.get_by_label("Message").fill("How do I avoid swapping between two models?")
        await page.get_by_role("button", name="Send").click()
        await page.locator(".turn[aria-busy=false]").wait_for()
        await page.screenshot(path=FOLDER / "8-playground.png")
        await page.close()
        page = await shot(browser, stand.url, "9-reconnecting", "stage", "light", full=False)
        await stand.go()
        await page.get_by_text("No connection since").wait_for()
        await page.wait_for_timeout(500)
        await page.screenshot(path=FOLDER / "9-reconnecting.png")
        await page.close()
    async with Stand(lambda now: scenes.crowd(now, 200, 30)) as stand:
        await (await shot(browser, stand.url, "10-200-models", "stage", "dark")).close()
    async with Stand(scenes.far) as stand:
        for name, at, theme, size in (
            ("13-files-and-peers", "stage", "dark", WIDE),
            ("14-fetch", "model/gemma-12b", "light", WIDE),
            ("14-phone-fetch", "model/gemma-12b", "dark", PHONE),
        ):
            await (await shot(browser, stand.url, name, at, theme, size)).close()
    async with Stand(scenes.hostile) as stand:
        await (await shot(browser, stand.url, "11-hostile-names", "stage", "light")).close()


async def live(browser: Any) -> None:
    """Two fake vLLMs that take turns, as a running server shows them."""
    engines = {"sleep_s": 1.5, "wake_s": 2.5, "ready_after": 2.0}
    models = {
        "agent-32b": vllm(44_000, 1_400, **engines),
        "coder-14b": vllm(36_000, 1_200, **engines),
        "chat-8b": fake(14_800, config={"pin": True}),
        "embed-l": fake(3_400),
        "math-14b": fake(23_000),
    }
    with tempfile.TemporaryDirectory() as folder:
        async with Rig(Path(folder), models, budget_mib=81_500) as rig:

            async def client(model: str, times: int, gap_s: float) -> None:
                for _ in range(times):
                    await rig.chat(model, stream=True)
                    await asyncio.sleep(gap_s)

            crowd = asyncio.gather(
                client("agent-32b", 40, 0.5), client("coder-14b", 40, 0.7), client("chat-8b", 40, 1.0), client("embed-l", 5, 1.0)
            )
            await asyncio.sleep(60)
            page = await shot(browser, f"http://127.0.0.1:{rig.port}", "12-true-server", "stage", "dark")
            await page.close()
            await crowd


async def main() -> int:
    if reason := missing():
        print(reason, file=sys.stderr)
        return 1
    from playwright.async_api import async_playwright

    FOLDER.mkdir(parents=True, exist_ok=True)
    async with async_playwright() as player:
        browser = await player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        await invented(browser)
        if "--live" in sys.argv:
            await live(browser)
        await browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
