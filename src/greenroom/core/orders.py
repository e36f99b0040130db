"""What operators, idle ladders and reloads drive a model to, outside the competition for room."""

from __future__ import annotations

from .entry import Entry, Wish
from .facts import Done, Model, Operation, OperatorAsked, Refuse, SetupChanged, SleepTier, State
from .moves import depart, dispatch, revive_pinned, send_off
from .placement import fall_level, host_takes, is_idle
from .queue import Waiting
from .residency import HOME
from .rules import hopeless
from .stage import Phase, Stage, conflicts_of
from .words import gib, span

WANTED_HITS_MIN = 0.05  # decayed uses of an absent model: fewer, and nobody wants the room of an idle one
LEAST_LOOK_S = 30.0  # an idle model that nobody wants gone is looked at again after this at the earliest
ROOM_RETRY_S = 5.0  # one that found no host RAM for its sleep looks again after this
LANE_RETRY_S = 0.5  # an idle ladder that found its lane taken looks again after this


# ------------------------------------------------------------------ operators


def asked(stage: Stage, event: OperatorAsked) -> None:
    entry = stage.entries.get(event.model)
    if entry is None:
        stage.say(Refuse(event.request, 404, "unknown_model", f"there is no model {event.model!r}"))
        return
    if (refusal := _impossible(stage, entry, event)) is not None:
        stage.say(refusal)
        return
    match event.operation:
        case Operation.LOAD:
            _load(stage, entry, event.request)
        case Operation.UNLOAD:
            _unload(stage, entry, event)
        case Operation.SLEEP:
            _sleep(stage, entry, event)
        case Operation.WAKE:
            if entry.state in HOME:
                stage.say(Refuse(event.request, 409, "not_asleep", f"{entry.id} is {entry.state.value}, not asleep; load it instead"))
            else:
                _load(stage, entry, event.request)
        case Operation.PIN | Operation.UNPIN:
            _pin(stage, entry, event)


def _impossible(stage: Stage, entry: Entry, event: OperatorAsked) -> Refuse | None:
    """What nobody would ever answer is refused at once."""
    if stage.shutting_down and event.operation is not Operation.UNLOAD:
        return Refuse(event.request, 503, "shutting_down", "greenroom is shutting down")
    if entry.unkillable and event.operation not in (Operation.PIN, Operation.UNPIN):
        return Refuse(event.request, 503, "unkillable", f"{entry.id}: {entry.last_error}")
    return None


def _load(stage: Stage, entry: Entry, request: int) -> None:
    entry.held_off = entry.quarantined = False
    entry.ooms.clear()
    if entry.state is State.FAILED:
        entry.move(State.STOPPED, stage.now)
    entry.backoff_until = 0.0
    if entry.state is State.READY and not entry.order and not entry.retire:
        stage.say(Done(request, f"{entry.id} is ready"))
        return
    verdict = hopeless(stage, entry) if entry.state in HOME else None
    if verdict is not None and not verdict[2]:
        stage.say(Refuse(request, 503, verdict[0], verdict[1]))
        return
    stage.enqueue(entry, Waiting(request, stage.now, ghost=True))


def _unload(stage: Stage, entry: Entry, event: OperatorAsked) -> None:
    entry.held_off = True
    stage.refuse_all(entry, 503, "unloaded", f"{entry.id} was unloaded by an operator; ask again to load it")
    if entry.state in HOME:
        stage.say(Done(event.request, f"{entry.id} is stopped"))
        return
    entry.wishes.append(Wish(event.request, Operation.UNLOAD))
    entry.order = "unload"
    stage.ordered[entry.id] = entry
    if event.force:
        stage.cut(entry, entry.instance.in_flight, "unloaded", f"{entry.id} was unloaded by an operator")


