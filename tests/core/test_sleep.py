"""Sleep: what goes wrong with it, what it really costs, when it is rehearsed, and what ends it."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.core.facts import Admit, Cause, Done, MemoryMeasured, Model, Operation, Refuse, Sleep, SleepTier, Start, State, Stop, Wake

from .rig import GPU, LEVEL_1, LEVEL_2, Rig, gpu, model, names, only, ram

COPY = LEVEL_1.host_mib


def sleeper(name: str, need_mib: int = 6000, **more: Any) -> Model:
    return model(name, need_mib, sleep=(LEVEL_1,), digest="1", **more)


def crowded(*, host_mib: int | None = None, **policy: Any) -> Rig:
    """Two models that sleep, of which only one can be awake."""
    devices = (gpu(), ram(host_mib)) if host_mib is not None else (gpu(),)
    return Rig(sleeper("a"), sleeper("b"), devices=devices, **{"early_sleep_s": None, **policy})


def falls_asleep(rig: Rig, name: str, **more: Any) -> list[Any]:
    """By an operator's wish, and the engine does it."""
    assert names(rig.wishes(name, Operation.SLEEP), Sleep) == [name]
    return rig.is_asleep(name, took_s=0.5, **more)


def is_woken(rig: Rig, name: str) -> int:
    """Asked for and being woken; the request that waits."""
    assert names(rig.asks(name), Wake) == [name]
    return rig.last


# ------------------------------------------------------------------------------------------------ sleeps that go wrong


@pytest.mark.parametrize("cause", [Cause.SLEEP_FAILED, Cause.TIMEOUT, Cause.EXITED])
def test_a_sleep_that_ends_its_engine_costs_no_back_off(cause: Cause) -> None:
    """Who asks next is served by a cold start at once."""
    rig = crowded()
    rig.warms("a")
    rig.wishes("a", Operation.SLEEP)
    refused = only(rig.fails("a", cause), Refuse)

    assert [(each.status, each.code) for each in refused] == [(409, "not_asleep")]
    assert rig.state("a") is State.STOPPED
    assert names(rig.asks("a")) == ["a"]


def test_who_waits_for_a_wake_that_ends_its_engine_is_served_by_a_cold_start() -> None:
    """Nothing is refused, and nothing backs off."""
    rig = crowded()
    rig.warms("a")
    falls_asleep(rig, "a")
    request = is_woken(rig, "a")
    assert names(rig.fails("a", Cause.WAKE_FAILED)) == ["a"]

    assert [each.request for each in only(rig.is_ready("a"), Admit)] == [request]
    assert rig.entry("a").wake_failures == 1


def test_one_that_dies_of_its_first_request_after_a_wake_was_not_woken_well() -> None:
    """The request is served by a cold start at once, it counts as a failed wake, and the second one switches sleep off."""
    rig = crowded()
    for failures in (1, 2):
        rig.warms("a")
        falls_asleep(rig, "a")
        request = is_woken(rig, "a")
        rig.is_ready("a")
        rig.loses(request)
        assert names(rig.fails("a")) == ["a"]
        assert [each.request for each in only(rig.is_ready("a"), Admit)] == [request]
        rig.ends(request)
        assert (rig.entry("a").wake_failures, rig.entry("a").failures, bool(rig.entry("a").sleep_off)) == (failures, 0, failures == 2)
        rig.waits(60)


def test_a_victim_without_room_for_its_copy_says_so() -> None:
    """Why it is stopped, or why it takes the longer way back."""
    devices = (gpu(), ram(1000))
    stops = Rig(model("a", 6000, sleep=(LEVEL_1,)), model("b", 6000), devices=devices, early_sleep_s=None)
    drops = Rig(model("a", 6000, sleep=(LEVEL_1, LEVEL_2)), model("b", 6000), devices=devices, early_sleep_s=None)
    for rig, how in ((stops, "unloaded: b needed"), (drops, "put to sleep (level 2): b needed")):
        rig.warms("a")
        rig.waits(60)
        rig.asks("b")
        rig.waits(60)
        told = [text for _, text in rig.entry("a").story if text.startswith(how)]
        assert ["host RAM has no room for the 2.9 GiB it would hold at level 1" in text for text in told] == [True]


