"""What `greenroom check` tells of sleep: the levels of each model, what sleepers hold, and whether host RAM has room for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from greenroom.cli import text

if TYPE_CHECKING:
    from greenroom.cli.check import ModelNeed, Placed
    from greenroom.config.model import DeviceConfig, ModelConfig
    from greenroom.core.facts import SleepTier
    from greenroom.engines.base import Engine, Estimate


PINNED = "it is pinned"


@dataclass(frozen=True, slots=True)
class Naps:
    """How a model sleeps."""

    levels: tuple[SleepTier, ...] = ()  # it can be put to
    by_itself: SleepTier | None = None  # what it falls to when idle; it cannot be told to
    why_not: str = ""  # "" also where nobody wants it to sleep
    notes: tuple[str, ...] = ()

    @property
    def copy_mib(self) -> int:
        """Host RAM that it holds when it sleeps at level 1."""
        return next((tier.host_mib for tier in self.levels if tier.level == 1), 0)


def naps_of(model: ModelConfig, engine: Engine, estimate: Estimate) -> Naps:
    if model.pin:
        return Naps(why_not=PINNED)
    costs = engine.costs(estimate)
    doze = costs.doze if model.sleep != "off" else None
    return Naps(costs.tiers, doze, "" if costs.tiers or doze is not None else engine.no_sleep(), engine.sleep_notes())


def cell(model: ModelNeed) -> str:
    """Its place in the table."""
    naps = model.sleep
    if naps.why_not == PINNED:
        return "pinned"
    if naps.levels:
        return ", ".join(str(tier.level) for tier in naps.levels)
    return "by itself" if naps.by_itself is not None else ("no" if naps.why_not else "off")


def lines(needs: Sequence[ModelNeed]) -> Iterator[str]:
    """What each sleeper holds; then who cannot sleep, those with the same reason in one line."""
    reasons: dict[str, list[str]] = {}
    for one in needs:
        naps, name = one.sleep, text.safe(one.id)
        if naps.levels:
            held = ", ".join(f"{held_words(one, tier)} at level {tier.level}" for tier in naps.levels)
            yield f"{name} asleep: {held}"
        if naps.by_itself is not None:
            yield f"{name} falls asleep by itself: {held_words(one, naps.by_itself)}"
        if naps.why_not and naps.why_not != PINNED:  # the table says that
            reasons.setdefault(naps.why_not, []).append(name)
        yield from (f"{name}: {text.safe(note)}" for note in naps.notes)
    for why, names in reasons.items():
        verb, reason = ("does not sleep", why) if len(names) == 1 else ("do not sleep", of_many(why))
        yield f"{text.shortened(names)} {verb}: {text.safe(reason)}"


def of_many(why: str) -> str:
    """What an engine says of itself, said of several."""
    words = {"it has ": "they have ", "it falls asleep by itself": "they fall asleep by themselves", "it is ": "they are ", "it ": "they "}
    for one, many in words.items():
        if why.startswith(one):
            return (many + why.removeprefix(one)).replace("after its last", "after their last")
    return why.replace("of this engine", "of their engines").replace("its `sleep`", "their `sleep`")


def held_words(model: ModelNeed, tier: SleepTier) -> str:
    """`1.5 GiB on its device and 18.0 GiB in host RAM`."""
    if model.candidates == ("ram",):
        return f"{text.size(tier.residue_mib + tier.host_mib)} in host RAM"
    where = "its device" if model.devices_count == 1 else "each of its devices"
    held = f"{text.size(tier.residue_mib)} on {where}"
    least = "at least " if model.memory_mib is None else ""  # a copy is as large as what nobody knows yet
    return f"{held} and {least}{text.size(tier.host_mib)} in host RAM" if tier.host_mib else held


def crowding(needs: Sequence[ModelNeed], devices: Sequence[DeviceConfig], placed: Placed) -> str:
    """A sentence when host RAM does not hold the copies of all level-1 sleepers at once, else ""."""
    sleepers = [one for one in needs if one.sleep.copy_mib]
    if not sleepers:
        return ""
    from greenroom.serve.wiring import ram_device

    ram = ram_device(next((one for one in devices if one.id == "ram"), None))
    others_mib = sum(ram_of(one, placed.homes) for one in needs if one not in sleepers)
    room_mib = max(0, ram.capacity_mib - ram.headroom_mib - others_mib)
    wanted_mib = sum(one.sleep.copy_mib for one in sleepers)
    if wanted_mib <= room_mib:
        return ""
    names = text.shortened([text.safe(one.id) for one in sleepers])
    rest = "sleeps at level 2 or stops" if any(tier.level == 2 for one in sleepers for tier in one.sleep.levels) else "stops"
    return f"{names} asleep at level 1 take {text.size(wanted_mib)} of host RAM, which has {text.size(room_mib)} for that: the rest {rest}"


def ram_of(model: ModelNeed, homes: Mapping[str, tuple[str, ...]]) -> int:
    """MiB of host RAM that a model holds when it is ready."""
    return (model.memory_mib or 0) if homes.get(model.id) == ("ram",) else model.host_mib
