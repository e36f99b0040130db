"""What the page needs of the control plane: every field by name, every error, changes as messages."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from greenroom.control import render
from greenroom.control.app import OUTCOMES
from greenroom.control.changes import Changes
from greenroom.control.facade import Result
from greenroom.control.sse import StreamLimits
from greenroom.core.facts import State
from greenroom.core.thrash import Circle
from greenroom.core.views import QueueView, StageView, WaiterView
from tests.control.fake import FakeFacade, a_model, a_resident, an_event
from tests.control.test_app import asked, serving

QUICK = StreamLimits(changes_s=0.02)

HOSTILE = (
    "org/<b>x</b>",
    'quo"te',
    "../../etc/passwd",
    "a\nb",
    "x?y#z",
    "%2e%2e",
    "\u202egnp.exe",
    "m/why",
    "m/logs",
    "'; DROP TABLE requests; --",
)


def a_queue(model: str = "coder", **fields: Any) -> QueueView:
    known: dict[str, Any] = {
        "model": model,
        "device": "gpu0",
        "need_mib": 24_576,
        "held_mib": 1229,
        "free_mib": 17_100,
        "short_mib": 6247,
        "victims": ("agent",),
        "eta_s": 7.25,
        "reason": "coder needs 24.0 GiB on gpu0.",
        "stages": (StageView("gate", 5.0, 0.5), StageView("wake", 2.9, 0.0)),
        "waiters": (WaiterView(17, 2.5, False), WaiterView(18, 1.0, True)),
        "waiting": 2,
    }
    return QueueView(**{**known, **fields})


async def test_the_queue_tells_who_waits_for_what_and_why(tmp_path: Path) -> None:
    """Bracket, victims, time left, stages and waiters, with the names of the table; the parts of the bracket add up."""
    facade = FakeFacade(a_model("coder", queued=2))
    facade.waiting, facade.clients, facade.queued = [a_queue()], {17: "ci"}, (2, 2.5)
    async with serving(facade, tmp_path) as session:
        _, body = await asked(session, "GET", "/api/status")

    (one,) = body["queue"]["models"]
    assert {
        key: one[key] for key in ("model", "device", "need_mib", "held_mib", "free_mib", "short_mib", "victims", "eta_s", "reason")
    } == {
        "model": "coder",
        "device": "gpu0",
        "need_mib": 24_576,
        "held_mib": 1229,
        "free_mib": 17_100,
        "short_mib": 6247,
        "victims": ["agent"],
        "eta_s": 7.25,
        "reason": "coder needs 24.0 GiB on gpu0.",
    }
    assert one["need_mib"] == one["held_mib"] + one["free_mib"] + one["short_mib"]
    assert one["stages"] == [{"name": "gate", "expected_s": 5.0, "fraction": 0.5}, {"name": "wake", "expected_s": 2.9, "fraction": 0.0}]
    assert one["requests"] == [
        {"id": 17, "age_s": 2.5, "key": "ci", "class": "interactive"},
        {"id": 18, "age_s": 1.0, "key": "", "class": "batch"},
    ]


async def test_a_model_tells_its_estimates_its_turn_and_what_comes_next(tmp_path: Path) -> None:
    """parallel, estimates, next, quantum, gated_for, note, rate, progress; null where there is nothing to tell."""
    busy = {
        "parallel": 4,
        "wake_s": 2.9,
        "measured": 3,
        "served_s": 15.0,
        "owed_s": 22.0,
        "gated_for": "coder",
        "note": "gated: coder is next",
    }
    facade = FakeFacade(
        a_resident("agent", State.DRAINING, model=busy),
        a_resident("idle", model={"next_state": "asleep", "next_s": 41.0}),
        a_resident("up", State.STARTING, since_s=30.0, expected_s=44.0),
        a_model("off"),
    )
    facade.rate, facade.phases = {"agent": {"value": 237.0, "unit": "tok/s"}}, {"up": "weights"}
    async with serving(facade, tmp_path) as session:
        _, body = await asked(session, "GET", "/api/status")

    agent, idle, up, off = body["models"]
    assert (agent["parallel"], agent["estimates"]) == (4, {"wake_s": 2.9, "cold_s": 12.0, "n": 3})
    assert (agent["quantum"], agent["gated_for"], agent["note"]) == ({"served_s": 15.0, "owed_s": 22.0}, "coder", "gated: coder is next")
    assert (agent["rate"], agent["progress"]) == ({"value": 237.0, "unit": "tok/s"}, {"phase": "draining", "fraction": None})
    assert idle["next"] == {"state": "asleep", "in_s": 41.0}
    assert up["progress"] == up["instances"][0]["progress"] == {"phase": "weights", "fraction": 0.405}
    assert [off[key] for key in ("next", "quantum", "gated_for", "rate", "progress", "retry_in_s")] == [None] * 6


async def test_status_tells_its_clock_its_boot_and_the_worst_advice(tmp_path: Path) -> None:
    """boot_id, now, advice.headline; who holds a device's outside memory."""
    facade = FakeFacade(a_model("chat"))
    facade.worst = {"text": "agent and coder take turns", "link": "#/advice", "severity": "warn"}
    async with serving(facade, tmp_path) as session:
        _, body = await asked(session, "GET", "/api/status")
        assert (body["boot_id"], body["now"], body["advice"]) == ("b00t", 1_700_000_000.0, {"headline": facade.worst, "count": 0})
        assert body["devices"][0]["outside_by"] == [{"pid": 4711, "name": "pid 4711 (python)"}]
        assert (await asked(session, "GET", "/api/advice"))[1]["thrash"] == []


