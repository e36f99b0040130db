"""The dashboard over an invented server: every button, every state, any name, any width."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest

from tests.ui import scenes
from tests.ui.conftest import Open, axe_findings, axe_source
from tests.ui.stand import Stand

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

PAGES = ("stage", "requests", "models", "model/agent-32b", "advice", "play", "play?kind=embed", "play?kind=rerank")


def crowd(now: float) -> scenes.Json:
    return scenes.crowd(now, 200, 30)


# ------------------------------------------------------------------------------------------------------------ buttons


async def once(stand: Stand, target: str, method: str = "POST") -> None:
    for _ in range(100):
        if stand.asked(method, target):
            break
        await asyncio.sleep(0.03)
    await asyncio.sleep(0.2)
    assert stand.asked(method, target) == [target], [call[:2] for call in stand.calls if call[0] != "GET"]


@pytest.mark.parametrize(
    ("at", "name", "answer", "target"),
    [
        ("stage", "Load ocr-2b", None, "ocr-2b/load"),
        ("stage", "Wake judge-70b", "Wake it", "judge-70b/wake"),
        ("stage", "Unload sql-7b", "Unload", "sql-7b/unload"),
        ("model/chat-8b", "Unpin chat-8b", None, "chat-8b/unpin"),
        ("model/sql-7b", "Pin sql-7b", None, "sql-7b/pin"),
        ("model/agent-32b", "Unload agent-32b", "Unload when they finish", "agent-32b/unload"),
        ("model/agent-32b", "Unload agent-32b", "Cut off 4 requests", "agent-32b/unload?force=1"),
        ("model/summary-7b", "Unload summary-7b", "Unload", "summary-7b/unload"),
        ("model/legacy-13b", "Load legacy-13b", "Load it", "legacy-13b/load"),
        ("models", "Load guard-1b", None, "guard-1b/load"),
    ],
)
async def test_a_button_reaches_its_endpoint_once_even_when_it_is_pressed_twice(
    visit: Open, at: str, name: str, answer: str | None, target: str
) -> None:
    async with Stand(scenes.turns) as stand:
        stand.hold_s = 0.3
        async with visit(stand.url, "model/ocr-2b" if name == "Load ocr-2b" else at) as page:
            button = page.get_by_role("button", name=name, exact=True)
            if answer is None:
                await button.dblclick()
            else:
                await button.click()
                assert not stand.asked("POST"), "a question comes first"
                await page.get_by_role("dialog").get_by_role("button", name=answer, exact=True).dblclick()
            await once(stand, f"/api/models/{target}")
            await page.get_by_text(f"{target.partition('/')[2].partition('?')[0]} of {target.partition('/')[0]} is done").first.wait_for()


async def test_sleep_asks_first_and_says_what_it_costs(visit: Open) -> None:
    def ready(now: float) -> scenes.Json:
        told = scenes.turns(now)
        agent = next(one for one in told["models"] if one["id"] == "agent-32b")
        agent["state"] = agent["instances"][0]["state"] = "ready"
        return told

    async with Stand(ready) as stand, visit(stand.url) as page:
        await page.get_by_role("button", name="Sleep agent-32b").click()
        dialog = page.get_by_role("dialog")
        assert "4 requests are running; new ones will wait." in await dialog.inner_text()
        assert "wakes it again in about 4.9\u00a0s" in await dialog.inner_text()
        assert await page.evaluate("document.activeElement.textContent") == "Keep as is"
        await page.keyboard.press("Escape")
        assert await page.evaluate("document.activeElement.getAttribute('aria-label')") == "Sleep agent-32b"
        assert not stand.asked("POST")
        await page.get_by_role("button", name="Sleep agent-32b").click()
        stand.entry("agent-32b")["state"] = "asleep"
        stand.tell("agent-32b", "asleep", "asleep at level 1")
        await dialog.get_by_text("agent-32b is asleep already.").wait_for()
        assert await dialog.get_by_role("button").all_inner_texts() == ["Close"]


async def test_a_waiting_request_is_cancelled_once(visit: Open) -> None:
    async with Stand(scenes.turns) as stand, visit(stand.url, "requests") as page:
        await page.get_by_role("button", name="Cancel request r-9f24 for coder-14b").click()
        await page.get_by_role("dialog").get_by_role("button", name="Cancel the request").dblclick()
        await once(stand, "/api/requests/r-9f24", "DELETE")
        await page.locator("tr", has_text="cancelled").wait_for()


async def test_a_refusal_stands_beside_its_button(visit: Open) -> None:
    async with Stand(scenes.turns) as stand:
        stand.refuse = (409, "sql-7b is pinned: unpin it first <b>now</b>")
        async with visit(stand.url) as page:
            await page.get_by_role("button", name="Unload sql-7b").click()
            await page.get_by_role("dialog").get_by_role("button", name="Unload", exact=True).click()
            await page.locator(".wordrow .bad", has_text="unpin it first <b>now</b>").wait_for()


# ------------------------------------------------------------------------------------------------------------- states


async def test_a_lost_server_is_said_and_found_again_without_a_reload(visit: Open) -> None:
    async with Stand(scenes.turns) as stand, visit(stand.url) as page:
        await page.get_by_text("live", exact=True).wait_for()
        events = await page.locator(".story.tight dd").count()
        await stand.go()
        await page.get_by_text("No connection since").wait_for()
        buttons = page.locator("#view button[data-verb]")
        assert await buttons.count() > 5
        assert all([await one.is_disabled() for one in await buttons.all()])
        stand.status["boot_id"] = "b-2"
        stand.entry("sql-7b").update(state="stopped", instances=[])
        await stand.come()
        await page.get_by_role("button", name="Try now").click()
        await page.get_by_text("No connection since").wait_for(state="detached")
        await page.locator(".home a[data-m='sql-7b']").wait_for()
        assert await page.locator(".story.tight dd").count() == events, "no event twice"


async def test_events_arrive_by_themselves(visit: Open) -> None:
    async with Stand(scenes.turns) as stand, visit(stand.url) as page:
        await page.get_by_text("live", exact=True).wait_for()  # what comes sooner belongs to the past, and is not read out
        stand.entry("vision-11b")["state"] = "ready"
        stand.entry("vision-11b")["instances"][0]["state"] = "ready"
        stand.tell("vision-11b", "ready", "ready after 18 s")
        await page.locator("tr[data-m='vision-11b'] .s-ready").wait_for()
        await page.locator("#live", has_text="vision-11b: ready after 18 s").wait_for(state="attached")
        assert len(stand.asked("GET", "/api/events")) == 2, "one stream, and the past once"


async def test_a_server_that_asks_for_a_key_gets_it_in_a_header_only(visit: Open) -> None:
    async with Stand(scenes.turns) as stand:
        stand.key = "s3cret"
        async with visit(stand.url) as page:
            await page.get_by_role("heading", name="This server asks for a key").wait_for()
            await page.get_by_label("API key").fill("s3cret")
            await page.get_by_role("button", name="Use this key").click()
            await page.get_by_role("heading", name="On stage", exact=True).wait_for()
            assert not [target for _, target, _ in stand.calls if "s3cret" in target]
            assert "s3cret" not in page.url


async def test_a_key_that_may_only_look_sees_why_buttons_are_off(visit: Open) -> None:
    async with Stand(scenes.turns) as stand:
        stand.me = {"key_name": "viewer", "scopes": ["inference", "view"]}
        async with visit(stand.url) as page:
            button = page.get_by_role("button", name="Unload sql-7b")
            assert await button.is_disabled()
            assert await button.get_attribute("title") == "Your key may look, not change"
            await page.get_by_text("key viewer (look only)").wait_for()


async def test_a_key_for_models_alone_is_told_so_and_may_play(visit: Open) -> None:
    async with Stand(scenes.turns) as stand:
        stand.me = {"key_name": "app-7", "scopes": ["inference"]}
        stand.denied = (403, "this key may not look")
        async with visit(stand.url) as page:
            await page.get_by_role("heading", name="This key may call models, not watch them").wait_for()
            assert await page.locator("#tabs a").all_inner_texts() == ["Playground"]
            await page.goto(f"{stand.url}/ui/#/play")
            await page.get_by_label("Model", exact=True).wait_for()


async def test_a_failing_control_plane_is_said(visit: Open) -> None:
    async with Stand(scenes.turns) as stand:
        stand.denied = (500, "ledger: database or disk is full")
        async with visit(stand.url) as page:
            await page.get_by_role("heading", name="The control plane failed to answer").wait_for()
            await page.get_by_text("database or disk is full").wait_for()
            stand.denied = None
            await page.get_by_role("button", name="Try now").click()
            await page.get_by_role("heading", name="On stage", exact=True).wait_for()


@pytest.mark.parametrize("at", PAGES)
async def test_an_older_server_leaves_no_page_blank(visit: Open, at: str) -> None:
    async with Stand(scenes.turns).plain() as stand, visit(stand.url, at) as page:
        await page.wait_for_timeout(700)
        assert len((await page.locator("#view").inner_text()).strip()) > 60
        if at in ("stage", "requests", "advice"):
            await page.get_by_text("not available yet", exact=False).first.wait_for()


async def test_an_empty_stage_says_what_to_do(visit: Open) -> None:
    async with Stand(lambda now: scenes.status([], now=now)) as stand, visit(stand.url) as page:
        await page.get_by_role("heading", name="The stage is empty").wait_for()
        await page.get_by_role("button", name="Copy the example").click()
        await page.get_by_text("Copied").wait_for()


async def test_the_servers_clock_counts_not_the_browsers(visit: Open) -> None:
    late = "const now = Date.now.bind(Date); Date.now = () => now() - 3 * 3600e3;"
    async with Stand(scenes.turns) as stand, visit(stand.url, script=late) as page:
        shown = await page.locator(".meta .when").inner_text()
        wanted = await page.evaluate(f"new Date({stand.now} * 1000).toTimeString().slice(0, 5)")
        assert shown[:5] == wanted or shown[3:5] == f"{(int(wanted[3:]) + 1) % 60:02}"


async def test_looking_sends_nothing_but_questions_to_the_control_plane(visit: Open) -> None:
    async with Stand(scenes.turns) as stand, visit(stand.url) as page:
        for at in PAGES:
            await page.goto(f"{stand.url}/ui/#/{at}")
            await page.wait_for_timeout(250)
        assert {method for method, _, _ in stand.calls} == {"GET"}
        assert not [target for _, target, _ in stand.calls if not target.startswith("/api/")]


async def test_an_error_that_is_over_is_no_alarm(visit: Open) -> None:
    """It is told in red while it lasts, and as what was last once the model has been ready again."""
    async with Stand(scenes.turns) as stand, visit(stand.url, "model/legacy-13b") as page:
        await page.locator("p.bad.said", has_text="out of memory while loading").wait_for()
        await page.get_by_text("live", exact=True).wait_for()
        stand.entry("legacy-13b").update(state="ready", failing=False, failures=0)
        stand.tell("legacy-13b", "ready", "ready after 57 s")
        await page.locator("p.mut.said", has_text="The last error, before it was ready again: out of memory while loading").wait_for()
        assert await page.locator("p.bad.said").count() == 0


async def test_advice_of_a_short_time_is_told_in_counts(visit: Open) -> None:
    """Per hour only what was seen for ten minutes."""
    async with Stand(scenes.turns) as stand:
        assert stand.advice is not None
        (one,) = stand.advice["thrash"]
        async with visit(stand.url, "advice") as page:
            await page.get_by_text("swaps an hour").wait_for()
            await page.get_by_text("46 swaps/h").wait_for()
        one.update(
            {
                "swaps": 83,
                "seconds": 80.2,
                "swaps_h": None,
                "switching_s": 31.0,
                "draining_s": 9.0,
                "switching_s_h": None,
                "draining_s_h": None,
            }
        )
        one["fixes"] = [{**fix, "swaps": fix["swaps_h"], "swaps_h": None} for fix in one["fixes"]]
        async with visit(stand.url, "advice") as page:
            cost = page.locator(".cost")
            await cost.wait_for()
            said = (await cost.inner_text()).replace("\u00a0", " ").split("\n")
            assert {"83", "swaps in 80 s", "40 s", "lost in that time"} <= set(said)
            shown = await page.locator(".tip-card", has_text="take turns").inner_text()
            assert "46 swaps" in shown
            assert not [word for word in ("an hour", "each hour", "/h ") if word in shown.replace("refused 210/h", "")]


# ------------------------------------------------------------------------------------------------- names, width, crowd


async def test_names_that_want_to_be_something_else_stay_text(visit: Open) -> None:
    async with Stand(scenes.hostile) as stand, visit(stand.url) as page:
        shown = {one["id"] for one in stand.status["models"]} & set(scenes.HOSTILE)
        assert len(shown) >= 9
        for at in ("stage", "models", "requests"):
            await page.goto(f"{stand.url}/ui/#/{at}")
            await page.wait_for_timeout(300)
            assert await page.locator("#view :is(img, script, iframe, object), #view [onclick], #view [onerror]").count() == 0
        await page.goto(f"{stand.url}/ui/#/models")
        for id in shown:
            link = page.locator("tr[data-m]").filter(has=page.locator(f"a[href={css(id)}]")).locator("a.name")
            assert await link.text_content() == id
            await link.click()
            heading = page.locator("h1 bdi")
            await heading.wait_for()
            assert await heading.text_content() == id
            await page.go_back()
            await page.locator("tr[data-m]").first.wait_for()


def css(id: str) -> str:
    """The address of a model's page, as text in a selector."""
    address = "#/model/" + quote(id, safe="!'()*~")
    return '"' + address.replace('"', '\\"') + '"'


