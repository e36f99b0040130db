"""What models need is what was known of it in the end."""

from __future__ import annotations

from greenroom.core.facts import Device, Model, Setup, SleepTier
from greenroom.ledger.rows import SampleRow, TransitionRow
from greenroom.planner.sizes import needs_of, sized


def setup(**more: object) -> Setup:
    return Setup((Device("gpu0", "gpu", 1000),), (Model("a", ("gpu0",), 300, need_source="declared", **more),))  # type: ignore[arg-type]


def start(at: float, mib: int, kind: str = "start") -> TransitionRow:
    return TransitionRow(at, "a", 1, kind, ("gpu0",), 1.0, True, mib={"gpu0": mib})


def samples(*points: tuple[float, int]) -> tuple[SampleRow, ...]:
    return tuple(SampleRow(at, "gpu0", 300, mib, 0, {"a": mib}) for at, mib in points)


def need(given: Setup, since: float, transitions: list[TransitionRow], seen: tuple[SampleRow, ...] = ()) -> int:
    told = sized(given, since, transitions, seen)
    assert needs_of(told, transitions) == {"a": told.models[0].need_mib}, "whoever asks hears the same"
    return told.models[0].need_mib or 0


def test_what_was_booked_under_older_settings_says_nothing() -> None:
    """The settings were read again, with what had been learned meanwhile; the engine is the same."""
    assert need(setup(), 0.0, [start(5.0, 450), start(9.0, 500)]) == 500
    assert need(setup(), 7.0, [start(5.0, 450)]) == 300


def test_what_was_measured_long_enough_lowers_it() -> None:
    """As in the scheduler: with a margin above the peak; a glimpse of an engine that loads is none."""
    assert need(setup(), 0.0, [start(5.0, 300)], samples((10.0, 100), (15.0, 140), (30.0, 120))) == 148
    assert need(setup(), 0.0, [start(5.0, 300)], samples((10.0, 100), (15.0, 140))) == 300
    assert need(setup(need_floor_mib=200), 0.0, [], samples((10.0, 100), (30.0, 120))) == 200
    assert need(setup(), 0.0, [start(5.0, 500)], samples((10.0, 490), (30.0, 490))) == 500


def test_what_a_sleeper_keeps_is_not_what_it_needs() -> None:
    """Samples do not tell whether it was awake."""
    asleep = samples((10.0, 20), (60.0, 20))
    assert need(setup(sleep=(SleepTier(1, 20, 100, 0.1, 0.1),)), 0.0, [start(5.0, 300), start(8.0, 20, "sleep")], asleep) == 300
    assert need(setup(doze=SleepTier(1, 20, 0, 0.0, 0.1)), 0.0, [start(5.0, 300)], asleep) == 300


def test_an_unknown_need_stays_unknown() -> None:
    given = Setup((Device("gpu0", "gpu", 1000),), (Model("a", ("gpu0",), None),))
    assert sized(given, 0.0, [start(5.0, 1000)], samples((10.0, 100), (60.0, 100))).models[0].need_mib is None
