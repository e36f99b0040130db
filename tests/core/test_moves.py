"""Gates, departures, arrivals, and what is learned on the way."""

from __future__ import annotations

import time

import pytest

from greenroom.core.facts import Admit, Cut, Group, Operation, Start, State, Stop
from greenroom.core.words import gib, span

from .rig import GPU, LEVEL_1, Rig, gpu, model, names, only, ram


def test_a_gate_closes_for_new_requests_and_opens_the_way_when_the_last_has_ended() -> None:
    """Requests in flight are never cut by a swap."""
    rig = Rig(model("a", 6000), model("b", 6000))
    request = rig.holds("a")
    rig.asks("b")
    assert rig.waits(60) == []
    assert (rig.state("a"), rig.asks("a")) == (State.DRAINING, [])
    assert names(rig.ends(request), Stop) == ["a"]

    assert names(rig.is_stopped("a")) == ["b"]


def test_a_gate_reopens_when_nobody_wants_the_room_any_more() -> None:
    """Who queued at the gate is served at once."""
    rig = Rig(model("a", 6000), model("b", 6000))
    rig.holds("a")
    rig.asks("b")
    visitor = rig.last
    rig.waits(60)
    rig.asks("a")

    assert [rig.last] == [each.request for each in only(rig.cancels(visitor), Admit)]


def test_an_idle_victim_serves_while_another_one_drains_and_then_drains_too() -> None:
    """It is not shut for minutes because of another's long answer; and it cannot keep the target out for ever."""
    rig = Rig(model("a", 5000), model("b", 5000), model("big", 10_000))
    slow = rig.holds("a")
    rig.warms("b")
    rig.asks("big")
    rig.waits(60)
    assert [rig.state("a"), rig.state("b")] == [State.DRAINING, State.READY]
    assert [each.start for each in only(rig.asks("b"), Admit)] == ["hot"]
    served = rig.last
    rig.ends(slow)
    assert (rig.state("b"), only(rig.asks("b"), Admit)) == (State.DRAINING, [])

    assert {"a", "b"} == set(names(rig.ends(served), Stop))


def test_a_drain_that_lasts_too_long_is_cut() -> None:
    """drain_timeout_s, counted from the gate; None waits for ever."""
    rig = Rig(model("a", 6000), model("b", 6000), drain_timeout_s=10.0)
    request = rig.holds("a")
    rig.asks("b")

    assert [request] == [each.request for each in only(rig.waits(60), Cut)]


def test_a_silent_connection_does_not_keep_a_model() -> None:
    """It is told to end, once, when its room is needed."""
    rig = Rig(model("a", 6000), model("b", 6000))
    request = rig.holds("a")
    rig.falls_silent(request)
    rig.asks("b")

    assert [request] == [each.request for each in only(rig.waits(60), Cut)]
    assert names(rig.ends(request), Stop) == ["a"]


def test_victims_that_made_too_little_room_lead_to_another_look() -> None:
    """Memory leaked while they left: the lanes are free again, and the target waits or is refused, never overbooked."""
    rig = Rig(model("a", 6000), model("b", 8000))
    rig.warms("a")
    rig.waits(60)
    assert names(rig.asks("b"), Stop) == ["a"]
    rig.is_stopped("a", leaked_mib=4000)

    assert (rig.stage.moves, rig.booked()) == ([], {})


def test_parallel_is_the_most_in_flight_and_arrival_the_order() -> None:
    """Two slots: the third waits for the first end."""
    rig = Rig(model("a", parallel=2))
    first = rig.holds("a")
    rig.asks("a")
    assert rig.asks("a") == []

    assert [rig.last] == [each.request for each in only(rig.ends(first), Admit)]


def test_what_a_request_waited_for_is_told() -> None:
    """cold for a start, wake for a wake, hot for those who found it ready."""
    rig = Rig(model("a", sleep=(LEVEL_1,)))
    rig.asks("a")
    rig.now += 2
    starts = [each.start for each in only(rig.is_ready("a"), Admit)]
    starts += [each.start for each in only(rig.asks("a"), Admit)]
    rig.ends(1)
    rig.ends(2)
    rig.wishes("a", Operation.SLEEP)
    rig.is_asleep("a")
    rig.asks("a")
    rig.now += 1
    starts += [each.start for each in only(rig.is_ready("a"), Admit)]

    assert starts == ["cold", "hot", "wake"]


