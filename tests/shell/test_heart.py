"""The heart: events in turn, actions as tasks, one report a task, and what happens when an invariant breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from greenroom.core.facts import (
    Action,
    Admit,
    Cut,
    Device,
    Done,
    InstanceReported,
    Model,
    Operation,
    OperatorAsked,
    Refuse,
    RequestArrived,
    RequestFinished,
    Setup,
    Sleep,
    Start,
    State,
    Stop,
    Tell,
    Ticked,
    Verify,
    Wake,
)
from greenroom.shell.heart import JOURNAL_KEPT, Shell

WAIT_S_MAX = 10.0


class FakeCrew:
    """Reports at once, or when the test lets it; remembers what it was told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.held: dict[str, asyncio.Event] = {}  # "start a" -> goes on when set
        self.raises: dict[str, Exception] = {}
        self.running: set[str] = set()
        self.dies = asyncio.Event()

    def report(self, model: str, generation: int, state: State) -> InstanceReported:
        return InstanceReported(asyncio.get_running_loop().time(), model, generation, state)

    async def _does(self, what: str) -> None:
        self.log.append(what)
        if what in self.held:
            await self.held[what].wait()
        if what in self.raises:
            raise self.raises[what]

    async def start(self, action: Start) -> InstanceReported | None:
        self.running.add(action.model)
        await self._does(f"start {action.model}")
        return self.report(action.model, action.generation, State.READY)

    async def stop(self, action: Stop) -> InstanceReported | None:
        await self._does(f"stop {action.model}")
        self.running.discard(action.model)
        return self.report(action.model, action.generation, State.STOPPED)

    async def sleep(self, action: Sleep) -> InstanceReported | None:
        raise AssertionError("no model here sleeps")

    async def wake(self, action: Wake) -> InstanceReported | None:
        raise AssertionError("no model here wakes")

    async def verify(self, action: Verify) -> InstanceReported | None:
        await self._does(f"verify {action.model}")
        return self.report(action.model, action.generation, State.READY)

    async def watch(self, model: str, generation: int) -> InstanceReported | None:
        await self.dies.wait()
        await self._does(f"watch {model}")
        return self.report(model, generation, State.STOPPED)

    async def end_all(self) -> None:
        await self._does("end all")
        self.running.clear()


@dataclass
class FakeParty:
    on_admitted: Callable[[Admit], None] = lambda action: None
    said: list[Action] = field(default_factory=list)
    some: asyncio.Event = field(default_factory=asyncio.Event)

    def _hear(self, action: Action) -> None:
        self.said.append(action)
        self.some.set()

    def admitted(self, action: Admit) -> None:
        self._hear(action)
        self.on_admitted(action)

    def refused(self, action: Refuse) -> None:
        self._hear(action)

    def cut(self, action: Cut) -> None:
        self._hear(action)

    def done(self, action: Done) -> None:
        self._hear(action)

    @property
    def words(self) -> list[str]:
        return [each.code if isinstance(each, (Refuse, Cut)) else type(each).__name__ for each in self.said]

    async def hears(self) -> Action:
        async with asyncio.timeout(WAIT_S_MAX):
            await self.some.wait()
        self.some.clear()
        return self.said[-1]


SETUP = Setup((Device("gpu0", "declared", 10_000, measured=False),), tuple(Model(name, ("gpu0",), 6000) for name in ("a", "b")))


@pytest.fixture
def crew() -> FakeCrew:
    return FakeCrew()


@pytest.fixture
async def shell(crew: FakeCrew) -> AsyncIterator[Shell]:
    shell = Shell(SETUP, crew, clock=asyncio.get_running_loop().time)
    yield shell
    await shell.close()


def asks(shell: Shell, model: str, party: FakeParty | None = None) -> tuple[int, FakeParty]:
    request, party = shell.next_request(), party or FakeParty()
    shell.ask(request, party, RequestArrived(shell.clock(), request, model))
    return request, party


