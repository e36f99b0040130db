"""What models need, as it was known at the end of a stretch of time: said, booked and measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from greenroom.core.facts import Model, Policy, Setup
from greenroom.ledger.rows import SampleRow, TransitionRow

MEASURED: Final = "measured"  # as a need's source: nothing that was booked says more


def needs_of(setup: Setup, transitions: Iterable[TransitionRow]) -> dict[str, int]:
    """MiB per device of each model: as measured, else as booked at its last start, or as it would be; unknown sizes are left out."""
    booked = _booked(transitions)
    return {
        model.id: model.need_mib if model.need_source == MEASURED else booked.get(model.id, model.need_mib)
        for model in setup.models
        if model.need_mib is not None
    }


def sized(setup: Setup, since: float, transitions: Sequence[TransitionRow], samples: Sequence[SampleRow]) -> Setup:
    """`setup` with each known need as the scheduler had it in the end; these count as measured.

    `since`: when these settings came to hold; what was booked before says nothing of them.
    """
    booked = _booked(row for row in transitions if row.at >= since)
    slept = {row.model for row in transitions if row.kind in ("sleep", "wake")}
    models = []
    for model in setup.models:
        if model.need_mib is not None:
            need_mib = booked.get(model.id, model.need_mib)
            if model.doze is None and model.id not in slept:  # of a sleeper the samples do not tell whether it was awake
                need_mib = min(need_mib, _measured_mib(model, setup.policy, samples) or need_mib)
            model = replace(model, need_mib=need_mib, need_source=MEASURED)
        models.append(model)
    return replace(setup, models=tuple(models))


def _booked(transitions: Iterable[TransitionRow]) -> dict[str, int]:
    """MiB per device at the last start of each model; `transitions`: oldest first."""
    return {
        row.model: mib
        for row in transitions
        if row.kind == "start" and row.ok and (mib := max((row.mib.get(device, 0) for device in row.devices), default=0))
    }


def _measured_mib(model: Model, policy: Policy, samples: Iterable[SampleRow]) -> int | None:
    """As the scheduler lowers what it books (core.moves.learn_down): from the peak of a time that was long enough."""
    seen = [(row.at, row.own_mib[model.id]) for row in samples if row.own_mib.get(model.id)]
    if not seen or max(at for at, _ in seen) - min(at for at, _ in seen) < policy.learn_stable_s:
        return None
    return max(model.need_floor_mib, int(max(mib for _, mib in seen) * policy.learn_margin) + 1)
