"""Who becomes resident next, and at whose expense: keep, quantum, gate, claim, lanes.

`decide` looks at the models that wait, late ones first, and starts at most one move a call; it is called
again until nothing changes.  Everything it waits for ends up in one timer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from .entry import Entry
from .facts import State
from .moves import begin, depart, send_off
from .placement import Choice, Item, choose, cover, fall_level, freed_by, is_idle, loss_s, lost_wake_s, price_s, worth_of
from .residency import HOME
from .stage import EPSILON_S, GHOST_WAIT_S_MAX, NEVER, Move, Phase, Stage
from .words import gib, span

LATE_LOOKED_AT_MAX = 16  # late models examined in one decision
BEST_LOOKED_AT_MAX = 4  # others, once more than four times as many could fit
RETRY_S = 0.25  # looked at again at the latest where only time can help


@dataclass(frozen=True, slots=True)
class Option:
    """One way to bring a model in."""

    devices: tuple[str, ...]
    idle: Choice | None  # victims among idle residents
    any: Choice  # victims among all; the same as `idle` where there is one
    open: bool  # its lanes are free


@dataclass(slots=True)
class Outlook:
    """What a decision knows of all residents at once: bounds that throw out who cannot start anyway."""

    dearest_s: float = 0.0  # the dearest round trip of a model that is ready
    idle_room_mib: int = 0  # the most that any device could have free if every idle resident left
    gate_room_mib: int = 0  # the same if busy ones whose quantum may be spent left too
    whole_room_mib: int = 0  # the most that any device could ever have free now, pinned models left alone
    idle_room_on: dict[str, int] = field(default_factory=dict)  # per device
    room_at: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # per device: (time, MiB free once these quanta are spent)
    spent_at: float = NEVER  # when the next busy resident's quantum is spent at the earliest


def survey(stage: Stage) -> Outlook:
    """One pass over the residents; cached until something else than a queued arrival happens."""
    look = stage.outlook
    if isinstance(look, Outlook):
        return look
    look = Outlook()
    quantum, now = stage.policy.quantum_factor, stage.now
    for pool in stage.book.pools.values():
        idle = gate = pool.free_mib
        whole = pool.budget_mib
        for name, mib in pool.holders.items():
            other = stage.entries[name]
            instance = other.instance
            state = instance.state
            if state is State.READY:
                loss = loss_s(other, 0)
                if loss > look.dearest_s:
                    look.dearest_s = loss
                if other.pinned:
                    whole -= mib
                    continue
                if len(instance.in_flight) <= len(instance.quiet) and not other.queue.weight:
                    idle += mib
                    gate += mib
                    continue
                spent_at = instance.ready_at + quantum * (least_loss_s(other) if other.model.sleep else loss)
                if spent_at <= now:
                    gate += mib
                elif spent_at < look.spent_at:
                    look.spent_at = spent_at
            elif state is State.ASLEEP and not other.pinned:
                idle += mib
                gate += mib
        look.whole_room_mib = max(look.whole_room_mib, whole)
        look.idle_room_on[pool.device.id] = idle
        look.idle_room_mib = max(look.idle_room_mib, idle)
        look.gate_room_mib = max(look.gate_room_mib, gate)
    stage.outlook = look
    return look


def least_loss_s(entry: Entry) -> float:
    return min(loss_s(entry, level) for level in (0, *(tier.level for tier in entry.tiers)))


def decide(stage: Stage, only: Entry | None = None) -> bool:
    """Start one move if the rules allow one; True when one was started or something was refused."""
    if stage.shutting_down:
        return False
    look = survey(stage)
    if only is not None:
        return _decide_for(stage, only, look)
    stage.claims.clear()
    stage.decide_at = NEVER
    for move in stage.moves:
        _watch(stage, move)
    return any(_decide_for(stage, entry, look) for entry in _order(stage, look))


def _decide_for(stage: Stage, entry: Entry, look: Outlook) -> bool:
    if entry.id not in stage.waiting or not _could_start(stage, entry):
        return False
    return _refuse_hopeless(stage, entry) or _consider(stage, entry, look.dearest_s)


def worth_a_look(stage: Stage, entry: Entry) -> bool:
    """Whether one more request for a waiting model can change anything before the next timer."""
    look = survey(stage)
    need = entry.least_mib
    if need > look.whole_room_mib:
        return True  # whether it must be refused is looked at now: its wait for outside memory begins
    if need <= look.idle_room_mib or (need <= look.gate_room_mib and entry.since + stage.policy.patience_s <= stage.now):
        return True
    if len(entry.queue) == 1:
        stage.decide_by(max(stage.now + stage.policy.patience_s, min(look.spent_at, stage.now + stage.policy.late_min_s)))
    return False


def _watch(stage: Stage, move: Move) -> None:
    """Timers of moves under way are renewed with each full decision."""
    target = move.target
    if move.phase is Phase.STARTING and target is not None and target.state is State.STARTING and not target.queue:
        stage.decide_by(max(stage.now + RETRY_S, move.phase_at + 1.5 * target.costs.up(target.model)))
    elif move.phase is Phase.GATING and (limit_s := stage.policy.drain_timeout_s) is not None and _drains(stage, move):
        stage.decide_by(move.began_at + limit_s)


def _drains(stage: Stage, move: Move) -> bool:
    """Whether requests in flight are what it waits for."""
    return any(stage.entries[name].instance.in_flight for name in move.victims)


def _could_start(stage: Stage, entry: Entry) -> bool:
    if entry.state not in (State.STOPPED, State.ASLEEP) or entry.order or entry.retire or entry.quarantined:
        return False
    return stage.move_of(entry) is None


# ------------------------------------------------------------------ the order


def late_after_s(stage: Stage, entry: Entry, dearest_s: float) -> float:
    return max(stage.policy.late_min_s, stage.policy.late_factor * (entry.up_cost() + dearest_s))


def _order(stage: Stage, look: Outlook) -> Iterator[Entry]:
    """Late models by since, then those that could start now, by waiting mass per second of switching."""
    policy, now = stage.policy, stage.now
    seen: set[str] = set()
    patient: list[Entry] = []
    late: list[Entry] = []
    next_at = NEVER
    for entry in stage.waiting.oldest():
        if entry.state not in (State.STOPPED, State.ASLEEP):
            continue
        if entry.queue.only_quiet:
            if _ghost_until(entry) <= now:
                yield entry
            else:
                next_at = min(next_at, _ghost_until(entry))
            continue
        since = entry.since
        if since + policy.patience_s > now + EPSILON_S:
            next_at = min(next_at, max(since + policy.patience_s, look.spent_at if look.spent_at < NEVER else 0.0))
            break
        late_at = since + late_after_s(stage, entry, look.dearest_s)
        if late_at <= now + EPSILON_S:
            late.append(entry)
            if len(late) == LATE_LOOKED_AT_MAX:
                break
        else:
            next_at = min(next_at, late_at)
            if len(patient) < 4 * BEST_LOOKED_AT_MAX:
                patient.append(entry)
    stage.decide_by(next_at)
    if look.spent_at < NEVER and len(stage.waiting):
        stage.decide_by(look.spent_at)
    for entry in sorted(late, key=lambda entry: (entry.since, entry.id)):
        seen.add(entry.id)
        yield entry
    others = {entry.id: entry for entry in stage.waiting.fitting(look.idle_room_mib, BEST_LOOKED_AT_MAX)}
    others.update({entry.id: entry for entry in patient if not look.gate_room_mib < entry.least_mib <= look.whole_room_mib})
    for entry in sorted(others.values(), key=lambda entry: (-_score(entry, now), entry.id)):
        if entry.id not in seen:
            yield entry


def _score(entry: Entry, now: float) -> float:
    queue, up_s = entry.queue, entry.up_cost()
    return (queue.age_sum(now) + queue.weight * up_s) / (up_s + 0.05)


# ------------------------------------------------------------------ one model


def _consider(stage: Stage, entry: Entry, dearest_s: float) -> bool:
    """Start bringing `entry` in, or note what it waits for (timer, claim)."""
    if _claims_forbid(stage, entry):
        return False
    late = entry.since + late_after_s(stage, entry, dearest_s) <= stage.now + EPSILON_S
    options = _options(stage, entry)
    if entry.queue.only_quiet:
        return _start_quiet(stage, entry, options)
    if not options:
        if late:
            _claim_whole(stage, entry)
        if stage.policy.min_residency_s:
            stage.decide_by(stage.now + RETRY_S)  # all else that could help is an event
        return False
    option = min(options, key=lambda option: _rank(stage, entry, option))
    if option.open and _claims_allow(stage, entry, option):
        at = _swap_at(stage, entry, option)
        if at <= stage.now + EPSILON_S:
            _go(stage, entry, option)
            return True
    else:
        at = NEVER
    stage.decide_by(max(at, stage.now + 0.001))
    if late:
        _claim(stage, entry, option, at)
    return False


def _options(stage: Stage, entry: Entry) -> list[Option]:
    """Placements with idle victims; those that take busy ones only where no open lane offers better."""
    placements = stage.placements(entry)
    room = survey(stage).idle_room_on
    need, held = entry.least_mib, stage.book.of(entry.id)
    hopeful = [devices for devices in placements if all(need - held.get(device, 0) <= room[device] for device in devices)]
    found = [option for devices in hopeful if (option := _option(stage, entry, devices, idle_only=True)) is not None]
    if any(option.open for option in found):
        return found
    settled = {option.devices for option in found}
    rest = (_option(stage, entry, devices, idle_only=False) for devices in placements if devices not in settled)
    return found + [option for option in rest if option is not None]


def _option(stage: Stage, entry: Entry, devices: tuple[str, ...], *, idle_only: bool) -> Option | None:
    is_open = all(_lane_takes(stage, entry, device) for device in devices)
    anyone = choose(stage, entry, devices, idle_only=idle_only)
    idle = anyone if idle_only else None
    if anyone is None:
        return None
    beside = any(stage.lanes.get(device) for device in devices)
    if beside and anyone.victims:
        is_open = False  # never evict for a start beside another one
    lanes_of_victims = (device for name in anyone.victims for device in stage.entries[name].instance.devices)
    return Option(devices, idle, anyone, is_open and all(device in devices or stage.lane_open(device) for device in lanes_of_victims))


def _lane_takes(stage: Stage, entry: Entry, device: str) -> bool:
    """One lane a device; a second one only beside a plain start, measured not to slow it much."""
    moves = stage.lanes.get(device)
    if not moves:
        return True
    if len(moves) >= stage.policy.lanes or entry.model.lone_start:
        return False
    if stage.beside_ratio is not None and stage.beside_ratio > stage.policy.second_lane_ratio:
        return False
    return all(move.phase is Phase.STARTING and move.target is not None and not move.target.model.lone_start for move in moves)


def _rank(stage: Stage, entry: Entry, option: Option) -> tuple[int, float, int]:
    """Free room first (tightest fit), then idle victims of least value, then busy ones; closed lanes last."""
    spare = sum(stage.book.pools[device].free_mib for device in option.devices)
    closed = 0 if option.open else 4
    if not option.any.victims:
        return (closed, 0.0, spare)
    return (closed + (1 if option.idle is not None else 2), option.any.value, spare)


def _start_quiet(stage: Stage, entry: Entry, options: list[Option]) -> bool:
    """A preload or restore takes only room that nobody uses, and not for ever."""
    free = [option for option in options if not option.any.victims and option.open and _claims_allow(stage, entry, option)]
    if free:
        _go(stage, entry, min(free, key=lambda option: _rank(stage, entry, option)))
        return True
    if _ghost_until(entry) <= stage.now:
        stage.refuse_all(entry, 503, "no_room", f"no room to load {entry.id} without evicting anybody")
        return True
    return False


def _ghost_until(entry: Entry) -> float:
    return entry.queue.first().arrived_at + GHOST_WAIT_S_MAX


def _go(stage: Stage, entry: Entry, option: Option) -> None:
    begin(stage, entry, option.devices, option.any)


def _swap_at(stage: Stage, entry: Entry, option: Option) -> float:
    """When the rules let `entry` replace the victims of `option`; now or earlier means go."""
    if option.idle is not None:
        idle_at = _idle_swap_at(stage, entry, option.idle)
        if idle_at <= stage.now + EPSILON_S:
            return idle_at
        return min(idle_at, _gate_at(stage, entry, option))
    return _gate_at(stage, entry, option)


def _idle_swap_at(stage: Stage, entry: Entry, choice: Choice) -> float:
    """All victims idle: each is kept for its expected next use, weighed against how many wait."""
    policy, now = stage.policy, stage.now
    if not choice.victims:
        return now
    price = price_s(entry, choice.victims, stage)
    waiting = max(1, len(entry.queue))
    at = now
    for name in choice.victims:
        victim = stage.entries[name]
        at = max(at, victim.instance.idle_at + victim.costs.keep_for(price, waiting, policy))
    if at <= now + EPSILON_S and policy.harm_check:
        at = _harmless_at(stage, entry, choice, price)
    return at


def _harmless_at(stage: Stage, entry: Entry, choice: Choice, price: float) -> float:
    """Spare a busy model a lone visitor's swap until the visitor has waited its share of the harm."""
    harm = stage.policy.harm_check * sum(stage.entries[name].costs.harm(stage.now, price) for name in choice.victims)
    count = max(1, len(entry.queue))
    waited = entry.queue.age_sum(stage.now) + count * entry.up_cost()
    return stage.now if waited >= harm else stage.now + max(0.01, (harm - waited) / count / 2)


