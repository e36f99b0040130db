"""Rows from events and actions: of whole worlds of faults, and of single stories whose waits are known."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from greenroom.core.facts import (
    Admit,
    Cause,
    Cut,
    Device,
    InstanceReported,
    MemoryMeasured,
    Model,
    Outcome,
    Priority,
    Refuse,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestLost,
    Setup,
    Sleep,
    Start,
    State,
    Stop,
    Tell,
    Wake,
)
from greenroom.ledger import codec
from greenroom.ledger.chronicle import Chronicle, Row, reason_in
from greenroom.ledger.rows import EventRow, RequestRow, SampleRow, TellRow, TransitionRow
from tests.ledger.runs import Run, run

SEEDS = range(12)
OFFSET_S = 1_700_000_000.0
BY_ITSELF = ("it ended by itself", "it does not end", "it fell asleep by itself")


def rows_of(told: Run, offset_s: float = 0.0) -> list[Row]:
    chronicle = Chronicle(told.setup, offset_s)
    rows = [row for event, actions in told.steps for row in chronicle.feed(event, actions)]
    assert chronicle.open_requests == 0
    return rows


# ------------------------------------------------------------------ worlds


@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_that_arrived_ends_as_exactly_one_row(seed: int) -> None:
    told = run(seed)
    found = [row.request for row in rows_of(told) if isinstance(row, RequestRow)]
    assert sorted(found) == sorted(told.arrivals)


@pytest.mark.parametrize("seed", SEEDS)
def test_waits_add_up_to_the_time_before_the_admission(seed: int) -> None:
    """Or before the end, of those that were never admitted; no part is negative."""
    told = run(seed)
    admitted = {action.request: event.at for event, actions in told.steps for action in actions if isinstance(action, Admit)}
    for row in rows_of(told):
        if isinstance(row, RequestRow):
            parts = (row.queue_s, row.gate_s, row.load_s, row.wake_s)
            until = admitted[row.request] if row.generation else row.at + row.duration_s
            assert sum(parts) == pytest.approx(until - row.at, abs=1e-3)
            assert min(parts) >= -1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_outcomes_are_what_was_said_and_told(seed: int) -> None:
    told = run(seed)
    refused = {action.request: action for action in told.said(Refuse)}
    ended = {event.request: event.outcome for event, _ in told.steps if isinstance(event, RequestFinished)}
    admits: dict[int, Admit] = {action.request: action for action in told.said(Admit)}
    for row in rows_of(told):
        if not isinstance(row, RequestRow):
            continue
        if row.outcome == "refused":
            assert (row.status, row.code) == (refused[row.request].status, refused[row.request].code)
        elif row.generation:
            assert row.outcome == ended[row.request]
            assert (row.generation, row.start) == (admits[row.request].generation, admits[row.request].start)
            assert row.start == "hot" or row.waited_s > 0
        else:
            assert row.outcome == "client_gone"
        assert row.before != row.model


@pytest.mark.parametrize("seed", SEEDS)
def test_transitions_match_the_actions(seed: int) -> None:
    """Each start, sleep, wake and stop becomes one row, in its order, with a reason; what nobody asked for says so."""
    told = run(seed)
    rows = [row for row in rows_of(told) if isinstance(row, TransitionRow)]
    said = Counter((type(one).__name__.lower(), one.model, one.generation) for one in told.said(Start, Sleep, Wake, Stop))
    assert Counter((row.kind, row.model, row.generation) for row in rows if row.reason not in BY_ITSELF) == said
    assert all(row.reason for row in rows)
    for name in {row.model for row in rows}:
        for one, other in pairwise(row for row in rows if row.model == name):
            assert other.at >= one.at + one.took_s - 1e-6  # one after the other


@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_was_evicted_was_so_for_somebody_or_for_a_full_device(seed: int) -> None:
    """The words of the core that this is read from are still its words."""
    told = run(seed)
    rows = [row for row in rows_of(told) if isinstance(row, TransitionRow)]
    evicted = sum(tell.kind == "evicted" for tell in told.said(Tell))
    assert sum(bool(row.evicted_for) or "over its budget" in row.reason for row in rows) == evicted


@pytest.mark.parametrize("seed", SEEDS)
def test_samples_are_thinned_and_every_sentence_is_kept(seed: int) -> None:
    told = run(seed)
    rows = rows_of(told)
    assert len([row for row in rows if isinstance(row, TellRow)]) == len(told.said(Tell))
    for device in {event.device for event, _ in told.steps if isinstance(event, MemoryMeasured)}:
        times = [row.at for row in rows if isinstance(row, SampleRow) and row.device == device]
        assert times
        assert all(b - a >= 5.0 for a, b in pairwise(times))


def test_the_same_run_at_another_time_gives_the_same_rows() -> None:
    early, late = rows_of(run(3)), rows_of(run(3), 4096.0)
    assert [type(row) for row in early] == [type(row) for row in late]
    assert all(b.at == pytest.approx(a.at + 4096.0, abs=1e-6) for a, b in zip(early, late, strict=True))


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_the_short_way_of_hot_requests_gives_the_same_rows(first: int) -> None:
    """To the last bit, whatever becomes of a request that began hot."""
    hot = 0
    for seed in range(first, first + 10):
        told = run(seed)
        long, short = Chronicle(told.setup, OFFSET_S), Chronicle(told.setup, OFFSET_S)
        for event, actions in told.steps:
            if isinstance(event, RequestArrived) and len(actions) == 1 and isinstance(actions[0], Admit) and actions[0].start == "hot":
                hot += 1
                priority = event.priority.value if event.priority is not None else None
                short.hot_arrival(event.at, event.request, event.model, event.client, priority, actions[0].generation)
                found: list[Row] = []
            elif isinstance(event, RequestFinished) and not actions and (one := short.hot.pop(event.request, None)) is not None:
                found = [short.hot_row(event.request, one, event.at, event.outcome.value)]
            else:
                found = short.feed(event, actions)
            assert found == long.feed(event, actions)
            assert short.open_requests == long.open_requests
    assert hot


def test_events_are_journalled_where_asked_for() -> None:
    told = run(3)
    chronicle = Chronicle(told.setup, OFFSET_S, journal=True)
    found = [row for event, actions in told.steps for row in chronicle.feed(event, actions) if isinstance(row, EventRow)]
    assert [codec.event_from(row.event) for row in found] == [event for event, _ in told.steps]
    assert [codec.actions_from(row.actions) for row in found] == [actions for _, actions in told.steps]
    assert all(row.at == row.clock + OFFSET_S for row in found)


# ------------------------------------------------------------------ single stories


SETUP = Setup((Device("gpu0", "gpu", 10_000),), (Model("a", ("gpu0",), 6000), Model("b", ("gpu0",), 6000, priority=Priority.BATCH)))


class Teller:
    """Feeds a chronicle by hand."""

    def __init__(self, setup: Setup = SETUP) -> None:
        self.chronicle = Chronicle(setup)
        self.rows: list[Row] = []

    def tell(self, event: object, *actions: object) -> None:
        self.rows += self.chronicle.feed(event, actions)  # type: ignore[arg-type]

    @property
    def requests(self) -> list[RequestRow]:
        return [row for row in self.rows if isinstance(row, RequestRow)]

    @property
    def transitions(self) -> list[TransitionRow]:
        return [row for row in self.rows if isinstance(row, TransitionRow)]


def served(teller: Teller, at: float, request: int, name: str) -> None:
    teller.tell(RequestArrived(at, request, name), Admit(request, name, 1, "hot"))
    teller.tell(RequestFinished(at, request))


@pytest.mark.parametrize("why", ["b needed 5.9 GiB", "b was asked for, and group g holds one model at a time"])
def test_a_swap_splits_the_wait(why: str) -> None:
    """One second queued, two while the victim drains, half while it leaves, four to load; for want of room or by a group's rule."""
    teller = Teller()
    teller.tell(RequestArrived(0.0, 1, "a"), Start("a", 1, ("gpu0",), {"gpu0": 6000}))
    teller.tell(InstanceReported(4.0, "a", 1, State.READY), Admit(1, "a", 1, "cold"))
    teller.tell(RequestArrived(10.0, 2, "b", client="key-1"))
    teller.tell(RequestArrived(11.0, 3, "a"), Tell(11.0, "a", "gated", "b is owed its room: new requests wait, 1 in flight finish first"))
    teller.tell(
        RequestFinished(13.0, 1),
        Tell(13.0, "a", "evicted", f"unloaded: {why}; idle 0 ms, frees 5.9 GiB, back in about 4 s"),
        Stop("a", 1, why, {"gpu0": 6000}),
    )
    teller.tell(
        InstanceReported(13.5, "a", 1, State.STOPPED),
        Tell(13.5, "b", "starting", "starting for a request on gpu0 with 5.9 GiB, about 2 s"),
        Start("b", 1, ("gpu0",), {"gpu0": 6000}),
    )
    teller.tell(InstanceReported(17.5, "b", 1, State.READY), Admit(2, "b", 1, "cold"))
    teller.tell(RequestFinished(18.5, 2, Outcome.ENGINE_BROKE))

    row = teller.requests[-1]
    assert (row.queue_s, row.gate_s, row.load_s, row.wake_s) == (1.0, 2.5, 4.0, 0.0)
    assert (row.start, row.outcome, row.duration_s, row.before, row.priority, row.client) == (
        "cold",
        "engine_broke",
        8.5,
        "a",
        "batch",
        "key-1",
    )
    stop, start = teller.transitions[1:]
    assert (stop.kind, stop.ok, stop.evicted_for, stop.waiters, stop.reason, stop.took_s, stop.mib) == ("stop", True, "b", 1, why, 0.5, {})
    assert (start.kind, start.ok, start.waiters, start.took_s, start.mib) == ("start", True, 1, 4.0, {"gpu0": 6000})
    assert start.reason == "starting for a request on gpu0 with 5.9 GiB, about 2 s"