# ------------------------------------------------------------------------------------------------------------ learning


def test_more_than_was_booked_is_booked_at_once() -> None:
    """Measured beats declared upward; the next start books it too."""
    rig = Rig(model("a", 1000))
    rig.warms("a")
    rig.measures(1500, a=1500)

    assert (rig.booked(), rig.entry("a").need_mib, rig.entry("a").need_source) == ({"a": 1500}, 1500, "measured")


def test_less_than_was_booked_is_believed_once_it_is_stable() -> None:
    """After three requests and ten seconds: the peak and 5 %."""
    rig = Rig(model("a", 5000))
    for _ in range(3):
        rig.warms("a") if rig.state("a") is State.STOPPED else rig.ends(rig.holds("a"))
        rig.measures(2000, a=2000)
    assert rig.booked() == {"a": 5000}
    rig.waits(10)
    rig.measures(2000, a=2000)

    assert rig.booked() == {"a": 2101}


def test_the_floor_is_never_learned_away() -> None:
    """What an engine was told to take is not free because it was not seen in use."""
    rig = Rig(model("a", 5000, need_floor_mib=4000))
    for _ in range(3):
        rig.warms("a") if rig.state("a") is State.STOPPED else rig.ends(rig.holds("a"))
    rig.measures(2000, a=2000)
    rig.waits(10)
    rig.measures(2000, a=2000)

    assert rig.booked() == {"a": 4000}


def test_an_unknown_size_becomes_known_and_then_shares_the_device() -> None:
    """Whole device first; after it was measured another model fits beside it, and nobody is stopped for it."""
    rig = Rig(model("a", None), model("b", 3000))
    for _ in range(3):
        rig.warms("a") if rig.state("a") is State.STOPPED else rig.ends(rig.holds("a"))
        rig.measures(4000, a=4000)
    assert rig.booked() == {"a": 10_000}
    rig.waits(10)
    rig.measures(4000, a=4000)
    assert (rig.entry("a").need_mib, rig.entry("a").need_source) == (4201, "measured")

    assert names(rig.asks("b"), Start) == ["b"]


def test_host_ram_is_not_mistaken_for_the_need_on_the_card() -> None:
    """A model that holds more RAM than GPU memory, and grows a little on the GPU."""
    rig = Rig(model("a", 1000, host_mib=6000), devices=(gpu(), ram(16_000)))
    rig.warms("a")
    rig.measures(1100, a=1100)

    assert (rig.entry("a").need_mib, rig.booked("ram")) == (1100, {"a": 6000})


def test_booked_host_ram_is_not_counted_again_as_outside() -> None:
    """A GPU engine's RAM is in the book; only what it holds beyond that is others' to the book."""
    rig = Rig(model("a", 1000, host_mib=6000), devices=(gpu(), ram(16_000)))
    rig.warms("a")
    rig.measures(7500, device="ram", a=7000)

    assert rig.stage.book.pools["ram"].outside_mib == 1500


def test_what_one_request_takes_of_host_ram_is_not_what_the_model_needs() -> None:
    """The reservation follows the peak; the next start books what it did, and the peak's room comes back by itself."""
    rig = Rig(model("a", 54, "ram", base_mib=54), devices=(ram(160),))
    request = rig.holds("a")
    rig.measures(150, device="ram", a=150)
    assert (rig.booked("ram"), rig.entry("a").need_mib) == ({"a": 150}, 54)

    rig.ends(request)
    rig.waits(5)
    rig.measures(50, device="ram", a=50)
    rig.waits(11)
    rig.measures(50, device="ram", a=50)
    rig.waits(11)
    rig.measures(50, device="ram", a=50)
    assert rig.booked("ram") == {"a": 53}


