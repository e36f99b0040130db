"""What those who look are told by a running server, and that looking touches nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from yarl import URL

from greenroom.config.model import Config, ModelConfig
from greenroom.control.app import make_app, start_control
from greenroom.core.facts import Device, InstanceReported, Model, Operation, Outcome, Sleep, SleepTier, State, Wake
from greenroom.host.logs import LogRing
from greenroom.ledger.footprints import Footprints
from greenroom.ledger.rows import RequestRow, TransitionRow
from greenroom.ledger.schema import RUN_SHIFT
from greenroom.ledger.store import Ledger
from greenroom.planner.past import Past
from greenroom.planner.replay import exactly
from greenroom.proxy.admission import Wish
from greenroom.proxy.record import Record
from greenroom.serve.accounts import Accounts
from greenroom.serve.advisor import cleaned
from greenroom.serve.books import Books
from greenroom.serve.desk import Desk, EventFeed
from greenroom.serve.door import Door, Visit
from greenroom.serve.lookout import phases_of, rates_of
from greenroom.serve.ribbon import Span, Turn, day_of, first_fit, placed, spans_of
from greenroom.serve.wiring import make_plan
from greenroom.shell.heart import Shell

from .test_door import FakeCrew, FakeWaiter

TIER = SleepTier(1, 500, 0, 0.2, 0.8)
MODELS = (
    Model("sleeper", ("gpu0",), 4000, sleep=(TIER,), up_s=5.0),
    Model("dozer", ("gpu0",), 4000, doze=TIER),
    Model("org/<b>stopped</b>", ("gpu0",), 4000),
    Model("big", ("gpu0",), 9000, parallel=1),
)


class Crew(FakeCrew):
    logs: dict[str, LogRing]

    def __init__(self) -> None:
        super().__init__()
        self.logs = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: list[str] = []

    async def start(self, action: Any) -> InstanceReported:
        self.calls.append(f"start {action.model}")
        await self.gate.wait()
        report = await super().start(action)
        self.running[action.model].process = type("Process", (), {"pid": 4242})()
        self.running[action.model].phases = None
        return report

    async def sleep(self, action: Sleep) -> InstanceReported:
        self.calls.append(f"sleep {action.model}")
        return replace(self._report(action, State.ASLEEP), level=1)

    async def wake(self, action: Wake) -> InstanceReported:
        self.calls.append(f"wake {action.model}")
        return replace(self._report(action, State.READY), took_s=0.01)

    def ring_of(self, model: str) -> LogRing:
        return self.logs.setdefault(model, LogRing(model))


class House:
    """A desk with its shell, door and ledger, over engines that are there at once."""

    def __init__(self, ledger: Ledger | None) -> None:
        self.crew: Any = Crew()
        configs = tuple(ModelConfig(model.id, ("engine", "--api-key", "s3cret"), memory_mib=model.need_mib) for model in MODELS)
        plan = make_plan(Config("greenroom.yaml", configs), (), Footprints(None))
        plan = replace(plan, setup=replace(plan.setup, devices=(Device("gpu0", "declared", 10_000, measured=False),), models=MODELS))
        self.shell = Shell(plan.setup, self.crew, clock=time.monotonic)
        self.feed = EventFeed(self.shell.clock, 1000)
        self.accounts = Accounts()
        self.books = Books(self.shell, ledger, self.accounts) if ledger is not None else None
        self.desk = Desk(self.shell, self.crew, plan, self.feed, LogRing("greenroom"), self.accounts, ledger)
        self.shell.tellers += [self.feed.tell, self.desk.told]
        self.door = Door(self.shell, self.crew)

    def asks(self, model: str, **more: Any) -> tuple[Visit, FakeWaiter]:
        waiter = FakeWaiter()
        return self.door.ask(Wish(model, model, "/v1/chat/completions", **more), waiter), waiter

    async def does(self, model: str, operation: Operation) -> None:
        result = await self.desk.operate(model, operation, force=False, level=None, wait_s=5)
        assert result.status == 200, result

    async def rows(self, **wanted: Any) -> list[dict[str, Any]]:
        nothing = {"since": None, "model": None, "outcome": None, "waited_over_s": None, "cursor": "", "limit": 100}
        found: list[dict[str, Any]] = (await self.desk.requests(**{**nothing, **wanted}))["requests"]
        return found

    def end(self, visit: Visit, outcome: Outcome = Outcome.OK, **more: Any) -> None:
        visit.finish(outcome, 200, 10, 0.1)
        told: dict[str, Any] = {"tokens_in": 5, "tokens_out": 20, "request": visit.request, **more}
        record = Record(visit.model, "inference", "POST", "/v1/x", "ci", 200, outcome.value, "hot", 1, 10, 0, 0.1, 0.3, **told)
        (self.books or self.accounts).on_request_end(record)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    made = House(None)
    yield made
    await made.shell.close()


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[tuple[House, Ledger]]:
    ledger = Ledger(tmp_path / "journal.sqlite", gather_s=0.01)
    made = House(ledger)
    yield made, ledger
    await made.shell.close()
    ledger.close()


# ------------------------------------------------------------------------------------------------------------- touching nothing


async def test_whoever_looks_starts_wakes_and_keeps_nothing(house: House, tmp_path: Path) -> None:
    """B17: every GET route, for a sleeping, a dozing and a stopped model: no event reaches the core, no idle clock moves."""
    await house.does("sleeper", Operation.LOAD)
    await house.does("sleeper", Operation.SLEEP)
    await house.does("dozer", Operation.LOAD)
    house.shell.post(InstanceReported(house.shell.clock(), "dozer", 1, State.ASLEEP, level=1))
    entries = house.shell.scheduler._stage.entries

    def facts() -> list[Any]:
        return [
            (one.id, one.state, one.instance.idle_at, one.instance.since, one.starts, one.wakes, len(one.costs.gaps))
            for one in entries.values()
        ]

    before, calls, heard = facts(), list(house.crew.calls), []
    assert [one[1] for one in before[:3]] == [State.ASLEEP, State.ASLEEP, State.STOPPED]
    house.shell.hooks.append(lambda event, actions: heard.append(event))
    app = make_app(house.desk)
    socket = tmp_path / "run" / "control.sock"
    runner = await start_control(app, socket)
    walked = 0
    try:
        async with aiohttp.ClientSession("http://control", connector=aiohttp.UnixConnector(str(socket))) as session:
            for route in app.router.routes():
                template = route.resource.canonical if route.resource is not None else ""
                if route.method != "GET" or template == "/unload" or template.startswith("/ui"):
                    continue
                for model in ("sleeper", "dozer", "org/<b>stopped</b>"):
                    path = template.replace("{id}", quote(model, safe=""))
                    async with session.get(URL(path, encoded=True)) as response:
                        assert response.status == 200, path
                        if response.content_type == "application/json":
                            await response.read()
                    walked += 1
            await asyncio.sleep(0.3)
    finally:
        await runner.cleanup()
    assert walked > 40
    assert (facts(), house.crew.calls, heard) == (before, calls, [])


# ------------------------------------------------------------------------------------------------------------- the queue


async def test_who_waits_is_told_why_with_figures(house: House) -> None:
    """Behind a busy model: the shortage, its victim, what that is owed, and stages whose rest is the time left."""
    await house.does("sleeper", Operation.LOAD)
    busy, _ = house.asks("sleeper")
    visit, waiter = house.asks("big", client="ci", batch=True)

    (one,) = house.desk.queue()
    assert waiter.said == []
    assert (one.model, one.device, one.need_mib, one.held_mib, one.free_mib, one.short_mib) == ("big", "gpu0", 9000, 0, 6000, 3000)
    assert one.victims == ("sleeper",)
    assert "big needs 8.8 GiB on gpu0: 5.9 GiB are free, 2.9 GiB are short. sleeper serves, and is owed" in one.reason
    assert [stage.name for stage in one.stages] == ["gate", "drain", "sleep", "load"]
    assert one.eta_s == pytest.approx(sum(stage.expected_s * (1 - stage.fraction) for stage in one.stages))
    assert [(each.request, each.is_batch) for each in one.waiters] == [(visit.request, True)]
    assert house.desk.client_of(visit.request) == "ci"
    view = {model.id: model for model in house.desk.view().models}
    assert view["sleeper"].owed_s is not None
    text, refs = house.desk.present("big")
    assert (text, tuple(refs)) == (one.reason, ("sleeper",))
    busy.finish(Outcome.OK, 200, 1, 0.1)


async def test_who_is_loaded_is_told_how_far_it_is(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it starts: so far, usually; a full model: its slots."""
    house.crew.gate.clear()
    first, _ = house.asks("big")
    house.asks("big")
    await asyncio.sleep(0.01)
    (one,) = house.desk.queue()
    assert one.reason.startswith("It starts on gpu0: ")
    assert (one.short_mib, one.stages[-1].name) == (0, "load")
    at = house.shell.clock()
    with monkeypatch.context() as still:  # both say how long it has taken so far: at the same moment
        still.setattr(house.shell, "clock", lambda: at)
        assert house.desk.present("big")[0] == house.desk.queue()[0].reason
    house.crew.gate.set()
    await asyncio.sleep(0.05)
    (one,) = house.desk.queue()
    assert (one.reason, one.stages[0].name, first.is_admitted) == ("Its only slot is taken.", "slot", True)


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("sleeper", "Asleep at level 1 for "),
        ("dozer", "Ready, idle for "),
        ("org/<b>stopped</b>", "Stopped; the next request starts it, which takes about 2.0 s."),
    ],
)
async def test_the_present_is_one_sentence(house: House, model: str, part: str) -> None:
    """Whatever its state."""
    await house.does("sleeper", Operation.LOAD)
    await house.does("sleeper", Operation.SLEEP)
    await house.does("dozer", Operation.LOAD)
    assert house.desk.present(model)[0].startswith(part)


