"""What operators, idle ladders, reloads and shutdown drive a model to; every wish is answered once."""

from __future__ import annotations

import pytest

from greenroom.core.facts import (
    Action,
    Admit,
    Cut,
    Done,
    Group,
    Operation,
    Refuse,
    ShutdownAsked,
    Sleep,
    Start,
    State,
    Stop,
    Wake,
)

from .rig import GPU, LEVEL_1, LEVEL_2, Rig, gpu, model, names, only, ram


def answers(actions: list[Action]) -> list[tuple[int, str]]:
    """(request, message or code) of every answer."""
    return [(each.request, each.message if isinstance(each, Done) else each.code) for each in actions if isinstance(each, (Done, Refuse))]


# ------------------------------------------------------------------------------------------------------ load, unload


def test_a_load_is_answered_when_the_model_is_ready() -> None:
    """It starts like for a client, and evicts like for one."""
    rig = Rig(model("a"))
    assert names(rig.wishes("a", Operation.LOAD)) == ["a"]
    wish = rig.last

    assert [(wish, "a is ready")] == answers(rig.is_ready("a"))


def test_a_load_of_a_ready_model_is_answered_at_once() -> None:
    """Nothing is started."""
    rig = Rig(model("a"))
    rig.warms("a")

    assert [Done(rig.last + 1, "a is ready")] == rig.wishes("a", Operation.LOAD)


def test_a_load_that_fails_is_answered_with_the_reason() -> None:
    """Like a client's request."""
    rig = Rig(model("a"))
    rig.wishes("a", Operation.LOAD)

    assert [(rig.last, "start_failed")] == answers(rig.fails("a"))


def test_a_load_does_not_wait_for_a_back_off() -> None:
    """An operator insists."""
    rig = Rig(model("a"))
    rig.asks("a")
    rig.fails("a")

    assert names(rig.wishes("a", Operation.LOAD)) == ["a"]


def test_an_unload_lets_requests_in_flight_finish() -> None:
    """New ones wait and are served by a fresh engine; the wish is answered at the stop."""
    rig = Rig(model("a"))
    request = rig.holds("a")
    assert rig.wishes("a", Operation.UNLOAD) == []
    wish = rig.last
    assert (rig.state("a"), rig.asks("a")) == (State.DRAINING, [])
    assert names(rig.ends(request), Stop) == ["a"]
    orders = rig.is_stopped("a")

    assert ([(wish, "a is stopped")], ["a"]) == (answers(orders), names(orders))


def test_a_forced_unload_cuts_them() -> None:
    """Each is told once, and the engine stops when they have ended."""
    rig = Rig(model("a"))
    request = rig.holds("a")
    orders = rig.wishes("a", Operation.UNLOAD, force=True)
    assert [(request, "unloaded")] == [(each.request, each.code) for each in only(orders, Cut)]

    assert names(rig.ends(request), Stop) == ["a"]


def test_an_unload_refuses_those_who_wait() -> None:
    """They asked for a model that is being taken away."""
    rig = Rig(model("a"))
    rig.asks("a")
    waiting = rig.last
    orders = rig.wishes("a", Operation.UNLOAD)

    assert [(waiting, "unloaded")] == answers(orders)
    assert names(orders, Stop) == ["a"]


def test_an_unload_of_a_sleeper_stops_it() -> None:
    """Its residue and its host RAM come back."""
    rig = Rig(model("a", sleep=(LEVEL_1,)))
    rig.warms("a")
    rig.wishes("a", Operation.SLEEP)
    rig.is_asleep("a")
    assert names(rig.wishes("a", Operation.UNLOAD), Stop) == ["a"]
    rig.is_stopped("a")

    assert rig.booked() == {}


def test_an_unload_of_a_model_at_home_is_answered_at_once() -> None:
    """There is nothing to do."""
    rig = Rig(model("a"))

    assert [Done(1, "a is stopped")] == rig.wishes("a", Operation.UNLOAD)


def test_a_wish_for_an_unknown_model_is_a_404() -> None:
    """Like a request for it."""
    assert answers(Rig(model("a")).wishes("b", Operation.LOAD)) == [(1, "unknown_model")]


# ------------------------------------------------------------------------------------------------------- sleep, wake


def test_a_sleep_is_answered_when_it_sleeps() -> None:
    """At the level that wakes fastest where none is named."""
    rig = Rig(model("a", sleep=(LEVEL_2, LEVEL_1)))
    rig.warms("a")
    assert [each.level for each in only(rig.wishes("a", Operation.SLEEP), Sleep)] == [1]

    assert [(rig.last, "a is asleep at level 1")] == answers(rig.is_asleep("a"))


