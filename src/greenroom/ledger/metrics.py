"""Figures for Prometheus: counts kept from the ledger's rows, gauges read from a View at each scrape.

    metrics = Metrics()
    ledger.listeners.append(metrics)                       # rows, on the writer's thread
    text = metrics.text(view, about, requests)             # on the loop; asks no engine, wakes nothing

Names, labels and meanings stand in METRICS and do not change.  Series are bounded: one set for each model of the
configuration, MODELS_MAX at most; labels other than `model` and `device` take few values.
"""

from __future__ import annotations

import re
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from greenroom.core.facts import State
from greenroom.core.views import ModelView, View

from . import packs
from .packs import Pack
from .rows import TransitionRow

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MODELS_MAX: Final = 1000
SHARE_S: Final = 300.0  # swap-time share looks back so far
INTERVALS_MAX: Final = 4096  # transitions of one device within it
MIB: Final = 1 << 20
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
CAUSES: Final = ("queue", "gate", "load", "wake")
# Where these stand among the values of a RequestRow.
MODEL, QUEUE_S, WAKE_S, FIRST_BYTE_S, TOKENS_IN, TOKENS_OUT, START, OUTCOME, STATUS = 2, 7, 10, 11, 13, 14, 15, 16, 17
CLASSES: Final = ("1xx", "2xx", "3xx", "4xx", "5xx")  # of status
ALWAYS: Final = frozenset({"2xx", "4xx", "5xx"})  # told at 0, too: the first one is an increase
COUNTS: Final = {kind: f"greenroom_{kind}s_total" for kind in ("start", "wake", "sleep", "stop")}
TIMES: Final = {"start": "greenroom_start_seconds", "wake": "greenroom_wake_seconds"}
STEP_MODELS: Final = 50  # rendered between two breaths
RISING: Final = frozenset({State.STARTING, State.WAKING, State.GOING_TO_SLEEP, State.STOPPING})

# How the core's sentences begin -> why a model left.
REASONS: Final = (
    ("idle", "idle"),
    ("asked by an operator", "operator"),
    ("unloaded by an operator", "operator"),
    ("greenroom is shutting down", "shutdown"),
    ("its first sleep", "rehearsal"),
    ("it fell asleep by itself", "doze"),
    ("it ended by itself", "ended"),
    ("it does not end", "ended"),
    ("everybody who waited", "unwanted"),
    ("there was no room to wake it", "no_room"),
)


@dataclass(frozen=True, slots=True)
class Metric:
    kind: str  # gauge | counter | histogram | summary
    labels: tuple[str, ...]
    help: str


