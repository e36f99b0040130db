"""Scheduling, compared: the same requests under greenroom's scheduler and under the rules others use.

    python -m bench.scheduling             every trace and workload, tables, and the picture docs/scheduling.svg
    python -m bench.scheduling --check     exit 1 when one of the figures below is missed
    python -m bench.scheduling --quick     a short smoke run (figures mean nothing)

Virtual time: an hour of requests takes a second.  greenroom's rows are made by the real scheduler (greenroom.core).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from greenroom.core.facts import Policy
from greenroom.planner.figures import percentile

from .sim.bounds import bound_of
from .sim.engine import NEVER, Result, Rules, World
from .sim.loads import FIVE_RAM_MIB, Load, Workload, asleep_at, catalogue, five, whole_card, zipf6
from .sim.picture import Bar, write_bars
from .sim.rules_clairvoyant import Clairvoyant
from .sim.rules_greenroom import Greenroom, StrictFifo
from .sim.rules_peers import LlamaCppRouter, LlamaSwap, Ollama

CONTEND = 0.5  # a cold start takes this much longer for each start that runs beside it
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "scheduling.svg"

OURS = "greenroom"
DEFAULT = "llama-swap"
SETS = "llama-swap, perfect sets"
SEER = "clairvoyant roll-out"

# What must hold (mean waits; ratios to the row named).
AGAINST_DEFAULT_MAX = 0.6
AGAINST_SETS_MAX = 1.0
AGAINST_SEER_MAX = 1.2
SLEEP_GAIN_MIN = 3.5
SLEEP_GAIN_OVERLOADED_MIN = 3.0  # zipf6 0.5/s: the first loads of all models are a third of what is left to wait
TIGHT_GAIN_MIN = 3.5
TIGHT_LEVEL_1_GAIN_MIN = 1.4
SLEPT = ("zipf6 0.2/s", "zipf6 0.5/s", "mixed12 0.1/s", "mixed12 0.4/s")
WHOLE_CARD_SEEDS = 2000
SEER_SEEDS = 3
SEER_HORIZON_S = 400.0  # how far the roll-out plays each choice
MIXES = ("zipf6 0.2/s", "zipf6 0.5/s", "mixed12 0.1/s", "mixed12 0.4/s", "agents6", "hog")
RARE_WORST_S_MAX = {"two overloaded, one rare": 45.0, "six overloaded, one rare": 250.0}
# In the picture.
SHOWN = (
    *(f"trace {name}" for name in ["a1", "a2", "b", "c", "d"]),
    *MIXES,
    "zipf6 0.5/s, sleep",
    "desk 4 agents, 4 models",
)  # in the picture
ZIPFS = ("zipf6 0.2/s", "zipf6 0.5/s")


@dataclass(frozen=True, slots=True)
class Row:
    """Means over the runs of one policy on one workload."""

    policy: str
    switches: float
    done: float
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    worst_s: float
    swap_share: float
    makespan_s: float
    chain_p50_s: float
    cut: float
    unserved: float
    refused: float
    rare_worst_s: float | None  # of the model named "rare", where there is one


def summarise(policy: str, results: Sequence[Result]) -> Row:
    def mean(of: Callable[[Result], float]) -> float:
        return statistics.fmean(of(r) for r in results)

    return Row(
        policy=policy,
        switches=mean(lambda r: r.switches),
        done=mean(lambda r: r.done - r.refused),
        mean_s=mean(lambda r: statistics.fmean(r.waits_s)),
        p50_s=mean(lambda r: percentile(sorted(r.waits_s), 50)),
        p95_s=mean(lambda r: percentile(sorted(r.waits_s), 95)),
        p99_s=mean(lambda r: percentile(sorted(r.waits_s), 99)),
        worst_s=max(max(r.waits_s) for r in results),
        swap_share=mean(lambda r: r.swap_share),
        makespan_s=mean(lambda r: r.makespan_s),
        chain_p50_s=mean(lambda r: percentile(sorted(r.chains_s), 50)),
        cut=mean(lambda r: r.cut),
        unserved=mean(lambda r: r.unserved),
        refused=mean(lambda r: r.refused),
        rare_worst_s=max((max(r.waits_by_model_s["rare"], default=0.0) for r in results if "rare" in r.waits_by_model_s), default=None),
    )


def run_all(load_of: Callable[[int], Load], rules: Rules, seeds: Sequence[int], stop_s: float = NEVER) -> list[Result]:
    return [World(load_of(seed), rules, seed=seed, contend=CONTEND).run(stop_s).result() for seed in seeds]


def policies_for(workload: Workload) -> list[Rules]:
    rules: list[Rules] = [StrictFifo(), LlamaSwap()]
    if workload.perfect_sets:
        rules.append(LlamaSwap(perfect_sets=True))
    rules += [LlamaSwap(polls=False), Ollama(), LlamaCppRouter(1), Greenroom()]
    if workload.kind in ("mix", "sleep"):
        rules.append(Greenroom(Policy(lanes=2), label="two lanes"))
    if workload.kind == "trace":
        rules.append(Clairvoyant())
    return rules


COLUMNS = (
    ("switches", 9),
    ("done", 7),
    ("mean", 9),
    ("p50", 9),
    ("p95", 9),
    ("p99", 9),
    ("worst", 9),
    ("swaps", 7),
    ("makespan", 10),
    ("chain", 8),
)
HEADER = f"{'policy':<28}" + "".join(f"{name:>{width}}" for name, width in COLUMNS) + f"{'cut':>6}"


def print_table(title: str, rows: Sequence[Row]) -> None:
    print(f"\n{title}: waits in seconds; swaps = seconds of starts, stops and sleeps ÷ makespan (they may overlap)\n{HEADER}")
    for r in rows:
        chain = f"{r.chain_p50_s:8.2f}" if r.chain_p50_s else f"{'':8}"
        note = f"  rare: {r.rare_worst_s:.0f} s at worst" if r.rare_worst_s is not None else ""
        note += f"  {r.unserved:.0f} never served" if r.unserved else ""
        note += f"  {r.refused:.0f} refused" if r.refused else ""
        print(
            f"{r.policy:<28}{r.switches:9.1f}{r.done:7.0f}{r.mean_s:9.2f}{r.p50_s:9.2f}{r.p95_s:9.2f}{r.p99_s:9.2f}{r.worst_s:9.1f}"
            f"{r.swap_share:7.2f}{r.makespan_s:10.1f}{chain}{r.cut:6.0f}{note}"
        )
    sys.stdout.flush()


# ------------------------------------------------------------------------------------------------------- what must hold


@dataclass(frozen=True, slots=True)
class Promise:
    what: str
    value: float
    limit: float
    at_most: bool = True

    @property
    def kept(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        return f"{'ok  ' if self.kept else 'MISS'} {self.what}: {self.value:.2f} {sign} {self.limit:.2f}"


def mean_of(tables: dict[str, list[Row]], workload: str, policy: str) -> float:
    return next(r.mean_s for r in tables[workload] if r.policy == policy)


def visitor_bound_s(load: Load, policy: Policy, visitor: int, resident: int) -> float:
    """One visitor against one busy model: the lone-visitor form of the bound of the scheduling rules.

    Late, then the request in flight and the lane, then one quantum with its own drain and lane.
    """
    costs = [(m.up_s + m.jitter_s) * (1 + CONTEND) + 0.03 for m in load.models]
    price = costs[visitor] + load.models[resident].down_s + costs[resident]
    late = max(policy.late_min_s, policy.late_factor * price)
    longest = max(r.service_s for r in load.requests)
    lane = max(costs) + sum(m.down_s for m in load.models)
    return late + longest + lane + 2 * (policy.quantum_factor * price + longest + lane)


def hog_promise(seeds: Sequence[int], workload: Workload) -> Promise:
    ratio = 0.0
    for seed in seeds:
        load = workload.make(seed)
        rare, busy = 0, 1
        world = World(load, Greenroom(), seed=seed, contend=CONTEND).run()
        result = world.result()
        worst = max(result.waits_by_model_s[load.models[rare].name], default=0.0)
        ratio = max(ratio, worst / visitor_bound_s(load, Policy(), rare, busy))
    return Promise("hog: the rare model's worst wait ÷ its bound", ratio, 1.0)


def seer_promises(seconds: float, seeds: Sequence[int], horizon_s: float) -> list[Promise]:
    """Fewer runs: the roll-out plays every choice to its horizon."""
    promises = []
    for rate, name in ((0.2, ZIPFS[0]), (0.5, ZIPFS[1])):

        def load_of(seed: int, rate: float = rate) -> Load:
            return zipf6(rate, seed, seconds=seconds)

        rows = [summarise(r.name, run_all(load_of, r, seeds)) for r in (Greenroom(), Clairvoyant(horizon_s=horizon_s))]
        print_table(f"{name}, {seconds:.0f} s, against the future", rows)
        promises.append(Promise(f"{name}: mean wait ÷ clairvoyant's", rows[0].mean_s / rows[1].mean_s, AGAINST_SEER_MAX))
    return promises


def promises_of(tables: dict[str, list[Row]]) -> list[Promise]:
    promises = []
    for name in MIXES:
        ours = mean_of(tables, name, OURS)
        promises.append(Promise(f"{name}: mean wait ÷ llama-swap's", ours / mean_of(tables, name, DEFAULT), AGAINST_DEFAULT_MAX))
        promises.append(Promise(f"{name}: mean wait ÷ perfect sets'", ours / mean_of(tables, name, SETS), AGAINST_SETS_MAX))
    for name in ZIPFS:
        gain = mean_of(tables, name, OURS) / mean_of(tables, f"{name}, sleep", OURS)
        promises.append(Promise(f"{name}: mean wait cold ÷ with level-1 sleep", gain, SLEEP_GAIN_MIN, at_most=False))
    return promises


def print_gains(title: str, rows: Sequence[Row]) -> None:
    print(f"\n{title}: mean wait and 95th percentile in seconds, and how many times shorter the mean wait is than without sleep")
    for r in rows:
        print(f"{r.policy:<28}{r.mean_s:9.2f}{r.p95_s:9.2f}{rows[0].mean_s / r.mean_s:8.1f} x")
    sys.stdout.flush()


def sleep_promises(workloads: Sequence[Workload], seconds: float, seeds: Sequence[int]) -> list[Promise]:
    """The same requests without sleep, at each level with host RAM to spare, and with host RAM for two copies only."""
    promises = []
    for workload in (w for w in workloads if w.name in SLEPT):

        def nights(*levels: int, of: Workload = workload) -> Callable[[int], Load]:
            return lambda seed: asleep_at(of.make(seed), *levels)

        loads = {"no sleep": workload.make, "level 1": nights(1), "level 2": nights(2), "levels 1 and 2": nights(1, 2)}
        rows = [summarise(name, run_all(load_of, Greenroom(), seeds)) for name, load_of in loads.items()]
        print_gains(workload.name, rows)
        least = SLEEP_GAIN_OVERLOADED_MIN if workload.name == ZIPFS[1] else SLEEP_GAIN_MIN
        promises.append(
            Promise(f"{workload.name}: mean wait without ÷ with level-1 sleep", rows[0].mean_s / rows[1].mean_s, least, at_most=False)
        )
    return promises + tight_promises(seconds, seeds)


def tight_promises(seconds: float, seeds: Sequence[int]) -> list[Promise]:
    """Five models, host RAM for two copies: the third goes to level 2, or stops where there is none."""

    def nights(*levels: int, ram_mib: int | None = FIVE_RAM_MIB) -> Callable[[int], Load]:
        return lambda seed: asleep_at(five(seed, seconds=seconds), *levels, ram_mib=ram_mib)

    loads = {
        "no sleep": lambda seed: five(seed, seconds=seconds),
        "level 1, RAM to spare": nights(1, ram_mib=None),
        "level 1, two copies": nights(1),
        "levels 1 and 2, two copies": nights(1, 2),
    }
    rows = [summarise(name, run_all(load_of, Greenroom(), seeds)) for name, load_of in loads.items()]
    print_gains("five models on a card for two", rows)
    gain = rows[0].mean_s / rows[3].mean_s
    return [
        Promise("five models, RAM for two copies: mean wait without ÷ with levels 1 and 2", gain, TIGHT_GAIN_MIN, at_most=False),
        Promise(
            "five models, RAM for two copies: mean wait without ÷ with level 1 only",
            rows[0].mean_s / rows[2].mean_s,
            TIGHT_LEVEL_1_GAIN_MIN,
            at_most=False,
        ),
    ]


def whole_card_promise(seeds: int) -> Promise:
    """Sleepers' residues never starve a model that needs the whole card."""
    worst = 0.0
    for seed in range(seeds):
        load = whole_card(seed)
        result = World(load, Greenroom(), seed=seed).run(load.until_s * 20).result()
        waits = result.waits_by_model_s[load.models[0].name]
        worst = max(worst, max(waits, default=0.0) / bound_of(load, Policy()).wait_s)
    return Promise(f"{seeds:,} loads with sleepers: wait of the model that needs the whole card ÷ its bound, at worst", worst, 1.0)