def _gate_at(stage: Stage, entry: Entry, option: Option) -> float:
    """Patience of the one, quantum of each other: a busy or held victim is owed k times the price of replacing it."""
    policy, now = stage.policy, stage.now
    at = max(now, entry.since + policy.patience_s)
    for name, level in option.any.victims.items():
        victim = stage.entries[name]
        if option.idle is None and is_idle(victim):
            continue  # its hold is short beside what the busy ones are owed
        price = price_s(entry, {name: level}, stage)
        at = max(at, victim.instance.ready_at + policy.quantum_factor * price)
    return at


# ------------------------------------------------------------------ claims


def _claim(stage: Stage, entry: Entry, option: Option, gate_at: float) -> None:
    """A late model claims its devices: others use only what it leaves, and only if ready before its gate opens."""
    needs = stage.required(entry, option.devices)
    held = stage.book.of(entry.id)
    for device in option.devices:
        if device in stage.claims:
            continue
        gained = sum(_gain(stage, name, level, device) for name, level in option.any.victims.items())
        spare = stage.book.pools[device].free_mib + gained + held.get(device, 0) - needs[device]
        stage.claims[device] = (max(0, spare), max(stage.now, gate_at) if gate_at < NEVER else stage.now)


def _claim_whole(stage: Stage, entry: Entry) -> None:
    """Late, and nobody's leaving would help yet: nothing may start on the device it could use soonest."""
    for devices in stage.placements(entry):
        needs = stage.required(entry, devices)
        if all(needs[device] <= stage.book.pools[device].budget_mib - stage.pinned_on(device, besides=entry) for device in devices):
            for device in devices:
                stage.claims.setdefault(device, (0, stage.now))
            return  # elsewhere only a pin or another program could make room: nothing to claim there


