"""How long a model stays unused between two uses, as a histogram, and how long it pays to keep it.

Keeping costs idle time, coming back costs a start that somebody waits for; `worth_s` says how much idle time one start
is worth.  Bins are log-spaced, half an octave each: between a burst and the next one lie orders of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

PER_OCTAVE = 2
BINS = 2 * 20 * PER_OCTAVE  # 1 ms to 12 days
FIRST = -10 * PER_OCTAVE


def bin_of(gap_s: float) -> int:
    """The bin whose upper edge is the first at or above `gap_s`."""
    if gap_s <= 0:
        return 0
    return min(BINS - 1, max(0, math.ceil(math.log2(gap_s) * PER_OCTAVE - 1e-9) - FIRST))


def edge_s(number: int) -> float:
    """The upper edge of a bin."""
    return float(2.0 ** ((number + FIRST) / PER_OCTAVE))


@dataclass(slots=True)
class Gaps:
    """Idle gaps seen, older ones counting less; every bin with its count and its seconds."""

    half_life_s: float = 86400.0
    seen: int = 0
    counts: dict[int, float] = field(default_factory=dict)
    sums_s: dict[int, float] = field(default_factory=dict)
    decayed_at: float | None = None

    @classmethod
    def of(cls, gaps_s: Iterable[float]) -> Gaps:
        made = cls()
        for gap_s in gaps_s:
            made.add(gap_s, 0.0)
        return made

    def add(self, gap_s: float, now: float) -> None:
        if self.decayed_at is None:
            self.decayed_at = now
        elif now - self.decayed_at >= self.half_life_s / 24:
            self._decay(0.5 ** ((now - self.decayed_at) / self.half_life_s))
            self.decayed_at = now
        number = bin_of(gap_s)
        self.counts[number] = self.counts.get(number, 0.0) + 1.0
        self.sums_s[number] = self.sums_s.get(number, 0.0) + gap_s
        self.seen += 1

    def _decay(self, share: float) -> None:
        for figures in (self.counts, self.sums_s):
            for number in figures:
                figures[number] *= share

    def cost_s(self, stay_s: float, worth_s: float) -> float:
        """Idle seconds and starts of one gap, on average, when it is kept for `stay_s`."""
        total = sum(self.counts.values())
        if not total:
            return 0.0
        kept = cold = 0.0
        for number, count in self.counts.items():
            if edge_s(number) <= stay_s * (1 + 1e-9):
                kept += self.sums_s[number]
            else:
                cold += count
        return (kept + cold * (stay_s + worth_s)) / total

    def best_stay_s(self, worth_s: float) -> float:
        """The upper edge of the bin up to which keeping costs least, taken over all gaps seen."""
        best_s, least = 0.0, float("inf")
        cold, kept = sum(self.counts.values()), 0.0
        for number in (-1, *sorted(self.counts)):
            stay_s = 0.0
            if number >= 0:
                stay_s = edge_s(number)
                kept += self.sums_s[number]
                cold -= self.counts[number]
            cost = kept + max(0.0, cold) * (stay_s + worth_s)
            if cost < least * (1 - 1e-9):
                best_s, least = stay_s, cost
        return best_s

    def percentile_s(self, percent: float) -> float:
        """The upper edge of the bin in which that share of the gaps is reached."""
        total, passed = sum(self.counts.values()), 0.0
        for number in sorted(self.counts):
            passed += self.counts[number]
            if passed >= total * percent / 100:
                return edge_s(number)
        return 0.0