async def test_the_story_tells_causes_and_names(house: House) -> None:
    """What kind of thing it was, and which other model was meant; numbers of events go on from where they were to begin."""
    await house.does("sleeper", Operation.LOAD)
    house.asks("big")
    await asyncio.sleep(0.2)
    story = house.desk.story("sleeper")
    assert [one["cause"] for one in story] == ["starting", "ready", "evicted", "asleep"]
    assert story[2]["refs"] == ["big"]
    assert house.feed.recent(100)[0]["id"] == 1001


# ------------------------------------------------------------------------------------------------------------- requests


async def test_open_requests_come_from_memory(house: House) -> None:
    """Waiting and running, with what they wait for; each found by its filters."""
    await house.does("sleeper", Operation.LOAD)
    running, _ = house.asks("sleeper", client="ci")
    waiting, _ = house.asks("big")
    rows = {one["id"]: one for one in await house.rows()}
    assert (rows[running.request]["outcome"], rows[waiting.request]["outcome"]) == ("running", "waiting")
    assert (rows[running.request]["key_name"], rows[running.request]["class"], rows[running.request]["start"]) == (
        "ci",
        "interactive",
        "hot",
    )
    assert set(rows[waiting.request]["wait"]) == {"queue", "gate", "load"}
    for wanted, found in (
        ({"outcome": "open"}, 2),
        ({"outcome": "running"}, 1),
        ({"outcome": "waiting"}, 1),
        ({"outcome": "failed"}, 0),
        ({"model": "big"}, 1),
        ({"since": time.time() + 10}, 0),
        ({"waited_over_s": 5.0}, 0),
        ({"cursor": "1.0~1"}, 0),
    ):
        assert len(await house.rows(**wanted)) == found, wanted