def test_a_wake_is_answered_when_it_is_ready() -> None:
    """And refused for a model that is not asleep but at home."""
    rig = Rig(model("a", sleep=(LEVEL_1,)))
    assert answers(rig.wishes("a", Operation.WAKE)) == [(1, "not_asleep")]
    rig.warms("a")
    rig.wishes("a", Operation.SLEEP)
    rig.is_asleep("a")
    assert names(rig.wishes("a", Operation.WAKE), Wake) == ["a"]

    assert [(rig.last, "a is ready")] == answers(rig.is_ready("a"))


@pytest.mark.parametrize(("sleep", "level", "code"), [((), None, "cannot_sleep"), ((LEVEL_1,), 2, "cannot_sleep")])
def test_a_sleep_the_engine_cannot_do_is_refused(sleep: tuple[object, ...], level: int | None, code: str) -> None:
    """No tiers at all, or not that one."""
    rig = Rig(model("a", sleep=sleep))
    rig.warms("a")

    assert [code] == [answer for _, answer in answers(rig.wishes("a", Operation.SLEEP, level=level))]


def test_a_sleep_that_host_ram_has_no_room_for_is_refused() -> None:
    """A named level is not replaced by another one, and RAM is not promised twice."""
    rig = Rig(model("a", sleep=(LEVEL_1,)), devices=(gpu(), ram(1000)))
    rig.warms("a")

    assert [answer for _, answer in answers(rig.wishes("a", Operation.SLEEP, level=1))] == ["no_room"]


def test_a_refused_sleep_names_the_level_that_would_do() -> None:
    """With what it would hold and what there is."""
    rig = Rig(model("a", sleep=(LEVEL_1, LEVEL_2)), devices=(gpu(), ram(1000)))
    rig.warms("a")
    (refusal,) = only(rig.wishes("a", Operation.SLEEP, level=1), Refuse)

    assert refusal.message == (
        "a would hold 2.9 GiB of host RAM at level 1, and 1000 MiB are free for sleepers; put it to sleep at level 2 instead"
    )


def test_a_sleeper_does_not_change_its_level() -> None:
    """It would have to be woken for that."""
    rig = Rig(model("a", sleep=(LEVEL_1, LEVEL_2)))
    rig.warms("a")
    rig.wishes("a", Operation.SLEEP, level=1)
    rig.is_asleep("a")

    assert answers(rig.wishes("a", Operation.SLEEP, level=2)) == [(rig.last, "asleep")]
    assert answers(rig.wishes("a", Operation.SLEEP, level=1)) == [(rig.last, "a is asleep at level 1")]


def test_a_pinned_model_is_not_put_to_sleep() -> None:
    """Its room stays its own; one that is pinned while it sleeps comes back."""
    rig = Rig(model("a", sleep=(LEVEL_1,)))
    rig.warms("a")
    rig.wishes("a", Operation.PIN)
    assert answers(rig.wishes("a", Operation.SLEEP)) == [(rig.last, "pinned")]

    rig.wishes("a", Operation.UNPIN)
    rig.wishes("a", Operation.SLEEP)
    rig.is_asleep("a")
    assert names(rig.wishes("a", Operation.PIN), Wake) == ["a"]


def test_an_unload_does_not_wait_for_a_sleep_that_hangs() -> None:
    """The engine is stopped in the middle of it."""
    rig = Rig(model("a", sleep=(LEVEL_1,)))
    rig.warms("a")
    rig.wishes("a", Operation.SLEEP)

    assert names(rig.wishes("a", Operation.UNLOAD), Stop) == ["a"]


def test_a_sleep_overtaken_by_an_unload_is_answered_too() -> None:
    """The model is gone: 409 for the one, done for the other."""
    rig = Rig(model("a", sleep=(LEVEL_1,)))
    request = rig.holds("a")
    rig.wishes("a", Operation.SLEEP)
    sleep = rig.last
    rig.wishes("a", Operation.UNLOAD)
    unload = rig.last
    rig.ends(request)

    assert {(unload, "a is stopped"), (sleep, "not_asleep")} == set(answers(rig.is_stopped("a")))


def test_a_crash_answers_every_wish() -> None:
    """Nobody waits for an engine that is gone."""
    rig = Rig(model("a", sleep=(LEVEL_1,)))
    rig.holds("a")
    rig.wishes("a", Operation.SLEEP)

    assert [rig.last] == [request for request, _ in answers(rig.fails("a"))]


# ---------------------------------------------------------------------------------------------------------------- pin