def test_what_lasts_on_host_ram_is_what_the_next_start_books() -> None:
    """Seen while nothing is in flight: that is what it holds."""
    rig = Rig(model("a", 54, "ram", base_mib=54), devices=(ram(160),))
    rig.warms("a")
    rig.measures(113, device="ram", a=113)

    assert (rig.entry("a").need_mib, rig.entry("a").need_source) == (113, "measured")


def test_a_learned_figure_never_rules_out_what_was_declared() -> None:
    """It once held more host RAM than can be free: it is started with all there is, not refused."""
    rig = Rig(model("a", 400, "ram", base_mib=54, need_source="measured"), devices=(ram(160),))
    orders = rig.asks("a")

    assert [dict(start.reserved_mib) for start in only(orders, Start)] == [{"ram": 160}]


def test_a_growing_engine_is_told_of_once_a_tenth() -> None:
    """Ten samples, each a little more: one sentence, not ten."""
    rig = Rig(model("a", 1000))
    rig.warms("a")
    for more in range(1, 11):
        rig.measures(1000 + 15 * more, a=1000 + 15 * more)

    assert sum(tell.kind == "raised" for tell in rig.told) == 1


def test_a_start_names_who_asked_for_it() -> None:
    """The first link of the chain of causes: a request, an operator, a pin."""
    rig = Rig(model("a"), model("b"), model("c", pinned=True))
    rig.begins()
    rig.is_ready("c")
    rig.asks("a")
    rig.is_ready("a")
    rig.wishes("b", Operation.LOAD)

    assert [tell.text.split(" on ")[0] for tell in rig.told if tell.kind == "starting"] == [
        "starting for its pin",
        "starting for a request",
        "starting for an operator",
    ]


def test_measured_times_are_learned() -> None:
    """Start and stop, blended with share 0.3."""
    rig = Rig(model("a", up_s=10.0))
    for took_s in (4.0, 6.0):
        rig.asks("a")
        rig.is_ready("a", took_s=took_s)
        rig.ends(rig.last)
        rig.wishes("a", Operation.UNLOAD)
        rig.is_stopped("a", took_s=1.0)

    assert (pytest.approx(4.6), 1.0) == rig.scheduler.learned("a")[1:]  # type: ignore[index]


# -------------------------------------------------------------------------------------------- who waits, what is claimed


def test_a_client_does_not_inherit_the_age_of_a_preload() -> None:
    """A preload waited for minutes for room; the first client's request is new, not late."""
    rig = Rig(model("there", 9000), model("pre", 5000, preload=True))
    rig.asks("there")
    rig.begins()
    rig.is_ready("there")
    rig.waits(200)
    rig.asks("pre")

    assert rig.now == rig.entry("pre").queue.first().arrived_at


def test_a_preload_that_never_finds_room_is_dropped() -> None:
    """After five minutes nobody waits any more, and nobody was evicted for it."""
    rig = Rig(model("there", 9000), model("pre", 5000, preload=True))
    rig.asks("there")
    rig.begins()
    rig.waits(2)
    rig.is_ready("there")
    rig.waits(400)

    assert (len(rig.stage.waiting), rig.state("there")) == (0, State.READY)


def test_a_claim_ends_with_the_one_who_made_it() -> None:
    """The late one gave up: whoever fits starts at once."""
    rig = Rig(model("busy", 6000), model("late", 6000), model("small", 3000, up_s=30.0), quantum_factor=1000.0)
    rig.holds("busy")
    rig.asks("late")
    late = rig.last
    rig.waits(100)
    assert rig.stage.claims
    rig.cancels(late)

    assert names(rig.asks("small")) == ["small"]


def test_who_waits_is_ranked_by_the_oldest_that_is_still_there() -> None:
    """The oldest client left: the model no longer counts as the one that waits longest."""
    rig = Rig(model("busy", 9000), model("a", 5000), model("b", 5000))
    rig.holds("busy")
    rig.asks("a")
    gone = rig.last
    rig.now += 1
    rig.asks("b")
    rig.now += 1
    rig.asks("a")
    rig.cancels(gone)

    assert [entry.id for entry in rig.stage.waiting.oldest()] == ["b", "a"]