METRICS: Final[Mapping[str, Metric]] = {
    "greenroom_build_info": Metric("gauge", ("version",), "Always 1; the label tells the version."),
    "greenroom_uptime_seconds": Metric("gauge", (), "Since the server started."),
    "greenroom_models": Metric("gauge", ("state",), "Models in each state."),
    "greenroom_models_left_out": Metric("gauge", (), f"Models beyond the first {MODELS_MAX}, which have no series of their own."),
    "greenroom_model_state": Metric("gauge", ("model", "state"), "1 for the state a model is in; the others have no series."),
    "greenroom_model_queue": Metric("gauge", ("model",), "Requests that wait for a model."),
    "greenroom_model_queue_oldest_seconds": Metric("gauge", ("model",), "Age of the oldest request that waits for a model."),
    "greenroom_model_in_flight": Metric("gauge", ("model",), "Requests an engine is answering."),
    "greenroom_model_reserved_bytes": Metric("gauge", ("model", "device"), "Memory booked for a model."),
    "greenroom_model_measured_bytes": Metric("gauge", ("model", "device"), "Memory a model's engine was measured to hold."),
    "greenroom_model_quarantined": Metric("gauge", ("model",), "1 while a model is not started because it ran out of memory repeatedly."),
    "greenroom_sleepers_host_bytes": Metric("gauge", (), "Host RAM that sleeping engines hold."),
    "greenroom_device_capacity_bytes": Metric("gauge", ("device",), "Memory of a device that may be planned with, headroom included."),
    "greenroom_device_headroom_bytes": Metric("gauge", ("device",), "Part of the capacity that is never booked."),
    "greenroom_device_reserved_bytes": Metric("gauge", ("device",), "Memory booked on a device."),
    "greenroom_device_used_bytes": Metric("gauge", ("device",), "Memory in use on a device by everybody, as measured."),
    "greenroom_device_outside_bytes": Metric("gauge", ("device",), "Memory that others than our engines hold."),
    "greenroom_device_available_bytes": Metric("gauge", ("device",), "Host RAM that can be taken without swapping."),
    "greenroom_device_lane_busy": Metric("gauge", ("device",), "1 while a model comes or goes on a device."),
    "greenroom_device_swap_ratio": Metric("gauge", ("device",), "Share of the last 5 minutes in which models came or went on a device."),
    "greenroom_device_thrashing_models": Metric("gauge", ("device",), "Models that take turns on a device at the moment."),
    "greenroom_queue": Metric("gauge", (), "Requests that wait, of all models."),
    "greenroom_queue_oldest_seconds": Metric("gauge", (), "Age of the oldest request that waits."),
    "greenroom_requests_total": Metric(
        "counter", ("model", "outcome"), "Requests that ended: ok, client_gone, engine_broke, cut, refused."
    ),
    "greenroom_answers_total": Metric(
        "counter", ("model", "status"), "Requests that ended ok, by class of the status that they were answered with: 1xx to 5xx."
    ),
    "greenroom_tokens_total": Metric("counter", ("model", "direction"), "Tokens as engines counted them; in: prompt, out: answer."),
    "greenroom_requests_without_tokens_total": Metric("counter", ("model",), "Requests answered with 200 whose engine told no tokens."),
    "greenroom_starts_total": Metric("counter", ("model", "reason"), "Starts that got ready; request: somebody waited, ahead: nobody yet."),
    "greenroom_wakes_total": Metric("counter", ("model", "reason"), "Wakes that got ready; reasons as of starts."),
    "greenroom_sleeps_total": Metric(
        "counter", ("model", "reason"), "Engines put to sleep: evicted, idle, operator, rehearsal, doze, other."
    ),
    "greenroom_stops_total": Metric(
        "counter",
        ("model", "reason"),
        "Engines that ended: evicted, idle, operator, shutdown, unwanted, no_room, ended (by itself), other.",
    ),
    "greenroom_evictions_total": Metric("counter", ("model",), "Times a model left, asleep or stopped, because another needed its room."),
    "greenroom_failures_total": Metric("counter", ("model", "cause"), "Starts, wakes, sleeps and engines that failed, by cause."),
    "greenroom_out_of_memory_total": Metric("counter", ("model",), "Failures for want of device memory."),
    "greenroom_crashes_total": Metric("counter", ("model",), "Engines that ended by themselves or answered nobody any more."),
    "greenroom_wake_failures_total": Metric("counter", ("model",), "Wakes that did not get ready."),
    "greenroom_start_seconds": Metric("summary", ("model",), "Duration of starts that got ready."),
    "greenroom_wake_seconds": Metric("summary", ("model",), "Duration of wakes that got ready."),
    "greenroom_wait_seconds": Metric(
        "histogram", ("cause",), "Of each ended request that was admitted, what it waited for: once in each cause."
    ),
    "greenroom_first_byte_seconds": Metric("histogram", (), "From the admission of a request to the first byte of its answer."),
    "greenroom_ledger_dropped_total": Metric("counter", (), "Entries that the ledger could not take in; counts above lack them."),
}

Requests: TypeAlias = Callable[[str], Mapping[str, int]]  # model -> outcome -> requests


class Histogram:
    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def take(self, value: float) -> None:
        self.counts[bisect_left(BUCKETS, value)] += 1
        self.total += value

    def take_all(self, values: Sequence[float]) -> None:
        """For many values, a tenth of the cost."""
        ordered = sorted(values)
        below = 0
        for place, edge in enumerate(BUCKETS):
            until = bisect_right(ordered, edge, below)
            self.counts[place] += until - below
            below = until
        self.counts[-1] += len(ordered) - below
        self.total += sum(ordered)


