"""How long a model may wait for its device by the scheduling rules, computed from the load alone."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.core.facts import Policy

from .loads import Load, SimModel

LAG_S = 0.06


@dataclass(frozen=True, slots=True)
class Bound:
    quantum_s: float  # Q: k times the dearest price of replacing one model by another
    drain_s: float  # D: the longest request
    lane_s: float  # U: the longest occupation of the lane
    wait_s: float  # late + (D + U) + n (Q + D + U)


def leave_s(model: SimModel) -> float:
    """The longest it can take to leave: asleep or stopped."""
    return max(model.down_s, model.sleep_s or 0.0, *(tier.sleep_s for tier in model.tiers), 0.0)


def bound_of(load: Load, policy: Policy) -> Bound:
    models = load.models
    ups = [m.up_s + m.jitter_s + LAG_S for m in models]
    downs = [leave_s(m) for m in models]
    price_s = 2 * max(ups) + max(downs)
    quantum_s, drain_s = policy.quantum_factor * price_s, max((r.service_s for r in load.requests), default=0.0)
    lane_s = max(ups) + sum(downs)
    late_s = max(policy.late_min_s, policy.late_factor * price_s)
    return Bound(quantum_s, drain_s, lane_s, late_s + drain_s + lane_s + len(models) * (quantum_s + drain_s + lane_s))
