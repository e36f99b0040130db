"""Core events, actions and settings as plain JSON values, and back.

A value becomes an object of its fields with its class under `type`.  What a newer greenroom wrote and this one does
not know is skipped and counted; fields that are new are ignored, fields that are missing take their defaults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, get_args

import msgspec

from greenroom.core.facts import Action, Event, Setup

TYPE: Final = "type"
EVENTS: Final[Mapping[str, type]] = {one.__name__: one for one in get_args(Event)}
ACTIONS: Final[Mapping[str, type]] = {one.__name__: one for one in get_args(Action)}

Skipped = Counter[str]  # kind -> how many could not be read


def plain_event(event: Event) -> dict[str, Any]:
    return _plain(event)


def plain_actions(actions: Iterable[Action]) -> list[dict[str, Any]]:
    return [_plain(action) for action in actions]


def plain_setup(setup: Setup) -> dict[str, Any]:
    """Settings are no one of several, and carry no `type`."""
    value: dict[str, Any] = msgspec.to_builtins(setup, order="deterministic")
    return value


def event_from(value: Mapping[str, Any], skipped: Skipped | None = None) -> Event | None:
    """The event, or None where it cannot be read; then `skipped` counts one more of its kind."""
    event: Event | None = _from(EVENTS, value, skipped)
    return event


def actions_from(values: Sequence[Mapping[str, Any]], skipped: Skipped | None = None) -> tuple[Action, ...]:
    """Those actions that can be read; `skipped` counts the others."""
    return tuple(action for value in values if (action := _from(ACTIONS, value, skipped)) is not None)


def setup_from(value: Mapping[str, Any]) -> Setup:
    """Raises ValueError for what is no settings."""
    try:
        return msgspec.convert(value, Setup)
    except msgspec.ValidationError as exc:
        raise ValueError(f"these are no settings that this greenroom can read: {exc}") from exc


def _plain(value: Event | Action) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(value, order="deterministic")
    return {TYPE: type(value).__name__, **fields}


def _from(kinds: Mapping[str, type], value: Mapping[str, Any], skipped: Skipped | None) -> Any:
    kind = value.get(TYPE)
    try:
        return msgspec.convert(value, kinds[str(kind)])
    except (KeyError, msgspec.ValidationError):
        if skipped is not None:
            skipped[str(kind)] += 1
        return None
