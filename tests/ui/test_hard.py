"""The dashboard where it is hard: long lists, long hours, other colours, twice the size, a prefix in front, keys with scopes."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.serve.test_keys import FE, Running
from tests.stories.rig import Rig, fake
from tests.ui import scenes
from tests.ui.conftest import CHROMIUM, Open, missing
from tests.ui.front import Front
from tests.ui.stand import Stand
from tests.ui.test_pages_browser import PAGES

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

UPDATES = 2_000
HEAP_GROWTH_BYTES_MAX = 3 << 20
QUICK_FRAMES = "window.requestAnimationFrame = act => setTimeout(() => act(performance.now()), 0);"


# ----------------------------------------------------------------------------------------------------- long lists, hours


async def test_a_thousand_requests_are_shown_without_delay(visit: Open, record_property: Any) -> None:
    """Those that have ended are painted once; what comes every second costs no more than a short list."""
    async with Stand(scenes.turns) as stand:
        stand.requests = scenes.many_requests(stand.now, 1_500)
        async with visit(stand.url, "requests") as page:
            rows = page.locator(".reqs tbody tr")
            await rows.nth(102).wait_for()
            for more in range(2, 11):
                await page.get_by_role("button", name="Show older ones").click()
                await rows.nth(more * 100 + 2).wait_for()
            assert await rows.count() == 1_003
            assert await page.evaluate("document.documentElement.scrollWidth") <= 1440
            await page.evaluate("window.draws.length = 0")
            await page.wait_for_timeout(5000)
            draws = await page.evaluate("window.draws")
            median = statistics.median(draws)
            record_property("1,000 requests", round(median, 1))
            print(f"1,000 requests: median {median:.1f} ms, worst {max(draws):.1f} ms, {len(draws)} paintings")
            assert len(draws) >= 4
            assert median < 120
            shown = await page.locator(".reqs tbody tr td:first-child").all_inner_texts()
            assert len(shown) == 1_003


async def test_a_page_that_stays_open_keeps_the_newest_requests_only(visit: Open) -> None:
    """At most a thousand are kept, in order and without a hole; older ones are read again from there."""
    async with Stand(scenes.turns) as stand:
        told = scenes.many_requests(stand.now, 1_400)
        opened, ended = told[:3], told[3:]
        stand.requests = [*opened, *ended[1_300:]]
        async with visit(stand.url, "requests") as page:
            for newest in range(1_210, -1, -90):
                stand.requests = [*opened, *ended[newest:]]
                listed = await rows_until(page, lambda ids, first=ended[newest]["id"]: ids[0] == first)
            assert listed == [one["id"] for one in ended[newest : newest + len(listed)]], "no hole"
            assert 900 <= len(listed) <= 1_000
            await page.get_by_role("button", name="Show older ones").click()
            longer = await rows_until(page, lambda ids: len(ids) == len(listed) + 100)
            assert longer == [one["id"] for one in ended[newest : newest + len(longer)]]
            burst = [{**one, "id": f"new-{n}", "at": one["at"] + 5_000} for n, one in enumerate(ended[:250])]  # more than a page holds
            stand.requests = [*opened, *burst, *ended]
            assert await rows_until(page, lambda ids: ids[0] == "new-0") == [f"new-{n}" for n in range(100)]


async def rows_until(page: Any, is_there: Callable[[list[str]], bool]) -> list[str]:
    """The ended requests that the page has, once they are as wanted."""
    async with asyncio.timeout(20):
        while True:
            ids = await page.evaluate("import('./requests.js').then(one => one.rowsOf('').rows.map(row => row.id))")
            if len(ids) > 3 and is_there(ids[3:]):
                return list(ids[3:])
            await asyncio.sleep(0.05)


async def test_the_heap_stays_as_large_through_thousands_of_updates(visit: Open, record_property: Any) -> None:
    """States, events and log lines come and go; what they were is let go of."""
    script = f"""async () => {{
        const state = await import('./state.js'), store = await import('./store.js');
        const raw = await (await fetch('../api/status')).json();
        window.go = async (from, count) => {{
            for (let i = from; i < from + count; i++) {{
                const moved = list => list.map(each => ({{...each, in_flight: (i + 1) % 5, since_s: i}}));
                const models = raw.models.map(one => ({{...one, instances: moved(one.instances)}}));
                const {{boot_id, queue, advice}} = raw;
                state.changed({{kind: 'status', now: raw.now + i / 10, uptime_s: 100 + i, boot_id, models, queue, advice}});
                const model = models[i % models.length].id;
                const event = {{id: 1000 + i, at: raw.now + i, kind: 'note', model, level: 'info', text: `event ${{i}}`}};
                store.put({{events: [event, ...store.store.events].slice(0, 200)}});
                await new Promise(done => setTimeout(done, 0));
            }}
        }};
        await window.go(0, {UPDATES // 5});
    }}"""
    async with Stand(lambda now: scenes.crowd(now, 20, 12)) as stand, visit(stand.url, script=QUICK_FRAMES) as page:
        await page.evaluate(f"({script})()")
        devtools = await page.context.new_cdp_session(page)
        await devtools.send("Performance.enable")

        async def heap() -> float:
            for _ in range(3):
                await devtools.send("HeapProfiler.collectGarbage")
            found = await devtools.send("Performance.getMetrics")
            return float(next(one["value"] for one in found["metrics"] if one["name"] == "JSHeapUsedSize"))

        async def nodes() -> int:
            return int(await page.evaluate("document.querySelectorAll('*').length"))

        await page.evaluate("window.draws.length = 0")
        before, elements = await heap(), await nodes()
        await page.evaluate(f"window.go({UPDATES}, {UPDATES})")
        after = await heap()
        draws = len(await page.evaluate("window.draws"))
        record_property("heap growth", after - before)
        print(f"{draws} paintings: heap {before / 2**20:.2f} to {after / 2**20:.2f} MiB")
        assert draws > UPDATES // 4
        assert after - before < HEAP_GROWTH_BYTES_MAX
        assert await nodes() < elements + 200


HIDE = """at => {
  Object.defineProperty(document, 'hidden', {value: at, configurable: true});
  document.dispatchEvent(new Event('visibilitychange'));
}"""


async def test_a_tab_that_nobody_looks_at_gives_its_connections_back(visit: Open) -> None:
    """A browser has six for a server: those of forgotten tabs are missing in the one that is looked at."""
    async with Stand(scenes.turns) as stand, visit(stand.url, "model/agent-32b", script=SOONER) as page:
        await page.locator("#log div", has_text="not bold").first.wait_for()
        assert (stand.logs_open, len(stand._readers)) == (1, 1)
        await page.evaluate(HIDE, True)
        async with asyncio.timeout(10):
            while stand.logs_open or stand._readers:
                stand.tell("agent-32b", "note", "is anybody there")  # a write is how a server notices
                await asyncio.sleep(0.05)
        await page.evaluate(HIDE, False)
        async with asyncio.timeout(10):
            while not (stand.logs_open and stand._readers):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await page.get_by_text("following").wait_for()


# A minute is over in a second.
SOONER = "const wait = window.setTimeout; window.setTimeout = (act, ms, ...more) => wait(act, ms >= 60000 ? 1000 : ms, ...more);"


# ----------------------------------------------------------------------------------------------------- colours, size


async def test_forced_colours_still_tell_states_and_parts_apart(visit: Open) -> None:
    """Where the system chooses the colours: glyphs, the edges of blocks, fills of meters, the chosen button."""
    async with Stand(scenes.turns) as stand, visit(stand.url, forced_colors="active") as page:
        assert await page.evaluate("matchMedia('(forced-colors: active)').matches")
        blocks = page.locator(".bar > .blk")
        widths = await blocks.evaluate_all("list => list.map(one => getComputedStyle(one).borderTopWidth)")
        assert len(widths) > 4
        assert "0px" not in widths
        glyphs = await page.locator("#view .st use").evaluate_all("list => [...new Set(list.map(one => one.getAttribute('href')))]")
        assert len(glyphs) >= 5
        for selector in (".blk.s-ready .name", ".link", "#tabs [aria-current]"):
            found = page.locator(selector).first
            assert await found.evaluate("one => getComputedStyle(one).color") != await found.evaluate(BEHIND), selector
        chosen = await page.locator("#tabs a").evaluate_all("list => list.map(one => getComputedStyle(one).borderBottomColor)")
        assert len(set(chosen)) == 2, "the open section is marked"
        await page.goto(f"{stand.url}/ui/#/requests")
        parts = page.locator(".reqs .stack").first.locator("i")
        await parts.first.wait_for()
        looks = await parts.evaluate_all(
            "list => list.map(one => getComputedStyle(one).backgroundImage + getComputedStyle(one).backgroundColor)"
        )
        assert len(set(looks)) == len(looks), "each cause of a wait has its own look"
        pressed = await page.locator(".seg button").evaluate_all("list => list.map(one => getComputedStyle(one).backgroundColor)")
        assert pressed[0] != pressed[1], "the chosen filter is marked"
        await page.goto(f"{stand.url}/ui/#/advice")
        fill = page.locator(".meter i").first
        assert await fill.evaluate("one => getComputedStyle(one).backgroundColor") != await fill.evaluate(BEHIND)


BEHIND = """one => {
  for (let at = one.parentElement; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if (colour !== 'rgba(0, 0, 0, 0)') return colour;
  }
  return 'rgb(255, 255, 255)';
}"""


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def large_letters() -> AsyncIterator[Any]:
    """A browser whose reader has set letters of twice the usual size."""
    if reason := missing():
        pytest.skip(reason)
    from playwright.async_api import async_playwright

    async with async_playwright() as player:
        more = ["--no-sandbox", "--disable-dev-shm-usage", "--blink-settings=defaultFontSize=32"]
        browser = await player.chromium.launch(executable_path=CHROMIUM, args=more)
        yield browser
        await browser.close()


async def hides_nothing(page: Any, url: str, width: int) -> None:
    for at in PAGES:
        await page.goto(f"{url}/ui/#/{at}")
        await page.locator("#view h1").first.wait_for()
        await page.wait_for_timeout(150)
        assert await page.evaluate("document.documentElement.scrollWidth") <= width, at
        cut = await page.evaluate(CUT)
        assert not cut, (at, cut)
    assert await page.locator("#tabs a").count() == 5


@pytest.mark.parametrize("theme", ["dark", "light"])
async def test_zoomed_to_200_percent_nothing_is_hidden(visit: Open, theme: str) -> None:
    """On a screen of 1,280 pixels: no sideways scroll, no cut words on buttons."""
    async with Stand(scenes.turns) as stand, visit(stand.url, width=640, height=450, theme=theme, device_scale_factor=2) as page:
        await hides_nothing(page, stand.url, 640)


async def test_letters_of_twice_the_size_hide_nothing(large_letters: Any) -> None:
    """They get the layout of a screen half as wide."""
    async with Stand(scenes.turns) as stand:
        page = await large_letters.new_page(viewport={"width": 1280, "height": 900})
        await page.goto(f"{stand.url}/ui/")
        assert await page.evaluate("getComputedStyle(document.documentElement).fontSize") == "32px"
        await hides_nothing(page, stand.url, 1280)
        await page.close()


# Buttons whose words do not fit into them.
CUT = """[...document.querySelectorAll('button, .btn, #tabs a')]
  .filter(one => one.offsetParent && one.scrollWidth > one.clientWidth + 1).map(one => one.textContent)"""


# ----------------------------------------------------------------------------------------------------- a prefix in front


async def test_a_proxy_may_serve_it_below_a_prefix(tmp_path: Path, visit: Open) -> None:
    """Its address leads to the page, the page asks for nothing beside the prefix, and all of it works: events, buttons, playground."""
    async with Rig(tmp_path, {"chat": fake(1000), "other": fake(1000)}) as rig, Front(f"http://127.0.0.1:{rig.port}", "/gr") as front:
        async with aiohttp.ClientSession() as session:
            for entry in ("/", "/ui", "/upstream/"):
                async with session.get(front.url + entry) as answer:
                    assert (answer.status, str(answer.url)) == (200, f"{front.url}/ui/")
        async with visit(front.url) as page:
            await page.get_by_role("heading", name="On stage", exact=True).wait_for()
            for at in (*PAGES[:3], "model/chat", *PAGES[4:]):
                await page.goto(f"{front.url}/ui/#/{at}")
                await page.wait_for_timeout(150)
            await page.goto(f"{front.url}/ui/#/model/chat")
            await page.get_by_role("button", name="Load chat").click()
            await page.locator(".head .s-ready").wait_for()
            await page.locator("#log div", has_text="start 1 on").first.wait_for()
            await page.goto(f"{front.url}/ui/#/play?model=chat")
            await page.get_by_label("Message").fill("good evening")
            await page.get_by_role("button", name="Send").click()
            await page.locator(".turn[aria-busy=false]").wait_for()
            await page.get_by_role("button", name="Show request").click()
        assert len(rig.chats("chat")) == 1
        assert front.stray == []


# ----------------------------------------------------------------------------------------------------- keys with scopes

ADMIN, LOOK, CALL = "sk-admin-51a7", "sk-look-93bd", "sk-call-20ee"


async def with_key(page: Any, key: str) -> None:
    await page.get_by_label("API key").fill(key)
    await page.get_by_role("button", name="Use this key").click()


async def test_each_key_opens_what_its_scopes_say(tmp_path: Path, visit: Open) -> None:
    """A true server: no key is asked for one; who may call plays, who may look sees why buttons are off, the third may do all."""
    model = {"cmd": [sys.executable, "-S", "-E", str(FE), "--port", "${PORT}"], "memory": "10MiB", "device": "d0"}
    keys = [
        {"key": ADMIN, "name": "boss"},
        {"key": LOOK, "name": "wall", "scopes": ["view"]},
        {"key": CALL, "name": "app", "scopes": ["inference"], "models": ["a*"]},
    ]
    config = {
        "apiKeys": keys,
        "devices": {"d0": {"memory": "100MiB", "headroom": "0MiB", "probe": "none"}},
        "startPort": 24_000 + os.getpid() * 40 % 16_000,
        "models": {"a1": model, "b1": model},
    }
    async with Running(tmp_path, config) as server:
        url = server.url.rstrip("/")
        async with visit(url) as page:
            await page.get_by_role("heading", name="This server asks for a key").wait_for()
            await with_key(page, "sk-wrong")
            await page.get_by_role("heading", name="This server asks for a key").wait_for()
            await with_key(page, CALL)
            await page.get_by_role("heading", name="This key may call models, not watch them").wait_for()
            assert await page.locator("#tabs a").all_inner_texts() == ["Playground"]
            await page.get_by_role("link", name="Playground").first.click()
            await page.locator("option", has_text="a1").wait_for(state="attached")
            assert await page.locator(".play option").all_text_contents() == ["a1"]
            await page.get_by_label("Message").fill("good evening")
            await page.get_by_role("button", name="Send").click()
            await page.locator(".turn[aria-busy=false]").wait_for()
            assert not await page.locator(".turn .bad").count()
            assert not [one for one in await page.evaluate("performance.getEntriesByType('resource').map(one => one.name)") if "sk-" in one]
        async with visit(url) as page:
            await with_key(page, LOOK)
            await page.get_by_role("heading", name="On stage", exact=True).wait_for()
            await page.get_by_text("key wall (look only)").wait_for()
            buttons = page.locator("#view button[data-verb]")
            await buttons.first.wait_for()
            assert all([await one.is_disabled() for one in await buttons.all()])
            await page.goto(f"{url}/ui/#/play")
            await page.get_by_text("Your key may look, not call models").wait_for()
            await page.goto(f"{url}/ui/#/model/b1")
            assert await page.get_by_role("button", name="Load b1").get_attribute("title") == "Your key may look, not change"
        async with visit(url, "model/b1") as page:
            await with_key(page, ADMIN)
            await page.get_by_role("button", name="Load b1").click()
            await page.locator(".head .s-ready").wait_for()


# ----------------------------------------------------------------------------------------------------- advice


async def test_advice_can_be_tried_with_other_values(visit: Open) -> None:
    """A command to copy, quoted for a shell whatever a model is called; and the tab says how many pieces there are."""
    odd = "it's $(rm -rf ~);x"
    async with Stand(scenes.turns) as stand:
        assert stand.advice is not None
        stand.advice["thrash"][0]["fixes"][0]["changes"] = [f"models.{odd}.memory=38438MiB"]
        async with visit(stand.url, "advice") as page:
            await page.get_by_role("link", name="Advice 2 open").wait_for()
            commands = page.locator(".try pre")
            await commands.first.wait_for()
            first, second = await commands.all_inner_texts()
            assert first == "greenroom replay --since 1h --set 'models.it'\\''s $(rm -rf ~);x.memory=38438MiB'"
            assert second == "greenroom replay --since 1h --set models.sql-7b.ttl=240s"
            await page.get_by_role("button", name="Copy command").first.click()
            await page.get_by_text("Copied").wait_for()


async def test_who_takes_turns_now_is_said_before_the_planner_has_looked(visit: Open) -> None:
    """The page never says that all is well while its own headline says otherwise."""
    async with Stand(scenes.turns) as stand:
        size = {"verdict": "unknown", "device": "gpu0", "text": "not enough seen yet: 0 min of 60", "measures": []}
        stand.advice = {"thrash": [], "ttl": [], "outgrown": size, "seen": None}
        async with visit(stand.url, "advice") as page:
            await page.get_by_role("heading", name="Nothing to change so far").wait_for()
            circle = {"models": ["agent-32b", "coder-14b"], "device": "gpu0", "since_s": 95.0, "swaps": 6, "moving_s": 31.0, "share": 0.33}
            stand.status["thrash"] = [circle]
            stand.tell("agent-32b", "thrash", "agent-32b and coder-14b take turns on gpu0")
            await page.get_by_role("heading", name="agent-32b and coder-14b take turns on gpu0").wait_for()
            await page.get_by_text("6 swaps took 31").wait_for()
            assert not await page.get_by_text("No models take turns").count()
