"""Engines that end: the memory ladder, back-off, quarantine, what is told to those who wait."""

from __future__ import annotations

import pytest

from greenroom.core.facts import Admit, Cause, Operation, Refuse, Start, State, Stop, Verify

from .rig import GPU, LEVEL_1, Rig, gpu, model, names, only


def refusals(actions: list[object]) -> list[tuple[int, str]]:
    return [(each.status, each.code) for each in only(actions, Refuse)]


def booked_by(actions: list[object], device: str = GPU) -> list[int]:
    return [each.reserved_mib[device] for each in only(actions, Start)]


# --------------------------------------------------------------------------------------------------- (a) (b) at start


def test_a_start_out_of_memory_is_tried_once_more_with_a_tenth_more() -> None:
    """(a) 1.1 times the need and a MiB, at once, for the same request."""
    rig = Rig(model("a", 5000))
    assert booked_by(rig.asks("a")) == [5000]

    assert booked_by(rig.fails("a", Cause.OOM)) == [5501]


def test_the_engines_own_word_of_what_it_wanted_is_booked() -> None:
    """Where that is more than a tenth more."""
    rig = Rig(model("a", 5000))
    rig.asks("a")

    assert booked_by(rig.fails("a", Cause.OOM, wanted_mib=7000)) == [7000]


def test_the_second_try_evicts_more() -> None:
    """(a) What the larger booking needs, leaves."""
    rig = Rig(model("other", 4600), model("a", 5000))
    rig.warms("other")
    rig.waits(60)
    assert names(rig.asks("a")) == ["a"]
    assert names(rig.fails("a", Cause.OOM), Stop) == ["other"]

    assert booked_by(rig.is_stopped("other")) == [5501]


def test_a_second_failure_is_refused_with_the_numbers_and_backed_off() -> None:
    """(b) 503 with what was booked; the next request hears how long the back-off is."""
    rig = Rig(model("a", 5000))
    rig.asks("a")
    rig.fails("a", Cause.OOM)
    orders = rig.fails("a", Cause.OOM, why="CUDA out of memory")

    assert refusals(orders) == [(503, "out_of_memory")]
    message = only(orders, Refuse)[0].message
    assert "CUDA out of memory (tried with 5.4 GiB booked)" in message
    assert (rig.state("a"), refusals(rig.asks("a"))) == (State.FAILED, [(503, "backing_off")])


def test_everybody_evicted_for_a_start_that_failed_comes_back() -> None:
    """(b) Those who left for the first try and those who left for the second."""
    rig = Rig(model("x", 4600), model("y", 5400), model("a", 5000))
    for name in "xy":
        rig.warms(name)
    rig.waits(60)
    evicted = names(rig.asks("a"), Stop)
    orders = rig.is_stopped(evicted[0])
    orders = rig.fails("a", Cause.OOM)
    evicted += names(orders, Stop)
    for name in evicted[1:]:
        rig.is_stopped(name)
    assert {"x", "y"} == set(evicted)
    started = names(rig.fails("a", Cause.OOM))
    while (rising := [name for name in "xy" if rig.state(name) is State.STARTING]) and len(started) < 2:
        started += names(rig.is_ready(rising[0]))

    assert {"x", "y"} == set(started)


def test_a_restored_model_evicts_nobody() -> None:
    """Its room went to somebody else meanwhile: it stays away, and is forgotten after five minutes."""
    rig = Rig(model("x", 6000), model("a", 5000), model("b", 9000))
    rig.warms("x")
    rig.waits(60)
    rig.asks("a")
    rig.is_stopped("x")
    rig.asks("b")
    rig.fails("a", Cause.EXITED)
    rig.waits(0.5)
    rig.is_ready("b") if rig.state("b") is State.STARTING else rig.is_ready("x")
    rig.waits(400)

    assert not rig.entry("x").queue


def test_an_engine_that_refused_itself_is_not_started_again_in_vain() -> None:
    """STARTUP_MEMORY with nobody else on the device: the same start would fail the same way."""
    rig = Rig(model("a", 5000))
    rig.asks("a")

    assert refusals(rig.fails("a", Cause.STARTUP_MEMORY, wanted_mib=6000)) == [(503, "out_of_memory")]
    assert State.FAILED is rig.state("a")


