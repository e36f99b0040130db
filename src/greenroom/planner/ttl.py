"""How long idle models should stay: their gaps, what each choice would have cost, and the one to take."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from greenroom.core.facts import Model, Policy, Setup
from greenroom.core.idle import Gaps, bin_of, edge_s
from greenroom.ledger.rows import RequestRow, TransitionRow

from .figures import Span, length_s, stretch
from .sizes import needs_of

DAY_S = 86400.0
GIB = 1024.0
ENOUGH = 10  # gaps; fewer say nothing yet
LEAST_TTL_S = 1.0  # in a configuration 0 means never
GOOD = 1.02  # what costs so little more than the best is as good
LIKELY_S = (30.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 14400.0)
GAPS_AT_ONCE = 64
SHORT_BIN, LONG_BIN = bin_of(1.0), bin_of(7 * DAY_S)  # shown: gaps below count with the first, above with the last


@dataclass(frozen=True)
class Use:
    """One model's stretch of use."""

    model: str
    gaps_s: tuple[float, ...]  # between the end of all it had and the next request, in order
    busy_s: float
    need_mib: int
    up_s: float
    seconds: float  # looked at

    @cached_property
    def ordered_s(self) -> list[float]:
        return sorted(self.gaps_s)

    @cached_property
    def kept_s(self) -> list[float]:
        """What the shortest so many of them come to together; the first is none."""
        return list(accumulate(self.ordered_s, initial=0.0))

    def cost_of(self, stay_s: float) -> tuple[int, float]:
        """(cold starts, idle seconds) when it stays that long each time."""
        warm = bisect_right(self.ordered_s, stay_s)
        cold = len(self.ordered_s) - warm
        return cold, self.kept_s[warm] + (cold * stay_s if cold else 0.0)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a TTL would have cost over the same gaps, evictions by others left aside."""

    name: str
    ttl_s: float | None  # None = never stopped; of `auto`, the last it chose
    cold_starts: int
    idle_s: float
    use: Use
    remark: str = ""

    @property
    def cold_day(self) -> float:
        return self.cold_starts * DAY_S / max(1.0, self.use.seconds)

    @property
    def gib_hours_day(self) -> float:
        hours = (self.use.busy_s + self.idle_s) / 3600.0
        return self.use.need_mib / GIB * hours * DAY_S / max(1.0, self.use.seconds)

    def cost_s(self, worth_s: float) -> float:
        return self.idle_s + self.cold_starts * worth_s

    def plain(self) -> dict[str, Any]:
        return {
            "ttl": self.name,
            "ttl_s": None if self.ttl_s is None else round(self.ttl_s, 3),
            "cold_starts": self.cold_starts,
            "cold_starts_day": round(self.cold_day, 1),
            "gib_hours_day": round(self.gib_hours_day, 2),
            "remark": self.remark,
        }


@dataclass(frozen=True, slots=True)
class TtlAdvice:
    model: str
    gaps: int
    now_s: float | None
    now_auto: bool
    suggested_s: float | None
    enough: bool
    why: str
    table: tuple[Choice, ...]
    bins: tuple[tuple[float, int], ...]  # upper edge in seconds, gaps up to it
    matters: bool = False  # something would be gained by the change

    def plain(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "gaps": self.gaps,
            "enough": self.enough,
            "now_s": self.now_s,
            "now_auto": self.now_auto,
            "matters": self.matters,
            "suggested_s": None if self.suggested_s is None else round(self.suggested_s, 3),
            "why": self.why,
            "bins": [{"from_s": round(low, 3), "n": count} for low, count in self.bins],
            "table": [choice.plain() for choice in self.table],
        }


def uses_of(
    setup: Setup, requests: Sequence[RequestRow], transitions: Sequence[TransitionRow], within: Span | None = None
) -> dict[str, Use]:
    begin, end = within or stretch(requests, transitions)
    needs = needs_of(setup, transitions)
    ups: defaultdict[str, list[float]] = defaultdict(list)
    for row in transitions:
        if row.kind == "start" and row.ok:
            ups[row.model].append(row.took_s)
    by_model: defaultdict[str, list[RequestRow]] = defaultdict(list)
    for request in requests:
        if request.generation:  # no engine here served the others: who is refused and asks again each second uses nothing
            by_model[request.model].append(request)
    found = {}
    for model in setup.models:
        rows = sorted(by_model.get(model.id, ()), key=lambda row: row.at)
        seen = ups.get(model.id)
        up_s = sum(seen) / len(seen) if seen else model.up_s
        busy_s = length_s((row.at + row.waited_s, row.at + row.duration_s) for row in rows)
        found[model.id] = Use(model.id, gaps_of(rows), busy_s, needs.get(model.id, 0), up_s, max(1.0, end - begin))
    return found


def gaps_of(rows: Iterable[RequestRow]) -> tuple[float, ...]:
    """Idle times before each next use, of one model's requests in order of arrival."""
    gaps = []
    until: float | None = None
    for row in rows:
        if until is not None and row.at > until:
            gaps.append(row.at - until)
        until = max(until or 0.0, row.at + row.duration_s)
    return tuple(gaps)