def _claims_forbid(stage: Stage, entry: Entry) -> bool:
    """Whether others have claimed every device it could use, and leave it too little: seen before any victim is looked for."""
    if not stage.claims:
        return False
    held = stage.book.of(entry.id)
    for devices in stage.placements(entry):
        for device in devices:
            claim = stage.claims.get(device)
            if claim is None:
                return False
            if entry.least_mib - held.get(device, 0) > min(claim[0], stage.book.pools[device].free_mib):
                break
        else:
            return False
    return True


def _gain(stage: Stage, name: str, level: int, device: str) -> int:
    return freed_by(stage, stage.entries[name], level).get(device, 0)


def _claims_allow(stage: Stage, entry: Entry, option: Option) -> bool:
    claimed = [device for device in option.devices if device in stage.claims]
    if not claimed:
        victims_claimed = any(device in stage.claims for name in option.any.victims for device in stage.entries[name].instance.devices)
        return not victims_claimed
    if option.any.victims:
        return False
    needs = stage.required(entry, option.devices)
    held = stage.book.of(entry.id)
    for device in claimed:
        spare, gate_at = stage.claims[device]
        if needs[device] - held.get(device, 0) > spare or stage.now + entry.up_cost() > gate_at:
            return False
    return True


# ------------------------------------------------------------------ what can never work


