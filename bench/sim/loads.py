"""Workloads as plain data: who asks for which model, when, and how long an answer takes.

A load is fixed before any policy sees it, so every policy meets the same requests.  A request with a client belongs to
a closed loop: the client sends it `think_s` after its previous answer, never before `not_before_s`.  Seconds and MiB.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

GIB = 1024
TRACE_FOLDER = Path(__file__).resolve().parent.parent / "traces"

PREFILL_TOKENS_PER_S = 4000
TOKEN_S = 0.01
ANSWER_OVERHEAD_S = 0.003
CLIENT_TURNAROUND_S = 0.0015
GENERATING = ("chat", "chat_json", "completion")


@dataclass(frozen=True, slots=True)
class SimTier:
    """One sleep level of a model."""

    level: int
    sleep_s: float
    wake_s: float
    residue_mib: int
    host_mib: int = 0


@dataclass(frozen=True, slots=True)
class SimModel:
    """A model as the world knows it: its real costs, not what a scheduler believes."""

    name: str
    need_mib: int
    up_s: float
    down_s: float = 0.0
    slots: int = 8
    jitter_s: float = 0.0
    sleep_s: float | None = None  # None: its engine cannot sleep
    wake_s: float = 0.0
    residue_mib: int = 0
    tiers: tuple[SimTier, ...] = ()  # with host RAM; without them the three above are its one level

    def tier(self, level: int) -> SimTier:
        return next(
            (tier for tier in self.tiers if tier.level == level), SimTier(level, self.sleep_s or 0.0, self.wake_s, self.residue_mib)
        )


@dataclass(frozen=True, slots=True)
class SimRequest:
    not_before_s: float
    model: int
    service_s: float
    client: str | None = None
    think_s: float = 0.0


@dataclass(frozen=True)
class Load:
    models: tuple[SimModel, ...]
    requests: tuple[SimRequest, ...]
    capacities_mib: tuple[int, ...]  # one device each
    until_s: float = float("inf")  # later arrivals are dropped: closed loops end here
    ram_mib: int | None = None  # host RAM for the copies of sleepers; None = as much as they like
    following: tuple[int, ...] = field(init=False)  # request -> the next one of the same client, or -1
    first: tuple[tuple[float, int], ...] = field(init=False)  # arrivals that depend on nobody, in order of time
    chains: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        following = [-1] * len(self.requests)
        first: list[tuple[float, int]] = []
        chains: dict[str, list[int]] = {}
        for number, request in enumerate(self.requests):
            if request.client is None or request.client not in chains:
                first.append((request.not_before_s, number))
            else:
                following[chains[request.client][-1]] = number
            if request.client is not None:
                chains.setdefault(request.client, []).append(number)
        object.__setattr__(self, "following", tuple(following))
        object.__setattr__(self, "first", tuple(sorted(first)))
        object.__setattr__(self, "chains", tuple(tuple(chain) for chain in chains.values()))


def trace(name: str, *, up_s: float = 2.0, jitter_s: float = 0.5, small_mib: int | None = None, capacity_mib: int = 1500) -> Load:
    """A recorded trace on one device that holds one 1,000 MiB model; `small_mib` shrinks the two retrieval models."""
    path = next(TRACE_FOLDER.glob(f"{name}_*.csv"))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = sorted({row["model"] for row in rows})
    models = [SimModel(n, small_mib if small_mib and n in ("emb", "rr") else 1000, up_s, jitter_s=jitter_s) for n in names]
    requests = []
    for row in rows:
        seconds = int(row["prompt_tokens"]) / PREFILL_TOKENS_PER_S + ANSWER_OVERHEAD_S
        if row["kind"] in GENERATING:
            seconds += int(row["output_tokens"]) * TOKEN_S
        requests.append(SimRequest(float(row["t"]), names.index(row["model"]), seconds, row["client"] or None, CLIENT_TURNAROUND_S))
    return Load(tuple(models), tuple(requests), (capacity_mib,))


# GiB, cold start s, wake s, sleep s, mean answer s: measured orders of magnitude for vLLM-like engines on one 80 GB card.
SIX = (
    ("big70", 62, 97, 5.4, 5.9, 8.0),
    ("coder30", 40, 47, 2.9, 2.8, 5.0),
    ("gen14", 20, 30, 1.2, 1.3, 4.0),
    ("vis4", 10, 46, 0.8, 0.8, 3.0),
    ("small8", 16, 25, 0.7, 0.8, 3.0),
    ("embed", 3, 12, 0.2, 0.2, 0.15),
)
# GiB, cold start s, mean answer s
TWELVE = (
    (3, 12, 0.3), (30, 20, 4), (4, 40, 2), (18, 25, 3), (6, 15, 1), (24, 60, 5),
    (8, 35, 2), (5, 10, 1), (16, 30, 3), (12, 70, 2), (10, 14, 2), (20, 22, 4),
)  # fmt: skip
RESIDUE_MIB = 1331
# What a level costs that was never measured, by size: the priors of the scheduling rules.
WEIGHTS_SHARE = 0.9  # of what a model needs
BUS_MIB_S = 20 * GIB
PINNING_MIB_S = 4 * GIB  # host RAM is allocated and filled
DISK_MIB_S = 2 * GIB
SLEEPER_MIB = 1536
JITTER_SHARE = 0.1


def six(*, sleeps: bool) -> tuple[SimModel, ...]:
    return tuple(
        SimModel(name, gib * GIB, up, 1.0, 8, JITTER_SHARE * up, sleep if sleeps else None, wake, RESIDUE_MIB if sleeps else 0)
        for name, gib, up, wake, sleep, _ in SIX
    )


def twelve(*, sleeps: bool) -> tuple[SimModel, ...]:
    return tuple(
        SimModel(f"m{n}", gib * GIB, up, 1.0, 8, JITTER_SHARE * up, up * 0.07 if sleeps else None, up * 0.07, RESIDUE_MIB if sleeps else 0)
        for n, (gib, up, _) in enumerate(TWELVE)
    )


def asleep_at(load: Load, *levels: int, ram_mib: int | None = None) -> Load:
    """The same requests for models whose engines sleep at these levels."""

    def tier(level: int, weights_mib: float) -> SimTier:
        if level == 1:
            return SimTier(1, weights_mib / PINNING_MIB_S, weights_mib / BUS_MIB_S + 0.1, SLEEPER_MIB, int(weights_mib))
        return SimTier(2, 0.3, weights_mib / DISK_MIB_S + 0.5, SLEEPER_MIB)

    models = []
    for model in load.models:
        tiers = tuple(tier(level, WEIGHTS_SHARE * model.need_mib) for level in levels)
        best = tiers[0]
        models.append(replace(model, tiers=tiers, sleep_s=best.sleep_s, wake_s=best.wake_s, residue_mib=best.residue_mib))
    return replace(load, models=tuple(models), ram_mib=ram_mib)


SIX_ANSWER_S = tuple(row[5] for row in SIX)
TWELVE_ANSWER_S = tuple(float(row[2]) for row in TWELVE)


def zipf(models: Sequence[SimModel], answers_s: Sequence[float], rate_per_s: float, seconds: float, seed: int, capacity_mib: int) -> Load:
    """Poisson arrivals; the n-th model is asked for in proportion to 1/n."""
    rng = random.Random(f"zipf {seed}")
    weights = [1 / (n + 1) for n in range(len(models))]
    requests: list[SimRequest] = []
    at = rng.expovariate(rate_per_s)
    while at <= seconds:
        model = rng.choices(range(len(models)), weights)[0]
        requests.append(SimRequest(at, model, rng.expovariate(1 / answers_s[model])))
        at += rng.expovariate(rate_per_s)
    return Load(tuple(models), tuple(requests), (capacity_mib,))


def zipf6(rate_per_s: float, seed: int, *, sleeps: bool = False, seconds: float = 3600) -> Load:
    return zipf(six(sleeps=sleeps), SIX_ANSWER_S, rate_per_s, seconds, seed, 80 * GIB)


def mixed12(rate_per_s: float, seed: int, *, sleeps: bool = False, seconds: float = 3600) -> Load:
    return zipf(twelve(sleeps=sleeps), TWELVE_ANSWER_S, rate_per_s, seconds, seed, 48 * GIB)


def hog(seed: int, *, sleeps: bool = False, seconds: float = 3600, clients: int = 10, rare_every_s: float = 120) -> Load:
    """Clients that never pause keep a 30B busy; a 70B, which needs its place, is asked for now and then."""
    rng = random.Random(f"hog {seed}")
    busy, rare = 1, 0
    requests = [
        SimRequest(0.0, busy, rng.expovariate(1 / SIX_ANSWER_S[busy]), f"hog{client}", 0.002)
        for client in range(clients)
        for _ in range(int(seconds / SIX_ANSWER_S[busy] * 1.5))
    ]
    at = rng.expovariate(1 / rare_every_s)
    while at < seconds:
        requests.append(SimRequest(at, rare, rng.expovariate(1 / SIX_ANSWER_S[rare])))
        at += rng.expovariate(1 / rare_every_s)
    return Load(six(sleeps=sleeps), tuple(requests), (80 * GIB,), until_s=seconds)


def agents(
    models: Sequence[SimModel],
    answers_s: Sequence[float],
    capacity_mib: int,
    *,
    agents_count: int,
    seconds: float,
    seed: int,
    think_s: float,
    sticky: float,
    only: Sequence[int] = (),
) -> Load:
    """Closed-loop clients that stay with a model with probability `sticky` and think a little before each request."""
    rng = random.Random(f"agents {seed}")
    choices = list(only) or list(range(len(models)))
    requests: list[SimRequest] = []
    for agent in range(agents_count):
        model = rng.choice(choices)
        begin_s = rng.uniform(0, 30 if seconds > 300 else 1)
        total_s = 0.0
        while total_s <= seconds * 1.2:
            service_s, pause_s = rng.expovariate(1 / answers_s[model]), rng.expovariate(1 / think_s)
            requests.append(SimRequest(begin_s, model, service_s, f"agent{agent}", pause_s))
            total_s += service_s + pause_s
            if rng.random() > sticky:
                model = rng.choice(choices)
    return Load(tuple(models), tuple(requests), (capacity_mib,), until_s=seconds)


def agents6(seed: int, *, sleeps: bool = False, seconds: float = 3600) -> Load:
    return agents(
        six(sleeps=sleeps),
        SIX_ANSWER_S,
        48 * GIB,
        agents_count=6,
        seconds=seconds,
        seed=seed,
        think_s=4.0,
        sticky=0.65,
        only=(1, 2, 3, 4, 5),
    )


def desk(seed: int, agents_count: int, models_count: int, think_s: float, sticky: float, *, seconds: float = 300) -> Load:
    """A few agents on one small card that holds one model at a time."""
    models = [SimModel(f"m{n}", 1000, 2.0, jitter_s=0.5) for n in range(models_count)]
    return agents(models, [0.4] * models_count, 1500, agents_count=agents_count, seconds=seconds, seed=seed, think_s=think_s, sticky=sticky)


def poisson(rng: random.Random, model: int, rate_per_s: float, seconds: float, service_s: float) -> Iterable[SimRequest]:
    at = rng.expovariate(rate_per_s)
    while at < seconds:
        yield SimRequest(at, model, service_s)
        at += rng.expovariate(rate_per_s)


def every(model: int, first_s: float, period_s: float, seconds: float, service_s: float) -> Iterable[SimRequest]:
    at = first_s
    while at < seconds:
        yield SimRequest(at, model, service_s)
        at += period_s


def two_overloaded(seed: int = 5, *, seconds: float = 400) -> Load:
    """Two models whose backlogs only grow, and a rare third, on a device for one.

    Ordered by the age of the oldest request the two backlogs pass the device to each other and the third starves.
    """
    rng = random.Random(f"two {seed}")
    models = tuple(SimModel(name, 1000, 2.0, slots=1, jitter_s=0.3) for name in ("first", "second", "rare"))
    requests = [*poisson(rng, 0, 5, seconds, 0.4), *poisson(rng, 1, 5, seconds, 0.4), *every(2, 60, 40, seconds, 0.4)]
    return Load(models, tuple(sorted(requests, key=lambda r: r.not_before_s)), (1500,), until_s=seconds)


def six_overloaded(seed: int = 7, *, seconds: float = 600) -> Load:
    """Six overloaded small models and a rare one that needs the whole device: unless somebody claims the memory for it,
    the small ones refill it for ever."""
    rng = random.Random(f"six {seed}")
    models = (
        SimModel("rare", 1500, 20.0, jitter_s=1.0),
        *(SimModel(f"small{n}", 500, 3.0, slots=2, jitter_s=0.5) for n in range(6)),
    )
    requests = list(every(0, 30, 90, seconds, 1.0))
    for n in range(6):
        requests.extend(poisson(rng, n + 1, 4, seconds, 0.5))
    return Load(models, tuple(sorted(requests, key=lambda r: r.not_before_s)), (1500,), until_s=seconds)


def five(seed: int, *, seconds: float = 3600) -> Load:
    """Five models of one size, Zipf, on a card for two of them and what the others leave there while they sleep."""
    models = [SimModel(f"m{n}", 16 * GIB, 25.0, 1.0, 8, 2.5) for n in range(5)]
    return zipf(models, [3.0] * 5, 0.3, seconds, seed, 38 * GIB)


FIVE_RAM_MIB = int(2 * WEIGHTS_SHARE * 16 * GIB) + 1  # two copies


def whole_card(seed: int) -> Load:
    """Two to six models that sleep in any way, and a rare one that needs the whole card: residues must go for it."""
    rng = random.Random(f"whole card {seed}")
    capacity = rng.choice((1000, 3000, 24_000))
    models = [SimModel("whole", capacity, rng.choice((1.0, 5.0, 20.0)) * rng.uniform(0.5, 1.5), 0.5, 8)]
    for n in range(rng.randint(2, 6)):
        need, up_s = int(capacity * rng.uniform(0.2, 0.9)), rng.choice((0.5, 2.0, 10.0)) * rng.uniform(0.5, 1.5)
        residue = int(need * rng.choice((0.02, 0.05, 0.3)))
        one = SimTier(1, rng.uniform(0.02, 0.3) * up_s, 0.1 * up_s, residue, need)
        two = SimTier(2, 0.1, 0.4 * up_s, int(residue * rng.uniform(0.5, 1.0)), 10)
        tiers = rng.choice(((one,), (one, two), (two,), ()))
        best = tiers[0] if tiers else SimTier(0, 0.0, 0.0, 0)
        slots = rng.choice((1, 2, 8))
        sleep_s = best.sleep_s if tiers else None
        models.append(SimModel(f"m{n}", need, up_s, 0.3, slots, 0.1 * up_s, sleep_s, best.wake_s, best.residue_mib, tiers))
    seconds = rng.choice((60.0, 120.0))
    requests: list[SimRequest] = list(every(0, rng.uniform(0, 20), rng.uniform(15, 60), seconds, 1.0))
    for n, model in enumerate(models[1:], start=1):
        service_s = rng.choice((0.1, 0.5, 2.0))
        requests.extend(poisson(rng, n, rng.choice((0.1, 0.5, 1.5 * model.slots / service_s)), seconds, service_s))
    ram_mib = rng.choice((None, 0, capacity, 2 * capacity))
    return Load(tuple(models), tuple(sorted(requests, key=lambda r: r.not_before_s)), (capacity,), until_s=seconds, ram_mib=ram_mib)


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    make: Callable[[int], Load]  # seed -> load
    kind: str  # trace | mix | desk | built
    perfect_sets: bool = True  # whether a hand-written co-residency matrix would change anything
    stop_s: float = float("inf")  # overloaded for ever: the run ends here, whoever still waits counts with its age


def catalogue(*, seconds: float = 3600) -> tuple[Workload, ...]:
    """Every workload of the bench; `seconds` is the length of the long ones."""

    def same(load: Load) -> Callable[[int], Load]:
        return lambda seed: load

    traces = [Workload(f"trace {name}", same(trace(name)), "trace", False) for name in ("a1", "a2", "b", "c", "d", "s")]
    return (
        *traces,
        Workload("trace c, small retrieval", same(trace("c", small_mib=200)), "trace"),
        Workload("zipf6 0.2/s", lambda s: zipf6(0.2, s, seconds=seconds), "mix"),
        Workload("zipf6 0.5/s", lambda s: zipf6(0.5, s, seconds=seconds), "mix"),
        Workload("mixed12 0.1/s", lambda s: mixed12(0.1, s, seconds=seconds), "mix"),
        Workload("mixed12 0.4/s", lambda s: mixed12(0.4, s, seconds=seconds), "mix"),
        Workload("agents6", lambda s: agents6(s, seconds=seconds), "mix"),
        Workload("hog", lambda s: hog(s, seconds=seconds), "mix"),
        Workload("zipf6 0.2/s, sleep", lambda s: zipf6(0.2, s, sleeps=True, seconds=seconds), "sleep"),
        Workload("zipf6 0.5/s, sleep", lambda s: zipf6(0.5, s, sleeps=True, seconds=seconds), "sleep"),
        Workload("mixed12 0.4/s, sleep", lambda s: mixed12(0.4, s, sleeps=True, seconds=seconds), "sleep"),
        Workload("agents6, sleep", lambda s: agents6(s, sleeps=True, seconds=seconds), "sleep"),
        Workload("hog, sleep", lambda s: hog(s, sleeps=True, seconds=seconds), "sleep"),
        Workload("desk 4 agents, 4 models", lambda s: desk(s, 4, 4, 0.3, 0.8), "desk", False),
        Workload("desk 3 agents, 2 models", lambda s: desk(s, 3, 2, 0.05, 0.95), "desk", False),
        Workload("desk 4 agents, 3 models", lambda s: desk(s, 4, 3, 1.0, 0.9), "desk", False),
        Workload("two overloaded, one rare", lambda s: two_overloaded(5 + s), "built", False, stop_s=400),
        Workload("six overloaded, one rare", lambda s: six_overloaded(7 + s), "built", stop_s=600),
    )
