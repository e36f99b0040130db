"""What is learned of one model by watching it: times, gaps between uses, how often it is wanted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .facts import Model, Policy, SleepTier
from .idle import Gaps

DECAY_STEP_S = 1.0  # decayed counts are brought up to date at most this often
PEAK_HALF_LIFE_S = 300.0


def blend(old: float | None, new: float, share: float) -> float:
    return new if old is None else (1 - share) * old + share * new


@dataclass(slots=True)
class Costs:
    """Seconds, per model; measured values replace the priors as they come."""

    up_s: float | None = None  # a cold start
    down_s: float | None = None  # a stop
    sleep_s: dict[int, float] = field(default_factory=dict)  # by level
    wake_s: dict[int, float] = field(default_factory=dict)
    residue_mib: dict[int, int] = field(default_factory=dict)  # by level, per device, measured
    copy_mib: dict[int, int] = field(default_factory=dict)  # by level, host RAM while asleep, measured
    serve_s: float | None = None  # admission to end of a request
    beside_ratio: float | None = None  # a start beside another one, against a lone one
    lone_starts: int = 0
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=16))  # idle time before each next use
    idle: Gaps = field(default_factory=Gaps)  # of a model with ttl: auto, all of them
    arrivals: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    hits: float = 0.0  # decayed count of requests
    hits_at: float = 0.0
    peak: float = 0.0  # decayed peak of requests outstanding at once
    base: float = 0.0  # the greedy-dual clock at the last use

    def forget_times(self) -> None:
        """The engine is another one now; how the model is used stays known."""
        self.up_s = self.down_s = self.serve_s = self.beside_ratio = None
        self.lone_starts = 0
        for figures in (self.sleep_s, self.wake_s, self.residue_mib, self.copy_mib):
            figures.clear()

    def stay_s(self, model: Model, policy: Policy) -> float:
        """ttl: auto: how long it stays idle.  By its own gaps once enough were seen; until then as long as a start is worth."""
        worth_s = policy.ttl_worth * self.up(model)
        return self.idle.best_stay_s(worth_s) if self.idle.seen >= policy.ttl_gaps_min else worth_s

    def up(self, model: Model) -> float:
        return self.up_s if self.up_s is not None else model.up_s

    def down(self, model: Model) -> float:
        return self.down_s if self.down_s is not None else model.down_s

    def sleeping(self, tier: SleepTier) -> float:
        return self.sleep_s.get(tier.level, tier.sleep_s)

    def waking(self, tier: SleepTier) -> float:
        return self.wake_s.get(tier.level, tier.wake_s)

    def residue(self, tier: SleepTier) -> int:
        return self.residue_mib.get(tier.level, tier.residue_mib)

    def copy(self, tier: SleepTier) -> int:
        """MiB of host RAM it holds while asleep."""
        return self.copy_mib.get(tier.level, tier.host_mib)

    def frequency(self, now: float, policy: Policy) -> float:
        return float(self.hits * 0.5 ** ((now - self.hits_at) / policy.half_life_s))

    def hit(self, now: float, outstanding: int, policy: Policy) -> None:
        if now - self.hits_at > DECAY_STEP_S:
            self.hits = self.frequency(now, policy)
            self.peak *= 0.5 ** ((now - self.hits_at) / PEAK_HALF_LIFE_S)
            self.hits_at = now
        self.hits += 1.0
        self.arrivals.append(now)
        if outstanding > self.peak:
            self.peak = float(outstanding)

    def keep_for(self, price_s: float, waiting: int, policy: Policy) -> float:
        """How long an idle resident is kept although `waiting` requests want its room (seconds from its last use).

        The stay A maximises P(gap <= A) * gain * price - waiting * E[min(gap, A)] over the gaps seen lately.
        """
        cap = policy.hold_cap * price_s
        floor = min(policy.hold_floor_s, policy.hold_floor_share * price_s) / max(1, waiting)
        if not self.gaps:
            return max(floor, min(policy.hold_prior_s, cap))
        gaps = sorted(self.gaps)
        count = len(gaps)
        best_value = best_stay = passed = 0.0
        for index, gap in enumerate(gaps):
            passed += gap
            stay = gap + policy.hold_slack_s
            if stay > cap:
                break
            expected_wait = (passed + (count - index - 1) * stay) / count
            value = (index + 1) / count * price_s * policy.hold_gain - waiting * expected_wait
            if value > best_value:
                best_value, best_stay = value, stay
        return max(floor, best_stay)

    def harm(self, now: float, away_s: float) -> float:
        """Seconds of waiting that an absence of `away_s` is expected to cost this model's own clients."""
        count = len(self.arrivals)
        if count < 2:
            return 0.0
        rate = count / max(0.05, now - self.arrivals[0])
        return min(rate * away_s, max(1.0, self.peak)) * away_s / 2
