"""One visit a request: from its question to its one end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom.config.model import ModelConfig
from greenroom.core.facts import (
    Cut,
    Device,
    InstanceReported,
    Model,
    Outcome,
    Priority,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestLost,
    RequestQuiet,
    Setup,
    Start,
    State,
    Stop,
    Verify,
)
from greenroom.engines.detect import describe
from greenroom.proxy.admission import Grant, Refusal, Wish
from greenroom.serve.door import Door, Visit
from greenroom.shell.heart import Shell


@dataclass
class FakeWaiter:
    said: list[Any] = field(default_factory=list)

    def admitted(self, grant: Grant) -> None:
        self.said.append(grant)

    def refused(self, refusal: Refusal) -> None:
        self.said.append(refusal)

    def cut(self, code: str, message: str) -> None:
        self.said.append(code)

    @property
    def words(self) -> list[str]:
        return [each if isinstance(each, str) else each.code if isinstance(each, Refusal) else each.start for each in self.said]


class FakeCrew:
    """Engines that are there as soon as they are asked for."""

    def __init__(self) -> None:
        self.engine = describe(ModelConfig("a", ("engine",), proxy="http://127.0.0.1:${PORT}/base/", env=(("X", "1"),)))
        self.running: dict[str, Any] = {}
        self.lacking: dict[str, str] = {}
        self.stage = SimpleNamespace(engines={"a": self.engine})
        self.ports = iter(range(5800, 5900))

    def _report(self, action: Any, state: State) -> InstanceReported:
        return InstanceReported(asyncio.get_running_loop().time(), action.model, action.generation, state)

    async def start(self, action: Start) -> InstanceReported:
        self.running[action.model] = SimpleNamespace(
            model=action.model, generation=action.generation, host="127.0.0.1", port=next(self.ports), engine=self.engine, hot=None
        )
        return self._report(action, State.READY)

    async def stop(self, action: Stop) -> InstanceReported:
        self.running.pop(action.model, None)
        return self._report(action, State.STOPPED)

    async def verify(self, action: Verify) -> InstanceReported:
        return self._report(action, State.READY)

    async def watch(self, model: str, generation: int) -> None:
        return None

    async def end_all(self) -> None:
        self.running.clear()


SETUP = Setup((Device("gpu0", "declared", 10_000, measured=False),), (Model("a", ("gpu0",), 6000, parallel=2),))


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    crew: Any = FakeCrew()
    shell = Shell(SETUP, crew, clock=asyncio.get_running_loop().time)
    yield Door(shell, crew)
    await shell.close()


def heard(door: Door) -> list[Any]:
    events: list[Any] = []
    door.shell.hooks.append(lambda event, actions: events.append(event))
    return events


def asks(door: Door, **more: Any) -> tuple[Visit, FakeWaiter]:
    waiter = FakeWaiter()
    return door.ask(Wish("a", "a", "/v1/chat/completions", **more), waiter), waiter


async def settled(waiter: FakeWaiter, words: int = 1) -> None:
    async with asyncio.timeout(10):
        while len(waiter.said) < words:  # noqa: ASYNC110 - turning the loop is the point
            await asyncio.sleep(0)


async def a_hot_visit(door: Door) -> tuple[Visit, FakeWaiter]:
    visit, waiter = asks(door)
    await settled(waiter)
    return visit, waiter


async def test_a_request_is_told_where_to_go(door: Door) -> None:
    """The engine's address and prefix, its generation, and what it waited for."""
    _, waiter = await a_hot_visit(door)
    grant = waiter.said[0]

    assert (grant.model, grant.host, grant.port, grant.generation, grant.base_path) == ("a", "127.0.0.1", 5800, 1, "/base")


async def test_a_hot_request_is_answered_before_ask_returns(door: Door) -> None:
    """With the one grant of that engine."""
    await a_hot_visit(door)
    _, second = asks(door)

    assert second.words == ["hot"]
    assert second.said[0] is door.crew.running["a"].hot


async def test_a_page_file_is_served_and_is_no_use_of_the_model(door: Door) -> None:
    """The scheduler hears nothing of it; once the engine has gone there is none, and one that breaks off is told."""
    visit, _waiter = await a_hot_visit(door)
    visit.finish(Outcome.OK, 200, 10, 0.1)
    events, idle_at = heard(door), door.shell.scheduler._stage.entries["a"].instance.idle_at
    file, taker = FakeWaiter(), FakeWaiter()
    glance = door.ask(Wish("a", "a", "/style.css", glance=True), file)
    assert file.words == ["hot"]
    glance.finish(Outcome.OK, 200, 10, 0.1)
    broken = door.ask(Wish("a", "a", "/app.js", glance=True), taker)
    broken.lost("connection reset")
    broken.lost("again")
    assert taker.words == ["hot", "engine_died"]
    await asyncio.sleep(0)
    assert events == []
    assert door.shell.scheduler._stage.entries["a"].instance.idle_at == idle_at
    door.crew.running.clear()
    door.ask(Wish("a", "a", "/style.css", glance=True), late := FakeWaiter())
    assert late.words == ["not_ready"]


