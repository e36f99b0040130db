"""What is learned of one model, and how long an idle one is kept."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from greenroom.core.costs import Costs, blend
from greenroom.core.facts import Model, Policy, SleepTier

POLICY = Policy()
MODEL = Model("m", ("gpu0",), 1000, up_s=30.0, down_s=1.0)
TIER = SleepTier(1, 200, 3000, 0.5, 0.3)


def with_gaps(*gaps: float) -> Costs:
    costs = Costs()
    costs.gaps.extend(gaps)
    return costs


def value(stay: float, gaps: list[float], price_s: float, waiting: int) -> float:
    """What a stay is expected to gain: the rule as it is written down."""
    within = sum(gap + POLICY.hold_slack_s <= stay + 1e-12 for gap in gaps)
    expected_wait = sum(gap if gap + POLICY.hold_slack_s <= stay + 1e-12 else stay for gap in gaps) / len(gaps)
    return within / len(gaps) * POLICY.hold_gain * price_s - waiting * expected_wait


gaps_seen = st.lists(st.floats(0.0, 20.0), min_size=1, max_size=16)


@given(gaps_seen, st.floats(0.5, 200.0), st.integers(1, 20))
def test_the_stay_is_the_best_of_all_that_were_tried(gaps: list[float], price_s: float, waiting: int) -> None:
    """Against every gap seen as a candidate: none within the cap is worth more, and nothing is better than a loss."""
    found = with_gaps(*gaps).keep_for(price_s, waiting, POLICY)
    floor = min(POLICY.hold_floor_s, POLICY.hold_floor_share * price_s) / waiting
    stays = [gap + POLICY.hold_slack_s for gap in gaps if gap + POLICY.hold_slack_s <= POLICY.hold_cap * price_s]
    best = max((value(stay, gaps, price_s, waiting) for stay in stays), default=0.0)
    assume(not 0.0 < abs(best) < 1e-6)

    assert floor <= found
    if best <= 0.0:
        assert floor == pytest.approx(found)
    elif found > floor:
        assert best == pytest.approx(value(found, gaps, price_s, waiting), abs=1e-6)
        assert any(found == pytest.approx(stay) for stay in stays)


@given(gaps_seen, st.floats(0.5, 200.0))
def test_the_more_wait_the_shorter_the_stay(gaps: list[float], price_s: float) -> None:
    """Never longer for ten than for one."""
    costs = with_gaps(*gaps)

    assert costs.keep_for(price_s, 10, POLICY) <= costs.keep_for(price_s, 1, POLICY) + 1e-9


def test_without_any_gap_the_stay_is_the_prior() -> None:
    """0.1 s, at most a quarter of the price."""
    assert (Costs().keep_for(60.0, 1, POLICY), Costs().keep_for(0.2, 1, POLICY)) == (0.1, 0.05)


def test_a_closed_loop_is_waited_for() -> None:
    """A client that comes back 50 ms after each answer: its gap and 20 ms."""
    assert pytest.approx(0.07) == with_gaps(*[0.05] * 8).keep_for(2.0, 1, POLICY)


def test_gaps_too_long_for_the_price_are_not_waited_for() -> None:
    """Only the floor, so that an answer may trigger the next hop of a chain."""
    assert pytest.approx(0.05) == with_gaps(30.0, 40.0).keep_for(2.0, 1, POLICY)


def test_measured_times_replace_the_priors() -> None:
    """Blended with share 0.3 from the second on."""
    assert (blend(None, 10.0, 0.3), blend(10.0, 20.0, 0.3)) == (10.0, 13.0)
    costs = Costs(up_s=12.0)
    assert (costs.up(MODEL), costs.down(MODEL)) == (12.0, 1.0)
    assert (costs.sleeping(TIER), costs.waking(TIER), costs.residue(TIER)) == (0.5, 0.3, 200)
    costs.sleep_s[1], costs.wake_s[1], costs.residue_mib[1] = 0.9, 0.4, 321

    assert (costs.sleeping(TIER), costs.waking(TIER), costs.residue(TIER)) == (0.9, 0.4, 321)


def test_a_new_definition_forgets_the_times_and_keeps_the_habits() -> None:
    """What was measured of the old engine says nothing of the new one; how often it is wanted does."""
    costs = Costs(up_s=12.0, down_s=2.0, serve_s=3.0, beside_ratio=1.2, lone_starts=4, hits=5.0)
    costs.gaps.append(1.0)
    costs.wake_s[1] = 0.4

    costs.forget_times()

    assert Costs(hits=5.0, gaps=costs.gaps) == costs
    assert list(costs.gaps) == [1.0]


def test_hits_halve_with_the_half_life() -> None:
    """Two requests, one half-life later: one."""
    costs = Costs()
    costs.hit(0.0, 1, POLICY)
    costs.hit(0.0, 1, POLICY)

    assert pytest.approx(1.0) == costs.frequency(POLICY.half_life_s, POLICY)


def test_an_absence_harms_as_many_as_come_in_it() -> None:
    """One request a second, away for 4 s, three outstanding at most: three wait half of it each."""
    costs = Costs()
    assert costs.harm(0.0, 4.0) == 0.0
    for second in range(8):
        costs.hit(float(second), 3, POLICY)

    assert pytest.approx(3 * 4 / 2) == costs.harm(8.0, 4.0)
