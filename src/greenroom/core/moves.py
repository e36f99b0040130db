"""Carrying out what the rules decided: gates, departures, starts, and what their reports mean."""

from __future__ import annotations

from collections.abc import Mapping

from .costs import blend
from .entry import Entry
from .facts import Admit, Done, InstanceReported, Operation, Refuse, Sleep, SleepTier, Start, State, Stop, Wake
from .placement import ABSENT, Choice, fall_level, host_takes, leave_s, loss_s, rule_against
from .queue import Waiting
from .residency import FALLING, HOME, RISING, SERVING
from .stage import EPSILON_S, NEVER, Admission, Move, Phase, Stage
from .thrash import Circle, Turn, listed, turns_words
from .words import gib, span

TOLD_GROWTH = 1.1  # a growing engine is told of again when it holds a tenth more
USELESS_SHARE = 0.1  # a sleep that gives back less of what was held is none


# ------------------------------------------------------------------ admissions


def dispatch(stage: Stage, entry: Entry) -> None:
    """Admit from the queue of a ready model up to its parallel limit, in arrival order."""
    if not entry.admits:
        return
    instance = entry.instance
    while entry.queue and len(instance.in_flight) - len(instance.quiet) < entry.model.parallel:
        item = entry.queue.pop_first()
        stage.leave_queue(entry, item)
        if item.ghost:
            if item.request >= 0:
                stage.say(Done(item.request, f"{entry.id} is ready"))
            continue
        admit(stage, entry, item)


def admit(stage: Stage, entry: Entry, item: Waiting) -> None:
    instance = entry.instance
    instance.in_flight.add(item.request)
    start = instance.start if item.arrived_at < instance.ready_at else "hot"
    stage.admitted[item.request] = Admission(entry, instance.generation, stage.now, item.arrived_at, item.weight, item.retried)
    stage.touched.add(entry.id)
    stage.say(Admit(item.request, entry.id, instance.generation, start))


# ------------------------------------------------------------------ going


def begin(stage: Stage, target: Entry, devices: tuple[str, ...], choice: Choice) -> None:
    """Bring `target` in on `devices` in place of the chosen victims; waits for their requests in flight first."""
    victims = dict(choice.victims)
    lanes = set(devices)
    for name in victims:
        lanes.update(stage.entries[name].instance.devices)
    move = Move(target, devices, frozenset(lanes), victims, Phase.GATING, stage.now, stage.now, wakes=target.state is State.ASLEEP)
    stage.hold_lanes(move)
    target.displaced = target.displaced.union(victims) if target.oom_tries else frozenset(victims)
    stage.aging = max(stage.aging, choice.dearest)
    _gate(stage, target, [stage.entries[name] for name in victims])
    advance(stage, move)


def _gate(stage: Stage, target: Entry, victims: list[Entry]) -> None:
    """Those with requests in flight admit no more; idle ones go on serving as long as others drain."""
    for victim in victims:
        if victim.state is State.READY and victim.instance.in_flight:
            victim.move(State.DRAINING, stage.now)
            if victim.instance.busy:
                count = len(victim.instance.in_flight)
                stage.tell(victim, "gated", f"{target.id} is owed its room: new requests wait, {count} in flight finish first")
            rule = rule_against(stage, target, victim)
            why = f"{target.id} was asked for, and {rule};" if rule else f"{target.id} needs the memory of {victim.id}, and"
            stage.cut_quiet(victim, f"{why} this connection was silent")


def depart(stage: Stage, lanes: tuple[str, ...], entry: Entry, level: int) -> Move:
    """Send an idle model away for nobody in particular (ladder, operator); its own devices' lanes are held."""
    move = Move(None, lanes, frozenset(lanes), {entry.id: level}, Phase.LEAVING, stage.now, stage.now)
    stage.hold_lanes(move)
    return move


def advance(stage: Stage, move: Move) -> bool:
    """Push a move on as far as it can go now; True when something changed."""
    if move.phase is Phase.GATING:
        return _advance_gate(stage, move)
    if move.phase is Phase.LEAVING:
        if any(stage.entries[name].state in FALLING for name in move.victims if name in stage.entries):
            return False
        return _arrive(stage, move)
    return _cancel_unwanted(stage, move)