async def test_an_engine_that_took_the_place_of_another_has_its_own_grant(door: Door) -> None:
    """Same model, same generation (a book built anew), another port."""
    first = door.grant(door.crew.running.setdefault("a", await self_made(door)), "hot", 0)
    door.crew.running["a"] = await self_made(door)

    assert (first.port, door.grant(door.crew.running["a"], "hot", 0).port) == (5800, 5801)


async def self_made(door: Door) -> Any:
    await door.crew.start(Start("a", 1, ("gpu0",), {}))
    return door.crew.running["a"]


async def test_what_is_asked_reaches_the_scheduler(door: Door) -> None:
    """Model, priority, deadline and client."""
    events = heard(door)
    asks(door, batch=True, deadline_s=3.0, client="key one")
    event = next(each for each in events if isinstance(each, RequestArrived))

    assert (event.model, event.priority, event.deadline_s, event.client) == ("a", Priority.BATCH, 3.0, "key one")


async def test_every_visit_ends_once(door: Door) -> None:
    """Whatever is said of it afterwards."""
    visit, _ = await a_hot_visit(door)
    events = heard(door)
    visit.finish(Outcome.OK, 200, 10, 0.1)
    visit.finish(Outcome.CLIENT_GONE, 200, 10, 0.1)
    visit.lost("too late")
    visit.cancel()

    assert [RequestFinished] == [type(event) for event in events]
    assert door.shell.parties == {}


async def test_a_client_that_leaves_before_its_turn_is_taken_out(door: Door) -> None:
    """And never admitted."""
    events = heard(door)
    visit, waiter = asks(door)
    visit.cancel()
    for _ in range(5):
        await asyncio.sleep(0)

    assert (sum(isinstance(event, RequestCancelled) for event in events), waiter.said) == (1, [])


async def test_a_lost_request_is_admitted_once_more(door: Door) -> None:
    """After the host has looked at the engine."""
    visit, waiter = await a_hot_visit(door)
    events = heard(door)
    visit.lost("the connection was closed")
    await settled(waiter, 2)

    assert any(isinstance(event, RequestLost) for event in events)
    assert isinstance(waiter.said[1], Grant)


async def test_a_visit_that_was_cut_is_not_refused_as_well(door: Door) -> None:
    """A broken invariant tells both; the one who is served hears the cut, and ends it."""
    visit, waiter = await a_hot_visit(door)
    waiter.said.clear()
    door.shell._recover()

    assert waiter.words == ["inner_fault"]
    assert isinstance(waiter.said[0], str)
    visit.finish(Outcome.CUT, 503, 0, None)


async def test_a_waiting_visit_is_not_cut(door: Door) -> None:
    """Only what is in flight can be."""
    visit, waiter = asks(door)
    visit.cut(Cut(visit.request, "shutdown", "x"))

    assert waiter.said == []


async def test_signs_of_life_are_those_of_requests_in_flight(door: Door) -> None:
    """Not of those that wait, have ended, or are silent by right."""
    assert door.oldest_beats() == {}
    visit, _ = await a_hot_visit(door)
    began = door.oldest_beats()
    visit.quiet(True)
    silent = door.oldest_beats()
    visit.quiet(False)
    visit.finish(Outcome.OK, 200, 0, None)
    visit.alive()

    assert (list(began), silent, door.oldest_beats()) == (["a"], {}, {})


async def test_while_one_request_is_held_back_no_silence_of_its_engine_counts(door: Door) -> None:
    """An engine with one thread answers nobody while it writes to a client that does not read."""
    held, _ = await a_hot_visit(door)
    other, _ = asks(door)
    assert other.in_flight
    held.held()
    held_at = door.oldest_beats()["a"]
    held.finish(Outcome.OK, 200, 0, None)

    assert other.last_beat < held_at
    assert door.oldest_beats() == {"a": held_at}  # from then on it is the engine's own


async def test_a_silent_tunnel_is_told_to_the_scheduler(door: Door) -> None:
    """And when it speaks again."""
    visit, _ = await a_hot_visit(door)
    events = heard(door)
    visit.quiet(True)
    visit.quiet(False)

    assert [event.quiet for event in events if isinstance(event, RequestQuiet)] == [True, False]