@dataclass(slots=True)
class Tally:
    """Of one model, since the server started."""

    tokens: list[int] = field(default_factory=lambda: [0, 0])
    untold: int = 0
    answers: Counter[str] = field(default_factory=Counter)  # by class of status
    moves: Counter[tuple[str, str]] = field(default_factory=Counter)  # (start | wake | sleep | stop, reason)
    evictions: int = 0
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)  # (start | wake | sleep | stop, cause)
    took: dict[str, list[float]] = field(default_factory=dict)  # start | wake -> count, seconds


class Metrics:
    """`ended` and `moved` are called on one thread, the rest on another."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._lock = threading.Lock()
        self._tallies: dict[str, Tally] = {}
        self._waits = {cause: Histogram() for cause in CAUSES}
        self._first_byte = Histogram()
        self._swaps: dict[str, deque[tuple[float, float]]] = {}  # device -> (from, until), by their ends

    # ------------------------------------------------------------------ rows in

    def ended(self, requests: Sequence[Sequence[Any]]) -> None:
        """Requests that ended: the values that RequestRows are made from."""
        at_once = 0
        waits = tuple(self._waits.values())
        with self._lock:
            for row in requests:
                if not row[START]:
                    continue  # it was never admitted
                waited = row[QUEUE_S : WAKE_S + 1]
                if any(waited):
                    for histogram, waited_s in zip(waits, waited, strict=True):
                        histogram.take(waited_s)
                else:
                    at_once += 1
                if row[FIRST_BYTE_S] is not None:
                    self._first_byte.take(row[FIRST_BYTE_S])
                tally = self._tallies.get(row[MODEL]) or self._tally(row[MODEL])
                tokens_in, tokens_out = row[TOKENS_IN], row[TOKENS_OUT]
                if tokens_in is None and tokens_out is None:
                    tally.untold += row[STATUS] == 200
                else:
                    tally.tokens[0] += tokens_in or 0
                    tally.tokens[1] += tokens_out or 0
                if row[OUTCOME] == "ok" and row[STATUS]:
                    tally.answers[class_of(row[STATUS])] += 1
            for histogram in waits:
                histogram.counts[0] += at_once

    def packed(self, pack: Pack) -> None:
        """Many requests that were admitted at once and ended well."""
        first_byte_s, tokens_in, tokens_out = (pack.columns[place] for place in (packs.FIRST_BYTE_S, packs.TOKENS_IN, packs.TOKENS_OUT))
        told = first_byte_s if None not in first_byte_s else [one for one in first_byte_s if one is not None]
        with self._lock:
            for histogram in self._waits.values():
                histogram.counts[0] += len(pack)
            self._first_byte.take_all(told)
            tally = self._tally(pack.model)
            tally.tokens[0] += _sum(tokens_in)
            tally.tokens[1] += _sum(tokens_out)
            tally.answers[class_of(packs.STATUS)] += len(pack)
            if None in tokens_in:
                tally.untold += sum(one is None and other is None for one, other in zip(tokens_in, tokens_out, strict=True))

    def moved(self, row: TransitionRow) -> None:
        """A transition that ended."""
        with self._lock:
            self._moved(row)

    def _tally(self, model: str) -> Tally:
        tally = self._tallies.get(model)
        if tally is None:
            tally = self._tallies[model] = Tally()
        return tally

    def _moved(self, row: TransitionRow) -> None:
        tally = self._tally(row.model)
        if row.cause:
            tally.failures[row.kind, row.cause] += 1
        if row.ok or (row.kind == "stop" and row.cause):
            tally.moves[row.kind, reason_of(row)] += 1
        if row.ok and row.kind in ("start", "wake"):
            took = tally.took.setdefault(row.kind, [0, 0.0])
            took[0] += 1
            took[1] += row.took_s
        tally.evictions += row.kind in ("sleep", "stop") and bool(row.evicted_for)
        for device in row.devices:
            self._swaps.setdefault(device, deque(maxlen=INTERVALS_MAX)).append((row.at, row.at + row.took_s))

    # ------------------------------------------------------------------ text out

    def text(self, view: View, *, version: str, uptime_s: float, requests: Requests, dropped: int = 0) -> str:
        """All series.  Counts of models that are not configured any more are forgotten."""
        page = Page()
        for _ in self.fill(page, view, version=version, uptime_s=uptime_s, requests=requests, dropped=dropped):
            pass
        return page.text()

    def fill(self, page: Page, view: View, *, version: str, uptime_s: float, requests: Requests, dropped: int = 0) -> Iterator[None]:
        """As `text`, in steps of some milliseconds: the caller may do something else between them."""
        page.add("greenroom_build_info", f'{{version="{escaped(version)}"}}', 1)
        page.add("greenroom_uptime_seconds", "", uptime_s)
        page.add("greenroom_queue", "", view.queue_length)
        page.add("greenroom_queue_oldest_seconds", "", view.queue_oldest_s)
        page.add("greenroom_ledger_dropped_total", "", dropped)
        shown = view.models[:MODELS_MAX]
        page.add("greenroom_models_left_out", "", len(view.models) - len(shown))
        states = Counter(model.state for model in view.models)
        for state in State:
            page.add("greenroom_models", f'{{state="{state.value}"}}', states[state])
        asleep_mib = sum(one.host_mib for model in view.models for one in model.instances if one.state is State.ASLEEP)
        page.add("greenroom_sleepers_host_bytes", "", asleep_mib * MIB)
        known = {model.id for model in view.models}
        with self._lock:
            for id in self._tallies.keys() - known:
                del self._tallies[id]
            self._devices(page, view)
            for cause, waits in self._waits.items():
                page.histogram("greenroom_wait_seconds", f'cause="{cause}"', waits)
            page.histogram("greenroom_first_byte_seconds", "", self._first_byte)
        for start in range(0, len(shown), STEP_MODELS):
            yield
            with self._lock:
                for model in shown[start : start + STEP_MODELS]:
                    self._model(page, model, requests(model.id))

    def _model(self, page: Page, model: ModelView, outcomes: Mapping[str, int]) -> None:
        head = f'{{model="{escaped(model.id)}"'
        alone = head + "}"
        add = page.add
        in_flight = 0
        held: dict[str, dict[str, int]] = {"greenroom_model_reserved_bytes": {}, "greenroom_model_measured_bytes": {}}
        for one in model.instances:
            in_flight += one.in_flight
            for sums, mibs in zip(held.values(), (one.reserved_mib, one.measured_mib), strict=True):
                for device, mib in mibs.items():
                    sums[device] = sums.get(device, 0) + mib
        add("greenroom_model_state", f'{head},state="{model.state.value}"}}', 1)
        add("greenroom_model_queue", alone, model.queued)
        add("greenroom_model_queue_oldest_seconds", alone, model.oldest_s)
        add("greenroom_model_in_flight", alone, in_flight)
        add("greenroom_model_quarantined", alone, int(model.quarantined))
        for name, sums in held.items():
            for device, mib in sums.items():
                add(name, f'{head},device="{escaped(device)}"}}', mib * MIB)
        for outcome, count in outcomes.items():
            add("greenroom_requests_total", f'{head},outcome="{outcome}"}}', count)
        tally = self._tallies.get(model.id)
        if tally is not None:
            self._tallied(page, head, alone, tally)

    def _tallied(self, page: Page, head: str, alone: str, tally: Tally) -> None:
        add = page.add
        for direction, count in zip(("in", "out"), tally.tokens, strict=True):
            add("greenroom_tokens_total", f'{head},direction="{direction}"}}', count)
        for status, count in classes(tally.answers):
            add("greenroom_answers_total", f'{head},status="{status}"}}', count)
        add("greenroom_requests_without_tokens_total", alone, tally.untold)
        for (kind, reason), count in tally.moves.items():
            add(COUNTS[kind], f'{head},reason="{reason}"}}', count)
        add("greenroom_evictions_total", alone, tally.evictions)
        by_cause: dict[str, int] = {}
        wakes_failed = 0
        for (kind, cause), count in tally.failures.items():
            by_cause[cause] = by_cause.get(cause, 0) + count
            wakes_failed += count if kind == "wake" else 0
        for cause, count in by_cause.items():
            add("greenroom_failures_total", f'{head},cause="{cause}"}}', count)
        add("greenroom_out_of_memory_total", alone, by_cause.get("out-of-memory", 0) + by_cause.get("startup-memory", 0))
        add("greenroom_crashes_total", alone, by_cause.get("exited", 0) + by_cause.get("stalled", 0))
        add("greenroom_wake_failures_total", alone, wakes_failed)
        for kind, (times, seconds) in tally.took.items():
            add(TIMES[kind], alone, int(times), "_count")
            add(TIMES[kind], alone, seconds, "_sum")

    def _devices(self, page: Page, view: View) -> None:
        now = self._wall()
        moving: dict[str, list[tuple[float, float]]] = {}
        for model in view.models:
            for one in model.instances:
                if one.state in RISING:
                    for name in one.devices:
                        moving.setdefault(name, []).append((now - one.since_s, now))
        for device in view.devices:
            label = f'{{device="{escaped(device.id)}"}}'
            page.add("greenroom_device_capacity_bytes", label, device.capacity_mib * MIB)
            page.add("greenroom_device_headroom_bytes", label, device.headroom_mib * MIB)
            page.add("greenroom_device_reserved_bytes", label, device.reserved_mib * MIB)
            page.add("greenroom_device_outside_bytes", label, device.outside_mib * MIB)
            if device.used_mib is not None:
                page.add("greenroom_device_used_bytes", label, device.used_mib * MIB)
            if device.available_mib is not None:
                page.add("greenroom_device_available_bytes", label, device.available_mib * MIB)
            page.add("greenroom_device_lane_busy", label, int(bool(device.lane)))
            past = self._swaps.get(device.id, ())
            while past and past[0][1] < now - SHARE_S:
                past.popleft()
            in_turns = (len(one.models) for one in view.thrash if one.device == device.id)
            page.add("greenroom_device_thrashing_models", label, max(in_turns, default=0))
            page.add("greenroom_device_swap_ratio", label, covered([*past, *moving.get(device.id, ())], now - SHARE_S, now) / SHARE_S)


class Page:
    """Samples grouped by metric, as the format wants them."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {name: [] for name in METRICS}

    def add(self, name: str, labels: str, value: float, suffix: str = "") -> None:
        if value.__class__ is not int:
            value = round(value, 6)
        self._lines[name].append(f"{name}{suffix}{labels} {value}\n")

    def histogram(self, name: str, label: str, histogram: Histogram) -> None:
        lines, before, total = self._lines[name], f"{label}," if label else "", 0
        for edge, count in zip((*BUCKETS, "+Inf"), histogram.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{before}le="{edge}"}} {total}\n')
        labels = f"{{{label}}}" if label else ""
        lines.append(f"{name}_sum{labels} {round(histogram.total, 6)}\n{name}_count{labels} {total}\n")

    def text(self) -> str:
        parts: list[str] = []
        for name, metric in METRICS.items():
            parts.append(f"# HELP {name} {metric.help}\n# TYPE {name} {metric.kind}\n")
            parts += self._lines[name]
        return "".join(parts)


