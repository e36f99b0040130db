"""A scheduler and a host that does what it is told only when the test says so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from greenroom.core.entry import Entry
from greenroom.core.facts import (
    Action,
    Cause,
    Device,
    Event,
    Group,
    InstanceReported,
    MemoryMeasured,
    Model,
    Operation,
    OperatorAsked,
    Outcome,
    Policy,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestLost,
    RequestQuiet,
    SetTimer,
    Setup,
    SetupChanged,
    SleepTier,
    Start,
    State,
    Tell,
    Ticked,
)
from greenroom.core.scheduler import Scheduler
from greenroom.core.stage import Stage

GPU = "gpu0"
UP_S = 2.0
DOWN_S = 0.2
LEVEL_1 = SleepTier(1, 200, 3000, 0.5, 0.3)
LEVEL_2 = SleepTier(2, 100, 50, 0.2, 1.0)

A = TypeVar("A")


def gpu(name: str = GPU, mib: int = 10_000, *, measured: bool = True) -> Device:
    return Device(name, "gpu", mib, measured=measured)


def ram(mib: int) -> Device:
    return Device("ram", "ram", mib)


def model(name: str, need_mib: int | None = 1000, *devices: str, **more: Any) -> Model:
    return Model(name, devices or (GPU,), need_mib, up_s=more.pop("up_s", UP_S), down_s=more.pop("down_s", DOWN_S), **more)


class Rig:
    def __init__(self, *models: Model, devices: Iterable[Device] = (), groups: tuple[Group, ...] = (), **policy: Any) -> None:
        self.setup = Setup(tuple(devices) or (gpu(),), models, groups, Policy(**policy))
        self.now = 0.0
        self.timer_at: float | None = None
        self.told: list[Tell] = []
        self.scheduler = Scheduler(self.setup, 0.0)
        self._last = 0

    # ---- looking

    @property
    def stage(self) -> Stage:
        return self.scheduler._stage

    def entry(self, name: str) -> Entry:
        return self.stage.entries[name]

    def state(self, name: str) -> State:
        return self.scheduler.state_of(name)

    def booked(self, device: str = GPU) -> dict[str, int]:
        return dict(self.stage.book.pools[device].holders)

    # ---- events

    def does(self, event: Event) -> list[Action]:
        return self._heard(self.scheduler.handle(event))

    def _heard(self, actions: list[Action]) -> list[Action]:
        out: list[Action] = []
        for action in actions:
            if isinstance(action, SetTimer):
                self.timer_at = action.at
            elif isinstance(action, Tell):
                self.told.append(action)
            else:
                out.append(action)
        return out

    def begins(self) -> list[Action]:
        return self._heard(self.scheduler.start())

    def fresh(self) -> int:
        self._last += 1
        return self._last

    @property
    def last(self) -> int:
        """The request asked last."""
        return self._last

    def asks(self, name: str, **more: Any) -> list[Action]:
        return self.does(RequestArrived(self.now, self.fresh(), name, **more))

    def cancels(self, request: int) -> list[Action]:
        return self.does(RequestCancelled(self.now, request))

    def ends(self, request: int) -> list[Action]:
        return self.does(RequestFinished(self.now, request, Outcome.OK))

    def loses(self, request: int) -> list[Action]:
        return self.does(RequestLost(self.now, request, "the connection was closed"))

    def falls_silent(self, request: int) -> list[Action]:
        return self.does(RequestQuiet(self.now, request, True))

    def wishes(self, name: str, operation: Operation, *, force: bool = False, level: int | None = None) -> list[Action]:
        return self.does(OperatorAsked(self.now, self.fresh(), name, operation, force, level))

    def reloads(self, *models: Model, devices: Iterable[Device] = (), groups: tuple[Group, ...] = ()) -> list[Action]:
        self.setup = Setup(tuple(devices) or self.setup.devices, models, groups, self.setup.policy)
        return self.does(SetupChanged(self.now, self.setup))

    def reports(self, name: str, state: State, **more: Any) -> list[Action]:
        generation = more.pop("generation", self.entry(name).instance.generation)
        return self.does(InstanceReported(self.now, name, generation, state, **more))

    def is_ready(self, name: str, **more: Any) -> list[Action]:
        return self.reports(name, State.READY, took_s=more.pop("took_s", UP_S), **more)

    def is_stopped(self, name: str, **more: Any) -> list[Action]:
        return self.reports(name, State.STOPPED, took_s=more.pop("took_s", DOWN_S), **more)

    def is_asleep(self, name: str, **more: Any) -> list[Action]:
        return self.reports(name, State.ASLEEP, level=self.entry(name).instance.level, **more)

    def fails(self, name: str, cause: Cause = Cause.EXITED, **more: Any) -> list[Action]:
        return self.reports(name, State.STOPPED, cause=cause, why=more.pop("why", "it ended"), **more)

    def measures(self, used_mib: int, device: str = GPU, **own_mib: int) -> list[Action]:
        return self.does(MemoryMeasured(self.now, device, used_mib, own_mib, "pid 4711 (python)"))

    # ---- time

    def waits(self, seconds: float) -> list[Action]:
        return self.waits_until(self.now + seconds)

    def waits_until(self, at: float) -> list[Action]:
        """Let time pass, timers included."""
        out: list[Action] = []
        while self.timer_at is not None and self.timer_at <= at:
            self.now, self.timer_at = max(self.now, self.timer_at), None
            out += self.does(Ticked(self.now))
        self.now = at
        return out

    # ---- short stories

    def warms(self, name: str) -> None:
        """Bring a model in by a request that ends at once."""
        self.asks(name)
        request = self._last
        self.now += UP_S
        self.is_ready(name)
        self.ends(request)
        assert self.state(name) is State.READY, self.state(name)

    def holds(self, name: str) -> int:
        """Bring a model in by a request that goes on; its number."""
        self.asks(name)
        request = self._last
        if self.state(name) is State.STARTING:
            self.now += UP_S
            self.is_ready(name)
        assert request in self.entry(name).instance.in_flight
        return request


def only(actions: Iterable[Any], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def names(actions: Iterable[Any], kind: type[Any] = Start) -> list[str]:
    return [action.model for action in only(actions, kind)]
