"""greenroom's rules once more, small and copyable: the base policy of the clairvoyant's roll-out, and nothing else.

A roll-out plays thousands of futures, which the real scheduler (not made to be copied) is too dear for.  One device,
one lane, one instance a model.  Figures for greenroom itself always come from the real scheduler (rules_greenroom.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from .engine import NEVER, Phase, Rules, World

TINY_S = 1e-9
STEP_S = 1e-6


@dataclass(frozen=True, slots=True)
class Constants:
    quantum_factor: float = 2.0
    patience_s: float = 5.0
    late_min_s: float = 10.0
    late_factor: float = 4.0
    hold_cap: float = 0.25
    hold_floor_s: float = 0.1
    hold_floor_share: float = 0.025
    hold_prior_s: float = 0.1
    hold_gain: float = 0.5
    hold_slack_s: float = 0.02
    gaps_kept: int = 16
    half_life_s: float = 600.0
    cost_ewma: float = 0.3
    exact_victims_max: int = 10
    gate: bool = True  # False only to prove that the bounds' tests can fail
    claim: bool = True
    by_request_age: bool = False


@dataclass(frozen=True, slots=True)
class Learned:
    """What is known of one model; replaced, never changed, so that a copy is free."""

    hits: float = 0.0
    hits_at: float = 0.0
    worth: float = 0.0
    gaps: tuple[float, ...] = ()
    up_s: float | None = None


@dataclass(slots=True)
class Memo:
    learned: list[Learned]
    clock: float = 0.0  # the largest worth ever evicted (Greedy-Dual)
    target: int | None = None  # the model a closed gate is for
    victims: tuple[int, ...] = field(default_factory=tuple)


class BaseRules(Rules):
    name = "base of the roll-out"

    def __init__(self, constants: Constants | None = None) -> None:
        self.constants = constants or Constants()

    def fresh(self, world: World) -> Memo:
        return Memo([Learned() for _ in world.models])

    def copy(self, memo: Any) -> Any:
        return replace(memo, learned=memo.learned[:])

    # ------------------------------------------------------------------------------------------------------- learning

    def arrived(self, world: World, model: int, request: int) -> None:
        c, now, memo, resident = self.constants, world.now, world.memo, world.residents[model]
        known: Learned = memo.learned[model]
        hits = known.hits * 0.5 ** ((now - known.hits_at) / c.half_life_s) + 1
        gaps = known.gaps
        if resident.running == 0 and len(resident.queue) == 1 and resident.starts and resident.phase is not Phase.RISING:
            gaps = (*gaps, now - max(resident.idle_at, 0.0))[-c.gaps_kept :]
        memo.learned[model] = replace(known, hits=hits, hits_at=now, gaps=gaps)
        if resident.phase is Phase.READY:
            self._touch(world, model)

    def risen(self, world: World, model: int, took_s: float) -> None:
        memo, known, c = world.memo, world.memo.learned[model], self.constants
        if world.models[model].sleep_s is None or world.residents[model].starts == 1:
            up_s = took_s if known.up_s is None else (1 - c.cost_ewma) * known.up_s + c.cost_ewma * took_s
            memo.learned[model] = replace(known, up_s=up_s)
        self._touch(world, model)

    def _touch(self, world: World, model: int) -> None:
        known: Learned = world.memo.learned[model]
        lost_s = world.down_s(model) + self.back_s(world, model)
        worth = world.memo.clock + known.hits * lost_s / max(1, world.freed_mib(model))
        world.memo.learned[model] = replace(known, worth=worth)

    def cold_s(self, world: World, model: int) -> float:
        learned: float | None = world.memo.learned[model].up_s
        return world.models[model].up_s if learned is None else learned

    def back_s(self, world: World, model: int) -> float:
        """To be ready again after leaving now."""
        return world.models[model].wake_s if world.models[model].sleep_s is not None else self.cold_s(world, model)

    def up_s(self, world: World, model: int) -> float:
        return world.models[model].wake_s if world.residents[model].phase is Phase.ASLEEP else self.cold_s(world, model)

    def price_s(self, world: World, model: int, victims: Iterable[int]) -> float:
        return self.up_s(world, model) + sum(world.down_s(v) + self.back_s(world, v) for v in victims)

    # -------------------------------------------------------------------------------------------------------- victims

    def residue_worth(self, world: World, sleeper: int) -> float:
        known: Learned = world.memo.learned[sleeper]
        hits: float = known.hits * 0.5 ** ((world.now - known.hits_at) / self.constants.half_life_s)
        lost_s = max(0.01, self.cold_s(world, sleeper) - world.models[sleeper].wake_s)
        clock: float = world.memo.clock
        return clock + hits * lost_s / max(1, world.models[sleeper].residue_mib)

    def victims(self, world: World, model: int, allowed: Callable[[int], bool]) -> tuple[int, ...] | None:
        """The set of ready models with the least worth that makes room; (): none needed; None: cannot be."""
        need, free = world.lacking_mib(model), world.free_mib()
        if free >= need:
            return ()
        residents, models, learned = world.residents, world.models, world.memo.learned
        candidates = [n for n, r in enumerate(residents) if r.phase is Phase.READY and n != model and allowed(n)]
        asleep_all = free + sum(world.freed_mib(n) for n, r in enumerate(residents) if r.phase >= Phase.LEAVING and n != model)
        drop = asleep_all < need  # residues go only when sleeping everybody else would not do
        spare: list[tuple[float, int]] = []
        if drop:
            sleepers = [n for n, r in enumerate(residents) if r.phase is Phase.ASLEEP and n != model]
            spare = sorted((self.residue_worth(world, n), models[n].residue_mib) for n in sleepers)
        if free + sum(mib for _, mib in spare) + sum(models[n].need_mib for n in candidates) < need:
            return None
        candidates.sort(key=lambda n: learned[n].worth)
        best: tuple[float, tuple[int, ...]] | None = None
        for chosen in self._subsets(candidates):
            freed = free + sum(world.freed_mib(n) for n in chosen)
            worth = sum(learned[n].worth for n in chosen)
            if best is not None and worth >= best[0]:
                continue
            for lost, mib in spare:
                if freed >= need:
                    break
                freed, worth = freed + mib, worth + lost
            if freed < need and drop:
                freed += sum(models[n].need_mib - world.freed_mib(n) for n in chosen)
                worth *= 2
            if freed >= need and (best is None or worth < best[0]):
                best = (worth, chosen)
        return None if best is None else best[1]

    def _subsets(self, candidates: list[int]) -> Iterable[tuple[int, ...]]:
        if len(candidates) > self.constants.exact_victims_max:
            return (tuple(candidates[:size]) for size in range(len(candidates) + 1))
        return (chosen for size in range(len(candidates) + 1) for chosen in combinations(candidates, size))

    # ----------------------------------------------------------------------------------------------------------- when

    def keep_s(self, world: World, victim: int, price_s: float, waiting: int) -> float:
        """How long an idle resident is kept although somebody waits: the wait that gains most, in expectation."""
        c, gaps = self.constants, world.memo.learned[victim].gaps
        floor = min(c.hold_floor_s, c.hold_floor_share * price_s) / max(1, waiting)
        cap = c.hold_cap * price_s
        if not gaps:
            return max(floor, min(c.hold_prior_s, cap))
        best, keep, total, count = 0.0, 0.0, 0.0, len(gaps)
        for seen, gap in enumerate(sorted(gaps), start=1):
            total += gap
            wait = gap + c.hold_slack_s
            if wait > cap:
                break
            value = seen / count * c.hold_gain * price_s - waiting * (total + (count - seen) * wait) / count
            if value > best:
                best, keep = value, wait
        return max(floor, keep)

    def since(self, world: World, model: int) -> float:
        resident = world.residents[model]
        arrived = world.arrived_at[resident.queue[0]] or 0.0
        return arrived if self.constants.by_request_age else max(arrived, resident.left_at)

    def late_s(self, world: World, model: int) -> float:
        c = self.constants
        dearest = max(
            (world.down_s(n) + self.back_s(world, n) for n, r in enumerate(world.residents) if r.phase is Phase.READY), default=0.0
        )
        return max(c.late_min_s, c.late_factor * (self.up_s(world, model) + dearest))

    def ordered(self, world: World) -> list[int]:
        waiting = [n for n, r in enumerate(world.residents) if r.queue and r.phase <= Phase.ASLEEP]
        keys: dict[int, tuple[int, float]] = {}
        for model in waiting:
            since = self.since(world, model)
            if world.now - since > self.late_s(world, model):
                keys[model] = (0, since)
                continue
            up_s, queue = self.up_s(world, model), world.residents[model].queue
            victims = self.victims(world, model, lambda n: True) or ()
            age_s = sum(world.now - (world.arrived_at[q] or 0.0) + up_s for q in queue)
            keys[model] = (1, -age_s / (up_s + sum(world.down_s(v) for v in victims) + 0.05))
        return sorted(waiting, key=lambda n: keys[n])

    def settle(self, world: World) -> None:
        if not self.serve(world):
            return
        wake, claim_opens, spare = NEVER, None, 0
        order = self.ordered(world)
        for model in order:
            if claim_opens is not None:
                fits = world.lacking_mib(model) <= min(spare, world.free_mib())
                if fits and world.now + self.up_s(world, model) <= claim_opens:
                    self.go(world, model, ())
                    return
                continue
            decision = self._consider(world, model)
            if decision is None:
                continue
            if decision <= world.now:
                return
            wake = min(wake, decision)
            late = world.now - self.since(world, model) > self.late_s(world, model)
            if self.constants.claim and late:
                claim_opens = decision
                going = self.victims(world, model, self._idle(world)) or self.victims(world, model, lambda n: True) or ()
                spare = world.free_mib() + sum(world.freed_mib(v) for v in going) - world.lacking_mib(model)
        for model in order:
            becomes_late = self.since(world, model) + self.late_s(world, model)
            if becomes_late >= world.now:
                wake = min(wake, becomes_late)
        world.tick(max(wake, world.now + STEP_S))

    def serve(self, world: World) -> bool:
        """Admit what can be admitted and finish a closed gate; True: the lane is free for a decision."""
        for number, resident in enumerate(world.residents):
            if resident.phase is Phase.READY and resident.queue and not resident.gated:
                world.admit_all(number)
        if world.rising:
            return False
        memo = world.memo
        if memo.target is not None:
            if not any(world.residents[v].running for v in memo.victims):
                self.go(world, memo.target, memo.victims)
            return False
        return True

    @staticmethod
    def _idle(world: World) -> Callable[[int], bool]:
        return lambda n: world.residents[n].idle

    def _consider(self, world: World, model: int) -> float | None:
        """Swap, or close the gate, or the time to look again (`now` when it acted); None: nothing can be done."""
        now, c = world.now, self.constants
        idle = self._idle(world)
        victims = self.victims(world, model, idle)
        through = victims if victims is not None else self.victims(world, model, lambda n: True)
        if through is None:
            return None
        price_s = self.price_s(world, model, through)
        kept_until = now
        if victims is not None:
            waiting = len(world.residents[model].queue)
            for v in victims:
                kept_until = max(kept_until, world.residents[v].idle_at + self.keep_s(world, v, price_s, waiting))
            if kept_until <= now + TINY_S:
                self.go(world, model, victims)
                return now
        owed_until = self.since(world, model) + c.patience_s
        for v in through:
            if victims is not None or not idle(v):
                owed_until = max(owed_until, world.residents[v].ready_at + c.quantum_factor * self.price_s(world, model, (v,)))
        if c.gate and owed_until <= now + TINY_S:
            self.close(world, model, through)
            return now
        opens = owed_until if c.gate else NEVER
        return min(opens, kept_until) if victims is not None else opens

    def close(self, world: World, model: int, victims: tuple[int, ...]) -> None:
        """New requests of the victims queue; the swap follows when the running ones have ended."""
        for v in victims:
            world.residents[v].gated = True
        if any(world.residents[v].running for v in victims):
            world.memo.target, world.memo.victims = model, victims
        else:
            self.go(world, model, victims)

    def go(self, world: World, model: int, victims: tuple[int, ...]) -> None:
        memo = world.memo
        if victims:
            memo.clock = max(memo.clock, *(memo.learned[v].worth for v in victims))
        memo.target, memo.victims = None, ()
        for resident in world.residents:
            resident.gated = False
        world.swap(model, victims, drop_order=lambda n: self.residue_worth(world, n))