def _sleep(stage: Stage, entry: Entry, event: OperatorAsked) -> None:
    if entry.state is State.ASLEEP:
        if entry.queue and entry.queue.only_quiet:  # what would wake it again, for nobody
            for ghost in entry.queue.drain():
                stage.leave_queue(entry, ghost)
        at = entry.instance.level
        if event.level not in (None, at):
            text = f"{entry.id} is asleep at level {at} already; wake it first to put it to sleep at level {event.level}"
            stage.say(Refuse(event.request, 409, "asleep", text))
        else:
            stage.say(Done(event.request, f"{entry.id} is asleep at level {at}"))
        return
    if entry.pinned:
        stage.say(Refuse(event.request, 409, "pinned", f"{entry.id} is pinned, so its room stays its own; unpin it first"))
        return
    if entry.order == "unload" or entry.retire:
        stage.say(Refuse(event.request, 409, "leaving", f"{entry.id} is about to be stopped: {_reason(stage, entry)}"))
        return
    again = ""
    if entry.sleep_off:  # the operator knows better: it has the first try again
        entry.sleep_off, again = "", ". It may sleep again from now on"
        entry.sleep_faults.clear()
    level = event.level or fall_level(stage, entry) or next((tier.level for tier in entry.tiers), 0)
    tier = next((tier for tier in entry.tiers if tier.level == level), None)
    if tier is None:
        stage.say(Refuse(event.request, 409, "cannot_sleep", _cannot_sleep(entry, event.level)))
    elif entry.state not in (State.READY, State.DRAINING, State.GOING_TO_SLEEP):
        stage.say(
            Refuse(event.request, 409, "not_ready", f"{entry.id} is {entry.state.value}; only a ready model can be put to sleep{again}")
        )
    elif not host_takes(stage, entry, tier):
        stage.say(Refuse(event.request, 409, "no_room", _no_ram(stage, entry, tier)))
    else:
        entry.wishes.append(Wish(event.request, Operation.SLEEP, event.level))
        entry.order, entry.order_level = "sleep", level
        stage.ordered[entry.id] = entry


def _no_ram(stage: Stage, entry: Entry, tier: SleepTier) -> str:
    spare_mib = max(0, stage.book.pools["ram"].spare_mib(stage.policy.ram_floor_mib))
    other = next((other for other in entry.tiers if other is not tier and host_takes(stage, entry, other)), None)
    instead = "unload it" if other is None else f"put it to sleep at level {other.level}"
    held = f"would hold {gib(entry.costs.copy(tier))} of host RAM at level {tier.level}"
    return f"{entry.id} {held}, and {gib(spare_mib)} are free for sleepers; {instead} instead"


def _cannot_sleep(entry: Entry, level: int | None) -> str:
    at = f" at level {level}" if level and entry.tiers else ""
    if at:
        why = f": its engine can at level {', '.join(str(tier.level) for tier in entry.tiers)}"
    else:
        why = f": {entry.model.no_sleep}" if entry.model.no_sleep else ""
    return f"the engine of {entry.id} cannot sleep{at}{why}; unload it instead"


def _pin(stage: Stage, entry: Entry, event: OperatorAsked) -> None:
    entry.pinned = event.operation is Operation.PIN
    stage.count_pins()
    stage.tell(entry, "pinned" if entry.pinned else "unpinned", f"{event.operation.value}ned by an operator")
    if entry.pinned:
        entry.held_off = False
        _stay(stage, entry)
    stage.say(Done(event.request, f"{entry.id} is {event.operation.value}ned"))
    stage.wake_at(stage.now, entry)


def _stay(stage: Stage, entry: Entry) -> None:
    """It is pinned now: its sleep is called off where that has not begun, and it comes back where it has."""
    if entry.order == "sleep" and entry.state is not State.GOING_TO_SLEEP:
        entry.order = ""
        stage.deny_all_but(entry, "unload", 409, "pinned", f"{entry.id} was pinned before it was asleep")
        if not entry.retire:
            stage.ordered.pop(entry.id, None)
            _go_on(stage, entry, "it was pinned")
    if entry.state in (State.STOPPED, State.ASLEEP) and not entry.queue:
        stage.ghost(entry, quiet=False)  # one that is on its way to sleep comes back once it is there


# ------------------------------------------------------------------ pursuing orders


