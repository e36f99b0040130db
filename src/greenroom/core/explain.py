"""What people are told of the scheduler's reasons: sentences with figures, from the rules' own causes.

Only ever read: every function here is called inside `Stage.looking`, and none changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from .entry import Entry
from .facts import State
from .placement import is_idle, leave_s, price_s, rule_against
from .queue import Waiting
from .residency import FALLING, RISING, SERVING
from .rules import Option, expected_wait_s, explain_wait, hopeless, way_in
from .stage import NEVER, Move, Phase, Stage
from .views import QueueView, StageView, WaiterView
from .words import gib, span, times

EXPLAINED_MAX = 24  # waiting models whose way in is looked for; the others only say how long
WAITERS_MAX = 50  # told of each model
NAMES_MAX = 3


@dataclass(frozen=True, slots=True)
class Extras:
    """What a model's view tells beyond its figures."""

    wake_s: float | None
    measured: int
    next_state: str
    next_s: float | None
    served_s: float | None
    owed_s: float | None
    gated_for: str
    note: str


# ------------------------------------------------------------------ models


def extras(stage: Stage, entry: Entry, wanting: dict[str, Entry]) -> Extras:
    """`wanting`: device -> who has waited longest for its room."""
    move = stage.move_of(entry) if stage.moves else None
    gated_for = move.target.id if move is not None and move.target is not None and entry.id in move.victims else ""
    next_state, next_s = next_step(stage, entry)
    served_s, owed_s = turn(stage, entry, wanting)
    measured = entry.costs.lone_starts + len(entry.costs.wake_s)
    note = _note(entry, gated_for)
    return Extras(wake_s(entry), measured, next_state, next_s, served_s, owed_s, gated_for, note)


def wake_s(entry: Entry) -> float | None:
    if (tier := entry.tier(entry.instance.level)) is not None:
        return entry.costs.waking(tier)
    return min((entry.costs.waking(tier) for tier in entry.tiers), default=None)


def next_step(stage: Stage, entry: Entry) -> tuple[str, float | None]:
    """Where an idle model goes next if nobody comes, and in how many seconds."""
    if entry.state not in (State.READY, State.ASLEEP) or entry.pinned or entry.order or entry.retire or not is_idle(entry):
        return "", None
    model, steps = entry.model, []
    if model.ttl_s is not None:
        steps.append((model.ttl_s, State.STOPPED))
    elif model.ttl_auto and entry.state is State.READY:
        steps.append((entry.costs.stay_s(model, stage.policy), State.STOPPED))
    if model.sleep_after_s is not None and entry.state is State.READY and entry.tiers:
        steps.append((model.sleep_after_s, State.ASLEEP))
    if not steps:
        return "", None
    after_s, state = min(steps)
    return state.value, max(0.0, entry.instance.idle_at + after_s - stage.now)


def wanting(stage: Stage) -> dict[str, Entry]:
    """Device -> the model that has waited longest for room on it."""
    found: dict[str, Entry] = {}
    for entry in stage.waiting.oldest():
        if entry.state in (State.STOPPED, State.ASLEEP) and not entry.queue.only_quiet:
            for device in entry.instance.devices if entry.state is State.ASLEEP else entry.model.devices:
                found.setdefault(device, entry)
    return found


def turn(stage: Stage, entry: Entry, wanted_by: dict[str, Entry]) -> tuple[float | None, float | None]:
    """(seconds served, seconds owed) of a resident whose room somebody waits for."""
    if not wanted_by or entry.state not in SERVING or entry.pinned:
        return None, None
    waiter = next((wanted_by[device] for device in entry.instance.devices if device in wanted_by), None)
    if waiter is None or waiter is entry:
        return None, None
    item = min((tier.level for tier in entry.tiers), default=0)
    owed_s = stage.policy.quantum_factor * price_s(waiter, {entry.id: item}, stage)
    return min(stage.now - entry.instance.ready_at, owed_s), owed_s


