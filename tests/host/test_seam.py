"""Two readings of one log, joined."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.host.seam import Seam


def joined(known: Sequence[str], second: Sequence[str], batch: int = 1) -> list[str]:
    seam = Seam(known)
    parts = [second[start : start + batch] for start in range(0, len(second), batch)]
    return [*known, *(line for part in parts for line in seam.fresh(part)), *seam.rest()]


@pytest.mark.parametrize("batch", [1, 2, 100])
@pytest.mark.parametrize(
    ("second", "new"),
    [
        (["b", "c", "d"], ["d"]),
        (["c", "d", "e"], ["d", "e"]),
        (["a", "b", "c"], []),
        (["d"], ["d"]),
        (["a", "d"], ["a", "d"]),
        (["b"], ["b"]),
        ([], []),
    ],
)
def test_what_both_have_is_shown_once(second: list[str], new: list[str], batch: int) -> None:
    """Where they do not meet, everything is new."""
    assert joined(["a", "b", "c"], second, batch) == ["a", "b", "c", *new]


def test_lines_that_are_all_the_same_are_rather_shown_twice() -> None:
    """Nobody can tell how many of them are new."""
    assert joined(["x", "x"], ["x", "x", "y"]) == ["x", "x", "x", "y"]


def test_without_a_first_reading_everything_is_new() -> None:
    """Nothing to join it to."""
    assert joined([], ["a", "b"], 2) == ["a", "b"]


@given(st.lists(st.sampled_from("abc"), max_size=12), st.data())
def test_no_line_is_ever_lost(log: list[str], data: st.DataObject) -> None:
    """Whatever the log says: it is wholly there, in its order."""
    read = data.draw(st.integers(0, len(log)))
    begin = data.draw(st.integers(0, max(0, read - 1)))  # the two have a line in common, where there is one
    shown = joined(log[:read], log[begin:], data.draw(st.integers(1, 3)))
    rest = iter(shown)

    assert all(line in rest for line in log)