def test_a_request_that_lost_its_engine_keeps_its_first_arrival() -> None:
    teller = Teller()
    teller.tell(RequestArrived(0.0, 1, "a"), Start("a", 1, ("gpu0",), {"gpu0": 6000}))
    teller.tell(InstanceReported(4.0, "a", 1, State.READY), Admit(1, "a", 1, "cold"))
    teller.tell(RequestLost(5.0, 1, "reset"))
    teller.tell(InstanceReported(5.0, "a", 1, State.STOPPED, cause=Cause.EXITED, why="exit 1"), Start("a", 2, ("gpu0",), {"gpu0": 6000}))
    teller.tell(InstanceReported(8.0, "a", 2, State.READY), Admit(1, "a", 2, "cold"))
    teller.tell(RequestFinished(9.0, 1))
    (row,) = teller.requests
    assert (row.at, row.generation, row.waited_s, row.load_s, row.duration_s) == (0.0, 2, 8.0, 7.0, 9.0)
    crash = teller.transitions[1]
    assert (crash.kind, crash.ok, crash.cause, crash.why, crash.reason) == ("stop", False, "exited", "exit 1", "it ended by itself")


def test_one_that_lost_it_twice_was_served_by_none() -> None:
    teller = Teller()
    served(teller, 0.0, 1, "a")
    teller.tell(RequestArrived(1.0, 2, "a"), Admit(2, "a", 1, "hot"))
    teller.tell(RequestLost(2.0, 2), Refuse(2, 502, "engine_died", "twice"))
    row = teller.requests[-1]
    assert (row.outcome, row.status, row.code, row.generation, row.start) == ("refused", 502, "engine_died", 0, "hot")