def _refuse_hopeless(stage: Stage, entry: Entry) -> bool:
    """Refuse, before anything is stopped, what cannot be made room for."""
    verdict = hopeless(stage, entry)
    if verdict is None:
        stage.blocked.pop(entry.id, None)
        return False
    code, message, patient = verdict
    if patient:
        since = stage.blocked.setdefault(entry.id, stage.now)
        left_s = since + stage.policy.room_wait_s - stage.now
        if left_s > EPSILON_S:
            stage.decide_by(since + stage.policy.room_wait_s)
            return False
    stage.blocked.pop(entry.id, None)
    stage.deny(entry, 503, code, message)
    stage.refuse_all(entry, 503, code, message, 30.0 if code == "no_room" else 60.0)
    return True


def hopeless(stage: Stage, entry: Entry) -> tuple[str, str, bool] | None:
    """(code, sentence, worth waiting a little) when `entry` cannot become resident whatever idle models leave."""
    if entry.barred:
        return "misconfigured", entry.barred, False
    placements = stage.placements(entry)
    if not placements:
        names = ", ".join(entry.model.devices) or "none"
        return (
            "no_device",
            f"{entry.id} needs {entry.model.devices_count} of the devices {names}, which are not there; see `greenroom ps`",
            False,
        )
    best: tuple[int, tuple[str, str, bool]] | None = None
    for devices in placements:
        verdict = _hopeless_on(stage, entry, devices)
        if verdict is None:
            return None
        if best is None or verdict[0] < best[0]:
            best = verdict
    return best[1] if best else None


