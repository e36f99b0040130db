"""Simulated worlds as the ledger would have kept them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from greenroom.core.facts import Action, Event, Setup, Ticked
from greenroom.ledger import codec
from greenroom.ledger.chronicle import event_row
from greenroom.ledger.rows import BootRow, EventRow
from tests.world import World

OFFSET_S = 1_700_000_000.0


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def row_of(event: Event, actions: Sequence[Action]) -> EventRow:
    """As it comes back from the disk."""
    row = event_row(event, actions, OFFSET_S)
    return replace(row, event=through_json(row.event), actions=tuple(through_json(list(row.actions))))


def boot_of(setup: Setup, number: int = 1) -> BootRow:
    return BootRow(number, OFFSET_S, 0.0, "0", through_json(codec.plain_setup(setup)))


class Recorded(World):
    """A world of faults, with its journal."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.rows: list[EventRow] = []
        decided = self.scheduler.handle

        def handle(event: Event) -> list[Action]:
            actions = decided(event)
            self.rows.append(row_of(event, actions))
            return actions

        self.scheduler.handle = handle  # type: ignore[method-assign]

    @property
    def begins(self) -> bool:
        return bool(self.rows) and self.rows[0].kind == Ticked.__name__