def _note(entry: Entry, gated_for: str) -> str:
    if entry.unkillable:
        return "does not end; its memory stays booked"
    if entry.instance.suspect:
        return "a request was lost: it is looked at"
    if gated_for:
        return f"gated: {gated_for} is next"
    if entry.retire:
        return entry.retire
    if entry.order:
        return "asked to leave" if entry.order == "unload" else "asked to sleep"
    if entry.quarantined:
        return "out of memory too often"
    if entry.instance.rehearsing:
        return "its first sleep, to learn what one costs"
    if entry.pinned:
        return "pinned"
    return ""


def present(stage: Stage, entry: Entry) -> tuple[str, tuple[str, ...]]:
    """(what it does now and why, one sentence; the models it names)."""
    if entry.queue.clients:
        view = _view(stage, entry, full=True)
        return view.reason, view.victims
    instance, state, level = entry.instance, entry.state, entry.instance.level
    for_s = span(max(0.0, stage.now - instance.since))
    move = stage.move_of(entry)
    refs = (move.target.id,) if move is not None and move.target is not None and move.target is not entry else ()
    if state is State.READY:
        count = len(instance.in_flight)
        if count:
            return f"Ready for {for_s}, serving {_count(count, 'request')}.", ()
        idle = span(max(0.0, stage.now - instance.idle_at))
        next_state, next_s = next_step(stage, entry)
        if next_s == 0 and entry.model.ttl_auto:  # its time is over, and kept for as long as that costs nobody anything
            return f"Ready, idle for {idle}; it stays until somebody needs its room.", ()
        stay = f"{'stops' if next_state == State.STOPPED else 'sleeps'} in {span(next_s)}" if next_s is not None else "stays"
        return f"Ready, idle for {idle}; it {stay} if nobody comes and nobody needs its room{', being pinned' if entry.pinned else ''}.", ()
    if state is State.DRAINING:
        who = f" for {refs[0]}" if refs else ""
        return f"Finishes {_count(len(instance.in_flight), 'request')}, then leaves{who}.", refs
    if state is State.ASLEEP:
        held = sum(mib for device, mib in stage.book.of(entry.id).items() if device in instance.devices)
        return f"Asleep at level {level} for {for_s}, holds {gib(held)}; the next request wakes it in about {span(entry.up_cost())}.", ()
    if state in RISING:
        doing = "Waking" if state is State.WAKING else "Starting"
        return f"{doing} for {for_s} of about {span(entry.up_cost())}.", ()
    if state in FALLING:
        doing = "Going to sleep" if state is State.GOING_TO_SLEEP else "Stopping"
        return f"{doing}{_for_whom(stage, entry, move)}.", refs
    return _at_home(stage, entry), ()


def _for_whom(stage: Stage, entry: Entry, move: Move | None) -> str:
    target = move.target if move is not None else None
    if target is None or target is entry:
        return ""
    rule = rule_against(stage, target, entry)
    return f": {target.id} was asked for, and {rule}" if rule else f", to make room for {target.id}"


def _at_home(stage: Stage, entry: Entry) -> str:
    if entry.barred:
        return f"Stopped, and cannot be started: {entry.model.misconfigured.rstrip('.')}."
    if entry.quarantined:
        return "Stopped: out of memory too often; `greenroom load` tries again."
    if entry.state is State.FAILED:
        left = span(max(0.1, entry.backoff_until - stage.now))
        return f"Failed ({entry.last_error}); it may be started again in {left}, `greenroom load` tries at once."
    if (verdict := hopeless(stage, entry)) is not None:
        return f"Stopped, and cannot be started as things are: {verdict[1]}."
    if entry.failing:
        return f"Stopped; it failed {times(entry.failures)}, last: {entry.last_error.rstrip('.')}; the next request tries again."
    return f"Stopped; the next request starts it, which takes about {span(entry.costs.up(entry.model))}."