def test_one_that_answered_since_its_wake_and_died_later_has_crashed() -> None:
    """Its sleep is not to blame."""
    rig = crowded()
    rig.warms("a")
    falls_asleep(rig, "a")
    request = is_woken(rig, "a")
    rig.is_ready("a")
    rig.ends(request)
    rig.fails("a")

    assert (rig.entry("a").wake_failures, rig.entry("a").failures) == (0, 1)


def test_after_two_sleep_faults_a_model_is_stopped_instead() -> None:
    """Also when the first was a sleep and the second a wake."""
    rig = crowded()
    rig.warms("a")
    rig.wishes("a", Operation.SLEEP)
    rig.fails("a", Cause.SLEEP_FAILED)
    rig.warms("a")
    falls_asleep(rig, "a")
    is_woken(rig, "a")
    rig.fails("a", Cause.TIMEOUT)
    rig.is_ready("a")
    rig.ends(rig.last)
    rig.waits(60)
    assert "2 sleeps or wakes went wrong" in rig.entry("a").sleep_off

    assert names(rig.asks("b"), Stop) == ["a"]


def test_sleep_faults_outside_the_window_are_forgotten() -> None:
    """One a day is bad luck."""
    rig = crowded(sleep_faults_window_s=100.0)
    for _ in range(3):
        rig.warms("a")
        rig.wishes("a", Operation.SLEEP)
        rig.fails("a", Cause.SLEEP_FAILED)
        rig.waits(200)

    assert rig.entry("a").sleep_off == ""


def test_a_sleep_that_gives_nothing_back_is_switched_off_and_the_model_is_stopped() -> None:
    """So that the model it was put to sleep for gets its room after all."""
    rig = crowded()
    rig.warms("a")
    rig.measures(5500, a=5500)
    rig.waits(60)
    assert names(rig.asks("b"), Sleep) == ["a"]
    assert names(rig.is_asleep("a", took_s=0.5, measured_mib={GPU: 5200}), Stop) == ["a"]

    assert names(rig.is_stopped("a")) == ["b"]
    assert "gave back 300 MiB of 5.4 GiB" in rig.entry("a").sleep_off


def test_an_operator_who_asks_for_sleep_switches_it_on_again() -> None:
    """The operator knows better, and gets what comes of it."""
    rig = crowded(sleep_faults_max=1)
    rig.warms("a")
    rig.wishes("a", Operation.SLEEP)
    rig.fails("a", Cause.SLEEP_FAILED)
    rig.warms("a")
    assert rig.entry("a").sleep_off

    assert names(rig.wishes("a", Operation.SLEEP), Sleep) == ["a"]
    assert rig.entry("a").sleep_off == ""


def test_a_new_definition_switches_sleep_on_again() -> None:
    """What went wrong was another command."""
    rig = crowded(sleep_faults_max=1)
    rig.warms("a")
    rig.wishes("a", Operation.SLEEP)
    rig.fails("a", Cause.SLEEP_FAILED)
    rig.reloads(model("a", 6000, sleep=(LEVEL_1,), digest="2"), sleeper("b"))

    assert (rig.entry("a").sleep_off, len(rig.entry("a").sleep_faults)) == ("", 0)


# ---------------------------------------------------------------------------------------------------- no room to wake


def test_a_wake_that_finds_no_room_books_more_and_tries_again() -> None:
    """Nobody else has the room by the book: it needs more than was booked for it."""
    rig = crowded()
    rig.warms("a")
    falls_asleep(rig, "a")
    request = is_woken(rig, "a")
    assert names(rig.is_asleep("a", why="out of memory"), Wake) == ["a"]

    assert rig.entry("a").need_mib == 6601
    assert [each.request for each in only(rig.is_ready("a"), Admit)] == [request]


def test_after_two_wakes_without_room_it_is_stopped_and_started_anew() -> None:
    """In one go, and the request waits for that."""
    rig = crowded()
    rig.warms("a")
    falls_asleep(rig, "a")
    request = is_woken(rig, "a")
    rig.is_asleep("a")
    assert names(rig.is_asleep("a"), Stop) == ["a"]
    assert names(rig.is_stopped("a")) == ["a"]

    assert [each.request for each in only(rig.is_ready("a"), Admit)] == [request]
    assert rig.entry("a").sleep_off == ""


