"""What happens when an engine ends: crashes, back-off, the out-of-memory ladder, quarantine."""

from __future__ import annotations

from .costs import blend
from .entry import Entry
from .facts import Cause, InstanceReported, State
from .moves import reopen, revive_pinned, switch_sleep_off
from .residency import HOME, RISING, SERVING
from .stage import EPSILON_S, Move, Stage
from .words import gib, span

MISCONFIGURED_BACKOFF_S = 1.0  # what it lacks may be there in a moment; looking costs nothing, and evicts nobody (see Door)
MEMORY = frozenset({Cause.OOM, Cause.STARTUP_MEMORY})


def ended(stage: Stage, entry: Entry, report: InstanceReported) -> None:
    """An instance is gone and its memory is back (or known to be leaked)."""
    before = entry.state
    asked = before is State.STOPPING
    move = stage.move_of(entry)
    if report.cause is Cause.UNKILLABLE:
        _unkillable(stage, entry, report)
        return
    if asked and report.took_s is not None:
        entry.costs.down_s = blend(entry.costs.down_s, report.took_s, stage.policy.cost_ewma)
    if report.leaked_mib:
        _book_leak(stage, entry, report.leaked_mib)
    stage.book.set(entry.id, {})
    stage.touched.add(entry.id)
    entry.unkillable = False
    entry.exit_code = report.exit_code
    entry.host_mib, entry.measured_mib = 0, {}
    if report.leaked_mib:
        stage.tell(entry, "leaked", f"{gib(report.leaked_mib)} did not come back after it ended: {report.why}", "warning")
    stage.fulfil(entry, ("unload",), f"{entry.id} is stopped")
    stage.deny(entry, 409, "not_asleep", f"{entry.id} ended before it was asleep" + (f": {report.why}" if report.why else ""))
    entry.order = ""
    if not entry.retire:
        stage.ordered.pop(entry.id, None)
    if asked:
        entry.move(State.STOPPED, stage.now)
        stage.tell(entry, "stopped", "stopped")
        revive_pinned(stage, entry)
    elif before is State.STARTING or (before is State.WAKING and report.cause in MEMORY):
        start_failed(stage, entry, report)
    elif (before in (State.WAKING, State.GOING_TO_SLEEP) and report.cause is not Cause.STALLED) or _died_of_its_wake(stage, entry, report):
        sleep_failed(stage, entry, report, before)
    else:
        crashed(stage, entry, report)
    settle_move(stage, entry, move)
    if entry.queue:
        stage.waiting.add(entry)


def _died_of_its_wake(stage: Stage, entry: Entry, report: InstanceReported) -> bool:
    """It was woken, and ended before it had answered anybody: what it lost in its sleep shows at the first request."""
    instance = entry.instance
    just_woken = instance.state in SERVING and instance.start == "wake" and not instance.proven
    return just_woken and report.cause not in MEMORY and stage.now - instance.ready_at < stage.policy.crash_forget_s


def _book_leak(stage: Stage, entry: Entry, leaked_mib: int) -> None:
    """Memory that did not come back is outside memory from now on; the next sample tells more exactly."""
    for device, held in stage.book.of(entry.id).items():
        pool = stage.book.pools[device]
        if pool.device.measured and device in entry.instance.devices:
            pool.outside_mib += min(held, leaked_mib)


def settle_move(stage: Stage, entry: Entry, move: Move | None) -> None:
    """A target that ended leaves its lanes; a victim that ended is simply gone already."""
    if move is not None and move.target is entry and move in stage.moves:
        reopen(stage, move, f"{entry.id} ended")


