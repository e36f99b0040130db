"""Models that keep taking each other's place: who, and what it costs.  What would end it: see ways_out.py.

Told from rows alone.  Being slow is not thrashing: only models that came in for each other and left for each other
again are named, and only where that took a noticeable share of the device's time.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from greenroom.core.facts import Setup
from greenroom.core.thrash import is_rate, turns_words
from greenroom.core.words import gib
from greenroom.ledger.rows import RequestRow, TransitionRow

from .figures import HOUR_S, Span, Swap, regrets_of, stretch, swaps_of
from .sizes import needs_of

TURNS_MIN = 4  # swaps among the same models; fewer are no habit
SHARE_MIN = 0.1  # of the time from the first to the last of them
SPAN_S_MIN = 60.0
SLOW_S_MIN = 1.0
SLOW_FACTOR = 3.0  # against the median of the same model's requests that met it ready


@dataclass(frozen=True, slots=True)
class Fix:
    """One way out, and what a replay of the same time with it came to."""

    kind: str
    text: str
    changes: tuple[str, ...] = ()  # for `greenroom replay --set`
    diff: tuple[str, ...] = ()  # of the configuration, lines that begin with + or -
    setup: Setup | None = None  # where no change of one key says it
    cost: float = 0.0  # how much of a burden, to choose among those that help
    effect: str = ""
    swaps: int | None = None  # in the time replayed
    swaps_h: float | None = None
    is_rate: bool = True  # that time was long enough for figures per hour
    mean_wait_s: float | None = None
    p95_wait_s: float | None = None
    refused: int = 0
    moving_share: float | None = None  # of device time that still goes into moves somebody waits for
    suggested: bool = False

    def plain(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "text": self.text,
            "effect": self.effect,
            "swaps": self.swaps,
            "swaps_h": _round(self.swaps_h, 1) if self.is_rate else None,
            "mean_wait_s": _round(self.mean_wait_s, 2),
            "p95_wait_s": _round(self.p95_wait_s, 2),
            "refused": self.refused,
            "changes": list(self.changes),
            "diff": list(self.diff),
            "suggested": self.suggested,
        }


@dataclass(frozen=True, slots=True)
class Thrash:
    """Models that take turns on a device, with what that cost; `_h` = per hour of the time looked at.

    Where that is shorter than RATE_S_MIN, what is told are counts: `seconds` and the names without `_h`.
    """

    models: tuple[str, ...]  # the two that swap most with each other first
    device: str
    since: float
    until: float
    seconds: float  # looked at
    swaps: int
    switching_s: float
    draining_s: float
    waited_requests: int
    waited_s: float
    share: float  # of the time between the first and the last of these swaps
    regret: int
    slow: int  # slow requests that came right after another of them had been served
    slow_total: int
    short_mib: int | None  # to hold all of them; None = their needs are not known
    fixes: tuple[Fix, ...] = ()

    def per_hour(self, count: float) -> float:
        return count * HOUR_S / max(self.seconds, SPAN_S_MIN)

    @property
    def swaps_h(self) -> float:
        return self.per_hour(self.swaps)

    @property
    def waited_s_h(self) -> float:
        return self.per_hour(self.waited_s)

    @property
    def cost_s(self) -> float:
        return self.switching_s + self.draining_s

    @property
    def cost_s_h(self) -> float:
        return self.per_hour(self.cost_s)

    def plain(self) -> dict[str, Any]:
        counted = {
            "swaps": self.swaps,
            "switching_s": self.switching_s,
            "draining_s": self.draining_s,
            "waited_requests": self.waited_requests,
            "waited_s": self.waited_s,
        }
        rates = {f"{name}_h": self.per_hour(count) if is_rate(self.seconds) else None for name, count in counted.items()}
        return {
            "pair": list(self.models),
            "device": self.device,
            "since": self.since,
            "until": self.until,
            "seconds": _round(self.seconds, 1),
            **{name: _round(value, 1) for name, value in {**counted, **rates}.items()},
            "share": _round(self.share, 3),
            "regret": self.regret,
            "slow": self.slow,
            "slow_total": self.slow_total,
            "short_mib": self.short_mib,
            "text": sentence(self),
            "fixes": [fix.plain() for fix in self.fixes],
        }


@dataclass(frozen=True, slots=True)
class Follows:
    """How a model's requests did right after another one was served on its device."""

    model: str
    before: str
    count: int
    mean_s: float
    others_mean_s: float  # of its requests that followed its own, or nobody's

    def plain(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "before": self.before,
            "count": self.count,
            "mean_s": round(self.mean_s, 3),
            "others_mean_s": round(self.others_mean_s, 3),
        }


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


