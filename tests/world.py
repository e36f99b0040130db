"""A seeded world of faults around the real scheduler.

    python -m tests.world SEED [--log]              plays one seed; --log prints every event and action
    python -m tests.world --from 0 --count 2000     plays many, prints each failing seed

Everything the host can do to the core happens here: starts that fail, engines that die while they serve, clients that
hang up, memory that comes back late or never, foreign processes, wrong sizes, operators, reloads, shutdown; sleeps that
fail, free nothing or hold more than they said, wakes that find no room, engines that doze off.  After every event
tests/watch.py checks the invariants from outside.  One seed is one world: the same seed plays the same story.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from greenroom.core.facts import (
    Action,
    Admit,
    Cause,
    Cut,
    Device,
    Done,
    Event,
    Group,
    InstanceReported,
    MemoryMeasured,
    Model,
    Operation,
    OperatorAsked,
    Outcome,
    Policy,
    Priority,
    Refuse,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestLost,
    RequestQuiet,
    SetTimer,
    Setup,
    SetupChanged,
    ShutdownAsked,
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
from tests.watch import RAM, Broken, Watch

DRAIN_S_MAX = 7200.0  # after the last arrival every request must have ended
CLOSING_S_MAX = 1200.0  # after shutdown everything must be gone
REST_S = 120.0  # nobody asks for anything: idle ladders run down
LADDER_SLACK_S = 5.0
GROWS = 0.005  # probability that an engine takes more memory while it serves a request
EVENTS_MAX = 60_000
TAIL = 60
COMPARE_EVERY = 5  # events that caused nothing: every so many the scheduler's view is compared
PATIENT_S = 300.0


@dataclass(frozen=True, slots=True)
class Nights:
    """How a model really sleeps: probabilities, and factors on what its tiers promise."""

    sleep_fails: float = 0.0
    wake_fails: float = 0.0
    wake_finds_no_room: float = 0.0
    vain_wakes: int = 1  # then that many in a row
    frees_nothing: float = 0.0
    residue: float = 1.0
    residue_creeps: float = 0.0
    copy: float = 1.0
    keeps_copy: bool = False
    unfit: tuple[int, ...] = ()  # levels that each of its instances says it must not use
    dozes_after_s: float = 5.0  # where its engine falls asleep by itself


@dataclass(frozen=True, slots=True)
class Truth:
    """What a model is really like; the scheduler only believes things about it."""

    peak_mib: int
    up_s: float
    down_s: float
    start_fails: float  # probability
    dies: float  # probability, per time it becomes ready
    cause: Cause
    service_s: float
    nights: Nights = field(default_factory=Nights)


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad this world is."""

    cancel: float
    lost: float
    slow_release: float
    leak: float
    unkillable: float
    foreign: float  # share of the capacity foreign processes may take
    race: float  # a report that crosses an order on its way
    sample_s: float
    tells_available: bool  # samples of host RAM say what can really be taken


@dataclass(slots=True)
class Engine:
    """The process behind an instance."""

    generation: int
    devices: tuple[str, ...]
    phase: State
    holds_mib: dict[str, int]
    move: int = 0  # the end of an abandoned move is told by its number
    host_mib: int = 0
    dozing: bool = False  # asleep by itself; a request wakes it
    vain: int = 0  # so many more wakes find no room


@dataclass(slots=True)
class Story:
    """What a run did, for comparison and for people."""

    seed: int
    events: int = 0
    digest: str = ""
    requests: int = 0
    admitted: int = 0
    refused: int = 0
    starts: int = 0
    moves: int = 0
    cuts: int = 0
    sleeps: int = 0
    dozes: int = 0
    sleep_faults: int = 0  # sleeps and wakes that ended an engine, freed nothing or found no room
    ended_at: float = 0.0
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL))


# ------------------------------------------------------------------------------------------------------ making a world


def make_devices(rng: random.Random) -> tuple[Device, ...]:
    made = []
    for n in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        capacity = rng.choice((6000, 8000, 16000, 24000))
        measured = rng.random() < 0.7
        total = capacity + rng.choice((0, 0, 1000)) if rng.random() < 0.7 else None
        made.append(Device(f"gpu{n}", "gpu" if measured else "declared", capacity, rng.choice((0, 0, 500)), total, measured=measured))
    if rng.random() < 0.4:
        made.append(Device(RAM, "ram", rng.choice((8000, 32000)), 0, measured=rng.random() < 0.5))
    return tuple(made)


def make_tiers(rng: random.Random, need: int, up_s: float) -> tuple[SleepTier, ...]:
    if rng.random() > 0.6:
        return ()
    one = SleepTier(1, rng.randint(30, 400), need, max(0.1, need / 4000), 0.1 + need / 20000)
    two = SleepTier(2, rng.randint(30, 300), 50, 0.2, 0.5 + up_s / 3)
    return rng.choice(((one,), (two,), (one, two)))


