"""What one decision costs: the real scheduler with 1,000 models and 10,000 queued requests.

python -m bench.decision_cost            prints medians
python -m bench.decision_cost --check    exit 1 when a decision takes more than 0.2 ms or an arrival more than 20 µs
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, cycle

from greenroom.core.facts import (
    Action,
    Admit,
    Device,
    Event,
    InstanceReported,
    Model,
    Policy,
    RequestArrived,
    RequestFinished,
    Setup,
    Start,
    State,
    Stop,
    Ticked,
)
from greenroom.core.scheduler import Scheduler

DECISION_S_MAX = 0.2e-3
ARRIVAL_S_MAX = 20e-6
MODEL_MIB = 8192
# models, resident, queued, devices
CROWDS = ((10, 3, 100, 1), (100, 10, 1000, 1), (1000, 20, 10_000, 1), (1000, 100, 10_000, 1), (1000, 100, 10_000, 8))
IN_FLIGHT = 4  # on each resident, so that one that ends leaves it busy


class Crowd:
    """A scheduler with `resident` busy models and `queued` requests that wait for all the others."""

    def __init__(self, models: int, resident: int, queued: int, *, devices: int = 1) -> None:
        per_device = resident // devices
        pools = tuple(Device(f"gpu{n}", "declared", per_device * MODEL_MIB, measured=False) for n in range(devices))
        names = tuple(d.id for d in pools)
        rng = random.Random(1)
        made = tuple(
            Model(
                f"m{n}",
                names,
                need_mib=MODEL_MIB,
                need_source="declared",
                parallel=2 * IN_FLIGHT,
                up_s=rng.uniform(2, 60),
                queue_limit=queued,
                digest=f"m{n}",
            )
            for n in range(models)
        )
        self.scheduler = Scheduler(Setup(pools, made, policy=Policy(queue_limit=10 * queued)), at=0.0)
        self.now = 0.0
        self.ids = count(1)
        self.running: dict[str, list[int]] = {m.id: [] for m in made}
        self.names = [m.id for m in made]
        self.resident = self.names[: per_device * devices]
        self.spent_s: dict[str, list[float]] = {}
        self._fill(queued)

    def _fill(self, queued: int) -> None:
        for name in self.resident:
            for _ in range(IN_FLIGHT):
                self.play(RequestArrived(self.now, next(self.ids), name))
        rng = random.Random(2)
        others = self.names[len(self.resident) :]
        for _ in range(queued):
            self.send("arrival, queued", RequestArrived(self.now, next(self.ids), rng.choice(others)))
            self.now += 1e-5

    def send(self, what: str, event: Event) -> list[Action]:
        """Measure one event, then keep the book of what is in flight."""
        begin = time.perf_counter()
        actions = self.scheduler.handle(event)
        self.spent_s.setdefault(what, []).append(time.perf_counter() - begin)
        for action in actions:
            if isinstance(action, Admit):
                self.running[action.model].append(action.request)
        return actions

    def answers(self, action: Action) -> list[Event]:
        """What the host would report of an action."""
        if isinstance(action, Start):
            return [InstanceReported(self.now, action.model, action.generation, State.READY, took_s=1.0)]
        if isinstance(action, Stop):
            return [InstanceReported(self.now, action.model, action.generation, State.STOPPED, took_s=0.1)]
        return []

    def play(self, event: Event) -> None:
        """Send an event and answer at once every transition it causes."""
        todo = [event]
        while todo:
            for action in self.send("set-up", todo.pop(0)):
                todo.extend(self.answers(action))

    def gated(self) -> list[Event]:
        """The ends of everything in flight on a model that is to leave."""
        draining = [name for name, ids in self.running.items() if ids and self.scheduler.state_of(name) is State.DRAINING]
        return [RequestFinished(self.now, self.running[name].pop(0)) for name in draining[:1]]


def measure(models: int, resident: int, queued: int, rounds: int, devices: int = 1) -> dict[str, list[float]]:
    crowd = Crowd(models, resident, queued, devices=devices)
    gc.collect()
    gc.freeze()
    turns = cycle(crowd.resident)
    rng = random.Random(3)
    others = crowd.names[len(crowd.resident) :]
    for _ in range(rounds):
        name = next(turns)
        for left in reversed(range(IN_FLIGHT)):
            crowd.now += 1e-5
            what = "end of a request, more in flight" if left else "end of a request, its model falls idle: full decision"
            crowd.send(what, RequestFinished(crowd.now, crowd.running[name].pop(0)))
        for _ in range(IN_FLIGHT):
            crowd.now += 1e-5
            crowd.send("arrival, ready model", RequestArrived(crowd.now, next(crowd.ids), name))
        crowd.now += 1e-5
        crowd.send("arrival, cold model", RequestArrived(crowd.now, next(crowd.ids), rng.choice(others)))
        crowd.now += 1e-5
        crowd.send("timer, nobody may go: full decision", Ticked(crowd.now))
    swaps(crowd, rounds // 10)
    gc.unfreeze()
    return crowd.spent_s


def swaps(crowd: Crowd, rounds: int) -> None:
    """Let quanta pass, so that residents may go: every event here is part of a move."""
    for _ in range(rounds):
        crowd.now += 60.0
        todo: list[Event] = [Ticked(crowd.now)]
        while todo:
            event = replace(todo.pop(0), at=crowd.now)
            for action in crowd.send(f"swap: {type(event).__name__}", event):
                todo.extend(crowd.answers(action))
            crowd.now += 1e-4
            if not todo:
                todo.extend(crowd.gated())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rounds", type=int, default=2000)
    options = parser.parse_args(argv)
    missed = False
    for models, resident, queued, devices in CROWDS:
        print(f"\n{models} models, {resident} resident on {devices} device(s), {queued} queued: µs, median / 99th percentile (events)")
        for what, spent in sorted(measure(models, resident, queued, options.rounds, devices).items()):
            if what != "set-up":
                missed |= print_row(what, spent) and models >= 1000
    return 1 if missed and options.check else 0


def print_row(what: str, spent_s: list[float]) -> bool:
    """One line; True when the median is above its limit."""
    median, tail = statistics.median(spent_s), sorted(spent_s)[int(0.99 * (len(spent_s) - 1))]
    limit = ARRIVAL_S_MAX if what.startswith("arrival") else DECISION_S_MAX
    note = "" if median <= limit else f"  MISS: limit {limit * 1e6:.0f}"
    print(f"  {what:<56}{median * 1e6:9.1f} /{tail * 1e6:9.1f}  ({len(spent_s)}){note}")
    return median > limit


if __name__ == "__main__":
    sys.exit(main())
