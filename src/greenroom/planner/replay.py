"""The journal played again: exactly as it was, or as it would have been under other settings.

Exactly: recorded events go into a fresh scheduler, whose actions must be the recorded ones.  What if: recorded arrivals
meet the same scheduler, or another rule, in virtual time, with engines that take what they were seen to take.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from greenroom.core.facts import Action, Admit, Device, Event, Model, Priority, Setup, SleepTier, Start, Wake
from greenroom.core.scheduler import Scheduler
from greenroom.ledger import codec
from greenroom.ledger.chronicle import Chronicle
from greenroom.ledger.rows import BootRow, EventRow, RequestRow, TransitionRow
from greenroom.ledger.schema import BEGAN

from .faults import CannotReplay
from .fifo import Fifo
from .figures import Figures, Span, figures_of, stretch
from .settings import changed
from .sizes import needs_of
from .virtual import Arrival, Decider, Play, Truth

BEGIN_S_MAX = 10.0  # from the start of a server to its first event; a later one is not the first
THINK_S_MAX = 10.0  # a client that asks again within this after its answer is taken to have waited for it
SERVICE_S = 1.0  # of a request of which nothing is known
DECIDERS: Mapping[str, Callable[[Setup, float], Decider]] = {"greenroom": Scheduler, "fifo": Fifo}


# ---------------------------------------------------------------------------------------------------------- exactly


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay first left what was recorded."""

    number: int  # of the event, from 0
    row: EventRow
    recorded: tuple[Action, ...]
    now: tuple[Action, ...]
    fault: str = ""  # the scheduler broke instead


@dataclass(frozen=True, slots=True)
class Exactly:
    """What an exact replay came to; `difference` None = the same to the last action."""

    events: int
    admissions: int
    swaps: int  # starts and wakes
    runs: int
    skipped: Mapping[str, int] = field(default_factory=dict)
    difference: Difference | None = None
    cut: int = 0  # runs that are not kept from their beginning: nothing of them counts before a scheduler began anew
    until: float | None = None  # unix seconds of the last event read; what came later was not written yet


def exactly(runs: Iterable[tuple[BootRow, Iterable[EventRow]]]) -> Exactly:
    """Replay each run of the server from its start, and anew from where its book was built anew; a reload is an event like any other.

    Raises CannotReplay where no run is kept from such a place, or the settings of one cannot be read.
    """
    skipped: Counter[str] = Counter()
    done = Exactly(0, 0, 0, 0)
    for boot, rows in runs:
        part = _exactly(boot, rows, skipped)
        done = Exactly(
            done.events + part.events,
            done.admissions + part.admissions,
            done.swaps + part.swaps,
            done.runs + part.runs,
            dict(skipped),
            part.difference,
            done.cut + part.cut,
            done.until if part.until is None else part.until,
        )
        if part.difference is not None:
            break
    if not done.runs:
        raise CannotReplay("no run of the server is kept from its beginning" if done.cut else "no run of the server is recorded")
    return done


def _exactly(boot: BootRow, rows: Iterable[EventRow], skipped: Counter[str]) -> Exactly:
    scheduler: Scheduler | None = None
    begins: Mapping[str, Any] | None = None  # the settings of a scheduler whose first event comes next
    number, admissions, swaps, runs, cut, until = 0, 0, 0, 0, 0, None
    difference: Difference | None = None
    for row in rows:
        if row.kind == BEGAN:
            scheduler, begins = None, row.event["setup"]
            continue
        until = row.at
        if scheduler is None:
            if begins is None and not cut and _is_first(boot, row):
                begins = boot.setup
            if begins is None:
                cut = 1
                continue
            scheduler, begins, runs = _begun(begins, row.clock), None, 1
        event = codec.event_from(row.event, skipped)
        if event is not None:
            recorded = codec.actions_from(row.actions, skipped)
            now, fault = _answer(scheduler, event)
            if fault or now != recorded:
                difference = Difference(number, row, recorded, now, fault)
                break
            admissions += sum(isinstance(action, Admit) for action in now)
            swaps += sum(isinstance(action, (Start, Wake)) for action in now)
        number += 1
    return Exactly(number, admissions, swaps, runs, {}, difference, cut, until)