async def test_one_that_waits_is_cancelled_and_told(house: House) -> None:
    """410 with its own code; the core has forgotten it, and a second time there is nothing to cancel."""
    await house.does("sleeper", Operation.LOAD)
    house.asks("sleeper")
    visit, waiter = house.asks("big")
    assert house.desk.cancel(visit.request).status == 200
    assert [(each.status, each.code) for each in waiter.said] == [(410, "cancelled")]
    assert (house.desk.queue(), house.desk.cancel(visit.request).code) == ((), "request_not_found")


async def test_one_that_runs_is_cut_and_told(house: House) -> None:
    """As any cut: its exchange ends it."""
    await house.does("sleeper", Operation.LOAD)
    visit, waiter = house.asks("sleeper")
    assert "the running request" in house.desk.cancel(visit.request).message
    assert waiter.words == ["hot", "cancelled"]


async def test_ended_requests_come_from_the_ledger_and_are_told_once(kept: tuple[House, Ledger]) -> None:
    """From memory until they are written, with the same number; older pages by cursor."""
    house, ledger = kept
    await house.does("sleeper", Operation.LOAD)
    for _ in range(5):
        visit, _ = house.asks("sleeper")
        house.end(visit)
    early = [one["id"] for one in await house.rows()]
    await asyncio.to_thread(ledger.flush)
    rows = await house.rows()
    assert sorted(early) == sorted(one["id"] for one in rows)
    assert len(rows) == 5
    assert {(one["tokens_in"], one["tokens_out"], one["outcome"], one["path"]) for one in rows} == {(5, 20, "ok", "/v1/x")}
    nothing = {"since": None, "model": "sleeper", "outcome": None, "waited_over_s": None}
    first = await house.desk.requests(**nothing, cursor="", limit=2)
    second = await house.desk.requests(**nothing, cursor=first["cursor"], limit=10)
    assert len({one["id"] for one in second["requests"]}) == 3
    assert (second["cursor"], await house.rows(outcome="failed")) == (None, [])
    with pytest.raises(ValueError, match=r".*"):
        await house.rows(cursor="nonsense")