def make_nights(rng: random.Random) -> Nights:
    if rng.random() < 0.3:
        return Nights()
    return Nights(
        sleep_fails=rng.choice((0.0, 0.0, 0.1, 0.5)),
        wake_fails=rng.choice((0.0, 0.0, 0.1, 0.5)),
        wake_finds_no_room=rng.choice((0.0, 0.0, 0.2, 0.6)),
        vain_wakes=rng.randint(1, 3),
        frees_nothing=rng.choice((0.0, 0.0, 0.0, 0.2, 1.0)),
        residue=rng.choice((0.7, 1.0, 1.0, 2.0, 5.0)),
        residue_creeps=rng.choice((0.0, 0.0, 0.3)),
        copy=rng.choice((0.5, 1.0, 1.0, 1.5, 2.5)),
        keeps_copy=rng.random() < 0.3,
        unfit=rng.choice(((), (), (), (), (1,), (2,), (1, 2))),
        dozes_after_s=rng.choice((0.5, 5.0, 30.0)),
    )


def make_model(rng: random.Random, name: str, devices: Sequence[Device], may_pin: bool) -> tuple[Model, Truth]:
    gpus = [d for d in devices if d.kind != RAM]
    on_ram = len(devices) > len(gpus) and rng.random() < 0.15
    many = not on_ram and len(gpus) >= 2 and rng.random() < 0.15
    if on_ram:
        candidates: tuple[str, ...] = (RAM,)
    elif many or rng.random() < 0.6:
        candidates = tuple(d.id for d in gpus)
    else:
        candidates = (rng.choice(gpus).id,)
    room = min(d.capacity_mib - d.headroom_mib for d in devices if d.id in candidates)
    need = rng.randint(300, int(room * rng.choice((0.3, 0.6, 1.0))))
    pinned = may_pin and need <= 0.35 * room and rng.random() < 0.3
    unknown = not pinned and rng.random() < 0.12
    up_s = rng.choice((0.5, 2.0, 8.0, 30.0)) * rng.uniform(0.6, 1.5)
    down_s = rng.choice((0.0, 0.2, 1.0))
    tiers = () if on_ram else make_tiers(rng, need, up_s)
    dozes = not tiers and not on_ram and rng.random() < 0.2
    model = Model(
        id=name,
        devices=candidates,
        need_mib=None if unknown else need,
        need_source="unknown" if unknown else rng.choice(("declared", "estimated", "flags")),
        host_mib=rng.choice((0, 0, 0, 500)) if not on_ram else 0,
        devices_count=2 if many else 1,
        parallel=rng.choice((1, 2, 4, 8)),
        queue_limit=rng.choice((3, 256, 256, 256)),
        pinned=pinned,
        preload=rng.random() < 0.1,
        on_conflict=rng.choice(("refuse", "refuse", "wait")),
        priority=rng.choice((Priority.INTERACTIVE, Priority.INTERACTIVE, Priority.BATCH)),
        sleep=tiers,
        doze=SleepTier(1, rng.randint(30, 400), 0, 0.0, 0.1 + need / 4000) if dozes else None,
        sleep_after_s=rng.choice((None, 1.0, 5.0, 30.0)) if tiers else rng.choice((None, 5.0)),
        ttl_s=None if pinned else rng.choice((None, None, 10.0, 60.0)),
        up_s=up_s * rng.choice((0.25, 1.0, 1.0, 4.0)),
        down_s=down_s,
        lone_start=rng.random() < 0.2,
        misconfigured="its command names a file that does not exist" if rng.random() < 0.03 else "",
        digest=f"{name} 1",
    )
    if model.ttl_s is None and not pinned and random.Random(f"auto {need} {up_s}").random() < 0.3:  # its own dice: the seeds' stories stay
        model = replace(model, ttl_auto=True)
    size = need * (rng.uniform(1.0, 1.25) if rng.random() < 0.2 else rng.uniform(0.7, 1.0))
    broken = rng.random() < 0.06
    truth = Truth(
        peak_mib=int(size * (0.5 if unknown else 1.0)),
        up_s=up_s,
        down_s=down_s,
        start_fails=1.0 if broken else rng.choice((0.0, 0.0, 0.05, 0.3)),
        dies=rng.choice((0.0, 0.0, 0.1, 0.4)),
        cause=rng.choice((Cause.EXITED, Cause.EXITED, Cause.OOM, Cause.STARTUP_MEMORY, Cause.TIMEOUT, Cause.MISCONFIGURED)),
        service_s=rng.choice((0.05, 0.3, 1.0, 3.0)),
        nights=make_nights(rng),
    )
    return model, truth


def make_policy(rng: random.Random) -> Policy:
    return Policy(
        patience_s=rng.choice((1.0, 5.0)),
        quantum_factor=rng.choice((0.5, 2.0, 4.0)),
        min_residency_s=rng.choice((0.0, 0.0, 3.0)),
        room_wait_s=rng.choice((5.0, 30.0)),
        queue_limit=rng.choice((20, 4096, 4096)),
        drain_timeout_s=rng.choice((None, None, None, 10.0)),
        harm_check=rng.choice((0.0, 0.0, 0.5)),
        lanes=rng.choice((1, 1, 2)),
        exact_victims_max=rng.choice((2, 10)),
        sleep_faults_max=rng.choice((1, 2, 2, 4)),
        sleep_faults_window_s=rng.choice((30.0, 86400.0)),
        early_sleep_s=rng.choice((None, 1.0, 5.0, 20.0)),
        ram_floor_mib=rng.choice((0, 1024, 1024, 4096)),
    )


