"""What operators see and do."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom import __version__
from greenroom.config.model import Config, ModelConfig
from greenroom.control.facade import Result
from greenroom.core.facts import Operation, Tell
from greenroom.host.logs import LogRing
from greenroom.ledger.footprints import Footprints
from greenroom.ledger.rows import STARTED, TellRow
from greenroom.ledger.store import Ledger
from greenroom.serve.accounts import Accounts
from greenroom.serve.books import Books
from greenroom.serve.desk import EVENTS_KEPT, SUBSCRIBER_EVENTS_MAX, Desk, EventFeed, RingHandler, masked
from greenroom.serve.wiring import make_plan
from greenroom.shell.heart import Shell

from .test_door import FakeCrew


def a_tell(n: int = 0, model: str = "a") -> Tell:
    return Tell(0.0, model, "ready", f"word {n}")


MODELS = tuple(ModelConfig(name, (sys.executable,), memory_mib=10, aliases=(f"{name}-alias",)) for name in ("agent", "coder"))


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    crew: Any = FakeCrew()
    plan = make_plan(Config("greenroom.yaml", MODELS), (), Footprints(None))
    clock = asyncio.get_running_loop().time
    shell = Shell(plan.setup, crew, clock=clock)
    feed = EventFeed(clock)
    shell.tellers.append(feed.tell)
    yield Desk(shell, crew, plan, feed, LogRing("greenroom"))
    await shell.close()


async def test_a_load_is_waited_for(desk: Desk) -> None:
    """200 when it is done."""
    assert Result(200, "agent is ready") == await desk.operate("agent", Operation.LOAD, force=False, level=None, wait_s=10)


async def test_whoever_does_not_wait_hears_that_it_is_under_way(desk: Desk) -> None:
    """202 with the state it is in."""
    result = await desk.operate("agent", Operation.LOAD, force=False, level=None, wait_s=0)

    assert (result.status, result.message) == (202, "load of agent is under way (starting)")


async def test_a_wish_that_cannot_be_is_an_error(desk: Desk) -> None:
    """With the status and code of the core."""
    result = await desk.operate("agent", Operation.SLEEP, force=False, level=None, wait_s=1)

    assert (result.status, result.code) == (409, "cannot_sleep")


async def test_what_a_model_lacks_is_looked_for_again_by_who_loads_or_pins_it(desk: Desk) -> None:
    """Not by who wants it gone."""
    looked: list[str] = []
    desk.lacks = lambda model: (looked.append(model), "")[1]
    for operation in (Operation.LOAD, Operation.PIN, Operation.UNPIN, Operation.UNLOAD):
        await desk.operate("agent", operation, force=False, level=None, wait_s=10)

    assert looked == ["agent", "agent"]


async def test_names_are_resolved_and_near_ones_found(desk: Desk) -> None:
    """Ids and aliases."""
    assert (desk.resolve("agent-alias"), desk.resolve("agnt")) == ("agent", None)
    assert "agent" in desk.near("agnt")
    desk.peers = SimpleNamespace(status=lambda: [{"models": ["llama-70b", "agent"]}])  # type: ignore[assignment]
    assert (desk.near("lama-70b"), desk.near("agnt").count("agent")) == (["llama-70b"], 1)


async def test_static_facts_follow_the_plan(desk: Desk) -> None:
    """Of the configuration in force, also after a reload; nothing of an unknown model."""
    assert (desk.static("agent")["aliases"], desk.static("agent")["devices"], desk.static("nobody")) == (["agent-alias"], ["ram"], {})
    desk.plan = make_plan(Config("greenroom.yaml", (ModelConfig("agent", ("engine",), queue_limit=7),)), (), Footprints(None))

    assert (desk.static("agent")["queue_limit"], desk.static("coder")) == (7, {})


async def test_the_story_of_a_model_is_told_in_wall_time(desk: Desk) -> None:
    """Oldest first, unix seconds."""
    await desk.operate("agent", Operation.LOAD, force=False, level=None, wait_s=10)
    (first_at, first), *_, (_, last) = desk.why("agent")

    assert first_at > 1_600_000_000
    assert (first.startswith("starting for an operator on ram"), last.startswith("ready after")) == (True, True)


async def test_what_the_host_knows_of_an_engine_that_is_not_there_is_nothing(desk: Desk) -> None:
    """No pid, no port."""
    assert (desk.extra("agent").pid, desk.extra("agent").port) == (None, None)


async def test_events_are_numbered_and_the_newest_kept() -> None:
    """A late subscriber sees what it missed, as far as it is kept."""
    feed = EventFeed(asyncio.get_running_loop().time)
    for n in range(EVENTS_KEPT + 10):
        feed.tell(a_tell(n))

    assert [item["id"] for item in feed.recent(2)] == [EVENTS_KEPT + 9, EVENTS_KEPT + 10]
    assert (len(feed.recent(10_000)), feed.recent(0)) == (EVENTS_KEPT, [])


async def test_what_was_told_before_a_start_comes_first_and_has_no_number() -> None:
    """So nobody who resumes hears it again; the start stands in the story of each model that has an earlier one."""
    feed = EventFeed(asyncio.get_running_loop().time, 100)
    feed.tell(a_tell(1))
    feed.recall([TellRow(7.0, "b", "ready", "info", "old")] * EVENTS_KEPT, {"b": [TellRow(7.0, "b", "ready", "info", "old")]})
    feed.tell(a_tell(2))

    assert [(item.get("id"), item["text"].split()[0]) for item in feed.recent(4)] == [
        (None, "old"),
        (102, "greenroom"),
        (101, "word"),
        (103, "word"),
    ]
    assert len(feed.recent(10_000)) == EVENTS_KEPT
    assert [item["kind"] for item in feed.story("b")] == ["ready", STARTED]
    assert [item["text"] for item in feed.story("a")] == ["word 1", "word 2"]


async def test_the_desk_recalls_what_the_ledger_knows(tmp_path: Path) -> None:
    """Of the runs before this one, with their starts."""
    crew: Any = FakeCrew()
    plan = make_plan(Config("greenroom.yaml", MODELS), (), Footprints(None))
    for run in (1, 2):
        ledger = Ledger(tmp_path / "journal.sqlite")
        shell = Shell(plan.setup, crew, clock=asyncio.get_running_loop().time)
        feed = EventFeed(shell.clock)
        shell.tellers.append(feed.tell)
        Books(shell, ledger, Accounts())
        desk = Desk(shell, crew, plan, feed, LogRing("greenroom"), ledger=ledger)
        assert ledger.flush(10)
        await desk.recall()
        before = [item["text"] for item in desk.recent(100)]
        story = [item["text"] for item in desk.story("agent")]
        if run == 1:
            assert (before, story) == ([f"greenroom {__version__} started"], [])
            await desk.operate("agent", Operation.LOAD, force=False, level=None, wait_s=10)
        await shell.close()
        ledger.close()

    started = f"greenroom {__version__} started"
    assert (before[0], before[-1], before.count(started)) == (started, started, 2)
    assert story[0].startswith("starting for an operator on ram")
    assert story == [*(text for text in before if text != started), started]


async def test_a_slow_reader_is_told_how_much_it_missed() -> None:
    """The oldest are dropped, the newest are there."""
    feed = EventFeed(asyncio.get_running_loop().time)
    reader: Any = feed.follow()
    first = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    for n in range(SUBSCRIBER_EVENTS_MAX + 5):
        feed.tell(a_tell(n))
    got = [await first, await anext(reader)]
    await reader.aclose()

    assert {("dropped", 5)} <= {(item["kind"], item.get("count")) for item in got}


async def test_a_reader_that_leaves_is_forgotten() -> None:
    """Nothing is kept for it."""
    feed = EventFeed(asyncio.get_running_loop().time)
    reader: Any = feed.follow()
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    assert len(feed._readers) == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await reader.aclose()

    assert set() == feed._readers


def test_secrets_are_masked() -> None:
    """Each of them, as it is, not as a pattern."""
    assert masked("key a.c and b+, not abc", ["a.c", "b+"]) == "key *** and ***, not abc"
    assert masked("nothing", []) == "nothing"


def test_a_desk_of_many_models_answers_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Static facts of a thousand models are looked up, not searched for."""
    models = tuple(ModelConfig(f"m{n}", ("engine",), memory_mib=10) for n in range(300))
    plan = make_plan(Config("greenroom.yaml", models), (), Footprints(None))
    shell: Any = SimpleNamespace(clock=lambda: 0.0, scheduler=SimpleNamespace(stay_s=lambda model: None))
    desk = Desk(shell, SimpleNamespace(running={}), plan, EventFeed(lambda: 0.0), LogRing("greenroom"))  # type: ignore[arg-type]
    walked: list[str] = []
    real = ModelConfig.__dict__["id"]
    monkeypatch.setattr(ModelConfig, "id", property(lambda self: (walked.append("id"), real.__get__(self))[1]))
    for n in range(300):
        desk.static(f"m{n}")

    assert len(walked) <= 600


async def test_what_another_thread_says_wakes_who_follows_the_log() -> None:
    """The ledger and others have threads of their own; futures of the loop are not theirs to touch."""
    asyncio.get_running_loop().set_debug(True)  # then it says who does
    ring = LogRing("greenroom")
    handler = RingHandler(ring)
    reader = ring.subscribe()
    handler.handle(logging.makeLogRecord({"msg": "here"}))
    assert await anext(reader) == "here"
    following = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    await asyncio.to_thread(handler.handle, logging.makeLogRecord({"msg": "there"}))
    assert await asyncio.wait_for(following, 20) == "there"
