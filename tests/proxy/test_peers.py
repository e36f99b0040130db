"""The pure choice among peers: who is asked, in which order, and what outcomes make of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.proxy import peers
from greenroom.proxy.peers import FAILURES_MAX, HOPS_MAX, NEW, REST_S_MAX, SHUT_S_MAX, SHUT_S_MIN, Candidate, Circuit, Health, order

moments = st.floats(0, 1e6)
healths = st.builds(
    Health,
    failures=st.integers(0, 12),
    shut_until=moments,
    trying=st.booleans(),
    rest_until=moments,
    last_error=st.sampled_from(["", "it broke"]),
).map(lambda one: one if one.failures >= FAILURES_MAX else replace(one, trying=False))
candidates = st.lists(
    st.builds(
        Candidate,
        peer=st.sampled_from("abcdefgh"),
        priority=st.integers(-2, 2),
        weight=st.floats(0.1, 10),
        in_flight=st.integers(0, 20),
        health=healths,
        serving=healths,
    ),
    max_size=6,
    unique_by=lambda one: one.peer,
)


@given(candidates, moments, st.booleans())
def test_an_order_keeps_its_promises(given_: list[Candidate], now: float, again: bool) -> None:
    """Nobody twice, nobody whose circuit is open; rest, priority and load in this order of weight; the same every time."""
    found = order(given_, now, again=again)
    by_name = {one.peer: one for one in given_}
    asked = [by_name[name] for name in found]

    assert len(set(found)) == len(found)
    assert found == order(list(given_), now, again=again)
    assert {one.peer for one in given_ if one.can_be_asked(now) and not (again and one.rests(now))} == set(found)
    ranks = [(one.rests(now), -one.priority, (one.in_flight + 1) / one.weight) for one in asked]
    assert ranks == sorted(ranks)
    if not again and any(one.can_be_asked(now) for one in given_):
        assert found  # somebody who can be asked is asked, also where all want to rest


@given(candidates, moments)
def test_who_cannot_be_asked_can_be_soon(given_: list[Candidate], now: float) -> None:
    """Where nobody can be asked, somebody can be after the time that is told, unless a trial is under way."""
    if order(given_, now) or not given_ or any(one.health.trying or one.serving.trying for one in given_):
        return
    later = now + peers.free_in_s(given_, now)
    assert order(given_, later + 1e-6)


OUTCOMES = st.lists(st.tuples(st.sampled_from(["failed", "worked", "rest", "begun", "dropped"]), st.floats(0, 400)), max_size=40)


@given(OUTCOMES)
def test_whatever_happens_a_circuit_lets_somebody_try_again(outcomes: list[tuple[str, float]]) -> None:
    """Without chance: the same outcomes lead to the same health; it opens at the third failure, never for longer than is said."""
    health, now, row = NEW, 0.0, 0
    for what, later_s in outcomes:
        now += later_s
        if what == "failed":
            health, row = peers.failed(health, now, "why"), row + 1
            assert now + SHUT_S_MIN <= health.shut_until <= now + SHUT_S_MAX or row < FAILURES_MAX
            assert health.last_error == "why"
        elif what == "worked":
            health, row = peers.worked(health), 0
            assert health.circuit(now) is Circuit.CLOSED
        elif what == "rest":
            health = peers.asked_for_rest(health, now, later_s * 100)
            assert health.rest_until <= now + REST_S_MAX
        elif what == "begun":
            before = health.circuit(now)
            health = peers.begun(health, now)
            assert health.circuit(now) is (Circuit.OPEN if before is Circuit.HALF_OPEN else before)
        else:
            health = peers.dropped(health)
        assert health.failures == row
        assert (health.circuit(now) is Circuit.CLOSED) == (row < FAILURES_MAX)
    health = peers.dropped(health)
    assert health.circuit(now + SHUT_S_MAX) in (Circuit.CLOSED, Circuit.HALF_OPEN)


def test_the_back_off_doubles_up_to_its_end() -> None:
    """5, 10, 20 ... 300 s, after three failures."""
    health, waits = NEW, []
    for _ in range(FAILURES_MAX + 8):
        health = peers.failed(health, 0.0, "x")
        waits.append(max(0.0, health.shut_until))
    assert waits == [0.0, 0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]


def test_one_request_tries_a_half_open_circuit() -> None:
    """The second waits for what becomes of the first."""
    shut = Health(failures=FAILURES_MAX, shut_until=10.0)
    assert order([Candidate("a", health=shut)], 9.9) == ()
    assert order([Candidate("a", health=shut)], 10.0) == ("a",)
    trying = peers.begun(shut, 10.0)
    assert order([Candidate("a", health=trying)], 1e9) == ()
    assert order([Candidate("a", health=peers.dropped(trying))], 10.0) == ("a",)
    assert order([Candidate("a", health=peers.worked(trying))], 10.0) == ("a",)
    assert order([Candidate("a", health=peers.failed(trying, 10.0, "x"))], 19.9) == ()


def test_weights_share_what_is_in_flight() -> None:
    """Of twelve at once, a peer of weight 3 gets three times as many as one of 1; alone in flight, the first is asked."""
    flights = {"a": 0, "b": 0}
    for _ in range(12):
        best = order([Candidate("a", weight=1, in_flight=flights["a"]), Candidate("b", weight=3, in_flight=flights["b"])], 0.0)[0]
        flights[best] += 1
    assert flights == {"a": 3, "b": 9}
    assert order([Candidate("a"), Candidate("b")], 0.0) == ("a", "b")
    assert order([Candidate("a"), Candidate("b", priority=1)], 0.0) == ("b", "a")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(b" 20", 20.0), (b"0", 0.0), (b"", None), (b"-1", None), (b"1.5", None), (b"Wed, 21 Oct 2026 07:28:00 GMT", None), (b"9" * 20, None)],
)
def test_retry_after(value: bytes, seconds: float | None) -> None:
    """Whole seconds; a date is not read."""
    assert peers.retry_after_s(value) == seconds


@pytest.mark.parametrize(
    ("values", "count"),
    [
        ([], 0),
        ([b"0"], 0),
        ([b"2"], 2),
        ([b"-1"], HOPS_MAX),
        ([b"x"], HOPS_MAX),
        ([b""], HOPS_MAX),
        ([b"1", b"1"], HOPS_MAX),
        ([b"9999"], HOPS_MAX),
    ],
)
def test_hops(values: list[bytes], count: int) -> None:
    """What cannot be read stops a request rather than letting it run in circles."""
    assert peers.hops(values) == count