# ------------------------------------------------------------------------------------------------------------ finding


def thrashing(
    setup: Setup,
    requests: Sequence[RequestRow],
    transitions: Sequence[TransitionRow],
    within: Span | None = None,
    swaps: Sequence[Swap] | None = None,
) -> list[Thrash]:
    """Everybody who takes turns, dearest first; nobody where it is merely slow.  `swaps`: as of `swaps_of`, where they are known."""
    begin, end = within or stretch(requests, transitions)
    swaps = swaps_of(requests, transitions) if swaps is None else swaps
    regrets = set(map(id, regrets_of(requests, swaps)))
    needs = needs_of(setup, transitions)
    stays = [row for row in transitions if row.ok]
    there = _there_before(setup, requests, stays)
    found = []
    for device in sorted({device for swap in swaps for device in swap.devices}):
        here = [swap for swap in swaps if device in swap.devices and begin <= swap.at <= end]
        for circle in _circles(here):
            turns = [swap for swap in here if swap.model in circle and not circle.isdisjoint(swap.out)]
            beside = _beside(there.get(device, frozenset()), stays, device, circle, turns)
            one = _thrash(setup, device, circle, turns, requests, end - begin, needs, beside)
            if one is not None:
                found.append(replace(one, regret=sum(id(swap) in regrets for swap in turns)))
    return sorted(found, key=lambda one: -one.cost_s_h)