def pursue(stage: Stage, entry: Entry) -> bool:
    """Drive a model under order (unload, sleep, retire) one step further; True when something changed."""
    state, instance = entry.state, entry.instance
    if state in HOME:
        return _arrived_home(stage, entry)
    if state is State.ASLEEP and entry.order == "sleep" and not entry.retire:
        return _finish_order(stage, entry)
    if state is State.GOING_TO_SLEEP and (entry.order == "unload" or entry.retire):  # a sleep that hangs holds nobody up
        send_off(stage, entry, 0, _reason(stage, entry))
        return True
    if state in (State.STOPPING, State.GOING_TO_SLEEP) or (state is State.WAKING and entry.order != "unload"):
        return False
    move = stage.move_of(entry)
    if move is not None and entry.id in move.victims:
        return False  # it leaves anyway
    if state in (State.STARTING, State.WAKING):
        if entry.order == "sleep":
            return False
        send_off(stage, entry, 0, entry.retire or "unloaded by an operator")
        return True
    if instance.in_flight:
        if state is State.READY:
            entry.move(State.DRAINING, stage.now)
            stage.cut_quiet(entry, f"{entry.id} is leaving, and this connection was silent")
            return True
        return False
    return _leave(stage, entry)


def _leave(stage: Stage, entry: Entry) -> bool:
    devices = entry.instance.devices
    level = (entry.order_level or 0) if entry.order == "sleep" and not entry.retire else 0
    is_open = all(map(stage.lane_open, devices))
    if not is_open and (level or _profiling(stage, devices)):
        return False  # nothing may move beside an engine that measures memory, or beside a wake
    if level and entry.instance.suspect:
        return False  # whether it lives is being looked at: word of that comes in a moment
    if is_open:
        depart(stage, devices, entry, level)
    send_off(stage, entry, level, _reason(stage, entry))
    return True


def _reason(stage: Stage, entry: Entry) -> str:
    if stage.shutting_down:
        return "greenroom is shutting down"
    return entry.retire or ("asked by an operator" if entry.wishes else "idle")


def _profiling(stage: Stage, devices: tuple[str, ...]) -> bool:
    moves = (move for device in devices for move in stage.lanes.get(device, ()))
    return any(move.target is not None and move.target.model.lone_start and move.phase is Phase.STARTING for move in moves)


def _finish_order(stage: Stage, entry: Entry) -> bool:
    entry.order = ""
    stage.ordered.pop(entry.id, None)
    stage.wake_at(stage.now, entry)  # its ladder was not looked at while it was under order
    revive_pinned(stage, entry)
    if entry.queue:
        stage.waiting.add(entry)
    return True


def _arrived_home(stage: Stage, entry: Entry) -> bool:
    entry.order = ""
    stage.ordered.pop(entry.id, None)
    if entry.retire:
        _succeed(stage, entry)
    return True


def _succeed(stage: Stage, entry: Entry) -> None:
    """A retired model becomes what the new configuration says, or disappears."""
    entry.retire = ""
    if entry.successor is None:
        stage.refuse_all(entry, 404, "unknown_model", f"{entry.id} was removed from the configuration")
        stage.deny(entry, 404, "unknown_model", f"{entry.id} was removed from the configuration")
        stage.forget(entry)
        return
    entry.model, entry.successor = entry.successor, None
    entry.need_mib, entry.need_source = entry.model.need_mib, entry.model.need_source
    entry.costs.forget_times()
    entry.ooms.clear()
    entry.sleep_faults.clear()
    entry.sleep_off = ""
    entry.failures = entry.oom_tries = entry.wake_ooms = 0
    entry.backoff_until = 0.0
    entry.quarantined = entry.failing = False
    if entry.state is State.FAILED:
        entry.move(State.STOPPED, stage.now)
    _turn_away(stage, entry)
    if entry.queue:
        stage.waiting.add(entry)
    if (entry.pinned or entry.model.preload) and not entry.queue and not entry.held_off:
        stage.ghost(entry, quiet=not entry.pinned)


# ------------------------------------------------------------------ the idle ladder