async def test_requests_of_the_run_before_are_never_taken_for_ours(tmp_path: Path) -> None:
    """Asked at once after a restart, when nothing of this run is written yet, and again later: numbers begin anew, rows stay apart."""
    path = tmp_path / "journal.sqlite"
    ids: list[int] = []
    for _ in range(2):
        ledger = Ledger(path, gather_s=600.0)  # written when told to
        house = House(ledger)
        await house.does("sleeper", Operation.LOAD)
        assert ([one["id"] for one in await house.rows()], ledger.run) == (ids, 0)
        visit, _ = house.asks("sleeper")
        house.end(visit)
        assert sorted(one["id"] for one in await house.rows()) == [visit.request, *ids]
        assert await asyncio.to_thread(ledger.flush)
        assert sorted(one["id"] for one in await house.rows()) == [visit.request, *ids]
        ids.append(ledger.run << RUN_SHIFT | visit.request)
        await house.shell.close()
        ledger.close()
    assert [one >> RUN_SHIFT for one in ids] == [1, 2]


async def test_a_server_that_started_over_replays_exactly(kept: tuple[House, Ledger], tmp_path: Path) -> None:
    """Its new book knows nothing of what the old one had started."""
    house, ledger = kept
    house.shell.begin()
    await house.does("sleeper", Operation.LOAD)
    anew = asyncio.Event()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(house.shell.scheduler, "handle", lambda event: 1 / 0)
        house.asks("sleeper")
    house.shell.hooks.append(lambda event, actions: anew.set())
    await anew.wait()
    await house.does("sleeper", Operation.LOAD)
    visit, _ = house.asks("sleeper")
    house.end(visit)
    assert await asyncio.to_thread(ledger.flush)
    same = exactly(Past.at(tmp_path / "journal.sqlite").runs())
    assert (same.difference, same.runs, same.swaps, same.admissions) == (None, 1, 2, 1)


def test_rates_spread_tokens_over_the_time_they_took() -> None:
    """Tokens a second where they are counted, else requests; what is older than the window counts no more."""

    def record(model: str, tokens: int | None, took_s: float) -> Record:
        return Record(model, "", "", "", "", 200, "ok", "hot", 0, 0, 0, None, took_s, None, tokens, 1)

    latest = [(80.0, record("a", 999, 1.0)), (99.0, record("a", 100, 2.0)), (99.0, record("a", 400, 18.0)), (99.5, record("e", None, 0.1))]
    assert rates_of(latest, 100.0) == {"a": {"value": 30.0, "unit": "tok/s"}, "e": {"value": 0.1, "unit": "req/s"}}