def _advance_gate(stage: Stage, move: Move) -> bool:
    target = move.target
    assert target is not None
    if not wanted(target) or target.order or target.retire or target.state not in (State.STOPPED, State.ASLEEP):
        reopen(stage, move, "nobody waits for it any more")
        return True
    if target.barred:
        reopen(stage, move, f"{target.id} cannot start any more")
        return True
    if any(stage.entries[name].pinned for name in move.victims):
        reopen(stage, move, "a victim was pinned meanwhile")
        return True
    alive = [stage.entries[name] for name in move.victims if stage.entries[name].state in (State.READY, State.DRAINING)]
    if any(victim.instance.in_flight for victim in alive):
        if not any(victim.instance.in_flight for victim in alive if victim.state is State.DRAINING):
            _gate(stage, target, alive)  # served meanwhile, now keeps the target waiting: it drains too
        return _cut_overdue(stage, move, alive)
    if any(victim.instance.suspect for victim in alive):
        return False  # whether it lives is being looked at: word of that comes in a moment
    sleepers = [stage.entries[name] for name in move.victims if stage.entries[name].state is State.ASLEEP]
    for victim in alive + sleepers:
        send_off(stage, victim, 0 if victim.retire else move.victims[victim.id], _why_it_goes(stage, target, victim, move), evicted=True)
    move.phase, move.phase_at = Phase.LEAVING, stage.now
    move.leaves_at = stage.now
    if not any(stage.entries[name].state in FALLING for name in move.victims):
        _arrive(stage, move)
    return True


def _cut_overdue(stage: Stage, move: Move, alive: list[Entry]) -> bool:
    limit_s = stage.policy.drain_timeout_s
    if limit_s is None:
        return False
    if stage.now < move.began_at + limit_s - EPSILON_S:
        stage.decide_by(move.began_at + limit_s)
        return False
    for victim in alive:
        why = f"{victim.id} had {limit_s:g} s to finish its requests (scheduling.drain_timeout_s)"
        stage.cut(victim, victim.instance.in_flight, "evicted", why)
    move.began_at = stage.now  # once per limit
    return False


def _why_it_goes(stage: Stage, target: Entry, victim: Entry, move: Move) -> str:
    """Begins with the target's id: so the ledger finds for whom it went."""
    rule = rule_against(stage, target, victim)
    return f"{target.id} was asked for, and {rule}" if rule else f"{target.id} needed {gib(_wanted_mib(stage, target, move))}"


def _wanted_mib(stage: Stage, target: Entry, move: Move) -> int:
    return sum(mib for device, mib in stage.required(target, move.devices).items() if device in move.devices)


def reopen(stage: Stage, move: Move, why: str) -> None:
    """Give the room back to the victims that were still draining."""
    stage.release_lanes(move)
    for name in move.victims:
        victim = stage.entries.get(name)
        if victim is not None and victim.state is State.DRAINING:
            victim.move(State.READY, stage.now)
            stage.waiting.drop(victim)
            stage.tell(victim, "reopened", f"keeps its room: {why}")
            dispatch(stage, victim)


def _arrive(stage: Stage, move: Move) -> bool:
    """All victims are gone: start the target, or let the rules look again when it does not fit after all."""
    target = move.target
    fits = (
        target is not None
        and target.state in (State.STOPPED, State.ASLEEP)
        and (target.state is not State.ASLEEP or target.instance.devices == move.devices)
        and wanted(target)
        and not target.order
        and not target.retire
        and not target.barred
        and not stage.shutting_down
        and not any(stage.entries[name].state not in ABSENT for name in stage.conflicts.get(target.id, ()) if name in stage.entries)
        and stage.now >= target.backoff_until
        and all(device in stage.book.pools for device in move.devices)
        and stage.book.fits(stage.required(target, move.devices), target.id)
    )
    if target is None or not fits:
        stage.release_lanes(move)
        return True
    rise(stage, move, target)
    return True


