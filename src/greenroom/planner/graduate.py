"""What each model would become on a cluster, and what that costs in GPUs: from what was measured and what was asked for.

Nothing here argues for leaving: whether one box is too small is `outgrown`'s to say.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from greenroom.core.facts import Device, Model, Setup
from greenroom.ledger.rows import RequestRow

from .figures import HOUR_S, Span, length_s, percentile

SLOT_S = 300.0  # demand is averaged over this before its peak is taken
PEAK_PERCENT = 95.0
BUSY_MAX = 0.8  # of a replica's slots that a peak may fill: queues grow without bound near 1
OCCASIONAL = 0.05  # of the time with a request in flight; below it a GPU of its own is idle nearly always
SMALL = 0.25  # of a GPU; below it a GPU of its own is empty nearly everywhere
GPU_ROOM = 0.92  # of a GPU's memory that an engine gets; contexts and fragments take the rest
COPIES_MAX = 64
SIGNALS = ("outgrown", "capacity")  # verdicts that a cluster answers


@dataclass(frozen=True, slots=True)
class Future:
    """One model.  `becomes`: pool (replicas of its own, always there) | zero (scaled to none while nobody asks) | stay (with greenroom)."""

    model: str
    becomes: str
    why: str
    replicas: int  # of a pool; at most this many of one scaled to zero
    gpus: int  # of one replica
    need_mib: int | None  # of one replica in all, as far as it is known
    need_source: str
    requests_h: float
    mean: float  # requests in flight
    peak: float  # PEAK_PERCENT of slots
    busy_share: float  # of the time with one in flight
    parallel: int

    @property
    def held(self) -> int:
        """GPUs that it holds whether somebody asks or not."""
        return self.gpus * self.replicas if self.becomes == "pool" else 0

    @property
    def at_most(self) -> int:
        return 0 if self.becomes == "stay" else self.gpus * self.replicas


@dataclass(frozen=True, slots=True)
class Graduation:
    """`ready`: the signal is there."""

    ready: bool
    text: str
    futures: tuple[Future, ...]
    gpus_now: int
    gpus_held: int
    gpus_at_most: int
    gpu_mib: int
    hours: float

    def plain(self) -> dict[str, Any]:
        rows = [{**asdict(one), "held": one.held, "at_most": one.at_most} for one in self.futures]
        return {**{name: getattr(self, name) for name in self.__slots__ if name != "futures"}, "models": rows}


def graduation(
    setup: Setup,
    requests: Sequence[RequestRow],
    within: Span,
    outgrown: Mapping[str, Any],
    *,
    gpu_mib: int | None = None,
    poolable: frozenset[str] | None = None,
) -> Graduation:
    """`outgrown`: that verdict as plain values; `gpu_mib`: of the cluster's GPUs, default the largest here; `poolable`: models
    whose engines scale in a cluster (None = all)."""
    here = [device for device in setup.devices if device.kind != "ram"]
    size = gpu_mib or max((whole(device) for device in here), default=0)
    by_model: defaultdict[str, list[RequestRow]] = defaultdict(list)
    for row in requests:
        by_model[row.model].append(row)
    futures = tuple(
        future(model, by_model[model.id], within, setup, size, poolable is None or model.id in poolable) for model in setup.models
    )
    ready = outgrown.get("verdict") in SIGNALS
    held, most = sum(one.held for one in futures), sum(one.at_most for one in futures)
    return Graduation(
        ready, said(ready, outgrown, held, most, len(here)), futures, len(here), held, most, size, (within[1] - within[0]) / HOUR_S
    )


def whole(device: Device) -> int:
    return device.total_mib or device.capacity_mib


def said(ready: bool, outgrown: Mapping[str, Any], held: int, most: int, now: int) -> str:
    """One or two sentences."""
    cost = (
        f"{held} {'GPU' if held == 1 else 'GPUs'} held all the time" + (f", up to {most}" if most > held else "") + f", in place of {now}"
    )
    takes = f"A cluster would take {cost}" if most else "None of the models would go to a cluster"
    if ready:
        return f"{outgrown.get('text', '')}. {takes}."
    why = outgrown.get("text") or "nothing was seen yet"
    return f"Not now: {why}. {takes}{', and would not end what tuning can' if most else ''}."


def future(model: Model, rows: Sequence[RequestRow], within: Span, setup: Setup, gpu_mib: int, poolable: bool) -> Future:
    span_s = max(1.0, within[1] - within[0])
    mean, peak, busy = demand(rows, within)
    need, source = need_of(model, setup)
    gpus = gpus_for(need, model, gpu_mib)
    copies = min(COPIES_MAX, max(1, math.ceil(round(peak / (model.parallel * BUSY_MAX), 6))))
    becomes, why = destiny(model, rows, busy, need, gpu_mib, poolable, setup)
    return Future(
        model=model.id,
        becomes=becomes,
        why=why,
        replicas=copies,
        gpus=gpus,
        need_mib=need,
        need_source=source,
        requests_h=round(len(rows) / span_s * HOUR_S, 1),
        mean=round(mean, 3),
        peak=round(peak, 3),
        busy_share=round(busy, 4),
        parallel=model.parallel,
    )


def demand(rows: Sequence[RequestRow], within: Span) -> tuple[float, float, float]:
    """(mean, peak, share of the time) of requests in flight, waits left out.

    A request that was refused counts with the mean of those that were served: it was wanted all the same.
    """
    served = [row for row in rows if row.start]
    usual_s = sum(row.duration_s - row.waited_s for row in served) / len(served) if served else 0.0
    spans = [(row.at, row.at + max(0.0, row.duration_s - row.waited_s if row.start else usual_s)) for row in rows]
    span_s = max(1.0, within[1] - within[0])
    slots = max(1, math.ceil(span_s / SLOT_S))
    filled = [0.0] * slots
    for begin, end in spans:
        first = max(0, int((begin - within[0]) // SLOT_S))
        for slot in range(first, min(slots, int((end - within[0]) // SLOT_S) + 1)):
            low = within[0] + slot * SLOT_S
            filled[slot] += max(0.0, min(end, low + SLOT_S) - max(begin, low)) / SLOT_S
    return sum(end - begin for begin, end in spans) / span_s, percentile(sorted(filled), PEAK_PERCENT), length_s(spans) / span_s


def need_of(model: Model, setup: Setup) -> tuple[int | None, str]:
    """MiB of one instance over all its devices."""
    if model.need_mib is not None:
        return model.need_mib * model.devices_count, model.need_source
    sizes = [whole(device) for device in setup.devices if device.id in model.devices and device.kind != "ram"]
    return (max(sizes) * model.devices_count, "the whole device") if sizes else (None, "unknown")


def gpus_for(need_mib: int | None, model: Model, gpu_mib: int) -> int:
    """Of one replica: a power of two, for tensor parallel wants heads shared out evenly."""
    if need_mib is None or not gpu_mib:
        return model.devices_count
    # What fills one of today's devices fills one of the same size, whatever room is wanted beside it.
    least = max(1, math.ceil(round(min(need_mib / (gpu_mib * GPU_ROOM), max(model.devices_count, need_mib / gpu_mib)), 6)))
    return 1 << (least - 1).bit_length()


def destiny(
    model: Model, rows: Sequence[RequestRow], busy: float, need_mib: int | None, gpu_mib: int, poolable: bool, setup: Setup
) -> tuple[str, str]:
    """(becomes, why)"""
    kinds = {device.kind for device in setup.devices if device.id in model.devices}
    if not rows:
        return "stay", "nobody asked for it in that time"
    if kinds == {"ram"}:
        return "stay", "it runs on the CPU"
    if need_mib is not None and gpu_mib and need_mib < SMALL * gpu_mib:
        return "stay", f"it fills {need_mib / gpu_mib:.0%} of a GPU: keep it with others on one card, or give it a MIG slice"
    if not poolable:
        return "stay", "endpoint pickers do not read its engine's figures"
    if busy < OCCASIONAL:
        return "zero", f"it is busy {busy:.1%} of the time: no GPU while nobody asks, and a cold start for whoever does"
    return "pool", f"it is busy {busy:.0%} of the time"
