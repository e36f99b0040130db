"""The scheduler's working state: all models, the book, what is under way, what is still to be said.

Everything here is touched only from inside `Scheduler.handle`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations
from typing import Any

from .budget import Book
from .entry import Entry
from .facts import Action, Cut, Device, Done, Group, Policy, Refuse, SetTimer, State, Tell
from .lineup import Lineup
from .queue import Waiting
from .residency import HOME
from .thrash import Turns

NEVER = float("inf")
EPSILON_S = 1e-9
UNKNOWN_MIB_MIN = 64  # a model of unknown size is not started into less than this
GHOST_WAIT_S_MAX = 300.0  # a preload that found no room by then is dropped


class Phase(StrEnum):
    GATING = "gating"  # victims finish what they have in flight
    LEAVING = "leaving"  # victims go to sleep or stop
    STARTING = "starting"  # the target starts or wakes


@dataclass(slots=True, eq=False)
class Move:
    """What holds the lanes of some devices: a target on its way in, and its victims on their way out."""

    target: Entry | None
    devices: tuple[str, ...]  # where the target goes
    lanes: frozenset[str]  # every device whose memory changes meanwhile
    victims: dict[str, int]  # model -> sleep level it falls to, 0 = stop
    phase: Phase
    began_at: float
    phase_at: float
    wakes: bool = False
    leaves_at: float = 0.0  # when its victims were told to leave


@dataclass(slots=True)
class Admission:
    """A request in flight, with what it needs to wait again should its engine be lost before it answered."""

    entry: Entry
    generation: int
    at: float
    arrived_at: float
    weight: float = 1.0
    retried: bool = False


@dataclass(slots=True)
class Stage:
    policy: Policy
    book: Book = field(default_factory=Book)
    entries: dict[str, Entry] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    conflicts: dict[str, tuple[str, ...]] = field(default_factory=dict)  # models that may not be ready together, by name
    moves: list[Move] = field(default_factory=list)
    lanes: dict[str, list[Move]] = field(default_factory=dict)
    waiting: Lineup = field(default_factory=Lineup)
    requests: dict[int, Entry] = field(default_factory=dict)  # waiting requests
    admitted: dict[int, Admission] = field(default_factory=dict)
    ordered: dict[str, Entry] = field(default_factory=dict)  # models an operator or a reload drives somewhere
    claims: dict[str, tuple[int, float]] = field(default_factory=dict)  # device -> MiB others may use, time its gate opens
    blocked: dict[str, float] = field(default_factory=dict)  # model -> since when outside memory keeps it out
    aging: float = 0.0  # the greedy-dual clock
    now: float = 0.0
    out: list[Action] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)
    due: list[tuple[float, str]] = field(default_factory=list)  # idle ladders and back-offs: (at, model)
    decide_at: float = NEVER
    timer_at: float = NEVER
    ghosts: int = 0
    clients: int = 0  # waiting requests somebody sent
    turns: Turns = field(default_factory=Turns)
    shutting_down: bool = False
    pins: int = 0
    beside_ratio: float | None = None
    outlook: object = None  # the rules' survey of all residents, None when it must be made anew
    idle_items: dict[str, list[Any]] = field(default_factory=dict)  # idle residents by device, for as long
    items: dict[str, object] = field(default_factory=dict)  # what each resident's leaving would free, as long as `outlook` holds

    def look_anew(self) -> None:
        """Something changed: what was surveyed for decisions is void."""
        if self.outlook is not None or self.items or self.idle_items:
            self.outlook = None
            self.items.clear()
            self.idle_items.clear()

    @contextmanager
    def looking(self, at: float) -> Iterator[None]:
        """For views: the clock shows `at` meanwhile, and nothing that decisions remember is touched."""
        before = self.now, self.outlook, self.items, self.idle_items
        self.now, self.outlook, self.items, self.idle_items = max(self.now, at), None, {}, {}
        try:
            yield
        finally:
            self.now, self.outlook, self.items, self.idle_items = before

    def forget(self, entry: Entry) -> None:
        """It is in no configuration any more, and nothing is left of it: whoever waited for it to leave need not."""
        for move in self.moves:
            move.victims.pop(entry.id, None)
        del self.entries[entry.id]
        self.count_pins()

    # ------------------------------------------------------------------ saying things

    def say(self, action: Action) -> None:
        self.out.append(action)

    def tell(self, entry: Entry, kind: str, text: str, level: str = "info") -> None:
        entry.story.append((self.now, text))
        self.out.append(Tell(self.now, entry.id, kind, text, level))

    # ------------------------------------------------------------------ requests

    def enqueue(self, entry: Entry, item: Waiting, *, front: bool = False) -> None:
        if not item.quiet_ghost and entry.queue and entry.queue.only_quiet:
            for ghost in entry.queue.drain():  # superseded: a client must not inherit its age
                self.requests.pop(ghost.request, None)
        entry.queue.add(item, front=front)
        self.requests[item.request] = entry
        self.clients += not item.ghost
        if entry.state is not State.READY:
            self.waiting.add(entry)

    def leave_queue(self, entry: Entry, item: Waiting) -> None:
        """Book-keeping after `item` was taken out of the queue by whoever."""
        self.requests.pop(item.request, None)
        self.clients -= not item.ghost
        if not entry.queue:
            self.waiting.drop(entry)
            self.blocked.pop(entry.id, None)
            if entry.state is State.ASLEEP:
                self.wake_at(self.now, entry)  # its ladder was not looked at while somebody waited

    def refuse(self, item: Waiting, status: int, code: str, message: str, retry_after_s: float | None = None) -> None:
        if item.request >= 0:
            self.say(Refuse(item.request, status, code, message, retry_after_s))

    def refuse_all(self, entry: Entry, status: int, code: str, message: str, retry_after_s: float | None = None) -> None:
        items = entry.queue.drain()
        for item in items:
            self.leave_queue(entry, item)
            self.refuse(item, status, code, message, retry_after_s)
        if items:
            self.tell(entry, "refused", f"{len(items)} waiting refused: {message}", "warning")

    def ghost(self, entry: Entry, *, quiet: bool) -> None:
        """Want `entry` ready although no client asks: a preload, a pinned start, a restore."""
        if entry.state is State.READY or entry.queue.ghostly or entry.barred:
            return
        self.ghosts -= 1
        self.enqueue(entry, Waiting(self.ghosts, self.now, ghost=True, quiet_ghost=quiet))

    def fulfil(self, entry: Entry, done: tuple[str, ...], message: str) -> None:
        """Answer the operators' wishes named in `done`."""
        kept = []
        for wish in entry.wishes:
            if wish.operation.value in done:
                self.say(Done(wish.request, message))
            else:
                kept.append(wish)
        entry.wishes = kept

    def deny_all_but(self, entry: Entry, kept: str, status: int, code: str, message: str) -> None:
        spared = [wish for wish in entry.wishes if wish.operation.value == kept]
        entry.wishes = [wish for wish in entry.wishes if wish.operation.value != kept]
        self.deny(entry, status, code, message)
        entry.wishes = spared

    def deny(self, entry: Entry, status: int, code: str, message: str) -> None:
        for wish in entry.wishes:
            self.say(Refuse(wish.request, status, code, message))
        entry.wishes = []

    def cut(self, entry: Entry, requests: Iterable[int], code: str, why: str) -> None:
        """Tell admitted requests to end, each once."""
        for request in sorted(set(requests) - entry.instance.cut):
            entry.instance.cut.add(request)
            self.say(Cut(request, code, why))

    def cut_quiet(self, entry: Entry, why: str) -> None:
        self.cut(entry, entry.instance.quiet, "evicted", why)

    # ------------------------------------------------------------------ lanes

    def lane_open(self, device: str) -> bool:
        return not self.lanes.get(device)

    def hold_lanes(self, move: Move) -> None:
        self.moves.append(move)
        for device in move.lanes:
            self.lanes.setdefault(device, []).append(move)

    def release_lanes(self, move: Move) -> None:
        self.moves.remove(move)
        for device in move.lanes:
            self.lanes[device].remove(move)

    def move_of(self, entry: Entry) -> Move | None:
        """The move whose target or victim it is."""
        return next((move for move in self.moves if move.target is entry or entry.id in move.victims), None)

    # ------------------------------------------------------------------ needs

    def pinned_on(self, device: str, *, besides: Entry) -> int:
        """MiB of a device that will not be given back: what pinned models hold or are owed, and what will not die."""
        total = sum(
            mib for name, mib in self.book.pools[device].holders.items() if self.entries[name].unkillable and not self.entries[name].pinned
        )
        for entry in self.pinned():
            if entry is besides:
                continue
            held = self.book.of(entry.id).get(device, 0)
            is_owed = not (entry.held_off or entry.quarantined or entry.barred)
            if entry.state in HOME and is_owed and device in entry.model.devices:
                held = (entry.need_mib or 0) if len(entry.model.devices) == entry.model.devices_count else 0
            total += held
        return total

    def pinned(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.pinned] if self.pins else []

    def count_pins(self) -> None:
        self.pins = sum(entry.pinned for entry in self.entries.values())

    def need_on(self, entry: Entry, device: str) -> int:
        """MiB `entry` needs on `device` when ready; of unknown size, all that is there."""
        if entry.need_mib is None:
            return max(self._room_mib(entry, device), entry.peak_mib, UNKNOWN_MIB_MIN)
        base_mib = entry.model.base_mib
        if base_mib is None or entry.need_mib <= base_mib or self.book.pools[device].device.kind != "ram":
            return entry.need_mib
        # What an engine once took of host RAM never rules out what is declared or estimated: then it gets all there is.
        return max(base_mib, min(entry.need_mib, self._room_mib(entry, device)))

    def _room_mib(self, entry: Entry, device: str) -> int:
        return self.book.pools[device].budget_mib - self.pinned_on(device, besides=entry)

    def required(self, entry: Entry, devices: tuple[str, ...]) -> dict[str, int]:
        needs = {device: self.need_on(entry, device) for device in devices}
        if entry.model.host_mib and "ram" in self.book.pools and "ram" not in needs:
            needs["ram"] = entry.model.host_mib
        return needs

    def placements(self, entry: Entry) -> list[tuple[str, ...]]:
        """Every set of devices it could become ready on; a sleeper wakes where it sleeps."""
        if entry.state is State.ASLEEP:
            return [entry.instance.devices]
        names = [name for name in entry.model.devices if name in self.book.pools]
        count = entry.model.devices_count
        if count == 1:
            return [(name,) for name in names]
        return list(combinations(names, count))

    # ------------------------------------------------------------------ timers

    def wake_at(self, at: float, entry: Entry) -> None:
        """Look at `entry`'s ladder and back-off at `at`."""
        if at < entry.ladder_due:
            entry.ladder_due = at
            heapq.heappush(self.due, (at, entry.id))

    def decide_by(self, at: float) -> None:
        self.decide_at = min(self.decide_at, at)

    def set_timer(self) -> None:
        if not self.waiting and not self.moves:
            self.decide_at = NEVER
        at = self.decide_at
        if self.due and self.due[0][0] < at:
            at = self.due[0][0]
        if at < NEVER and (at < self.timer_at - EPSILON_S or self.timer_at <= self.now):
            self.timer_at = max(at, self.now)
            self.say(SetTimer(self.timer_at))


def conflicts_of(groups: tuple[Group, ...], models: list[str]) -> dict[str, tuple[str, ...]]:
    """Pairs of models that may not be ready together, both ways alike whatever the order they are loaded in."""
    home = {member: group for group in groups for member in group.members}
    if not home:
        return {}
    pairs: dict[str, set[str]] = {model: set() for model in models}
    for one, other in combinations(models, 2):
        if _excludes(home.get(one), home.get(other)):
            pairs[one].add(other)
            pairs[other].add(one)
    return {model: tuple(sorted(others)) for model, others in pairs.items() if others}


def _excludes(one: Group | None, other: Group | None) -> bool:
    if one is not None and one is other:
        return one.swap
    return (one is not None and one.exclusive and not (other and other.persistent)) or (
        other is not None and other.exclusive and not (one and one.persistent)
    )


def pools_for(devices: tuple[Device, ...]) -> Book:
    book = Book()
    book.replace_devices(devices)
    return book
