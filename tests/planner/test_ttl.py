"""How long idle models should stay: against fixed times, and against knowing it all."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from greenroom.core.facts import Device, Model, Policy, Setup
from greenroom.core.idle import Gaps
from greenroom.ledger.rows import RequestRow, TransitionRow
from greenroom.planner.ttl import Choice, Use, auto_ttl, best_ttl, clairvoyant, fixed_ttl, gaps_of, histogram, round_up, ttl_advice, words

UP_S = 10.0
WORTH_S = Policy().ttl_worth * UP_S
DAYS = 4
FIXED_S = (15, 30, 60, 120, 180, 240, 300, 450, 600, 900, 1200, 1800, 3600, 7200)


def use_of(gaps: list[float], need_mib: int = 1024) -> Use:
    return Use("m", tuple(gaps), 0.0, need_mib, UP_S, sum(gaps))


def bursty(seed: int) -> Use:
    """Sessions of some minutes with a request every few seconds, then nothing for the better part of an hour."""
    rng, gaps = random.Random(f"bursty {seed}"), []
    while sum(gaps) < DAYS * 86400:
        gaps += [rng.expovariate(1 / 8) for _ in range(rng.randint(3, 25))]
        gaps.append(rng.expovariate(1 / 2400) + 600)
    return use_of(gaps)


def steady(seed: int) -> Use:
    """A job every four minutes or so."""
    rng = random.Random(f"steady {seed}")
    return use_of([rng.lognormvariate(0, 0.2) * 240 for _ in range(DAYS * 360)])


SEEDS = range(5)


@pytest.mark.parametrize("make", [bursty, steady])
def test_auto_costs_hardly_more_than_the_best_choice_in_hindsight(make: object) -> None:
    """Within 5 % of the one time that, all gaps known, costs least; it learns as it goes, its first guesses included."""
    for seed in SEEDS:
        use = make(seed)  # type: ignore[operator]
        assert auto_ttl(use, Policy()).cost_s(WORTH_S) <= 1.05 * best_ttl(use, WORTH_S).cost_s(WORTH_S)


def test_on_steady_use_auto_does_what_a_clairvoyant_would() -> None:
    """Within 5 % of one who knows each gap."""
    for seed in SEEDS:
        use = steady(seed)
        assert auto_ttl(use, Policy()).cost_s(WORTH_S) <= 1.05 * clairvoyant(use, WORTH_S).cost_s(WORTH_S)


def test_auto_saves_cold_starts_at_equal_memory_held() -> None:
    """A bursty and a steady model together, against the best one time for both that holds no more memory: 30 % fewer."""
    for seed in SEEDS:
        uses = (bursty(seed), steady(seed))
        auto = [auto_ttl(use, Policy()) for use in uses]
        held_s = sum(choice.idle_s for choice in auto)
        rivals = [[fixed_ttl(use, float(ttl_s)) for use in uses] for ttl_s in FIXED_S]
        equal = [rival for rival in rivals if sum(choice.idle_s for choice in rival) <= 1.001 * held_s]
        best = min(sum(choice.cold_starts for choice in rival) for rival in equal)
        assert sum(choice.cold_starts for choice in auto) <= 0.7 * best


def test_a_percentile_of_the_gaps_would_keep_through_the_pauses() -> None:
    """Why auto is not the 95th percentile: a twentieth of the gaps of a bursty model are its pauses."""
    use = bursty(0)
    p95_s = sorted(use.gaps_s)[int(0.95 * len(use.gaps_s))]
    assert fixed_ttl(use, p95_s).cost_s(WORTH_S) > 2 * auto_ttl(use, Policy()).cost_s(WORTH_S)


# ---------------------------------------------------------------------------------------------------- advice


def row(number: int, at: float, duration_s: float = 1.0) -> RequestRow:
    return RequestRow(number, at, "sql", 1, "", "interactive", "", duration_s=duration_s, start="hot")


def rows_of(use: Use) -> list[RequestRow]:
    rows, at = [row(0, 0.0)], 1.0
    for number, gap in enumerate(use.gaps_s, start=1):
        at += gap
        rows.append(row(number, at))
        at += 1.0
    return rows


def setup_with(ttl_s: float | None) -> Setup:
    return Setup((Device("gpu0", "gpu", 80 * 1024),), (Model("sql", ("gpu0",), 7 * 1024, up_s=UP_S, ttl_s=ttl_s),))


def test_the_advice_lies_in_the_valley_between_bursts_and_pauses() -> None:
    """With the present choice, others and auto beside it, and why."""
    (one,) = ttl_advice(setup_with(300.0), rows_of(bursty(1)), [])
    assert one.enough
    assert 30.0 <= (one.suggested_s or 0) <= 120.0
    assert "or not for" in one.why
    by_name: dict[str, Choice] = {choice.name: choice for choice in one.table}
    assert by_name["5 min"].remark == "now"
    assert by_name["auto"].cold_starts <= by_name["30 s"].cold_starts
    suggested = next(choice for choice in one.table if choice.remark == "suggested")
    assert suggested.gib_hours_day < 0.7 * by_name["5 min"].gib_hours_day
    assert suggested.cold_starts <= 1.1 * by_name["5 min"].cold_starts
    assert sum(count for _, count in one.bins) == one.gaps


def test_who_is_refused_again_and_again_uses_nothing() -> None:
    """Retries each second during one long gap are neither gaps nor use; what a peer answered is no use of the engine here."""
    rows = rows_of(use_of([1000.0] * 29))
    refusal = replace(row(1000, 1500.0, 0.0), generation=0, start="", outcome="refused", status=503, code="backing_off")
    refused = [replace(refusal, request=1000 + n, at=1500.0 + n) for n in range(900)]
    far = replace(row(5000, 2700.0, 60.0), generation=0, code="peer:other")
    (calm,), (stormy,) = ttl_advice(setup_with(None), rows, []), ttl_advice(setup_with(None), [*rows, *refused, far], [])
    assert (calm.gaps, stormy) == (29, calm)
    assert ttl_advice(setup_with(None), [*refused, far], []) == []


def test_what_nobody_wants_the_room_of_may_stay_for_ever() -> None:
    """Without an eviction nothing is gained by stopping it, and it is no advice; with one it is.  Pinned models get none at all."""
    rows, setup = rows_of(bursty(1)), setup_with(None)
    (calm,) = ttl_advice(setup, rows, [])
    assert (calm.enough, calm.matters) == (True, False)
    assert calm.why.endswith("nobody lacked its room, and so it may as well stay")
    left = TransitionRow(rows[3].at, "sql", 1, "stop", ("gpu0",), 1.0, True, evicted_for="other")
    (wanted,) = ttl_advice(setup, rows, [left])
    assert (wanted.matters, "nobody lacked" in wanted.why) == (True, False)
    pinned = replace(setup, models=(replace(setup.models[0], pinned=True),))
    assert ttl_advice(pinned, rows, [left]) == []


def test_a_time_of_nothing_is_written_as_a_second() -> None:
    """In a configuration 0 means never."""
    rows = [row(n, n * 5000.0) for n in range(20)]
    (one,) = ttl_advice(setup_with(300.0), rows, [])
    assert one.suggested_s == 1.0


def test_few_gaps_say_nothing_yet() -> None:
    """No advice from nine of them."""
    (one,) = ttl_advice(setup_with(None), [row(n, n * 100.0) for n in range(9)], [])
    assert (one.enough, one.suggested_s) == (False, None)
    assert "not enough seen yet" in one.why


def test_a_gap_begins_when_all_have_ended() -> None:
    """A long request beside short ones leaves no gap."""
    assert gaps_of([row(1, 0.0, 50.0), row(2, 10.0), row(3, 20.0), row(4, 60.0), row(5, 60.5), row(6, 62.0)]) == (10.0, 0.5)


def test_figures_are_written_as_people_would() -> None:
    """Rounded up, so that no gap is lost."""
    assert [round_up(s) for s in (0.0, 0.3, 45.3, 46.0, 362.0, 20000.0)] == [0.0, 1.0, 45.0, 60.0, 420.0, 20000.0]
    assert [words(s) for s in (None, 0.0, 45.0, 90.0, 300.0, 7200.0)] == ["never", "0 s", "45 s", "1.5 min", "5 min", "2 h"]
    assert histogram(Gaps()) == ()
