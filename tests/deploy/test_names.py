"""Names that hold everywhere, made of any model id."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from greenroom.deploy.names import label, labels

LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


@given(st.text(max_size=300), st.integers(12, 63))
def test_any_text_becomes_a_label(name: str, chars_max: int) -> None:
    """A DNS label within its length, the same for the same text."""
    found = label(name, chars_max=chars_max)
    assert LABEL.fullmatch(found)
    assert len(found) <= chars_max
    assert found == label(name, chars_max=chars_max)


@given(st.lists(st.text("aA-./ é", min_size=1, max_size=80), unique=True, max_size=12))
def test_different_names_get_different_labels(names: list[str]) -> None:
    """Also those that differ in case, in what a label cannot hold, or far behind."""
    assert len(set(labels(names).values())) == len(names)


def test_readable_names_stay() -> None:
    """A name that is a label is kept; one that quadlet needs for a unit of its own is not."""
    assert label("qwen3-4b") == "qwen3-4b"
    assert label("org/näme:7b q4").startswith("org-n-me-7b-q4-")
    for name in ("network", "my-volume", "build"):
        assert label(name) != name
