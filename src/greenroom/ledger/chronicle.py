"""From events and actions to rows: pure, and alike for a running server and for a simulation.

    chronicle = Chronicle(setup, offset_s=time.time() - time.monotonic())
    for event, actions in run:
        rows = chronicle.feed(event, actions)   # what this event completed

Waits are kept per model, not per request: each model is at every moment queued, gated, loading or waking, and a
request takes the difference of its model's totals between its arrival and its admission.

Nearly every request is hot: admitted at once, ended without a further word.  `hot_arrival` and `hot_row` are `feed` for
its two events, told in bare values; they cost a third of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from greenroom.core.facts import (
    Action,
    Admit,
    Cause,
    Cut,
    Event,
    InstanceReported,
    MemoryMeasured,
    Model,
    Priority,
    Refuse,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestLost,
    Setup,
    SetupChanged,
    Sleep,
    Start,
    State,
    Stop,
    Tell,
    Wake,
)

from . import codec
from .rows import EventRow, RequestRow, SampleRow, TellRow, TransitionRow

Row: TypeAlias = RequestRow | TransitionRow | TellRow | SampleRow | EventRow
Book: TypeAlias = Mapping[str, Mapping[str, int]]  # model -> device -> MiB
Totals: TypeAlias = tuple[float, float, float, float]
# What those who wait for a model wait for, since when, and how long they had waited for each until then.
Mark: TypeAlias = tuple[int, float, Totals]
# Of a hot request that runs: its arrival, model, priority, client, generation, who was served before, its model's mark.
Hot: TypeAlias = "tuple[float, _Track, str, str, int, str, Mark]"

SAMPLE_EVERY_S: Final = 5.0  # of each device
RAM: Final = "ram"
QUEUE, GATE, LOAD, WAKE = range(4)
NO_WAITS: Final[Totals] = (0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    request: int
    at: float
    track: _Track
    priority: str
    client: str
    mark: Mark  # its model's at its arrival
    waiting: bool = True
    generation: int = 0
    start: str = ""
    waits: Totals = NO_WAITS
    before: str = ""
    code: str = ""  # of its cut


@dataclass(slots=True)
class _Move:
    """A transition that has not ended."""

    at: float
    kind: str
    generation: int
    level: int = 0
    reason: str = ""
    waiters: int = 0
    evicted_for: str = ""


@dataclass(slots=True)
class _Track:
    """One model: where it is, what those who wait for it wait for, and what it holds."""

    model: str
    mark: Mark
    priority: str = Priority.INTERACTIVE.value  # of requests that name none
    waiting: int = 0
    generation: int = 0
    devices: tuple[str, ...] = ()
    is_home: bool = True
    move: _Move | None = None
    victims: set[str] = field(default_factory=set)  # those that have not left yet for its sake
    gated_for: str = ""
    booked: dict[str, int] = field(default_factory=dict)
    awake: dict[str, int] = field(default_factory=dict)  # what is booked when it is ready

    def shift(self, phase: int, at: float) -> None:
        self.mark = (phase, at, totals(self.mark, at))


def totals(mark: Mark, at: float) -> Totals:
    """How long those of this model have waited for each cause until `at`, which comes before the next mark."""
    phase, since, (queue_s, gate_s, load_s, wake_s) = mark
    more_s = at - since
    if phase == QUEUE:
        return queue_s + more_s, gate_s, load_s, wake_s
    if phase == GATE:
        return queue_s, gate_s + more_s, load_s, wake_s
    return (queue_s, gate_s, load_s + more_s, wake_s) if phase == LOAD else (queue_s, gate_s, load_s, wake_s + more_s)


class Chronicle:
    """`offset_s` leads from the clock of the events to unix time; `journal`: yield an EventRow for every event too.

    `request_row` makes what is yielded in place of a RequestRow, of the same values: the row itself takes a third of
    all the time that a request costs here.
    """

    def __init__(self, setup: Setup, offset_s: float = 0.0, *, journal: bool = False, request_row: Callable[..., Any] = RequestRow) -> None:
        self._request_row = request_row
        self.offset_s = offset_s
        self.journal = journal
        self._models: dict[str, Model] = {}
        self._tracks: dict[str, _Track] = {}
        self._open: dict[int, _Open] = {}
        self.hot: dict[int, Hot] = {}  # those of which nothing else is known yet; whoever ends one takes it out
        self._turn: tuple[_Track | None, tuple[str, ...]] = (None, ())  # whose the latest admission was, and on which devices
        self._served: dict[str, tuple[int, str]] = {}  # device -> number of its latest admission, and whose it was
        self._admissions = 0
        self._sampled: dict[str, float] = {}
        self._asked: dict[str, Tell] = {}  # within one event: the sentence that goes before a transition
        self._rows: list[Row] = []
        self.take(setup)
        self._doers: dict[type[Any], Callable[[float, Any], None]] = {
            Admit: self._admitted,
            Refuse: self._refused,
            Cut: self._cut,
            Start: self._started,
            Wake: self._wakes,
            Sleep: self._sleeps,
            Stop: self._stops,
            Tell: self._tell,
        }

    # ------------------------------------------------------------------ in

    def feed(self, event: Event, actions: Sequence[Action], book: Book | None = None) -> list[Row]:
        """The rows that this event completed.  `book`: what is booked after it, where the caller can tell."""
        rows: list[Row] = []
        self._rows = rows
        if book is not None:
            for track in self._tracks.values():
                track.booked = dict(book.get(track.model, {}))
        if self.journal:
            rows.append(event_row(event, actions, self.offset_s))
        at = event.at
        if isinstance(event, RequestArrived):
            self._arrived(event)
        elif isinstance(event, RequestFinished):
            if (one := self._known(event.request)) is not None:
                self._ends(one, at, "client_gone" if one.waiting else event.outcome.value)
        elif isinstance(event, InstanceReported):
            self._reported(event, actions)
        elif isinstance(event, MemoryMeasured):
            self._measured(event)
        elif isinstance(event, RequestCancelled):
            if (one := self._known(event.request)) is not None and one.waiting:
                self._ends(one, at, "client_gone")
        elif isinstance(event, RequestLost):
            if (one := self._known(event.request)) is not None and not one.waiting:
                one.waiting = True
                one.track.waiting += 1
        elif isinstance(event, SetupChanged):
            self.take(event.setup)
        if actions:
            doers = self._doers
            for action in actions:
                if (doer := doers.get(type(action))) is not None:
                    doer(at, action)
            self._asked.clear()
        return rows

    def hot_arrival(self, at: float, request: int, model: str, client: str, priority: str | None, generation: int) -> None:
        """RequestArrived without a deadline that was answered by one Admit, hot; no row."""
        track = self._tracks.get(model)
        if track is None:
            track = self._track(model, at)
        last, devices = self._turn
        before = "" if last is track and devices is track.devices else self._takes_turn(track)
        self.hot[request] = (at, track, priority or track.priority, client, generation, before, track.mark)

    def hot_row(self, request: int, one: Hot, at: float, outcome: str) -> Any:
        """RequestFinished that was answered by nothing, of a request that was taken out of `hot`; its row."""
        began_at, track, priority, client, generation, before, _ = one
        return self._request_row(
            request, began_at + self.offset_s, track.model, generation, client, priority, "", 0.0, 0.0, 0.0, 0.0, None,
            at - began_at, None, None, "hot", outcome, 0, "", before,
        )  # fmt: skip

    def _known(self, request: int) -> _Open | None:
        """A request that has not ended; more is about to happen to it."""
        one = self._open.get(request)
        if one is None and (hot := self.hot.pop(request, None)) is not None:
            at, track, priority, client, generation, before, mark = hot
            one = self._open[request] = _Open(
                request, at, track, priority, client, mark, waiting=False, generation=generation, start="hot", before=before
            )
        return one

    def restart(self, at: float, why: str, *, forget: bool = False) -> list[Row]:
        """The scheduler's book is built anew: what was under way ends here.  Requests end by `abandon`, or are forgotten."""
        rows: list[Row] = []
        self._rows = rows
        for track in self._tracks.values():
            self._moved(track, at, ok=False, why=why)
        self._tracks = {}
        if forget:
            self._open.clear()
            self.hot.clear()
        return rows

    def abandon(self, request: int, at: float, outcome: str) -> Any:
        """The row of a request whose end the core was never told; None = it is not known."""
        one = self._known(request)
        if one is None:
            return None
        rows: list[Row] = []
        self._rows = rows
        self._ends(one, at, outcome)
        return rows[0]

    @property
    def open_requests(self) -> int:
        return len(self._open) + len(self.hot)

    def take(self, setup: Setup) -> None:
        """These settings hold from now on."""
        self._models = {model.id: model for model in setup.models}
        for name, track in list(self._tracks.items()):
            if (model := self._models.get(name)) is not None:
                track.priority = model.priority.value
            elif track.is_home and not track.waiting:
                del self._tracks[name]

    def _track(self, model: str, at: float) -> _Track:
        track = self._tracks.get(model)
        if track is None:
            track = _Track(model, (QUEUE, at, NO_WAITS))
            if (known := self._models.get(model)) is not None:  # a name that nobody configured is not remembered
                self._tracks[model] = track
                track.priority = known.priority.value
        return track

    # ------------------------------------------------------------------ requests

    def _arrived(self, event: RequestArrived) -> None:
        at = event.at
        track = self._track(event.model, at)
        priority = track.priority if event.priority is None else event.priority.value
        track.waiting += 1
        self._open[event.request] = _Open(event.request, at, track, priority, event.client, track.mark)

    def _admitted(self, at: float, action: Admit) -> None:
        one = self._open.get(action.request)
        if one is None or not one.waiting:
            return
        self._waited(one, at)
        one.generation, one.start = action.generation, action.start
        one.before = self._takes_turn(one.track)

    def _takes_turn(self, track: _Track) -> str:
        """A request of this model is admitted; returns who was served on its devices before, unless it was the model itself."""
        self._turn = (track, track.devices)
        self._admissions += 1
        latest, served = (0, ""), self._served
        for device in track.devices:
            latest = max(latest, served.get(device, latest))
            served[device] = (self._admissions, track.model)
        return latest[1] if latest[1] != track.model else ""

    def _waited(self, one: _Open, at: float) -> None:
        """It waits no more: what its model's totals grew by since its arrival is what it waited for."""
        track = one.track
        track.waiting -= 1
        before, (queue_s, gate_s, load_s, wake_s) = totals(one.mark, one.at), totals(track.mark, at)
        one.waits = (queue_s - before[QUEUE], gate_s - before[GATE], load_s - before[LOAD], wake_s - before[WAKE])
        one.waiting = False

    def _refused(self, at: float, action: Refuse) -> None:
        if (one := self._known(action.request)) is not None:
            self._ends(one, at, "refused", action.status, action.code)

    def _cut(self, at: float, action: Cut) -> None:
        if (one := self._known(action.request)) is not None:
            one.code = action.code

    def _ends(self, one: _Open, at: float, outcome: str, status: int = 0, code: str = "") -> None:
        del self._open[one.request]
        if one.waiting:
            self._waited(one, at)
            one.generation = 0  # where it was admitted before, that engine did not serve it
        row = self._request_row(
            one.request, one.at + self.offset_s, one.track.model, one.generation, one.client, one.priority, "", *one.waits, None,
            at - one.at, None, None, one.start, outcome, status, code or one.code, one.before,
        )  # fmt: skip
        self._rows.append(row)

    # ------------------------------------------------------------------ what a model's requests wait for

    def _look(self, track: _Track, at: float) -> None:
        kind = track.move.kind if track.move is not None else ""
        phase = LOAD if kind == "start" else WAKE if kind == "wake" else GATE if track.victims else QUEUE
        if phase != track.mark[0]:
            track.shift(phase, at)

    def _gates(self, victim: str, target: str, at: float) -> None:
        """`target` waits until `victim` has left."""
        if not target:
            return
        self._left(victim, at)
        self._track(victim, at).gated_for = target
        waiter = self._track(target, at)
        waiter.victims.add(victim)
        self._look(waiter, at)

    def _left(self, victim: str, at: float) -> None:
        """Nobody waits any more for this one to leave."""
        track = self._track(victim, at)
        if track.gated_for and (waiter := self._tracks.get(track.gated_for)) is not None:
            waiter.victims.discard(victim)
            self._look(waiter, at)
        track.gated_for = ""

    def _tell(self, at: float, tell: Tell) -> None:
        self._rows.append(TellRow(tell.at + self.offset_s, tell.model, tell.kind, tell.level, tell.text))
        if tell.kind in ("starting", "waking", "sleeping", "stopping"):
            self._asked[tell.model] = tell
        elif tell.kind == "evicted":
            self._asked[tell.model] = tell
            self._gates(tell.model, self._evictor(reason_in(tell.text)), at)
        elif tell.kind == "gated":
            self._gates(tell.model, self._named(tell.text, " is owed its room"), at)
        elif tell.kind == "reopened":
            self._left(tell.model, at)

    def _evictor(self, reason: str) -> str:
        """For whom a model was sent away: it needed the room, or a group's rule speaks for it."""
        return self._named(reason, " needed ") or self._named(reason, " was asked for, and group ")

    def _named(self, text: str, words: str) -> str:
        """The model whose id stands before these words at the head of a sentence of the core."""
        return max((name for name in self._models if text.startswith(name + words)), key=len, default="")

    # ------------------------------------------------------------------ transitions

    def _begin(self, track: _Track, at: float, kind: str, generation: int, level: int, reason: str, waiters: int, target: str = "") -> None:
        self._moved(track, at, ok=False, why=reason)  # it is overtaken: a start that is stopped before its end
        track.move = _Move(at, kind, generation, level, reason, waiters, target)
        track.generation, track.is_home = generation, False
        self._look(track, at)

    def _moved(
        self, track: _Track, at: float, *, ok: bool, cause: str = "", why: str = "", phases: Mapping[str, float] | None = None
    ) -> None:
        """The transition under way has ended, if there is one."""
        move, track.move = track.move, None
        if move is None:
            return
        self._look(track, at)
        self._rows.append(
            TransitionRow(
                at=move.at + self.offset_s,
                model=track.model,
                generation=move.generation,
                kind=move.kind,
                devices=track.devices,
                took_s=at - move.at,
                ok=ok,
                level=move.level,
                reason=move.reason,
                cause=cause,
                why=why,
                mib=dict(track.booked),
                waiters=move.waiters,
                evicted_for=move.evicted_for,
                phases=dict(phases or {}),
            )
        )

    def _rises(self, track: _Track, at: float) -> None:
        """It has its room: who made it has left, and nobody waits for it to leave."""
        for victim in list(track.victims):
            self._left(victim, at)
        self._left(track.model, at)

    def _started(self, at: float, action: Start) -> None:
        track = self._track(action.model, at)
        self._rises(track, at)
        track.devices = action.devices
        track.booked, track.awake = dict(action.reserved_mib), dict(action.reserved_mib)
        self._begin(track, at, "start", action.generation, 0, self._why(action.model), track.waiting)

    def _wakes(self, at: float, action: Wake) -> None:
        track = self._track(action.model, at)
        self._rises(track, at)
        track.booked |= track.awake
        self._begin(track, at, "wake", action.generation, action.level, self._why(action.model), track.waiting)

    def _sleeps(self, at: float, action: Sleep) -> None:
        self._leaves(at, action, action.level, "sleep", self._why(action.model))

    def _stops(self, at: float, action: Stop) -> None:
        self._leaves(at, action, 0, "stop", action.reason)

    def _leaves(self, at: float, action: Sleep | Stop, level: int, kind: str, reason: str) -> None:
        track = self._track(action.model, at)
        tell = self._asked.get(action.model)
        target = self._evictor(reason) if tell is not None and tell.kind == "evicted" else ""
        waiters = self._tracks[target].waiting if target in self._tracks else 0
        self._begin(track, at, kind, action.generation, level, reason, waiters, target)

    def _why(self, model: str) -> str:
        tell = self._asked.get(model)
        if tell is None:
            return ""
        return tell.text if tell.kind in ("starting", "waking") else reason_in(tell.text)

    def _reported(self, event: InstanceReported, actions: Sequence[Action]) -> None:
        track = self._tracks.get(event.model)
        if track is None or track.is_home or event.generation != track.generation:
            return
        at, move, (cause, why) = event.at, track.move, (event.cause.value, event.why)
        kind = move.kind if move is not None else ""
        if event.state is State.READY:
            self._grow(track, event.measured_mib)
            if kind in ("start", "wake"):
                self._moved(track, at, ok=True, phases=event.phases)
        elif event.state is State.ASLEEP:
            if not kind and any(isinstance(one, Tell) and one.kind == "asleep" and one.model == event.model for one in actions):
                track.move = _Move(at, "sleep", track.generation, event.level, "it fell asleep by itself")
                kind = "sleep"
            if kind in ("sleep", "wake"):
                self._lies_down(track, event)
                self._left(event.model, at)
                if kind == "sleep":
                    self._moved(track, at, ok=True)
                else:
                    self._moved(track, at, ok=False, cause=cause, why=why)
        elif event.state is State.STOPPED:
            unkillable = event.cause is Cause.UNKILLABLE
            if not unkillable:
                track.booked, track.awake = {}, {}
            if move is None:
                track.move = _Move(at, "stop", track.generation, 0, "it ended by itself")
            ok = kind == "stop" and not unkillable
            self._moved(track, at, ok=ok, cause="" if ok else cause, why="" if ok else why)
            if unkillable:
                track.move = _Move(at, "stop", track.generation, 0, "it does not end")
                self._left(event.model, at)
                return
            track.is_home = True
            self._left(event.model, at)

    # ------------------------------------------------------------------ memory

    def _lies_down(self, track: _Track, event: InstanceReported) -> None:
        held = {device: mib for device, mib in event.measured_mib.items() if device in track.devices}
        if not held:
            model = self._models.get(track.model)
            tiers = (*model.sleep, *((model.doze,) if model.doze is not None else ())) if model is not None else ()
            level = event.level or (track.move.level if track.move is not None else 0)
            residue = next((tier.residue_mib for tier in tiers if tier.level == level), 0)
            held = {device: min(residue, track.booked.get(device, residue)) for device in track.devices}
        if event.host_mib and RAM not in held:
            held[RAM] = event.host_mib
        track.booked = held

    def _grow(self, track: _Track, measured: Mapping[str, int]) -> None:
        for device, mib in measured.items():
            if device in track.devices and mib > track.booked.get(device, 0):
                track.booked[device] = track.awake[device] = mib

    def _measured(self, event: MemoryMeasured) -> None:
        device, at = event.device, event.at
        for name, mib in event.own_mib.items():
            track = self._tracks.get(name)
            if track is not None and not track.is_home and (track.move is None or track.move.kind in ("start", "wake")):
                self._grow(track, {device: mib})
        last = self._sampled.get(device)
        if last is not None and at - last < SAMPLE_EVERY_S:
            return
        self._sampled[device] = at
        outside = max(0, event.used_mib - sum(event.own_mib.values()))
        reserved = sum(track.booked.get(device, 0) for track in self._tracks.values())
        self._rows.append(SampleRow(at + self.offset_s, device, reserved, event.used_mib, outside, dict(event.own_mib)))


def reason_in(text: str) -> str:
    """Of `unloaded: <reason>; idle 3 s, back in ...` and its like, the reason."""
    return text.partition(": ")[2].rpartition("; ")[0]


def event_row(event: Event, actions: Iterable[Action], offset_s: float) -> EventRow:
    plain = codec.plain_event(event)
    return EventRow(
        event.at + offset_s, event.at, type(event).__name__, getattr(event, "model", ""), plain, tuple(codec.plain_actions(actions))
    )