def rise(stage: Stage, move: Move, target: Entry) -> None:
    """Reserve, then start or wake; the only place where memory is promised."""
    needs = stage.required(target, move.devices)
    assert stage.book.fits(needs, target.id), (
        f"{target.id} does not fit: {needs} {[(p.device.id, p.free_mib) for p in stage.book.pools.values()]}"
    )
    instance = target.instance
    target.held_off = False  # it is asked for again: a pin counts from now on
    if target.state is State.ASLEEP and (copy := stage.book.of(target.id).get("ram", 0)) and "ram" not in move.devices:
        needs["ram"] = max(needs.get("ram", 0), copy)  # its copy stays until it is awake
    stage.book.set(target.id, needs)
    stage.touched.add(target.id)
    instance.proven = False
    instance.beside = any(len(stage.lanes[device]) > 1 for device in move.devices)
    move.phase, move.phase_at = Phase.STARTING, stage.now
    if target.state is State.ASLEEP:
        target.move(State.WAKING, stage.now)
        instance.start = "wake"
        target.wakes += 1
        stage.tell(target, "waking", f"waking for {_asked_by(target)} from level {instance.level}, about {span(target.up_cost())}")
        stage.say(Wake(target.id, instance.generation, instance.level))
        return
    instance.generation += 1
    target.move(State.STARTING, stage.now)
    instance.devices, instance.start = move.devices, "cold"
    target.starts += 1
    target.peak_mib, target.served, target.measured_mib, target.host_mib = 0, 0, {}, 0
    target.told_mib = max(needs[device] for device in move.devices)
    size, about = gib(max(needs[device] for device in move.devices)), span(target.costs.up(target.model))
    stage.tell(target, "starting", f"starting for {_asked_by(target)} on {', '.join(move.devices)} with {size}, about {about}")
    stage.say(Start(target.id, instance.generation, move.devices, dict(needs)))


def _asked_by(entry: Entry) -> str:
    """Who wants it: the cause at the head of its story."""
    clients = entry.queue.clients
    if clients:
        return "a request" if clients == 1 else f"{clients} requests"
    if entry.queue.first().request >= 0:
        return "an operator"
    return "its pin" if entry.pinned else ("its preload" if entry.model.preload else "its place, which it lost to a start that failed")


def send_off(stage: Stage, entry: Entry, level: int, why: str, *, evicted: bool = False) -> None:
    """Put to sleep (level 1, 2) or stop (0) an instance that has nothing in flight."""
    instance = entry.instance
    assert not instance.in_flight, f"{entry.id} has {len(instance.in_flight)} requests in flight"
    stage.touched.add(entry.id)
    held = stage.book.of(entry.id)
    freed = dict(held)
    entry.evictions += evicted
    if entry.state in SERVING and stage.now - instance.ready_at >= stage.policy.crash_forget_s:
        entry.failures = 0
    idle = f"idle {span(stage.now - instance.idle_at)}" if entry.state in SERVING else f"was {entry.state.value}"
    tier = entry.tier(level)
    if tier is not None and (tier not in entry.tiers or not host_takes(stage, entry, tier)):  # not so any more since it was chosen
        level = fall_level(stage, entry)
        tier = entry.tier(level)
    back = f"back in about {span(loss_s(entry, level) - leave_s(entry, level))}"
    if evicted or level:
        why += _for_want_of_ram(stage, entry, level)
    if tier is not None and entry.state in SERVING:
        needs = dict(held)
        copy = entry.costs.copy(tier)
        if copy and "ram" in stage.book.pools and "ram" not in instance.devices:
            needs["ram"] = max(needs.get("ram", 0), copy)
        stage.book.set(entry.id, needs)
        entry.move(State.GOING_TO_SLEEP, stage.now)
        instance.level = level
        kind = "evicted" if evicted else "sleeping"
        stage.tell(entry, kind, f"put to sleep (level {level}): {why}; {idle}, {back}")
        stage.say(Sleep(entry.id, instance.generation, level))
    else:
        entry.move(State.STOPPING, stage.now)
        kind = "evicted" if evicted else "stopping"
        total = gib(max((freed.get(device, 0) for device in instance.devices), default=0))
        stage.tell(entry, kind, f"unloaded: {why}; {idle}, frees {total}, {back}")
        stage.say(Stop(entry.id, instance.generation, why, freed))
    if entry.queue:
        stage.waiting.add(entry)


def _for_want_of_ram(stage: Stage, entry: Entry, level: int) -> str:
    """A clause where host RAM kept it from sleeping, or from a level with a quicker way back."""
    if entry.state not in SERVING:
        return ""
    chosen = entry.tier(level)
    back_s = NEVER if chosen is None else entry.costs.waking(chosen)
    for tier in entry.tiers:
        if tier.level != level and entry.costs.waking(tier) < back_s and not host_takes(stage, entry, tier):
            return f" (host RAM has no room for the {gib(entry.costs.copy(tier))} it would hold at level {tier.level})"
    return ""


