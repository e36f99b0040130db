"""The dashboard over a running greenroom with fake engines: what one sees is what happens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.stories.rig import Rig, fake, vllm
from tests.stories.test_a_first_request_fetches_its_model import from_there, origin
from tests.stories.test_a_first_request_fetches_its_model import rig as fetching_rig
from tests.stories.test_peers_answer_behind_the_same_address import a_rig
from tests.ui.conftest import Open

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

# Remembers each state that a model's row showed, in order, and the worst sum of a bar's parts.
FILM = """
window.film = {};
window.widest = 0;
window.addEventListener('DOMContentLoaded', () => {
  const look = () => {
    for (const row of document.querySelectorAll('#view tr[data-m], #view .home a[data-m]')) {
      const state = row.querySelector('.st')?.className.match(/s-(\\w+)/)?.[1];
      const seen = window.film[row.dataset.m] ??= [];
      if (state && seen.at(-1) !== state) seen.push(state);
    }
    for (const bar of document.querySelectorAll('.bar')) {
      const sum = [...bar.children].reduce((total, part) => total + part.getBoundingClientRect().width, 0);
      if (bar.clientWidth) window.widest = Math.max(window.widest, sum - bar.clientWidth);
    }
  };
  new MutationObserver(look).observe(document.body, {subtree: true, childList: true, attributes: true});
});
"""


def two_that_take_turns(folder: Path, **more: Any) -> Rig:
    models = {
        "agent/32b": vllm(6000, 500, ready_after=0.4, sleep_s=0.4, wake_s=0.4),
        "coder": vllm(6000, 500, ready_after=0.4, sleep_s=0.4, wake_s=0.4),
    }
    return Rig(folder, models, budget_mib=8000, **more)


async def state_on_page(page: Any, id: str) -> str:
    found = page.locator(f"#view [data-m={json.dumps(id)}] .st").first
    return str(await found.get_attribute("class"))


async def test_a_swap_is_seen_as_it_happens(tmp_path: Path, visit: Open) -> None:
    async with two_that_take_turns(tmp_path) as rig:
        await rig.warm("agent/32b")
        async with visit(f"http://127.0.0.1:{rig.port}", script=FILM) as page:
            await page.locator("tr[data-m='agent/32b'] .s-ready").wait_for()
            assert (await rig.chat("coder")).status == 200
            await page.locator("tr[data-m='coder'] .s-ready").wait_for()
            await page.locator("tr[data-m='agent/32b'] .s-asleep").wait_for()
            film = await page.evaluate("window.film")
            assert film["agent/32b"][0] == "ready"
            assert film["agent/32b"][-1] == "asleep"
            assert film["coder"][0] == "stopped"
            assert film["coder"][-1] == "ready"
            assert "starting" in film["coder"]
            assert await page.evaluate("window.widest") < 1.0, "no block stands outside its bar"
            await page.get_by_text("put to sleep (level 1)").first.wait_for()


async def test_buttons_work_on_a_true_server(tmp_path: Path, visit: Open) -> None:
    async with two_that_take_turns(tmp_path) as rig, visit(f"http://127.0.0.1:{rig.port}", "model/coder") as page:
        await page.get_by_role("button", name="Load coder").click()
        await rig.wait_state("coder", "ready")
        await page.get_by_role("button", name="Sleep coder").click()
        await page.get_by_role("dialog").get_by_role("button", name="Sleep", exact=True).click()
        await rig.wait_state("coder", "asleep")
        await page.get_by_text("coder is asleep at level 1").first.wait_for()
        await page.get_by_role("button", name="Pin coder").click()
        await page.get_by_role("button", name="Unpin coder").wait_for()
        assert (await rig.model("coder"))["pinned"]
        await page.get_by_role("button", name="Unpin coder").click()
        await page.get_by_role("button", name="Unload coder").click()
        await page.get_by_role("dialog").get_by_role("button", name="Unload", exact=True).click()
        await rig.wait_state("coder", "stopped")
        await page.get_by_role("button", name="Load coder").wait_for()


async def test_looking_touches_no_model(tmp_path: Path, visit: Open) -> None:
    models = {"idle": fake(1000), "sleeper": vllm(2000, 500), "home": fake(1000)}
    async with Rig(tmp_path, models, budget_mib=8000) as rig:
        await rig.warm("idle", "sleeper")
        await rig.put_to_sleep("sleeper")
        before = len(rig.journal(event="begin"))
        async with visit(f"http://127.0.0.1:{rig.port}") as page:
            for at in ("requests", "models", "model/idle", "model/sleeper", "model/home", "advice", "play", "play?kind=embed", "stage"):
                await page.goto(f"http://127.0.0.1:{rig.port}/ui/#/{at}")
                await page.wait_for_timeout(400)
        assert (await rig.model("home"))["state"] == "stopped"
        assert (await rig.model("sleeper"))["state"] == "asleep"
        assert (await rig.model("idle"))["instances"][0]["idle_s"] > 3, "its clock went on"
        asked = [line["target"] for line in rig.journal(event="begin")[before:]]
        assert not [target for target in asked if "health" not in target and target != "/is_sleeping"], asked


class Address:
    """One address for a server that comes back at another port."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.url = ""

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._rig.port)
            await asyncio.gather(pass_on(reader, back), pass_on(there, writer))
        except OSError:
            writer.close()


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def test_a_restarted_server_is_found_again(tmp_path: Path, visit: Open) -> None:
    async with two_that_take_turns(tmp_path) as rig, Address(rig) as url:
        await rig.warm("agent/32b")
        async with visit(url) as page:
            await page.locator("tr[data-m='agent/32b'] .s-ready").wait_for()
            await rig.kill_server()
            await page.get_by_text("No connection since").wait_for()
            assert await page.get_by_role("button", name="Unload agent/32b").is_disabled()
            assert await page.locator("body.stale").count() == 1
            await rig.start_server()
            await page.get_by_text("No connection since").wait_for(state="detached", timeout=30_000)
            await page.locator(".home a[data-m='agent/32b'] .s-stopped").wait_for()
            assert await page.locator("tr[data-m='agent/32b']").count() == 0
            assert await page.locator("body.stale").count() == 0
            await rig.warm("coder")
            await page.locator("tr[data-m='coder'] .s-ready").wait_for()


