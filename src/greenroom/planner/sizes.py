"""What models need, as it was known at the end of a stretch of time: said, booked and measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from greenroom.core.facts import Model, Policy, Setup
from greenroom.ledger.rows import SampleRow, TransitionRow


def sized(setup: Setup, since: float, transitions: Iterable[TransitionRow], samples: Sequence[SampleRow]) -> Setup:
    """`setup` with each known need as the scheduler had it in the end; these count as measured.

    `since`: when these settings came to hold; what was booked before says nothing of them.
    """
    booked: dict[str, int] = {}
    slept = set()
    for row in sorted(transitions, key=lambda row: row.at):
        if row.kind in ("sleep", "wake"):
            slept.add(row.model)
        held = max((row.mib.get(device, 0) for device in row.devices), default=0)
        if row.kind == "start" and row.ok and held and row.at >= since:
            booked[row.model] = held
    models = []
    for model in setup.models:
        need_mib = booked.get(model.id, model.need_mib)
        if need_mib is not None and model.need_mib is not None:
            if model.doze is None and model.id not in slept:  # of a sleeper the samples do not tell whether it was awake
                need_mib = min(need_mib, _measured_mib(model, setup.policy, samples) or need_mib)
            model = replace(model, need_mib=need_mib, need_source="measured")
        models.append(model)
    return replace(setup, models=tuple(models))


def _measured_mib(model: Model, policy: Policy, samples: Iterable[SampleRow]) -> int | None:
    """As the scheduler lowers what it books (core.moves.learn_down): from the peak of a time that was long enough."""
    seen = [(row.at, row.own_mib[model.id]) for row in samples if row.own_mib.get(model.id)]
    if not seen or max(at for at, _ in seen) - min(at for at, _ in seen) < policy.learn_stable_s:
        return None
    return max(model.need_floor_mib, int(max(mib for _, mib in seen) * policy.learn_margin) + 1)