def class_of(status: int) -> str:
    return CLASSES[min(status // 100, len(CLASSES)) - 1]


def classes(answers: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    return ((status, answers.get(status, 0)) for status in CLASSES if status in ALWAYS or status in answers)


def reason_of(row: TransitionRow) -> str:
    """The class of why a transition was made."""
    if row.kind in ("start", "wake"):
        return "request" if row.waiters else "ahead"
    if row.evicted_for:
        return "evicted"
    return next((name for words, name in REASONS if row.reason.startswith(words)), "other")


def _sum(counts: Sequence[int | None]) -> int:
    return sum(counts) if None not in counts else sum(one or 0 for one in counts)  # type: ignore[arg-type]


def covered(intervals: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds between `begin` and `end` that lie in at least one interval."""
    total: float = 0.0
    reached = begin
    for since, until in sorted(intervals):
        since, until = max(since, reached), min(until, end)
        if until > since:
            total += until - since
            reached = until
    return total


_PLAIN: Final = re.compile(r"[\w./:@+ -]*", re.ASCII).fullmatch
_ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def escaped(value: str) -> str:
    """As the value of a label: whatever the name, it stays one value on one line."""
    if _PLAIN(value):
        return value
    return value.encode("utf-8", "replace").decode().translate(_ESCAPES).replace("\r", "\\r")


__all__: Sequence[str] = (
    "CONTENT_TYPE",
    "METRICS",
    "MODELS_MAX",
    "Metrics",
    "Page",
    "class_of",
    "classes",
    "covered",
    "escaped",
    "reason_of",
)