async def test_who_takes_turns_is_told_as_it_happens(tmp_path: Path) -> None:
    """In the status, as the headline, as a thing to change; and to those who follow, with the words that everybody uses."""
    facade = FakeFacade(a_model("agent"), a_model("coder"))
    async with serving(facade, tmp_path, QUICK) as session, session.get("/api/events") as response:
        (first,) = await messages(response, 1)
        assert (first["thrash"], first["advice"]) == ([], {"headline": None, "count": 0})
        facade.circles = (Circle(("agent", "coder"), "gpu0", since=40.0, until=90.0, swaps=6, moving_s=25.0),)
        (change,) = await messages(response, 1)
    assert [one["models"] for one in change["thrash"]] == [["agent", "coder"]]
    assert change["advice"]["count"] == 1
    assert change["advice"]["headline"]["text"] == "agent and coder take turns on gpu0: 6 swaps cost 25 s"
    facade.to_change = 3
    assert render.status(facade)["advice"]["count"] == 3


async def test_why_ends_with_the_present(tmp_path: Path) -> None:
    """{at, text, cause, refs}, the last one `now`."""
    facade = FakeFacade(a_model("chat"))
    facade.stories["chat"] = [(1.5, "evicted: embed needed 300 MiB")]
    facade.told_now["chat"] = ("Stopped; the next request starts it.", ["embed"])
    async with serving(facade, tmp_path) as session:
        _, body = await asked(session, "GET", "/api/models/chat/why")
    assert body["story"] == [
        {"at": 1.5, "text": "evicted: embed needed 300 MiB", "cause": "told", "refs": []},
        {"at": 1_700_000_000.0, "text": "Stopped; the next request starts it.", "cause": "now", "refs": ["embed"], "now": True},
    ]


async def test_who_asks_is_told_what_the_key_may_do(tmp_path: Path) -> None:
    """As the data plane says it; without keys everything."""
    async with serving(FakeFacade(), tmp_path) as session:
        assert await asked(session, "GET", "/api/me") == (200, {"key_name": "", "scopes": ["inference", "view", "admin"]})
        told = {"X-Greenroom-Key-Name": "M%C3%BCller", "X-Greenroom-Scopes": "inference,view"}
        assert await asked(session, "GET", "/api/me", headers=told) == (200, {"key_name": "Müller", "scopes": ["inference", "view"]})
        assert (await asked(session, "GET", "/api/me", headers={"X-Greenroom-Scopes": ""}))[1]["scopes"] == []