async def until(fact: Callable[[], bool]) -> None:
    """Let the loop turn until it is true."""
    async with asyncio.timeout(WAIT_S_MAX):
        while not fact():  # noqa: ASYNC110 - turning the loop is the point
            await asyncio.sleep(0)


def breaks(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next event breaks an invariant."""

    def handle(event: Any) -> list[Action]:
        raise AssertionError("booked 3 MiB, holders sum to 2 MiB")

    monkeypatch.setattr(shell.scheduler, "handle", handle)


# -------------------------------------------------------------------------------------------------------------- events


async def test_a_request_is_admitted_when_its_engine_is_ready(shell: Shell, crew: FakeCrew) -> None:
    """One start, one admission."""
    request, party = asks(shell, "a")

    assert Admit(request, "a", 1, "cold") == await party.hears()
    assert crew.log == ["start a"]


async def test_what_a_party_says_while_it_is_called_is_handled_after_the_event_at_hand(shell: Shell) -> None:
    """Re-entrancy: a party that ends its request inside `admitted` does not run into the scheduler a second time."""
    order: list[str] = []
    shell.hooks.append(lambda event, actions: order.append(type(event).__name__))
    party = FakeParty()

    def ends(action: Admit) -> None:
        shell.post(RequestFinished(shell.clock(), action.request))
        order.append("admitted returns")

    party.on_admitted = ends
    asks(shell, "a", party)
    await party.hears()

    assert order == ["RequestArrived", "InstanceReported", "admitted returns", "RequestFinished"]


async def test_a_word_from_the_past_is_handled_as_of_now(shell: Shell) -> None:
    """The book's time never runs backwards."""
    seen: list[float] = []
    shell.hooks.append(lambda event, actions: seen.append(event.at))
    now = shell.clock()
    shell.post(Ticked(now))
    shell.post(Ticked(now - 5.0))

    assert [now, now] == seen


async def test_a_party_that_raises_keeps_nobody_else_from_being_told(
    shell: Shell, crew: FakeCrew, caplog: pytest.LogCaptureFixture
) -> None:
    """The next action of the same event is carried out; the fault is logged."""

    def raises(action: Admit) -> None:
        raise RuntimeError("a front end is broken")

    asks(shell, "a", FakeParty(raises))
    _, second = asks(shell, "a")

    assert isinstance(await second.hears(), Admit)
    assert "Admit could not be carried out" in caplog.text


async def test_a_teller_that_raises_keeps_no_engine_from_starting(shell: Shell, crew: FakeCrew) -> None:
    """A full disk of the one who remembers, for example."""

    def raises(tell: Tell) -> None:
        raise OSError("no space left on device")

    shell.tellers.append(raises)
    _, party = asks(shell, "a")

    assert isinstance(await party.hears(), Admit)


async def test_the_timer_asked_for_comes(crew: FakeCrew) -> None:
    """An idle model leaves after its ttl without any other event."""
    setup = Setup(SETUP.devices, (Model("a", ("gpu0",), 6000, ttl_s=0.01),))
    shell = Shell(setup, crew, clock=asyncio.get_running_loop().time)
    request, party = asks(shell, "a")
    await party.hears()
    shell.post(RequestFinished(shell.clock(), request))
    await until(lambda: "stop a" in crew.log)
    await until(lambda: shell.scheduler.state_of("a") is State.STOPPED)
    await shell.close()


async def test_an_engine_that_ends_by_itself_is_noticed(shell: Shell, crew: FakeCrew) -> None:
    """Whoever watches it reports."""
    request, party = asks(shell, "a")
    await party.hears()
    shell.post(RequestFinished(shell.clock(), request))
    crew.dies.set()

    await until(lambda: shell.scheduler.state_of("a") is State.STOPPED)


async def test_an_operators_wish_is_answered(shell: Shell) -> None:
    """Once, and its party is forgotten."""
    request, party = shell.next_request(), FakeParty()
    shell.ask(request, party, OperatorAsked(shell.clock(), request, "a", Operation.LOAD))

    assert Done(request, "a is ready") == await party.hears()
    assert shell.parties == {}


# ------------------------------------------------------------------------------------------------------- jobs that raise


async def test_a_start_that_raises_ends_its_engine_and_then_says_stopped(shell: Shell, crew: FakeCrew) -> None:
    """A word must be true before it is sent; whoever waited hears why."""
    crew.raises["start a"] = RuntimeError("spawn went wrong")
    _, party = asks(shell, "a")
    refused = await party.hears()

    assert isinstance(refused, Refuse)
    assert (refused.status, refused.code, "inner fault during start: spawn went wrong" in refused.message) == (503, "start_failed", True)
    assert (["start a", "stop a"], set()) == (crew.log, crew.running)


async def test_a_watch_that_raises_is_the_end_of_its_engine(shell: Shell, crew: FakeCrew) -> None:
    """Nobody would notice its death any more."""
    crew.raises["watch a"] = RuntimeError("lost sight of it")
    request, party = asks(shell, "a")
    await party.hears()
    shell.post(RequestFinished(shell.clock(), request))
    crew.dies.set()
    await until(lambda: shell.scheduler.state_of("a") is State.STOPPED)

    assert "stop a" in crew.log


async def test_a_stop_that_raises_is_reported_all_the_same(shell: Shell, crew: FakeCrew) -> None:
    """The book must not wait for ever; it is not tried twice."""
    crew.raises["stop a"] = RuntimeError("no such process")
    request, party = asks(shell, "a")
    await party.hears()
    shell.post(RequestFinished(shell.clock(), request))
    wish, caller = shell.next_request(), FakeParty()
    shell.ask(wish, caller, OperatorAsked(shell.clock(), wish, "a", Operation.UNLOAD))

    assert isinstance(await caller.hears(), Done)
    assert crew.log.count("stop a") == 1


# ---------------------------------------------------------------------------------------------------- a broken invariant


async def test_everybody_is_answered_and_every_engine_ended_when_an_invariant_breaks(
    shell: Shell, crew: FakeCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who wait are refused, those who are served are cut; then the book is new and serves again."""
    _, served = asks(shell, "a")
    await served.hears()
    _, waiting = asks(shell, "b")
    before = shell.scheduler
    breaks(shell, monkeypatch)
    shell.post(Ticked(shell.clock()))

    assert (served.words, waiting.words) == (["Admit", "inner_fault", "inner_fault"], ["inner_fault", "inner_fault"])
    assert asks(shell, "a")[1].words == ["recovering"]
    await until(lambda: shell.scheduler is not before)
    assert ("end all", set()) == (crew.log[-1], crew.running)
    _, after = asks(shell, "a")

    assert isinstance(await after.hears(), Admit)


async def test_what_operators_said_of_pins_outlives_an_inner_fault(shell: Shell, crew: FakeCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes in again by itself, as it would after a crash of its engine."""
    wish, caller = shell.next_request(), FakeParty()
    shell.ask(wish, caller, OperatorAsked(shell.clock(), wish, "b", Operation.PIN))
    await until(lambda: shell.scheduler.state_of("b") is State.READY)
    before = shell.scheduler
    breaks(shell, monkeypatch)
    shell.post(Ticked(shell.clock()))
    await until(lambda: shell.scheduler is not before)

    assert shell.scheduler.pinned == {"b"}
    await until(lambda: shell.scheduler.state_of("b") is State.READY)


async def test_a_word_about_an_engine_of_the_old_book_says_nothing_to_the_new_one(
    shell: Shell, crew: FakeCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generations begin anew: an old start's late end must not be taken for the new engine's."""
    crew.held["start a"] = asyncio.Event()
    asks(shell, "a")
    await until(lambda: "start a" in crew.log)
    before = shell.scheduler
    breaks(shell, monkeypatch)
    shell.post(Ticked(shell.clock()))
    await until(lambda: shell.scheduler is not before)
    old, crew.held["start a"] = crew.held["start a"], asyncio.Event()
    _, party = asks(shell, "a")
    await until(lambda: crew.log.count("start a") == 2)
    old.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (party.said, shell.scheduler.state_of("a")) == ([], State.STARTING)
    crew.held["start a"].set()

    assert isinstance(await party.hears(), Admit)


async def test_the_journal_is_dumped_when_an_invariant_breaks(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The fault, the events that led to it, and the one that broke it."""
    asks(shell, "a")
    breaks(shell, monkeypatch)
    with caplog.at_level(logging.ERROR, "greenroom"):
        shell.post(Ticked(4_711_000.0))
    text = caplog.text

    assert "booked 3 MiB, holders sum to 2 MiB" in text
    assert text.index("RequestArrived") < text.index("Ticked(at=4711000.0) -> (broke)")


async def test_the_journal_is_bounded(shell: Shell) -> None:
    """However much happens."""
    for _ in range(JOURNAL_KEPT + 50):
        shell.post(Ticked(shell.clock()))

    assert len(shell.journal) == JOURNAL_KEPT


async def test_a_shutdown_during_recovery_starts_nothing_again(crew: FakeCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a pinned model, and it does not wait out its grace."""
    setup = Setup(SETUP.devices, (Model("a", ("gpu0",), 6000, pinned=True),))
    shell = Shell(setup, crew, clock=asyncio.get_running_loop().time)
    shell.begin()
    await until(lambda: shell.scheduler.state_of("a") is State.READY)
    crew.held["end all"] = asyncio.Event()
    breaks(shell, monkeypatch)
    shell.post(Ticked(shell.clock()))
    closing = asyncio.ensure_future(shell.shut_down(grace_s=WAIT_S_MAX))
    await asyncio.sleep(0)
    crew.held["end all"].set()
    async with asyncio.timeout(WAIT_S_MAX / 2):
        await closing

    assert crew.log.count("start a") == 1


# ------------------------------------------------------------------------------------------------------------- shutdown


async def test_shutdown_waits_for_requests_in_flight(shell: Shell, crew: FakeCrew) -> None:
    """Nobody is cut within the grace."""
    request, party = asks(shell, "a")
    await party.hears()
    closing = asyncio.ensure_future(shell.shut_down(grace_s=WAIT_S_MAX))
    await asyncio.sleep(0)
    shell.post(RequestFinished(shell.clock(), request))
    await closing

    assert (party.words, crew.log) == (["Admit"], ["start a", "stop a", "end all"])


async def test_shutdown_cuts_who_is_still_there_after_the_grace(shell: Shell, crew: FakeCrew) -> None:
    """Told once, ended, and the engine stops."""
    party = FakeParty()
    request, _ = asks(shell, "a", party)
    await party.hears()
    closing = asyncio.ensure_future(shell.shut_down(grace_s=0.01))
    assert Cut(request, "shutdown", "greenroom is shutting down") == await party.hears()
    shell.post(RequestFinished(shell.clock(), request))
    await closing

    assert "stop a" in crew.log


async def test_shutdown_ends_even_when_a_client_never_does(shell: Shell, crew: FakeCrew) -> None:
    """After the second grace every engine is killed."""
    _, party = asks(shell, "a")
    await party.hears()
    await shell.shut_down(grace_s=0.01)

    assert ("end all", set()) == (crew.log[-1], crew.running)


async def test_nothing_is_left_running_after_close(shell: Shell, crew: FakeCrew) -> None:
    """Tasks are ended, timers too."""
    crew.held["start a"] = asyncio.Event()
    asks(shell, "a")
    await until(lambda: "start a" in crew.log)
    await shell.close()

    assert set() == shell._tasks