# ------------------------------------------------------------------ the queue


def queue_views(stage: Stage) -> tuple[QueueView, ...]:
    """Every model that clients wait for, longest first."""
    waiting = [entry for entry in stage.entries.values() if entry.queue.clients]
    waiting.sort(key=lambda entry: (_oldest(entry), entry.id))
    return tuple(_view(stage, entry, full=number < EXPLAINED_MAX) for number, entry in enumerate(waiting))


def _oldest(entry: Entry) -> float:
    return next((item.arrived_at for item in _clients(entry)), NEVER)


def _clients(entry: Entry) -> Iterator[Waiting]:
    return (item for item in entry.queue.items() if not item.ghost)


@dataclass(slots=True)
class _Way:
    """How a waiting model comes in: where, at whose expense, what is before it, and why not yet."""

    devices: tuple[str, ...]
    victims: dict[str, int]
    stages: list[StageView]
    reason: str


def _view(stage: Stage, entry: Entry, *, full: bool) -> QueueView:
    way = _way(stage, entry) if full else _plain_way(stage, entry)
    device, need, held, free = _bracket(stage, entry, way)
    short = 0 if entry.state in SERVING or entry.state in RISING else max(0, need - held - free)
    left = [one.expected_s * (1 - one.fraction) for one in way.stages]
    eta_s = sum(left) if left else expected_wait_s(stage, entry)
    waiters = tuple(
        WaiterView(item.request, max(0.0, stage.now - item.arrived_at), item.weight < 1.0) for item in islice(_clients(entry), WAITERS_MAX)
    )
    return QueueView(
        entry.id, device, need, held, free, short, tuple(way.victims), eta_s, way.reason, tuple(way.stages), waiters, entry.queue.clients
    )


def _bracket(stage: Stage, entry: Entry, way: _Way) -> tuple[str, int, int, int]:
    """(device, need, held, free) where it lacks most."""
    held_on = stage.book.of(entry.id)
    best: tuple[int, str, int, int, int] | None = None
    for device in way.devices:
        pool = stage.book.pools.get(device)
        if pool is None:
            continue
        need, held, free = stage.need_on(entry, device), held_on.get(device, 0), max(0, pool.free_mib)
        if best is None or need - held - free > best[0]:
            best = (need - held - free, device, need, held, free)
    return best[1:] if best is not None else ("", 0, 0, 0)


def _plain_way(stage: Stage, entry: Entry) -> _Way:
    clause = explain_wait(stage, entry)
    devices = entry.instance.devices or next(iter(stage.placements(entry)), ())
    return _Way(devices, {}, [], f"{clause[:1].upper()}{clause[1:]}.")


def _way(stage: Stage, entry: Entry) -> _Way:
    state, move = entry.state, stage.move_of(entry)
    if state is State.READY:
        return _for_a_slot(stage, entry)
    if state in RISING:
        return _rising(stage, entry, move)
    if move is not None and move.target is entry:
        return _in_a_move(stage, entry, move)
    if state in FALLING or state is State.DRAINING:
        return _on_its_way_out(stage, entry, move)
    if entry.retire or entry.order:
        return _Way(entry.instance.devices, {}, [], f"It waits until {entry.id} has left: {entry.retire or 'an operator asked for that'}.")
    if state is State.FAILED:
        left = span(max(0.1, entry.backoff_until - stage.now))
        return _Way((), {}, [], f"It failed ({entry.last_error}) and is tried again in {left}.")
    return _outside(stage, entry)


