"""What is elsewhere: models whose files are still to come, and other servers that are asked too."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import pytest

from tests.ui import scenes
from tests.ui.conftest import Open, axe_findings, axe_source
from tests.ui.stand import Stand
from tests.ui.test_pages_browser import once

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

PAGES = ("stage", "models", "model/gemma-12b", "model/phi-4", "model/olmo-7b", "play?model=olmo-7b", "play?model=llama-70b")
GIB = 1024**3


def files_alone(now: float) -> scenes.Json:
    """Nobody waits for memory, three wait for files."""
    told = scenes.far(now)
    told["models"] = [one for one in told["models"] if one["id"] in ("sql-7b", "gemma-12b", "olmo-7b")]
    return {**told, "queue": {"length": 0, "oldest_s": 0.0, "models": []}, "advice": {}}


def peers_alone(now: float) -> scenes.Json:
    return {**scenes.status([], now=now), "peers": [dict(one) for one in scenes.PEERS]}


async def text_of(page: Any, selector: str) -> str:
    return str(await page.locator(selector).first.inner_text()).replace("\u00a0", " ")


# ------------------------------------------------------------------------------------------------------------ fetches


async def test_the_stage_tells_what_is_not_here_and_how_far_it_is(visit: Open) -> None:
    async with Stand(scenes.far) as stand, visit(stand.url) as page:
        tile = await text_of(page, ".home a[data-m='gemma-12b'] small")
        assert tile.startswith("fetching 34 %, ≈ 1")
        assert tile.endswith(" s, 3 wait")
        assert await text_of(page, ".home a[data-m='phi-4'] small") == "waits for its turn"
        assert await text_of(page, ".home a[data-m='olmo-7b'] small") == "not here yet"
        assert "9 stopped, 3 not on this host" in await text_of(page, "section[aria-labelledby=h-home] header")
        assert "(4 more for others)" in await text_of(page, "h1.line"), "those who wait for files are counted"
        entry = await text_of(page, ".q .wait[data-m='gemma-12b']")
        assert "3 waiting. Its files are being fetched, 34 %." in entry
        assert (await page.title()).startswith("(7) ")


async def test_who_waits_for_files_alone_is_said_first(visit: Open) -> None:
    async with Stand(files_alone) as stand, visit(stand.url) as page:
        said = await text_of(page, "h1.line")
        assert said.startswith("3 requests wait for the files of gemma-12b, about 1")


@pytest.mark.parametrize(
    ("id", "name", "answer", "target"),
    [
        ("olmo-7b", "Fetch now olmo-7b", None, "olmo-7b/load"),
        ("phi-4", "Stop fetching phi-4", None, "phi-4/unload"),
        ("gemma-12b", "Stop fetching gemma-12b", "Stop and refuse 3 requests", "gemma-12b/unload"),
    ],
)
@pytest.mark.parametrize("at", ["models", "model"])
async def test_a_fetch_is_begun_and_stopped_by_one_press(visit: Open, at: str, id: str, name: str, answer: str | None, target: str) -> None:
    """A question comes first where requests would be refused for it; what makes no sense has no button."""
    async with Stand(scenes.far) as stand:
        stand.hold_s = 0.3
        async with visit(stand.url, at if at == "models" else f"model/{id}") as page:
            button = page.get_by_role("button", name=name, exact=True)
            await button.wait_for()
            place = page.locator(f"tr[data-m='{id}']" if at == "models" else ".head").first
            shown = [name.removesuffix(f" {id}")]
            assert await place.locator("button").all_inner_texts() == (shown if at == "models" else ["Pin", *shown])
            if answer is None:
                await button.dblclick()
            else:
                await button.click()
                dialog = page.get_by_role("dialog")
                assert "What has come is kept" in await dialog.inner_text()
                assert not stand.asked("POST")
                await dialog.get_by_role("button", name=answer, exact=True).dblclick()
            await once(stand, f"/api/models/{target}")


async def test_a_model_that_is_not_here_can_be_pinned(visit: Open) -> None:
    """Then it is fetched and comes in by itself; while it is on its way, that can be taken back."""
    async with Stand(scenes.far) as stand, visit(stand.url, "model/phi-4") as page:
        await page.get_by_role("button", name="Pin phi-4", exact=True).click()
        await once(stand, "/api/models/phi-4/pin")
        stand.entry("phi-4")["pinned"] = True
        await page.get_by_text("live", exact=True).wait_for()
        stand.tell("phi-4", "pinned", "pinned by an operator")
        await page.get_by_role("button", name="Unpin phi-4", exact=True).click()
        await once(stand, "/api/models/phi-4/unpin")


async def test_a_models_page_shows_its_fetch_until_it_is_here(visit: Open) -> None:
    async with Stand(scenes.far) as stand, visit(stand.url, "model/gemma-12b") as page:
        bar = page.get_by_role("progressbar", name="Fetch")
        assert await bar.get_attribute("aria-valuenow") == "34"
        figures = await text_of(page, ".files")
        for part in ("2.5 GiB of 7.2 GiB", "393 MiB/s", "s left", "3 requests wait for it"):
            assert part in figures
        assert "oci://models.example/team/gemma:12b-q4" in await text_of(page, "p.facts")
        await page.get_by_text("live", exact=True).wait_for()
        fetch = {**stand.entry("gemma-12b")["fetch"], "done_bytes": 5 * GIB, "stage": "verifying", "eta_s": None, "waiting": 1}
        coming = {**stand.entry("gemma-12b"), "fetch": fetch}
        stand.told({"kind": "status", "now": stand.tick(), "uptime_s": 86_401.0, "boot_id": "b-1", "models": [coming]})
        await page.locator("[role=progressbar][aria-valuenow='69']").wait_for()
        assert "being checked" in await text_of(page, ".files")
        here = scenes.resident("gemma-12b", "gpu1", 9.0, None, "starting", reference=coming["reference"], absent=False, fetch=None)
        stand.tell("gemma-12b", "fetched", "fetched oci://models.example/team/gemma:12b-q4 in 18 s")
        stand.told({"kind": "status", "now": stand.tick(), "uptime_s": 86_402.0, "boot_id": "b-1", "models": [here]})
        await page.locator(".files").wait_for(state="detached")
        await page.get_by_role("button", name="Unload gemma-12b").wait_for()
        await page.locator("#live", has_text="gemma-12b: fetched oci://").wait_for(state="attached")


async def test_a_question_about_a_fetch_is_withdrawn_when_the_files_are_here(visit: Open) -> None:
    async with Stand(scenes.far) as stand, visit(stand.url, "model/gemma-12b") as page:
        await page.get_by_role("button", name="Stop fetching gemma-12b").click()
        stand.entry("gemma-12b").update(absent=False, fetch=None)
        stand.tell("gemma-12b", "fetched", "fetched it in 18 s")
        await page.get_by_role("dialog").get_by_text("gemma-12b is here already.").wait_for()
        assert not stand.asked("POST")


async def test_a_fetch_that_failed_says_why_until_the_next_one(visit: Open) -> None:
    async with Stand(scenes.far) as stand, visit(stand.url) as page:
        await page.get_by_text("live", exact=True).wait_for()
        stand.tell("olmo-7b", "fetch_failed", "could not be fetched: <b>401</b>, log in first")
        await page.locator(".home a[data-m='olmo-7b'] .warn", has_text="could not be fetched").wait_for()
        await page.goto(f"{stand.url}/ui/#/model/olmo-7b")
        await page.locator(".files .warn", has_text="<b>401</b>, log in first").wait_for()
        stand.tell("olmo-7b", "fetching", "fetching it")
        await page.locator(".files .warn").wait_for(state="detached")


async def test_an_engine_that_is_still_there_keeps_its_buttons_while_new_files_come(visit: Open) -> None:
    """Its reference was changed by a reload: what runs is told as what runs."""
    async with Stand(scenes.far) as stand:
        coming = scenes.fetch("hf://org/new:Q4", done=1, total=4)
        stand.entry("sql-7b").update(reference="hf://org/new:Q4", absent=True, fetch=coming)
        async with visit(stand.url) as page:
            row = page.locator("tr[data-m='sql-7b']").first
            assert "ready" in await row.inner_text()
            assert await row.locator("button").all_inner_texts() == ["Unload"]


async def test_the_playground_says_that_a_request_fetches_first(visit: Open) -> None:
    async with Stand(scenes.far) as stand, visit(stand.url, "play?model=olmo-7b") as page:
        assert "sending this fetches them first, and waits" in await text_of(page, ".expect")


async def test_the_playground_says_nothing_of_a_model_before_it_knows_how_that_stands(visit: Open) -> None:
    async with Stand(scenes.far) as stand:
        stand.may_tell.clear()
        async with visit(stand.url, "play?model=olmo-7b", is_early=True) as page:
            await page.get_by_text("Reading…").wait_for()
            async with asyncio.timeout(10):
                while not stand.asked("GET", "/api/status"):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert await page.locator(".expect").count() == 0
            stand.may_tell.set()
            await page.locator(".expect", has_text="sending this fetches them first").wait_for()
            assert not stand.asked("GET", "/v1/models"), "that list is for keys that may not look"


# -------------------------------------------------------------------------------------------------------------- peers


async def test_each_peer_is_told_with_how_it_does(visit: Open) -> None:
    async with Stand(scenes.far) as stand, visit(stand.url) as page:
        assert "2 of 3 answer" in await text_of(page, "section[aria-labelledby=h-peers] header")
        rows = [text.replace("\u00a0", " ") for text in await page.locator(".peers tbody tr").all_inner_texts()]
        assert len(rows) == 5
        assert all(part in rows[0] for part in ("big-box", "https://10.0.0.5:8443", "answers", "for 3 h", "llama-70b, org/model-a", "1412"))
        assert rows[1].startswith("Last error, 68 min ago: it answered 503")
        assert "glm-4.6 and 2 more" in rows[2]
        assert "does not answer" in rows[3]
        assert "no connection within 5 s" in rows[4]
        await page.get_by_text("live", exact=True).wait_for()
        well = [{**one, "healthy": True, "circuit": "closed", "in_flight": 7} for one in stand.status["peers"]]
        stand.told({"kind": "status", "now": stand.tick(), "uptime_s": 86_401.0, "boot_id": "b-1", "peers": well})
        await page.get_by_text("3 other servers answer").wait_for()
        assert await page.locator(".peers tbody tr .s-failed").count() == 0


async def test_a_peer_that_is_down_is_said_at_the_top_when_nothing_is_worse(visit: Open) -> None:
    async with Stand(files_alone) as stand, visit(stand.url) as page:
        assert (await text_of(page, "h1.line")).endswith("Peer attic does not answer.")


async def test_without_peers_nothing_is_said_of_them(visit: Open) -> None:
    async with Stand(scenes.turns) as stand, visit(stand.url) as page:
        assert await page.locator(".peers, #h-peers").count() == 0


async def test_a_server_of_peers_alone_is_not_empty(visit: Open) -> None:
    async with Stand(peers_alone) as stand, visit(stand.url) as page:
        await page.get_by_role("heading", name="Peers").wait_for()
        assert await page.get_by_role("heading", name="The stage is empty").count() == 0
        await page.goto(f"{stand.url}/ui/#/play?model=whisper-l")
        await page.get_by_text("Only attic has it, and does not answer now.").wait_for()


async def test_the_playground_lists_what_peers_serve(visit: Open) -> None:
    """Each name once, after those of this machine; one that both have is this machine's."""
    async with Stand(scenes.far) as stand:
        stand.status["peers"][0]["models"].append("chat-8b")
        async with visit(stand.url, "play?model=llama-70b") as page:
            names = await page.locator("select[aria-label=Model] option").all_inner_texts()
            assert len(names) == len(set(names)) == len(stand.status["models"]) + 8
            assert {"llama-70b", "org/model-a", "whisper-l"} <= set(names)
            assert await page.get_by_label("Model", exact=True).input_value() == "llama-70b"
            assert "Another server answers: big-box or hosted." in await text_of(page, ".expect")
            await page.get_by_label("Message").fill("Hello")
            await page.get_by_role("button", name="Send").click()
            await page.locator(".turn[aria-busy=false]").wait_for()
            assert b'"model":"llama-70b"' in next(body for method, _, body in stand.calls if method == "POST")