def test_an_engine_that_refused_itself_is_started_again_when_somebody_can_make_room() -> None:
    """STARTUP_MEMORY beside others: with what it wanted."""
    rig = Rig(model("other", 4000), model("a", 5000))
    rig.warms("other")
    rig.asks("a")

    assert booked_by(rig.fails("a", Cause.STARTUP_MEMORY, wanted_mib=6000)) == [6000]


def test_nobody_waits_nobody_is_tried_again() -> None:
    """A load that its client has left is not repeated."""
    rig = Rig(model("a", 5000))
    rig.asks("a")
    rig.cancels(rig.last)

    assert rig.fails("a", Cause.OOM) == []


def test_a_model_of_unknown_size_stays_of_unknown_size() -> None:
    """There is nothing larger to book than the whole device, and a failure does not make it known."""
    rig = Rig(model("a", None))
    assert booked_by(rig.asks("a")) == [10_000]
    assert booked_by(rig.fails("a", Cause.OOM)) == [10_000]
    rig.fails("a", Cause.OOM)

    assert (rig.entry("a").need_mib, rig.entry("a").need_source) == (None, "unknown")


def test_the_booking_never_grows_beyond_what_the_device_can_give() -> None:
    """Or the model could never be started again."""
    rig = Rig(model("a", 9800))
    rig.asks("a")

    assert booked_by(rig.fails("a", Cause.OOM)) == [10_000]


# ------------------------------------------------------------------------------------------------- (c) (d) serving


def test_out_of_memory_while_serving_raises_the_footprint_and_starts_once_more() -> None:
    """(c) The next request finds a fresh engine with a larger booking."""
    rig = Rig(model("a", 5000))
    rig.warms("a")
    rig.fails("a", Cause.OOM)

    assert booked_by(rig.asks("a")) == [5501]


def test_serving_out_of_memory_for_ever_never_books_more_than_there_is() -> None:
    """Twenty times over the weeks: the model can still be started."""
    rig = Rig(model("a", 5000))
    for _ in range(20):
        rig.warms("a")
        rig.waits(1000)
        rig.fails("a", Cause.OOM)

    assert booked_by(rig.asks("a")) == [10_000]


def test_three_times_in_ten_minutes_is_quarantine() -> None:
    """(d) Refused from then on; an operator's load lifts it and starts to count anew."""
    rig = Rig(model("a", 5000))
    for _ in range(3):
        rig.warms("a")
        rig.waits(70)
        rig.fails("a", Cause.OOM)
    assert refusals(rig.asks("a")) == [(503, "quarantined")]
    assert names(rig.wishes("a", Operation.LOAD)) == ["a"]
    rig.is_ready("a")
    rig.waits(70)
    rig.fails("a", Cause.OOM)

    assert not rig.entry("a").quarantined


def test_those_who_wait_when_quarantine_begins_are_told() -> None:
    """Nobody waits for a model that nobody will start."""
    rig = Rig(model("a", 5000, parallel=1))
    for _ in range(2):
        rig.warms("a")
        rig.waits(70)
        rig.fails("a", Cause.OOM)
    rig.holds("a")
    rig.waits(70)
    rig.asks("a")

    assert refusals(rig.fails("a", Cause.OOM)) == [(503, "quarantined")]


def test_three_times_in_an_hour_is_not_quarantine() -> None:
    """Only those within the window count."""
    rig = Rig(model("a", 5000))
    for _ in range(3):
        rig.warms("a")
        rig.waits(1200)
        rig.fails("a", Cause.OOM)

    assert not rig.entry("a").quarantined


def test_a_new_definition_lifts_quarantine() -> None:
    """A changed digest is another engine."""
    rig = Rig(model("a", 5000, digest="1"))
    for _ in range(3):
        rig.warms("a")
        rig.waits(70)
        rig.fails("a", Cause.OOM)
    rig.reloads(model("a", 4000, digest="2"))

    assert booked_by(rig.asks("a")) == [4000]


# ----------------------------------------------------------------------------------------------------------- back-off