async def test_requests_are_searched_by_what_the_query_says(tmp_path: Path) -> None:
    """since, model (an alias too), outcome, waited_over, cursor, limit."""
    facade = FakeFacade(a_model("chat"))
    facade.statics["chat"] = {"aliases": ["gpt"]}
    async with serving(facade, tmp_path) as session:
        assert await asked(session, "GET", "/api/requests") == (200, {"now": facade.now(), "requests": [], "cursor": None})
        await asked(session, "GET", "/api/requests?since=12.5&model=gpt&outcome=failed&waited_over=1&cursor=3~4&limit=1e9")
        await asked(session, "GET", "/api/requests?model=gone")
    nothing = {"since": None, "model": None, "outcome": None, "waited_over_s": None, "cursor": "", "limit": 100}
    some = {"since": 12.5, "model": "chat", "outcome": "failed", "waited_over_s": 1.0, "cursor": "3~4", "limit": 1000}
    assert facade.searches == [nothing, some, {**nothing, "model": "gone"}]


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "part"),
    [
        ("GET", "/api/requests?outcome=lost", 400, "bad_parameter", OUTCOMES[0]),
        ("GET", "/api/requests?cursor=bad", 400, "bad_parameter", "cursor='bad'"),
        ("GET", "/api/requests?since=yesterday", 400, "bad_parameter", "since='yesterday'"),
        ("GET", "/api/requests?waited_over=-1", 400, "bad_parameter", "waited_over='-1'"),
        ("GET", "/api/requests?limit=nan", 400, "bad_parameter", "limit='nan'"),
        ("GET", "/api/timeline?minutes=x", 400, "bad_parameter", "minutes='x'"),
        ("GET", "/api/events?state=perhaps", 400, "bad_parameter", "state='perhaps'"),
        ("DELETE", "/api/requests/7", 404, "request_not_found", "no waiting or running request 7"),
        ("DELETE", "/api/requests/seven", 400, "bad_parameter", "'seven'"),
        ("DELETE", "/api/requests/" + "9" * 30, 400, "bad_parameter", "is not the number"),
        ("DELETE", "/api/requests", 405, "method_not_allowed", "use GET"),
        ("POST", "/api/requests/7", 405, "method_not_allowed", "use DELETE"),
        ("POST", "/api/timeline", 405, "method_not_allowed", "use GET"),
        ("POST", "/api/advice", 405, "method_not_allowed", "use GET"),
    ],
)
async def test_what_cannot_be_is_one_sentence(method: str, path: str, status: int, code: str, part: str, tmp_path: Path) -> None:
    """JSON in OpenAI's shape, and nothing was done."""
    async with serving(FakeFacade(), tmp_path) as session:
        got, body = await asked(session, method, path)
    assert (got, body["error"]["code"]) == (status, code)
    assert part in body["error"]["message"]


async def test_a_request_is_cancelled_by_its_number(tmp_path: Path) -> None:
    """200 with what was done."""
    facade = FakeFacade()
    facade.cancels[17] = Result(200, "the waiting request 17 to chat is cancelled; its client is told so")
    async with serving(facade, tmp_path) as session:
        assert await asked(session, "DELETE", "/api/requests/17") == (
            200,
            {"id": 17, "cancelled": True, "message": facade.cancels[17].message},
        )


@pytest.mark.parametrize("minutes", [("", 15), ("?minutes=1e9", 1440), ("?minutes=0", 1)])
async def test_the_timeline_is_bounded(minutes: tuple[str, int], tmp_path: Path) -> None:
    """A day at most, a minute at least."""
    facade = FakeFacade()
    async with serving(facade, tmp_path) as session:
        _, body = await asked(session, "GET", f"/api/timeline{minutes[0]}")
    assert body["now"] - body["from"] == 60 * minutes[1]


