"""Engines and a clock that are only computed: a load is played against any decider, in virtual time.

A decider is the scheduler itself, or anything that takes its events and answers with its actions.  Nothing is measured
here: an engine takes the time and the memory that its `Truth` says, and reports both as the real host would.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from greenroom.core.facts import (
    Action,
    Admit,
    Cut,
    Event,
    InstanceReported,
    Model,
    Outcome,
    Priority,
    Refuse,
    RequestArrived,
    RequestFinished,
    SetTimer,
    Setup,
    Sleep,
    SleepTier,
    Start,
    State,
    Stop,
    Ticked,
    Verify,
    Wake,
)
from greenroom.core.scheduler import Scheduler

NEVER = float("inf")
LEAST_UP_S = 0.001
PATIENT_S_MAX = 7200.0  # requests that wait while nothing but timers happens are given up after this
AT_ONCE_MAX = 100_000  # events at one instant; more means that the decider spins


class Decider(Protocol):
    def start(self) -> list[Action]: ...

    def handle(self, event: Event) -> list[Action]: ...


Hear = Callable[[Event, Sequence[Action]], None]  # is told every event with the actions it caused


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load.  With `after`, its client sends it `think_s` after that request's end, never before `at`."""

    at: float
    model: str
    service_s: float  # from the admission to the end
    client: str = ""
    priority: Priority | None = None
    after: int = -1  # its number in the load; -1 = it depends on nobody
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Truth:
    """What a model's engine really takes; the decider only believes things about it."""

    up_s: float
    down_s: float
    need_mib: int | None = None  # per device; None = as much as was booked
    tiers: tuple[SleepTier, ...] = ()

    @classmethod
    def of(cls, model: Model) -> Truth:
        """What a decider that knows no better believes."""
        return cls(model.up_s, model.down_s, model.need_mib, model.sleep)

    def tier(self, level: int) -> SleepTier:
        return next((tier for tier in self.tiers if tier.level == level), SleepTier(level, 0, 0, self.down_s, self.up_s))


@dataclass(slots=True)
class _Engine:
    devices: tuple[str, ...] = ()
    booked_mib: Mapping[str, int] = field(default_factory=dict)
    move: int = 0  # the end of an abandoned move is told by its number


