"""Who held which memory, who waited and who gave way, as time goes by: what the timeline shows.

Written down whenever the core tells something, and looked at again by whoever asks.  Every instance gets a place on its
device's scale (first fit) and keeps it as long as it fits there, so that all who look see one picture.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from greenroom.core.facts import State, Tell
from greenroom.core.scheduler import Scheduler
from greenroom.core.views import PlaceView
from greenroom.ledger.rows import TransitionRow

SPANS_KEPT = 4000
WAITS_KEPT = 1000
OPENS = frozenset({"starting", "waking"})
CLOSES = frozenset({"ready", "start_failed", "wake_failed", "crashed", "stopped", "oom_retry", "refused"})


@dataclass(slots=True)
class Span:
    model: str
    device: str
    generation: int
    state: str
    mib: int
    offset_mib: int
    begin: float  # unix s
    end: float | None = None

    def plain(self) -> dict[str, Any]:
        return {
            "instance": f"{self.model}#{self.generation}",
            "model": self.model,
            "device": self.device,
            "from": round(self.begin, 3),
            "to": None if self.end is None else round(self.end, 3),
            "state": self.state,
            "mib": self.mib,
            "offset_mib": self.offset_mib,
        }


@dataclass(slots=True)
class Wait:
    model: str
    begin: float
    gate_until: float
    end: float | None = None

    def plain(self) -> dict[str, Any]:
        end = None if self.end is None else round(self.end, 3)
        return {"model": self.model, "from": round(self.begin, 3), "gate_until": round(self.gate_until, 3), "to": end}


@dataclass(slots=True)
class Turn:
    """The latest way in of a model, on the scheduler's clock: what those who came in it have waited for."""

    gate_at: float
    rise_at: float
    ready_at: float | None = None
    kind: str = "cold"  # cold | wake

    def split(self, since: float, until: float) -> tuple[float, float, float]:
        """(queue, gate, load) seconds of a wait."""
        gate = _overlap(since, until, self.gate_at, self.rise_at)
        load = _overlap(since, until, self.rise_at, until if self.ready_at is None else self.ready_at)
        return max(0.0, until - since - gate - load), gate, load


def _overlap(since: float, until: float, begin: float, end: float) -> float:
    return max(0.0, min(until, end) - max(since, begin))


class Ribbon:
    """`scheduler` and `capacities` (device -> MiB) are asked anew each time: both are replaced while the server runs."""

    def __init__(self, scheduler: Callable[[], Scheduler], clock: Callable[[], float], capacities: Callable[[], Mapping[str, int]]) -> None:
        self._scheduler, self._clock, self._capacities = scheduler, clock, capacities
        self._open: dict[tuple[str, str], Span] = {}
        self._closed: deque[Span] = deque(maxlen=SPANS_KEPT)
        self._waiting: dict[str, Wait] = {}
        self._waits: deque[Wait] = deque(maxlen=WAITS_KEPT)
        self._swaps: deque[dict[str, Any]] = deque(maxlen=WAITS_KEPT)
        self._left_at: dict[str, float] = {}  # model -> when those who make its room began to leave
        self._earlier: list[Span] = []
        self.turns: dict[str, Turn] = {}
        self.began_at = time.time()

    # ------------------------------------------------------------------ in

    def told(self, tell: Tell) -> None:
        """A teller of the shell."""
        scheduler, offset = self._scheduler(), time.time() - self._clock()
        if tell.kind == "evicted":
            target = scheduler.gated_for(tell.model)
            if target:
                self._left_at.setdefault(target, tell.at)
        elif tell.kind in OPENS:
            self._rises(scheduler, tell, offset)
        elif tell.kind in CLOSES:
            turn = self.turns.get(tell.model)
            if turn is not None and turn.ready_at is None:
                turn.ready_at = tell.at
            if (wait := self._waiting.pop(tell.model, None)) is not None:
                wait.end = tell.at + offset
                self._waits.append(wait)
        self.look()

    def _rises(self, scheduler: Scheduler, tell: Tell, offset: float) -> None:
        turn = scheduler.turn_of(tell.model)
        left_at = self._left_at.pop(tell.model, tell.at)
        if turn is None:
            return
        self.turns[tell.model] = Turn(turn.began_at, tell.at, kind="wake" if tell.kind == "waking" else "cold")
        if turn.first_at is not None:
            self._waiting[tell.model] = Wait(tell.model, turn.first_at + offset, max(left_at, turn.first_at) + offset)
        if turn.victims:
            self._swaps.append({"at": round(tell.at + offset, 3), "in": tell.model, "out": list(turn.victims)})

    def look(self) -> None:
        """Take down what is true now."""
        now = time.time()
        held = {(place.model, device): (place, mib) for place in self._scheduler().places() for device, mib in place.held_mib.items()}
        for key in [key for key in self._open if key not in held]:  # they first: their room is free for the others
            self._end(key, now)
        for key, (place, mib) in held.items():
            self._note(key, place, mib, now)

    def _note(self, key: tuple[str, str], place: PlaceView, mib: int, now: float) -> None:
        span = self._open.get(key)
        state = place.state.value
        if span is not None and span.generation == place.generation and span.state == state and span.mib == mib:
            return
        kept = span.offset_mib if span is not None and span.generation == place.generation else None
        if span is not None:
            self._end(key, now)
        offset = self._place(key[1], mib, kept)
        self._open[key] = Span(place.model, key[1], place.generation, state, mib, offset, now)

    def _end(self, key: tuple[str, str], now: float) -> None:
        span = self._open.pop(key)
        span.end = now
        self._closed.append(span)

    def _place(self, device: str, mib: int, kept: int | None) -> int:
        taken = sorted((one.offset_mib, one.offset_mib + one.mib) for one in self._open.values() if one.device == device)
        return first_fit(taken, mib, self._capacities().get(device, mib), kept)

    def earlier(self, rows: Iterable[TransitionRow], until: float) -> None:
        """What the ledger knows of the time before this server's start."""
        self._earlier = placed(spans_of(rows, until), self._capacities())

    # ------------------------------------------------------------------ out

    def plain(self, since: float, now: float) -> dict[str, Any]:
        self.look()
        spans = [*self._earlier, *self._closed, *self._open.values()]
        waits = [*self._waits, *self._waiting.values(), *self._not_begun(now)]
        return {
            "now": round(now, 3),
            "from": round(since, 3),
            "spans": [one.plain() for one in spans if one.end is None or one.end > since],
            "waits": [one.plain() for one in waits if one.end is None or one.end > since],
            "swaps": [one for one in self._swaps if one["at"] > since],
        }

    def _not_begun(self, now: float) -> list[Wait]:
        offset = now - self._clock()
        waiting = self._scheduler().waiting_since()
        return [Wait(model, at + offset, now) for model, at in waiting.items() if model not in self._waiting]

    def turn(self, model: str) -> Turn | None:
        """Of those who wait for it now, or came in with its latest start."""
        if (now := self._scheduler().turn_of(model)) is not None and self._scheduler().state_of(model) not in (
            State.STARTING,
            State.WAKING,
        ):
            return Turn(now.began_at, float("inf"))
        return self.turns.get(model)


