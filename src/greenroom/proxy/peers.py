"""Which peer gets a request: the pure part.  Health is what past outcomes made of a peer; choosing reads it.

    health = failed(Health(), now, "it takes no connection")
    for one in order(candidates, now): ...

Times are seconds of one clock, given by the caller.  Nothing here waits, asks or remembers, so the same outcomes
always lead to the same choice; the back-off has no chance in it.

A peer has two kinds of health: its own (connections, probes) and that of each model it serves (its answers): a peer
that cannot serve one model still serves the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Final

FAILURES_MAX: Final = 3  # in a row; then the circuit opens
SHUT_S_MIN: Final = 5.0  # the first time it stays open so long, then twice as long after each failed trial ...
SHUT_S_MAX: Final = 300.0  # ... up to this
REST_S_MIN: Final = 1.0  # after 429 without Retry-After
REST_S_MAX: Final = 300.0  # of a Retry-After that is believed
HOPS_MAX: Final = 3  # greenrooms that a request may have passed; who has passed as many goes to no further peer

PASSED_ON: Final = frozenset({429, 502, 503, 504})
"""Answers that are no answer where another peer is left."""

REDIRECTS: Final = frozenset({301, 302, 303, 305, 307, 308})


class Circuit(StrEnum):
    CLOSED = "closed"  # asked as usual
    OPEN = "open"  # not asked
    HALF_OPEN = "half_open"  # one request may try


@dataclass(frozen=True, slots=True)
class Health:
    failures: int = 0  # in a row
    shut_until: float = -inf
    trying: bool = False  # the one request of a half-open circuit is under way
    rest_until: float = -inf  # as it asked for itself
    last_error: str = ""  # "" = none since it worked last

    def circuit(self, now: float) -> Circuit:
        if self.failures < FAILURES_MAX:
            return Circuit.CLOSED
        return Circuit.OPEN if self.trying or now < self.shut_until else Circuit.HALF_OPEN

    def rests(self, now: float) -> bool:
        return now < self.rest_until


NEW: Final = Health()


def failed(health: Health, now: float, why: str) -> Health:
    """It gave no answer, or one that is as good as none."""
    failures = health.failures + 1
    if failures < FAILURES_MAX:
        return replace(health, failures=failures, trying=False, last_error=why)
    doublings = min(failures - FAILURES_MAX, 30)
    shut_s = min(SHUT_S_MAX, SHUT_S_MIN * 2.0**doublings)
    return replace(health, failures=failures, trying=False, shut_until=now + shut_s, last_error=why)


def worked(health: Health) -> Health:
    """It answered; a rest it asked for goes on."""
    return Health(rest_until=health.rest_until) if health != NEW else health


def asked_for_rest(health: Health, now: float, rest_s: float | None) -> Health:
    """429 or 503 with Retry-After (None: without)."""
    seconds = REST_S_MIN if rest_s is None else min(REST_S_MAX, max(REST_S_MIN, rest_s))
    return replace(health, rest_until=max(health.rest_until, now + seconds))


def begun(health: Health, now: float) -> Health:
    """A request goes there."""
    return replace(health, trying=True) if health.circuit(now) is Circuit.HALF_OPEN else health


def dropped(health: Health) -> Health:
    """The request that went there ended without a verdict: its client left."""
    return replace(health, trying=False) if health.trying else health


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer that serves the model asked for, as it is at the moment."""

    peer: str
    priority: int = 0  # higher ones are asked first
    weight: float = 1.0  # share of the requests in flight at once, among those of one priority; more than 0
    in_flight: int = 0
    health: Health = field(default=NEW)  # its own
    serving: Health = field(default=NEW)  # of the model there

    def can_be_asked(self, now: float) -> bool:
        return self.health.circuit(now) is not Circuit.OPEN and self.serving.circuit(now) is not Circuit.OPEN

    def rests(self, now: float) -> bool:
        return self.health.rests(now) or self.serving.rests(now)

    def free_at(self) -> float:
        """When it can be asked (again)."""
        shut = [one.shut_until for one in (self.health, self.serving) if one.failures >= FAILURES_MAX]
        return max(shut, default=-inf)


def order(candidates: Sequence[Candidate], now: float, *, again: bool = False) -> tuple[str, ...]:
    """Whom to ask, best first: by priority, then who has the least in flight for its weight, then as given.

    Peers whose circuit is open are left out.  Those that asked for a rest come last: where nobody else is left, they
    may say it themselves.  `again`: another peer has answered, if badly, so that those are left out, too.
    """
    able = [(place, one) for place, one in enumerate(candidates) if one.can_be_asked(now) and not (again and one.rests(now))]
    able.sort(key=lambda pair: (pair[1].rests(now), -pair[1].priority, (pair[1].in_flight + 1) / pair[1].weight, pair[0]))
    return tuple(one.peer for _, one in able)


def free_in_s(candidates: Sequence[Candidate], now: float) -> float:
    """How long until one of them can be asked, where none can now; at least 1."""
    return max(1.0, min((one.free_at() for one in candidates), default=now) - now)


def retry_after_s(value: bytes) -> float | None:
    """Seconds of a Retry-After header; None for a date, which is not read, and for what is no number."""
    text = value.strip()
    return float(text) if text.isdigit() and len(text) <= 9 else None


def hops(values: Sequence[bytes]) -> int:
    """How many greenrooms a request has passed.  What is no number may be anything, so it counts as too many."""
    if not values:
        return 0
    text = values[0].strip()
    return int(text) if len(values) == 1 and text.isdigit() and len(text) <= 3 else HOPS_MAX
