"""`ttl: auto`: how long an idle model stays, found from its own gaps."""

from __future__ import annotations

import random
from typing import Any

import pytest

from greenroom.core.facts import Outcome, RequestFinished, State, Stop
from greenroom.core.idle import BINS, Gaps, bin_of, edge_s
from greenroom.core.orders import LEAST_LOOK_S

from .rig import LEVEL_1, Rig, model

UP_S = 10.0
WORTH_S = 600.0


def test_a_gap_falls_below_the_edge_of_its_bin() -> None:
    """Half an octave wide, whatever the gap."""
    for gap_s in (0.002, 0.5, 1.0, 1.01, 60.0, 86400.0):
        number = bin_of(gap_s)
        assert edge_s(number - 1) < gap_s <= edge_s(number) * (1 + 1e-9)
    assert (bin_of(0.0), bin_of(1e-9), bin_of(1e12)) == (0, 0, BINS - 1)


def test_a_stay_covers_the_burst_and_not_the_night() -> None:
    """Gaps of seconds and gaps of hours: it stays through the first ones only."""
    gaps = Gaps.of([5.0] * 40 + [7200.0] * 4)
    assert 5.0 <= gaps.best_stay_s(WORTH_S) < 10.0
    assert gaps.percentile_s(95) > 7200.0  # what a plain percentile would do


def test_a_stay_covers_every_gap_that_is_cheaper_than_a_start() -> None:
    """Steady use is never let go, and gaps dearer than a start are not waited for at all."""
    assert Gaps.of([300.0, 280.0, 330.0] * 5).best_stay_s(WORTH_S) >= 330.0
    assert Gaps.of([3000.0] * 15).best_stay_s(WORTH_S) == 0.0


def test_the_stay_is_the_cheapest_there_is() -> None:
    """Compared with the cost of every edge."""
    rng = random.Random(5)
    for _ in range(50):
        gaps = Gaps.of([rng.lognormvariate(rng.choice((1, 4, 8)), 1.0) for _ in range(rng.randint(1, 60))])
        least = min(gaps.cost_s(stay_s, WORTH_S) for stay_s in (0.0, *map(edge_s, range(BINS))))
        assert gaps.cost_s(gaps.best_stay_s(WORTH_S), WORTH_S) == pytest.approx(least)


def test_old_gaps_count_less() -> None:
    """After some days of another use, that use alone says how long it stays."""
    gaps = Gaps()
    for n in range(50):
        gaps.add(2000.0, n * 60.0)
    assert gaps.best_stay_s(WORTH_S) == 0.0
    for n in range(50):
        gaps.add(100.0, 7 * 86400.0 + n * 60.0)
    assert gaps.best_stay_s(WORTH_S) >= 100.0


def used(rig: Rig, name: str, *, every_s: float, times: int) -> None:
    for _ in range(times):
        rig.asks(name)
        rig.waits(1.0)
        rig.ends(rig.last)
        rig.waits(every_s)


def auto(**more: Any) -> Rig:
    rig = Rig(model("a", 6000, up_s=UP_S, ttl_auto=True, **more), model("b", 6000, up_s=UP_S))
    rig.asks("a")
    rig.is_ready("a", took_s=UP_S)
    rig.ends(rig.last)
    return rig


def wanted(rig: Rig) -> None:
    """`b` was used lately and lacks the room: what is kept is kept at somebody's expense."""
    rig.entry("b").costs.hit(rig.now, 1, rig.stage.policy)


def idle_until_stopped(rig: Rig, most_s: float, step_s: float = 1.0) -> float:
    """Seconds until `a` is told to stop while `b` is wanted all the time."""
    for n in range(int(most_s / step_s)):
        wanted(rig)
        if any(isinstance(action, Stop) for action in rig.waits(step_s)):
            return (n + 1) * step_s
    return most_s


def test_without_gaps_it_stays_as_long_as_a_start_is_worth() -> None:
    """Ten seconds of waiting are worth ten minutes of idle stay."""
    assert idle_until_stopped(auto(), 700.0) == pytest.approx(WORTH_S, abs=2.0)


def test_with_ten_gaps_they_decide() -> None:
    """A model asked every two seconds goes soon after its burst: at the next look at the latest."""
    rig = auto()
    used(rig, "a", every_s=2.0, times=12)
    assert idle_until_stopped(rig, 700.0) <= LEAST_LOOK_S


def test_who_is_refused_does_not_use_it() -> None:
    """A quarter of an hour of retries against a start that fails leaves the stay as its uses made it."""
    rig = auto()
    used(rig, "a", every_s=5.0, times=12)
    rig.fails("a")
    for _ in range(900):
        rig.waits(1.0)
        rig.asks("a")
        if rig.state("a") is State.STARTING:
            rig.fails("a")
    assert rig.entry("a").failures > 5
    assert rig.entry("a").costs.idle.seen == 13
    assert max(rig.entry("a").costs.gaps) == 6.0
    assert rig.scheduler.stay_s("a") == pytest.approx(8.0)


def test_clients_that_give_up_end_an_idle_time_once() -> None:
    """Another has its room: everybody who asks for it meanwhile and leaves belongs to the same use."""
    rig = auto()
    rig.asks("b")
    rig.waits(30.0)
    rig.is_stopped("a")
    rig.is_ready("b")
    for _ in range(20):
        rig.asks("a")
        rig.waits(1.0)
        rig.cancels(rig.last)
        rig.waits(1.0)
    assert rig.state("a") is State.STOPPED
    assert list(rig.entry("a").costs.gaps) == [30.0]


def test_the_first_use_after_a_crash_ends_no_idle_time() -> None:
    """It was in use when its engine ended: the time before that was none."""
    rig = Rig(model("a", 6000, up_s=UP_S, ttl_auto=True))
    rig.warms("a")
    rig.waits(10.0)
    rig.asks("a")
    gaps = rig.entry("a").costs.gaps
    assert list(gaps) == [10.0]
    rig.waits(500.0)
    rig.fails("a")
    rig.does(RequestFinished(rig.now, rig.last, Outcome.ENGINE_BROKE))
    rig.waits(100.0)
    rig.asks("a")
    assert (rig.state("a"), list(gaps)) == (State.STARTING, [10.0])


def test_nobody_is_unloaded_into_emptiness() -> None:
    """As long as nobody lacks its room it stays; once somebody does, it goes at the next look."""
    rig = auto()
    used(rig, "a", every_s=2.0, times=12)
    assert not any(isinstance(action, Stop) for action in rig.waits(7200.0))
    assert rig.state("a") is State.READY
    assert rig.scheduler.present("a", rig.now)[0] == "Ready, idle for 2 h; it stays until somebody needs its room."
    assert idle_until_stopped(rig, 120.0) <= 60.0


def test_a_sleeper_is_left_to_those_who_need_its_room() -> None:
    """It holds little, and gives it back when that is not enough."""
    rig = auto(sleep_after_s=5.0, sleep=(LEVEL_1,))
    rig.waits(6.0)
    rig.is_asleep("a")
    for _ in range(100):
        wanted(rig)
        rig.waits(60.0)
    assert rig.state("a") is State.ASLEEP