def _for_a_slot(stage: Stage, entry: Entry) -> _Way:
    instance, parallel = entry.instance, entry.model.parallel
    devices, serve_s = instance.devices, entry.costs.serve_s
    if instance.suspect:
        return _Way(devices, {}, [], "A request to it was lost: new ones wait until it is known whether its engine lives.")
    if entry.order or entry.retire:
        return _Way(devices, {}, [], f"It takes no new requests: {entry.retire or 'an operator asked it to leave'}.")
    wait_s = expected_wait_s(stage, entry) or 0.0
    took = f"; one takes about {span(serve_s)}" if serve_s is not None else ""
    text = f"All {_count(parallel, 'slot')} of it are taken{took}." if parallel > 1 else f"Its only slot is taken{took}."
    oldest_s = stage.now - _oldest(entry)
    expected_s = max(wait_s + oldest_s, 0.001)
    return _Way(devices, {}, [StageView("slot", expected_s, min(1.0, oldest_s / expected_s))], text)


def _rising(stage: Stage, entry: Entry, move: Move | None) -> _Way:
    instance, expected_s = entry.instance, max(0.001, entry.up_cost())
    took_s = max(0.0, stage.now - instance.since)
    woken = entry.state is State.WAKING
    how = f"wakes from level {instance.level}" if woken else "starts"
    late = took_s > expected_s
    text = f"It {how} on {', '.join(instance.devices)}: {span(took_s)} so far, usually {span(expected_s)}"
    text += ", longer than usual." if late else "."
    stages = _done_before(stage, entry, move)
    stages.append(StageView("wake" if woken else "load", expected_s, min(1.0, took_s / expected_s)))
    return _Way(instance.devices, {}, stages, text)


def _done_before(stage: Stage, entry: Entry, move: Move | None) -> list[StageView]:
    """What lies behind it: gate, and what its victims took."""
    if move is None:
        return []
    done = [StageView("gate", max(0.0, move.began_at - _oldest(entry)), 1.0)]
    if move.victims:
        left_s = max(0.0, entry.instance.since - move.began_at)
        done.append(StageView("sleep" if any(move.victims.values()) else "stop", left_s, 1.0))
    return done


def _in_a_move(stage: Stage, entry: Entry, move: Move) -> _Way:
    victims = {name: level for name, level in move.victims.items() if name in stage.entries}
    done = [StageView("gate", max(0.0, move.began_at - _oldest(entry)), 1.0)]
    going_s = max((leave_s(stage.entries[name], level) for name, level in victims.items()), default=0.0)
    going = "sleep" if any(victims.values()) else "stop"
    if move.phase is Phase.GATING:
        busy = [stage.entries[name] for name in victims if stage.entries[name].instance.in_flight]
        took_s = stage.now - move.began_at
        expected_s = max(0.001, took_s, *(_serve_left_s(stage, other) + took_s for other in busy))
        drain = StageView("drain", expected_s, min(1.0, took_s / expected_s))
        told = ", ".join(f"{other.id} finishes {_count(len(other.instance.in_flight), 'request')}" for other in busy[:NAMES_MAX])
        text = f"{told or _names(victims) + ' makes room'} first, then {_fate(victims)}: {_cause(stage, entry, move.devices, victims)}."
        return _Way(move.devices, victims, [*done, drain, StageView(going, going_s, 0.0), _up(entry)], text)
    falling = [stage.entries[name] for name in victims if stage.entries[name].state in FALLING]
    since = min((other.instance.since for other in falling), default=stage.now)
    expected_s = max(0.001, going_s)
    leaving = StageView(going, expected_s, min(1.0, (stage.now - since) / expected_s))
    drain = StageView("drain", max(0.0, since - move.began_at), 1.0)
    who = _names([other.id for other in falling]) or _names(victims)
    text = f"{who} {'goes to sleep' if going == 'sleep' else 'stops'}: {_cause(stage, entry, move.devices, victims)}."
    return _Way(move.devices, victims, [*done, drain, leaving, _up(entry)], text)