def blocked_by(stage: Stage, entry: Entry) -> str:
    """For people: why it cannot be started as things are; "" when it can, or is up."""
    if entry.state not in HOME:
        return entry.last_error if entry.unkillable else ""
    if entry.barred:
        return entry.model.misconfigured
    if entry.quarantined:
        return "out of memory too often; `greenroom load` tries again"
    verdict = hopeless(stage, entry)
    return verdict[1] if verdict is not None else ""


def sizes(*mib: int) -> tuple[str, ...]:
    """For one sentence: rounded, or all exact where rounding would make two of them look the same."""
    rounded = tuple(map(gib, mib))
    return rounded if len(set(rounded)) == len(set(mib)) else tuple(f"{size:,} MiB" for size in mib)


def _hopeless_on(stage: Stage, entry: Entry, devices: tuple[str, ...]) -> tuple[int, tuple[str, str, bool]] | None:
    rival = _immovable_rival(stage, entry)
    if rival is not None and (rival.unkillable or entry.model.on_conflict == "refuse"):
        why = "which does not end" if rival.unkillable else "which is pinned; unpin it first"
        return 0, ("no_room", f"no room: {entry.id} may not be resident beside {rival.id}, {why}", False)
    for device, need in stage.required(entry, devices).items():
        pool = stage.book.pools[device]
        missing = need - pool.most_mib
        if missing > 0:
            wants, most, lacks = sizes(need, pool.most_mib, missing)
            text = f"{entry.id} needs {wants} on {device}, which can give at most {most}: {lacks} are missing"
            return missing, ("too_big", text + "; lower its context, share or `memory`", False)
        pinned = stage.pinned_on(device, besides=entry)
        missing = need - (pool.most_mib - pinned)
        if missing > 0:
            stuck = [name for name in pool.holders if stage.entries[name].unkillable]
            pins = [other.id for other in stage.pinned() if other is not entry and device in other.model.devices]
            holders = ", ".join([*(f"pinned {name}" for name in pins), *(f"{name}, which does not end" for name in stuck)])
            wants, holds, lacks = sizes(need, pinned, missing)
            text = f"no room: {entry.id} needs {wants} on {device}, held by {holders} ({holds}): {lacks} are missing"
            if entry.model.on_conflict == "refuse" or stuck:
                return missing, ("no_room", text, False)
            continue
        missing = need - (pool.budget_mib - pinned)
        if missing > 0:
            who = f" by {pool.holder}" if pool.holder else " by other programs"
            free = max(0, pool.budget_mib - pinned)
            wants, left, used, lacks = sizes(need, free, pool.outside_mib, missing)
            text = f"no room: {entry.id} needs {wants} on {device}, {left} are free, {used} are used{who}: {lacks} are missing"
            return missing, ("no_room", text, True)
    return None


