"""Who leaves, and how far, so that one model fits: least value lost first, sleep before stop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .entry import Entry
from .facts import SleepTier, State
from .stage import Stage

UNTRIED_PARTS = 8  # a sleeper that was never measured is thought to keep one of so many parts
ABSENT = frozenset({State.STOPPED, State.FAILED, State.ASLEEP})  # what a group does not forbid beside another member


@dataclass(frozen=True, slots=True)
class Choice:
    """The victims of one placement: model -> level it falls to (0 = stop)."""

    victims: Mapping[str, int] = field(default_factory=dict)
    value: float = 0.0  # greedy-dual value lost, all victims together
    dearest: float = 0.0  # of the victim worth most: the clock moves on to it


@dataclass(frozen=True, slots=True)
class Item:
    """Something that could go: what it is worth and what it would free on each device."""

    entry: Entry
    worth: float
    frees: Mapping[str, int]
    level: int


def is_idle(entry: Entry) -> bool:
    return not entry.instance.busy and not entry.queue


def fall_level(stage: Stage, entry: Entry) -> int:
    """The sleep level a victim falls to: the cheapest wake that host RAM has room for; 0 = it stops."""
    held = stage.book.of(entry.id)
    for tier in sorted(entry.tiers, key=entry.costs.waking):
        residue = residue_of(stage, entry, tier)
        if host_takes(stage, entry, tier) and any(held.get(device, 0) > residue for device in entry.instance.devices):
            return tier.level
    return 0


def host_takes(stage: Stage, entry: Entry, tier: SleepTier) -> bool:
    """Whether host RAM has room for what `entry` would hold there while it sleeps."""
    ram = stage.book.pools.get("ram")
    grows = entry.costs.copy(tier) - stage.book.of(entry.id).get("ram", 0)
    return ram is None or grows <= 0 or ram.takes(grows, stage.policy.ram_floor_mib)


def freed_by(stage: Stage, entry: Entry, level: int) -> dict[str, int]:
    """MiB that falling to `level` gives back, per device."""
    held = stage.book.of(entry.id)
    tier = entry.tier(level)
    if tier is None:
        return dict(held)
    residue = residue_of(stage, entry, tier)
    return {device: mib - residue for device, mib in held.items() if device in entry.instance.devices and mib > residue}


def residue_of(stage: Stage, entry: Entry, tier: SleepTier) -> int:
    """MiB per device it is expected to keep.

    Until that was measured, hardly anything: a guess that is too high would keep a model on a tight card from ever being
    tried, one that is too low costs one sleep and is put right by it.  Where nobody can measure, the guess is all there is.
    """
    if tier.level in entry.costs.residue_mib:
        return entry.costs.residue_mib[tier.level]
    devices, held, pools = entry.instance.devices, stage.book.of(entry.id), stage.book.pools
    if not all(pools[device].device.measured for device in devices if device in pools):
        return tier.residue_mib
    return min(tier.residue_mib, max((held.get(device, 0) for device in devices), default=0) // UNTRIED_PARTS)


def loss_s(entry: Entry, level: int) -> float:
    """Seconds lost by sending it away and back."""
    costs = entry.costs
    tier = entry.tier(level)
    if tier is None:
        return costs.down(entry.model) + costs.up(entry.model)
    return costs.sleeping(tier) + costs.waking(tier)


def lost_wake_s(entry: Entry) -> float:
    """Seconds lost by stopping a sleeper: a start takes so much longer than its wake."""
    return max(0.01, entry.costs.up(entry.model) - entry.up_cost())


def leave_s(entry: Entry, level: int) -> float:
    tier = entry.tier(level)
    return entry.costs.down(entry.model) if tier is None else entry.costs.sleeping(tier)


def worth_of(stage: Stage, entry: Entry, level: int, frees: Mapping[str, int]) -> float:
    """A resident's greedy-dual value: clock at its last use + frequency x loss / MiB it would free."""
    costs = entry.costs
    return costs.base + costs.frequency(stage.now, stage.policy) * loss_s(entry, level) / max(1, sum(frees.values()))


def price_s(entry: Entry, victims: Mapping[str, int], stage: Stage) -> float:
    """C(i, V): seconds to bring `entry` in, send V out, and later bring V back."""
    return entry.up_cost() + sum(loss_s(stage.entries[name], level) for name, level in victims.items())