def fixed_ttl(use: Use, ttl_s: float | None, name: str = "", remark: str = "") -> Choice:
    stay_s = float("inf") if ttl_s is None else ttl_s
    return Choice(name or words(ttl_s), ttl_s, *use.cost_of(stay_s), use, remark)


def auto_ttl(use: Use, policy: Policy, half_life_s: float = DAY_S) -> Choice:
    """What `ttl: auto` would have done, learning as it went; nobody's lack of room taken into account.

    After many gaps a few more hardly change what is best, so it is not worked out anew after each.
    """
    gaps, now, worth_s = Gaps(half_life_s), 0.0, policy.ttl_worth * use.up_s
    cold, idle_s, stay_s = 0, 0.0, worth_s
    looks_at = policy.ttl_gaps_min
    for gap in use.gaps_s:
        if gaps.seen >= looks_at:
            stay_s = gaps.best_stay_s(worth_s)
            looks_at = gaps.seen + min(GAPS_AT_ONCE, max(1, gaps.seen // GAPS_AT_ONCE))
        cold += gap > stay_s
        idle_s += min(gap, stay_s)
        now += gap
        gaps.add(gap, now)
    return Choice("auto", stay_s, cold, idle_s, use, "follows the gaps as they change")


def clairvoyant(use: Use, worth_s: float) -> Choice:
    """Knows every gap beforehand: stays exactly through those that are cheaper than a start."""
    warm = bisect_right(use.ordered_s, worth_s)
    return Choice("clairvoyant", None, len(use.gaps_s) - warm, use.kept_s[warm], use)


def best_ttl(use: Use, worth_s: float) -> Choice:
    """The one TTL that costs least over all gaps, known beforehand."""
    gaps = use.ordered_s
    best_s, least = 0.0, len(gaps) * worth_s
    for number, gap in enumerate(gaps, start=1):
        cost = use.kept_s[number] + (len(gaps) - number) * (gap + worth_s)
        if cost < least:
            best_s, least = gap, cost
    return fixed_ttl(use, best_s)


def ttl_advice(
    setup: Setup, requests: Sequence[RequestRow], transitions: Sequence[TransitionRow], within: Span | None = None
) -> list[TtlAdvice]:
    """One per model that was used and may be stopped at all, those with most gaps first."""
    uses = uses_of(setup, requests, transitions, within)
    models: Mapping[str, Model] = {model.id: model for model in setup.models}
    crowded = {device for row in transitions if row.evicted_for for device in row.devices}
    used = [(models[name], use) for name, use in uses.items() if (use.gaps_s or use.busy_s) and not models[name].pinned]
    found = [_advice(model, use, setup.policy, is_wanted=not crowded.isdisjoint(model.devices)) for model, use in used]
    return sorted(found, key=lambda one: (-one.gaps, one.model))


def _advice(model: Model, use: Use, policy: Policy, *, is_wanted: bool) -> TtlAdvice:
    """`is_wanted`: somebody had to leave the memory that it may sit on, so that it matters who stays there."""
    worth_s = policy.ttl_worth * use.up_s
    gaps = Gaps.of(use.gaps_s)
    enough = gaps.seen >= ENOUGH
    suggested_s = max(LEAST_TTL_S, round_up(gaps.best_stay_s(worth_s))) if enough else worth_s
    now = fixed_ttl(use, model.ttl_s, remark="now") if not model.ttl_auto else None
    if now is not None and now.ttl_s and now.cost_s(worth_s) <= GOOD * fixed_ttl(use, suggested_s).cost_s(worth_s):
        suggested_s = now.ttl_s  # nothing to gain
    auto = auto_ttl(use, policy)
    best = fixed_ttl(use, suggested_s, remark="suggested" if enough else "as long as one start is worth")
    others = [fixed_ttl(use, ttl_s) for ttl_s in LIKELY_S if ttl_s not in (model.ttl_s, suggested_s)]
    mine = [now] if now is not None and now.ttl_s != suggested_s else []
    if now is not None and not mine:
        best = replace(best, remark=f"now, {best.remark}")
    table = [*mine, best, *others, auto]
    never = not model.ttl_auto and not model.ttl_s
    why = _why(model, use, gaps, suggested_s, now, worth_s) if enough else f"not enough seen yet: {gaps.seen} of {ENOUGH} gaps"
    if enough and never and not is_wanted:
        why += "; but nobody lacked its room, and so it may as well stay"
    return TtlAdvice(
        model.id,
        gaps.seen,
        model.ttl_s,
        model.ttl_auto,
        suggested_s if enough else None,
        enough,
        why,
        tuple(table),
        histogram(gaps),
        matters=enough and not model.ttl_auto and suggested_s != model.ttl_s and (is_wanted or not never),
    )


def _why(model: Model, use: Use, gaps: Gaps, suggested_s: float, now: Choice | None, worth_s: float) -> str:
    until = bisect_right(use.ordered_s, suggested_s)
    short, long = use.ordered_s[:until], use.ordered_s[until:]
    if not short:
        what = f"its gaps are longer than the {words(worth_s)} that one start of {use.up_s:.1f} s is worth, so keeping it saves nothing"
    elif not long:
        what = f"it came back within {words(short[-1])} every time, and a start of {use.up_s:.1f} s is worth {words(worth_s)} of stay"
    else:
        what = f"it comes back within {words(short[-1])} ({len(short)} of {gaps.seen} times) or not for {words(long[0])}"
    best = fixed_ttl(use, suggested_s)
    if now is None:
        return what
    if now.ttl_s == suggested_s:
        return f"{what}; leave it"
    if now.cold_starts == best.cold_starts and best.gib_hours_day < 0.98 * now.gib_hours_day:
        return f"{what}; {words(model.ttl_s)} keeps memory through gaps that end in a cold start anyway"
    if best.cold_starts < now.cold_starts:
        return f"{what}; {words(model.ttl_s)} costs {now.cold_starts - best.cold_starts} cold starts more"
    return what


def histogram(gaps: Gaps) -> tuple[tuple[float, int], ...]:
    """Bins of one octave between the shortest and the longest gap: lower edge and how many."""
    octaves: defaultdict[int, int] = defaultdict(int)
    for number, count in gaps.counts.items():
        octaves[(min(LONG_BIN, max(SHORT_BIN, number)) + 1) // 2] += round(count)
    if not octaves:
        return ()
    return tuple((edge_s(2 * number - 2), octaves.get(number, 0)) for number in range(min(octaves), max(octaves) + 1))


def round_up(seconds: float) -> float:
    """To a figure that people would write."""
    steps = (0, 1, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 300, 420, 600, 900, 1200, 1800, 2700, 3600, 5400, 7200, 10800)
    return float(next((step for step in steps if step >= seconds * 0.99), seconds))


def words(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 1 or not seconds else f"{seconds:.2g} s"
    if seconds < 3600:
        minutes = seconds / 60
        return f"{minutes:.0f} min" if abs(minutes - round(minutes)) < 0.05 else f"{minutes:.1f} min"
    hours = seconds / 3600
    return f"{hours:.0f} h" if abs(hours - round(hours)) < 0.05 else f"{hours:.1f} h"