async def test_one_model_tells_its_history_too(tmp_path: Path) -> None:
    """starts, footprint and day beside the status entry; how often it was started is `start_count` here."""
    async with serving(FakeFacade(a_model("chat", starts=3)), tmp_path) as session:
        _, body = await asked(session, "GET", "/api/models/chat")
    assert (body["starts"], body["start_count"], body["footprint"], body["day"]) == ([], 3, {}, [])


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_names_are_names(name: str, tmp_path: Path) -> None:
    """They come back as they are, in JSON, and reach no other route."""
    facade = FakeFacade(a_resident(name, model={"queued": 1}))
    facade.waiting, facade.told_now[name] = [a_queue(name, reason=f"{name} waits.")], (f"{name} waits.", [name])
    path = f"/api/models/{quote(name, safe='')}"
    async with serving(facade, tmp_path) as session:
        _, status = await asked(session, "GET", "/api/status")
        assert (status["models"][0]["id"], status["queue"]["models"][0]["reason"]) == (name, f"{name} waits.")
        if not name.startswith("m/"):  # these end like a route of a model; the name decides only without that
            assert (await asked(session, "GET", path))[1]["id"] == name
        assert (await asked(session, "GET", f"{path}/why"))[1]["story"][-1]["refs"] == [name]
        assert (await asked(session, "GET", f"/api/requests?model={quote(name, safe='')}"))[0] == 200
    assert facade.searches[-1]["model"] == name
    assert facade.asked == []


# ------------------------------------------------------------------------------------------------------------- changes


async def messages(response: aiohttp.ClientResponse, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(10):
        while len(found) < count:
            line = await response.content.readline()
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
    return found


async def test_a_stream_begins_with_the_whole_state(tmp_path: Path) -> None:
    """The same as /api/status, without an id: only events are resumed from."""
    facade = FakeFacade(a_resident("chat"))
    async with serving(facade, tmp_path) as session, session.get("/api/events") as response:
        (first,) = await messages(response, 1)
        _, status = await asked(session, "GET", "/api/status")
    assert first == {"kind": "snapshot", **status}


async def test_changes_come_as_messages_with_what_changed(tmp_path: Path) -> None:
    """One model, not all of them; who was removed; the queue when it changes."""
    facade = FakeFacade(a_resident("chat"), a_model("embed"), a_model("old"))
    async with serving(facade, tmp_path, QUICK) as session, session.get("/api/events") as response:
        await messages(response, 1)
        facade.change("embed", state=State.STARTING)
        (change,) = await messages(response, 1)
        assert (change["kind"], change["boot_id"], [one["id"] for one in change["models"]]) == ("status", "b00t", ["embed"])
        assert {"devices", "queue", "removed"}.isdisjoint(change)
        facade.change("embed", state=State.STOPPED)
        await messages(response, 1)
        del facade.models["old"]
        assert (await messages(response, 1))[0]["removed"] == ["old"]
        facade.waiting, facade.queued = [a_queue()], (2, 1.0)
        assert (await messages(response, 1))[0]["queue"]["models"][0]["model"] == "coder"


async def test_what_a_new_page_was_told_the_others_hear_too() -> None:
    """Something that lasted just as long as a second page opened: it is told that it came, and that it has gone."""
    facade = FakeFacade(a_resident("chat"))
    changes = Changes(facade, 0.01)
    following = changes.follow()
    told = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0)  # it follows from here on
    facade.change("chat", instances=a_resident("chat", in_flight=1).instances)
    snapshot = json.loads(changes.snapshot().removeprefix(b"data: "))
    facade.change("chat", instances=a_resident("chat").instances)
    async with asyncio.timeout(10):
        found = [json.loads(one.removeprefix(b"data: ")) for one in (await told, await anext(following))]
    await following.aclose()
    assert snapshot["models"][0]["instances"][0]["in_flight"] == 1
    assert [one["models"][0]["instances"][0]["in_flight"] for one in found] == [1, 0]


async def test_a_device_that_a_reload_took_away_is_not_shown_any_more(tmp_path: Path) -> None:
    """Everything is told anew: a message of changes has no word for it."""
    facade = FakeFacade(a_model("chat"))
    facade.devices = (*facade.devices, replace(facade.devices[0], id="gpu7"))
    async with serving(facade, tmp_path, QUICK) as session, session.get("/api/events") as response:
        await messages(response, 1)
        facade.devices = facade.devices[:-1]
        (told,) = await messages(response, 1)
    assert (told["kind"], [one["id"] for one in told["devices"]]) == ("snapshot", [one.id for one in facade.devices])