def _cancel_unwanted(stage: Stage, move: Move) -> bool:
    """End a load that nobody waits for any more when somebody else could use the room."""
    target = move.target
    if target is None or target.state is not State.STARTING or wanted(target) or (target.pinned and not target.held_off):
        return False
    others = (other for other in stage.waiting if other is not target and not other.queue.only_quiet)
    if not any(not move.lanes.isdisjoint(other.model.devices) for other in others):
        return False
    elapsed, expected = stage.now - move.phase_at, target.costs.up(target.model)
    if 0.5 * expected < elapsed < 1.5 * expected:
        stage.decide_by(move.phase_at + 1.5 * expected)  # nearly there: a finished load is worth more than a restart
        return False
    send_off(stage, target, 0, "everybody who waited for it has gone, and others wait")
    return True


def wanted(entry: Entry) -> bool:
    return bool(entry.queue)


# ------------------------------------------------------------------ arriving


def became_ready(stage: Stage, entry: Entry, report: InstanceReported) -> None:
    instance, now = entry.instance, stage.now
    rising = entry.state in RISING
    woke = entry.state is State.WAKING
    if rising:
        took = report.took_s if report.took_s is not None else now - instance.since
        learn_up(stage, entry, took, woke)
        entry.move(State.READY, now)
        instance.ready_at = now
        if not instance.rehearsing or not entry.queue.only_quiet:  # a rehearsal is no use of it: its idle clock goes on
            instance.idle_at, instance.unused = now, not entry.queue.clients
        instance.rehearsing = False
        instance.level = 0
        entry.oom_tries = entry.wake_ooms = 0
        entry.failing = False
        if woke:
            _book_awake(stage, entry, seen_of_host(stage, report))
        else:
            instance.unfit = report.unfit_levels
            if report.unfit_levels and report.why:
                stage.tell(entry, "sleep_limited", report.why, "warning")
        stage.waiting.drop(entry)
        stage.blocked.pop(entry.id, None)
        entry.costs.base = stage.aging
        stage.tell(entry, "ready", f"ready after {span(took)}")
        stage.fulfil(entry, ("load", "wake"), f"{entry.id} is ready")
        stage.wake_at(now, entry)
    instance.suspect = False
    note_measured(stage, entry, report.measured_mib, report.host_mib)
    move = stage.move_of(entry)
    if move is not None and move.target is entry:
        stage.release_lanes(move)
        if move.victims:
            _took_turn(stage, entry, move)
    dispatch(stage, entry)


def _took_turn(stage: Stage, entry: Entry, move: Move) -> None:
    """It came in at somebody's expense; who does that too often is told, with what would end it."""
    turn = Turn(stage.now, entry.id, tuple(sorted(move.victims)), move.devices, stage.now - move.leaves_at)
    for circle in stage.turns.took(turn):
        spent, gone = span(circle.moving_s), span(circle.until - circle.since)
        what = f"{turns_words(circle.models, circle.device)}: {circle.swaps} swaps in {gone} took {spent} of it"
        stage.tell(entry, "thrash", f"{what}; {_way_out(stage, circle)}", "warning")


def _way_out(stage: Stage, circle: Circle) -> str:
    members = [stage.entries[name] for name in circle.models if name in stage.entries]
    rest = "pin one, or give one another device; `greenroom thrash` tries what helps"
    if any(member.need_mib is None for member in members):
        return f"of unknown size each takes the whole device: declare `memory`, {rest}"
    others = {name: stage.book.of(name).get(circle.device, 0) for name in stage.entries if name not in circle.models}
    beside = [name for name, held_mib in others.items() if held_mib]
    short_mib = sum(member.need_mib or 0 for member in members) + sum(others.values()) - stage.book.pools[circle.device].budget_mib
    if short_mib <= 0:
        return f"there is room for all of them: let what keeps them apart be (a group, other models), {rest}"
    company = f" beside {listed(beside)}" if beside else ""
    return f"holding all{company} needs {gib(short_mib)} more: cut a context or share by that, {rest}"


def _book_awake(stage: Stage, entry: Entry, host_mib: int | None) -> None:
    """Awake: host RAM is booked as what it holds now; some engines keep their copy."""
    if "ram" in stage.book.pools and "ram" not in entry.instance.devices:
        held = dict(stage.book.of(entry.id))
        held["ram"] = max(entry.model.host_mib, host_mib or 0)
        stage.book.set(entry.id, held)
        stage.touched.add(entry.id)