def test_a_pin_brings_a_model_in_and_keeps_it() -> None:
    """It evicts whoever is in the way, and nobody evicts it."""
    rig = Rig(model("a", 6000), model("b", 6000))
    rig.warms("b")
    rig.waits(60)
    rig.wishes("a", Operation.PIN)
    rig.waits(60)
    rig.is_stopped("b")
    rig.is_ready("a")

    assert (rig.state("a"), [code for _, code in answers(rig.asks("b"))]) == (State.READY, ["no_room"])


def test_a_pin_saves_a_victim_that_still_drains() -> None:
    """Its gate opens again."""
    rig = Rig(model("a", 6000), model("b", 6000, on_conflict="wait"))
    rig.holds("a")
    rig.asks("b")
    rig.waits(60)
    assert State.DRAINING is rig.state("a")
    rig.wishes("a", Operation.PIN)

    assert State.READY is rig.state("a")


def test_an_unpinned_model_runs_down_its_ladder_again() -> None:
    """The ttl counts from its last use, however long it was pinned."""
    rig = Rig(model("a", pinned=True, ttl_s=10.0))
    rig.begins()
    rig.is_ready("a")
    assert rig.waits(100) == []

    assert names(rig.wishes("a", Operation.UNPIN), Stop) == ["a"]


# ------------------------------------------------------------------------------------------------------------- ladder


def test_the_ladder_goes_down_by_sleep_and_stop() -> None:
    """ready -> asleep after sleep_after, -> stopped after ttl, both from the last end."""
    rig = Rig(model("a", sleep=(LEVEL_1,), sleep_after_s=5.0, ttl_s=20.0))
    rig.warms("a")
    ended = rig.now
    assert names(rig.waits_until(ended + 5.0), Sleep) == ["a"]
    rig.is_asleep("a")
    assert rig.waits_until(ended + 19.9) == []

    assert names(rig.waits_until(ended + 20.0), Stop) == ["a"]


def test_a_ladder_survives_an_order_to_sleep() -> None:
    """Put to sleep by an operator, it still stops after its ttl."""
    rig = Rig(model("a", sleep=(LEVEL_1,), ttl_s=20.0))
    rig.warms("a")
    ended = rig.now
    rig.wishes("a", Operation.SLEEP)
    rig.is_asleep("a")

    assert names(rig.waits_until(ended + 20.0), Stop) == ["a"]


def test_many_rounds_leave_few_timers() -> None:
    """A thousand uses do not grow the heap of things to look at."""
    rig = Rig(model("a", 6000, ttl_s=300.0), model("b", 6000, ttl_s=300.0))
    for n in range(200):
        mine, other = ("a", "b") if n % 2 else ("b", "a")
        rig.asks(mine)
        request = rig.last
        rig.waits(1)
        if rig.state(other) is State.STOPPING:
            rig.is_stopped(other)
        rig.is_ready(mine)
        rig.ends(request)
        rig.waits(20)

    assert len(rig.stage.due) <= 60


# ------------------------------------------------------------------------------------------------------------- reload


def test_an_unchanged_definition_goes_on_serving() -> None:
    """Same digest, new ttl and limit: the engine stays, the new limit holds at once."""
    rig = Rig(model("a", parallel=1, digest="1"))
    rig.holds("a")
    rig.asks("a")
    waiting = rig.last
    orders = rig.reloads(model("a", parallel=2, digest="1", ttl_s=5.0))

    assert [waiting] == [each.request for each in only(orders, Admit)]
    assert State.READY is rig.state("a")


def test_a_changed_definition_drains_then_starts_anew() -> None:
    """What is in flight finishes on the old engine; who waits is served by the new one with the new need."""
    rig = Rig(model("a", 1000, digest="1"))
    request = rig.holds("a")
    rig.reloads(model("a", 2000, digest="2"))
    rig.asks("a")
    assert names(rig.ends(request), Stop) == ["a"]

    assert [each.reserved_mib[GPU] for each in only(rig.is_stopped("a"), Start)] == [2000]


def test_what_was_measured_of_the_old_definition_is_not_told_of_the_new_one() -> None:
    """The figures that are remembered belong to the engine they were measured on."""
    rig = Rig(model("a", 1000, digest="1"))
    rig.holds("a")
    rig.measures(3000, a=3000)
    assert rig.scheduler.learned("a") == (3000, 2.0, None)
    rig.reloads(model("a", 2000, digest="2"))
    while_it_retires = rig.scheduler.learned("a")
    rig.ends(rig.last)
    rig.is_stopped("a")

    assert (while_it_retires, rig.scheduler.learned("a")) == (None, (None, None, None))


