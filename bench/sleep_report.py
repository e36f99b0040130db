"""What `bench.sleep` measured, told: tables, what must hold, bars.  Everything here is worked out from one JSON value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .harness import median, print_table
from .scheduling import Promise
from .sim.picture import Bar

Found = Mapping[str, Any]

LEVEL_1_MIN = 15.0  # times faster than a cold start
LEVEL_2_MIN = 8.0
# Two models that take turns on an A100, five switches: published figures of vLLM's authors, seconds in all.
PUBLISHED_S = {"off": 357.0, "1": 112.0, "2": 125.0}
PRETEND = (
    "The GPU is a pretended one: vLLM runs on the CPU, what stands for device memory is memory of its process, and a copy to it goes\n"
    "through RAM.  What is real: vLLM's server, its start, its sleep and wake routes, and greenroom.  Nothing here tells how fast PCIe\n"
    "or a real card is, what CUDA graphs cost, or what a CUDA context keeps."
)
WAYS = {"off": "stop and start", "1": "sleep at level 1", "2": "sleep at level 2"}
SHOWN_MOVES = {
    "start": "cold start",
    "start, disk": "cold start, weights not in the page cache",
    "wake 1": "wake from level 1",
    "wake 2": "wake from level 2",
    "wake 2, disk": "wake from level 2, weights not in the page cache",
}

# ------------------------------------------------------------------------------------------------ bytes, and the seconds they take


@dataclass(frozen=True, slots=True)
class Way:
    """One way of weights to the device: seconds = bytes / bandwidth + what it takes without bytes."""

    name: str
    mib: float
    mib_per_s: float
    fixed_s: float
    measured_s: float

    @property
    def bytes_s(self) -> float:
        return self.mib / self.mib_per_s

    @property
    def predicted_s(self) -> float:
        return self.bytes_s + self.fixed_s

    @property
    def ratio(self) -> float:
        return self.measured_s / self.predicted_s


WAYS_OF_BYTES = (
    ("start", "page cache to device"),
    ("start, disk", "disk to device"),
    ("wake 1", "host RAM to device"),
    ("wake 2", "page cache to device"),
    ("wake 2, disk", "disk to device"),
    ("sleep 1", "device to host RAM"),
)

# GB/s as commonly given for hardware that is not here; for 34 GB of weights.
NOMINAL_GB = 34.0
NOMINAL = (
    ("NVMe to device, one stream", 5.0, 5.0),
    ("10 to 20 Gbit/s network to device", 1.0, 2.0),
    ("host RAM to device, PCIe 5.0 x16, pinned", 50.0, 64.0),
)


def middle(found: Found, model: str, move: str, what: str = "ready") -> float:
    """Median; nan for what was not measured."""
    return median(found["moves"].get(model, {}).get(move, {}).get(what, ()))


def ways_of(found: Found) -> list[Way]:
    """Fixed parts are those of a model that is the same but has next to no weights; without one they are 0."""
    ways = []
    for move, copy in WAYS_OF_BYTES:
        measured_s, rate = middle(found, "plain", move), median(found["copies"].get(copy, ()))
        fixed_s = middle(found, "small", move.removesuffix(", disk"))
        if measured_s == measured_s and rate == rate:  # no nan
            name = f"{SHOWN_MOVES.get(move, 'sleep at level 1')}: {copy}"
            ways.append(Way(name, found["machine"]["weights_mib"], rate, fixed_s if fixed_s == fixed_s else 0.0, measured_s))
    return ways


# ---------------------------------------------------------------------------------------------------------------- what must hold


def times_faster(found: Found, level: int, what: str = "ready", model: str = "plain") -> float:
    return middle(found, model, "start", what) / middle(found, model, f"wake {level}", what)


def promises_of(found: Found) -> list[Promise]:
    answers = found["answers"]
    return [
        Promise("wake from level 1: times faster than a cold start", times_faster(found, 1), LEVEL_1_MIN, at_most=False),
        Promise("wake from level 2: times faster than a cold start", times_faster(found, 2), LEVEL_2_MIN, at_most=False),
        Promise(f"of {answers['asked']} answers, not 200", answers["asked"] - answers["ok"], 0.0),
        Promise(f"of {answers['asked']} answers, other words than the first time", answers["asked"] - answers["alike"], 0.0),
    ]


# ------------------------------------------------------------------------------------------------------------------------ tables


def print_report(found: Found) -> None:
    machine = found["machine"]
    print(
        f"{machine['engine']} on {machine['device']}; {machine['cpus']} cores, load {machine['load'][0]:.1f} before and "
        f"{machine['load'][1]:.1f} after; weights {machine['weights_mib']:,} MiB"
    )
    if machine["pretend"]:
        print(PRETEND)
    for title, rows in tables_of(found):
        if len(rows) > 1:
            print(f"\n{title}")
            print_table(rows)


def tables_of(found: Found) -> Iterable[tuple[str, list[list[str]]]]:
    yield "until it can answer, and its first answer (seconds, medians; CPU: of the engine's processes until then)", readiness_rows(found)
    yield "memory (MiB; host: greenroom's figure; free: what the machine has less than before the first start)", memory_rows(found)
    yield "what a move is made of (ms, medians): greenroom's own time is all of it but the engine's calls and the canary", parts_rows(found)
    yield (
        "two models take turns (seconds; a switch ends with its third answer; rest: waiting for its turn, and the first token)",
        cycle_rows(found),
    )
    title = "bytes, and the seconds they take: predicted = bytes / bandwidth of a plain copy + fixed (a model without weights takes that)"
    yield f"{title}\na wake from level 2 goes through the engine's loader, and answers the canary", latency_rows(found)
    yield f"the same sum for {NOMINAL_GB:g} GB and bandwidths as commonly given: nothing of it was measured here", nominal_rows()


def readiness_rows(found: Found) -> list[list[str]]:
    rows = [["", "n", "ready", "worst", "CPU", "first token", "answer", "asked to first token", "x faster", "x less CPU"]]
    for model, suffix in (("plain", ""), ("warmed", ", with warmup")):
        for move, shown in SHOWN_MOVES.items():
            ready = found["moves"].get(model, {}).get(move, {}).get("ready", ())
            if not ready:
                continue
            values = [middle(found, model, move, what) for what in ("cpu", "first", "answer", "asked")]
            gains = [middle(found, model, "start", what) / middle(found, model, move, what) for what in ("ready", "cpu")]
            row = [shown + suffix, str(len(ready)), f"{median(ready):.2f}", f"{max(ready):.2f}", *(f"{value:.2f}" for value in values)]
            rows.append([*row, *(f"{gain:.1f}" for gain in gains)])
    hot = found["moves"].get("plain", {}).get("hot", {})
    if hot:
        rows.append(
            ["it was ready", str(len(hot["first"])), *[""] * 3, f"{median(hot['first']):.2f}", f"{median(hot['answer']):.2f}", *[""] * 3]
        )
    return rows


def memory_rows(found: Found) -> list[list[str]]:
    heading = ["", "device", "resident", "copy in host RAM", "host", "free"]
    return [heading, *([state, *(f"{mib:,}" for mib in figures)] for state, *figures in found["memory"])]


ENGINE_CALLS = ("/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache")
KINDS = ("engine's calls", "is it asleep?", "canary", "check", "device", "host RAM")
OWN_KINDS = ("is it asleep?", "check", "device", "host RAM")


def kind_of(part: str) -> str:
    """In which column a part of bench.timed goes."""
    method, _, path = part.partition(" ")
    if path.startswith("/"):
        if path.startswith("/is_sleeping"):
            return "is it asleep?"
        return "engine's calls" if path.startswith(ENGINE_CALLS) else ("canary" if method == "POST" else "check")
    return {"its check": "check", "look at the device": "device", "look at host RAM": "host RAM"}.get(part, "check")


def by_kind(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums = dict.fromkeys(KINDS, 0.0)
    for part, seconds in parts:
        sums[kind_of(part)] += seconds
    return sums


def parts_rows(found: Found) -> list[list[str]]:
    """Of starts nothing: what they are made of is inside the engine."""
    rows = [["", "all", *KINDS, "pauses, rest", "greenroom's own", "and around it"]]
    for move in ("sleep 1", "wake 1", "sleep 2", "wake 2"):
        lines = found["parts"].get(move, ())
        if not lines:
            continue
        sums = [by_kind(line["parts"]) for line in lines]
        whole = [line["s"] for line in lines]
        rest = [all_s - sum(each.values()) for all_s, each in zip(whole, sums, strict=True)]
        own = [left + sum(each[kind] for kind in OWN_KINDS) for left, each in zip(rest, sums, strict=True)]
        around = [line["around_s"] for line in lines]
        values = [whole, *([each[kind] for each in sums] for kind in KINDS), rest, own, around]
        rows.append([move, *(f"{median(value) * 1e3:.0f}" for value in values)])
    return rows


def cycle_rows(found: Found) -> list[list[str]]:
    heading = ["", "switches", "served", "a switch", "worst", "first token", "one leaves", "other comes", "rest"]
    rows = [[*heading, "all switches", "with both first starts", "published (A100)"]]
    for way, shown in WAYS.items():
        if way not in found["cycle"]:
            continue
        told = found["cycle"][way]
        switches = told["switches"]
        rest = [all_s - left_s - came_s for all_s, left_s, came_s in zip(told["first"], told["leave"], told["come"], strict=True)]
        seconds = [median(switches), max(switches), *(median(values) for values in (told["first"], told["leave"], told["come"], rest))]
        totals = [sum(switches), sum(switches) + sum(told["starts"]), PUBLISHED_S[way]]
        figures = [*(f"{value:.2f}" for value in seconds), *(f"{value:.0f}" for value in totals)]
        rows.append([shown, str(len(switches)), str(told["served"]), *figures])
    return rows


def latency_rows(found: Found) -> list[list[str]]:
    rows = [["", "MiB", "MiB/s", "bytes s", "fixed s", "predicted s", "measured s", "measured / predicted"]]
    for way in ways_of(found):
        seconds = (way.bytes_s, way.fixed_s, way.predicted_s, way.measured_s, way.ratio)
        rows.append([way.name, f"{way.mib:,.0f}", f"{way.mib_per_s:,.0f}", *(f"{value:.2f}" for value in seconds)])
    return rows


def nominal_rows() -> list[list[str]]:
    rows = [["", "GB/s", "seconds for the bytes"]]
    for name, low, high in NOMINAL:
        rates, seconds = sorted({low, high}), sorted({NOMINAL_GB / high, NOMINAL_GB / low})
        rows.append([name, " to ".join(f"{rate:g}" for rate in rates), " to ".join(f"{value:.2g}" for value in seconds)])
    return rows


# ----------------------------------------------------------------------------------------------------------------------- picture


def title_of(found: Found) -> str:
    machine = found["machine"]
    return f"Seconds; stop and start = 1 (shorter is better). {machine['engine']}, {machine['device']}"


def bars_of(found: Found) -> list[tuple[str, list[Bar]]]:
    def group(seconds: Sequence[float]) -> list[Bar]:
        return [Bar(shown, value / seconds[0], f"{value:.3g} s") for shown, value in zip(WAYS.values(), seconds, strict=True)]

    moves = ("start", "wake 1", "wake 2")
    groups = [
        ("until it can answer", group([middle(found, "plain", move) for move in moves])),
        ("until the first token", group([middle(found, "plain", move, "asked") for move in moves])),
    ]
    if all(way in found["cycle"] for way in WAYS):
        cycle = [found["cycle"][way] for way in WAYS]
        count = len(cycle[0]["switches"])
        groups.append(("a switch of two models", group([median(each["switches"]) for each in cycle])))
        groups.append((f"two starts, {count} switches", group([sum(each["switches"]) + sum(each["starts"]) for each in cycle])))
    groups.append(("published, an A100", group(list(PUBLISHED_S.values()))))
    return groups