def learn_up(stage: Stage, entry: Entry, took_s: float, woke: bool) -> None:
    costs, share, instance = entry.costs, stage.policy.cost_ewma, entry.instance
    if woke:
        costs.wake_s[instance.level] = blend(costs.wake_s.get(instance.level), took_s, share)
    elif instance.beside and costs.lone_starts:
        costs.beside_ratio = blend(costs.beside_ratio, took_s / max(0.01, costs.up(entry.model)), share)
        stage.beside_ratio = blend(stage.beside_ratio, took_s / max(0.01, costs.up(entry.model)), share)
    else:
        costs.up_s = blend(costs.up_s, took_s, share)
        costs.lone_starts += not instance.beside


def fell_asleep(stage: Stage, entry: Entry, report: InstanceReported) -> None:
    """Asleep: book what it really still holds, on its devices and in host RAM."""
    instance = entry.instance
    before = entry.state
    level = report.level or instance.level
    # A reload may have taken the level away meanwhile; then nothing is promised of it.
    tier = entry.tier(level) or SleepTier(level, max(stage.book.of(entry.id).values(), default=0), 0, 1.0, 1.0)
    seen_on = [device for device in report.measured_mib if device in instance.devices]
    measured, held = [report.measured_mib[device] for device in seen_on], stage.book.of(entry.id)
    held_mib = max((entry.measured_mib.get(device) or held.get(device, 0) for device in seen_on), default=0)
    if measured and before is not State.WAKING:  # a wake in vain may have mapped a part already
        entry.costs.residue_mib[level] = max(measured)
    booked_mib = max((held.get(device, 0) for device in instance.devices), default=0)
    residue = max(measured) if measured else min(entry.costs.residue(tier), booked_mib)  # nobody saw it: it can hardly hold more
    needs = dict.fromkeys(instance.devices, residue)
    seen = seen_of_host(stage, report)
    if seen is not None and before is not State.WAKING:
        entry.costs.copy_mib[level] = seen
    if seen is None:  # what nobody looked at has not shrunk
        kept_mib = 0 if "ram" in instance.devices else held.get("ram", 0)
        host = max(entry.model.host_mib, entry.costs.copy(tier), kept_mib)
    else:
        host = seen
    if host and "ram" in stage.book.pools and "ram" not in needs:
        needs["ram"] = host
    stage.book.set(entry.id, needs)
    stage.touched.add(entry.id)
    entry.measured_mib.update(zip(seen_on, measured, strict=True))
    entry.host_mib = report.host_mib if report.host_mib is not None else entry.host_mib
    entry.move(State.ASLEEP, stage.now)
    instance.level = level
    if before is State.WAKING:
        _woken_in_vain(stage, entry, report)
        return
    entry.sleeps += 1
    if report.took_s is not None:
        entry.costs.sleep_s[level] = blend(entry.costs.sleep_s.get(level), report.took_s, stage.policy.cost_ewma)
    copy = f" and {gib(host)} of host RAM" if needs.get("ram") and "ram" not in instance.devices else ""
    by_itself = " by itself" if before is State.READY else ""
    stage.tell(entry, "asleep", f"asleep{by_itself} at level {level}, still holds {gib(residue)} per device{copy}")
    if before is State.GOING_TO_SLEEP and measured and held_mib - residue <= USELESS_SHARE * held_mib:
        freed = max(0, held_mib - residue)
        why = f"its sleep at level {level} gave back {gib(freed)} of {gib(held_mib)}"
        switch_sleep_off(stage, entry, why)
        stage.deny(entry, 409, "sleep_failed", f"{entry.id} cannot sleep: {why}")
        send_off(stage, entry, 0, why)
        return
    _answer_sleep(stage, entry, level)
    if instance.rehearsing:
        going = entry.order or entry.retire or stage.shutting_down
        if not going and not stage.waiting and stage.book.fits(stage.required(entry, instance.devices), entry.id):
            stage.ghost(entry, quiet=True)
        else:
            instance.rehearsing = False
    revive_pinned(stage, entry)
    stage.wake_at(stage.now, entry)


def _answer_sleep(stage: Stage, entry: Entry, level: int) -> None:
    """Whoever asked for another level is told so; the others have what they wanted."""
    for wish in [wish for wish in entry.wishes if wish.operation is Operation.SLEEP and wish.level not in (None, level)]:
        entry.wishes.remove(wish)
        text = f"{entry.id} was on its way to level {level} and is asleep there; wake it first to put it to sleep at level {wish.level}"
        stage.say(Refuse(wish.request, 409, "asleep", text))
    stage.fulfil(entry, ("sleep",), f"{entry.id} is asleep at level {level}")


def revive_pinned(stage: Stage, entry: Entry) -> None:
    """A pinned model comes back by itself."""
    if entry.pinned and not (entry.held_off or entry.quarantined or entry.retire or entry.order or stage.shutting_down):
        stage.ghost(entry, quiet=False)