def test_a_removed_model_is_unknown_once_it_has_drained() -> None:
    """404 for new requests at once; its last one finishes."""
    rig = Rig(model("a"), model("b"))
    request = rig.holds("a")
    rig.reloads(model("b"))
    assert [(rig.last + 1, "unknown_model")] == answers(rig.asks("a"))
    rig.ends(request)
    rig.is_stopped("a")

    assert {"b"} == set(rig.stage.entries)


def test_a_model_removed_and_put_back_goes_on_serving() -> None:
    """Its engine is neither drained nor stopped."""
    rig = Rig(model("a", digest="1"), model("b"))
    first = rig.holds("a")
    rig.reloads(model("b"))
    assert State.DRAINING is rig.state("a")
    rig.reloads(model("a", digest="1"), model("b"))
    assert State.READY is rig.state("a")

    assert rig.ends(first) == []
    assert [each.start for each in only(rig.asks("a"), Admit)] == ["hot"]


def test_a_changed_definition_of_a_stopped_model_is_taken_at_once() -> None:
    """Also while it backs off."""
    rig = Rig(model("a", digest="1"))
    rig.asks("a")
    rig.fails("a")
    rig.reloads(model("a", 2000, digest="2"))

    assert [each.reserved_mib[GPU] for each in only(rig.asks("a"), Start)] == [2000]


@pytest.mark.parametrize("digest", ["1", "2"], ids=["unchanged", "changed"])
def test_an_operators_pin_outlives_a_reload_that_says_nothing_of_pins(digest: str) -> None:
    """Whether the definition changed otherwise or not; only a configuration that changes the pin itself overrules it."""
    rig = Rig(model("a", digest="1"))
    rig.wishes("a", Operation.PIN)
    rig.is_ready("a")
    rig.reloads(model("a", digest=digest))
    assert rig.entry("a").pinned
    rig.reloads(model("a", digest=digest, pinned=True))
    rig.reloads(model("a", digest=digest))

    assert not rig.entry("a").pinned


def test_a_definition_taken_back_before_its_engine_ended_takes_its_pin_along() -> None:
    """Pinned by the second configuration, not by the third, which is the first again."""
    rig = Rig(model("a", digest="1"))
    rig.holds("a")
    rig.reloads(model("a", digest="2", pinned=True))
    assert rig.entry("a").pinned
    rig.reloads(model("a", digest="1"))

    assert not rig.entry("a").pinned


def test_new_groups_hold_from_the_reload_on() -> None:
    """Two that were there together may not be any more, once one is asked for."""
    rig = Rig(model("a"), model("b"), model("c"))
    rig.warms("a")
    rig.reloads(*rig.setup.models, groups=(Group("g", frozenset("ab")),))
    rig.waits(60)

    assert names(rig.asks("b"), Stop) == ["a"]


# ----------------------------------------------------------------------------------------------------------- shutdown


def shut_down(rig: Rig, *, force: bool = False) -> list[Action]:
    return rig.does(ShutdownAsked(rig.now, force))


def test_shutdown_refuses_who_waits_and_lets_who_is_served_finish() -> None:
    """Then every engine stops, and nothing starts any more, not even a pinned one."""
    rig = Rig(model("a", parallel=1), model("p", pinned=True))
    rig.begins()
    rig.is_ready("p")
    request = rig.holds("a")
    rig.asks("a")
    waiting = rig.last
    orders = shut_down(rig)
    assert [(waiting, "shutting_down")] == answers(orders)
    assert names(orders, Stop) == ["p"]
    assert names(rig.ends(request), Stop) == ["a"]
    assert rig.is_stopped("p") == []
    assert rig.is_stopped("a") == []

    assert rig.scheduler.is_down()


def test_a_forced_shutdown_cuts_what_is_in_flight() -> None:
    """Each is told once, also when both were asked for."""
    rig = Rig(model("a"))
    request = rig.holds("a")
    shut_down(rig)

    assert [request] == [each.request for each in only(shut_down(rig, force=True), Cut)]
    assert only(shut_down(rig, force=True), Cut) == []


def test_shutdown_ends_what_is_on_its_way_in() -> None:
    """A start is not waited for."""
    rig = Rig(model("a"))
    rig.asks("a")

    assert names(shut_down(rig), Stop) == ["a"]


def test_a_wish_for_sleep_is_answered_by_a_shutdown() -> None:
    """Nobody will put it to sleep any more."""
    rig = Rig(model("a", sleep=(LEVEL_1,)))
    rig.holds("a")
    rig.wishes("a", Operation.SLEEP)

    assert (rig.last, "shutting_down") in answers(shut_down(rig))


def test_requests_after_a_shutdown_are_refused() -> None:
    """503 with a Retry-After."""
    rig = Rig(model("a"))
    shut_down(rig)

    assert answers(rig.asks("a")) == [(1, "shutting_down")]