def choose(stage: Stage, entry: Entry, devices: tuple[str, ...], *, idle_only: bool) -> Choice | None:
    """The cheapest set of residents whose leaving makes room for `entry` on `devices`; None if there is none."""
    book = stage.book
    held = book.of(entry.id)
    short = {}
    needs = stage.required(entry, devices)
    for device, need in needs.items():
        missing = need - held.get(device, 0) - book.pools[device].free_mib
        if missing > 0:
            short[device] = missing
    musts = _rivals(stage, entry, idle_only)
    if musts is None:
        return None
    if not short and not musts:
        return Choice()
    items = [item for item in _residents(stage, entry, short, idle_only) if item.entry not in musts]
    asleep = [_item(stage, rival) for rival in musts]
    stopped = [_stopped(stage, item) for item in asleep]
    for forced in (asleep, stopped) if any(item.level for item in asleep) else (asleep,):
        chosen = _beside(stage, entry, dict(short), items, forced)
        if chosen is not None:
            everyone = [*forced, *chosen]
            levels = _fit_host(stage, everyone, max(0, needs.get("ram", 0) - held.get("ram", 0)))
            return Choice(levels, sum(item.worth for item in everyone), max(item.worth for item in everyone))
    return None


def _beside(stage: Stage, entry: Entry, short: dict[str, int], items: Sequence[Item], forced: Sequence[Item]) -> list[Item] | None:
    """Who must leave beside those who leave anyway."""
    for item in forced:
        _subtract(short, item.frees)
    most = stage.policy.exact_victims_max
    if not _is_hard(stage, entry, short, forced):
        return cover(short, items, most)
    items = [*items, *_sleepers(stage, entry, short)]
    found = cover(short, items, most)
    # Even their own residues may have to go: the same with every victim stopped instead of put to sleep.
    return found if found is not None else cover(short, [_stopped(stage, item) for item in items], most)


def _rivals(stage: Stage, entry: Entry, idle_only: bool) -> list[Entry] | None:
    """Members of conflicting groups that are in; None when one of them may not go."""
    rivals = []
    for name in stage.conflicts.get(entry.id, ()):
        rival = stage.entries.get(name)
        if rival is not None and any(move.target is rival for move in stage.moves):
            return None  # it is on its way in
        if rival is None or rival.state in ABSENT:
            continue
        if rival.pinned or rival.state is not State.READY or not _may_go(stage, rival, idle_only):
            return None
        rivals.append(rival)
    return rivals


def rule_against(stage: Stage, target: Entry, victim: Entry) -> str:
    """The rule of a group, as a clause, by which `victim` leaves for `target` whatever room there is; "" = none."""
    if victim.id not in stage.conflicts.get(target.id, ()) or victim.state in ABSENT:
        return ""
    own = next((group for group in stage.groups if target.id in group.members), None)
    other = next((group for group in stage.groups if victim.id in group.members), None)
    if own is not None and own is other:
        return f"group {own.id} holds one model at a time"
    if own is not None and own.exclusive and not (other is not None and other.persistent):
        return f"group {own.id}, which it is in, is exclusive"
    assert other is not None, f"{target.id} and {victim.id} are in no group"
    return f"group {other.id}, which {victim.id} is in, is exclusive"


def _may_go(stage: Stage, entry: Entry, idle_only: bool) -> bool:
    if entry.pinned or entry.order or entry.retire or entry.instance.suspect:
        return False
    if stage.now - entry.instance.ready_at < stage.policy.min_residency_s:
        return False
    return is_idle(entry) if idle_only else True


def _item(stage: Stage, entry: Entry) -> Item:
    """What a resident's leaving is worth and frees; remembered for the decision at hand."""
    found = stage.items.get(entry.id)
    if found is None:
        level = fall_level(stage, entry) if entry.model.sleep else 0
        frees = freed_by(stage, entry, level) if level else stage.book.of(entry.id)
        found = stage.items[entry.id] = Item(entry, worth_of(stage, entry, level, frees), frees, level)
    assert isinstance(found, Item)
    return found


def _residents(stage: Stage, entry: Entry, short: Mapping[str, int], idle_only: bool) -> list[Item]:
    pools = stage.book.pools
    if len(short) == 1 and idle_only:
        (device,) = short
        return [item for item in _idle_items(stage, device) if item.entry is not entry]
    if len(short) == 1:
        (device,) = short
        names: Iterable[str] = pools[device].holders
    else:
        names = {name for device in short for name in pools[device].holders}
    found = []
    for name in names:
        other = stage.entries[name]
        if other is entry or other.instance.state is not State.READY or not _may_go(stage, other, idle_only):
            continue
        if all(map(stage.lane_open, other.instance.devices)):
            found.append(_item(stage, other))
    found.sort(key=lambda item: (item.worth, item.entry.id))
    return found


def _idle_items(stage: Stage, device: str) -> list[Item]:
    """Idle residents of a device by worth; the same for every model a decision looks at."""
    found = stage.idle_items.get(device)
    if found is None:
        found = []
        for name in stage.book.pools[device].holders:
            other = stage.entries[name]
            if other.instance.state is State.READY and _may_go(stage, other, True) and all(map(stage.lane_open, other.instance.devices)):
                found.append(_item(stage, other))
        found.sort(key=lambda item: (item.worth, item.entry.id))
        stage.idle_items[device] = found
    return found