def _unkillable(stage: Stage, entry: Entry, report: InstanceReported) -> None:
    """It does not go away: its memory stays booked, nobody is started into a certain out-of-memory."""
    if entry.last_error != report.why:
        stage.tell(entry, "unkillable", report.why or "does not end even after SIGKILL; its memory stays booked", "warning")
    entry.last_error = report.why
    entry.unkillable = True
    stage.deny(entry, 503, "unkillable", report.why)
    stage.refuse_all(entry, 503, "unkillable", f"{entry.id}: {report.why}", 60.0)
    if entry.state is not State.STOPPING:
        entry.move(State.STOPPING, stage.now)
    if (move := stage.move_of(entry)) is not None:
        reopen(stage, move, f"{entry.id} does not end")


def crashed(stage: Stage, entry: Entry, report: InstanceReported) -> None:
    """It ended by itself after it had been ready."""
    lived_s = stage.now - entry.instance.ready_at
    entry.failures = 1 if lived_s >= stage.policy.crash_forget_s else entry.failures + 1
    entry.last_error, entry.failing = report.why or "the engine ended by itself", True
    if report.cause in MEMORY:
        _count_oom(stage, entry, report)
    delay_s = 0.0 if entry.failures <= 1 else backoff_s(stage, entry.failures - 1)
    stage.tell(entry, "crashed", f"ended by itself after {span(max(0.0, lived_s))}: {entry.last_error}", "warning")
    stage.deny(entry, 503, "engine_died", f"{entry.id} ended by itself: {entry.last_error}")
    rest(stage, entry, delay_s)
    if entry.quarantined:
        stage.refuse_all(entry, 503, "quarantined", f"{entry.id} ran out of memory too often: {entry.last_error}", 60.0)
    elif delay_s > 0:
        stage.refuse_all(entry, 503, "backing_off", _backing_off(entry, delay_s), delay_s)


def sleep_failed(stage: Stage, entry: Entry, report: InstanceReported, before: State) -> None:
    """A sleep or a wake ended its engine: whoever waits is served by a cold start, and the second time there is no third."""
    waking = before is not State.GOING_TO_SLEEP
    entry.wake_failures += waking
    entry.last_error = report.why or "the engine ended by itself"
    what = "could not be woken, and is stopped" if waking else "could not be put to sleep, and is stopped"
    if before in SERVING:
        what = "was woken, and ended before it had answered anybody"
    stage.tell(entry, "wake_failed" if waking else "sleep_failed", f"{what}: {entry.last_error}", "warning")
    count_sleep_fault(stage, entry)
    rest(stage, entry, 0.0)


def woke_out_of_memory(stage: Stage, entry: Entry, *, had_room: bool) -> None:
    """Its engine ended on a wake for want of memory.  `had_room`: nobody else had taken what was booked for it."""
    entry.wake_failures += 1
    if had_room:
        count_sleep_fault(stage, entry)


def count_sleep_fault(stage: Stage, entry: Entry) -> None:
    """One more sleep or wake that went wrong by itself: after some, it stops instead."""
    policy, now = stage.policy, stage.now
    entry.sleep_faults.append(now)
    recent = sum(now - at <= policy.sleep_faults_window_s for at in entry.sleep_faults)
    if recent >= policy.sleep_faults_max and not entry.sleep_off:
        switch_sleep_off(stage, entry, f"{recent} sleeps or wakes went wrong, last: {entry.last_error}")


def start_failed(stage: Stage, entry: Entry, report: InstanceReported) -> None:
    """It ended before it was ready: try the memory ladder, else tell everybody who waits and back off."""
    entry.last_error = report.why or "the engine ended before it was ready"
    memory = report.cause in MEMORY
    stage.tell(entry, "start_failed", f"start failed: {entry.last_error}", "warning")
    if memory:
        _count_oom(stage, entry, report)
        if _retry_with_more(stage, entry, report):
            return
    entry.failures, entry.failing = entry.failures + 1, True
    delay_s = MISCONFIGURED_BACKOFF_S if report.cause is Cause.MISCONFIGURED else backoff_s(stage, entry.failures)
    entry.oom_tries = 0
    status, code = (504, "start_timeout") if report.cause is Cause.TIMEOUT else (503, "out_of_memory" if memory else "start_failed")
    message = f"{entry.id} could not start: {entry.last_error}"
    if memory:
        message += f" (tried with {booking(entry)} booked)"
    stage.deny(entry, status, code, message)
    rest(stage, entry, delay_s)
    stage.refuse_all(entry, status, code, message, delay_s)
    restore(stage, entry)


