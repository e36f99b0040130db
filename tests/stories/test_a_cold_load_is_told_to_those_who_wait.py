"""B54: a cold load lasted longer than the patience of clients and middle boxes."""

import asyncio
import json
import time
from itertools import pairwise
from pathlib import Path

from .rig import Reply, Rig, fake, together

LOAD_S = 2.5
FIRST_S = 0.4  # until a waiting stream hears of us, in these stories (1.5 s by default)
EVERY_S = 0.3
SLACK_S = 1.0
SOON = {"limits": {"keepalive_after_s": FIRST_S, "keepalive_every_s": EVERY_S}}


def comments(reply: Reply) -> list[tuple[float, bytes]]:
    return [(at, event) for at, event in reply.arrivals if event.startswith(b":")]


def silences_s(reply: Reply) -> list[float]:
    """Between anything and the next thing that came."""
    moments = [reply.head_at, *(at for at, _ in reply.arrivals), reply.ended_at]
    return [later - earlier for earlier, later in pairwise(moments)]


async def test_a_stream_hears_of_the_load_until_its_first_event(tmp_path: Path) -> None:
    """Headers within 2 s by default, comments all the while, then the engine's own events and nothing a strict reader would not know."""
    async with Rig(tmp_path, {"a": fake(ready_after=LOAD_S)}) as rig:
        reply = await rig.chat("a", stream=True)
        assert reply.done
        assert reply.head_at - reply.asked_at < 2 + SLACK_S
        assert (reply.status, reply.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
        assert comments(reply)
        assert [event for _, event in reply.arrivals if not event.startswith((b":", b"data: "))] == []
        assert [json.loads(payload)["object"] for payload in reply.tokens] == ["chat.completion.chunk"] * 3


async def test_a_waiting_stream_is_never_silent_for_long(tmp_path: Path) -> None:
    """A middle box that cuts silent calls has nothing to cut: comments come at the promised pace, and say what is going on."""
    async with Rig(tmp_path, {"a": fake(ready_after=LOAD_S)}, config=SOON) as rig:
        reply = await rig.chat("a", stream=True)
        assert reply.done
        assert reply.head_at - reply.asked_at < FIRST_S + SLACK_S
        told = comments(reply)
        assert len(told) >= (LOAD_S - FIRST_S) / EVERY_S / 2
        assert max(silences_s(reply)) < EVERY_S + SLACK_S
        assert b"loading" in told[0][1]


async def test_a_load_that_fails_ends_a_waiting_stream_with_an_error(tmp_path: Path) -> None:
    """An error event, no end marker, and the connection is cut: never a clean short end."""
    async with Rig(tmp_path, {"a": fake(ready_after=60, log_every=0.2, config={"start_timeout": 1.5})}, config=SOON) as rig:
        reply = await rig.chat("a", stream=True)
        assert (reply.status, reply.complete, b"[DONE]" in reply.data) == (200, False, False)
        assert "a" in reply.error["message"]
        assert reply.error["code"]
        assert comments(reply)
        held = await rig.chat("a")
        assert held.status in (503, 504)


async def test_other_answers_are_held_and_retries_cause_no_second_start(tmp_path: Path) -> None:
    """A whole answer waits for the load; impatient clients that ask again and again share the one start."""
    async with Rig(tmp_path, {"a": fake(ready_after=LOAD_S)}) as rig:
        held = asyncio.ensure_future(rig.chat("a"))
        await rig.wait_journal("a", "start")
        for patience_s in (0.3, 0.2, 0.1):
            impatient = await rig.ask("a")
            await asyncio.wait({held}, timeout=patience_s)
            impatient.close()
        last = await together(rig.chat("a"), rig.chat("a"))
        assert [(await held).done, *(reply.done for reply in last)] == [True] * 3
        assert rig.starts("a") == 1
        assert len(rig.inferences("a")) == 3


async def test_a_load_by_the_api_is_answered_at_once(tmp_path: Path) -> None:
    """202 with the place to look, long before the model is there."""
    async with Rig(tmp_path, {"a": fake(ready_after=LOAD_S)}) as rig:
        asked_at = time.monotonic()
        reply = await rig.api("POST", "/api/models/a/load")
        assert (reply.status, time.monotonic() - asked_at < SLACK_S) == (202, True)
        place = reply.json["status_url"]
        seen = (await rig.api("GET", place)).json
        assert (seen["id"], seen["state"]) == ("a", "starting")
        assert (await rig.chat("a")).done
        assert (await rig.api("GET", place)).json["state"] == "ready"
        assert rig.starts("a") == 1