def nobody_is_lost(tables: dict[str, list[Row]]) -> Promise:
    ours = [r for rows in tables.values() for r in rows if r.policy.startswith(OURS)]
    lost = sum(r.refused + r.cut + (r.unserved if r.rare_worst_s is None else 0.0) for r in ours)
    return Promise("requests refused, cut or never served", lost, 0.0)


def rare_promises(tables: dict[str, list[Row]]) -> list[Promise]:
    """The two built cases that tell these rules from weaker ones; the bounds hold with room to spare."""
    worst = {name: next(r.rare_worst_s or 0.0 for r in rows if r.policy == OURS) for name, rows in tables.items() if "one rare" in name}
    return [Promise(f"{name}: the rare model's worst wait, s", s, RARE_WORST_S_MAX[name]) for name, s in worst.items()]


# ------------------------------------------------------------------------------------------------------------- the run


def bars_of(tables: dict[str, list[Row]]) -> list[tuple[str, list[Bar]]]:
    groups = []
    for name, rows in tables.items():
        if name not in SHOWN:
            continue
        reference = next(r.mean_s for r in rows if r.policy == DEFAULT)
        shown = [r for r in rows if r.policy in (DEFAULT, SETS, "Ollama", OURS, SEER)]
        groups.append((name, [Bar(r.policy, r.mean_s / reference, f"{r.mean_s:.3g} s") for r in shown]))
    return groups


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="exit 1 when a promised figure is missed")
    parser.add_argument("--quick", action="store_true", help="short loads, one seed: does it run?")
    parser.add_argument("--seeds", type=int, default=5, help="runs per workload (default 5)")
    parser.add_argument("--sleep", action="store_true", help="only what sleep gains")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="where the SVG goes")
    options = parser.parse_args(argv)
    began = time.perf_counter()
    seconds, seeds = (300.0, range(1)) if options.quick else (3600.0, range(options.seeds))
    chosen = [w for w in catalogue(seconds=seconds) if options.only in w.name]
    tables: dict[str, list[Row]] = {}
    if options.sleep:
        return conclude([*sleep_promises(chosen, seconds, seeds), whole_card_promise(WHOLE_CARD_SEEDS)], began, options.check)
    for workload in chosen:
        tables[workload.name] = [summarise(r.name, run_all(workload.make, r, seeds, workload.stop_s)) for r in policies_for(workload)]
        print_table(workload.name, tables[workload.name])
    if not options.quick and not options.only:
        write_bars(options.picture, "Mean wait, llama-swap = 1 (shorter is better)", bars_of(tables))
    promises = [nobody_is_lost(tables)]
    if not options.only and not options.quick:
        promises += promises_of(tables) + rare_promises(tables)
        promises.append(hog_promise(seeds, next(w for w in chosen if w.name == "hog")))
        promises += sleep_promises(chosen, seconds, seeds)
        promises.append(whole_card_promise(WHOLE_CARD_SEEDS))
        promises += seer_promises(seconds, range(min(SEER_SEEDS, options.seeds)), SEER_HORIZON_S)
    return conclude(promises, began, options.check)


def conclude(promises: Sequence[Promise], began: float, check: bool) -> int:
    print("\nwhat must hold")
    for promise in promises:
        print(promise)
    print(f"\n{time.perf_counter() - began:.0f} s")
    return 1 if check and not all(p.kept for p in promises) else 0


if __name__ == "__main__":
    sys.exit(main())
