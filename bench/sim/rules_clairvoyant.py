"""A strong schedule that knows the future: every choice is played forward and the one with the least waiting is taken.

The base policy plays on after each choice.  It is a feasible schedule, so a yardstick and not a proven lower bound:
with a finite horizon it can even lose to the rules on closed loops.
"""

from __future__ import annotations

from typing import Any

from .engine import Phase, Rules, World
from .rules_base import BaseRules

Choice = tuple[int, tuple[int, ...]] | None


class Clairvoyant(Rules):
    name = "clairvoyant roll-out"

    def __init__(self, *, horizon_s: float = 1e9, look_share: float = 0.05, ahead: bool = True) -> None:
        self.base = BaseRules()
        self.horizon_s, self.look_share, self.ahead = horizon_s, look_share, ahead

    def fresh(self, world: World) -> Any:
        return self.base.fresh(world)

    def copy(self, memo: Any) -> Any:
        return self.base.copy(memo)

    def arrived(self, world: World, model: int, request: int) -> None:
        self.base.arrived(world, model, request)

    def risen(self, world: World, model: int, took_s: float) -> None:
        self.base.risen(world, model, took_s)

    def settle(self, world: World) -> None:
        if not self.base.serve(world):
            return
        choices = self._choices(world)
        if len(choices) == 1:
            return
        look_again_s = self.look_share * min(m.up_s for m in world.models)
        best: tuple[float, Choice] | None = None
        for choice in choices:
            waited_s = self._play(world, choice, look_again_s)
            if best is None or waited_s < best[0] - 1e-9:
                best = (waited_s, choice)
        assert best is not None
        if best[1] is None:
            world.tick(world.now + look_again_s)
        else:
            self.base.close(world, *best[1])

    def _choices(self, world: World) -> list[Choice]:
        waiting = [n for n, r in enumerate(world.residents) if r.queue and r.phase <= Phase.ASLEEP]
        if self.ahead:
            waiting += [n for n in self._about_to_be_asked(world) if n not in waiting]
        choices: list[Choice] = [None]
        for model in waiting:
            idle = self.base.victims(world, model, lambda n: world.residents[n].idle)
            anyone = self.base.victims(world, model, lambda n: True)
            choices.extend((model, victims) for victims in {idle, anyone} if victims is not None)
        return choices

    @staticmethod
    def _about_to_be_asked(world: World) -> list[int]:
        """Models whose next open-loop request comes before a start made now would end."""
        found: list[int] = []
        position, first = world.next_first, world.load.first
        furthest = world.now + 1.3 * max(m.up_s for m in world.models)
        while position < len(first) and first[position][0] < furthest:
            at, request = first[position]
            model = world.load.requests[request].model
            soon = at < world.now + 1.3 * world.models[model].up_s
            if soon and model not in found and world.residents[model].phase <= Phase.ASLEEP:
                found.append(model)
            position += 1
        return found

    def _play(self, world: World, choice: Choice, look_again_s: float) -> float:
        future = world.clone(self.base)
        if choice is None:
            future.tick(future.now + look_again_s)
        else:
            self.base.close(future, *choice)
            self.base.settle(future)
        return future.run(world.now + self.horizon_s).waited_s - world.waited_s