def _sleepers(stage: Stage, entry: Entry, short: Mapping[str, int]) -> list[Item]:
    """Residues of sleepers: stopped only as a last resort, cheapest wake lost per MiB first."""
    found = []
    for name in sorted({name for device in short for name in stage.book.pools[device].holders if name != entry.id}):
        other = stage.entries[name]
        if other.state is State.ASLEEP and not other.pinned and not other.order and not other.retire:
            frees = dict(stage.book.of(name))
            lost = lost_wake_s(other)
            useful = sum(mib for device, mib in frees.items() if device in short)
            worth = stage.aging + other.costs.frequency(stage.now, stage.policy) * lost / max(1, useful)
            found.append(Item(other, worth, frees, 0))
    return found


def _is_hard(stage: Stage, entry: Entry, short: Mapping[str, int], forced: Sequence[Item]) -> bool:
    """Whether even putting every other unpinned model to sleep, busy and loading ones too, would not make room."""
    gone = {item.entry.id for item in forced}
    for device, missing in short.items():
        gain = 0
        for name in stage.book.pools[device].holders:
            other = stage.entries[name]
            if other is entry or name in gone or other.pinned or other.unkillable or other.state is State.ASLEEP:
                continue
            level = fall_level(stage, other) if other.model.sleep else 0
            gain += freed_by(stage, other, level).get(device, 0)
            if gain >= missing:
                break
        if gain < missing:
            return True
    return False


def _stopped(stage: Stage, item: Item) -> Item:
    return Item(item.entry, 2 * item.worth, dict(stage.book.of(item.entry.id)), 0)


def _fit_host(stage: Stage, items: Sequence[Item], taken: int) -> dict[str, int]:
    """Levels of the victims, lowered where their host copies together exceed the RAM that is free beside what is `taken`."""
    levels = {item.entry.id: item.level for item in items}
    ram = stage.book.pools.get("ram")
    if ram is None:
        return levels
    for item in sorted(items, key=lambda item: -item.worth):
        tier = item.entry.tier(item.level)
        if tier is None or item.entry.costs.copy(tier) == 0:
            continue
        held = stage.book.of(item.entry.id).get("ram", 0)
        for other in (tier, *(other for other in item.entry.tiers if other.level != item.level)):
            grows = max(0, item.entry.costs.copy(other) - held)
            if not grows or ram.takes(taken + grows, stage.policy.ram_floor_mib):
                taken += grows
                levels[item.entry.id] = other.level
                break
        else:
            levels[item.entry.id] = 0
    return levels


def _subtract(short: dict[str, int], frees: Mapping[str, int]) -> None:
    for device, mib in frees.items():
        if device in short:
            short[device] -= mib
            if short[device] <= 0:
                del short[device]


def cover(short: Mapping[str, int], items: Sequence[Item], exact_max: int) -> list[Item] | None:
    """The subset of least summed worth that frees `short` (device -> MiB) everywhere; None if all together do not."""
    if not short:
        return []
    useful = [item for item in items if not short.keys().isdisjoint(item.frees)]
    useful.sort(key=lambda item: item.worth)
    for device, missing in short.items():
        if sum(item.frees.get(device, 0) for item in useful) < missing:
            return None
    if len(useful) <= exact_max:
        return _exact(dict(short), useful)
    return _greedy(dict(short), useful)


def _covers(short: Mapping[str, int], items: Sequence[Item]) -> bool:
    return all(sum(item.frees.get(device, 0) for item in items) >= missing for device, missing in short.items())


def _greedy(short: dict[str, int], useful: list[Item]) -> list[Item]:
    taken: list[Item] = []
    left = dict(short)
    for item in useful:
        if not left:
            break
        taken.append(item)
        _subtract(left, item.frees)
    for item in reversed(list(taken)):
        rest = [other for other in taken if other is not item]
        if _covers(short, rest):
            taken = rest
    return taken


def _exact(short: dict[str, int], useful: list[Item]) -> list[Item]:
    """Depth first over items by worth, cut where the sum is no longer better than the best cover found."""
    best = _greedy(short, useful)
    best_worth = sum(item.worth for item in best)
    best_count = len(best)

    def search(start: int, left: dict[str, int], taken: list[Item], worth: float) -> None:
        nonlocal best, best_worth, best_count
        if not left:
            if worth < best_worth or (worth == best_worth and len(taken) < best_count):
                best, best_worth, best_count = list(taken), worth, len(taken)
            return
        for index in range(start, len(useful)):
            item = useful[index]
            if worth + item.worth > best_worth:
                return
            if not any(device in left for device in item.frees):
                continue
            rest = dict(left)
            _subtract(rest, item.frees)
            taken.append(item)
            search(index + 1, rest, taken, worth + item.worth)
            taken.pop()

    search(0, dict(short), [], 0.0)
    return best
