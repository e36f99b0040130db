"""greenroom itself, and strict arrival order as greenroom's planner has it: deciders driven in virtual time.

Nothing is re-implemented here.  Events go in, actions come out; Start, Wake, Sleep and Stop take the world's time and
come back as reports, and the timer is the world's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from greenroom.core.facts import (
    Action,
    Admit,
    Device,
    Event,
    InstanceReported,
    Model,
    Policy,
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
    Wake,
)
from greenroom.core.scheduler import Scheduler
from greenroom.planner.fifo import Fifo
from greenroom.planner.virtual import Decider

from .engine import Rules, World
from .loads import Load, SimModel

UNLIMITED = 10**9


def device_id(number: int) -> str:
    return f"gpu{number}"


def as_model(model: SimModel, devices: tuple[str, ...]) -> Model:
    tiers = tuple(SleepTier(t.level, t.residue_mib, t.host_mib, t.sleep_s, t.wake_s) for t in model.tiers)
    if model.sleep_s is not None and not tiers:
        tiers = (SleepTier(level=1, residue_mib=model.residue_mib, host_mib=0, sleep_s=model.sleep_s, wake_s=model.wake_s),)
    return Model(
        id=model.name,
        devices=devices,
        need_mib=model.need_mib,
        need_source="declared",
        parallel=model.slots,
        queue_limit=UNLIMITED,
        sleep=tiers,
        up_s=model.up_s,
        down_s=model.down_s,
        digest=model.name,
    )


def as_setup(load: Load, policy: Policy) -> Setup:
    devices = tuple(Device(device_id(n), "declared", mib, measured=False) for n, mib in enumerate(load.capacities_mib))
    if load.ram_mib is not None:
        devices = (*devices, Device("ram", "ram", load.ram_mib, measured=False))
    models = tuple(as_model(m, tuple(d.id for d in devices if d.kind != "ram")) for m in load.models)
    return Setup(devices=devices, models=models, policy=replace(policy, queue_limit=UNLIMITED))


class Driven(Rules):
    """What answers events with actions, as rules of this world."""

    def __init__(self, name: str, decider: Callable[[Setup, float], Decider], policy: Policy | None = None) -> None:
        self.name, self.decider, self.policy = name, decider, policy or Policy()

    def fresh(self, world: World) -> Decider:
        self.numbers = {m.name: n for n, m in enumerate(world.models)}
        self.generations = [0] * len(world.models)
        return self.decider(as_setup(world.load, self.policy), 0.0)

    def settle(self, world: World) -> None:
        """The scheduler settles by itself."""

    def arrived(self, world: World, model: int, request: int) -> None:
        self._feed(world, RequestArrived(world.now, request, world.models[model].name))

    def finished(self, world: World, model: int, request: int) -> None:
        self._feed(world, RequestFinished(world.now, request))

    def risen(self, world: World, model: int, took_s: float) -> None:
        self._feed(world, self._report(world, model, State.READY, took_s, world.models[model].need_mib))

    def left(self, world: World, model: int) -> None:
        resident, known = world.residents[model], world.models[model]
        if resident.to_sleep:
            tier = known.tier(resident.level)
            report = self._report(world, model, State.ASLEEP, tier.sleep_s, tier.residue_mib)
            self._feed(world, replace(report, level=tier.level, host_mib=tier.host_mib))
        else:
            self._feed(world, self._report(world, model, State.STOPPED, known.down_s, 0))

    def ticked(self, world: World) -> None:
        self._feed(world, Ticked(world.now))

    def _report(self, world: World, model: int, state: State, took_s: float, held_mib: int) -> InstanceReported:
        return InstanceReported(
            at=world.now,
            model=world.models[model].name,
            generation=self.generations[model],
            state=state,
            took_s=took_s,
            measured_mib={device_id(world.residents[model].device): held_mib},
        )

    def _feed(self, world: World, event: Event) -> None:
        for action in world.memo.handle(event):
            self._act(world, action)

    def _act(self, world: World, action: Action) -> None:
        match action:
            case Admit(request=request, model=model):
                world.admit(self.numbers[model], request)
            case Refuse(request=request):
                world.refuse(request)
            case Start(model=model, generation=generation, devices=devices):
                self.generations[self.numbers[model]] = generation
                world.rise(self.numbers[model], int(devices[0].removeprefix("gpu")))
            case Wake(model=model):
                number = self.numbers[model]
                world.rise(number, world.residents[number].device)
            case Sleep(model=model, level=level):
                world.leave(self.numbers[model], to_sleep=True, level=level)
            case Stop(model=model):
                world.leave(self.numbers[model], to_sleep=False)
            case SetTimer(at=at):
                world.set_timer(at)


class Greenroom(Driven):
    def __init__(self, policy: Policy | None = None, *, label: str = "") -> None:
        super().__init__("greenroom" + (f", {label}" if label else ""), Scheduler, policy)


class StrictFifo(Driven):
    """One queue for all; the head waits for its model, everybody waits for the head."""

    def __init__(self) -> None:
        super().__init__("strict FIFO", Fifo)
