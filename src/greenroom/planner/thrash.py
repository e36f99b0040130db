"""Models that keep taking each other's place: who, what it costs, and what would end it.

Told from rows alone.  Being slow is not thrashing: only models that came in for each other and left for each other
again are named, and only where that took a noticeable share of the device's time.
"""

from __future__ import annotations

import re
import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from greenroom.core.facts import Device, Model, Setup, SleepTier
from greenroom.core.moves import gib
from greenroom.core.thrash import is_rate, turns_words
from greenroom.ledger.rows import RequestRow, SampleRow, TransitionRow

from .figures import HOUR_S, Span, Swap, regrets_of, stretch, swaps_of
from .replay import Scene, Trial, tried

TURNS_MIN = 4  # swaps among the same models; fewer are no habit
SHARE_MIN = 0.1  # of the time from the first to the last of them
SPAN_S_MIN = 60.0
SLOW_S_MIN = 1.0
SLOW_FACTOR = 3.0  # against the median of the same model's requests that met it ready
CUT_MAX = 0.5  # of a model's memory
CUT_EASY = 0.25
MARGIN_MIB = 64
CARDS_GIB = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192)
BUS_MIB_S, RESIDUE_MIB = 20 * 1024, 1536  # of a sleep level that was never measured
LONG_TURNS = 5.0
GOOD_ENOUGH = 0.5  # a fix must leave at most so many of the swaps
WORSE_WAIT = 1.1

Contexts = Sequence[tuple[int, int]]  # (tokens, MiB freed on each device), the largest context first


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
    setup: Setup, requests: Sequence[RequestRow], transitions: Sequence[TransitionRow], within: Span | None = None
) -> list[Thrash]:
    """Everybody who takes turns, dearest first; nobody where it is merely slow."""
    begin, end = within or stretch(requests, transitions)
    swaps = swaps_of(requests, transitions)
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


def needs_of(setup: Setup, transitions: Iterable[TransitionRow]) -> dict[str, int]:
    """MiB per device that each model was booked with at its last start, or would be; models of unknown size are left out."""
    needs = {model.id: model.need_mib for model in setup.models if model.need_mib is not None}
    for row in transitions:
        if row.kind == "start" and row.ok and row.model in needs:
            held = [row.mib.get(device, 0) for device in row.devices]
            needs[row.model] = max([*held, 0]) or needs[row.model]
    return needs


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


# -------------------------------------------------------------------------------------------------------------- fixing


def fixed(
    one: Thrash,
    scene: Scene,
    *,
    commands: Mapping[str, Sequence[str]] | None = None,
    contexts: Mapping[str, Contexts] | None = None,
    samples: Sequence[SampleRow] = (),
) -> tuple[Thrash, Trial]:
    """The same with its ways out, each replayed on the same arrivals; and the replay of things as they are."""
    base = tried(scene, name="as it is", keep=False)
    fixes = [_checked(fix, scene, base) for fix in candidates(one, scene, commands or {}, contexts or {}, samples)]
    good = [fix for fix in fixes if _helps(fix, base)]
    best = min(good, key=lambda fix: (fix.cost, fix.swaps), default=None)
    ranked = sorted((replace(fix, suggested=fix is best) for fix in fixes), key=lambda fix: (not fix.suggested, fix.cost))
    return replace(one, fixes=tuple(ranked)), base


def _checked(fix: Fix, scene: Scene, base: Trial) -> Fix:
    trial = tried(scene, fix.changes if fix.setup is None else (), setup=fix.setup, keep=False)
    now, then = base.figures, trial.figures
    refused = then.refused - now.refused
    waits = f"mean wait {now.mean_s:.1f} → {then.mean_s:.1f} s, worst {now.worst_s:.0f} → {then.worst_s:.0f} s"
    effect = f"{refused} of {then.requests} requests would be refused" if refused > 0 else waits
    return replace(
        fix,
        effect=effect,
        swaps=then.switches,
        swaps_h=scene.per_hour(then.switches),
        is_rate=is_rate(scene.seconds),
        mean_wait_s=then.mean_s,
        p95_wait_s=then.p95_s,
        refused=max(0, refused),
        moving_share=then.waited_share,
    )


def _helps(fix: Fix, base: Trial) -> bool:
    assert fix.swaps is not None
    assert fix.p95_wait_s is not None
    fewer = fix.swaps <= GOOD_ENOUGH * base.figures.switches
    quicker = (fix.mean_wait_s or 0.0) <= GOOD_ENOUGH * base.figures.mean_s
    no_worse = fix.p95_wait_s <= WORSE_WAIT * base.figures.p95_s + 0.1
    return (fewer or (quicker and fix.kind == "sleep")) and no_worse and not fix.refused