def make_groups(rng: random.Random, names: Sequence[str]) -> tuple[Group, ...]:
    if rng.random() > 0.25 or len(names) < 3:
        return ()
    shuffled = list(names)
    rng.shuffle(shuffled)
    cut = rng.randint(1, len(shuffled) - 1)
    made = [
        Group("g0", frozenset(shuffled[:cut]), rng.random() < 0.6, rng.random() < 0.4, rng.random() < 0.15),
        Group("g1", frozenset(shuffled[cut : cut + 2]), rng.random() < 0.6, rng.random() < 0.4, False),
    ]
    return tuple(made[: rng.randint(1, 2)])


def make_weather(rng: random.Random) -> Weather:
    bad = rng.random() < 0.6
    return Weather(
        cancel=rng.choice((0.0, 0.1, 0.5)),
        lost=0.03 if bad else 0.0,
        slow_release=0.3 if bad else 0.0,
        leak=0.05 if bad else 0.0,
        unkillable=0.01 if bad else 0.0,
        foreign=rng.choice((0.0, 0.0, 0.2, 0.6)) if bad else 0.0,
        race=0.4 if bad else 0.0,
        sample_s=rng.choice((1.0, 3.0)),
        tells_available=rng.random() < 0.6,
    )


# ------------------------------------------------------------------------------------------------------------ the world


