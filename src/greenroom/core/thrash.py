"""Whether models keep taking each other's place: seen as it happens, told once until it is over.

A turn is a swap that sent somebody away.  One in which a model comes back that was sent away itself a moment ago is a
return; some returns in a short time that take a noticeable share of it are thrash.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

WINDOW_S = 300.0
WINDOW_SWAPS = 8.0  # or as long as so many of these swaps: large models take minutes each
RETURNS_MIN = 3
SHARE_MIN = 0.1
TURNS_KEPT = 64
RATE_S_MIN = 600.0  # a shorter time is told as it was: 83 swaps in 80 s are not 3724 an hour


@dataclass(frozen=True, slots=True)
class Turn:
    at: float  # its end
    model: str
    out: tuple[str, ...]
    devices: tuple[str, ...]
    moving_s: float


@dataclass(frozen=True, slots=True)
class Circle:
    """Models that take turns on a device now."""

    models: tuple[str, ...]
    device: str
    since: float
    until: float
    swaps: int
    moving_s: float

    @property
    def share(self) -> float:
        return self.moving_s / max(self.moving_s, self.until - self.since)


@dataclass(slots=True)
class Turns:
    """The latest turns of all devices, and who was told to thrash."""

    kept: deque[Turn] = field(default_factory=lambda: deque(maxlen=TURNS_KEPT))
    told: dict[str, Circle] = field(default_factory=dict)  # device -> as last seen

    def took(self, turn: Turn) -> list[Circle]:
        """One more turn; those circles that are to be told now."""
        self.kept.append(turn)
        found = []
        for device in turn.devices:
            circle = self._circle(device, turn)
            if circle is None:
                continue
            old = self.told.get(device)
            if old is None or turn.at - old.until > window_s(turn) or not set(circle.models) <= set(old.models):
                found.append(circle)
            self.told[device] = circle
        return found

    def now(self, at: float) -> list[Circle]:
        """Who thrashes at this moment: forgotten once they left each other alone for a while."""
        self.told = {device: circle for device, circle in self.told.items() if at - circle.until <= WINDOW_S}
        return list(self.told.values())

    def _circle(self, device: str, last: Turn) -> Circle | None:
        since = last.at - window_s(last)
        turns = [turn for turn in self.kept if device in turn.devices and turn.at - turn.moving_s >= since]
        returns = [turn for n, turn in enumerate(turns) if any(turn.model in before.out for before in turns[:n])]
        if len(returns) < RETURNS_MIN or returns[-1] is not last:
            return None
        names = {turn.model for turn in returns}
        names |= {name for turn in returns for name in turn.out if any(one.model == name for one in turns)}
        among = [turn for turn in turns if turn.model in names and not names.isdisjoint(turn.out)]
        if len(names) < 2 or not among:
            return None
        made = Circle(
            models=tuple(sorted(names)),
            device=device,
            since=among[0].at - among[0].moving_s,
            until=last.at,
            swaps=len(among),
            moving_s=sum(turn.moving_s for turn in among),
        )
        return made if made.share >= SHARE_MIN else None


def window_s(turn: Turn) -> float:
    return max(WINDOW_S, WINDOW_SWAPS * turn.moving_s)


def turns_words(models: Sequence[str], device: str) -> str:
    """How it is said everywhere: in the log, the status, the page and `greenroom thrash`."""
    return f"{listed(models)} take turns on {device}"


def is_rate(seconds: float) -> bool:
    """Whether what was counted in so long a time may be told per hour."""
    return seconds >= RATE_S_MIN


def listed(names: Iterable[str]) -> str:
    some = list(names)
    if len(some) == 1:
        return some[0]
    if len(some) > 4:
        return f"{', '.join(some[:3])} and {len(some) - 3} others"
    return f"{', '.join(some[:-1])} and {some[-1]}"