def seen_of_host(stage: Stage, report: InstanceReported) -> int | None:
    """Host RAM as measured; of a device that is only booked, nothing counts as seen."""
    ram = stage.book.pools.get("ram")
    return report.host_mib if ram is None or ram.device.measured else None


def _woken_in_vain(stage: Stage, entry: Entry, report: InstanceReported) -> None:
    """No room after all.  The samples that came with the word say who has it; where they do not, it needs more than is booked."""
    entry.wake_ooms += 1
    entry.wake_failures += 1
    entry.last_error = report.why or "there was no room to wake it"
    stage.tell(entry, "wake_failed", f"could not be woken: {entry.last_error}", "warning")


def switch_sleep_off(stage: Stage, entry: Entry, why: str) -> None:
    """From now on it stops instead; an operator's `sleep` or a new definition lifts that."""
    entry.sleep_off = why
    stage.tell(entry, "sleep_off", f"sleep is switched off: {why}; `greenroom sleep {entry.id}` tries again", "warning")


def note_measured(stage: Stage, entry: Entry, measured: Mapping[str, int], host_mib: int | None) -> None:
    """A measured footprint raises the reservation at once, and what the next start books.

    On host RAM a request may take much for a moment and leave it with the allocator: there only what is seen while
    nothing is in flight says what the model needs.
    """
    if host_mib is not None:
        entry.host_mib = host_mib
    instance = entry.instance
    if entry.state in HOME or entry.state in FALLING or entry.state is State.ASLEEP:
        return
    held = dict(stage.book.of(entry.id))
    grown, lasting_mib = False, 0
    for device, mib in measured.items():
        if device not in instance.devices:
            continue
        entry.measured_mib[device] = mib
        passing = is_passing(stage, device)
        if mib > entry.peak_mib * 1.01:
            entry.peak_mib = mib
            if not passing:  # there it is the peak of the window that began at `peak_at`
                entry.peak_at = stage.now
        if mib > held.get(device, 0):
            held[device] = mib
            grown = True
        if not passing or (entry.state is State.READY and not instance.in_flight):
            lasting_mib = max(lasting_mib, mib)
    if grown:
        _raise_book(stage, entry, held)
    if entry.need_mib is not None and lasting_mib > entry.need_mib:
        entry.need_mib, entry.need_source = lasting_mib, "measured"


def is_passing(stage: Stage, device: str) -> bool:
    """Whether a peak on this device may be gone a moment later."""
    return stage.book.pools[device].device.kind == "ram"


def _raise_book(stage: Stage, entry: Entry, held: Mapping[str, int]) -> None:
    before = max((mib for device, mib in stage.book.of(entry.id).items() if device in entry.instance.devices), default=0)
    stage.book.set(entry.id, held)
    stage.touched.add(entry.id)
    now_mib = max(held.get(device, 0) for device in entry.instance.devices)
    if entry.need_mib is not None and now_mib > TOLD_GROWTH * (entry.told_mib or before):
        entry.told_mib = now_mib
        stage.tell(entry, "raised", f"really holds {gib(now_mib)}, {gib(before)} were booked: the book follows", "warning")


def learn_down(stage: Stage, entry: Entry) -> None:
    """Lower the book to what was measured, once that has been stable through some requests."""
    policy, instance = stage.policy, entry.instance
    passing = all(is_passing(stage, device) for device in instance.devices)
    if entry.state is not State.READY or not entry.peak_mib or (entry.served < policy.learn_requests and not passing):
        return
    if stage.now - max(entry.peak_at, instance.ready_at) < policy.learn_stable_s:
        return
    learned = max(entry.model.need_floor_mib, int(entry.peak_mib * policy.learn_margin) + 1)
    if passing:
        entry.peak_mib, entry.peak_at = 0, stage.now
    before = max((mib for device, mib in stage.book.of(entry.id).items() if device in instance.devices), default=0)
    if entry.need_mib is not None and learned >= max(entry.need_mib, before):
        return
    held = {device: min(mib, learned) if device in instance.devices else mib for device, mib in stage.book.of(entry.id).items()}
    entry.need_mib, entry.need_source = learned, "measured"
    stage.book.set(entry.id, held)
    stage.touched.add(entry.id)
    entry.told_mib = learned
    if learned < before * 0.99:
        stage.tell(entry, "learned", f"needs {gib(learned)} as measured, {gib(before)} were booked")