class World:
    def __init__(self, seed: int, *, log: bool = False) -> None:
        self.rng = rng = random.Random(f"world {seed}")
        self.log = log
        self.weather = make_weather(rng)
        devices = make_devices(rng)
        self.truths: dict[str, Truth] = {}
        models: list[Model] = []
        for n in range(rng.randint(2, 7)):
            model, truth = make_model(rng, f"m{n}", devices, may_pin=sum(m.pinned for m in models) < 2)
            models.append(model)
            self.truths[model.id] = truth
        groups = make_groups(rng, [m.id for m in models])
        self.setup = Setup(devices, tuple(models), groups, make_policy(rng))
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.sequence = 0
        self.now = 0.0
        self.engines: dict[str, Engine] = {}
        self.foreign: dict[str, int] = {d.id: 0 for d in devices}
        self.leaked: dict[str, int] = {d.id: 0 for d in devices}
        self.timer = 0
        self.next_id = 0
        self.loads_until = rng.choice((40.0, 90.0, 200.0))
        self.flights: dict[int, str] = {}  # what this world believes to be in flight
        self.loops: dict[int, tuple[str, float]] = {}  # request -> the closed loop it belongs to (model, think)
        self.closing = False
        self.story = Story(seed)
        self.hash = hashlib.sha256()
        self.watch = Watch(self.setup)
        self.scheduler = Scheduler(self.setup, at=0.0)

    # ------------------------------------------------------------------------------------------------------- machinery

    def later(self, delay_s: float, what: Callable[..., None], *args: Any) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, (self.now + max(0.0, delay_s), self.sequence, what, args))

    def tell(self, event: Event) -> None:
        """One event in, its actions out, every invariant checked."""
        self.story.events += 1
        self._note(f"> {event}")
        self.watch.saw(event)
        self._react("", self.scheduler.handle(event))

    def _react(self, why: str, actions: Sequence[Action]) -> None:
        if why:
            self._note(f"> {why}")
        for action in actions:
            self._note(f"    {action}")
            self.hash.update(repr(action).encode())
        for action in actions:
            self.watch.check(action)
        if actions or self.story.events % COMPARE_EVERY == 0:  # a view costs more than a decision
            self.watch.compare(self.scheduler.view(self.now))
        for action in actions:
            self._obey(action)

    def _note(self, line: str) -> None:
        self.story.tail.append(f"{self.now:10.3f} {line}")
        if self.log:
            print(self.story.tail[-1])

    def _obey(self, action: Action) -> None:
        match action:
            case Admit():
                self._served(action)
            case Refuse(request=request):
                self._next_in_loop(request, refused=True)
            case Cut(request=request):
                self.later(self.rng.choice((0.0, 0.01)), self._finish, request, Outcome.CUT)
            case Start():
                self._started(action)
            case Wake():
                self._woken(action)
            case Sleep():
                self._sleeps(action)
            case Stop():
                self._stops(action)
            case Verify():
                self.later(self.rng.uniform(0.0, 0.3), self._verified, action)
            case SetTimer(at=at):
                self.timer += 1
                self.later(at - self.now, self._tick, self.timer)
            case Done():
                pass

    def _tick(self, number: int) -> None:
        if number == self.timer:
            self.tell(Ticked(self.now))

    def fresh_id(self) -> int:
        self.next_id += 1
        return self.next_id

    # -------------------------------------------------------------------------------------------------------- requests

    def _arrive(self, model: str, loop_think_s: float | None = None) -> None:
        if self.now > self.loads_until and not self.closing:
            return
        rng, request = self.rng, self.fresh_id()
        if loop_think_s is not None:
            self.loops[request] = (model, loop_think_s)
        known = self.watch.models.get(model)
        impatient = rng.random() < self.weather.cancel
        priority = rng.choice((None, None, Priority.BATCH))
        deadline = rng.choice((1.0, 30.0)) if rng.random() < 0.05 else None
        self.tell(RequestArrived(self.now, request, model, priority, deadline))
        self.story.requests += 1
        if impatient:
            self.later(rng.uniform(0.01, 20.0), self._hang_up, request)
        elif known is None or known.on_conflict == "wait" or self.setup.groups:
            self.later(PATIENT_S, self._hang_up, request)  # may wait for ever by right: a pin, a persistent group

    def _hang_up(self, request: int) -> None:
        if request in self.watch.waiting:
            self.tell(RequestCancelled(self.now, request))
            self._next_in_loop(request)
        elif request in self.flights:
            self._finish(request, Outcome.CLIENT_GONE)

    def _served(self, admit: Admit) -> None:
        rng, truth = self.rng, self.truths[admit.model]
        self.flights[admit.request] = admit.model
        engine = self.engines.get(admit.model)
        if engine is not None and engine.dozing:
            self._rouse(admit.model, engine)
        if engine is not None and rng.random() < GROWS:
            engine.holds_mib = {d: int(m * rng.uniform(1.0, 1.2)) for d, m in engine.holds_mib.items()}
        if rng.random() < self.weather.lost:
            self.later(rng.uniform(0.0, 0.5), self._lose, admit.request)
        elif rng.random() < 0.02:
            self.later(rng.uniform(20.0, 200.0), self._finish, admit.request, Outcome.OK)
            self.later(rng.uniform(0.1, 5.0), self._quiet, admit.request, True)
        else:
            self.later(truth.service_s * rng.uniform(0.3, 2.0), self._finish, admit.request, Outcome.OK)

    def _quiet(self, request: int, quiet: bool) -> None:
        if request in self.flights:
            self.tell(RequestQuiet(self.now, request, quiet))
            self.later(self.rng.uniform(5.0, 100.0), self._quiet, request, not quiet)

    def _finish(self, request: int, outcome: Outcome) -> None:
        if self.flights.pop(request, None) is None:
            return
        asked = self.watch.flying[request]
        self.tell(RequestFinished(self.now, request, outcome))
        self._may_doze(asked.model)
        self._next_in_loop(request)

    def _lose(self, request: int) -> None:
        if self.flights.pop(request, None) is None:
            return
        cut = self.watch.flying[request].cut
        if cut:
            self.tell(RequestFinished(self.now, request, Outcome.CUT))
        else:
            self.tell(RequestLost(self.now, request, "the connection was closed"))

    def _next_in_loop(self, request: int, *, refused: bool = False) -> None:
        loop = self.loops.pop(request, None)
        if loop is not None and not self.closing:
            model, think_s = loop
            self.later(think_s * self.rng.uniform(0.5, 1.5) + (5.0 if refused else 0.0), self._arrive, model, think_s)

    # --------------------------------------------------------------------------------------------------------- engines

    def _started(self, start: Start) -> None:
        rng, truth = self.rng, self.truths[start.model]
        assert start.model not in self.engines, f"{start.model} has a process already"
        known = self.watch.models[start.model]
        engine = Engine(start.generation, tuple(d for d in start.devices), State.STARTING, {}, host_mib=known.host_mib)
        self.engines[start.model] = engine
        up_s = truth.up_s * rng.uniform(0.8, 1.3)
        for device in engine.devices:
            engine.holds_mib[device] = truth.peak_mib // 2
        cause = Cause.NONE
        if rng.random() < truth.start_fails:
            cause, up_s = truth.cause, up_s * rng.uniform(0.0, 1.0)
        self.later(up_s, self._risen, start.model, engine, engine.move, up_s, cause)

    def _overfull(self, model: str, engine: Engine) -> bool:
        """Whether its full size would not physically fit."""
        peak = self.truths[model].peak_mib
        for name in engine.devices:
            device = self.watch.devices.get(name)
            if device is not None and self._used_mib(name) - engine.holds_mib.get(name, 0) + peak > (
                device.total_mib or device.capacity_mib
            ):
                return True
        return False

    def _risen(self, model: str, engine: Engine, move: int, took_s: float, cause: Cause) -> None:
        if self.engines.get(model) is not engine or engine.move != move:
            return
        if cause is Cause.NONE and self._overfull(model, engine):
            cause = Cause.OOM
        if cause is not Cause.NONE:
            self._gone(model, engine, cause, wanted_mib=self.truths[model].peak_mib if cause is Cause.STARTUP_MEMORY else None)
            return
        self._up(model, engine, took_s, unfit_levels=self.truths[model].nights.unfit, why="as its start told")

    def _up(self, model: str, engine: Engine, took_s: float, **more: Any) -> None:
        rng = self.rng
        engine.phase = State.READY
        for device in engine.devices:
            engine.holds_mib[device] = self.truths[model].peak_mib
        if rng.random() < self.truths[model].dies:
            self.later(rng.expovariate(1 / 10.0), self._dies, model, engine)
        self._report(model, engine, State.READY, took_s=took_s, **more)
        self._may_doze(model)

    def _report(self, model: str, engine: Engine, state: State, **more: Any) -> None:
        measured = {d: m for d, m in engine.holds_mib.items() if d in self.watch.devices and self.watch.devices[d].measured}
        if state is State.STOPPED:
            measured = {}
        self.tell(InstanceReported(self.now, model, engine.generation, state, measured_mib=measured, **more))

    def _gone(self, model: str, engine: Engine, cause: Cause = Cause.NONE, **more: Any) -> None:
        """The process tree is reaped and its memory is back (or is said to be lost)."""
        if self.engines.get(model) is engine:
            del self.engines[model]
        before = self.rng.random() < 0.5
        if before:
            self._break_flights(model, engine)
        self._report(model, engine, State.STOPPED, cause=cause, why=f"{model} ended", **more)
        if not before:
            self._break_flights(model, engine)

    def _break_flights(self, model: str, engine: Engine) -> None:
        """Whoever was served by it learns it from the connection: before or after the host reports the end."""
        mine = [n for n, asked in list(self.watch.flying.items()) if asked.model == model and asked.generation == engine.generation]
        for request in mine:
            if request not in self.flights:
                continue
            if self.rng.random() < 0.5:
                self._lose(request)
            else:
                self._finish(request, Outcome.ENGINE_BROKE)

    def _dies(self, model: str, engine: Engine) -> None:
        if self.engines.get(model) is not engine or engine.phase in (State.STOPPING, State.STOPPED):
            return
        engine.move += 1
        engine.phase = State.STOPPED
        self._gone(model, engine, self.rng.choice((Cause.EXITED, Cause.EXITED, Cause.OOM, Cause.STALLED)), exit_code=1)

    def _verified(self, verify: Verify) -> None:
        engine = self.engines.get(verify.model)
        if engine is None or engine.generation != verify.generation:
            self.tell(InstanceReported(self.now, verify.model, verify.generation, State.STOPPED, cause=Cause.EXITED, why="no such process"))
        elif engine.phase is State.READY:
            self._report(verify.model, engine, State.READY)

    def _tier(self, name: str, level: int) -> SleepTier:
        model = self.watch.models.get(name)  # None: a reload has removed it meanwhile
        tiers = (*model.sleep, *((model.doze,) if model.doze is not None else ())) if model is not None else ()
        return next((tier for tier in tiers if tier.level == level), SleepTier(level, 100, 0, 0.5, 0.5))

    def _woken(self, wake: Wake) -> None:
        rng, engine, nights = self.rng, self.engines[wake.model], self.truths[wake.model].nights
        engine.move += 1
        engine.phase, engine.dozing = State.WAKING, False
        took_s = self._tier(wake.model, wake.level).wake_s * rng.uniform(0.8, 1.3)
        if not engine.vain and rng.random() < nights.wake_finds_no_room:
            engine.vain = nights.vain_wakes
        fails = not engine.vain and rng.random() < nights.wake_fails
        self.later(took_s * (rng.random() if fails else 1.0), self._awake, wake.model, engine, engine.move, took_s, fails)

    def _awake(self, model: str, engine: Engine, move: int, took_s: float, fails: bool) -> None:
        if self.engines.get(model) is not engine or engine.move != move:
            return
        rng = self.rng
        if fails:
            self.story.sleep_faults += 1
            self._gone(model, engine, rng.choice((Cause.WAKE_FAILED, Cause.WAKE_FAILED, Cause.TIMEOUT, Cause.EXITED)))
        elif engine.vain or self._overfull(model, engine):
            engine.vain = max(0, engine.vain - 1)
            self.story.sleep_faults += 1
            if rng.random() < 0.2:
                self._gone(model, engine, Cause.OOM)
            else:
                self._no_room(model, engine)
        else:
            known = self.watch.models.get(model)
            if not self.truths[model].nights.keeps_copy:
                engine.host_mib = known.host_mib if known is not None else 0
            self._up(model, engine, took_s, host_mib=engine.host_mib if rng.random() < 0.8 else None)

    def _no_room(self, model: str, engine: Engine) -> None:
        """It could not be woken and sleeps on; sometimes it is plain who has the room."""
        rng, device = self.rng, engine.devices[0]
        known = self.watch.devices.get(device)
        if known is not None and known.measured and rng.random() < 0.4:
            taken = int(known.capacity_mib * rng.uniform(0.1, 0.5))
            self.leaked[device] += taken
            self.later(rng.uniform(2.0, 40.0), self._leak_ends, device, taken)
        engine.phase = State.ASLEEP
        samples = tuple(s for d in engine.devices if (s := self._sampled(d)) is not None) if rng.random() < 0.6 else ()
        host_mib = engine.host_mib if rng.random() < 0.5 else None
        self._report(model, engine, State.ASLEEP, samples=samples, host_mib=host_mib, level=rng.choice((0, self.watch.kept[model].level)))

    def _sleeps(self, sleep: Sleep) -> None:
        rng, engine = self.rng, self.engines.get(sleep.model)
        if engine is None:
            return  # it died in this very instant; its report is on the way
        engine.move += 1
        engine.phase = State.GOING_TO_SLEEP
        tier = self._tier(sleep.model, sleep.level)
        took_s = tier.sleep_s * rng.uniform(0.8, 1.3)
        fails = rng.random() < self.truths[sleep.model].nights.sleep_fails
        self.story.sleeps += 1
        self.later(took_s * (rng.random() if fails else 1.0), self._asleep, sleep.model, engine, engine.move, took_s, tier, fails)

    def _asleep(self, model: str, engine: Engine, move: int, took_s: float, tier: SleepTier, fails: bool) -> None:
        if self.engines.get(model) is not engine or engine.move != move:
            return
        rng, nights, known = self.rng, self.truths[model].nights, self.watch.devices.get(RAM)
        copy_mib = int(tier.host_mib * nights.copy * rng.uniform(0.9, 1.1))
        if fails:
            self.story.sleep_faults += 1
            self._gone(model, engine, rng.choice((Cause.SLEEP_FAILED, Cause.SLEEP_FAILED, Cause.TIMEOUT, Cause.EXITED)))
            return
        grows_mib = max(0, copy_mib - engine.host_mib)
        if known is not None and RAM not in engine.devices and self._used_mib(RAM) + grows_mib > (known.total_mib or known.capacity_mib):
            self._gone(model, engine, Cause.OOM)  # of host RAM
            return
        engine.phase = State.ASLEEP
        if RAM not in engine.devices:
            engine.host_mib = max(engine.host_mib, copy_mib)
        useless = rng.random() < nights.frees_nothing
        self.story.sleep_faults += useless
        for device in engine.devices:
            held_mib = engine.holds_mib[device]
            left_mib = int(tier.residue_mib * nights.residue * rng.uniform(0.8, 1.1))
            engine.holds_mib[device] = int(held_mib * rng.uniform(0.92, 1.0)) if useless else min(held_mib, left_mib)
        if rng.random() < nights.residue_creeps:
            self.later(rng.uniform(1.0, 30.0), self._creeps, model, engine, engine.move)
        if rng.random() < self.truths[model].dies / 2:
            self.later(rng.expovariate(1 / 10.0), self._dies, model, engine)
        host_mib = engine.host_mib if rng.random() < 0.8 else None
        self._report(model, engine, State.ASLEEP, took_s=took_s, level=tier.level, host_mib=host_mib)

    def _creeps(self, model: str, engine: Engine, move: int) -> None:
        """A sleeper takes more, as far as there is more."""
        if self.engines.get(model) is engine and engine.move == move:
            for device in engine.devices:
                known = self.watch.devices.get(device)
                room = known.capacity_mib - self._used_mib(device) if known is not None else 0
                engine.holds_mib[device] += max(0, min(room, self.rng.randint(50, 1500)))

    def _may_doze(self, model: str) -> None:
        """An engine that can, falls asleep when it has been idle for a while."""
        known, engine = self.watch.models.get(model), self.engines.get(model)
        if known is not None and known.doze is not None and engine is not None and engine.phase is State.READY:
            self.later(self.truths[model].nights.dozes_after_s, self._dozes, model, engine, self.watch.admitted_to.get(model, 0))

    def _dozes(self, model: str, engine: Engine, admitted: int) -> None:
        if self.engines.get(model) is not engine or engine.phase is not State.READY or engine.dozing:
            return
        known = self.watch.models.get(model)
        if known is None or known.doze is None or self.watch.admitted_to.get(model, 0) != admitted or model in self.flights.values():
            return
        engine.dozing = True
        for device in engine.devices:
            engine.holds_mib[device] = min(engine.holds_mib[device], int(known.doze.residue_mib * self.truths[model].nights.residue))
        self.later(self.rng.choice((0.0, 0.5, 2.0)), self._tells_doze, model, engine)

    def _tells_doze(self, model: str, engine: Engine) -> None:
        """Seen a little later; what was put to sleep, stopped or woken meanwhile is not told."""
        if self.engines.get(model) is engine and engine.phase is State.READY and engine.dozing:
            self.story.dozes += 1
            self._report(model, engine, State.ASLEEP, level=1)
            if self.watch.kept[model].state is State.ASLEEP:
                engine.phase = State.ASLEEP

    def _rouse(self, model: str, engine: Engine) -> None:
        """The request wakes it."""
        engine.dozing = False
        for device in engine.devices:
            engine.holds_mib[device] = self.truths[model].peak_mib

    def _stops(self, stop: Stop) -> None:
        rng, engine = self.rng, self.engines.get(stop.model)
        if engine is None:
            return
        was_rising = engine.phase in (State.STARTING, State.WAKING)
        engine.move += 1
        engine.phase = State.STOPPING
        if was_rising and rng.random() < self.weather.race:
            self.later(0.0, self._report_late, stop.model, engine, State.READY)
        down_s = self.truths[stop.model].down_s * rng.uniform(0.8, 1.5)
        if rng.random() < self.weather.slow_release:
            down_s += rng.uniform(0.5, 30.0)
        self.later(down_s, self._stopped, stop.model, engine)

    def _report_late(self, model: str, engine: Engine, state: State) -> None:
        if self.engines.get(model) is engine:
            self._report(model, engine, state)

    def _stopped(self, model: str, engine: Engine) -> None:
        if self.engines.get(model) is not engine:
            return
        rng = self.rng
        measured = [d for d in engine.devices if d in self.watch.devices and self.watch.devices[d].measured]
        if measured and rng.random() < self.weather.leak:
            lost = rng.randint(100, 800)
            self.leaked[measured[0]] += lost
            self.later(rng.choice((20.0, 1e9)), self._leak_ends, measured[0], lost)
            self._gone(model, engine, leaked_mib=lost)
        elif rng.random() < self.weather.unkillable:
            held = dict(engine.holds_mib)
            for device, mib in held.items():
                self.leaked[device] = self.leaked.get(device, 0) + mib
            self._gone(model, engine, Cause.UNKILLABLE)
        else:
            self._gone(model, engine)

    def _leak_ends(self, device: str, mib: int) -> None:
        self.leaked[device] -= mib

    # ---------------------------------------------------------------------------------------------------------- memory

    def _used_mib(self, device: str) -> int:
        own = sum(e.holds_mib.get(device, 0) for e in self.engines.values())
        if device == RAM:
            own += sum(e.host_mib for e in self.engines.values())
        return own + self.foreign.get(device, 0) + self.leaked.get(device, 0)

    def _sampled(self, device: str) -> MemoryMeasured | None:
        known = self.watch.devices.get(device)
        if known is None or not known.measured:
            return None
        own = {n: e.holds_mib[device] for n, e in self.engines.items() if device in e.holds_mib and e.phase is not State.STOPPED}
        available = None
        if device == RAM:
            own.update({n: own.get(n, 0) + e.host_mib for n, e in self.engines.items() if e.host_mib})
            if self.weather.tells_available:
                available = max(0, (known.total_mib or known.capacity_mib) - self._used_mib(RAM))
        return MemoryMeasured(self.now, device, self._used_mib(device), own, "pid 4711 (python)", available)

    def _sample(self, device: str) -> None:
        sample = self._sampled(device)
        if sample is not None:
            self.tell(sample)
        self.later(self.weather.sample_s, self._sample, device)

    def _foreign_moves(self, device: str) -> None:
        known = self.watch.devices.get(device)
        if known is not None and self.now < self.loads_until:
            self.foreign[device] = int(known.capacity_mib * self.weather.foreign * self.rng.choice((0.0, 0.0, 0.3, 0.7, 1.0)))
        elif self.rng.random() < 0.7:
            self.foreign[device] = 0
        self.later(self.rng.uniform(5.0, 60.0), self._foreign_moves, device)

    # -------------------------------------------------------------------------------------------- operators and reloads

    def _operate(self) -> None:
        rng = self.rng
        if self.now > self.loads_until:
            return
        model = rng.choice(sorted(self.watch.models))
        operation = rng.choice(list(Operation))
        if operation is Operation.PIN and len(self.watch.pinned) >= 2:
            operation = Operation.UNPIN
        wish = OperatorAsked(self.now, self.fresh_id(), model, operation, rng.random() < 0.3, rng.choice((None, None, 1, 2)))
        self.tell(wish)
        self.later(rng.uniform(5.0, 60.0), self._operate)

    def _reload(self) -> None:
        rng, models = self.rng, list(self.watch.setup.models)
        if self.now > self.loads_until:
            return
        change = rng.choice(("same", "remove", "redefine", "pin", "add", "shrink"))
        devices, groups = self.watch.setup.devices, self.watch.setup.groups
        at = rng.randrange(len(models))
        if change == "remove" and len(models) > 1:
            gone = models.pop(at)
            groups = tuple(replace(g, members=g.members - {gone.id}) for g in groups)
        elif change == "redefine":
            old = models[at]
            need = None if old.need_mib is None else max(200, int(old.need_mib * 0.8))
            models[at] = replace(old, need_mib=need, digest=f"{old.digest}'")
            self.truths[old.id] = replace(self.truths[old.id], peak_mib=int(self.truths[old.id].peak_mib * 0.8))
        elif change == "pin" and not any(m.pinned for m in models):
            small = models[at].need_mib is not None and (models[at].need_mib or 0) < 2000
            models[at] = replace(models[at], pinned=small, ttl_s=None, ttl_auto=False)
        elif change == "add":
            name = f"n{self.fresh_id()}"
            model, truth = make_model(rng, name, devices, may_pin=False)
            models.append(model)
            self.truths[name] = truth
            self._load_of(name)
        elif change == "shrink":
            devices = tuple(replace(d, capacity_mib=int(d.capacity_mib * 0.9)) for d in devices)
        self.tell(SetupChanged(self.now, Setup(devices, tuple(models), groups, self.watch.setup.policy)))
        self.later(rng.uniform(20.0, 100.0), self._reload)

    # ----------------------------------------------------------------------------------------------------------- loads

    def _load_of(self, model: str) -> None:
        rng = self.rng
        kind = rng.choice(("hog", "rare", "burst", "open", "agent", "none"))
        if kind in ("hog", "agent"):
            clients = rng.randint(1, 10 if kind == "hog" else 3)
            for _ in range(clients):
                self.later(rng.uniform(0.0, 5.0), self._arrive, model, 0.002 if kind == "hog" else rng.choice((0.05, 1.0, 5.0)))
            return
        rate = {"rare": 0.05, "burst": 2.0, "open": 0.4, "none": 0.0}[kind]
        at = rng.expovariate(rate) if rate else 1e9
        while self.now + at < self.loads_until:
            if kind != "burst" or int(at / 9) % 2 == 0:
                self.later(at, self._arrive, model)
            at += rng.expovariate(rate)

    # ------------------------------------------------------------------------------------------------------------- run

    def play(self) -> Story:
        rng = self.rng
        self._react("start", self.scheduler.start())
        for model in self.setup.models:
            self._load_of(model.id)
        for device in self.setup.devices:
            self.later(rng.uniform(0.0, 1.0), self._sample, device.id)
            if self.weather.foreign:
                self.later(rng.uniform(1.0, 20.0), self._foreign_moves, device.id)
        if rng.random() < 0.5:
            self.later(rng.uniform(1.0, 30.0), self._operate)
        if rng.random() < 0.4:
            self.later(rng.uniform(5.0, 50.0), self._reload)
        amidst = rng.random() < 0.3
        self._run_until(self.loads_until * rng.uniform(0.3, 0.9) if amidst else self.loads_until, lambda: False)
        if not amidst:
            self._run_until(self.now + DRAIN_S_MAX, self._drained)
            waiting = [f"{a.id} of {a.model} since {a.arrived_at:.1f}" for a in self.watch.waiting.values()]
            wishes = [w for w in self.watch.wishes.values() if not self._may_wait(w.model)]
            if waiting or wishes:
                raise Broken(f"starved: {waiting[:5]} {wishes[:3]}")
            if rng.random() < 0.3:
                self._run_until(self.now + REST_S, lambda: False)
                self.watch.idle_ladders(LADDER_SLACK_S)
        self._close()
        return self._ended()

    def _may_wait(self, model: str) -> bool:
        """Configured to wait for as long as a pin keeps it out."""
        known = self.watch.models.get(model)
        return known is not None and known.on_conflict == "wait"

    def _drained(self) -> bool:
        return not self.watch.waiting and not self.watch.flying and not self.watch.wishes

    def _run_until(self, end: float, done: Callable[[], bool]) -> None:
        while self.heap and self.heap[0][0] <= end and not done():
            at, _, what, args = heapq.heappop(self.heap)
            self.now = at
            if self.story.events > EVENTS_MAX:
                raise Broken(f"{EVENTS_MAX} events and no end")
            what(*args)

    def _close(self) -> None:
        self.closing = True
        force = self.rng.random() < 0.5
        self.tell(ShutdownAsked(self.now, force=force))
        if self.watch.waiting:
            raise Broken(f"{len(self.watch.waiting)} requests still wait after shutdown was asked for")
        self._arrive(next(iter(sorted(self.watch.models))))
        if not force and self.rng.random() < 0.3:
            self._run_until(self.now + 5.0, self._drained)
            self.tell(ShutdownAsked(self.now, force=True))
        self._run_until(self.now + CLOSING_S_MAX, lambda: self._drained() and not self.engines)
        self.watch.all_over()
        if self.engines:
            raise Broken(f"processes left after shutdown: {sorted(self.engines)}")

    def _ended(self) -> Story:
        story, watch = self.story, self.watch
        story.digest = self.hash.hexdigest()
        story.admitted, story.refused, story.starts, story.moves, story.cuts = (
            watch.admitted,
            watch.refused,
            watch.starts,
            watch.moves,
            watch.cuts,
        )
        story.ended_at = self.now
        return story