LONG = "model/" + quote(scenes.HOSTILE[1], safe="")


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("width", [360, 768, 1280, 2560])
async def test_no_page_scrolls_sideways(visit: Open, width: int, theme: str) -> None:
    scene: Callable[[float], scenes.Json] = scenes.hostile if theme == "dark" else scenes.turns
    async with Stand(scene) as stand, visit(stand.url, width=width, theme=theme) as page:
        for at in (*PAGES, LONG):
            await page.goto(f"{stand.url}/ui/#/{at}")
            await page.wait_for_timeout(200)
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, at
        assert await page.evaluate("document.documentElement.dataset.theme") == theme


async def test_two_hundred_models_are_found_by_name(visit: Open) -> None:
    async with Stand(crowd) as stand, visit(stand.url, "models") as page:
        await page.get_by_role("heading", name="200 models").wait_for()
        await page.keyboard.press("/")
        await page.keyboard.type("kite-7b")
        await page.get_by_role("heading", name="1 of 200 models").wait_for()
        await page.keyboard.press("Enter")
        await page.locator("h1 bdi", has_text="kite-7b").wait_for()


async def test_an_update_of_the_stage_is_quick(visit: Open, record_property: Any) -> None:
    """16 ms on a quiet machine is the aim; here it is asserted generously, and the figure is told."""
    for name, scene in (("30 models", lambda now: scenes.crowd(now, 30, 30)), ("200 models, 30 up", crowd)):
        async with Stand(scene) as stand, visit(stand.url) as page:
            await page.wait_for_timeout(500)
            await page.evaluate("window.draws.length = 0")
            for i in range(12):
                for one in stand.status["models"][:30]:
                    one["instances"][0]["in_flight"] = i % 5
                stand.tell(stand.status["models"][i]["id"], "note", "something happened")
                await page.wait_for_timeout(270)
            draws = await page.evaluate("window.draws")
            median = statistics.median(draws)
            record_property(name, round(median, 1))
            print(f"update of the stage, {name}: median {median:.1f} ms, worst {max(draws):.1f} ms, {len(draws)} paintings")
            assert len(draws) >= 10
            assert median < 100


