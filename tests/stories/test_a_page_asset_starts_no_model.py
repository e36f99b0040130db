"""B46: the page of an engine, once open or installed, kept asking for its files, and each of them loaded that model.

What a browser shows of models with odd names, of a crash and of a lost stream is seen in tests/ui; here is what it is told.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from .rig import Exchange, Rig, fake, together, vllm

SOON_S = 1.0
SLACK_S = 2.0  # a machine with more to do than CPUs
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8", "Accept-Language": "en", "Sec-Fetch-Mode": "no-cors"}
ASSETS = ("/sw.js", "/favicon.ico", "/manifest.json", "/manifest.webmanifest", "/index.html", "/favicon.svg", "/_app/font.woff2?v=1")
ROUNDS = 5
ODD = "<img src=x onerror=alert(1)>"


@asynccontextmanager
async def followed(rig: Rig, **headers: str) -> AsyncIterator[Exchange]:
    """An open event stream."""
    exchange = await rig.send("GET", "/api/events", headers=headers)
    await exchange.head()
    try:
        yield exchange
    finally:
        exchange.close()


def events_of(stream: Exchange) -> list[dict[str, Any]]:
    """All that it told so far; events have an id in front, the state has none."""
    lines = [line for _, part in stream.reply.arrivals for line in part.splitlines() if line.startswith(b"data: ")]
    return [json.loads(line[6:]) for line in lines]


async def told(stream: Exchange, model: str, state: str) -> dict[str, Any]:
    """Read on until the stream tells that state of the model; what it said."""
    async with asyncio.timeout(20):
        while True:
            for event in events_of(stream):
                if any(one["id"] == model and one["state"] == state for one in event.get("models", ())):
                    return event
            await stream._more()


@pytest.mark.parametrize("state", ["never started", "asleep"])
async def test_files_of_a_cold_page_are_refused_at_once(tmp_path: Path, state: str) -> None:
    """Neither a start nor a wake, and who is resident stays; a page open under another model's address gets its own."""
    models = {"a": vllm(8000, 500), "b": fake(8000)}
    async with Rig(tmp_path, models) as rig:
        await rig.warm(*(("a", "b") if state == "asleep" else ("b",)))
        before = len(rig.journal("a"))
        for _ in range(ROUNDS):
            cold = await together(*[(await rig.send("GET", f"/upstream/a{asset}", headers=BROWSER)).rest() for asset in ASSETS])
            assert [reply.status for reply in cold] == [409] * len(ASSETS)
            assert {reply.error["code"] for reply in cold} == {"not_ready"}
            assert max(reply.took_s for reply in cold) < SOON_S + SLACK_S
        # What a page asks at the root of its address is nobody's: it finds nothing, and starts nothing.
        for target in ("/_app/entry.js", "/sw.js", "/manifest.json"):
            stray = await (await rig.send("GET", target, headers={**BROWSER, "Referer": "http://127.0.0.1/upstream/a/"})).rest()
            assert stray.status == 404, target
        warm = await (await rig.send("GET", "/upstream/b/index.html", headers=BROWSER)).rest()

        assert (warm.status, warm.json) == (200, {"path": "/index.html"})
        assert (await rig.model("a"))["state"] == ("asleep" if state == "asleep" else "stopped")
        assert (await rig.model("b"))["state"] == "ready"
        assert (await rig.model("b"))["starts"] == 1
        told_of_a = [line for line in rig.journal("a")[before:] if line["event"] in ("start", "wake_end")]
        assert told_of_a == []


async def test_files_of_a_warm_page_keep_no_model(tmp_path: Path) -> None:
    """Somebody left it open, and it asks on: the model sleeps and stops as if nobody did."""
    async with Rig(tmp_path, {"a": fake(8000, config={"ttl": 1.5})}) as rig:
        last = await rig.chat("a")
        served = 0
        async with asyncio.timeout(30):
            while not rig.journal("a", "exit"):
                reply = await (await rig.send("GET", "/upstream/a/_app/start.js", headers=BROWSER)).rest()
                served += reply.status == 200
                assert reply.status in (200, 409, 502)
        assert served > 20
        assert 0.75 <= rig.journal("a", "term")[0]["at"] - last.ended_at < 1.5 + SLACK_S
        assert rig.starts("a") == 1


async def test_a_crash_is_told_at_once_also_to_who_lost_the_stream(tmp_path: Path) -> None:
    """Within a second on an open stream; one that comes back is told everything as it is now, and what it missed."""
    async with Rig(tmp_path, {"a": fake(), ODD: fake(log="<b onclick=x>loaded</b>")}) as rig:
        await rig.warm("a", ODD)
        async with followed(rig) as stream, followed(rig) as cut:
            await told(stream, "a", "ready")
            assert (await told(cut, ODD, "ready"))["kind"] == "snapshot"
            last = max(event["id"] for event in await rig.events())
            cut.close()

            os.kill(rig.journal("a", "start")[0]["pid"], signal.SIGKILL)
            died_at = time.monotonic()
            await told(stream, "a", "stopped")
            assert time.monotonic() - died_at < SOON_S + SLACK_S

            async with followed(rig, **{"Last-Event-ID": str(last)}) as again:
                assert (await told(again, "a", "stopped"))["kind"] == "snapshot"
                missed = [(event["kind"], event["model"]) for event in events_of(again) if "id" in event]
                assert missed == [("crashed", "a")]
        log = await rig.api("GET", "/api/models/%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E/logs")
        assert b"<b onclick=x>loaded</b>" in log.body
        assert log.headers["content-type"].startswith("text/plain")
        assert log.headers["x-content-type-options"] == "nosniff"