def test_room_that_another_program_took_raises_nothing() -> None:
    """The samples that come with the word say so; the sleeper waits until it is free again."""
    rig = crowded()
    rig.warms("a")
    falls_asleep(rig, "a")
    is_woken(rig, "a")
    full = MemoryMeasured(rig.now, GPU, 9000, {"a": 200}, "pid 4711 (python)")
    assert rig.is_asleep("a", samples=(full,)) == []
    assert (rig.entry("a").need_mib, rig.booked()) == (6000, {"a": 200})

    assert names(rig.measures(200, a=200), Wake) == ["a"]


def test_host_ram_that_a_wake_in_vain_took_stays_booked_until_somebody_measures_less() -> None:
    """The word of the second wake says nothing of host RAM: what the first one showed has not shrunk by that."""
    rig = crowded(host_mib=10_000)
    rig.warms("a")
    falls_asleep(rig, "a")
    is_woken(rig, "a")
    rig.is_asleep("a", host_mib=COPY + 300)
    rig.is_asleep("a")
    assert rig.booked("ram") == {"a": COPY + 300}


def test_what_a_wake_without_room_books_never_rules_the_model_out() -> None:
    """It is raised to what is left beside a pinned model, not beyond it."""
    rig = Rig(model("pinned", 4000, pinned=True), sleeper("a"), early_sleep_s=None)
    rig.begins()
    rig.is_ready("pinned")
    rig.warms("a")
    falls_asleep(rig, "a")
    is_woken(rig, "a")

    assert names(rig.is_asleep("a"), Wake) == ["a"]
    assert rig.entry("a").need_mib == 6000


# -------------------------------------------------------------------------------------------------- what it really costs


def test_a_sleeper_is_booked_as_it_is_measured() -> None:
    """A residue that grows is seen by who needs the rest, and expected the next time."""
    rig = crowded()
    rig.warms("a")
    falls_asleep(rig, "a", measured_mib={GPU: 300})
    assert rig.booked() == {"a": 300}
    rig.measures(900, a=900)

    assert rig.booked() == {"a": 900}
    assert rig.entry("a").costs.residue_mib == {1: 900}


def test_a_copy_is_booked_as_it_was_measured_the_last_time() -> None:
    """Twice the prior: host RAM for one of the first size takes it no more, and the model stops instead."""
    rig = crowded(host_mib=5000, ram_floor_mib=0)
    rig.warms("a")
    falls_asleep(rig, "a", host_mib=2 * COPY)
    assert rig.booked("ram") == {"a": 2 * COPY}
    rig.ends(is_woken_up(rig, "a"))
    assert rig.booked("ram") == {}
    rig.waits(60)

    assert names(rig.asks("b"), Stop) == ["a"]


def is_woken_up(rig: Rig, name: str, **more: Any) -> int:
    request = is_woken(rig, name)
    rig.is_ready(name, **more)
    return request


def test_a_copy_that_an_engine_keeps_while_awake_stays_booked() -> None:
    """And is not booked a second time when it sleeps again."""
    rig = crowded(host_mib=5000, ram_floor_mib=0)
    rig.warms("a")
    falls_asleep(rig, "a", host_mib=COPY)
    rig.ends(is_woken_up(rig, "a", host_mib=COPY))
    assert rig.booked("ram") == {"a": COPY}
    rig.waits(60)

    assert names(rig.asks("b"), Sleep) == ["a"]
    assert rig.booked("ram") == {"a": COPY}


def available(rig: Rig, mib: int, **own_mib: int) -> None:
    pool = rig.stage.book.pools["ram"]
    used = pool.device.capacity_mib - mib
    rig.does(MemoryMeasured(rig.now, "ram", used, own_mib, available_mib=mib))


def test_a_copy_is_only_made_where_host_ram_really_is() -> None:
    """Above the floor: with 3.9 GiB available and 1 GiB to be left, 3,000 MiB are too many by one."""
    rig = crowded(host_mib=30_000)
    rig.warms("a")
    rig.waits(60)
    available(rig, COPY + 1023)
    assert names(rig.asks("b"), Stop) == ["a"]

    rig = crowded(host_mib=30_000)
    rig.warms("a")
    rig.waits(60)
    available(rig, COPY + 1024)
    assert names(rig.asks("b"), Sleep) == ["a"]


def test_a_copy_in_the_making_is_promised_already() -> None:
    """What was booked and not yet taken at the last sample cannot be taken by a second one."""
    rig = Rig(sleeper("a", 4000), sleeper("b", 4000), devices=(gpu(), ram(30_000)), early_sleep_s=None)
    rig.warms("a")
    rig.warms("b")
    rig.wishes("a", Operation.SLEEP)
    available(rig, 2 * COPY, a=0)
    rig.wishes("b", Operation.SLEEP)
    assert rig.stage.book.pools["ram"].takes(COPY - 1024, 1024)

    assert not rig.stage.book.pools["ram"].takes(COPY - 1023, 1024)