def candidates(
    one: Thrash,
    scene: Scene,
    commands: Mapping[str, Sequence[str]],
    contexts: Mapping[str, Contexts],
    samples: Sequence[SampleRow] = (),
) -> list[Fix]:
    setup = scene.setup
    models = {model.id: model for model in setup.models}
    members = [models[name] for name in one.models if name in models]
    found: list[Fix] = []
    if one.short_mib is None:
        found += _declare(members, samples)
    elif one.short_mib <= 0:
        found += _together(setup, one)
    else:
        found += _raised(setup, one)
        found += _cuts(one, members, commands, contexts, _total_mib(setup, one.device))
    found += _sleepers(setup, members, commands)
    found.append(
        Fix(
            "turns",
            f"Longer turns (quantum_factor {setup.policy.quantum_factor:g} → {LONG_TURNS:g})",
            (f"scheduling.quantum_factor={LONG_TURNS:g}",),
            _scheduling_diff("quantum_factor", setup.policy.quantum_factor, LONG_TURNS),
            cost=2.0,
        )
    )
    found += _second_card(setup, one, members)
    found += [_pin(member, len(members)) for member in members[:2]]
    return found


def _scheduling_diff(name: str, before: float, after: float) -> tuple[str, ...]:
    return (" scheduling:", f"-  {name}: {before:g}", f"+  {name}: {after:g}")


def _total_mib(setup: Setup, device: str) -> int:
    return next((one.total_mib or one.capacity_mib for one in setup.devices if one.id == device), 0)


def _declare(members: Sequence[Model], samples: Iterable[SampleRow]) -> list[Fix]:
    """Models of unknown size take the whole device; what they were seen to hold says whether they must."""
    seen: defaultdict[str, int] = defaultdict(int)
    for row in samples:
        for name, mib in row.own_mib.items():
            seen[name] = max(seen[name], mib)
    unknown = [model for model in members if model.need_mib is None]
    if not unknown or any(not seen[model.id] for model in unknown):
        return []
    sizes = {model.id: int(seen[model.id] * 1.05) + 1 for model in unknown}
    diff = tuple(line for name, mib in sizes.items() for line in (f"   {name}:", f"+    memory: {mib}MiB"))
    names = " and ".join(f"{name} ({gib(mib)})" for name, mib in sizes.items())
    changes = tuple(f"models.{name}.memory={mib}MiB" for name, mib in sizes.items())
    return [Fix("declare", f"Declare the memory of {names}: of unknown size they take the whole device", changes, (" models:", *diff))]


def _together(setup: Setup, one: Thrash) -> list[Fix]:
    """They would fit: only a group keeps them apart."""
    apart = [group for group in setup.groups if len(group.members.intersection(one.models)) > 1 and group.swap]
    if not apart:
        return []
    groups = tuple(replace(group, swap=False) if group in apart else group for group in setup.groups)
    names = " and ".join(group.id for group in apart)
    diff = tuple(line for group in apart for line in (f"   {group.id}:", "-    swap: true", "+    swap: false"))
    return [
        Fix("group", f"Let them be resident together: group {names}, swap: false", (), (" groups:", *diff), replace(setup, groups=groups))
    ]


def _raised(setup: Setup, one: Thrash) -> list[Fix]:
    """A budget below what the device has may simply be too small."""
    assert one.short_mib is not None
    device = next((each for each in setup.devices if each.id == one.device), None)
    if device is None or device.total_mib is None:
        return []
    wanted = device.capacity_mib + one.short_mib + MARGIN_MIB
    if wanted > device.total_mib:
        return []
    both = "both" if len(one.models) == 2 else "all"
    text = f"Raise the budget of {device.id} from {gib(device.capacity_mib)} to {gib(wanted)} (it has {gib(device.total_mib)}): {both} stay"
    diff = (" devices:", f"   {device.id}:", f"-    memory: {device.capacity_mib}MiB", f"+    memory: {wanted}MiB")
    return [Fix("budget", text, (f"device.{device.id}.memory={wanted}MiB",), diff, cost=0.3)]


def _cuts(
    one: Thrash, members: Sequence[Model], commands: Mapping[str, Sequence[str]], contexts: Mapping[str, Contexts], total_mib: int
) -> list[Fix]:
    """What one member must give up so that all fit, the least painful first."""
    assert one.short_mib is not None
    found = []
    for model in members:
        need = model.need_mib or 0
        cut = one.short_mib + MARGIN_MIB
        share = cut / need if need else 1.0
        if share > CUT_MAX:
            continue
        what, left, diff = _cut_of_command(model.id, commands.get(model.id, ()), contexts.get(model.id, ()), need, cut, total_mib)
        text = f"{what}: {gib(need)} → {gib(left)}, and {'both' if len(members) == 2 else 'all'} stay"
        found.append(
            Fix("cut", text, (f"models.{model.id}.memory={left}MiB",), diff, cost=0.5 + share + (1.5 if share > CUT_EASY else 0.0))
        )
    return sorted(found, key=lambda fix: fix.cost)[:2]