def test_failed_starts_back_off_one_two_four_up_to_a_minute() -> None:
    """Each refusal says how long; a start before that is not tried."""
    rig = Rig(model("a"))
    delays = []
    for _ in range(8):
        assert names(rig.asks("a")) == ["a"]
        rig.fails("a")
        delays.append(rig.entry("a").backoff_until - rig.now)
        rig.waits(delays[-1])

    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_misconfigured_engine_is_looked_at_again_after_a_second() -> None:
    """What it lacks may be there in a moment, and looking starts nothing."""
    rig = Rig(model("a"))
    rig.asks("a")
    orders = rig.fails("a", Cause.MISCONFIGURED, why="there is no file /x.gguf")

    assert [(each.code, each.retry_after_s) for each in only(orders, Refuse)] == [("start_failed", 1.0)]


def failing(rig: Rig) -> tuple[bool, int, str]:
    (view,) = rig.scheduler.view(rig.now).models
    return view.failing, view.failures, view.last_error


def test_a_model_that_never_comes_up_is_told_as_failing_when_its_back_off_is_over() -> None:
    """Until it is ready again: then what went wrong before is over."""
    rig = Rig(model("a"))
    for _ in range(3):
        rig.asks("a")
        rig.fails("a", why="exit code 1: no such flag.")
        rig.waits(60)
    assert rig.state("a") is State.STOPPED
    assert failing(rig) == (True, 3, "exit code 1: no such flag.")
    said = "Stopped; it failed 3 times in a row, last: exit code 1: no such flag; the next request tries again."
    assert rig.scheduler.present("a", rig.now) == (said, ())

    rig.warms("a")
    assert not failing(rig)[0]
    rig.wishes("a", Operation.UNLOAD)
    rig.is_stopped("a")

    assert rig.scheduler.present("a", rig.now)[0] == "Stopped; the next request starts it, which takes about 2.0 s."


def test_a_crash_is_told_until_it_is_ready_again() -> None:
    """Although the next request starts it at once."""
    rig = Rig(model("a"))
    rig.warms("a")
    rig.fails("a", why="exit code 139")

    assert failing(rig) == (True, 1, "exit code 139")
    assert rig.scheduler.present("a", rig.now)[0] == "Stopped; it failed once, last: exit code 139; the next request tries again."


# ---------------------------------------------------------------------------------------------- what lacks something

LACKS = "the program '/opt/x' is not an executable file"


def test_a_model_that_lacks_something_is_told_as_blocked_and_refused() -> None:
    """Its name once; to operators as well."""
    rig = Rig(model("a", misconfigured=LACKS))
    (refused,) = rig.asks("a")
    (denied,) = rig.wishes("a", Operation.LOAD)

    assert isinstance(refused, Refuse)
    assert isinstance(denied, Refuse)
    assert (refused.status, refused.code, refused.message) == (503, "misconfigured", f"a is misconfigured: {LACKS}")
    assert (denied.status, denied.code, denied.message) == (503, "misconfigured", f"a is misconfigured: {LACKS}")
    assert rig.scheduler.view(rig.now).models[0].blocked == LACKS
    assert rig.scheduler.present("a", rig.now)[0] == f"Stopped, and cannot be started: {LACKS}."


def test_what_a_model_lacks_to_start_says_nothing_of_its_engine() -> None:
    """Its program was removed while it serves: it goes on, and when it has stopped it is refused."""
    rig = Rig(model("a", parallel=1))
    first = rig.holds("a")
    rig.reloads(model("a", parallel=1, misconfigured=LACKS))
    assert rig.asks("a") == []
    second = rig.last
    assert rig.scheduler.view(rig.now).models[0].blocked == ""
    assert [each.request for each in only(rig.ends(first), Admit)] == [second]
    rig.ends(second)
    rig.wishes("a", Operation.UNLOAD)
    assert rig.asks("a") == []

    assert refusals(rig.is_stopped("a")) == [(503, "misconfigured")]
    assert rig.scheduler.view(rig.now).models[0].blocked == LACKS


