"""What is written as YAML is read back by readers of YAML 1.1 and 1.2 alike."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from greenroom.config.yaml_out import dump, dump_all

TEXT = st.text(st.characters(blacklist_categories=["Cs"]), max_size=40)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def read(text: str, version: tuple[int, int]) -> Any:
    yaml = YAML(typ="safe", pure=True)
    yaml.version = version
    return yaml.load(text)


@given(VALUES)
def test_readers_of_both_versions_get_the_same_back(value: Any) -> None:
    """Whatever texts it holds."""
    text = dump({"value": value})
    assert read(text, (1, 2)) == {"value": value}
    assert read(text, (1, 1)) == {"value": value}


ODD = "yes|No|on|~|null|1|1.5|1e3|0x1f|012|1_000|12:30|2026-11-29|=|<<|- a|a: b|a #b||\x20|a\n|a\n\nb|a \nb|\ta|  a\nb"
ODD_TOO = "%TAG|@a|`a`|*a|&a|!a|? a|'a'|{a}|[a]|\"a\"|nodes\x85x"


@pytest.mark.parametrize("text", f"{ODD}|{ODD_TOO}".split("|"))
def test_texts_that_look_like_something_else_stay_texts(text: str) -> None:
    """As a value, as a key and in a list."""
    for version in ((1, 1), (1, 2)):
        assert read(dump({text: [text, {"k": text}]}), version) == {text: [text, {"k": text}]}


def test_long_texts_and_several_documents_read_well() -> None:
    """Lines as they were, in a block; comments above; the same bytes each time."""
    made = dump_all([{"a": "one\ntwo\n"}, {"b": [1, {"c": "x y"}]}], comments=["made by greenroom", "a\nb"])
    assert made == "# made by greenroom\n# a\n# b\na: |\n  one\n  two\n---\nb:\n  - 1\n  - c: x y\n"