def _is_first(boot: BootRow, row: EventRow) -> bool:
    """Where the journal does not tell: whether a run begins with this event, a tick or a look at the memory before it."""
    return not boot.marks and row.kind in ("Ticked", "MemoryMeasured") and row.clock - boot.clock <= BEGIN_S_MAX


def _begun(setup: Mapping[str, Any], at: float) -> Scheduler:
    try:
        return Scheduler(codec.setup_from(setup), at)
    except ValueError as fault:
        raise CannotReplay(str(fault)) from fault


def _answer(scheduler: Scheduler, event: Event) -> tuple[tuple[Action, ...], str]:
    """What it does, or the first line of why it broke."""
    try:
        return tuple(scheduler.handle(event)), ""
    except AssertionError as fault:
        return (), str(fault).partition("\n")[0] or "an invariant"


# ---------------------------------------------------------------------------------------------------------- what if


@dataclass(frozen=True, slots=True)
class Scene:
    """A load, the settings it met, and what the engines really take; times from 0."""

    setup: Setup
    load: tuple[Arrival, ...]
    truths: Mapping[str, Truth]
    seconds: float
    began_at: float = 0.0  # unix seconds

    def per_hour(self, count: float) -> float:
        return count * 3600.0 / max(1.0, self.seconds)


@dataclass(frozen=True, slots=True)
class Trial:
    """What one way of running a scene came to."""

    name: str
    figures: Figures
    requests: tuple[RequestRow, ...] = ()
    transitions: tuple[TransitionRow, ...] = ()


def scene_of(setup: Setup, requests: Sequence[RequestRow], transitions: Sequence[TransitionRow], within: Span | None = None) -> Scene:
    """What was recorded, as a load that other settings can meet.  Raises CannotReplay."""
    known = {model.id for model in setup.models}
    rows = sorted((row for row in requests if row.model in known), key=lambda row: row.at)
    if not rows:
        raise CannotReplay("no request is recorded in that time, so there is nothing to replay")
    began_at, end = within or stretch(rows, transitions)
    needs = needs_of(setup, transitions)
    learned = replace(setup, models=tuple(_learned(model, needs.get(model.id), transitions) for model in setup.models))
    truths = {model.id: replace(Truth.of(model), need_mib=None) for model in learned.models}
    load = _load(rows, began_at)
    return Scene(learned, load, truths, end - began_at, began_at)


def _learned(model: Model, need_mib: int | None, transitions: Iterable[TransitionRow]) -> Model:
    """With the times and the sizes that were seen."""
    took: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    residues: dict[int, int] = {}
    for row in transitions:
        if row.model != model.id or not row.ok:
            continue
        took[row.kind, row.level if row.kind in ("sleep", "wake") else 0].append(row.took_s)
        held = [row.mib.get(device, 0) for device in row.devices]
        if row.kind == "sleep" and held:
            residues[row.level] = max(held)

    def mean(kind: str, level: int, otherwise: float) -> float:
        seen = took.get((kind, level))
        return statistics.fmean(seen) if seen else otherwise

    tiers = tuple(
        SleepTier(
            tier.level,
            residues.get(tier.level, tier.residue_mib),
            tier.host_mib,
            mean("sleep", tier.level, tier.sleep_s),
            mean("wake", tier.level, tier.wake_s),
        )
        for tier in model.sleep
    )
    return replace(
        model, need_mib=need_mib, sleep=tiers, up_s=mean("start", 0, model.up_s), down_s=mean("stop", 0, model.down_s), queue_limit=10**9
    )


def _load(rows: Sequence[RequestRow], began_at: float) -> tuple[Arrival, ...]:
    """Arrivals; those of a client that waits for its answers follow them."""
    services: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.start:
            services[row.model].append(max(0.0, row.duration_s - row.waited_s))
    last: dict[str, int] = {}
    open_clients = _open_clients(rows)
    load = []
    for number, row in enumerate(rows):
        seen = services.get(row.model)
        service_s = max(0.0, row.duration_s - row.waited_s) if row.start else statistics.fmean(seen) if seen else SERVICE_S
        after, think_s = -1, 0.0
        if row.client and row.client not in open_clients and row.client in last:
            before = rows[last[row.client]]
            think_s = row.at - (before.at + before.duration_s)
            after = last[row.client] if think_s <= THINK_S_MAX else -1
        last[row.client] = number
        priority = Priority(row.priority) if row.priority else None
        load.append(Arrival(0.0 if after >= 0 else row.at - began_at, row.model, service_s, row.client, priority, after, think_s))
    return tuple(load)