def test_victims_leave_the_host_ram_that_their_successor_needs() -> None:
    """A copy that would have to go again at once is not made."""
    rig = Rig(sleeper("a"), model("b", 6000, host_mib=2000), devices=(gpu(), ram(4000)), early_sleep_s=None, ram_floor_mib=0)
    rig.warms("a")
    rig.waits(60)

    assert names(rig.asks("b"), Stop) == ["a"]


def test_under_pressure_on_host_ram_the_sleeper_whose_loss_costs_least_is_stopped() -> None:
    """Not the one that is asked for all the time."""
    small = SleepTier(1, 200, 3000, 0.5, 0.3)
    rig = Rig(*(model(name, 3000, sleep=(small,)) for name in "abc"), devices=(gpu(), ram(10_000)), early_sleep_s=None)
    for name, count in (("a", 5), ("b", 1), ("c", 3)):
        rig.warms(name)
        for _ in range(count):
            rig.ends(rig.holds(name))
        falls_asleep(rig, name)
    stopped: list[str] = []
    for _ in range(3):
        stopped += names(rig.does(MemoryMeasured(rig.now, "ram", 11_000, {"a": 3000, "b": 3000, "c": 3000})), Stop)

    assert stopped == ["b"]


def test_levels_that_an_instance_must_not_use_are_left_out() -> None:
    """Until it is started anew."""
    rig = Rig(model("a", 6000, sleep=(LEVEL_1, LEVEL_2)), model("b", 6000), early_sleep_s=None)
    rig.asks("a")
    rig.is_ready("a", unfit_levels=(1,), why="level 1 loses its adapters")
    rig.ends(rig.last)
    rig.waits(60)

    assert [each.level for each in only(rig.asks("b"), Sleep)] == [2]
    assert [each.text for each in rig.told if each.kind == "sleep_limited"] == ["level 1 loses its adapters"]


# ------------------------------------------------------------------------------------------------ falling asleep by itself


def dozer() -> Rig:
    rig = Rig(model("a", 6000, doze=SleepTier(1, 300, 0, 0.0, 0.5), ttl_s=100.0), model("b", 9000))
    rig.warms("a")
    return rig


def test_the_room_of_an_engine_that_fell_asleep_by_itself_goes_to_others() -> None:
    """Nobody told it to, nobody has to leave."""
    rig = dozer()
    rig.reports("a", State.ASLEEP, level=1, measured_mib={GPU: 280})
    assert rig.booked() == {"a": 280}

    assert names(rig.asks("b")) == ["b"]


def test_an_engine_that_fell_asleep_by_itself_is_woken_with_its_room_booked() -> None:
    """And its idle time goes on from its last request."""
    rig = dozer()
    rig.reports("a", State.ASLEEP, level=1)
    assert [(each.level, rig.booked()) for each in only(rig.asks("a"), Wake)] == [(1, {"a": 6000})]
    rig.cancels(rig.last)
    rig.is_ready("a")
    rig.reports("a", State.ASLEEP, level=1)

    assert names(rig.waits(101), Stop) == ["a"]


def test_it_is_never_put_to_sleep_by_order() -> None:
    """It has no call for that."""
    rig = dozer()
    assert [each.code for each in only(rig.wishes("a", Operation.SLEEP), Refuse)] == ["cannot_sleep"]
    rig.waits(50)

    assert names(rig.asks("b"), Stop) == ["a"]


def test_word_of_a_doze_that_a_request_has_ended_is_not_believed() -> None:
    """Its room is in use."""
    rig = dozer()
    rig.holds("a")
    rig.reports("a", State.ASLEEP, level=1)

    assert (rig.state("a"), rig.booked()) == (State.READY, {"a": 6000})


def test_a_pinned_engine_keeps_its_room_while_it_dozes() -> None:
    """Or others would have taken it when it is asked for."""
    rig = dozer()
    rig.wishes("a", Operation.PIN)
    rig.reports("a", State.ASLEEP, level=1)

    assert rig.booked() == {"a": 6000}