def ladder(stage: Stage, entry: Entry) -> None:
    """ready -> asleep after `sleep_after`, -> stopped after `ttl`; the clock starts at ready and at the last end."""
    if entry.pinned or entry.order or entry.retire or stage.shutting_down:
        return
    if stage.move_of(entry) is not None or entry.instance.suspect:
        stage.wake_at(stage.now + LANE_RETRY_S, entry)
        return
    if entry.state not in (State.READY, State.ASLEEP) or not is_idle(entry):
        return
    idle_at, model = entry.instance.idle_at, entry.model
    steps: list[tuple[float, int]] = []
    if model.ttl_s is not None:
        steps.append((idle_at + model.ttl_s, 0))
    elif model.ttl_auto and entry.state is State.READY:  # a sleeper holds little, and gives that when it is needed
        stay_s = entry.costs.stay_s(model, stage.policy)
        if idle_at + stay_s > stage.now + 1e-9:
            steps.append((idle_at + stay_s, 0))
        elif is_wanted(stage, entry):
            steps.append((stage.now, 0))
        else:
            steps.append((stage.now + max(LEAST_LOOK_S, stay_s), 0))
    if model.sleep_after_s is not None and entry.state is State.READY and entry.tiers:
        sleep_at = idle_at + model.sleep_after_s
        if level := fall_level(stage, entry):
            steps.append((sleep_at, level))
        else:  # host RAM has no room for it now
            stage.wake_at(max(sleep_at, stage.now + ROOM_RETRY_S), entry)
    due = [step for step in steps if step[0] <= stage.now + 1e-9]
    if due:
        _go_down(stage, entry, 0 if any(level == 0 for _, level in due) else due[0][1])
        return
    early_s = stage.policy.early_sleep_s
    if early_s is not None and may_rehearse(entry) and any(_is_crowded(stage, device) for device in entry.instance.devices):
        if idle_at + early_s > stage.now + 1e-9:
            steps.append((idle_at + early_s, 1))
        elif _rehearse(stage, entry):
            return
        else:
            steps.append((stage.now + early_s, 1))
    if steps:
        stage.wake_at(min(steps)[0], entry)


def is_wanted(stage: Stage, entry: Entry) -> bool:
    """Whether a model that is away and was used lately lacks the room of `entry`: to unload for nobody gains nothing."""
    devices = entry.instance.devices
    return any(
        other is not entry
        and (other.state in HOME or other.state is State.ASLEEP)
        and not set(devices).isdisjoint(other.model.devices)
        and other.costs.frequency(stage.now, stage.policy) >= WANTED_HITS_MIN
        and any(stage.need_on(other, device) > stage.book.pools[device].free_mib for device in devices if device in other.model.devices)
        for other in stage.entries.values()
    )


def may_rehearse(entry: Entry) -> bool:
    """Whether it can sleep at level 1 and never has: that one is slow, and measures what a sleeper costs."""
    return entry.state is State.READY and 1 not in entry.costs.sleep_s and any(tier.level == 1 for tier in entry.tiers)


def _is_crowded(stage: Stage, device: str) -> bool:
    needs = [entry.need_mib for entry in stage.entries.values() if device in entry.model.devices]
    return None in needs or sum(need or 0 for need in needs) > stage.book.pools[device].most_mib


def _rehearse(stage: Stage, entry: Entry) -> bool:
    """Make its first sleep now, if nobody waits, nothing moves, and host RAM holds a second copy as well."""
    tier, ram, instance = entry.tier(1), stage.book.pools.get("ram"), entry.instance
    if tier is None or stage.waiting or instance.in_flight or not all(map(stage.lane_open, instance.devices)):
        return False
    if ram is not None and not ram.takes(2 * entry.costs.copy(tier), stage.policy.ram_floor_mib):
        return False
    depart(stage, instance.devices, entry, 1)
    instance.rehearsing = True
    send_off(stage, entry, 1, "its first sleep, made while nobody waits for it")
    return True


def _go_down(stage: Stage, entry: Entry, level: int) -> None:
    devices = entry.instance.devices
    is_open = all(map(stage.lane_open, devices))
    if not is_open and (level or _profiling(stage, devices)):
        stage.wake_at(stage.now + LANE_RETRY_S, entry)  # a stop only gives memory back: it waits for nobody else's load
        return
    if entry.instance.in_flight:  # silent tunnels only: they are told, then it leaves
        entry.order, entry.order_level = ("sleep", level) if level else ("unload", None)
        stage.ordered[entry.id] = entry
        return
    if is_open:
        depart(stage, devices, entry, level)
    send_off(stage, entry, level, f"idle for {span(stage.now - entry.instance.idle_at)}")