def _open_clients(rows: Iterable[RequestRow]) -> set[str]:
    """Those that asked again before they had their answer: their requests follow nothing."""
    ends: dict[str, float] = {}
    found = set()
    for row in rows:
        if row.at < ends.get(row.client, float("-inf")) - 1e-6:
            found.add(row.client)
        ends[row.client] = max(ends.get(row.client, 0.0), row.at + row.duration_s)
    return found


def scene_of_trace(setup: Setup, text: str) -> Scene:
    """A CSV with `time,model` and, if known, `service_s`, `client`.  Raises CannotReplay."""
    rows = list(csv.DictReader(io.StringIO(text)))
    known = {model.id for model in setup.models}
    load = []
    for line, row in enumerate(rows, start=2):
        try:
            at, model = float(row.get("time") or row["t"]), row["model"]
            service_s = float(row.get("service_s") or SERVICE_S)
            if not (math.isfinite(at) and math.isfinite(service_s) and service_s >= 0):
                raise ValueError("no time")
        except (KeyError, TypeError, ValueError):
            raise CannotReplay(f"line {line} is no arrival: a trace has the columns time, model and, if known, service_s") from None
        if model not in known:
            raise CannotReplay(f"line {line}: there is no model {model!r} in these settings")
        load.append(Arrival(at, model, service_s, row.get("client") or ""))
    if not load:
        raise CannotReplay("the trace holds no arrival")
    load.sort(key=lambda one: one.at)
    first = load[0].at
    load = [replace(one, at=one.at - first) for one in load]
    models = tuple(replace(model, queue_limit=10**9) for model in setup.models)
    return Scene(replace(setup, models=models), tuple(load), {m.id: replace(Truth.of(m), need_mib=None) for m in models}, load[-1].at)


def setup_of_trace(text: str, *, memory_mib: int = 1500, need_mib: int = 1000, up_s: float = 2.0) -> Setup:
    """Settings for a trace without any: every model of one size, on a device for one of them."""
    names = sorted({row["model"] for row in csv.DictReader(io.StringIO(text)) if row.get("model")})
    device = Device("gpu0", "gpu", memory_mib, measured=False)
    return Setup((device,), tuple(Model(name, ("gpu0",), need_mib, base_mib=need_mib, up_s=up_s, down_s=0.0) for name in names))


def tried(
    scene: Scene,
    changes: Iterable[str] = (),
    *,
    policy: str = "greenroom",
    name: str = "",
    setup: Setup | None = None,
    keep: bool = True,
) -> Trial:
    """The scene under other settings.  Raises BadChange."""
    changes = tuple(changes)
    trial_setup = changed(setup or scene.setup, changes)
    truths = {model.id: scene.truths.get(model.id) or Truth.of(model) for model in trial_setup.models}
    if setup is not None:  # other tiers than those of the scene come with what they take
        truths = {model.id: replace(truths[model.id], tiers=model.sleep) for model in trial_setup.models}
    chronicle = Chronicle(trial_setup, scene.began_at)
    rows: list[Any] = []

    def hear(event: Event, actions: Sequence[Action]) -> None:
        rows.extend(chronicle.feed(event, actions))

    Play(trial_setup, scene.load, truths, decider=DECIDERS[policy], hear=[hear]).run()
    requests = tuple(row for row in rows if isinstance(row, RequestRow))
    transitions = tuple(row for row in rows if isinstance(row, TransitionRow))
    figures = figures_of(requests, transitions)
    title = name or ", ".join([*([policy] if policy != "greenroom" else []), *changes]) or "same settings"
    return Trial(title, figures, requests if keep else (), transitions if keep else ())
