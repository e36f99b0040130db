"""Strict arrival order: the yardstick.  It takes the scheduler's events and answers with the scheduler's actions.

One queue for all; its head waits for its model, and everybody waits for the head.  Least recently used residents leave,
one after the other, asleep where their engine can and that is enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

from greenroom.core.facts import (
    Action,
    Admit,
    Event,
    InstanceReported,
    Model,
    Refuse,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Setup,
    Sleep,
    SleepTier,
    Start,
    State,
    Stop,
    Tell,
    Ticked,
    Wake,
)
from greenroom.core.words import gib, span

LEAVING = (State.GOING_TO_SLEEP, State.STOPPING)
NEVER = float("-inf")


@dataclass(slots=True)
class _Place:
    """One model's instance."""

    model: Model
    state: State = State.STOPPED
    generation: int = 0
    level: int = 0
    devices: tuple[str, ...] = ()
    held_mib: int = 0  # per device
    running: int = 0
    last_at: float = NEVER
    ready_at: float = NEVER
    rose: str = "cold"

    @property
    def tier(self) -> SleepTier | None:
        return min(self.model.sleep, key=lambda tier: tier.wake_s, default=None)

    @property
    def residue_mib(self) -> int:
        return self.tier.residue_mib if self.tier is not None else 0

    def need_mib(self, most: Callable[[str], int]) -> int:
        """Per device; of unknown size, all of the smallest one it may use."""
        return self.model.need_mib if self.model.need_mib is not None else min(map(most, self.model.devices), default=0)