# ------------------------------------------------------------------------------------------------- keyboard, structure


async def test_keys_move_about_and_can_be_switched_off(visit: Open) -> None:
    async with Stand(scenes.turns) as stand, visit(stand.url) as page:
        await page.keyboard.press("3")
        await page.get_by_role("heading", name="19 models").wait_for()
        await page.keyboard.press("t")
        assert await page.evaluate("document.documentElement.dataset.theme") == "light"
        await page.get_by_role("button", name="Single keys: on").click()
        await page.keyboard.press("2")
        await page.wait_for_timeout(200)
        assert page.url.endswith("#/models")


async def test_the_timeline_is_read_with_arrows(visit: Open) -> None:
    async with Stand(scenes.turns) as stand, visit(stand.url) as page:
        await page.locator("#tl").focus()
        for _ in range(3):
            await page.keyboard.press("ArrowLeft")
        assert "gpu0: " in await page.locator("#tip").inner_text()
        assert await page.locator("#cur").is_visible()


async def test_focus_goes_with_a_model_through_a_swap(visit: Open) -> None:
    async with Stand(scenes.turns) as stand, visit(stand.url) as page:
        await page.get_by_role("button", name="Unload sql-7b").focus()
        stand.tell("agent-32b", "note", "something else")
        await page.wait_for_timeout(500)
        assert await page.evaluate("document.activeElement.getAttribute('aria-label')") == "Unload sql-7b"