def test_a_client_that_left_while_it_waited() -> None:
    teller = Teller()
    teller.tell(RequestArrived(0.0, 1, "a"))
    teller.tell(RequestCancelled(3.0, 1))
    teller.tell(RequestCancelled(3.0, 1))
    teller.tell(RequestCancelled(3.0, 77))
    (row,) = teller.requests
    assert (row.outcome, row.start, row.queue_s, row.duration_s) == ("client_gone", "", 3.0, 3.0)


def test_a_cut_tells_its_code() -> None:
    teller = Teller()
    teller.tell(RequestArrived(0.0, 1, "a"), Admit(1, "a", 1, "hot"))
    teller.tell(RequestArrived(0.5, 9, "a"), Cut(1, "evicted", "b needs it"))
    teller.tell(RequestFinished(1.0, 1, Outcome.CUT))
    assert (teller.requests[0].outcome, teller.requests[0].code) == ("cut", "evicted")


def test_before_is_who_was_served_last_on_the_same_device() -> None:
    setup = Setup(
        (Device("gpu0", "gpu", 9), Device("gpu1", "gpu", 9)),
        (Model("a", ("gpu0",)), Model("b", ("gpu1",)), Model("both", ("gpu0", "gpu1"), devices_count=2)),
    )
    teller = Teller(setup)
    for number, (name, devices) in enumerate({"a": ("gpu0",), "b": ("gpu1",), "both": ("gpu0", "gpu1")}.items()):
        teller.tell(RequestArrived(float(number), 100 + number, "x"), Start(name, 1, devices, dict.fromkeys(devices, 1)))
    for number, name in enumerate(("a", "b", "both", "both", "a", "b")):
        served(teller, 10.0 + number, number, name)
    assert [row.before for row in teller.requests] == ["", "", "b", "", "both", "both"]