def test_a_move_for_a_model_that_lacks_something_meanwhile_is_given_up() -> None:
    """Its victim keeps its room, and who waited is refused."""
    rig = Rig(model("a", 6000), model("b", 6000))
    rig.holds("a")
    rig.asks("b")
    rig.waits(30)
    assert rig.state("a") is State.DRAINING

    orders = rig.reloads(model("a", 6000), model("b", 6000, misconfigured=LACKS))

    assert refusals(orders) == [(503, "misconfigured")]
    assert rig.state("a") is State.READY


@pytest.mark.parametrize(("more", "starts"), [({}, []), ({"pinned": True}, ["a"]), ({"preload": True}, ["a"])])
def test_what_was_lacking_and_is_there_brings_in_who_is_wanted_anyway(more: dict[str, bool], starts: list[str]) -> None:
    """Tries without it count no more; nobody starts it while it lacks something."""
    rig = Rig(model("a", misconfigured=LACKS, **more))
    assert rig.begins() == rig.waits(600) == []

    assert names(rig.reloads(model("a", **more))) == starts
    assert rig.scheduler.view(rig.now).models[0].blocked == ""


def test_a_failed_start_that_found_something_lacking_is_forgotten_once_it_is_there() -> None:
    """Found by the start itself: the setup follows, and then the world."""
    rig = Rig(model("a"))
    rig.asks("a")
    rig.reloads(model("a", misconfigured=LACKS))
    rig.fails("a", Cause.MISCONFIGURED, why=LACKS)
    rig.waits(600)
    assert failing(rig)[:2] == (True, 1)
    rig.reloads(model("a"))

    assert failing(rig)[:2] == (False, 0)


def test_a_start_that_took_too_long_is_a_504() -> None:
    """With the words of the engine."""
    rig = Rig(model("a"))
    rig.asks("a")

    assert refusals(rig.fails("a", Cause.TIMEOUT)) == [(504, "start_timeout")]


def test_a_long_good_life_forgives_earlier_failures() -> None:
    """Evicted after an hour of service: the next failed start is the first one again."""
    rig = Rig(model("a", 6000), model("b", 6000))
    for _ in range(3):
        rig.asks("a")
        rig.fails("a")
        rig.waits(30)
    rig.warms("a")
    rig.waits(3600)
    rig.asks("b")
    rig.is_stopped("a")

    assert rig.entry("a").failures == 0


# ------------------------------------------------------------------------------------------------------------ crashes


def test_a_first_crash_costs_nobody_who_waits_anything() -> None:
    """A fresh engine at once; the lost request is served by it."""
    rig = Rig(model("a"))
    request = rig.holds("a")
    assert names(rig.loses(request), Verify) == ["a"]
    assert names(rig.fails("a"), Start) == ["a"]

    assert [(request, "cold")] == [(each.request, each.start) for each in only(rig.is_ready("a"), Admit)]


def test_a_request_lost_twice_is_a_502() -> None:
    """One retry, not two."""
    rig = Rig(model("a"))
    request = rig.holds("a")
    for _ in range(2):
        orders = rig.loses(request)
        rig.fails("a")
        rig.waits(2)
        rig.is_ready("a") if rig.state("a") is State.STARTING else None

    assert refusals(orders) == [(502, "engine_died")]


def test_a_second_crash_in_a_row_backs_off() -> None:
    """Those who wait are told; after the back-off it may start again."""
    rig = Rig(model("a", parallel=1))
    rig.warms("a")
    rig.fails("a")
    rig.warms("a")
    rig.asks("a")
    rig.asks("a")
    assert refusals(rig.fails("a")) == [(503, "backing_off")]
    rig.waits(1.0)

    assert (rig.state("a"), names(rig.asks("a"))) == (State.STOPPED, ["a"])


def test_a_lost_request_of_a_healthy_engine_goes_back_to_it() -> None:
    """Nobody is admitted until the host has looked; then in the order they came."""
    rig = Rig(model("a"))
    first = rig.holds("a")
    rig.loses(first)
    assert rig.asks("a") == []

    assert [first, first + 1] == [each.request for each in only(rig.reports("a", State.READY), Admit)]