class Play:
    """One load under one decider."""

    def __init__(
        self,
        setup: Setup,
        load: Sequence[Arrival],
        truths: Mapping[str, Truth] | None = None,
        *,
        decider: Callable[[Setup, float], Decider] = Scheduler,
        hear: Iterable[Hear] = (),
        at: float = 0.0,
    ) -> None:
        self.now = at
        self._load = load
        self._truths = {model.id: Truth.of(model) for model in setup.models} | dict(truths or {})
        self._hear = tuple(hear)
        self._engines = {model.id: _Engine() for model in setup.models}
        self._heap: list[tuple[float, int, bool, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._timer = 0
        self._pending = 0  # of the heap, what is no timer
        self._waiting: set[int] = set()
        self._waits_since = at  # nothing but timers happened
        self._in_flight: dict[int, None] = {}
        self._next: dict[int, list[int]] = {}
        for number, arrival in enumerate(load):
            if arrival.after >= 0:
                self._next.setdefault(arrival.after, []).append(number)
            else:
                self._at(arrival.at, self._arrive, number)
        self._decider = decider(setup, at)

    def run(self, until_s: float = NEVER) -> Play:
        """To the end of the load, or to `until_s`; with an end, idle time up to it is played as well."""
        self._told(Ticked(self.now), self._decider.start())
        at_once = 0
        while self._heap and (self._pending or self._waiting or until_s < NEVER):
            at = self._heap[0][0]
            if at > until_s or (not self._pending and until_s == NEVER and at > self._waits_since + PATIENT_S_MAX):
                break
            at, _, is_timer, what, args = heapq.heappop(self._heap)
            self._pending -= not is_timer
            at_once = at_once + 1 if at <= self.now else 0
            assert at_once < AT_ONCE_MAX, f"the decider does not let time pass at {at}"
            self.now = max(self.now, at)
            if not is_timer:
                self._waits_since = self.now
            what(*args)
        if until_s < NEVER:
            self.now = max(self.now, until_s)
        return self

    # ------------------------------------------------------------------ the clock

    def _at(self, at: float, what: Callable[..., None], *args: Any, timer: bool = False) -> None:
        self._sequence += 1
        self._pending += not timer
        heapq.heappush(self._heap, (at, self._sequence, timer, what, args))

    def _tell(self, event: Event) -> None:
        self._told(event, self._decider.handle(event))

    def _told(self, event: Event, actions: Sequence[Action]) -> None:
        for hear in self._hear:
            hear(event, actions)
        for action in actions:
            self._obey(action)

    def _tick(self, number: int) -> None:
        if number == self._timer:
            self._tell(Ticked(self.now))

    # ------------------------------------------------------------------ requests

    def _arrive(self, number: int) -> None:
        arrival = self._load[number]
        self._waiting.add(number)
        self._tell(RequestArrived(self.now, number, arrival.model, arrival.priority, client=arrival.client))

    def _finish(self, request: int, outcome: Outcome = Outcome.OK) -> None:
        if request in self._in_flight:
            del self._in_flight[request]
            self._follow(request)
            self._tell(RequestFinished(self.now, request, outcome))

    def _follow(self, request: int) -> None:
        for number in self._next.pop(request, ()):
            arrival = self._load[number]
            self._at(max(arrival.at, self.now + arrival.think_s), self._arrive, number)

    # ------------------------------------------------------------------ engines

    def _obey(self, action: Action) -> None:
        match action:
            case Admit(request=request):
                self._in_flight[request] = None
                self._waiting.discard(request)
                self._at(self.now + self._load[request].service_s, self._finish, request)
            case Refuse(request=request) if request >= 0:
                self._waiting.discard(request)
                self._follow(request)
            case Cut(request=request):
                self._at(self.now, self._finish, request, Outcome.CUT)
            case Start(model=model, devices=devices, reserved_mib=booked):
                engine = self._engines[model]
                engine.devices, engine.booked_mib = devices, booked
                self._moves(action, State.READY, max(LEAST_UP_S, self._truths[model].up_s))
            case Wake(model=model, level=level):
                self._moves(action, State.READY, max(LEAST_UP_S, self._truths[model].tier(level).wake_s))
            case Sleep(model=model, level=level):
                self._moves(action, State.ASLEEP, self._truths[model].tier(level).sleep_s)
            case Stop(model=model):
                self._moves(action, State.STOPPED, self._truths[model].down_s)
            case Verify(model=model):
                self._moves(action, State.READY, 0.0)
            case SetTimer(at=at):
                self._timer += 1
                self._at(max(at, self.now), self._tick, self._timer, timer=True)
            case _:
                pass

    def _moves(self, action: Start | Wake | Sleep | Stop | Verify, to: State, took_s: float) -> None:
        engine = self._engines[action.model]
        engine.move += 1
        level = action.level if isinstance(action, Sleep) else 0
        self._at(self.now + took_s, self._moved, action.model, action.generation, engine.move, to, level, took_s)

    def _moved(self, model: str, generation: int, move: int, to: State, level: int, took_s: float) -> None:
        engine, truth = self._engines[model], self._truths[model]
        if move != engine.move:
            return
        held: dict[str, int] = {}
        host_mib = None
        if to is State.READY:
            held = {device: engine.booked_mib.get(device, 0) if truth.need_mib is None else truth.need_mib for device in engine.devices}
        elif to is State.ASLEEP:
            tier = truth.tier(level)
            held, host_mib = dict.fromkeys(engine.devices, tier.residue_mib), tier.host_mib
        self._tell(InstanceReported(self.now, model, generation, to, took_s=took_s, measured_mib=held, host_mib=host_mib, level=level))
