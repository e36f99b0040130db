"""The table of lawful moves, and what entering a state does."""

from __future__ import annotations

import runpy
from itertools import product
from pathlib import Path

import pytest

from greenroom.core.entry import Entry
from greenroom.core.facts import Model, Policy, State
from greenroom.core.residency import FALLING, HOME, LAWFUL, RISING, SERVING, UnlawfulMove

ROOT = Path(__file__).resolve().parent.parent.parent


def entry_in(state: State) -> Entry:
    entry = Entry.of(Model("m", ("gpu0",), 1000), Policy())
    entry.instance.state = state
    entry.story.append((1.0, "starting on gpu0"))
    return entry


@pytest.mark.parametrize(("before", "after"), list(product(State, State)), ids=str)
def test_a_move_is_made_when_the_table_knows_it_and_a_bug_otherwise(before: State, after: State) -> None:
    """Each of the 81 pairs: the state and its moment change, or the error names both states and the story."""
    entry = entry_in(before)
    if after in LAWFUL[before]:
        entry.move(after, 7.0)

        assert (after, 7.0) == (entry.state, entry.instance.since)
    else:
        with pytest.raises(UnlawfulMove, match=rf"m: {before} -> {after} is not a lawful move(.|\n)*starting on gpu0"):
            entry.move(after, 7.0)

        assert before is entry.state


def test_every_state_is_in_the_table_and_of_one_kind() -> None:
    """The kinds do not overlap; only asleep is none of them."""
    kinds = [state for kind in (HOME, SERVING, RISING, FALLING) for state in kind]

    assert set(State) == set(LAWFUL)
    assert sorted([*kinds, State.ASLEEP]) == sorted(State)


def test_every_state_can_be_reached_and_left() -> None:
    """From stopped to anywhere, and from anywhere back to stopped."""

    def reach(start: State) -> set[State]:
        found, todo = {start}, [start]
        while todo:
            todo += [state for state in LAWFUL[todo.pop()] if state not in found and not found.add(state)]  # type: ignore[func-returns-value]
        return found

    assert set(State) == reach(State.STOPPED)
    assert all(State.STOPPED in reach(state) for state in State)


@pytest.mark.parametrize("home", sorted(HOME))
def test_coming_home_leaves_nothing_behind(home: State) -> None:
    """No device, no sleep level, no doubt, nobody in flight."""
    entry = entry_in(State.READY)
    instance = entry.instance
    instance.devices, instance.level, instance.suspect = ("gpu0",), 1, True
    for requests in (instance.in_flight, instance.quiet, instance.cut):
        requests.add(1)

    entry.move(home, 3.0)

    assert ((), 0, False, set(), set(), set()) == (
        instance.devices,
        instance.level,
        instance.suspect,
        instance.in_flight,
        instance.quiet,
        instance.cut,
    )


def test_the_moment_it_last_left_ready_is_the_end_of_its_drain() -> None:
    """A gate that opens again does not count as leaving."""
    entry = entry_in(State.READY)
    entry.move(State.DRAINING, 1.0)
    entry.move(State.READY, 2.0)
    entry.move(State.DRAINING, 3.0)
    entry.move(State.STOPPING, 5.0)

    assert entry.instance.left_ready_at == 5.0


def test_the_drawing_is_what_the_table_says() -> None:
    """docs/states.md is written by scripts/draw_states.py; a change of the table changes it."""
    drawn = runpy.run_path(str(ROOT / "scripts" / "draw_states.py"))["drawing"]()

    assert drawn == (ROOT / "docs" / "states.md").read_text()
    assert sum(len(moves) for moves in LAWFUL.values()) == sum(" --> " in line for line in drawn.splitlines()) - 1