async def test_a_model_that_lacks_something_is_refused_until_it_is_there(door: Door) -> None:
    """Looked at by each request; once it is there all is planned anew, and the request goes on."""
    engine = door.crew.stage.engines["a"]
    lacks = ["there is no file /x.gguf"]
    door.crew.stage.engines = {"a": SimpleNamespace(config=engine.config, missing=lambda: lacks[0])}  # type: ignore[dict-item]
    door.crew.lacking = {"a": "there is no file /x.gguf"}
    changes: list[tuple[str, str]] = []
    door.changed = lambda model, lacking: changes.append((model, lacking))
    _, refused = asks(door)
    lacks[0] = ""
    _, waiter = asks(door)
    await settled(waiter)

    assert [one.message for one in refused.said] == ["a is misconfigured: there is no file /x.gguf"]
    assert (refused.words, changes) == (["misconfigured"], [("a", "")])
    assert isinstance(waiter.said[0], Grant)


async def test_what_a_model_lacks_to_start_keeps_nobody_from_its_engine(door: Door) -> None:
    """Its file was removed while it serves."""
    visit, _ = await a_hot_visit(door)
    visit.finish(Outcome.OK, 200, 0, None)
    door.crew.lacking = {"a": "there is no file /x.gguf"}
    _, waiter = asks(door)
    await settled(waiter)

    assert isinstance(waiter.said[0], Grant)


async def test_a_file_that_is_still_being_written_is_no_news_with_each_byte(door: Door) -> None:
    """To plan anew costs the whole configuration, and a line of the ledger; who asks is told the figures of now."""
    engine = door.crew.stage.engines["a"]
    lacks = ["/x.gguf ends at byte 100,000 of 204,342"]
    door.crew.stage.engines = {"a": SimpleNamespace(config=engine.config, missing=lambda: lacks[0])}  # type: ignore[dict-item]
    door.crew.lacking = {"a": lacks[0]}
    changes: list[tuple[str, str]] = []
    door.changed = lambda model, lacking: changes.append((model, lacking))
    lacks[0] = "/x.gguf ends at byte 150,000 of 204,342"
    await door.look_around()
    assert (door.lacks("a"), changes) == (lacks[0], [])
    lacks[0] = ""
    assert (door.lacks("a"), changes, door.crew.lacking) == ("", [("a", "")], {})


async def test_what_could_not_be_planned_is_tried_again(door: Door) -> None:
    """Else nobody would look any more, and the scheduler would refuse it for ever."""
    engine = door.crew.stage.engines["a"]
    door.crew.stage.engines = {"a": SimpleNamespace(config=engine.config, missing=lambda: "")}  # type: ignore[dict-item]
    door.crew.lacking = {"a": "there is no file /x.gguf"}
    tries: list[str] = []

    def changed(model: str, lacking: str) -> None:
        tries.append(model)
        if len(tries) == 1:
            raise PermissionError(13, "Permission denied", "/other.gguf")

    door.changed = changed
    with pytest.raises(PermissionError):
        await door.look_around()
    assert door.crew.lacking == {"a": "there is no file /x.gguf"}
    assert (door.lacks("a"), tries, door.crew.lacking) == ("", ["a", "a"], {})


async def test_what_is_lacking_is_looked_for_while_nobody_asks(door: Door) -> None:
    """What changed is told once, another lack too; where only a reload helps nobody looks."""
    engine = door.crew.stage.engines["a"]
    lacks = ["there is no file /x.gguf"]
    wrong = SimpleNamespace(config=replace(engine.config, misconfigured="b: its ttl is wrong"), missing=lambda: "")
    door.crew.stage.engines = {"b": wrong, "a": SimpleNamespace(config=engine.config, missing=lambda: lacks[0])}  # type: ignore[dict-item]
    door.crew.lacking = {"b": "b: its ttl is wrong", "a": "there is no file /x.gguf"}
    changes: list[tuple[str, str]] = []
    door.changed = lambda model, lacking: changes.append((model, lacking))
    for now in ("there is no file /x.gguf", "/x.gguf is cut short", "/x.gguf is cut short", "", ""):
        lacks[0] = now
        await door.look_around()

    assert changes == [("a", "/x.gguf is cut short"), ("a", "")]
    assert door.crew.lacking == {"b": "b: its ttl is wrong"}


async def test_a_waiting_request_is_told_what_it_waits_for(door: Door) -> None:
    """Until it is served."""
    visit, waiter = asks(door)
    before = visit.progress()
    await settled(waiter)

    assert (before.startswith("loading, about"), visit.progress()) == (True, "")


async def test_states_are_told_for_listings(door: Door) -> None:
    """Also of a model nobody knows."""
    assert (door.is_ready("a"), door.state_of("a"), door.state_of("nobody")) == (False, "stopped", "stopped")
    await a_hot_visit(door)

    assert (door.is_ready("a"), door.state_of("a")) == (True, "ready")
