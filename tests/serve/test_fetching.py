"""One fetch for all who ask for a model: whom it tells what, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from greenroom.config.model import Config, ModelConfig
from greenroom.core.facts import Device, Model, Refuse, Setup, Tell
from greenroom.serve.fetching import AT_ONCE_MAX, RETRY_S, Fetching
from greenroom.serve.storeroom import Storeroom
from greenroom.shell.heart import Shell
from greenroom.store.facts import Progress, Reference, StoreError
from greenroom.store.library import Library
from greenroom.store.references import parse

from .test_door import FakeCrew, asks
from .test_door import door as door  # a fixture

A, B = Reference("https", "models.example", "/a.gguf"), Reference("https", "models.example", "/b.gguf")


@dataclass
class One:
    """A request that waits."""

    request: int
    left_s: float | None = None
    said: list[str] = field(default_factory=list)
    refusals: list[Refuse] = field(default_factory=list)

    def refused(self, action: Refuse) -> None:
        self.said.append(action.code)
        self.refusals.append(action)

    def go_on(self) -> None:
        self.said.append("go on")


@dataclass
class World:
    """A store that gives models away when told to."""

    here: set[Reference] = field(default_factory=set)
    pulls: list[Reference] = field(default_factory=list)
    tells: list[Callable[[Progress], None]] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    told: list[Tell] = field(default_factory=list)
    wanted: dict[str, Reference] = field(default_factory=dict)
    landings: list[str] = field(default_factory=list)
    broken: str = ""  # what goes wrong when one has come
    is_lost: bool = False  # what has come is not found
    late_s: float = 0.0

    async def pull(self, reference: Reference, tell: Callable[[Progress], None]) -> None:
        self.pulls.append(reference)
        self.tells.append(tell)
        await self.go.wait()
        self.here.add(reference)

    def landed(self, model: str) -> None:
        self.landings.append(model)
        if self.broken:
            raise RuntimeError(self.broken)
        self.fetching.take(self.absent())

    def absent(self) -> Mapping[str, Reference]:
        return {model: reference for model, reference in self.wanted.items() if self.is_lost or reference not in self.here}

    def clock(self) -> float:
        return asyncio.get_running_loop().time() + self.late_s

    def made(self, shell: Shell, **wanted: Reference) -> Fetching:
        self.wanted = wanted
        self.fetching = Fetching(self.pull, self.landed, self.told.append, shell.spawn, self.clock)
        self.fetching.take(self.absent())
        return self.fetching

    def wait(self, model: str, request: int, left_s: float | None = None) -> One:
        one = One(request, left_s)
        self.fetching.wait(model, one, 10)
        return one


@pytest.fixture
async def shell() -> AsyncIterator[Shell]:
    crew: Any = FakeCrew()
    shell = Shell(Setup((Device("gpu0", "declared", 10_000, measured=False),), (Model("a", ("gpu0",), 6000),)), crew)
    yield shell
    await shell.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 - turning the loop is the point
            await asyncio.sleep(0)


async def test_two_models_of_the_same_files_are_one_fetch(shell: Shell) -> None:
    """It takes one turn, both tell how far it is, and who waits for either goes on."""
    world = World()
    fetching = world.made(shell, a=A, twin=A, b=B)
    first, second, other = world.wait("a", 1), world.wait("twin", 2), world.wait("b", 3)
    await until(lambda: len(world.pulls) == 2)

    world.tells[0](Progress(str(A), 50, 100, 10.0, 5.0))
    assert "50%" in fetching.progress(1)
    assert fetching.progress(2) == fetching.progress(1)
    world.go.set()
    await until(lambda: bool(first.said and second.said and other.said))

    assert (first.said, second.said, other.said) == (["go on"], ["go on"], ["go on"])
    assert sorted(world.pulls, key=str) == [A, B]
    assert not fetching.running


async def test_a_twin_goes_on_with_a_fetch_that_was_stopped(shell: Shell) -> None:
    """An operator stops the one he named."""
    world = World()
    fetching = world.made(shell, a=A, twin=A)
    first, second = world.wait("a", 1), world.wait("twin", 2)
    await until(lambda: len(world.pulls) == 1)
    assert fetching.stop("a")
    world.go.set()
    await until(lambda: bool(second.said))

    assert (first.said, second.said) == (["fetch_failed"], ["go on"])
    assert world.pulls == [A, A]


async def test_more_than_a_few_wait_for_their_turn_and_say_so(shell: Shell) -> None:
    """Not `0 %` for an hour."""
    world = World()
    names = [f"m{number}" for number in range(AT_ONCE_MAX + 1)]
    fetching = world.made(shell, **{name: Reference("https", "models.example", f"/{name}.gguf") for name in names})
    for number, name in enumerate(names):
        world.wait(name, number)
    await until(lambda: len(world.pulls) == AT_ONCE_MAX)

    assert "turn" in fetching.progress(AT_ONCE_MAX)
    assert fetching.running[names[-1]].plain()["stage"] == "queued"
    assert "turn" not in fetching.progress(0)


@pytest.mark.parametrize("kind", ["raises", "lost"])
async def test_what_came_and_cannot_be_used_is_a_failure_and_not_fetched_for_ever(shell: Shell, kind: str) -> None:
    """Whoever waits is told; nobody waits for ever, and nothing runs in a circle."""
    world = World(broken="the disk is gone" if kind == "raises" else "", is_lost=kind == "lost")
    fetching = world.made(shell, a=A)
    one = world.wait("a", 1)
    world.go.set()
    await until(lambda: bool(one.said))
    next_one = world.wait("a", 2)

    assert (one.said, next_one.said) == (["fetch_failed"], ["fetch_failed"])
    assert world.pulls == [A]
    assert [tell.kind for tell in world.told] == ["fetching", "fetch_failed"]
    fetching.want(frozenset({"a"}))
    assert not fetching.running


async def test_a_deadline_is_kept_while_nobody_can_say_how_long_it_takes(shell: Shell) -> None:
    """The fetch is begun by it and goes on for the next; who has no deadline waits."""
    world = World()
    fetching = world.made(shell, a=A)
    hurried, patient = world.wait("a", 1, left_s=0.05), world.wait("a", 2)
    await until(lambda: bool(hurried.said))

    assert (hurried.said, patient.said) == (["deadline"], [])
    assert hurried.refusals[0].retry_after_s
    assert list(fetching.running) == ["a"]
    world.tells[0](Progress(str(A), 10, 100, 1.0, 90.0))
    assert world.wait("a", 3, left_s=60).said == ["deadline"]
    assert world.wait("a", 4, left_s=120).said == []


async def test_what_is_wanted_without_being_asked_for_is_tried_again(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself: greenroom may be up before its network.  Any other waits for who asks."""
    monkeypatch.setattr("greenroom.serve.fetching.RETRY_S", 0.01)
    world, tries = World(), list[Reference]()

    async def fails(reference: Reference, tell: Callable[[Progress], None]) -> None:
        tries.append(reference)
        if tries.count(reference) > 2:
            world.here.add(reference)
            return
        raise StoreError("no network")

    fetching = world.made(shell, a=A, b=B)
    fetching._pull = fails
    fetching.want(frozenset({"a"}))
    world.wait("b", 1)
    await until(lambda: world.landings == ["a"])

    assert (tries.count(A), tries.count(B)) == (3, 1)
    assert not fetching._again


