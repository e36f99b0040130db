"""Events with their actions, as the scheduler really gave them in a seeded world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from greenroom.core.facts import Action, Event, RequestArrived, Setup, Ticked
from tests.world import World


@dataclass(frozen=True)
class Run:
    setup: Setup
    steps: tuple[tuple[Event, tuple[Action, ...]], ...]

    @property
    def arrivals(self) -> dict[int, RequestArrived]:
        return {event.request: event for event, _ in self.steps if isinstance(event, RequestArrived)}

    def said(self, *kinds: type[Any]) -> list[Any]:
        return [action for _, actions in self.steps for action in actions if isinstance(action, kinds)]


class _Heard(World):
    def __init__(self, seed: int) -> None:
        self.steps: list[tuple[Event, tuple[Action, ...]]] = []
        super().__init__(seed)

    def tell(self, event: Event) -> None:
        self._event: Event = event
        super().tell(event)

    def _react(self, why: str, actions: Sequence[Action]) -> None:
        self.steps.append((Ticked(self.now) if why else self._event, tuple(actions)))
        super()._react(why, actions)


@cache
def run(seed: int) -> Run:
    world = _Heard(seed)
    world.play()
    return Run(world.setup, tuple(world.steps))
