"""The world: devices, instances, requests and the clock.  Rules decide; the world makes it take time.

An engine serves up to `slots` requests at once, each in its own fixed time.  Memory is booked when a move begins and a
booking above a device's capacity is an assertion failure: rules that overbook are wrong, not slow.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any

from .loads import Load

NEVER = float("inf")
LEAST_UP_S = 0.01
AT_ONCE_MAX = 100_000  # events at one instant; more means that the rules spin
EXEC_S = 0.005  # from the decision to the engine's exec


class Phase(IntEnum):
    COLD = 0
    ASLEEP = 1
    LEAVING = 2
    RISING = 3
    READY = 4


class Kind(IntEnum):
    ARRIVE = 0
    FINISH = 1
    RISEN = 2
    LEFT = 3
    TICK = 4


@lru_cache(maxsize=200_000)
def jitter(seed: int, model: str, start: int) -> float:
    """In [-1, 1]; the same start of the same model is equally slow under every policy."""
    return random.Random(f"{seed} {model} {start}").uniform(-1.0, 1.0)


class Resident:
    """Run-time state of one model (one instance each)."""

    __slots__ = (
        "device",
        "from_sleep",
        "gated",
        "idle_at",
        "last_at",
        "left_at",
        "level",
        "moves",
        "phase",
        "queue",
        "ready_at",
        "running",
        "starts",
        "to_sleep",
    )

    def __init__(self) -> None:
        self.phase = Phase.COLD
        self.queue: deque[int] = deque()
        self.running = 0
        self.gated = False
        self.device = 0
        self.starts = 0
        self.ready_at = 0.0
        self.idle_at = -NEVER
        self.last_at = -NEVER
        self.left_at = -NEVER  # when it last stopped being ready
        self.to_sleep = False
        self.level = 1  # asleep, or on its way there
        self.from_sleep = False  # leaving: out of sleep, so it holds no more than its residue
        self.moves = 0  # the end of an abandoned move is told by its number

    def copy(self) -> Resident:
        other = Resident.__new__(Resident)
        for name in Resident.__slots__:
            setattr(other, name, getattr(self, name))
        other.queue = self.queue.copy()
        return other

    @property
    def idle(self) -> bool:
        return self.running == 0 and not self.queue


class Rules:
    """A policy.  `fresh` makes its private state, kept in `world.memo` so that a world can be copied and rolled out."""

    name = "?"
    ready_lag_s = 0.02  # how late readiness is seen
    exec_s = EXEC_S

    def fresh(self, world: World) -> Any:
        return None

    def copy(self, memo: Any) -> Any:
        return memo

    def seen_after_s(self, up_s: float) -> float:
        return up_s + self.ready_lag_s

    def arrived(self, world: World, model: int, request: int) -> None:
        """A request joined its model's queue."""

    def finished(self, world: World, model: int, request: int) -> None:
        """A running request ended."""

    def risen(self, world: World, model: int, took_s: float) -> None:
        """The model became ready."""

    def left(self, world: World, model: int) -> None:
        """The model's `leave` ended."""

    def ticked(self, world: World) -> None:
        """The timer fired."""

    def settle(self, world: World) -> None:
        """Called after every event."""
        raise NotImplementedError


@dataclass(slots=True)
class Result:
    """What one run did.  Waits are latency minus service; a request never served counts with its age at the end."""

    waits_s: list[float]
    latencies_s: list[float]
    chains_s: list[float]
    waits_by_model_s: dict[str, list[float]]
    done: int
    unserved: int
    cut: int
    refused: int
    switches: int
    makespan_s: float
    swap_share: float
    log: list[tuple[float, str, str]] = field(default_factory=list)


