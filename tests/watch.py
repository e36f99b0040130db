"""The invariants of the scheduler, checked from outside.

Built only from the events that go in and the actions that come out; nothing of the scheduler is read, except that its
public view is compared.  Where the truth depends on what the core has learned, the lowest value it could defend is used,
so a broken check is always a real fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from greenroom.core.facts import (
    Action,
    Admit,
    Cause,
    Cut,
    Device,
    Done,
    Event,
    InstanceReported,
    MemoryMeasured,
    Model,
    Operation,
    OperatorAsked,
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
    Start,
    State,
    Stop,
    Tell,
    Ticked,
    Verify,
    Wake,
)
from greenroom.core.views import View

RAM = "ram"
ADMISSIONS_MAX = 2  # one transparent retry
SAME_INSTANT_MAX = 2000
OPERATOR_S_MAX = 3600.0
REHEARSAL = "its first sleep, made while nobody waits for it"
REHEARSAL_S_MAX = 10.0  # after it fell asleep, nobody else came and there was room: by then it is awake again
USELESS = 0.91  # a sleep after which surely more than that of what was held is still held, frees nothing
MEMORY = (Cause.OOM, Cause.STARTUP_MEMORY)


class Broken(AssertionError):
    """An invariant does not hold."""


def must(holds: bool, why: str) -> None:
    if not holds:
        raise Broken(why)


@dataclass(slots=True)
class Asked:
    """A request, from arrival to its one end."""

    id: int
    model: str
    priority: Priority
    arrived_at: float
    order: int
    generation: int = 0  # of the instance it was admitted to
    admissions: int = 0
    cut: bool = False
    quiet_since: float | None = None


@dataclass(slots=True)
class Kept:
    """One instance as its reports tell."""

    state: State = State.STOPPED
    generation: int = 0
    devices: tuple[str, ...] = ()  # where something is booked for it, host RAM included
    lanes: tuple[str, ...] = ()  # where it rises
    at_ready_mib: int = 0  # measured when it became ready, on its fullest device
    sized: bool = True  # False: nobody knows what it needs
    reserved: dict[str, int] = field(default_factory=dict)
    measured: dict[str, int] = field(default_factory=dict)
    residue: dict[str, int] = field(default_factory=dict)
    level: int = 0
    idle_at: float = 0.0  # became ready, or its last request ended
    from_sleep: bool = False  # stopped out of sleep: it holds no more than its residue
    ram_mib: int = 0  # host RAM beside its own devices: what it was started with, or its copy while it sleeps
    held_mib: int = 0  # what it was last measured to hold before it went to sleep, on its fullest device
    unfit: tuple[int, ...] = ()  # levels that this instance must not use
    dozing: dict[str, int] | None = None  # it said that it fell asleep by itself; whether that counted is not known yet
    vain_wakes: int = 0  # in a row
    alone_at: float | None = None  # rehearsed, and asleep with room to come back since then

    def holds_mib(self, device: str) -> int:
        """The least a truthful book has for it on this device now."""
        if device == RAM and RAM not in self.lanes:
            return 0 if self.state is State.STOPPED else self.ram_mib
        if device not in self.devices:
            return 0
        if self.dozing is not None:
            return min(self.dozing.get(device, 0), self.measured.get(device, 0))
        match self.state:
            case State.STOPPED:
                return 0
            case State.STARTING:
                return self.reserved.get(device, 0)
            case State.ASLEEP:
                return self.residue.get(device, 0)
            case State.STOPPING if self.from_sleep:
                return self.residue.get(device, 0)
            case _ if device in self.measured:
                return self.measured[device]
            case _ if self.measured and device in self.lanes:
                return min(self.reserved.get(device, 0), self.at_ready_mib)  # alike on each of its devices
            case _:
                return self.reserved.get(device, 0) if self.sized else 0


class Watch:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.models: dict[str, Model] = {m.id: m for m in setup.models}
        self.devices: dict[str, Device] = {d.id: d for d in setup.devices}
        self.kept: dict[str, Kept] = {m.id: Kept() for m in setup.models}
        self.waiting: dict[int, Asked] = {}
        self.flying: dict[int, Asked] = {}
        self.ended: set[int] = set()
        self.wishes: dict[int, OperatorAsked] = {}
        self.pinned: set[str] = {m.id for m in setup.models if m.pinned}
        self.may_leave: dict[str, str] = {}  # pinned models that may leave, and why
        self.forced: set[str] = set()
        self.outside: dict[str, deque[int]] = {}
        self.unkillable: dict[str, dict[str, int]] = {}  # model -> device -> MiB that never came back
        self.shutdown: ShutdownAsked | None = None
        self.admitted_to: dict[str, int] = {}  # how many requests each model was given
        self.faults: dict[str, deque[float]] = {}  # sleeps and wakes that ended an engine
        self.off: set[str] = set()  # who is never put to sleep again, until an operator or a new definition says so
        self.due_off: dict[str, str] = {}  # whose sleep must be switched off with the event at hand, and why
        self.copies: dict[tuple[str, int], int] = {}  # (model, level) -> MiB of host RAM, as last measured
        self.available: dict[str, tuple[int, int]] = {}  # device -> (MiB that could be taken, MiB our engines held) at its last sample
        self.doubted: set[str] = set()  # a Verify is out: nothing is admitted until it is answered
        self.now = 0.0
        self.at_once = 0
        self.arrivals = 0
        self.refused = self.admitted = self.starts = self.moves = self.cuts = 0

    # ---------------------------------------------------------------------------------------------------------- events

    def saw(self, event: Event) -> None:
        must(event.at >= self.now, "the world went back in time")
        self.at_once = self.at_once + 1 if event.at == self.now else 0
        must(self.at_once < SAME_INSTANT_MAX, "time does not pass: the scheduler asks for the same instant again and again")
        self.now = event.at
        match event:
            case RequestArrived():
                model = self.models.get(event.model)
                priority = event.priority or (model.priority if model else Priority.INTERACTIVE)
                self.arrivals += 1
                self.waiting[event.request] = Asked(event.request, event.model, priority, event.at, self.arrivals)
            case RequestCancelled():
                if self.waiting.pop(event.request, None):
                    self.ended.add(event.request)
            case RequestFinished():
                finished = self.flying.pop(event.request)
                self.ended.add(event.request)
                if finished.model in self.kept:
                    self.kept[finished.model].idle_at = event.at
            case RequestLost():
                lost = self.flying.pop(event.request)
                lost.quiet_since = None
                if lost.cut:
                    self.ended.add(event.request)
                else:
                    self.waiting[event.request] = lost
            case RequestQuiet():
                self.flying[event.request].quiet_since = event.at if event.quiet else None
            case InstanceReported():
                self._reported(event)
            case MemoryMeasured():
                self._measured(event)
            case OperatorAsked():
                self.wishes[event.request] = event
                if event.operation in (Operation.UNLOAD, Operation.SLEEP, Operation.UNPIN):
                    self.may_leave[event.model] = event.operation
                    if event.operation is Operation.SLEEP and not self._is_refused_sleep(event.model):
                        self._may_sleep_again(event.model)
                    if event.force:
                        self.forced.add(event.model)
                if event.operation is Operation.UNPIN:
                    self.pinned.discard(event.model)
            case SetupChanged():
                self._changed(event.setup)
            case ShutdownAsked():
                self.shutdown = event
            case Ticked():
                pass

    def _reported(self, report: InstanceReported) -> None:
        if report.state is not State.ASLEEP:  # that it dozed says nothing of the request that was lost
            self.doubted.discard(report.model)
        kept = self.kept.get(report.model)
        if kept is None or report.generation != kept.generation or kept.state is State.STOPPED:
            return
        if report.state is State.READY and kept.state in (State.STARTING, State.WAKING, State.READY):
            rose = kept.state is not State.READY
            if kept.state is State.WAKING:
                known = self.models.get(report.model)  # awake it holds what it was started with; an engine may keep its copy too
                kept.ram_mib = max(self._seen(report) or 0, known.host_mib if known is not None and RAM not in kept.lanes else 0)
            elif rose:
                kept.unfit = report.unfit_levels
            kept.vain_wakes = 0
            kept.state, kept.idle_at, kept.alone_at = State.READY, report.at if rose else kept.idle_at, None
            kept.measured = {d: m for d, m in report.measured_mib.items() if d in kept.devices}
            kept.at_ready_mib = max(kept.measured.values(), default=0) if rose else kept.at_ready_mib
        elif report.state is State.ASLEEP and kept.state in (State.GOING_TO_SLEEP, State.WAKING):
            self._asleep(kept, report)
        elif report.state is State.ASLEEP and kept.state is State.READY:
            kept.dozing = {d: m for d, m in report.measured_mib.items() if d in kept.devices}
        elif report.state is State.STOPPED:
            if report.cause is Cause.UNKILLABLE:
                self.unkillable[report.model] = {d: kept.holds_mib(d) for d in kept.devices}
            elif kept.state in (State.GOING_TO_SLEEP, State.WAKING) and report.cause not in (*MEMORY, Cause.STALLED):
                self._sleep_fault(report.model)
            kept.state, kept.dozing, kept.alone_at, kept.unfit = State.STOPPED, None, None, ()

    def _asleep(self, kept: Kept, report: InstanceReported) -> None:
        in_vain = kept.state is State.WAKING
        kept.state = State.ASLEEP
        kept.residue = dict(report.measured_mib)
        if (seen_mib := self._seen(report)) is not None:
            kept.ram_mib = seen_mib
        must(not report.level or report.level == kept.level, f"{report.model} was sent to level {kept.level}, it sleeps at {report.level}")
        if in_vain:
            kept.vain_wakes += 1
            if kept.vain_wakes > 1:
                self.may_leave[report.model] = "it cannot be woken"
            return
        if seen_mib is not None:
            self.copies[report.model, kept.level] = seen_mib
        still_mib = max(kept.residue.values(), default=0)
        if kept.held_mib and kept.residue and still_mib > USELESS * kept.held_mib:
            self.may_leave[report.model] = "its sleep frees nothing"
            self.due_off[report.model] = f"its sleep left {still_mib} of {kept.held_mib} MiB"

    def _seen(self, report: InstanceReported) -> int | None:
        """Host RAM, where it is measured; of a device that is only booked nothing counts as seen."""
        return report.host_mib if RAM in self.devices and self.devices[RAM].measured else None

    def _sleep_fault(self, model: str) -> None:
        policy, faults = self.setup.policy, self.faults.setdefault(model, deque(maxlen=16))
        faults.append(self.now)
        if (
            model in self.models
            and model not in self.off
            and sum(self.now - at <= policy.sleep_faults_window_s for at in faults) >= policy.sleep_faults_max
        ):
            self.due_off[model] = f"{len(faults)} sleeps or wakes ended its engine"

    def _is_refused_sleep(self, model: str) -> bool:
        """Who sleeps already, or is pinned, is not put to sleep by an operator: that is no insisting."""
        return model in self.pinned or (model in self.kept and self.kept[model].state is State.ASLEEP)

    def _may_sleep_again(self, model: str) -> None:
        """An operator insists, or its definition is a new one."""
        self.off.discard(model)
        self.due_off.pop(model, None)
        self.faults.pop(model, None)

    def _measured(self, sample: MemoryMeasured) -> None:
        if sample.device not in self.devices:
            return
        kept_samples = self.setup.policy.outside_samples
        outside = self.outside.setdefault(sample.device, deque(maxlen=kept_samples))
        outside.append(sample.used_mib - sum(sample.own_mib.values()))
        leaving = [k for k in self.kept.values() if k.state in (State.GOING_TO_SLEEP, State.STOPPING)]
        if any(sample.device in (*k.devices, RAM) for k in leaving):  # a sleeper has host RAM it was not started with
            outside.clear()  # what a leaving engine still holds cannot be told from what others hold
        if sample.available_mib is not None:
            self.available[sample.device] = sample.available_mib, sum(sample.own_mib.values())
        else:
            self.available.pop(sample.device, None)
        for model, mib in sample.own_mib.items():
            kept = self.kept.get(model)
            if kept is None or sample.device not in kept.lanes:
                continue
            if kept.state is State.READY:
                kept.measured[sample.device] = mib
            elif kept.state is State.ASLEEP:
                kept.residue[sample.device] = mib

    def _changed(self, setup: Setup) -> None:
        before = self.models
        self.setup = setup
        self.models = {m.id: m for m in setup.models}
        self.devices = {d.id: d for d in setup.devices}
        for model in setup.models:
            self.kept.setdefault(model.id, Kept())
            old = before.get(model.id)
            if old is None or old.pinned != model.pinned:
                (self.pinned.add if model.pinned else self.pinned.discard)(model.id)
            if old is not None and old.digest != model.digest:
                self.may_leave[model.id] = "its definition changed"
                self._may_sleep_again(model.id)
                self.copies = {key: mib for key, mib in self.copies.items() if key[0] != model.id}
        for gone in before.keys() - self.models.keys():
            self.may_leave[gone] = "it was removed"
            self.pinned.discard(gone)

    # --------------------------------------------------------------------------------------------------------- actions

    def check(self, action: Action) -> None:
        match action:
            case Admit():
                self._admit(action)
            case Refuse():
                self._refuse(action)
            case Done():
                wish = self.wishes.pop(action.request, None)
                must(wish is not None, f"Done for {action.request}, which nobody asked for")
                assert wish is not None
                if wish.operation is Operation.PIN and wish.model in self.models:
                    self.pinned.add(wish.model)
                    if isinstance(self.may_leave.get(wish.model), Operation):  # what a reload ends, ends all the same
                        del self.may_leave[wish.model]
            case Cut():
                self._cut(action)
            case Start():
                self._start(action)
            case Wake():
                self._wake(action)
            case Sleep():
                self._sleep(action)
            case Tell(kind="sleep_off"):
                self.off.add(action.model)
                self.due_off.pop(action.model, None)
            case Tell(kind="sleeping") if REHEARSAL in action.text:
                self.kept[action.model].alone_at = float("inf")
            case Tell(kind="asleep"):
                self._fell_asleep(action.model)
            case Stop():
                kept = self._leaves(action.model, action.generation, "stop")
                must(kept.state not in (State.STOPPED, State.STOPPING), f"{action.model} is stopped while {kept.state}")
                must(bool(action.reason), f"{action.model} is stopped without a reason")
                kept.from_sleep = kept.state is State.ASLEEP
                kept.state = State.STOPPING
            case Verify():
                kept = self.kept[action.model]
                self.doubted.add(action.model)
                must(action.generation <= kept.generation, f"{action.model}: an instance that never was is to be verified")
            case SetTimer():
                must(action.at == action.at, "the timer is not a number")

    def _sleep(self, action: Sleep) -> None:
        model, level = action.model, action.level
        kept = self._leaves(model, action.generation, "sleep")
        must(kept.state is State.READY, f"{model} is told to sleep while {kept.state}")
        must(not self._flying_of(model, silent_too=True), f"{model} is told to sleep with requests in flight")
        must(model not in self.off, f"{model} is told to sleep though its sleep was switched off")
        must(level not in kept.unfit, f"{model} is told to sleep at level {level}, which this instance must not use")
        kept.held_mib = max((kept.measured.get(device, 0) for device in kept.lanes), default=0)
        kept.state, kept.level, kept.dozing = State.GOING_TO_SLEEP, level, None
        known = self.models.get(model)
        if known is None:
            return
        tiers = {tier.level: tier for tier in known.sleep}
        must(level in tiers, f"{model} cannot sleep at level {level}")
        self._copies(model, kept, min(tiers[level].host_mib, self.copies.get((model, level), tiers[level].host_mib)))

    def _copies(self, model: str, kept: Kept, copy_mib: int) -> None:
        """Its copy fits into host RAM: in the book, and above the floor of what was really there at the last sample."""
        grows_mib = copy_mib - kept.ram_mib
        if grows_mib <= 0 or RAM not in self.devices or RAM in kept.lanes:
            return
        if RAM in self.available:
            available_mib, held_mib = self.available[RAM]
            promised_mib = max(0, sum(each.holds_mib(RAM) for each in self.kept.values()) - held_mib)
            floor_mib = self.setup.policy.ram_floor_mib
            must(
                available_mib - promised_mib - floor_mib >= grows_mib,
                f"{model} takes {grows_mib} MiB of host RAM: {available_mib} are there, {promised_mib} promised, {floor_mib} to be left",
            )
        kept.ram_mib = copy_mib
        self._fits(model, (RAM,))

    def _fell_asleep(self, model: str) -> None:
        kept = self.kept[model]
        if kept.dozing is not None:
            flying, waiting = self._flying_of(model, silent_too=True), [a.id for a in self.waiting.values() if a.model == model]
            must(not flying and not waiting, f"{model} counts as asleep by itself with {flying} in flight and {waiting} waiting")
            must(model not in self.pinned, f"{model} is pinned and counts as asleep by itself: its room would go to others")
            kept.state, kept.residue, kept.level, kept.dozing = State.ASLEEP, kept.dozing, 1, None
        if kept.alone_at is not None:
            others = self.waiting or self.wishes or self.shutdown is not None
            kept.alone_at = self.now if not others and self._would_fit(model, kept) else None

    def _would_fit(self, model: str, kept: Kept) -> bool:
        """Whether it surely has room to wake, whatever the book has learned of others."""
        for name in kept.lanes:
            device, known = self.devices.get(name), self.models.get(model)
            if device is None or known is None or known.need_mib is None:
                return False
            most = device.capacity_mib - device.headroom_mib
            others = [k for n, k in self.kept.items() if n != model and k.state is not State.STOPPED and name in k.lanes]
            if others or any(self.outside.get(name, (0,))) or max(known.need_mib, kept.held_mib) * 1.1 > most:
                return False
        return True

    def _definition(self, model: str) -> Model:
        return self.models[model]

    def _admit(self, action: Admit) -> None:
        asked = self.waiting.pop(action.request, None)
        must(asked is not None, f"request {action.request} is admitted but does not wait")
        assert asked is not None
        must(asked.model == action.model, f"request {action.request} is admitted to {action.model}, it asked for {asked.model}")
        kept = self.kept[action.model]
        must(kept.state is State.READY, f"request {action.request} is admitted to {action.model}, which is {kept.state}")
        must(kept.generation == action.generation, f"request {action.request} is admitted to generation {action.generation}")
        must(action.start in ("hot", "wake", "cold"), f"start {action.start!r}")
        asked.admissions += 1
        must(asked.admissions <= ADMISSIONS_MAX, f"request {action.request} is admitted {asked.admissions} times")
        parallel = self._definition(action.model).parallel
        must(self._flying_of(action.model) < parallel, f"{action.model} has more than {parallel} requests in flight")
        for other in self.waiting.values():
            if other.model == asked.model and other.priority == asked.priority:
                must(other.order > asked.order, f"request {asked.id} overtakes {other.id}, which asked {asked.model} earlier")
        asked.generation = action.generation
        self.flying[action.request] = asked
        self.admitted_to[action.model] = self.admitted_to.get(action.model, 0) + 1
        kept.dozing = None  # if it dozes, this wakes it
        self.admitted += 1

    def _flying_of(self, model: str, *, silent_too: bool = False) -> int:
        """Requests in flight on its present instance; silent tunnels take no slot."""
        generation = self.kept[model].generation
        mine = [a for a in self.flying.values() if a.model == model and a.generation == generation]
        return sum(1 for a in mine if silent_too or a.quiet_since is None)

    def _refuse(self, action: Refuse) -> None:
        wish = self.wishes.pop(action.request, None)
        if wish is None:
            must(self.waiting.pop(action.request, None) is not None, f"request {action.request} is refused but does not wait")
            self.ended.add(action.request)
            self.refused += 1
        must(400 <= action.status <= 599, f"status {action.status}")
        must(bool(action.code) and bool(action.message), "a refusal without code or message")
        must(action.retry_after_s is None or action.retry_after_s >= 0, f"Retry-After {action.retry_after_s}")

    def _cut(self, action: Cut) -> None:
        asked = self.flying.get(action.request)
        must(asked is not None, f"request {action.request} is cut but not in flight")
        assert asked is not None
        must(not asked.cut, f"request {action.request} is cut twice")
        must(bool(action.code) and bool(action.message), "a cut without code or message")
        policy, silent = self.setup.policy, asked.quiet_since is not None
        by_force = asked.model in self.forced or (self.shutdown is not None and self.shutdown.force)
        gone = self.kept[asked.model].state in (State.STOPPED, State.STOPPING)
        lawful = silent or by_force or gone or policy.drain_timeout_s is not None or action.code == "stalled"
        must(lawful, f"request {action.request} of {asked.model} is cut ({action.code}) though nobody forced it and it is not silent")
        asked.cut = True
        self.cuts += 1

    def _leaves(self, model: str, generation: int, how: str) -> Kept:
        kept = self.kept[model]
        must(generation == kept.generation, f"{how} {model} generation {generation}, it is {kept.generation}")
        if kept.state in (State.READY, State.GOING_TO_SLEEP):
            cut_off = [a.id for a in self.flying.values() if a.model == model and a.generation == generation and not a.cut]
            must(not cut_off, f"{how} {model} with requests {cut_off} in flight and not cut")
        asked_for = any(w.model == model and w.operation in (Operation.UNLOAD, Operation.SLEEP) for w in self.wishes.values())
        lawful = model not in self.pinned or model in self.may_leave or asked_for or self.shutdown is not None
        must(lawful, f"{how} {model}, which is pinned")
        self.moves += 1
        return kept

    def _start(self, action: Start) -> None:
        model, kept = self.models.get(action.model), self.kept.get(action.model)
        must(model is not None and kept is not None, f"{action.model} is started but not configured")
        assert model is not None
        assert kept is not None
        must(kept.state is State.STOPPED, f"{action.model} starts while {kept.state}")
        must(action.generation > kept.generation, f"{action.model} starts again as generation {action.generation}")
        must(self.shutdown is None, f"{action.model} starts after shutdown was asked for")
        must(not model.misconfigured, f"{action.model} starts though it can never work")
        chosen = [d for d in action.devices if d in model.devices]
        must(
            len(set(chosen)) == model.devices_count,
            f"{action.model} starts on {action.devices}, wants {model.devices_count} of {model.devices}",
        )
        must(set(chosen) <= set(action.reserved_mib), f"{action.model} starts with nothing reserved on some of {chosen}")
        for device in chosen:
            self._lane(action.model, device, starting=model.lone_start)
        self._groups(action.model)
        self.unkillable.pop(action.model, None)
        kept.state, kept.generation, kept.devices = State.STARTING, action.generation, tuple(action.reserved_mib)
        kept.reserved, kept.measured, kept.residue = dict(action.reserved_mib), {}, {}
        kept.lanes, kept.sized = tuple(chosen), model.need_mib is not None
        kept.ram_mib = action.reserved_mib.get(RAM, 0) if RAM not in chosen else 0
        kept.held_mib, kept.dozing, kept.alone_at, kept.unfit = 0, None, None, ()
        self._leaves_room(chosen)
        self._fits(action.model, kept.devices)
        self.starts += 1
        if action.model not in self.pinned:
            self.may_leave.pop(action.model, None)

    def _wake(self, action: Wake) -> None:
        kept = self.kept[action.model]
        must(kept.state is State.ASLEEP, f"{action.model} is woken while {kept.state}")
        must(action.generation >= kept.generation, f"wake {action.model} generation {action.generation}, it is {kept.generation}")
        must(self.shutdown is None, f"{action.model} is woken after shutdown was asked for")
        must(action.level == kept.level, f"{action.model} is woken from level {action.level}, it sleeps at {kept.level}")
        kept.alone_at = None
        self._leaves_room(kept.lanes)
        for device in kept.lanes:
            self._lane(action.model, device, starting=False)
        self._groups(action.model)
        kept.state, kept.generation = State.WAKING, action.generation
        self._fits(action.model, kept.devices)

    def _leaves_room(self, lanes: Sequence[str]) -> None:
        """Somebody rises here: whoever sleeps after a rehearsal has left its room to others."""
        for other in self.kept.values():
            if not set(other.lanes).isdisjoint(lanes):
                other.alone_at = None

    def _lane(self, model: str, device: str, *, starting: bool) -> None:
        rising = [n for n, k in self.kept.items() if n != model and device in k.lanes and k.state in (State.STARTING, State.WAKING)]
        lanes = self.setup.policy.lanes
        must(len(rising) < lanes, f"{model} rises on {device} beside {rising}, {lanes} lane(s)")
        lone = [n for n in rising if self.kept[n].state is State.STARTING and n in self.models and self.models[n].lone_start]
        starts = [n for n in rising if self.kept[n].state is State.STARTING]
        must(not lone and not (starting and starts), f"{model} rises on {device} beside {rising}, one of which must start alone")

    def _groups(self, model: str) -> None:
        awake = {n for n, k in self.kept.items() if n != model and k.state in (State.STARTING, State.WAKING, State.READY)}
        mine = [g for g in self.setup.groups if model in g.members]
        for group in mine:
            if group.swap:
                must(not awake & group.members, f"{model} rises beside {sorted(awake & group.members)} of its swap group {group.id}")
            if group.exclusive:
                for other in self.setup.groups:
                    if other.id != group.id and not other.persistent:
                        both = awake & other.members - group.members
                        must(not both, f"{model} of the exclusive group {group.id} rises beside {sorted(both)}")

    def _fits(self, model: str, devices: Sequence[str]) -> None:
        for name in devices:
            device = self.devices.get(name)
            if device is None:
                continue
            booked = {n: k.holds_mib(name) for n, k in self.kept.items() if k.holds_mib(name)}
            lost = sum(held.get(name, 0) for held in self.unkillable.values()) if not device.measured else 0
            room = device.capacity_mib - device.headroom_mib - self.surely_outside_mib(device) - lost
            total = sum(booked.values())
            must(total <= room, f"{model} rises on {name}: {total} MiB booked {booked}, room for {room}")

    def surely_outside_mib(self, device: Device) -> int:
        """What foreign processes have held in each of the last samples, where it eats into the capacity."""
        samples = self.outside.get(device.id)
        if not device.measured or not samples or len(samples) < self.setup.policy.outside_samples:
            return 0
        beyond = (device.total_mib or device.capacity_mib) - device.capacity_mib
        return max(0, min(samples) - beyond)

    # ------------------------------------------------------------------------------------------------ after every event

    def compare(self, view: View) -> None:
        """The scheduler's own story agrees with what was seen."""
        must(not self.due_off, f"sleep is still on: {self.due_off}")
        self._rehearsals()
        per_device: dict[str, int] = {}
        for shown in view.models:
            waiting = sum(1 for a in self.waiting.values() if a.model == shown.id)
            must(shown.queued == waiting, f"{shown.id} shows {shown.queued} waiting, {waiting} wait")
            kept = self.kept[shown.id]
            kept.dozing = None  # by now it would have been told
            must(not (shown.sleep_levels and shown.id in self.off), f"{shown.id} shows levels {shown.sleep_levels}, its sleep is off")
            for instance in shown.instances:
                for device, mib in instance.reserved_mib.items():
                    per_device[device] = per_device.get(device, 0) + mib
                if kept.state is State.STOPPED:
                    continue
                self._compare_instance(shown.id, kept, instance.state, instance.generation, instance.in_flight, instance.reserved_mib)
            model = self.models.get(shown.id)
            room = model is not None and self._flying_of(shown.id) < model.parallel
            going = shown.id in self.doubted or shown.id in self.may_leave
            serves = shown.state is State.READY and kept.state is State.READY and shown.queued and room
            must(not serves or going, f"{shown.id} is ready with a free slot, yet {shown.queued} wait")
        for device_view in view.devices:
            booked = per_device.get(device_view.id, 0)
            must(
                device_view.reserved_mib >= booked,
                f"{device_view.id} shows {device_view.reserved_mib} MiB reserved, its instances {booked}",
            )

    def _rehearsals(self) -> None:
        """Who was put to sleep only to see how it sleeps is back soon, unless somebody else came."""
        for name, kept in self.kept.items():
            if kept.alone_at is None or kept.state is not State.ASLEEP:
                continue
            if self.waiting or self.wishes or name in self.may_leave or self.shutdown is not None or not self._would_fit(name, kept):
                kept.alone_at = None
            elif self.now - kept.alone_at > REHEARSAL_S_MAX:
                raise Broken(f"{name} was rehearsed {self.now - kept.alone_at:.0f} s ago, and sleeps on for nobody")

    def _compare_instance(self, model: str, kept: Kept, state: State, generation: int, in_flight: int, reserved: Mapping[str, int]) -> None:
        same = {
            State.READY: (State.READY, State.DRAINING),
            State.STARTING: (State.STARTING,),
            State.GOING_TO_SLEEP: (State.GOING_TO_SLEEP,),
            State.ASLEEP: (State.ASLEEP,),
            State.WAKING: (State.WAKING,),
            State.STOPPING: (State.STOPPING,),
        }[kept.state]
        must(state in same, f"{model} shows {state}, it is {kept.state}")
        must(generation == kept.generation, f"{model} shows generation {generation}, it is {kept.generation}")
        flying = self._flying_of(model, silent_too=True)
        must(in_flight == flying, f"{model} shows {in_flight} in flight, {flying} are")
        for device in {*kept.devices, RAM} & self.devices.keys():
            held = kept.holds_mib(device)
            must(reserved.get(device, 0) >= held, f"{model} holds {held} MiB on {device}, only {reserved.get(device, 0)} are booked")

    def idle_ladders(self, slack_s: float) -> None:
        """In a world at rest, nobody is up longer than its configuration allows."""
        for name, kept in self.kept.items():
            model = self.models.get(name)
            if model is None or name in self.pinned or kept.state not in (State.READY, State.ASLEEP):
                continue
            idle_s = self.now - kept.idle_at
            if model.ttl_s is not None:
                must(idle_s <= model.ttl_s + slack_s, f"{name} is idle for {idle_s:.0f} s and still there, ttl {model.ttl_s:g} s")

    def all_over(self) -> None:
        """After shutdown: nothing waits, runs or lives."""
        must(not self.waiting, f"requests {sorted(self.waiting)[:5]} still wait after shutdown")
        must(not self.flying, f"requests {sorted(self.flying)[:5]} are still in flight after shutdown")
        must(not self.wishes, f"operator wishes {list(self.wishes.values())[:3]} were never answered")
        alive = {n: k.state.value for n, k in self.kept.items() if k.state is not State.STOPPED}
        must(not alive, f"still alive after shutdown: {alive}")