def test_a_loss_told_after_the_fresh_engine_is_ready_is_served_by_it() -> None:
    """The word came late: nobody else has to wake the request up."""
    rig = Rig(model("a"))
    late = rig.holds("a")
    rig.fails("a")
    rig.warms("a")

    assert [late] == [each.request for each in only(rig.loses(late), Admit)]


def test_a_pinned_model_comes_back_by_itself() -> None:
    """At once after the first crash, after the back-off from the second on."""
    rig = Rig(model("a", pinned=True))
    rig.begins()
    rig.is_ready("a")
    assert names(rig.fails("a")) == ["a"]
    rig.is_ready("a")
    assert names(rig.fails("a")) == []

    assert names(rig.waits(1.0)) == ["a"]


def test_memory_that_did_not_come_back_is_outside_memory() -> None:
    """Nobody is started into it."""
    rig = Rig(model("a", 8000), model("b", 8000))
    rig.warms("a")
    rig.wishes("a", Operation.UNLOAD)
    rig.is_stopped("a", leaked_mib=3000)

    assert (rig.stage.book.pools[GPU].outside_mib, names(rig.asks("b"))) == (3000, [])


def test_a_wake_that_fails_twice_becomes_a_cold_start() -> None:
    """Once it sleeps on and is tried again; twice it is stopped, and whoever waits gets a fresh engine."""
    rig = Rig(model("a", 5000, sleep=(LEVEL_1,)))
    rig.warms("a")
    rig.wishes("a", Operation.SLEEP)
    rig.is_asleep("a")
    rig.asks("a")
    rig.is_asleep("a", why="it does not answer")
    assert State.WAKING is rig.state("a")
    assert names(rig.is_asleep("a", why="it does not answer"), Stop) == ["a"]

    assert names(rig.is_stopped("a"), Start) == ["a"]


# --------------------------------------------------------------------------------------------------- never at all


def test_what_can_never_fit_is_refused_before_anything_is_stopped() -> None:
    """With the numbers; the resident stays."""
    rig = Rig(model("there", 9000), model("huge", 20_000))
    rig.warms("there")
    orders = rig.asks("huge")

    assert refusals(orders) == [(503, "too_big")]
    assert "needs 19.5 GiB on gpu0, which can give at most 9.8 GiB: 9.8 GiB are missing" in only(orders, Refuse)[0].message
    assert State.READY is rig.state("there")


def test_outside_memory_is_waited_for_as_long_as_configured() -> None:
    """Refused after room_wait_s, counted from the arrival, however dear the start."""
    rig = Rig(model("a", 8000, up_s=60.0), room_wait_s=30.0)
    rig.measures(5000)
    assert rig.asks("a") == []
    assert rig.waits(29.9) == []

    assert refusals(rig.waits(0.2)) == [(503, "no_room")]


def test_outside_memory_that_goes_away_lets_the_waiting_one_in() -> None:
    """At the next sample."""
    rig = Rig(model("a", 8000))
    rig.measures(5000)
    rig.asks("a")
    rig.waits(5)

    assert names(rig.measures(0)) == ["a"]


def test_an_unkillable_victim_does_not_keep_the_others_gated() -> None:
    """It ends while others drain for the same target: they serve again."""
    rig = Rig(model("a", 5000), model("b", 5000), model("big", 10_000), devices=(gpu(),))
    rig.holds("a")
    rig.holds("b")
    rig.asks("big")
    rig.waits(60)
    assert [rig.state("a"), rig.state("b")] == [State.DRAINING] * 2
    rig.fails("a", Cause.UNKILLABLE, why="pid 1 does not end")

    assert State.READY is rig.state("b")


@pytest.mark.parametrize("operation", [Operation.LOAD, Operation.UNLOAD, Operation.SLEEP, Operation.WAKE])
def test_wishes_for_an_engine_that_does_not_end_are_refused_at_once(operation: Operation) -> None:
    """Nobody could ever answer them."""
    rig = Rig(model("a", 5000))
    rig.warms("a")
    rig.wishes("a", Operation.UNLOAD)
    rig.fails("a", Cause.UNKILLABLE, why="pid 1 does not end")

    assert refusals(rig.wishes("a", operation)) == [(503, "unkillable")]