def _cut_of_command(
    name: str, argv: Sequence[str], contexts: Contexts, need: int, cut: int, total_mib: int
) -> tuple[str, int, tuple[str, ...]]:
    """What to lower, by the flag that sets it; the MiB that it then needs; the changed lines."""
    line, left = _line(argv), need - cut
    share = re.search(r"--gpu-memory-utilization[= ](0?\.\d+|1(?:\.0*)?)", line)
    if share and total_mib:
        value = max(0.01, float(share.group(1)) - cut / total_mib)
        rounded = int(value * 100) / 100
        after = line.replace(share.group(0), share.group(0).replace(share.group(1), f"{rounded:.2f}"))
        return f"Lower the memory share of {name} from {share.group(1)} to {rounded:.2f}", left, _cmd_diff(name, line, after)
    context = re.search(r"(?:^| )(--max-model-len|--ctx-size|-c)[= ](\d+)(?= |$)", line)
    enough = next(((tokens, freed) for tokens, freed in contexts if freed >= cut), None)
    if context and enough is not None:
        tokens, freed = enough
        after = f"{line[: context.start(2)]}{tokens}{line[context.end(2) :]}"
        return (
            f"Cut the context of {name} from {context.group(2)} to {tokens}, which frees {gib(freed)}",
            need - freed,
            _cmd_diff(name, line, after),
        )
    declared = (" models:", f"   {name}:", f"-    memory: {need}MiB", f"+    memory: {left}MiB")
    if context and contexts:
        most = contexts[-1]
        what = f"Make {name} smaller, a context alone does not do it ({most[0]} tokens free {gib(most[1])})"
        return what, left, declared
    what = f"Cut the context of {name} (now {context.group(2)})" if context else f"Cut the context or the share of {name}"
    return what, left, declared


def _line(argv: Sequence[str]) -> str:
    """As a `cmd` in the configuration: quoted only where it must be, `${PORT}` as it is."""
    return " ".join(shlex.quote(word) if re.search(r"[\s'\"\\]", word) or not word else word for word in argv)


def _cmd_diff(name: str, before: str, after: str) -> tuple[str, ...]:
    return (" models:", f"   {name}:", f"-    cmd: {before}", f"+    cmd: {after}")


def _sleepers(setup: Setup, members: Sequence[Model], commands: Mapping[str, Sequence[str]]) -> list[Fix]:
    """Sleep instead of stop, where the engine is known to be able to and was not told to."""
    awake = [model for model in members if not model.sleep and model.need_mib and _could_sleep(commands.get(model.id, ()))]
    if not awake:
        return []
    slept = {model.id: (_prior(model.need_mib or 0),) for model in awake}
    models = tuple(replace(model, sleep=slept.get(model.id, model.sleep)) for model in setup.models)
    diff = tuple(line for model in awake for line in _sleep_diff(model.id, commands[model.id]))
    names = " and ".join(model.id for model in awake)
    text = f"Let {names} sleep instead of stop: weights wait in host RAM ({gib(sum(t[0].host_mib for t in slept.values()))})"
    return [Fix("sleep", text, (), (" models:", *diff), replace(setup, models=models), cost=1.0)]


def _could_sleep(argv: Sequence[str]) -> bool:
    words = " ".join(argv)
    return ("vllm" in words and "--enable-sleep-mode" not in words) or ("sglang" in words and "--enable-memory-saver" not in words)


def _sleep_diff(name: str, argv: Sequence[str]) -> tuple[str, ...]:
    line = _line(argv)
    flag = "--enable-sleep-mode" if "vllm" in line else "--enable-memory-saver"
    return (f"   {name}:", f"-    cmd: {line}", f"+    cmd: {line} {flag}")


def _prior(need_mib: int) -> SleepTier:
    weights = int(0.9 * need_mib)
    return SleepTier(1, min(RESIDUE_MIB, need_mib // 4), weights, weights / BUS_MIB_S, weights / BUS_MIB_S + 0.1)


def _second_card(setup: Setup, one: Thrash, members: Sequence[Model]) -> list[Fix]:
    moving = min((model for model in members if model.need_mib), key=lambda model: model.need_mib or 0, default=None)
    if moving is None or moving.devices_count > 1 or any(each.id == one.device and each.kind == "ram" for each in setup.devices):
        return []  # what runs on the CPU is not moved by a card alone
    size = next((card for card in CARDS_GIB if card * 1024 * 0.95 >= (moving.need_mib or 0)), None)
    if size is None:
        return []
    name = _fresh(setup)
    device = Device(name, "gpu", int(size * 1024 * 0.97), measured=False)
    models = tuple(replace(model, devices=(name,)) if model is moving else model for model in setup.models)
    diff = (" models:", f"   {moving.id}:", f"+    device: {name}")
    text = f"A second GPU for {moving.id}: {'an' if str(size).startswith('8') else 'a'} {size} GiB card is enough"
    return [Fix("second_gpu", text, (), diff, replace(setup, devices=(*setup.devices, device), models=models), cost=5.0)]


def _fresh(setup: Setup) -> str:
    names = {device.id for device in setup.devices}
    return next(name for n in range(len(names) + 1) if (name := f"gpu{n}") not in names)


def _pin(model: Model, members: int) -> Fix:
    others = "the other one not at all" if members == 2 else "the others share what is left"
    diff = (" models:", f"   {model.id}:", "+    pin: true")
    return Fix("pin", f"Pin {model.id}: it always answers at once, {others}", (f"models.{model.id}.pin=true",), diff, cost=10.0)