# ------------------------------------------------------------------------------------------------------------- the timeline


async def test_the_timeline_has_who_held_what_who_waited_and_who_left(house: House) -> None:
    """A swap is one block after the other, a wait with its gate, and a line; times are in order."""
    await house.does("org/<b>stopped</b>", Operation.LOAD)
    house.asks("big")
    await asyncio.sleep(0.2)
    told = await house.desk.timeline(15)
    states = [(one["model"], one["state"]) for one in told["spans"]]
    assert states[:3] == [("org/<b>stopped</b>", "starting"), ("org/<b>stopped</b>", "ready"), ("org/<b>stopped</b>", "stopping")]
    assert states[-1] == ("big", "ready")
    assert told["spans"][-1]["to"] is None
    assert set(told["spans"][0]) == {"instance", "model", "device", "from", "to", "state", "mib", "offset_mib"}
    (wait,) = told["waits"]
    assert wait["model"] == "big"
    assert wait["from"] <= wait["gate_until"] <= wait["to"] <= told["now"]
    assert [(one["in"], one["out"]) for one in told["swaps"]] == [("big", ["org/<b>stopped</b>"])]
    assert told == {**await house.desk.timeline(15), "now": told["now"], "from": told["from"]}


def test_a_block_keeps_its_place_while_it_fits() -> None:
    """First fit; kept as long as nobody lies there; never above the device where there is another way."""
    assert first_fit([], 40, 100) == 0
    assert first_fit([(0, 40)], 30, 100) == 40
    assert first_fit([(10, 40)], 10, 100) == 0
    assert first_fit([(0, 40)], 30, 100, kept=60) == 60
    assert first_fit([(0, 40), (60, 80)], 30, 100, kept=65) == 80 - 10
    done = placed([Span("a", "d", 1, "ready", 60, 0, 0.0, 10.0), Span("b", "d", 1, "ready", 30, 0, 5.0, 20.0)], {"d": 100})
    assert [one.offset_mib for one in done] == [0, 60]


def test_a_wait_is_split_by_the_turn_it_waited_for() -> None:
    """Queue, gate, load add up to it."""
    turn = Turn(gate_at=10.0, rise_at=12.0, ready_at=15.0)
    assert turn.split(7.0, 15.0) == (3.0, 2.0, 3.0)
    assert turn.split(13.0, 14.0) == (0.0, 0.0, 1.0)
    assert turn.split(20.0, 21.0) == (1.0, 0.0, 0.0)


# ------------------------------------------------------------------------------------------------------------- a model's history


def a_row(at: float, kind: str, took_s: float = 1.0, ok: bool = True) -> TransitionRow:
    return TransitionRow(at, "m", 1, kind, ("gpu0",), took_s, ok, mib={"gpu0": 100})


def test_states_of_the_past_follow_from_transitions() -> None:
    """Between two of them a model rests where the first one left it."""
    rows = [a_row(10, "start"), a_row(20, "sleep"), a_row(30, "wake"), a_row(40, "stop")]
    assert [(one.state, one.begin, one.end) for one in sorted(spans_of(rows, 100.0), key=lambda one: one.begin)] == [
        ("starting", 10, 11),
        ("ready", 11, 20),
        ("going_to_sleep", 20, 21),
        ("asleep", 21, 30),
        ("waking", 30, 31),
        ("ready", 31, 40),
        ("stopping", 40, 41),
    ]
    day = day_of(rows[1:3], 0.0, 50.0, State.READY, 0.0)
    assert [(one["state"], one["from"], one["to"]) for one in day] == [
        ("ready", 0.0, 20),
        ("going_to_sleep", 20, 21),
        ("asleep", 21, 30),
        ("waking", 30, 31),
        ("ready", 31, None),
    ]
    assert day_of([], 0.0, 50.0, State.STOPPED, 0.0) == []


def test_phases_are_lengths() -> None:
    """The ledger keeps when each ended; a wake has only its end."""
    assert phases_of({"spawn": 0.1, "weights": 2.1, "ready": 2.6}, 2.6) == {"spawn": 0.1, "weights": 2.0, "first_answer": 0.5}
    assert phases_of({}, 0.8) == {"first_answer": 0.8}