def first_fit(taken: Sequence[tuple[int, int]], mib: int, capacity_mib: int, kept: int | None = None) -> int:
    """Where `mib` lie beside what is taken (sorted); where they lay before, if they still fit there."""
    if kept is not None and all(kept + mib <= low or kept >= high for low, high in taken) and kept + mib <= capacity_mib:
        return kept
    at = 0
    for low, high in taken:
        if at + mib <= low:
            return at
        at = max(at, high)
    return at if at + mib <= capacity_mib else max(0, capacity_mib - mib)


def placed(spans: Iterable[Span], capacities: Mapping[str, int]) -> list[Span]:
    """The same with their places, given in the order of time."""
    done: list[Span] = []
    last: dict[tuple[str, str, int], Span] = {}
    for span in sorted(spans, key=lambda one: one.begin):
        now = [one for one in done if one.device == span.device and one.begin <= span.begin and (one.end or 0) > span.begin]
        before = last.get((span.model, span.device, span.generation))
        taken = sorted((one.offset_mib, one.offset_mib + one.mib) for one in now if one.model != span.model)
        span.offset_mib = first_fit(taken, span.mib, capacities.get(span.device, span.mib), before.offset_mib if before else None)
        last[span.model, span.device, span.generation] = span
        done.append(span)
        if len(done) > SPANS_KEPT:
            break
    return done


DURING = {"start": State.STARTING, "wake": State.WAKING, "sleep": State.GOING_TO_SLEEP, "stop": State.STOPPING}


def spans_of(rows: Iterable[TransitionRow], until: float) -> list[Span]:
    """The states that transitions (oldest first) led through; what none of them ended lasts `until` then."""
    found: list[Span] = []
    resting: dict[str, list[Span]] = {}
    for row in rows:
        for span in resting.pop(row.model, []):
            span.end = min(row.at, until)
        end = row.at + row.took_s
        mib = {device: size for device, size in row.mib.items() if size > 0}
        for device, size in mib.items():
            found.append(Span(row.model, device, row.generation, DURING[row.kind].value, size, 0, row.at, end))
        after = rest_after(row)
        if after is None:
            continue
        resting[row.model] = [Span(row.model, device, row.generation, after.value, size, 0, end, until) for device, size in mib.items()]
        found += resting[row.model]
    return [one for one in found if one.end is not None and one.end > one.begin]


def rest_after(row: TransitionRow) -> State | None:
    """Where a transition left its model; None = stopped."""
    match row.kind, row.ok:
        case ("start" | "wake", True):
            return State.READY
        case ("sleep", True) | ("wake", False):
            return State.ASLEEP
        case _:
            return None


def day_of(rows: Sequence[TransitionRow], since: float, now: float, state: State, boot_at: float) -> list[dict[str, Any]]:
    """One model's states over a day, oldest first; `state` is the present one, which the last span lasts in."""
    found: list[dict[str, Any]] = []

    def add(begin: float, end: float | None, name: str) -> None:
        if end is None or end > begin:
            found.append({"from": round(max(begin, since), 3), "to": None if end is None else round(end, 3), "state": name})

    for index, row in enumerate(rows):
        if index == 0 and row.kind != "start" and row.at > since:
            add(since, row.at, State.ASLEEP.value if row.kind == "wake" else State.READY.value)
        end = row.at + row.took_s
        add(row.at, end, DURING[row.kind].value)
        after = rest_after(row)
        if after is None:
            continue
        if index + 1 < len(rows):
            following = rows[index + 1].at
            add(end, min(following, boot_at) if row.at < boot_at <= following else following, after.value)
        elif row.at < boot_at:
            add(end, boot_at, after.value)
        elif state is after or state not in (State.STOPPED, State.FAILED):
            add(end, None, state.value)
    if not rows and state not in (State.STOPPED, State.FAILED):
        add(max(since, boot_at), None, state.value)
    return found