def _on_its_way_out(stage: Stage, entry: Entry, move: Move | None) -> _Way:
    target = move.target if move is not None and move.target is not entry else None
    who = f"{target.id} was owed its room" if target is not None else "it was asked to leave"
    doing = {State.DRAINING: "finishes what it has in flight", State.GOING_TO_SLEEP: "goes to sleep"}.get(entry.state, "stops")
    wait_s = expected_wait_s(stage, entry)
    stages = [StageView("gate", max(0.001, wait_s - entry.up_cost()), 0.0), _up(entry)] if wait_s is not None else []
    return _Way(entry.instance.devices, {}, stages, f"It {doing}, because {who}; then it comes back in its turn.")


def _outside(stage: Stage, entry: Entry) -> _Way:
    """It waits for a device: which rule keeps it out."""
    verdict = hopeless(stage, entry)
    if verdict is not None:
        devices = next(iter(stage.placements(entry)), ())
        return _Way(devices, {}, [], f"{verdict[1][:1].upper()}{verdict[1][1:]}.")
    found = way_in(stage, entry)
    if found is None:
        return _no_way_yet(stage, entry)
    option, at, is_unclaimed = found
    victims = dict(option.any.victims)
    closed = "" if option.open else _closed(stage, option)
    if not closed and not is_unclaimed:
        closed = "A model that has waited longer has a claim on the room"
    wait_s = max(0.0, at - stage.now)
    if closed:
        wait_s = max(wait_s, (expected_wait_s(stage, entry) or 0.0) - entry.up_cost())
        text = f"{closed}: {_cause(stage, entry, option.devices, victims)}."
    elif not victims:
        text = f"It starts in a moment on {', '.join(option.devices)}."
    else:
        text = f"{_cause(stage, entry, option.devices, victims, capital=True)}. {_why_not_yet(stage, entry, option, wait_s)}"
    begun_s = max(0.0, stage.now - _oldest(entry))
    gate_s = max(0.001, begun_s + wait_s)
    stages = [StageView("gate", gate_s, min(1.0, begun_s / gate_s))]
    if victims:
        others = [stage.entries[name] for name in victims]
        if any(other.instance.in_flight for other in others):
            stages.append(StageView("drain", max(_serve_left_s(stage, other) for other in others), 0.0))
        going_s = max(leave_s(stage.entries[name], level) for name, level in victims.items())
        stages.append(StageView("sleep" if any(victims.values()) else "stop", going_s, 0.0))
    return _Way(option.devices, victims, [*stages, _up(entry)], text)


def _no_way_yet(stage: Stage, entry: Entry) -> _Way:
    devices = next(iter(stage.placements(entry)), ())
    moving = [move.target.id for device in devices for move in stage.lanes.get(device, ()) if move.target is not None]
    if moving:
        why = f"{_names(dict.fromkeys(moving))} comes in first"
    elif any(device in stage.claims for device in devices):
        why = "A model that has waited longer has a claim on the room"
    else:
        kept = [name for device in devices for name in stage.book.pools[device].holders if stage.entries[name].pinned and name != entry.id]
        pins = f"{_names(kept)} {'is' if len(kept) == 1 else 'are'} pinned"
        why = f"{pins}, and nobody else may go yet" if kept else "Nobody there may leave yet"
    wait_s = expected_wait_s(stage, entry)
    gate_s = max(0.001, (wait_s or 0.0) - entry.up_cost())
    stages = [StageView("gate", gate_s, 0.0), _up(entry)] if wait_s is not None else []
    return _Way(devices, {}, stages, f"{why}: {_cause(stage, entry, devices, stage.conflicts.get(entry.id, ()))}.")


def _closed(stage: Stage, option: Option) -> str:
    """Who moves memory there now."""
    devices = [*option.devices, *(device for name in option.any.victims for device in stage.entries[name].instance.devices)]
    for device in dict.fromkeys(devices):
        for move in stage.lanes.get(device, ()):
            if move.target is not None:
                verb = "wakes" if move.wakes else "starts"
                return f"{move.target.id} {verb} on {device} first, one change of memory at a time"
            if move.victims:
                return f"{next(iter(move.victims))} is leaving {device}, one change of memory at a time"
    return "The device is being changed by another model"