def test_a_suspect_engine_is_not_asleep() -> None:
    """A request was lost on it: whether it lives is being looked at."""
    rig = dozer()
    rig.loses(rig.holds("a"))
    rig.cancels(rig.last)
    rig.reports("a", State.ASLEEP, level=1)

    assert rig.state("a") is State.READY


# ---------------------------------------------------------------------------------------------------------- rehearsals


def test_a_first_sleep_is_rehearsed_when_nobody_waits_and_undone_at_once() -> None:
    """It is slow, and measures what a sleeper costs; the next victim need not wait for that."""
    rig = crowded(early_sleep_s=20.0)
    rig.warms("a")
    assert names(rig.waits(20), Sleep) == ["a"]
    assert names(rig.is_asleep("a", took_s=3.0, measured_mib={GPU: 250}), Wake) == ["a"]
    rig.is_ready("a", took_s=0.4)

    assert rig.state("a") is State.READY
    assert [(tier.level, tier.residue_mib, tier.sleep_s) for tier in rig.scheduler.learned_tiers("a")] == [(1, 250, 3.0)]
    assert rig.waits(600) == []


def test_a_rehearsal_does_not_prolong_a_models_idle_time() -> None:
    """Its ttl counts from its last request."""
    rig = Rig(sleeper("a", ttl_s=60.0), sleeper("b"), early_sleep_s=20.0)
    rig.warms("a")
    assert names(rig.waits(20), Sleep) == ["a"]
    rig.waits(5)
    assert names(rig.is_asleep("a", took_s=5.0), Wake) == ["a"]
    rig.is_ready("a")

    assert names(rig.waits(36), Stop) == ["a"]


def test_nothing_is_rehearsed_where_everybody_fits() -> None:
    """There will never be a victim."""
    rig = Rig(sleeper("a", 4000), sleeper("b", 4000), early_sleep_s=20.0)
    rig.warms("a")

    assert rig.waits(600) == []


def test_nothing_is_rehearsed_without_host_ram_for_a_second_copy() -> None:
    """That RAM is for a sleeper that somebody waits for."""
    rig = crowded(host_mib=2 * COPY - 1, early_sleep_s=20.0, ram_floor_mib=0)
    rig.warms("a")

    assert rig.waits(600) == []


def test_a_rehearsed_sleeper_stays_asleep_when_somebody_came_meanwhile() -> None:
    """It leaves its room to them."""
    rig = crowded(early_sleep_s=20.0)
    rig.warms("a")
    rig.waits(20)
    rig.asks("b")

    assert names(rig.is_asleep("a", took_s=3.0), Start) == ["b"]


def test_an_operators_sleep_during_a_rehearsal_lasts() -> None:
    """It is not undone as a rehearsal would be; neither when it comes while the wake is still waited for."""
    rig = crowded(early_sleep_s=20.0)
    rig.warms("a")
    rig.waits(20)
    rig.wishes("a", Operation.SLEEP)
    done = rig.is_asleep("a", took_s=3.0)
    assert only(done, Done)

    assert only(done, Wake) == []
    assert rig.waits(600) == []


def test_a_rehearsal_that_ends_its_engine_counts_as_a_fault() -> None:
    """Better now than while somebody waits; twice, and the model stops from then on."""
    rig = crowded(early_sleep_s=20.0)
    for _ in range(2):
        rig.warms("a")
        assert names(rig.waits(20), Sleep) == ["a"]
        rig.fails("a", Cause.SLEEP_FAILED)

    assert rig.entry("a").sleep_off
    rig.warms("a")
    assert rig.waits(600) == []


def test_an_engine_ended_over_a_request_is_no_sleep_fault() -> None:
    """It was told to sleep when the request broke, and had stalled before that."""
    rig = crowded(patience_s=0.0)
    rig.warms("a")
    rig.asks("a")
    request = rig.last
    rig.asks("b")
    rig.waits(120)
    assert names(rig.ends(request), Sleep) == ["a"]
    rig.fails("a", Cause.STALLED)

    assert not rig.entry("a").sleep_faults


def test_what_a_sleeper_is_measured_to_hold_is_shown() -> None:
    """Not only booked."""
    rig = crowded()
    rig.warms("a")
    falls_asleep(rig, "a", measured_mib={GPU: 600})
    rig.measures(1200, a=1200)
    (shown,) = next(model for model in rig.scheduler.view(rig.now).models if model.id == "a").instances

    assert shown.measured_mib == {GPU: 1200}
