"""Whether tuning can still help, or the machine is simply too small for what is asked of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from greenroom.core.facts import Setup
from greenroom.ledger.rows import RequestRow, TransitionRow

from .figures import HOUR_S, Span, busy_s, stretch

SHARE_MAX = 0.25  # of device time in moves that somebody waited for
DEMAND_MIN = 0.75  # of the time, every model is wanted
SPAN_S_MIN = 0.9 * HOUR_S
SLOT_S = 60.0  # whoever was wanted within this is wanted all through it
MOST = 0.9  # models that made so many of the requests count as all of them
CAPACITY_SHARE = 0.5  # of all waiting, in line for a slot of a model that was there


@dataclass(frozen=True, slots=True)
class Measure:
    name: str
    value: float
    limit: float

    def plain(self) -> dict[str, Any]:
        return {"name": self.name, "value": round(self.value, 4), "limit": self.limit}


@dataclass(frozen=True, slots=True)
class Outgrown:
    """`verdict`: outgrown | capacity | tune | fits | unknown (not enough seen)."""

    verdict: str
    device: str
    measures: tuple[Measure, ...]
    text: str
    next_step: str = ""

    def plain(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "device": self.device,
            "text": self.text,
            "next_step": self.next_step,
            "measures": [measure.plain() for measure in self.measures],
        }


def demand_share(requests: Iterable[RequestRow], within: Span) -> tuple[float, tuple[str, ...]]:
    """How much of the time all models that matter were wanted at once, and who they are."""
    rows = list(requests)
    counts = Counter(row.model for row in rows)
    names, seen = [], 0
    for name, count in counts.most_common():
        if seen < MOST * len(rows):
            names.append(name)
        seen += count
    slots: defaultdict[int, set[str]] = defaultdict(set)
    begin = within[0]
    for row in rows:
        first, last = int((row.at - begin) // SLOT_S), int((row.at + row.duration_s - begin) // SLOT_S)
        slots[first].add(row.model)
        for slot in range(first + 1, last + 1):
            slots[slot].add(row.model)
    total = max(1, int((within[1] - begin) // SLOT_S))
    wanted = set(names)
    full = sum(0 <= slot < total and wanted <= seen for slot, seen in slots.items()) if wanted else total
    return full / total, tuple(names)


def capacity_share(requests: Iterable[RequestRow]) -> float:
    """Of all waiting, how much was in line for a slot of a model that was ready."""
    rows = list(requests)
    waited = sum(row.waited_s for row in rows)
    return sum(row.queue_s for row in rows if row.start == "hot") / waited if waited > 0 else 0.0


def outgrown(
    setup: Setup,
    requests: Sequence[RequestRow],
    transitions: Sequence[TransitionRow],
    *,
    best_share: float | None = None,
    within: Span | None = None,
) -> Outgrown:
    """The verdict on the busiest device; `best_share`: what the best replay with the same hardware still spends in moves."""
    begin, end = within or stretch(requests, transitions)
    span_s = max(1.0, end - begin)
    shares = {device: seconds / span_s for device, seconds in busy_s(transitions, (begin, end), waited=True).items()}
    device = max(sorted(shares), key=lambda name: shares[name], default=next((one.id for one in setup.devices), ""))
    on_it = {model.id for model in setup.models if device in model.devices}
    rows = [row for row in requests if row.model in on_it]
    share = shares.get(device, 0.0)
    demand, names = demand_share(rows, (begin, end))
    slots = capacity_share(rows)
    measures = [
        Measure("time in moves that somebody waited for", share, SHARE_MAX),
        Measure("all models wanted at once", demand, DEMAND_MIN),
        Measure("waiting in line for a slot of a ready model", slots, CAPACITY_SHARE),
    ]
    if best_share is not None:
        measures.append(Measure("best replay still in moves", best_share, SHARE_MAX))
    verdict, text, step = _verdict(device, span_s, share, demand, slots, best_share, names, rows)
    return Outgrown(verdict, device, tuple(measures), text, step)


def _verdict(
    device: str,
    span_s: float,
    share: float,
    demand: float,
    slots: float,
    best_share: float | None,
    names: Sequence[str],
    rows: Sequence[RequestRow],
) -> tuple[str, str, str]:
    minutes = f"{span_s / 60:.0f} min"
    waits_s = sum(row.waited_s for row in rows) / max(1, len(rows))
    if share <= SHARE_MAX and slots > CAPACITY_SHARE and waits_s > 1.0:
        waited: Counter[str] = Counter()
        for row in rows:
            waited[row.model] += int(row.queue_s * 1000) if row.start == "hot" else 0
        busiest = max(sorted(waited), key=lambda name: waited[name])
        text = f"{busiest} is there and its slots are taken: {slots:.0%} of all waiting is in line behind them, not for a place"
        return "capacity", text, f"give {busiest} a replica on another GPU, or raise its `parallel` if the engine has room for more"
    if span_s < SPAN_S_MIN:
        return "unknown", f"not enough seen yet: {minutes} of 60", ""
    if share <= SHARE_MAX:
        return "fits", f"{device} is not outgrown: {share:.0%} of {minutes} went into moves that somebody waited for", ""
    if demand < DEMAND_MIN or len(names) < 2:
        return "tune", f"{device} is not outgrown: {' and '.join(names)} were all wanted at once only {demand:.0%} of the time", ""
    if best_share is not None and best_share <= SHARE_MAX:
        return "tune", f"{device} is not outgrown: a replay with better settings spends {best_share:.0%} in moves", "take the suggested fix"
    text = (
        f"{device} has outgrown one card: for {minutes} {', '.join(names)} were wanted at once and {share:.0%} of the time "
        "went into changing them"
    )
    if best_share is not None:
        text += f"; the best settings that replay found still spend {best_share:.0%}"
    step = "a replica on another GPU (`greenroom generate compose`); beyond one machine, `greenroom generate llm-d` for Kubernetes"
    return "outgrown", text, step