class SeedFailed(AssertionError):
    """A world in which an invariant broke; the message holds the command that plays it again."""


def play(seed: int, *, log: bool = False) -> Story:
    world = World(seed, log=log)
    try:
        return world.play()
    except Exception as exc:
        tail = "\n".join(world.story.tail)
        raise SeedFailed(
            f"seed {seed} at {world.now:.3f} s: {type(exc).__name__}: {exc}\nplay it alone: python -m tests.world {seed}\n{tail}"
        ) from exc


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("seed", type=int, nargs="?", help="play this seed alone")
    parser.add_argument("--log", action="store_true", help="print every event and action")
    parser.add_argument("--from", dest="first", type=int, help="the first of consecutive seeds (default: seeds drawn anew)")
    parser.add_argument("--count", type=int, default=1000)
    options = parser.parse_args(argv)
    if options.seed is not None:
        print(in_words(play(options.seed, log=options.log)))
        return 0
    began, failed, events = time.perf_counter(), [], 0
    first = options.first if options.first is not None else random.SystemRandom().randrange(2**32)
    for seed in range(first, first + options.count):
        try:
            events += play(seed).events
        except SeedFailed as exc:
            failed.append(seed)
            print(str(exc).splitlines()[0][:300], flush=True)
    print(f"{options.count} worlds from seed {first}, {events} events, {len(failed)} failed, {time.perf_counter() - began:.0f} s")
    return 1 if failed else 0


def in_words(story: Story) -> str:
    return (
        f"seed {story.seed}: {story.events} events, {story.requests} requests, {story.admitted} admitted, {story.refused} refused, "
        f"{story.starts} starts, {story.moves} stops and sleeps, {story.cuts} cuts, ended at {story.ended_at:.1f} s, "
        f"actions {story.digest[:16]}"
    )


if __name__ == "__main__":
    sys.exit(main())
