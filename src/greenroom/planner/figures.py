"""What a stretch of time was like, from its rows alone: waits, swaps, what they took, and which of them were a pity."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from greenroom.ledger.rows import RequestRow, TransitionRow

HOUR_S = 3600.0
RISING = ("start", "wake")
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Swap:
    """One model came in, and these left for it."""

    at: float  # when the first of them began to leave; without any, when it began to rise
    end: float
    model: str
    out: tuple[str, ...]
    devices: tuple[str, ...]
    kind: str  # start | wake
    rise_s: float
    leave_s: float
    drain_s: float  # before that, until their requests in flight had ended
    waiters: int
    waited_s: float  # by all who waited for it, from their arrival

    @property
    def moving_s(self) -> float:
        return self.end - self.at


@dataclass(frozen=True, slots=True)
class Figures:
    """Waits in seconds; a request that was never served counts with what it waited."""

    requests: int
    refused: int
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    worst_s: float
    switches: int  # starts and wakes
    starts: int
    wakes: int
    evictions: int
    swap_share: float  # of device time, in moves of any kind
    waited_share: float  # of device time, in moves that somebody waited for
    regret: int  # models that were wanted again within the price of their eviction
    hours: float

    def plain(self) -> dict[str, Any]:
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, between the two nearest."""
    if not ordered:
        return 0.0
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def length_s(spans: Iterable[Span]) -> float:
    """Seconds that are in any of them."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        if end > until:
            total += end - max(begin, until)
            until = end
    return total


def stretch(requests: Sequence[RequestRow], transitions: Sequence[TransitionRow]) -> Span:
    """From the first thing that is told to the last."""
    begins = [row.at for row in requests] + [row.at for row in transitions]
    ends = [row.at + row.duration_s for row in requests] + [row.at + row.took_s for row in transitions]
    return (min(begins), max(ends)) if begins else (0.0, 0.0)


def busy_s(transitions: Iterable[TransitionRow], within: Span, *, waited: bool = False) -> dict[str, float]:
    """Seconds per device that went into moves; with `waited`, only into those that somebody waited for."""
    spans: defaultdict[str, list[Span]] = defaultdict(list)
    for row in transitions:
        begin, end = max(row.at, within[0]), min(row.at + row.took_s, within[1])
        for device in row.devices:
            if end > begin and (not waited or row.waiters):
                spans[device].append((begin, end))
    return {device: length_s(each) for device, each in spans.items()}


def swaps_of(requests: Sequence[RequestRow], transitions: Sequence[TransitionRow]) -> list[Swap]:
    """Every rise that worked, with those who left for it, in order of time."""
    waits = _waiters(requests)
    leaving: defaultdict[str, list[TransitionRow]] = defaultdict(list)
    found = []
    for row in sorted(transitions, key=lambda row: row.at):
        if row.evicted_for:
            leaving[row.evicted_for].append(row)
        elif row.kind in RISING:
            victims = [one for one in leaving.pop(row.model, []) if not set(one.devices).isdisjoint(row.devices)]
            if row.ok:
                found.append(_swap(row, victims, waits.get((row.model, row.generation), [])))
    return found


def _waiters(requests: Iterable[RequestRow]) -> Mapping[tuple[str, int], list[RequestRow]]:
    found: defaultdict[tuple[str, int], list[RequestRow]] = defaultdict(list)
    for row in requests:
        if row.start in ("cold", "wake"):
            found[row.model, row.generation].append(row)
    return found


def _swap(rise: TransitionRow, victims: Sequence[TransitionRow], waits: Sequence[RequestRow]) -> Swap:
    at, end = min([rise.at, *(row.at for row in victims)]), rise.at + rise.took_s
    leave_s = rise.at - at
    waiters = [row for row in waits if row.at <= end and row.at + row.waited_s >= rise.at]
    drain_s = max((row.gate_s for row in waiters), default=0.0) - leave_s
    return Swap(
        at,
        end,
        rise.model,
        tuple(dict.fromkeys(row.model for row in victims)),
        rise.devices,
        rise.kind,
        rise.took_s,
        leave_s,
        max(0.0, drain_s),
        len(waiters),
        sum(row.waited_s for row in waiters),
    )


def regrets_of(requests: Sequence[RequestRow], swaps: Sequence[Swap]) -> list[Swap]:
    """Swaps after which one that had to leave was wanted again within the price of sending it away and back."""
    left = {name for swap in swaps for name in swap.out}
    arrivals: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)  # (arrival, admission)
    for row in requests:
        if row.model in left:
            arrivals[row.model].append((row.at, row.at + row.waited_s))
    came: dict[str, list[float]] = {}
    admitted: dict[str, list[float]] = {}  # the latest admission of those that came up to then
    for name, seen in arrivals.items():
        seen.sort()
        came[name] = [at for at, _ in seen]
        admitted[name] = list(accumulate((until for _, until in seen), max))
    up_s: dict[str, float] = {}
    found = []
    for swap in swaps:
        up_s[swap.model] = swap.rise_s
        price_s = swap.moving_s + sum(up_s.get(name, 0.0) for name in swap.out)
        for name in swap.out:
            count = bisect_right(came.get(name, ()), swap.at + price_s)
            if count and admitted[name][count - 1] >= swap.at:
                found.append(swap)
                break
    return found


def figures_of(
    requests: Sequence[RequestRow], transitions: Sequence[TransitionRow], within: Span | None = None, swaps: Sequence[Swap] | None = None
) -> Figures:
    """`swaps`: as of `swaps_of`, where they are known already."""
    begin, end = within or stretch(requests, transitions)
    waits = sorted(row.waited_s for row in requests)
    swaps = swaps_of(requests, transitions) if swaps is None else swaps
    devices = max(1, len({device for row in transitions for device in row.devices}))
    span_s = max(1e-9, end - begin) * devices
    return Figures(
        requests=len(requests),
        refused=sum(row.outcome == "refused" for row in requests),
        mean_s=statistics.fmean(waits) if waits else 0.0,
        p50_s=percentile(waits, 50),
        p95_s=percentile(waits, 95),
        p99_s=percentile(waits, 99),
        worst_s=waits[-1] if waits else 0.0,
        switches=len(swaps),
        starts=sum(swap.kind == "start" for swap in swaps),
        wakes=sum(swap.kind == "wake" for swap in swaps),
        evictions=sum(len(swap.out) for swap in swaps),
        swap_share=sum(busy_s(transitions, (begin, end)).values()) / span_s,
        waited_share=sum(busy_s(transitions, (begin, end), waited=True).values()) / span_s,
        regret=len(regrets_of(requests, swaps)),
        hours=(end - begin) / HOUR_S,
    )
