"""What others do, as their published rules say: the yardsticks.

Ollama's and llama.cpp's rows are rules in this world, not measurements of the programs; llama-swap's were checked
against measured runs of its release 250 on the traces and agree within 6 %.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .engine import Phase, Rules, World


def by_arrival(world: World) -> list[int]:
    """Models with waiting requests that are neither ready nor on their way, oldest request first."""
    found = [n for n, r in enumerate(world.residents) if r.queue and r.phase <= Phase.ASLEEP]
    return sorted(found, key=lambda n: world.arrived_at[world.residents[n].queue[0]] or 0.0)


def serve_ready(world: World) -> None:
    for number, resident in enumerate(world.residents):
        if resident.phase is Phase.READY and resident.queue:
            world.admit_all(number)


def least_recent(world: World, number: int, may_go: Callable[[int], bool], device: int = 0) -> tuple[int, ...] | None:
    """Least recently used victims that make room for `number`, superfluous ones left alone; None: not enough."""
    residents, models = world.residents, world.models
    free, need = world.free_mib(device), world.lacking_mib(number)
    chosen: list[int] = []
    if free >= need:
        return ()
    ready = [n for n, r in enumerate(residents) if r.phase is Phase.READY and r.device == device and n != number and may_go(n)]
    for victim in sorted(ready, key=lambda n: residents[n].last_at):
        chosen.append(victim)
        free += world.freed_mib(victim)
        if free >= need:
            break
    freed = world.freed_mib
    if free < need:  # residues of sleepers, the victims' own included, can go too
        free += sum(
            models[n].residue_mib for n, r in enumerate(residents) if r.phase is Phase.ASLEEP and r.device == device and n != number
        )
        free += sum(models[n].need_mib - world.freed_mib(n) for n in chosen)
        if free < need:
            return None
        freed = lambda n: models[n].need_mib  # noqa: E731
    for victim in list(chosen):
        if free - freed(victim) >= need:
            chosen.remove(victim)
            free -= freed(victim)
    return tuple(chosen)


def best_device(world: World, number: int, may_go: Callable[[int], bool]) -> tuple[int, tuple[int, ...]] | None:
    """The device where the fewest have to go."""
    found = [(d, v) for d in range(len(world.load.capacities_mib)) if (v := least_recent(world, number, may_go, d)) is not None]
    return min(found, key=lambda item: len(item[1])) if found else None


POLL_FIRST_S = 0.25
POLL_EVERY_S = 1.0


class LlamaSwap(Rules):
    """Ready serves at once; victims only when idle; readiness is polled 0.25 s after the start, then each second.

    By default one model at a time; `perfect_sets`: as if somebody had written the exact co-residency matrix by hand.
    """

    def __init__(self, *, perfect_sets: bool = False, polls: bool = True, starts_at_once: int = 99) -> None:
        self.perfect_sets, self.polls, self.starts_at_once = perfect_sets, polls, starts_at_once
        self.name = "llama-swap, perfect sets" if perfect_sets else "llama-swap"
        if not polls:
            self.name += ", no polling loss"

    def seen_after_s(self, up_s: float) -> float:
        if not self.polls:
            return up_s + self.ready_lag_s
        return POLL_FIRST_S + max(0, math.ceil((up_s - POLL_FIRST_S) / POLL_EVERY_S - 1e-9)) * POLL_EVERY_S + 0.005

    def settle(self, world: World) -> None:
        serve_ready(world)
        for number in by_arrival(world):
            if world.rising >= self.starts_at_once:
                return
            if self.perfect_sets:
                place = best_device(world, number, lambda n: world.residents[n].idle)
                if place is not None:
                    world.swap(number, place[1], place[0])
                continue
            ready = tuple(n for n, r in enumerate(world.residents) if r.phase is Phase.READY)
            if world.rising:
                return
            if all(world.residents[n].idle for n in ready):
                world.swap(number, ready)


@dataclass(slots=True)
class OllamaMemo:
    queue: deque[int] = field(default_factory=deque)
    victim: int | None = None


class Ollama(Rules):
    """One pending request is worked on at a time; loaded models bypass it; the victim (idle first, then by name) goes when idle."""

    name = "Ollama"
    ready_lag_s = 0.10
    exec_s = 0.25  # it waits for the memory figure to settle before it starts

    def fresh(self, world: World) -> OllamaMemo:
        return OllamaMemo()

    def copy(self, memo: Any) -> Any:
        return OllamaMemo(memo.queue.copy(), memo.victim)

    def arrived(self, world: World, model: int, request: int) -> None:
        world.memo.queue.append(request)

    def settle(self, world: World) -> None:
        memo, residents = world.memo, world.residents
        serve_ready(world)
        while memo.queue:
            request = memo.queue[0]
            number = world.load.requests[request].model
            if world.begun_at[request] is not None or residents[number].phase >= Phase.LEAVING:
                memo.queue.popleft()
                continue
            if world.free_mib() >= world.lacking_mib(number):
                world.swap(number, ())
                continue
            if memo.victim is None or residents[memo.victim].phase is not Phase.READY:
                ready = [n for n, r in enumerate(residents) if r.phase is Phase.READY]
                if not ready:
                    return
                memo.victim = min(ready, key=lambda n: (residents[n].running > 0, world.models[n].name))
            victim = memo.victim
            if not residents[victim].idle:
                return
            memo.victim = None
            if world.free_mib() + world.freed_mib(victim) >= world.lacking_mib(number):
                world.swap(number, (victim,))
            else:
                self._expire(world, number, victim)

    @staticmethod
    def _expire(world: World, number: int, victim: int) -> None:
        resident = world.residents[victim]
        resident.phase = Phase.COLD if world.models[victim].sleep_s is None else Phase.ASLEEP
        resident.left_at = world.now
        nobody_left = not any(r.phase >= Phase.LEAVING for r in world.residents)
        if nobody_left and world.free_mib() < world.lacking_mib(number):
            for other in world.residents:
                if other.phase is Phase.ASLEEP:
                    other.phase = Phase.COLD


class LlamaCppRouter(Rules):
    """At most `children` models; the least recently used one goes, busy or not: what it was answering fails."""

    ready_lag_s = 0.0

    def __init__(self, children: int = 1) -> None:
        self.children = children
        self.name = f"llama.cpp router, {children} at most"

    def settle(self, world: World) -> None:
        serve_ready(world)
        for number in by_arrival(world):
            up = [n for n, r in enumerate(world.residents) if r.phase >= Phase.LEAVING]
            victims: tuple[int, ...] = ()
            if len(up) >= self.children:
                ready = [n for n in up if world.residents[n].phase is Phase.READY]
                if not ready:
                    return
                victims = (min(ready, key=lambda n: world.residents[n].last_at),)
                world.cut_running(victims[0])
            if world.free_mib() + sum(world.freed_mib(v) for v in victims) < world.lacking_mib(number):
                return
            world.swap(number, victims)