class Fifo:
    """A decider like the scheduler, by the simplest rule there is."""

    def __init__(self, setup: Setup, at: float = 0.0) -> None:
        self._now = at
        self._room = {device.id: device.capacity_mib - device.headroom_mib for device in setup.devices}
        self._places = {model.id: _Place(model) for model in setup.models}
        self._queue: deque[tuple[int, str, float]] = deque()  # request, model, arrival
        self._admitted: dict[int, str] = {}
        self._victims: list[tuple[_Place, int]] = []  # still to leave, with the level each falls to
        self._target: tuple[_Place, tuple[str, ...]] | None = None
        self._out: list[Action] = []

    def start(self) -> list[Action]:
        return self.handle(Ticked(self._now))

    def handle(self, event: Event) -> list[Action]:
        self._now, self._out = event.at, []
        match event:
            case RequestArrived(request=request, model=model) if model in self._places:
                self._queue.append((request, model, self._now))
            case RequestArrived(request=request, model=model):
                self._out.append(Refuse(request, 404, "unknown_model", f"there is no model {model!r}"))
            case RequestFinished(request=request) if request in self._admitted:
                place = self._places[self._admitted.pop(request)]
                place.running -= 1
                place.last_at = self._now
            case RequestFinished(request=request) | RequestCancelled(request=request):
                self._queue = deque(item for item in self._queue if item[0] != request)
            case InstanceReported():
                self._reported(event)
            case _:
                pass
        self._settle()
        return self._out

    def _reported(self, event: InstanceReported) -> None:
        place = self._places[event.model]
        if event.generation != place.generation:
            return
        place.state = event.state
        if event.state is State.READY:
            place.level, place.ready_at, place.last_at = 0, self._now, self._now
            self._target = None
        elif event.state is State.ASLEEP:
            place.level, place.held_mib = event.level, max(event.measured_mib.values(), default=0)
        else:
            place.devices, place.held_mib = (), 0

    # ------------------------------------------------------------------ the rule

    def _settle(self) -> None:
        while self._queue:
            request, model, arrived_at = self._queue[0]
            place = self._places[model]
            if place.state is State.READY and self._target is None:
                if place.running >= place.model.parallel:
                    return
                self._queue.popleft()
                self._admit(place, request, arrived_at)
            elif self._target is not None:
                self._advance(*self._target)
                return
            elif not self._begin(place, request):
                return

    def _admit(self, place: _Place, request: int, arrived_at: float) -> None:
        place.running += 1
        place.last_at = self._now
        self._admitted[request] = place.model.id
        self._out.append(Admit(request, place.model.id, place.generation, place.rose if arrived_at < place.ready_at else "hot"))

    def _begin(self, place: _Place, request: int) -> bool:
        """Choose who leaves for `place`; False: somebody in the way still answers."""
        found = [(victims, devices) for devices in self._placements(place) if (victims := self._least_recent(place, devices)) is not None]
        if not found:
            self._queue.popleft()
            self._out.append(Refuse(request, 503, "no_room", f"{place.model.id} does not fit"))
            return True
        victims, devices = min(found, key=lambda item: len(item[0]))
        if any(victim.running for victim, _ in victims):
            return False
        self._victims, self._target = victims, (place, devices)
        self._advance(place, devices)
        return False

    def _advance(self, place: _Place, devices: tuple[str, ...]) -> None:
        """The next victim, or the start itself once all have left."""
        if place.state in (State.STARTING, State.WAKING) or any(other.state in LEAVING for other in self._places.values()):
            return
        if self._victims:
            victim, level = self._victims.pop(0)
            why = f"{place.model.id} needed {gib(self._need(place))}"
            idle = f"idle {span(self._now - victim.last_at)}"
            how = f"put to sleep (level {level})" if level else "unloaded"
            self._out.append(Tell(self._now, victim.model.id, "evicted", f"{how}: {why}; {idle}"))
            if level:
                victim.state = State.GOING_TO_SLEEP
                self._out.append(Sleep(victim.model.id, victim.generation, level))
            else:
                victim.state = State.STOPPING
                freed = dict.fromkeys(victim.devices, victim.held_mib)
                self._out.append(Stop(victim.model.id, victim.generation, why, freed))
            return
        need = self._need(place)
        place.held_mib = need
        if place.state is State.ASLEEP:
            place.state, place.rose = State.WAKING, "wake"
            self._out.append(Wake(place.model.id, place.generation, place.level))
            return
        place.state, place.rose, place.devices, place.level = State.STARTING, "cold", devices, 0
        place.generation += 1
        self._out.append(Start(place.model.id, place.generation, devices, dict.fromkeys(devices, need)))

    # ------------------------------------------------------------------ room

    def _need(self, place: _Place) -> int:
        return place.need_mib(lambda device: self._room.get(device, 0))

    def _placements(self, place: _Place) -> list[tuple[str, ...]]:
        if place.state is State.ASLEEP:
            return [place.devices]
        return list(combinations([name for name in place.model.devices if name in self._room], place.model.devices_count))

    def _free(self, device: str) -> int:
        return self._room[device] - sum(other.held_mib for other in self._places.values() if device in other.devices)

    def _least_recent(self, place: _Place, devices: tuple[str, ...]) -> list[tuple[_Place, int]] | None:
        """Least recently used victims that make room on all of `devices`; None: not enough, whoever leaves."""
        lacking = self._need(place) - (place.held_mib if place.state is State.ASLEEP else 0)
        short = {device: lacking - self._free(device) for device in devices}
        near = [other for other in self._places.values() if other is not place and not short.keys().isdisjoint(other.devices)]
        others = sorted((other for other in near if not other.model.pinned), key=lambda other: other.last_at)
        ready = [other for other in others if other.state is State.READY]
        asleep = [(other, 0) for other in others if other.state is State.ASLEEP]
        gentle = [(other, other.tier.level if other.tier is not None else 0) for other in ready]
        for offered in (gentle, asleep + gentle, asleep + [(other, 0) for other in ready]):
            chosen = _cover(short, offered)
            if chosen is not None:
                return chosen
        return None


def _frees(victim: tuple[_Place, int]) -> int:
    place, level = victim
    return place.held_mib - (place.residue_mib if level else 0)


def _cover(short: dict[str, int], offered: list[tuple[_Place, int]]) -> list[tuple[_Place, int]] | None:
    """The first of those offered that are enough, superfluous ones left alone."""

    def covered(victims: list[tuple[_Place, int]]) -> bool:
        return all(sum(_frees(victim) for victim in victims if device in victim[0].devices) >= mib for device, mib in short.items())

    chosen: list[tuple[_Place, int]] = []
    for victim in offered:
        if covered(chosen):
            break
        chosen.append(victim)
    if not covered(chosen):
        return None
    for victim in list(chosen):
        rest = [other for other in chosen if other is not victim]
        if covered(rest):
            chosen = rest
    return chosen