def _immovable_rival(stage: Stage, entry: Entry) -> Entry | None:
    for name in stage.conflicts.get(entry.id, ()):
        other = stage.entries.get(name)
        if other is not None and ((other.pinned and not other.held_off and not other.barred) or other.unkillable):
            return other
    return None


# ------------------------------------------------------------------ room that others took


def relieve(stage: Stage, device: str) -> bool:
    """More is booked or used than the budget holds: idle models leave, least value first."""
    pool = stage.book.pools[device]
    over = -pool.free_mib
    if over <= 0 or not stage.lane_open(device):
        return False
    items: list[Item] = []
    sleepers: list[Item] = []
    for name in pool.holders:
        other = stage.entries[name]
        if other.order or other.retire or other.instance.suspect:
            continue  # it goes anyway, or whether it lives is being looked at
        if other.state is State.READY and is_idle(other) and not other.instance.in_flight and not other.pinned:
            if all(map(stage.lane_open, other.instance.devices)):
                level = fall_level(stage, other) if other.model.sleep else 0
                frees = freed_by(stage, other, level)
                if level and not frees.get(device):  # asleep it would hold as much here
                    level, frees = 0, freed_by(stage, other, 0)
                items.append(Item(other, worth_of(stage, other, level, frees), frees, level))
        elif other.state is State.ASLEEP and not other.pinned and not other.queue and all(map(stage.lane_open, other.instance.devices)):
            sleepers.append(_sleeper_item(stage, other, device))
    # Where even all together are too little, the sleepers' copies go all the same: they are what nobody uses now.
    chosen = cover({device: over}, [*items, *sleepers], stage.policy.exact_victims_max) or sleepers
    if not chosen:
        return False
    why = f"{device} is over its budget by {gib(over)}" + (f", used by {pool.holder}" if pool.outside_mib and pool.holder else "")
    for item in chosen:
        depart(stage, item.entry.instance.devices, item.entry, item.level)
        send_off(stage, item.entry, item.level, why, evicted=True)
    return True


def _sleeper_item(stage: Stage, entry: Entry, device: str) -> Item:
    """A sleeper under pressure can only be stopped.  On host RAM its copy is what presses, so it goes by what its loss costs;
    on another device its residue is little, so it goes when no ready model can."""
    frees = dict(stage.book.of(entry.id))
    if stage.book.pools[device].device.kind != "ram":
        return Item(entry, 1e6 + worth_of(stage, entry, 0, frees), frees, 0)
    return Item(entry, entry.costs.frequency(stage.now, stage.policy) * lost_wake_s(entry) / max(1, frees.get(device, 0)), frees, 0)


# ------------------------------------------------------------------ estimates


