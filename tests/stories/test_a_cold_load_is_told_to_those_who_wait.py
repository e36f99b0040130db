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
SLACK_S = 3.0
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


async def test_a_waiting_stream_is_never_silent_and_hears_how_it_ends(tmp_path: Path) -> None:
    """Comments come at the promised pace.  A load that fails ends in an error event and a cut, never in a clean short end."""
    never = fake(ready_after=60, config={"start_timeout": 1.5})
    async with Rig(tmp_path, {"a": fake(ready_after=LOAD_S), "never": never}, config=SOON) as rig:
        reply, failed = await together(rig.chat("a", stream=True), rig.chat("never", stream=True))
        assert reply.done
        assert reply.head_at - reply.asked_at < FIRST_S + SLACK_S
        told = comments(reply)
        assert len(told) >= (LOAD_S - FIRST_S) / EVERY_S / 2
        assert max(silences_s(reply)) < EVERY_S + SLACK_S
        assert b"loading" in told[0][1]

        assert (failed.status, failed.complete, b"[DONE]" in failed.data) == (200, False, False)
        assert "never" in failed.error["message"]
        assert failed.error["code"]
        assert comments(failed)
        assert (await rig.chat("never")).status in (503, 504)


async def test_other_answers_are_held_and_retries_cause_no_second_start(tmp_path: Path) -> None:
    """A load by the API is answered at once with the place to look; whole answers wait; impatient clients share the one start."""
    async with Rig(tmp_path, {"a": fake(ready_after=LOAD_S)}) as rig:
        asked_at = time.monotonic()
        accepted = await rig.api("POST", "/api/models/a/load")
        assert (accepted.status, time.monotonic() - asked_at < SLACK_S) == (202, True)
        place = accepted.json["status_url"]
        seen = (await rig.api("GET", place)).json
        assert (seen["id"], seen["state"]) == ("a", "starting")

        held = asyncio.ensure_future(rig.chat("a"))
        await rig.wait_journal("a", "start")
        for patience_s in (0.3, 0.2, 0.1):
            impatient = await rig.ask("a")
            await asyncio.wait({held}, timeout=patience_s)
            impatient.close()
        last = await together(rig.chat("a"), rig.chat("a"))
        assert [(await held).done, *(reply.done for reply in last)] == [True] * 3
        assert (rig.starts("a"), len(rig.inferences("a"))) == (1, 3)
        assert (await rig.api("GET", place)).json["state"] == "ready"