# --------------------------------------------------------------------------------------------------- width, structure


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("width", [320, 390, 1280, 2560])
async def test_no_page_scrolls_sideways(visit: Open, width: int, theme: str) -> None:
    scene = scenes.far if theme == "dark" else scenes.hostile
    async with Stand(scene) as stand, visit(stand.url, width=width, theme=theme) as page:
        absent = [one["id"] for one in stand.status["models"] if one.get("absent")]
        assert absent
        for at in ("stage", "models", "play", *(f"model/{quote(id, safe='')}" for id in absent)):
            await page.goto(f"{stand.url}/ui/#/{at}")
            await page.wait_for_timeout(250)
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, at
            assert await page.locator("#view :is(img, script, iframe)").count() == 0


@pytest.mark.parametrize(("theme", "width"), [("dark", 1440), ("light", 1440), ("light", 390)])
async def test_axe_finds_nothing(visit: Open, theme: str, width: int) -> None:
    source = axe_source()
    if source is None:
        pytest.skip("axe-core is not installed (package axe-playwright-python)")
    async with Stand(scenes.far) as stand, visit(stand.url, theme=theme, width=width, bypass_csp=True) as page:
        await page.evaluate(source)
        found = await axe_findings(page, stand.url, PAGES)
        assert not found, "\n".join(found)