def test_a_second_start_beside_a_lone_one_waits() -> None:
    """An engine that profiles memory at start has its device for itself."""
    lone = Rig(model("a", 1000, lone_start=True), model("b"), lanes=2)
    both = Rig(model("a", 1000), model("b"), lanes=2)

    assert tuple(names([*rig.asks("a"), *rig.asks("b")]) for rig in (lone, both)) == (["a"], ["a", "b"])


def test_rivals_are_exclusive_across_devices() -> None:
    """Groups are above the budget: also on two cards with room for both."""
    models = (model("a", 1000, "gpu0"), model("b", 1000, "gpu1"))
    rig = Rig(*models, devices=(gpu("gpu0"), gpu("gpu1")), groups=(Group("g", frozenset("ab")),))
    rig.warms("a")
    rig.waits(60)

    assert names(rig.asks("b"), Stop) == ["a"]


# ------------------------------------------------------------------------------------------------------------- looking


def test_looking_changes_nothing() -> None:
    """Two schedulers, one of them looked at all the time: the same orders."""

    def orders(looks: bool) -> list[object]:
        rig = Rig(*(model(name, 4000) for name in "abcd"))
        said: list[object] = []
        for name in "abcdabcd":
            said += rig.asks(name)
            if looks:
                rig.scheduler.view(rig.now + 3)
                rig.scheduler.progress(rig.last, rig.now + 3)
            said += rig.waits(1)
            for other in "abcd":
                if rig.state(other) is State.STARTING:
                    said += rig.is_ready(other)
                elif rig.state(other) is State.STOPPING:
                    said += rig.is_stopped(other)
        return said

    assert orders(False) == orders(True)


def test_a_thousand_models_are_looked_at_in_no_time() -> None:
    """A hundred of them resident, two hundred waiting: well under 50 ms on an idle machine."""
    cards = [gpu(f"gpu{n}", 22_500) for n in range(4)]
    models = [model(f"m{n}", 900, *(card.id for card in cards)) for n in range(1000)]
    rig = Rig(*models, devices=cards)
    for n in range(100):
        orders = rig.asks(f"m{n}")
        while starts := names(orders):
            orders = [order for name in starts for order in rig.is_ready(name)]
    for n in range(100, 300):
        rig.asks(f"m{n}")
    took_s = []
    for _ in range(5):
        began = time.perf_counter()
        view = rig.scheduler.view(rig.now)
        took_s.append(time.perf_counter() - began)

    assert (len(view.models), sum(one.state is State.READY for one in view.models)) == (1000, 100)
    assert min(took_s) < 0.05


def test_the_expected_wait_counts_what_others_are_owed() -> None:
    """No room but a busy resident's: patience and its quantum, then the start."""
    rig = Rig(model("busy", 9000, up_s=10.0), model("a", 5000, up_s=10.0))
    rig.holds("busy")
    rig.asks("a")
    eta = next(one.eta_s for one in rig.scheduler.view(rig.now).models if one.id == "a")

    assert pytest.approx(2 * (2.0 + 0.2) + 10.0, abs=2.0) == eta


@pytest.mark.parametrize(("mib", "text"), [(900, "900 MiB"), (2048, "2.0 GiB")])
def test_sizes_for_people(mib: int, text: str) -> None:
    """GiB from one on."""
    assert text == gib(mib)


@pytest.mark.parametrize(("seconds", "text"), [(0.04, "40 ms"), (1.5, "1.5 s"), (61, "61 s"), (600, "10 min"), (36_000, "10 h")])
def test_times_for_people(seconds: float, text: str) -> None:
    """With as many digits as matter."""
    assert text == span(seconds)


def test_the_device_view_names_who_holds_its_lane() -> None:
    """The target of the move, until it is ready."""
    rig = Rig(model("a"))
    rig.asks("a")
    before = rig.scheduler.view(rig.now).devices[0].lane
    rig.is_ready("a")

    assert (before, rig.scheduler.view(rig.now).devices[0].lane, rig.scheduler.view(rig.now).devices[0].id) == ("a", "", GPU)
