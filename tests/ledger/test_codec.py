"""The journal's plain values: every event, action and setting comes back as it was."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.facts import Admit, Device, Model, Priority, RequestArrived, Setup
from greenroom.ledger import codec

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    int: st.integers(-(2**62), 2**62),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    NoneType: st.none(),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of this type that the core could make."""
    if kind in PLAIN:
        return PLAIN[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return st.one_of(*map(values, args))
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is frozenset:
        return st.frozensets(values(args[0]), max_size=3)
    if origin is Mapping:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    assert is_dataclass(kind), f"no strategy for {kind}"
    hints = get_type_hints(kind)
    return st.builds(kind, **{field.name: values(hints[field.name]) for field in fields(kind)})


def over_a_wire(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("kind", codec.EVENTS.values(), ids=codec.EVENTS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_event_comes_back_as_it_was(kind: type, data: st.DataObject) -> None:
    event = data.draw(values(kind))
    found = codec.event_from(over_a_wire(codec.plain_event(event)))
    assert found == event
    assert type(found) is kind


@pytest.mark.parametrize("kind", codec.ACTIONS.values(), ids=codec.ACTIONS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_action_comes_back_as_it_was(kind: type, data: st.DataObject) -> None:
    actions = tuple(data.draw(st.lists(values(kind), min_size=1, max_size=3)))
    found = codec.actions_from(over_a_wire(codec.plain_actions(actions)))
    assert found == actions
    assert {type(one) for one in found} == {kind}


@given(setup=values(Setup))
@settings(max_examples=40, deadline=None)
def test_settings_come_back_as_they_were(setup: Setup) -> None:
    assert codec.setup_from(over_a_wire(codec.plain_setup(setup))) == setup


def test_what_a_newer_greenroom_wrote_is_skipped_and_counted() -> None:
    skipped: Counter[str] = Counter()
    assert codec.event_from({"type": "MoonRose", "at": 1.0}, skipped) is None
    assert codec.event_from({"at": 1.0}, skipped) is None
    admit = codec.plain_actions([Admit(1, "a", 1, "hot")])[0]
    told = [{"type": "Dance", "model": "a"}, {**admit, "grace": 7}, {"type": "Admit", "request": "one"}]
    assert codec.actions_from(told, skipped) == (Admit(1, "a", 1, "hot"),)
    assert skipped == {"MoonRose": 1, "None": 1, "Dance": 1, "Admit": 1}


def test_what_an_older_greenroom_did_not_know_takes_its_default() -> None:
    assert codec.event_from({"type": "RequestArrived", "at": 1, "request": 2, "model": "a"}) == RequestArrived(1.0, 2, "a")
    assert codec.setup_from(
        {"devices": [{"id": "g", "kind": "gpu", "capacity_mib": 9}], "models": [{"id": "a", "devices": ["g"]}]}
    ) == Setup((Device("g", "gpu", 9),), (Model("a", ("g",)),))
    with pytest.raises(ValueError, match="no settings"):
        codec.setup_from({"devices": 3})


def test_a_request_is_encoded_in_microseconds() -> None:
    event, actions = RequestArrived(1.5, 3, "qwen", Priority.BATCH, None, "key-1"), [Admit(3, "qwen", 1, "hot")]
    best = min(_timed(lambda: (codec.plain_event(event), codec.plain_actions(actions))) for _ in range(5))
    assert best < 20e-6


def _timed(step: Any, rounds: int = 500) -> float:
    began = time.process_time()
    for _ in range(rounds):
        step()
    return (time.process_time() - began) / rounds