def _circles(swaps: Iterable[Swap]) -> list[set[str]]:
    """Models from each of which the others are reached by going from who left to who came, and back."""
    edges: defaultdict[str, set[str]] = defaultdict(set)
    for swap in swaps:
        for name in swap.out:
            if swap.waiters:
                edges[name].add(swap.model)
    reach = {name: _reached(name, edges) for name in edges}
    found: list[set[str]] = []
    for name in sorted(edges):
        circle = {other for other in reach[name] if name in reach.get(other, ())}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def _reached(name: str, edges: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = [name]
    while todo:
        for other in edges.get(todo.pop(), ()):
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return seen


def _thrash(
    setup: Setup,
    device: str,
    circle: set[str],
    turns: Sequence[Swap],
    requests: Sequence[RequestRow],
    seconds: float,
    needs: Mapping[str, int],
    beside: set[str],
) -> Thrash | None:
    since, until = turns[0].at, max(swap.end for swap in turns)
    switching_s = sum(swap.moving_s for swap in turns)
    share = switching_s / max(SPAN_S_MIN, until - since)
    if len(turns) < TURNS_MIN or share < SHARE_MIN:
        return None
    slow = slow_requests(row for row in requests if row.model in circle)
    rises = [(swap.model, swap.at, swap.end) for swap in turns]
    return Thrash(
        models=_by_weight(turns, circle),
        device=device,
        since=since,
        until=until,
        seconds=seconds,
        swaps=len(turns),
        switching_s=switching_s,
        draining_s=sum(swap.drain_s for swap in turns),
        waited_requests=sum(swap.waiters for swap in turns),
        waited_s=sum(swap.waited_s for swap in turns),
        share=share,
        regret=0,
        slow=sum((row.before in circle and row.before != row.model) or _waited_for(row, rises) for row in slow),
        slow_total=len(slow),
        short_mib=_short_mib(setup, device, circle, beside, needs),
    )


def _there_before(setup: Setup, requests: Iterable[RequestRow], transitions: Iterable[TransitionRow]) -> dict[str, set[str]]:
    """Device -> models that were up before anything is told of them: their first request met them ready, and nothing had raised them."""
    rose: dict[str, float] = {}
    for row in transitions:
        rose[row.model] = min(row.at, rose.get(row.model, row.at))
    first: dict[str, RequestRow] = {}
    for request in requests:
        if request.model not in first or request.at < first[request.model].at:
            first[request.model] = request
    found: defaultdict[str, set[str]] = defaultdict(set)
    for model in setup.models:
        one = first.get(model.id)
        if one is not None and one.start == "hot" and one.at < rose.get(model.id, float("inf")) and len(model.devices) == 1:
            found[model.devices[0]].add(model.id)
    return found


def _beside(there: Set[str], transitions: Iterable[TransitionRow], device: str, circle: set[str], turns: Sequence[Swap]) -> set[str]:
    """Models that were there all the while: whoever is to stay must fit beside them."""
    since, until = turns[0].at, turns[-1].end
    up = set(there) - circle
    for row in sorted(transitions, key=lambda row: row.at):
        if device not in row.devices or row.model in circle or row.at > until:
            continue
        if row.kind in ("start", "wake"):
            up.add(row.model)
        elif row.at >= since or row.kind == "stop":
            up.discard(row.model)
    return up


def _waited_for(row: RequestRow, rises: Iterable[tuple[str, float, float]]) -> bool:
    admitted = row.at + row.waited_s
    return row.start in ("cold", "wake") and any(
        model == row.model and row.at <= end and at <= admitted <= end + SLOW_S_MIN for model, at, end in rises
    )


def _by_weight(turns: Iterable[Swap], circle: set[str]) -> tuple[str, ...]:
    pairs: Counter[tuple[str, ...]] = Counter()
    for swap in turns:
        for name in swap.out:
            pairs[tuple(sorted((swap.model, name)))] += 1
    heaviest = max(sorted(pairs), key=lambda pair: pairs[pair])
    return (*heaviest, *sorted(circle - set(heaviest)))


def latency_s(row: RequestRow) -> float:
    return row.waited_s + (row.first_byte_s or 0.0)


def slow_requests(requests: Iterable[RequestRow]) -> list[RequestRow]:
    """Those whose first byte came much later than is usual for their model once it is there."""
    rows = list(requests)
    usual: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.start == "hot" and not row.before:
            usual[row.model].append(latency_s(row))
    limits = {model: max(SLOW_S_MIN, SLOW_FACTOR * statistics.median(seen)) for model, seen in usual.items()}
    return [row for row in rows if latency_s(row) > limits.get(row.model, SLOW_S_MIN)]


def follows(requests: Iterable[RequestRow]) -> list[Follows]:
    """Per model and the one served before it: the latency spike after another model, if there is one."""
    groups: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for row in requests:
        if row.start:
            groups[row.model, row.before].append(latency_s(row))
    found = []
    for (model, before), seen in sorted(groups.items()):
        if before:
            own = groups.get((model, ""), [0.0])
            found.append(Follows(model, before, len(seen), statistics.fmean(seen), statistics.fmean(own)))
    return sorted(found, key=lambda one: -one.count * (one.mean_s - one.others_mean_s))


def _short_mib(setup: Setup, device: str, circle: Iterable[str], beside: set[str], needs: Mapping[str, int]) -> int | None:
    """What is missing to hold them all beside those that stay anyway; negative = they would fit."""
    known = next((one for one in setup.devices if one.id == device), None)
    members = set(circle)
    pins = {model.id for model in setup.models if model.pinned and device in model.devices}
    if known is None or any(name not in needs for name in members):
        return None
    return sum(needs.get(name, 0) for name in members | pins | beside) - (known.capacity_mib - known.headroom_mib)


def sentence(one: Thrash) -> str:
    if is_rate(one.seconds):
        cost = f"{one.swaps_h:.0f} swaps an hour cost {_minutes(one.cost_s_h)} of it"
    else:
        cost = f"{one.swaps} swaps in {_minutes(one.seconds)} cost {_minutes(one.cost_s)} of it"
    if one.short_mib is not None and one.short_mib > 0:
        more = f"; {gib(one.short_mib)} more would hold {'both' if len(one.models) == 2 else 'all'}"
    elif one.short_mib is not None:
        more = "; there is room for all of them"
    else:
        more = ""
    return f"{turns_words(one.models, one.device)}: {cost}{more}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