def expected_wait_s(stage: Stage, entry: Entry) -> float | None:
    """Estimated wait of a request that arrives now (scheduling.md §12); None when it cannot be said."""
    own = len(entry.queue) / max(1, entry.model.parallel) * (entry.costs.serve_s or 0.0)
    instance = entry.instance
    if entry.state is State.READY:
        busy = len(instance.in_flight) >= entry.model.parallel
        return own + (entry.costs.serve_s or 0.0) / 2 if busy else own
    if entry.state in (State.STARTING, State.WAKING):
        return max(0.0, entry.up_cost() - (stage.now - instance.since)) + own
    lane_s = min((_lane_left_s(stage, devices) for devices in stage.placements(entry)), default=0.0) if stage.moves else 0.0
    gate_s = _gate_left_s(stage, entry) if stage.move_of(entry) is None else 0.0
    leave = entry.costs.down(entry.model) if entry.state in (State.DRAINING, State.STOPPING, State.GOING_TO_SLEEP) else 0.0
    return max(0.0, entry.backoff_until - stage.now) + lane_s + gate_s + leave + entry.up_cost() + own


def _lane_left_s(stage: Stage, devices: tuple[str, ...]) -> float:
    left = 0.0
    for device in devices:
        for move in stage.lanes.get(device, ()):
            target = move.target
            up = target.up_cost() if target is not None else 0.0
            down = (
                max((loss_s(stage.entries[name], 0) for name in move.victims if name in stage.entries), default=0.0)
                if target is None
                else 0.0
            )
            left = max(left, up + down - (stage.now - move.phase_at if move.phase is Phase.STARTING else 0.0))
    return max(0.0, left)


def _gate_left_s(stage: Stage, entry: Entry) -> float:
    """Seconds until enough residents are idle or have had their quantum; an estimate from the survey alone."""
    look, held, best = survey(stage), stage.book.of(entry.id), NEVER
    for devices in stage.placements(entry):
        left = 0.0
        for device in devices:
            missing = entry.least_mib - held.get(device, 0)
            if missing > look.idle_room_on[device]:
                due = next((at for at, room in _room_at(stage, look, device) if room >= missing), stage.now)
                left = max(left, stage.policy.patience_s, due - stage.now)
        best = min(best, left)
    return 0.0 if best == NEVER else best


def _room_at(stage: Stage, look: Outlook, device: str) -> list[tuple[float, int]]:
    found = look.room_at.get(device)
    if found is None:
        busy = []
        for name, mib in stage.book.pools[device].holders.items():
            other = stage.entries[name]
            if other.state is State.READY and not other.pinned and not is_idle(other):
                busy.append((other.instance.ready_at + stage.policy.quantum_factor * least_loss_s(other), mib))
        times, sizes_mib = zip(*sorted(busy), strict=True) if busy else ((), ())
        room = list(accumulate(sizes_mib, initial=look.idle_room_on[device]))[1:]
        found = look.room_at[device] = list(zip(times, room, strict=True))
    return found


def explain_wait(stage: Stage, entry: Entry) -> str:
    """One clause for people: what a waiting request of `entry` waits for."""
    wait = expected_wait_s(stage, entry)
    about = f", about {span(max(0.1, wait))}" if wait is not None else ""
    if entry.state is State.STARTING:
        return "loading" + about
    if entry.state is State.WAKING:
        return "waking" + about
    if entry.state is State.READY:
        return "queued" + about
    ahead = _ahead(stage, entry)
    return (f"queued behind {', '.join(ahead)}" if ahead else "queued") + about


def way_in(stage: Stage, entry: Entry) -> tuple[Option, float, bool] | None:
    """For people: what a decision would do for `entry` now, when the rules let it, whether claims do; None = there is no way yet."""
    options = [] if _claims_forbid(stage, entry) else _options(stage, entry)
    if not options:
        return None
    option = min(options, key=lambda option: _rank(stage, entry, option))
    return option, _swap_at(stage, entry, option), _claims_allow(stage, entry, option)


def _ahead(stage: Stage, entry: Entry) -> list[str]:
    names: dict[str, None] = {}
    for devices in stage.placements(entry)[:1]:
        for device in devices:
            for move in stage.lanes.get(device, ()):
                if move.target is not None and move.target is not entry:
                    names[move.target.id] = None
            if not names:
                for name in stage.book.pools[device].holders:
                    if name != entry.id and stage.entries[name].state not in HOME:
                        names[name] = None
    return list(names)[:3]