async def test_who_is_wanted_no_more_is_fetched_no_further(shell: Shell) -> None:
    """Unless somebody asked for it meanwhile."""
    world = World()
    fetching = world.made(shell, a=A, b=B)
    fetching.want(frozenset({"a", "b"}))
    one = world.wait("b", 1)
    await until(lambda: len(world.pulls) == 2)
    fetching.want(frozenset())

    assert list(fetching.running) == ["b"]
    assert [(tell.model, tell.kind) for tell in world.told[2:]] == [("a", "fetch_stopped")]
    world.go.set()
    await until(lambda: one.said == ["go on"])
    assert world.here == {B}
    assert world.wait("a", 2).said == []  # it did not fail: who asks now is not told to come back later


async def test_what_is_wanted_right_after_a_failure_is_tried_again(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks for it a second time."""
    monkeypatch.setattr("greenroom.serve.fetching.RETRY_S", 0.05)
    world = World()

    async def fails(reference: Reference, tell: Callable[[Progress], None]) -> None:
        raise StoreError("no network")

    fetching = world.made(shell, a=A)
    fetching._pull = fails
    one = world.wait("a", 1)
    await until(lambda: bool(one.said))
    fetching._pull = world.pull
    world.go.set()
    fetching.want(frozenset({"a"}))

    assert not fetching.running
    await until(lambda: world.landings == ["a"])


async def test_what_an_operator_stopped_stays_stopped_until_somebody_asks(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is wanted: neither what else comes nor a pause that ends begins it again."""
    monkeypatch.setattr("greenroom.serve.fetching.RETRY_S", 0.0)
    world = World()
    fetching = world.made(shell, a=A)
    fetching.want(frozenset({"a"}))
    assert fetching.comes_back("a")
    fetching.stop("a")
    fetching.want(frozenset({"a"}))
    assert (fetching.running, fetching._again, fetching.comes_back("a")) == ({}, {}, False)
    fetching.start("a", asked=False)
    assert fetching.comes_back("a")
    fetching.stop("a")
    fetching.take({"a": B})  # another model under its name
    fetching.want(frozenset({"a"}))
    assert list(fetching.running) == ["a"]


async def test_a_name_that_was_mended_is_fetched_at_once(shell: Shell) -> None:
    """The failure belonged to what the configuration named before."""
    world = World()

    async def fails(reference: Reference, tell: Callable[[Progress], None]) -> None:
        raise StoreError(f"no {reference}")

    fetching = world.made(shell, a=A)
    fetching._pull = fails
    one = world.wait("a", 1)
    await until(lambda: bool(one.said))
    assert world.wait("a", 2).said == ["fetch_failed"]
    fetching._pull = world.pull
    fetching.take({"a": B})
    assert world.wait("a", 3).said == []
    world.late_s = RETRY_S
    await until(lambda: world.pulls == [B])


async def test_nothing_is_begun_while_greenroom_ends(shell: Shell) -> None:
    """Neither by a request nor by an operator; who waited is told."""
    world = World()
    fetching = world.made(shell, a=A)
    one = world.wait("a", 1)
    fetching.close()
    late = world.wait("a", 2)
    fetch = fetching.start("a", asked=True)

    assert (one.said, late.said) == (["fetch_failed"], ["shutting_down"])
    assert fetch.done.is_set()
    assert "shutting down" in fetch.why
    assert not fetching.running


async def test_a_request_that_is_refused_for_another_reason_waits_for_no_files_any_more(door) -> None:  # type: ignore[no-untyped-def]
    """An inner fault refuses whoever is known: the fetch does not count them on."""
    world = World()
    door.fetching = world.made(door.shell, a=A)
    door.crew.lacking = {"a": "its files"}
    visit, waiter = asks(door)
    assert visit.request in door.fetching.running["a"].waiting
    door.shell._recover()

    assert waiter.said[-1].code == "inner_fault"
    assert not door.fetching.running["a"].waiting
    assert visit.request not in door.shell.parties


async def test_the_time_that_a_fetch_took_is_off_the_deadline(door) -> None:  # type: ignore[no-untyped-def]
    """The scheduler is told what is left of it."""
    world = World()
    door.fetching = world.made(door.shell, a=A)
    door.crew.lacking = {"a": "its files"}
    now = [100.0]
    door.shell.clock = lambda: now[0]
    heard: list[Any] = []
    door.shell.hooks.append(lambda event, actions: heard.append(event))
    asks(door, deadline_s=30.0)
    now[0] += 10
    door.crew.lacking = {}
    world.go.set()
    await until(lambda: bool(heard))

    assert heard[0].deadline_s == 20.0


def test_a_model_that_came_or_was_lost_is_noticed(tmp_path: Path, tiny_chat: Path) -> None:
    """Against what was read last; nothing is said of a model that is configured wrongly."""
    library, reference = Library(tmp_path / "models"), parse(str(tiny_chat))
    room = Storeroom(library)
    models = (
        ModelConfig("a", ("engine",), reference=str(reference)),
        ModelConfig("never", ("engine",), reference=str(reference), pull="never"),
        ModelConfig("wrong", ("engine",), reference=str(reference), misconfigured="its cmd is empty"),
        ModelConfig("plain", ("engine",)),
    )
    config = Config(str(tmp_path / "greenroom.yaml"), models)
    names = [model.id for model in models]
    room.resolve(config)
    assert [room.changed(name) for name in names] == [False] * 4
    stored = library.adopt(reference)
    assert [room.changed(name) for name in names] == [True, True, False, False]
    room.resolve(config)
    assert [room.changed(name) for name in names] == [False] * 4
    stored.entry.unlink()
    assert [room.changed(name) for name in names] == [True, True, False, False]
    room.close()
