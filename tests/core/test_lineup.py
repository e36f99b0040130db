"""The three orders of those who wait, against sorting them anew each time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.entry import Entry
from greenroom.core.facts import Model, Policy
from greenroom.core.lineup import PULL_DRIFT, Lineup
from greenroom.core.queue import Waiting

NAMES = tuple("abcdef")


def fresh_entries() -> dict[str, Entry]:
    return {
        name: Entry.of(Model(name, ("gpu0",), 100 * (1 + n % 3) if n != 4 else None, up_s=1.0 + n), Policy())
        for n, name in enumerate(NAMES)
    }


def pull(entry: Entry) -> float:
    return entry.queue.weight / (entry.up_cost() + 0.05)


steps = st.lists(st.tuples(st.sampled_from(("ask", "leave", "need")), st.sampled_from(NAMES), st.integers(1, 4)), max_size=60)


def play(script: list[tuple[str, str, int]]) -> tuple[Lineup, dict[str, Entry]]:
    """Requests come and go and needs change, as the scheduler would tell the lineup."""
    lineup, entries = Lineup(), fresh_entries()
    for at, (what, name, amount) in enumerate(script, 1):
        entry = entries[name]
        if what == "ask":
            entry.queue.add(Waiting(at, float(at), weight=float(amount)))
            lineup.add(entry)
        elif what == "leave" and entry.queue:
            entry.queue.pop_first()
            if entry.queue:
                lineup.add(entry)
            else:
                lineup.drop(entry)
        elif what == "need" and entry.queue:
            entry.need_mib = 50 * amount
            lineup.add(entry)
    return lineup, entries


@given(steps)
@settings(max_examples=150)
def test_everybody_who_waits_is_there_once_in_the_order_of_since(script: list[tuple[str, str, int]]) -> None:
    """The oldest first, as a sort of all queues gives it."""
    lineup, entries = play(script)
    waiting = [entry for entry in entries.values() if entry.queue]
    by_since = [entry.id for entry in sorted(waiting, key=lambda entry: (entry.since, entry.id))]

    assert by_since == [entry.id for entry in lineup.oldest()]
    assert {entry.id for entry in waiting} == {entry.id for entry in lineup}
    assert len(waiting) == len(lineup)
    assert min((entry.since for entry in waiting), default=float("inf")) == lineup.first_since()


@given(steps, st.integers(0, 60))
@settings(max_examples=150)
def test_the_next_since_is_the_smallest_one_later(script: list[tuple[str, str, int]], at: int) -> None:
    """Strictly later than `at`; infinity when nobody came later."""
    lineup, entries = play(script)
    later = [entry.since for entry in entries.values() if entry.queue and entry.since > at]

    assert min(later, default=float("inf")) == lineup.since_after(float(at))


@given(steps, st.integers(0, 300), st.integers(1, 2))
@settings(max_examples=150)
def test_those_who_fit_are_all_or_those_who_pull_most(script: list[tuple[str, str, int]], mib: int, count: int) -> None:
    """Few: all of them.  Many: `count`, and nobody left out pulls more than those taken by more than the drift allows."""
    lineup, entries = play(script)
    fitting = {entry.id for entry in entries.values() if entry.queue and (entry.need_mib or 0) <= mib}
    found = lineup.fitting(mib, count)

    assert len(fitting) == lineup.smaller_than(mib)
    assert {entry.id for entry in found} <= fitting
    if len(fitting) <= 4 * count:
        assert fitting == {entry.id for entry in found}
    else:
        left_out = max(pull(entries[name]) for name in fitting - {entry.id for entry in found})
        assert count == len(found)
        assert left_out <= min(map(pull, found)) * (1 + PULL_DRIFT) / (1 - PULL_DRIFT) + 1e-9


def test_dropping_somebody_who_is_not_there_changes_nothing() -> None:
    """A drop is asked for whenever a queue empties."""
    lineup, entries = play([("ask", "a", 1)])
    lineup.drop(entries["b"])

    assert (len(lineup), "a" in lineup, "b" in lineup) == (1, True, False)