async def test_what_only_ages_is_no_change(tmp_path: Path) -> None:
    """Seconds since and seconds left grow by themselves: an idle server sends nothing of its state."""
    facade = FakeFacade(a_resident("chat"))
    async with serving(facade, tmp_path, QUICK) as session, session.get("/api/events") as response:
        await messages(response, 1)
        looks = facade.looks
        for n in range(20):
            facade.change("chat", instances=a_resident("chat", since_s=60.0 + n, idle_s=30.0 + n).instances)
            await asyncio.sleep(0.01)
        facade.publish(an_event(7, "ready"))
        assert [one["kind"] for one in await messages(response, 1)] == ["ready"]
    assert facade.looks > looks


async def test_peers_and_fetches_are_told_while_they_go_on(tmp_path: Path) -> None:
    """Nothing happens in the scheduler meanwhile: they are looked at once a second nevertheless."""
    peer = {"id": "big-box", "healthy": True, "since_s": 5.0, "last_error": "", "last_error_s": None, "in_flight": 1, "requests": 3}
    fetch = {"reference": "hf://o/r:Q4", "stage": "fetching", "done_bytes": 1, "total_bytes": 4, "eta_s": 9.0, "waiting": 0, "since_s": 1.0}
    facade = FakeFacade(a_model("late"))
    facade.stamp = lambda: 0  # type: ignore[method-assign]
    facade.peers, facade.statics["late"] = [peer], {"absent": True, "fetch": fetch}
    async with serving(facade, tmp_path, QUICK) as session, session.get("/api/events") as response:
        (first,) = await messages(response, 1)
        assert first["peers"] == [peer]
        facade.peers = [{**peer, "since_s": 6.0, "last_error_s": 1.0}]  # older, and that is all
        facade.statics["late"]["fetch"] = {**fetch, "done_bytes": 2, "since_s": 2.0}
        (change,) = await messages(response, 1)
        assert "peers" not in change
        assert change["models"][0]["fetch"]["done_bytes"] == 2
        facade.peers = [{**peer, "healthy": False, "in_flight": 0}]
        (change,) = await messages(response, 1)
        assert [one["healthy"] for one in change["peers"]] == [False]


async def test_changes_are_worked_out_once_for_all_readers(tmp_path: Path) -> None:
    """Ten readers cost hardly more than one, and none once they have gone."""
    facade = FakeFacade(a_resident("chat"))
    async with serving(facade, tmp_path, StreamLimits(changes_s=0.1, look_s=0.05)) as session:
        readers = [await session.get("/api/events") for _ in range(10)]
        for one in readers:
            await messages(one, 1)
        before = facade.looks
        await asyncio.sleep(0.55)
        assert facade.looks - before <= 8
        for one in readers:
            one.close()
        await asyncio.sleep(0.4)
        before = facade.looks
        await asyncio.sleep(0.3)
        assert facade.looks - before <= 1


async def test_a_reader_that_wants_only_events_gets_only_those(tmp_path: Path) -> None:
    """`?state=0`: as `greenroom events` asks."""
    facade = FakeFacade(a_resident("chat"))
    async with serving(facade, tmp_path, QUICK) as session, session.get("/api/events?state=0") as response:
        await response.content.readuntil(b"\n\n")
        facade.change("chat", state=State.DRAINING)
        await asyncio.sleep(0.1)
        facade.publish(an_event(7, "x"))
        assert [one["id"] for one in await messages(response, 1)] == [7]


async def test_a_reader_that_was_too_slow_gets_the_whole_state_again(tmp_path: Path) -> None:
    """Changes may be among what was dropped: after the rest comes a snapshot."""
    facade = FakeFacade(a_resident("chat"))
    limits = StreamLimits(backlog_len_max=3, changes_s=30.0)
    async with serving(facade, tmp_path, limits) as session, session.get("/api/events") as response:
        await messages(response, 1)
        for number in range(1, 11):  # before the writer runs again
            facade.publish(an_event(number))
        found = await messages(response, 5)
    assert [one["kind"] for one in found] == ["dropped", "ready", "ready", "ready", "snapshot"]