async def test_a_model_tells_its_starts_its_sizes_and_its_day(kept: tuple[House, Ledger]) -> None:
    """starts newest first, footprint with what is used, day up to now."""
    house, ledger = kept
    await house.does("sleeper", Operation.LOAD)
    await house.does("sleeper", Operation.SLEEP)
    await house.does("sleeper", Operation.WAKE)
    await asyncio.to_thread(ledger.flush)
    told = await house.desk.history("sleeper")
    assert [one["kind"] for one in told["starts"]] == ["wake", "cold"]
    assert set(told["footprint"]) == {"declared", "estimated", "measured", "learned", "used", "n"}
    assert told["footprint"]["declared"] == 4000
    assert (told["day"][-1]["state"], told["day"][-1]["to"]) == ("ready", None)
    assert (await house.desk.history("big"))["day"] == []


async def test_advice_is_never_waited_for(house: House) -> None:
    """Without a ledger there is none; the shape is there all the same."""
    told = house.desk.advice()
    assert {key: told[key] for key in ("headline", "thrash", "ttl", "outgrown", "is_computing")} == {
        "headline": None,
        "thrash": [],
        "ttl": [],
        "outgrown": None,
        "is_computing": False,
    }


def test_keys_in_changed_lines_are_masked() -> None:
    """Command lines stand in them."""
    assert cleaned("- cmd: engine --api-key s3cret --port 1", []) == "- cmd: engine --api-key *** --port 1"
    assert cleaned("+ cmd: engine --hf-token=abc", []) == "+ cmd: engine --hf-token=***"
    assert cleaned("+ cmd: env KEY=client-key engine -c 8192", ["client-key"]) == "+ cmd: env KEY=*** engine -c 8192"
    assert cleaned("+ cmd: engine 1 --port 8081 -x 81", ["1", "81", ""]) == "+ cmd: engine *** --port 8081 -x ***"


# ------------------------------------------------------------------------------------------------------------- speed


async def test_a_hundred_waiting_models_are_explained_fast() -> None:
    """Status and reasons of 200 models, half of them waiting: far below 50 ms."""
    models = tuple(Model(f"m{n}", ("gpu0",), 900) for n in range(200))
    crew: Any = Crew()
    crew.gate.clear()
    configs = tuple(ModelConfig(model.id, ("engine",), memory_mib=900) for model in models)
    plan = make_plan(Config("greenroom.yaml", configs), (), Footprints(None))
    plan = replace(plan, setup=replace(plan.setup, devices=(Device("gpu0", "declared", 10_000, measured=False),), models=models))
    shell = Shell(plan.setup, crew)
    desk = Desk(shell, crew, plan, EventFeed(shell.clock), LogRing("greenroom"))
    door = Door(shell, crew)
    for model in models[:100]:
        door.ask(Wish(model.id, model.id, "/v1/x"), FakeWaiter())
    await asyncio.sleep(0.01)
    took = []
    for _ in range(3):
        began = time.perf_counter()
        queue = desk.queue()
        desk.view()
        took.append(time.perf_counter() - began)
    await shell.close()
    assert len(queue) == 100
    assert all(one.reason.endswith(".") for one in queue)
    assert min(took) < 0.1, took


def test_rows_are_what_the_ledger_says() -> None:
    """A row of an earlier run keeps its whole id, one of this run its number."""
    from greenroom.serve.lookout import ended_row

    row = RequestRow(
        7, 1.0, "m", 1, "ci", "batch", "/v1", queue_s=1.0, gate_s=2.0, load_s=3.0, wake_s=0.5, first_byte_s=0.5, duration_s=8.0
    )
    told = ended_row(row, (3 << 32) | 7, 3)
    assert (told["id"], told["wait"], told["generation_s"], told["class"]) == (7, {"queue": 1.0, "gate": 2.0, "load": 3.5}, 1.0, "batch")
    assert ended_row(row, (2 << 32) | 7, 3)["id"] == (2 << 32) | 7
