"""How far a pull or a push is, how fast, and how long it will take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .facts import Progress

WINDOW_S = 5.0  # the rate is that of the last seconds
SAMPLE_S = 0.25
TELL_S = 0.1  # between two reports

Tell = Callable[[Progress], None]


def nobody(progress: Progress) -> None:
    """For those who do not want to hear."""


@dataclass(slots=True)
class Meter:
    """Counts bytes and reports at most every `TELL_S`.  `fetched` counts what came over the wire, again or not."""

    reference: str
    tell: Tell = nobody
    total: int = 0
    done: int = 0
    fetched: int = 0
    stage: str = "resolving"
    file: str = ""
    clock: Callable[[], float] = time.monotonic
    _told_at: float = float("-inf")
    _samples: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, count: int) -> None:
        """`count` more bytes arrived."""
        self.done += count
        self.fetched += count
        self.report()

    def at(self, stage: str, file: str = "") -> None:
        """What goes on now; always reported."""
        self.stage, self.file = stage, file or self.file
        self.report(now=True)

    def report(self, *, now: bool = False) -> None:
        at = self.clock()
        if now or at - self._told_at >= TELL_S:
            self._told_at = at
            self._sample(at)
            self.tell(self.progress())

    def progress(self) -> Progress:
        rate = self._rate()
        left = max(0, self.total - self.done)
        return Progress(self.reference, self.done, self.total, rate, left / rate if rate > 0 else None, self.file, self.stage)

    def _sample(self, at: float) -> None:
        if not self._samples or at - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((at, self.fetched))
        while len(self._samples) > 2 and at - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()

    def _rate(self) -> float:
        if not self._samples:
            return 0.0
        first_at, first = self._samples[0]
        span_s = self.clock() - first_at
        return (self.fetched - first) / span_s if span_s > 0 else 0.0