def test_a_start_that_is_stopped_before_its_end() -> None:
    teller = Teller()
    teller.tell(RequestArrived(0.0, 1, "a"), Start("a", 1, ("gpu0",), {"gpu0": 6000}))
    teller.tell(RequestCancelled(1.0, 1), Stop("a", 1, "everybody who waited for it has gone, and others wait", {}))
    teller.tell(InstanceReported(1.1, "a", 1, State.READY))  # it crossed the order
    teller.tell(InstanceReported(2.0, "a", 1, State.STOPPED))
    start, stop = teller.transitions
    assert (start.kind, start.ok, start.took_s, start.why) == ("start", False, 1.0, "everybody who waited for it has gone, and others wait")
    assert (stop.kind, stop.ok, stop.took_s) == ("stop", True, 1.0)


def test_a_sleep_and_a_wake_in_vain() -> None:
    teller = Teller()
    teller.tell(RequestArrived(0.0, 1, "a"), Start("a", 1, ("gpu0",), {"gpu0": 6000}))
    teller.tell(InstanceReported(4.0, "a", 1, State.READY), Admit(1, "a", 1, "cold"))
    teller.tell(
        RequestFinished(5.0, 1),
        Tell(5.0, "a", "sleeping", "put to sleep (level 1): idle for 20 s; idle 20 s, back in about 300 ms"),
        Sleep("a", 1, 1),
    )
    teller.tell(InstanceReported(6.0, "a", 1, State.ASLEEP, measured_mib={"gpu0": 200}, host_mib=3000, level=1))
    teller.tell(RequestArrived(7.0, 2, "a"), Wake("a", 1, 1))
    teller.tell(InstanceReported(8.0, "a", 1, State.ASLEEP, cause=Cause.OOM, why="no room", level=1), Wake("a", 1, 1))
    teller.tell(InstanceReported(9.5, "a", 1, State.READY), Admit(2, "a", 1, "wake"))
    teller.tell(RequestFinished(9.5, 2))
    sleep, vain, wake = teller.transitions[1:]
    assert (sleep.kind, sleep.level, sleep.reason, sleep.evicted_for, sleep.mib) == (
        "sleep",
        1,
        "idle for 20 s",
        "",
        {"gpu0": 200, "ram": 3000},
    )
    assert (vain.ok, vain.cause, vain.why) == (False, "out-of-memory", "no room")
    assert (wake.ok, wake.took_s, wake.waiters) == (True, 1.5, 1)
    assert (teller.requests[-1].wake_s, teller.requests[-1].start) == (2.5, "wake")


def test_what_is_booked_is_taken_from_who_knows_it() -> None:
    chronicle = Chronicle(SETUP)
    chronicle.feed(RequestArrived(0.0, 1, "a"), [Start("a", 1, ("gpu0",), {"gpu0": 6000})])
    rows = chronicle.feed(MemoryMeasured(1.0, "gpu0", 5500, {"a": 5000}), [], {"a": {"gpu0": 5100}})
    assert rows == [SampleRow(1.0, "gpu0", 5100, 5500, 500, {"a": 5000})]


def test_a_book_that_is_built_anew_ends_what_was_under_way() -> None:
    teller = Teller()
    teller.tell(RequestArrived(0.0, 1, "a"), Start("a", 1, ("gpu0",), {"gpu0": 6000}))
    (row,) = teller.chronicle.restart(2.0, "started over")
    assert isinstance(row, TransitionRow)
    assert (row.kind, row.ok, row.why, row.took_s) == ("start", False, "started over", 2.0)
    ended = teller.chronicle.abandon(1, 2.5, "refused")
    assert ended is not None
    assert (ended.outcome, ended.load_s, ended.queue_s) == ("refused", 2.0, 0.5)
    assert teller.chronicle.abandon(1, 2.5, "refused") is None


def test_a_name_that_nobody_configured_is_not_remembered() -> None:
    teller = Teller()
    for number in range(50):
        teller.tell(RequestArrived(0.0, number, f"x{number}"), Refuse(number, 404, "unknown_model", "no"))
    assert len(teller.requests) == 50
    assert not teller.chronicle._tracks


def test_the_reason_is_read_out_of_a_sentence_of_the_core() -> None:
    why = "a needed 4.0 GiB (host RAM has no room for the 2.0 GiB it would hold at level 1)"
    assert reason_in(f"unloaded: {why}; idle 3 s, frees 2 GiB, back in about 2 s") == why
    assert reason_in(f"put to sleep (level 2): {why}; idle 3 s, back in about 2 s") == why