async def test_the_playground_is_an_ordinary_client(tmp_path: Path, visit: Open) -> None:
    async with Rig(tmp_path, {"chat": fake(1000, ready_after=0.5)}) as rig, visit(f"http://127.0.0.1:{rig.port}", "play") as page:
        await page.get_by_text("chat is not loaded; a first answer takes").wait_for()
        assert (await rig.model("chat"))["state"] == "stopped"
        await page.get_by_label("Message").fill("good evening")
        await page.get_by_role("button", name="Send").click()
        await page.locator(".turn[aria-busy=false]").wait_for()
        assert (await page.locator(".turn").nth(1).inner_text()).strip()
        assert len(rig.chats("chat")) == 1


async def test_a_fetch_is_begun_watched_and_stopped_on_the_page(tmp_path: Path, visit: Open, tiny_chat: Path) -> None:
    """Half of the file has come when it is stopped; the next fetch goes on, and whoever asks meanwhile is seen to wait for it."""
    body = await asyncio.to_thread(tiny_chat.read_bytes)
    async with (
        origin(body) as there,
        fetching_rig(tmp_path, **{"late/7b": from_there(there.url)}) as rig,
        visit(f"http://127.0.0.1:{rig.port}") as page,
    ):
        tile = page.locator(".home a[data-m='late/7b']")
        await tile.get_by_text("not here yet").wait_for()
        await tile.click()
        await page.get_by_role("button", name="Fetch now late/7b").click()
        bar = page.get_by_role("progressbar", name="Fetch")
        await page.locator("[role=progressbar][aria-valuenow]").wait_for()
        await page.get_by_role("button", name="Stop fetching late/7b").click()
        await bar.wait_for(state="detached")
        await page.get_by_text("the fetch of late/7b was stopped; what has come is kept").first.wait_for()
        await page.get_by_role("button", name="Fetch now late/7b").click()
        await bar.wait_for()
        asked = asyncio.create_task(rig.chat("late/7b"))
        await page.get_by_text("1 request waits for it", exact=True).wait_for()
        there.go.set()
        await page.locator(".head .s-ready").wait_for()
        assert (await asked).status == 200
        assert await page.locator(".files").count() == 0


async def test_a_peer_that_goes_down_is_seen(tmp_path: Path, visit: Open) -> None:
    """Its requests are counted as they end, and what it said last stands there; nothing is read anew for that."""
    async with a_rig(tmp_path / "far", {"big": fake()}) as far:
        config = {"peers": {"box": {"proxy": f"http://127.0.0.1:{far.port}", "models": ["big"]}}}
        async with (
            a_rig(tmp_path / "near", {"small": fake()}, config=config, may_abort=True) as near,
            visit(f"http://127.0.0.1:{near.port}") as page,
        ):
            row = page.locator(".peers tbody tr").first
            await row.locator(".s-ready").wait_for()
            assert (await near.chat("big")).status == 200
            await row.locator("td:nth-child(5)", has_text="1").wait_for()
            await page.goto(f"{page.url.partition('#')[0]}#/play?model=big")
            await page.get_by_text("Another server answers: box.").wait_for()
            await page.goto(f"{page.url.partition('#')[0]}#/stage")
            await far.stop_server()
            for _ in range(3):
                await near.chat("big")
            await row.locator(".s-failed").wait_for()
            await page.get_by_text("Last error").wait_for()
            await page.get_by_text("Peer box does not answer.").wait_for()