# ------------------------------------------------------------------ reload


def reload(stage: Stage, event: SetupChanged) -> None:
    """Take over a new configuration: unchanged engines go on, changed ones drain and start anew, removed ones drain."""
    setup = event.setup
    stage.policy = setup.policy
    lived_on = {device for entry in stage.entries.values() if entry.state not in HOME for device in entry.instance.devices}
    stage.book.replace_devices(setup.devices, lived_on)
    stage.groups = setup.groups
    wanted = {model.id: model for model in setup.models}
    stage.conflicts = conflicts_of(setup.groups, list(wanted))
    for entry in list(stage.entries.values()):
        model = wanted.pop(entry.id, None)
        if model is not None and model.digest == entry.model.digest:
            _keep(stage, entry, model)
        else:
            if model is not None:
                _pin_as_told(entry, model)
            _retire(stage, entry, "its definition changed" if model is not None else "it was removed from the configuration")
            entry.successor = model
    for model in wanted.values():
        admit_model(stage, Entry.of(model, stage.policy))
    stage.count_pins()


def _keep(stage: Stage, entry: Entry, model: Model) -> None:
    if entry.model.need_mib != model.need_mib and entry.need_source != "measured":
        entry.need_mib, entry.need_source = model.need_mib, model.need_source
    is_told_anew, was_barred = _pin_as_told(entry, model), bool(entry.barred)
    entry.model, entry.successor = model, None
    if was_barred and not entry.barred:
        _mended(stage, entry)
    if not entry.retire:
        _turn_away(stage, entry)
    if entry.retire:
        _reinstate(stage, entry)
    dispatch(stage, entry)  # it may take more at once now
    if is_told_anew and model.pinned:
        _stay(stage, entry)
    stage.wake_at(stage.now, entry)


def _mended(stage: Stage, entry: Entry) -> None:
    """What it lacked is there: what was tried without it counts no more, and who is wanted without being asked for comes in."""
    never_up = entry.failing or not entry.starts  # a preload is for the first time, not for every one after its idle time
    entry.failures, entry.failing = 0, False
    wanted = entry.pinned or (entry.model.preload and never_up)
    if wanted and entry.state is State.STOPPED and not entry.queue and not entry.held_off:
        stage.ghost(entry, quiet=not entry.pinned)


def _turn_away(stage: Stage, entry: Entry) -> None:
    """Who waits for what cannot start now is told as whoever comes next is."""
    if entry.barred:
        stage.deny(entry, 503, "misconfigured", entry.barred)
        stage.refuse_all(entry, 503, "misconfigured", entry.barred)


def _pin_as_told(entry: Entry, model: Model) -> bool:
    """Whether the configuration says otherwise than it did; else what an operator said of the pin stands."""
    if model.pinned == entry.configured.pinned:
        return False
    entry.pinned = model.pinned
    return True


def _reinstate(stage: Stage, entry: Entry) -> None:
    """It was to go, and is wanted again as it is: what still serves goes on serving."""
    entry.retire = ""
    if entry.order:
        return
    stage.ordered.pop(entry.id, None)
    _go_on(stage, entry, "its definition is back")


def _go_on(stage: Stage, entry: Entry, why: str) -> None:
    """It need not leave any more, at least for nobody's order."""
    if entry.state is State.DRAINING and stage.move_of(entry) is None:
        entry.move(State.READY, stage.now)
        stage.waiting.drop(entry)
        stage.tell(entry, "reopened", f"{why}: it goes on serving")
        dispatch(stage, entry)


def _retire(stage: Stage, entry: Entry, why: str) -> None:
    entry.retire = why
    stage.ordered[entry.id] = entry
    if entry.state not in HOME:
        stage.tell(entry, "retiring", f"{why}: it finishes what it has in flight, then ends")


def admit_model(stage: Stage, entry: Entry) -> None:
    """A model joins: at start or by a reload."""
    stage.entries[entry.id] = entry
    if (entry.pinned or entry.model.preload) and not entry.model.misconfigured:
        stage.ghost(entry, quiet=not entry.pinned)