async def test_a_chat_streams_and_says_what_its_wait_was(visit: Open) -> None:
    async with Stand(scenes.turns) as stand, visit(stand.url, "play?model=coder-14b") as page:
        await page.get_by_text("coder-14b is asleep; a first answer takes").wait_for()
        await page.get_by_label("Message").fill("How do I avoid swapping?")
        await page.keyboard.press("Control+Enter")
        answer = page.locator(".turn").nth(1)
        await answer.get_by_text("the swap between them disappears.").wait_for()
        await answer.get_by_text("start: wake · waited 6 s").wait_for()
        assert "<i>then</i>" in await answer.inner_text()
        assert stand.asked("POST") == ["/v1/chat/completions"]
        await page.goto(f"{stand.url}/ui/#/play?kind=embed")
        await page.get_by_role("button", name="Embed", exact=True).click()
        await page.get_by_text("3 vectors of 3 numbers").wait_for()
        await page.goto(f"{stand.url}/ui/#/play?kind=rerank")
        await page.get_by_role("button", name="Rank", exact=True).click()
        await page.get_by_text("3 passages in").wait_for()


@pytest.mark.parametrize("theme", ["dark", "light"])
async def test_axe_finds_nothing(visit: Open, theme: str) -> None:
    source = axe_source()
    if source is None:
        pytest.skip("axe-core is not installed (package axe-playwright-python)")
    async with Stand(scenes.turns) as stand, visit(stand.url, theme=theme, bypass_csp=True) as page:
        await page.evaluate(source)
        found = await axe_findings(page, stand.url, PAGES)
        assert not found, "\n".join(found)