def _why_not_yet(stage: Stage, entry: Entry, option: Option, wait_s: float) -> str:
    """Of the rules that spare the victims, the one that lasts longest."""
    patience_s = entry.since + stage.policy.patience_s - stage.now
    owed: list[tuple[float, str]] = []
    for name, level in option.any.victims.items():
        victim = stage.entries[name]
        if is_idle(victim):
            continue
        owed_s = stage.policy.quantum_factor * price_s(entry, {name: level}, stage)
        served_s = stage.now - victim.instance.ready_at
        if owed_s > served_s:
            owed.append((owed_s - served_s, f"{name} serves, and is owed {span(owed_s - served_s)} more of its turn of {span(owed_s)}"))
    if owed and max(owed)[0] >= wait_s - 0.01:
        return f"{max(owed)[1]}."
    if wait_s <= 0.05:
        return f"{_fate(dict(option.any.victims))[:1].upper()}{_fate(dict(option.any.victims))[1:]} now: {_names(option.any.victims)}."
    if option.idle is not None:
        return f"{_names(option.any.victims)} is idle and kept {span(wait_s)} more, for its next use is likely to be near."
    if patience_s >= wait_s - 0.01:
        return f"{_names(option.any.victims)} serves; it waits {span(wait_s)} more before it may ask for that room."
    return f"{_names(option.any.victims)} keeps its room for {span(wait_s)} more."


# ------------------------------------------------------------------ words


def _cause(stage: Stage, entry: Entry, devices: tuple[str, ...], victims: Iterable[str], *, capital: bool = False) -> str:
    """Why others must go for it: rules of groups, and what room is short."""
    others = [stage.entries[name] for name in victims if name in stage.entries]
    rules = list(dict.fromkeys(rule for other in others if (rule := rule_against(stage, entry, other))))
    if not rules:
        return _shortage(stage, entry, devices, capital=capital)
    _, need, held, free = _bracket(stage, entry, _Way(devices, {}, [], ""))
    text = "; ".join([*rules, *([_shortage(stage, entry, devices)] if need > held + free else [])])
    return f"{text[:1].upper()}{text[1:]}" if capital else text


def _shortage(stage: Stage, entry: Entry, devices: Iterable[str], *, capital: bool = False) -> str:
    way = _Way(tuple(devices), {}, [], "")
    device, need, held, free = _bracket(stage, entry, way)
    if not device:
        return f"{'It' if capital else 'it'} has no device"
    short = need - held - free
    text = f"{entry.id} needs {gib(need)} on {device}"
    if short <= 0:
        return f"{text}, {gib(free)} are free"
    parts = [f"{gib(free)} are free", *([f"{gib(held)} it holds asleep"] if held else []), f"{gib(short)} are short"]
    return f"{text}: {', '.join(parts)}" if capital else f"{text}, {', '.join(parts)}"


def _fate(victims: dict[str, int]) -> str:
    if not victims:
        return "comes in"
    if all(victims.values()):
        return "goes to sleep" if len(victims) == 1 else "they go to sleep"
    return "stops" if len(victims) == 1 else "they leave"


def _names(names: Iterable[str]) -> str:
    found = list(names)
    more = len(found) - NAMES_MAX
    return ", ".join(found[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


def _count(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _up(entry: Entry) -> StageView:
    return StageView("wake" if entry.state is State.ASLEEP else "load", entry.up_cost(), 0.0)


def _serve_left_s(stage: Stage, entry: Entry) -> float:
    """Until the youngest of its requests in flight has probably ended."""
    serve_s = entry.costs.serve_s
    if serve_s is None or not entry.instance.in_flight:
        return 0.0
    began = [stage.admitted[request].at for request in entry.instance.in_flight if request in stage.admitted]
    return max(0.0, serve_s - (stage.now - max(began, default=stage.now)))
