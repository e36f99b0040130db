"""Two things at once: what one of them was about is gone, or changed, before it is done."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.core.facts import (
    Action,
    Cause,
    Done,
    Group,
    InstanceReported,
    MemoryMeasured,
    Operation,
    Refuse,
    Sleep,
    Start,
    State,
    Stop,
    Ticked,
    Wake,
)

from .rig import GPU, LEVEL_1, LEVEL_2, Rig, gpu, model, names, only, ram
from .test_sleep import crowded, falls_asleep, is_woken, sleeper


def answers(actions: list[Action], request: int) -> list[tuple[str, int]]:
    """(code, status) of each answer that an operator got; ("", 200) = it was done."""
    refused = [(one.code, one.status) for one in only(actions, Refuse) if one.request == request]
    return refused + [("", 200) for one in only(actions, Done) if one.request == request]


# ------------------------------------------------------------------------------------------------ reloads


@pytest.mark.parametrize("how", ["dies", "is stopped"])
def test_who_was_removed_and_is_gone_is_waited_for_by_nobody(how: str) -> None:
    """Its successor on the device starts, though it was to leave for that and no word of it is left."""
    rig = Rig(model("v", 6000), model("t", 6000), model("other", 1000))
    request = rig.holds("v")
    rig.asks("t")
    rig.waits(30)
    assert rig.state("v") is State.DRAINING
    rig.reloads(model("t", 6000), model("other", 1000))
    if how == "dies":
        started = rig.fails("v")
    else:
        assert names(rig.ends(request), Stop) == ["v"]
        started = rig.is_stopped("v")
    assert names(started) == ["t"]
    assert "v" not in rig.stage.entries
    assert not [move for move in rig.stage.moves if "v" in move.victims]
    assert rig.booked() == {"t": 6000}


def test_who_was_removed_and_is_back_under_its_name_is_another() -> None:
    """A move that waited for the old one does not wait for the new one."""
    rig = Rig(model("v", 6000), model("t", 6000))
    rig.holds("v")
    rig.asks("t")
    rig.waits(30)
    rig.reloads(model("t", 6000))
    rig.fails("v")
    rig.reloads(model("t", 6000), model("v", 2000, digest="new"))
    assert not names(rig.asks("v")), "one lane a device"
    assert names(rig.is_ready("t")) == ["v"]
    assert rig.state("t") is State.READY


def test_a_device_on_which_somebody_lives_stays_though_nothing_is_booked_there() -> None:
    """A sleeper that was measured to hold nothing: it can be woken, or make room."""
    any_of = sleeper("a", 6000)
    rig = Rig(any_of, devices=(gpu(), gpu("gpu1")), early_sleep_s=None)
    rig.warms("a")
    falls_asleep(rig, "a", measured_mib={GPU: 0})
    assert rig.booked() == {}
    rig.reloads(any_of, devices=(gpu("gpu1"),))
    assert names(rig.asks("a"), Wake) == ["a"]


@pytest.mark.parametrize("digest", ["", "new"])
def test_who_waits_for_what_cannot_start_any_more_is_told_at_once(digest: str) -> None:
    """As whoever comes next is, not when its turn would come."""
    rig = Rig(model("a", 8000, up_s=60.0), model("b", 8000))
    rig.holds("b")
    rig.asks("a")
    wrong = model("a", 8000, up_s=60.0, misconfigured="there is no file /a.gguf", digest=digest)
    refused = only(rig.reloads(wrong, model("b", 8000)), Refuse)
    assert [(one.request, one.code) for one in refused] == [(rig.last, "misconfigured")]


def test_a_preload_is_for_the_first_time() -> None:
    """Stopped for its idle time, it does not come back because its file was away for a moment; one that never came up does."""
    preload = model("p", 1000, preload=True, ttl_s=10.0)
    gone = model("p", 1000, preload=True, ttl_s=10.0, misconfigured="there is no file /p.gguf")
    rig = Rig(preload)
    assert names(rig.begins()) == ["p"]
    rig.is_ready("p")
    assert names(rig.waits(30), Stop) == ["p"]
    rig.is_stopped("p")
    rig.reloads(gone)
    assert not names(rig.reloads(preload))
    late = Rig(gone)
    assert not names(late.begins())
    assert names(late.reloads(preload)) == ["p"]


# ------------------------------------------------------------------------------------------------ pins


def test_a_pinned_model_that_cannot_start_keeps_nobody_out() -> None:
    """Neither by the room that it is owed nor by the rule of a group."""
    gone = model("p", 8000, pinned=True, misconfigured="there is no file /p.gguf")
    rig = Rig(gone, model("b", 8000))
    assert names(rig.asks("b")) == ["b"]
    apart = Rig(gone, model("b", 1000), groups=(Group("g", frozenset({"p", "b"})),))
    assert names(apart.asks("b")) == ["b"]


def test_who_is_pinned_while_it_falls_asleep_comes_back() -> None:
    rig = crowded()
    rig.warms("a")
    rig.wishes("a", Operation.SLEEP)
    assert rig.state("a") is State.GOING_TO_SLEEP
    rig.wishes("a", Operation.PIN)
    assert names(rig.is_asleep("a"), Wake) == ["a"]


def test_who_was_to_leave_for_its_idle_time_and_is_pinned_comes_back() -> None:
    rig = Rig(sleeper("a", sleep_after_s=10.0), early_sleep_s=None)
    rig.warms("a")
    assert names(rig.waits(20), Sleep) == ["a"]
    rig.wishes("a", Operation.PIN)
    assert names(rig.is_asleep("a"), Wake) == ["a"]


def test_a_pin_calls_off_a_sleep_that_has_not_begun() -> None:
    """Who asked for it is told, and the model serves."""
    rig = crowded()
    request = rig.holds("a")
    rig.wishes("a", Operation.SLEEP)
    wish = rig.last
    assert rig.state("a") is State.DRAINING
    actions = rig.wishes("a", Operation.PIN)
    assert answers(actions, wish) == [("pinned", 409)]
    assert answers(actions, rig.last) == [("", 200)]
    assert rig.state("a") is State.READY
    assert not only(rig.ends(request), Sleep)
    assert not only(rig.waits(1000), Sleep)


def test_a_sleeper_whose_configuration_pins_it_wakes() -> None:
    rig = crowded()
    rig.warms("a")
    falls_asleep(rig, "a")
    assert names(rig.reloads(sleeper("a", pinned=True), sleeper("b")), Wake) == ["a"]


# ------------------------------------------------------------------------------------------------ operators


def test_who_is_to_be_stopped_is_not_put_to_sleep_instead() -> None:
    """The first wish gets its answer."""
    rig = crowded()
    request = rig.holds("a")
    rig.wishes("a", Operation.UNLOAD)
    unload = rig.last
    assert answers(rig.wishes("a", Operation.SLEEP), rig.last) == [("leaving", 409)]
    assert names(rig.ends(request), Stop) == ["a"]
    assert answers(rig.is_stopped("a"), unload) == [("", 200)]


def test_a_level_that_was_asked_for_on_the_way_to_another_is_not_said_to_be_reached() -> None:
    rig = Rig(model("a", 6000, sleep=(LEVEL_1, LEVEL_2)), early_sleep_s=None)
    rig.warms("a")
    rig.wishes("a", Operation.SLEEP, level=1)
    first = rig.last
    rig.wishes("a", Operation.SLEEP, level=2)
    second = rig.last
    rig.wishes("a", Operation.SLEEP)
    third = rig.last
    actions = rig.is_asleep("a")
    assert [answers(actions, wish) for wish in (first, second, third)] == [[("", 200)], [("asleep", 409)], [("", 200)]]


# ------------------------------------------------------------------------------------------------ suspects


def test_a_suspect_victim_is_waited_for_without_a_look_at_the_clock() -> None:
    """Its last request was lost after the time for draining: until it is known whether it lives, nothing is due."""
    rig = Rig(model("v", 6000), model("t", 6000), drain_timeout_s=5.0)
    request = rig.holds("v")
    rig.asks("t")
    rig.waits(30)
    assert rig.state("v") is State.DRAINING
    rig.loses(request)
    assert rig.entry("v").instance.suspect
    until, looks = rig.now + 20.0, 0
    while rig.timer_at is not None and rig.timer_at <= until and looks < 100:
        rig.now, rig.timer_at = max(rig.now, rig.timer_at), None
        rig.does(Ticked(rig.now))
        looks += 1
    assert looks < 10
    rig.now = until
    assert names(rig.reports("v", State.READY), Stop) == ["v"]


def test_a_suspect_is_put_to_sleep_once_it_is_known_to_live() -> None:
    """Word of that would not reach a sleeper, which would be left alone for ever."""
    rig = Rig(sleeper("a", ttl_s=60.0), early_sleep_s=None)
    request = rig.holds("a")
    rig.loses(request)
    assert not only(rig.wishes("a", Operation.SLEEP), Sleep)
    rig.cancels(request)
    assert names(rig.reports("a", State.READY), Sleep) == ["a"]
    rig.is_asleep("a")
    assert names(rig.waits(100), Stop) == ["a"]


# ------------------------------------------------------------------------------------------------ memory


def test_host_ram_is_relieved_by_one_that_would_hold_as_much_of_it_asleep() -> None:
    """Sleep frees nothing there: it is stopped, as one that cannot sleep is."""
    rig = Rig(model("a", 6000, host_mib=3000, sleep=(LEVEL_2,)), devices=(gpu(), ram(8000)), early_sleep_s=None)
    rig.warms("a")
    gone: list[Any] = []
    for _ in range(5):
        rig.now += 0.25
        gone += rig.does(MemoryMeasured(rig.now, "ram", 9000, {"a": 3000}, "pid 1 (python)", available_mib=0))
    assert names(gone, Stop) == ["a"]


def test_what_a_dead_sleeper_holds_is_no_measure_of_the_next_sleep() -> None:
    """Its worker was killed; the samples show nothing before anybody knows."""
    rig = crowded()
    rig.warms("a")
    falls_asleep(rig, "a", measured_mib={GPU: 1500})
    rig.measures(0, a=0)
    assert rig.entry("a").costs.residue_mib == {1: 1500}
    assert rig.booked() == {}
    rig.measures(1700, a=1700)
    assert rig.entry("a").costs.residue_mib == {1: 1700}, "more is more"
    assert rig.booked() == {"a": 1700}


@pytest.mark.parametrize("outside_mib", [0, 7000])
def test_wakes_that_end_an_engine_for_want_of_memory_are_counted(outside_mib: int) -> None:
    """Where nobody else had taken the room it is the sleep's fault: the second time it is switched off."""
    rig = crowded()
    rig.warms("a")
    for _ in range(2):
        falls_asleep(rig, "a")
        is_woken(rig, "a")
        sample = MemoryMeasured(rig.now, GPU, outside_mib, {}, "pid 1 (python)")
        rig.reports("a", State.STOPPED, cause=Cause.OOM, why="CUDA out of memory", samples=(sample,))
        rig.measures(0)
        rig.now += 1.0
        rig.waits(1)
        assert rig.state("a") is State.STARTING
        rig.is_ready("a")
        rig.ends(rig.last)
    assert rig.entry("a").wake_failures == 2
    assert bool(rig.entry("a").sleep_off) == (outside_mib == 0)


def test_a_wake_that_runs_out_of_memory_again_and_again_ends_with_sleep_switched_off() -> None:
    """Both tries of a wake failed, and nobody else had the room: twice that, and it is stopped instead."""
    rig = crowded()
    rig.warms("a")
    for _ in range(2):
        falls_asleep(rig, "a")
        is_woken(rig, "a")
        for _ in range(2):
            rig.reports("a", State.ASLEEP, level=1, why="CUDA out of memory")
        assert rig.state("a") is State.STOPPING
        rig.is_stopped("a")
        assert rig.state("a") is State.STARTING
        rig.is_ready("a")
        rig.ends(rig.last)
    assert "went wrong" in rig.entry("a").sleep_off
    assert only(rig.asks("b"), Start) or only(rig.waits(60), Stop)


def test_a_report_of_an_older_engine_changes_nothing() -> None:
    """It comes late: the new one of the same name goes on."""
    rig = crowded()
    rig.warms("a")
    old = rig.entry("a").instance.generation
    rig.fails("a")
    rig.warms("a")
    rig.does(InstanceReported(rig.now, "a", old, State.STOPPED, cause=Cause.EXITED, why="late"))
    assert rig.state("a") is State.READY