class World:
    def __init__(self, load: Load, rules: Rules, *, seed: int = 0, contend: float = 0.0) -> None:
        self.load, self.rules, self.seed, self.contend = load, rules, seed, contend
        self.models = load.models
        self.residents = [Resident() for _ in self.models]
        self.now = 0.0
        self.heap: list[tuple[float, int, int, int, Any]] = []
        self.sequence = 0
        self.rising = 0
        self.next_first = 0
        count = len(load.requests)
        self.arrived_at: list[float | None] = [None] * count
        self.begun_at: list[float | None] = [None] * count
        self.ended_at: list[float | None] = [None] * count
        self.cut = self.refused = self.switches = self.waiting = self.open = 0
        self.waited_s = 0.0  # integral of the number of waiting requests
        self.moving_s = 0.0
        self.tick_at = NEVER
        self.log: list[tuple[float, str, str]] | None = None
        self.at_once = 0
        self.memo = rules.fresh(self)

    def clone(self, rules: Rules) -> World:
        """A copy that goes its own way under `rules` (same kind of memo)."""
        other = World.__new__(World)
        other.__dict__.update(self.__dict__)
        other.rules, other.log = rules, None
        other.residents = [r.copy() for r in self.residents]
        other.heap = self.heap[:]
        other.arrived_at, other.begun_at, other.ended_at = self.arrived_at[:], self.begun_at[:], self.ended_at[:]
        other.memo = rules.copy(self.memo)
        return other

    # ------------------------------------------------------------------------------------------------------- the book

    def booked_mib(self, device: int) -> int:
        total = 0
        for model, resident in zip(self.models, self.residents, strict=True):
            if resident.device == device:
                if resident.phase >= Phase.LEAVING and not resident.from_sleep:
                    total += model.need_mib
                elif resident.phase is not Phase.COLD:
                    total += model.tier(resident.level).residue_mib
        return total

    def copies_mib(self) -> int:
        """Host RAM that sleepers hold, and those that go to sleep or wake."""
        total = 0
        for model, resident in zip(self.models, self.residents, strict=True):
            if resident.phase is Phase.ASLEEP or (resident.phase in (Phase.LEAVING, Phase.RISING) and resident.to_sleep):
                total += model.tier(resident.level).host_mib
        return total

    def free_mib(self, device: int = 0) -> int:
        return self.load.capacities_mib[device] - self.booked_mib(device)

    def lacking_mib(self, number: int) -> int:
        """What it needs on top of what it holds."""
        model = self.models[number]
        return model.need_mib - (model.residue_mib if self.residents[number].phase is Phase.ASLEEP else 0)

    def freed_mib(self, n: int) -> int:
        model = self.models[n]
        return model.need_mib - (model.residue_mib if model.sleep_s is not None else 0)

    def down_s(self, number: int) -> float:
        model = self.models[number]
        return model.down_s if model.sleep_s is None else model.sleep_s

    def up_s(self, number: int) -> float:
        """How long the next rise really takes, before contention."""
        model, resident = self.models[number], self.residents[number]
        base = model.tier(resident.level).wake_s if resident.phase is Phase.ASLEEP else model.up_s
        return max(LEAST_UP_S, base + model.jitter_s * (base / model.up_s) * jitter(self.seed, model.name, resident.starts))

    # ---------------------------------------------------------------------------------------------------------- moves

    def push(self, at: float, kind: Kind, number: int = 0, payload: Any = None) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, (at, self.sequence, int(kind), number, payload))

    def tick(self, at: float) -> None:
        """Call settle at `at` at the latest."""
        if at < self.tick_at and at < NEVER:
            self.tick_at = at
            self.push(max(at, self.now), Kind.TICK)

    def set_timer(self, at: float) -> None:
        """Replaces the earlier timer."""
        self.tick_at = at
        self.push(max(at, self.now), Kind.TICK)

    def admit(self, number: int, request: int) -> None:
        resident = self.residents[number]
        assert resident.phase is Phase.READY, f"{self.models[number].name} is not ready"
        assert resident.running < self.models[number].slots
        resident.queue.remove(request) if resident.queue[0] != request else resident.queue.popleft()
        resident.running += 1
        resident.last_at = self.now
        self.waiting -= 1
        self.begun_at[request] = self.now
        self.push(self.now + self.load.requests[request].service_s, Kind.FINISH, number, request)

    def admit_all(self, number: int) -> None:
        resident = self.residents[number]
        while resident.queue and resident.running < self.models[number].slots:
            self.admit(number, resident.queue[0])

    def refuse(self, request: int) -> None:
        number = self.load.requests[request].model
        self.residents[number].queue.remove(request)
        self.waiting -= 1
        self.refused += 1
        self._end(request)

    def leave(self, number: int, *, to_sleep: bool, level: int = 1) -> None:
        """Begin to stop or sleep; `Rules.left` tells when the memory is back."""
        resident, model = self.residents[number], self.models[number]
        assert resident.running == 0, f"{model.name} has requests in flight"
        took_s = model.tier(level).sleep_s if to_sleep else model.down_s
        resident.from_sleep = resident.phase is Phase.ASLEEP
        resident.to_sleep, resident.level = to_sleep, level if to_sleep else resident.level
        resident.moves += 1
        if resident.phase is Phase.READY:
            resident.left_at = self.now
        elif resident.phase is Phase.RISING:
            self.rising -= 1  # the load is abandoned
        resident.phase = Phase.LEAVING
        copies_mib = self.copies_mib()
        assert self.load.ram_mib is None or copies_mib <= self.load.ram_mib, f"{copies_mib} MiB of copies in host RAM"
        self.moving_s += took_s
        self._note("sleep" if to_sleep else "stop", number)
        self.push(self.now + took_s, Kind.LEFT, number, (resident.moves, took_s))

    def rise(self, number: int, device: int = 0, *, after_s: float = 0.0) -> None:
        """Begin to start or wake."""
        resident = self.residents[number]
        assert resident.phase <= Phase.ASLEEP, f"{self.models[number].name} starts twice"
        up_s = self.up_s(number)
        if resident.phase is Phase.COLD:
            up_s *= 1 + self.contend * self.rising  # cold starts beside one another share disk and bus
        resident.to_sleep = resident.phase is Phase.ASLEEP  # its copy stays until it is awake
        resident.phase, resident.device, resident.from_sleep = Phase.RISING, device, False
        resident.starts += 1
        resident.moves += 1
        self.rising += 1
        self.switches += 1
        seen_s = self.rules.seen_after_s(up_s)
        self.moving_s += seen_s
        self._note("rise", number)
        free = self.free_mib(device)
        assert free >= 0, f"device {device} is overbooked by {-free} MiB"
        self.push(self.now + after_s + self.rules.exec_s + seen_s, Kind.RISEN, number, (resident.moves, seen_s))

    def swap(self, number: int, victims: tuple[int, ...], device: int = 0, *, drop_order: Any = None) -> None:
        """Victims go one after the other, then `number` rises, as one move.

        Sleepers' residues that still stand in the way are dropped, by `drop_order` (least recently used by default).
        """
        down_s = 0.0
        for victim in victims:
            resident, model = self.residents[victim], self.models[victim]
            assert resident.phase is Phase.READY, "a victim is not ready"
            assert resident.running == 0, "a victim has requests in flight"
            down_s += self.down_s(victim)
            resident.phase = Phase.COLD if model.sleep_s is None else Phase.ASLEEP
            resident.gated = False
            resident.left_at = self.now
            self._note("leave", victim)
        short = self.lacking_mib(number) - self.free_mib(device)
        if short > 0:
            sleepers = [n for n, r in enumerate(self.residents) if r.phase is Phase.ASLEEP and r.device == device and n != number]
            for sleeper in sorted(sleepers, key=drop_order or (lambda n: self.residents[n].last_at)):
                if short <= 0:
                    break
                short -= self.models[sleeper].residue_mib
                self.residents[sleeper].phase = Phase.COLD
        self.moving_s += down_s
        self.rise(number, device, after_s=down_s)

    def cut_running(self, number: int) -> None:
        """End every request in flight of a model at once, with an error."""
        for _, _, kind, model, request in list(self.heap):
            if kind == Kind.FINISH and model == number and self.ended_at[request] is None:
                self.cut += 1
                self._finish(number, request)

    # ------------------------------------------------------------------------------------------------------- the loop

    def run(self, stop_s: float = NEVER) -> World:
        first, heap, rules = self.load.first, self.heap, self.rules
        while True:
            next_at = first[self.next_first][0] if self.next_first < len(first) else NEVER
            if heap and heap[0][0] <= next_at:
                at, _, kind, number, payload = heapq.heappop(heap)
            elif next_at < NEVER:
                at, kind, number, payload = next_at, int(Kind.ARRIVE), first[self.next_first][1], None
                self.next_first += 1
            else:
                return self
            if at > stop_s:
                self.waited_s += self.waiting * (stop_s - self.now)
                self.now = stop_s
                return self
            if kind == Kind.TICK and at < self.tick_at:
                continue  # replaced by a later one
            if kind == Kind.TICK and not self.open and next_at == NEVER and all(e[2] == Kind.TICK for e in heap):
                return self  # only timers are left
            self.at_once = self.at_once + 1 if at == self.now else 0
            assert self.at_once < AT_ONCE_MAX, f"the rules do not let time pass at {at}"
            self.waited_s += self.waiting * (at - self.now)
            self.now = at
            self._happen(kind, number, payload)
            rules.settle(self)

    def _happen(self, kind: int, number: int, payload: Any) -> None:
        rules = self.rules
        if kind == Kind.ARRIVE:
            if self.now <= self.load.until_s:
                model = self.load.requests[number].model
                self.arrived_at[number] = self.now
                self.waiting += 1
                self.open += 1
                self.residents[model].queue.append(number)
                rules.arrived(self, model, number)
        elif kind == Kind.FINISH:
            if self.ended_at[payload] is None:
                self._finish(number, payload)
                rules.finished(self, number, payload)
        elif kind in (Kind.RISEN, Kind.LEFT) and payload[0] != self.residents[number].moves:
            return
        elif kind == Kind.RISEN:
            resident = self.residents[number]
            resident.phase = Phase.READY
            resident.ready_at = resident.idle_at = resident.last_at = self.now
            self.rising -= 1
            rules.risen(self, number, payload[1])
        elif kind == Kind.LEFT:
            resident = self.residents[number]
            resident.phase = Phase.ASLEEP if resident.to_sleep else Phase.COLD
            rules.left(self, number)
        else:
            self.tick_at = NEVER
            rules.ticked(self)

    def _finish(self, number: int, request: int) -> None:
        resident = self.residents[number]
        resident.running -= 1
        resident.last_at = self.now
        if resident.running == 0:
            resident.idle_at = self.now
        self._end(request)

    def _end(self, request: int) -> None:
        self.ended_at[request] = self.now
        self.open -= 1
        following = self.load.following[request]
        if following >= 0:
            after = self.load.requests[following]
            self.push(max(after.not_before_s, self.now + after.think_s), Kind.ARRIVE, following)

    def _note(self, what: str, number: int) -> None:
        if self.log is not None:
            self.log.append((self.now, what, self.models[number].name))

    # --------------------------------------------------------------------------------------------------------- report

    def result(self) -> Result:
        waits, latencies, by_model, done, unserved = [], [], {m.name: [] for m in self.models}, 0, 0  # type: ignore[var-annotated]
        for number, request in enumerate(self.load.requests):
            arrived, ended = self.arrived_at[number], self.ended_at[number]
            if arrived is None:
                continue
            if ended is None:
                unserved += 1
                wait = self.now - arrived
            else:
                done += 1
                latencies.append(ended - arrived)
                begun = self.begun_at[number]
                wait = (begun if begun is not None else ended) - arrived
            waits.append(wait)
            by_model[self.models[request.model].name].append(wait)
        chains = []
        for chain in self.load.chains:
            begin, end = self.arrived_at[chain[0]], self.ended_at[chain[-1]]
            if len(chain) > 1 and begin is not None and end is not None:
                chains.append(end - begin)
        makespan = max((e for e in self.ended_at if e is not None), default=0.0)
        share = self.moving_s / makespan if makespan else 0.0
        return Result(
            waits, latencies, chains, by_model, done, unserved, self.cut, self.refused, self.switches, makespan, share, self.log or []
        )
