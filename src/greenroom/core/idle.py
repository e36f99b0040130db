"""How long a model stays unused between two uses, as a histogram, and how long it pays to keep it.

Keeping costs idle time, coming back costs a start that somebody waits for; `worth_s` says how much idle time one start
is worth.  Bins are log-spaced, half an octave each: between a burst and the next one lie orders of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

PER_OCTAVE = 2
BINS = 2 * 20 * PER_OCTAVE  # 1 ms to 12 days
FIRST = -10 * PER_OCTAVE
NEARLY = 1 - 1e-9  # sums of floats that should be alike


def bin_of(gap_s: float) -> int:
    """The bin whose upper edge is the first at or above `gap_s`."""
    if gap_s <= 0:
        return 0
    return min(BINS - 1, max(0, math.ceil(math.log2(gap_s) * PER_OCTAVE - 1e-9) - FIRST))


def edge_s(number: int) -> float:
    """The upper edge of a bin."""
    return EDGES_S[number] if 0 <= number < BINS else _edge_s(number)


def _edge_s(number: int) -> float:
    return float(2.0 ** ((number + FIRST) / PER_OCTAVE))


EDGES_S: Final = tuple(map(_edge_s, range(BINS)))


@dataclass(slots=True)
class Gaps:
    """Idle gaps seen, older ones counting less; every bin with its count and its seconds, in their order."""

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
        if number not in self.counts:
            for figures in (self.counts, self.sums_s):
                later = [(each, figures.pop(each)) for each in tuple(figures) if each > number]
                figures.update([(number, 0.0), *later])
        self.counts[number] += 1.0
        self.sums_s[number] += gap_s
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
        cold, kept = sum(self.counts.values()), 0.0
        best_s, least = 0.0, cold * worth_s * NEARLY
        for (number, count), sum_s in zip(self.counts.items(), self.sums_s.values(), strict=True):
            kept += sum_s
            if kept >= least:
                break
            cold -= count
            stay_s = EDGES_S[number]
            cost = kept + cold * (stay_s + worth_s) if cold > 0 else kept
            if cost < least:
                best_s, least = stay_s, cost * NEARLY
        return best_s

    def percentile_s(self, percent: float) -> float:
        """The upper edge of the bin in which that share of the gaps is reached."""
        total, passed = sum(self.counts.values()), 0.0
        for number, count in self.counts.items():
            passed += count
            if passed >= total * percent / 100:
                return edge_s(number)
        return 0.0