def _retry_with_more(stage: Stage, entry: Entry, report: InstanceReported) -> bool:
    """One more try with a larger booking; for an engine that refused itself only if somebody can make room."""
    if entry.oom_tries or entry.quarantined or not entry.queue or stage.shutting_down:
        return False
    pools = [stage.book.pools[device] for device in entry.instance.devices]
    others = any(name != entry.id and not stage.entries[name].pinned for pool in pools for name in pool.holders)
    if report.cause is Cause.STARTUP_MEMORY and not others:
        return False
    before = booking(entry)
    raise_need(stage, entry, report)
    entry.oom_tries = 1
    entry.move(State.STOPPED, stage.now)
    stage.tell(entry, "oom_retry", f"out of memory with {before} booked: one more try with {booking(entry)}", "warning")
    return True


def booking(entry: Entry) -> str:
    return gib(entry.need_mib) if entry.need_mib is not None else "the whole device"


def raise_need(stage: Stage, entry: Entry, report: InstanceReported) -> None:
    """Book more from now on, at most what its devices can ever give beside what is pinned there (more would rule it out for
    good); unknown stays unknown: that is all there is."""
    old = entry.need_mib
    if old is None:
        return
    pools = stage.book.pools
    most = min((pools[device].most_mib - stage.pinned_on(device, besides=entry) for device in entry.instance.devices), default=old)
    larger = max(int(old * stage.policy.oom_growth) + 1, report.wanted_mib or 0)
    entry.need_mib, entry.need_source = min(larger, max(most, old)), "measured"


def _count_oom(stage: Stage, entry: Entry, report: InstanceReported) -> None:
    policy = stage.policy
    entry.ooms.append(stage.now)
    recent = sum(stage.now - at <= policy.quarantine_window_s for at in entry.ooms)
    if entry.state not in RISING:
        raise_need(stage, entry, report)
    if recent >= policy.quarantine_ooms and not entry.quarantined:
        entry.quarantined = True
        stage.tell(
            entry,
            "quarantined",
            f"{recent} times out of memory in {span(policy.quarantine_window_s)}: "
            "not started again until an operator loads it or its configuration changes",
            "warning",
        )


def backoff_s(stage: Stage, failures: int) -> float:
    return min(stage.policy.backoff_max_s, stage.policy.backoff_first_s * 2.0 ** min(30, failures - 1))


def _backing_off(entry: Entry, delay_s: float) -> str:
    return f"{entry.id} ended by itself {entry.failures} times in a row and is tried again in {span(delay_s)}: {entry.last_error}"


def rest(stage: Stage, entry: Entry, delay_s: float) -> None:
    entry.move(State.FAILED if delay_s > 0 else State.STOPPED, stage.now)
    if delay_s > 0:
        entry.backoff_until = stage.now + delay_s
        stage.wake_at(entry.backoff_until, entry)
    else:
        revive_pinned(stage, entry)


def recover(stage: Stage, entry: Entry) -> None:
    """The back-off is over."""
    if entry.state is State.FAILED and stage.now >= entry.backoff_until - EPSILON_S:
        entry.backoff_until = 0.0
        entry.move(State.STOPPED, stage.now)
        revive_pinned(stage, entry)


def restore(stage: Stage, entry: Entry) -> None:
    """What was evicted for a start that failed comes back, where it costs nobody else their place."""
    for name in sorted(entry.displaced):
        other = stage.entries.get(name)
        if other is not None and other.state in HOME and not other.retire and not other.order:
            stage.ghost(other, quiet=True)
    entry.displaced = frozenset()
