"""When tuning cannot help any more, and when it only seems so."""

from __future__ import annotations

import random
from dataclasses import replace

from greenroom.core.facts import Device, Model, Setup
from greenroom.planner.advice import advice
from greenroom.planner.replay import Scene, tried
from greenroom.planner.virtual import Arrival, Truth

GIB = 1024
NAMES = ("a", "b", "c")


def scene(*, need_gib: int, every_s: float, seconds: float, names: tuple[str, ...] = NAMES) -> Scene:
    models = tuple(Model(name, ("gpu0",), need_gib * GIB, base_mib=need_gib * GIB, up_s=20.0, down_s=1.0) for name in NAMES)
    setup = Setup((Device("gpu0", "gpu", 80 * GIB, measured=False),), models)
    rng, load = random.Random(7), []
    for name in names:
        at = rng.expovariate(1 / every_s)
        while at < seconds:
            load.append(Arrival(at, name, 3.0))
            at += rng.expovariate(1 / every_s)
    return Scene(setup, tuple(sorted(load, key=lambda one: one.at)), {m.id: replace(Truth.of(m), need_mib=None) for m in models}, seconds)


def said_of(made: Scene) -> dict[str, object]:
    trial = tried(made)
    said: dict[str, object] = advice(made.setup, trial.requests, trial.transitions)["outgrown"]
    return said


def test_three_models_that_are_wanted_all_the_time_outgrow_one_card() -> None:
    """None can be cut by half, and the best replay still spends a quarter of the time in swaps."""
    said = said_of(scene(need_gib=78, every_s=20.0, seconds=4500.0))
    assert said["verdict"] == "outgrown"
    assert "has outgrown one card" in str(said["text"])
    assert "replica on another GPU" in str(said["next_step"])
    assert "llm-d" in str(said["next_step"])


def test_half_an_hour_is_not_enough_to_say() -> None:
    """A verdict like that wants an hour."""
    assert said_of(scene(need_gib=78, every_s=20.0, seconds=1800.0))["verdict"] == "unknown"


def test_what_a_cut_would_end_is_not_outgrown() -> None:
    """Three of 28 GiB miss one card by little."""
    said = said_of(scene(need_gib=28, every_s=20.0, seconds=4500.0))
    assert said["verdict"] == "tune"


def test_where_all_fit_nothing_is_outgrown() -> None:
    """However much is asked."""
    assert said_of(scene(need_gib=20, every_s=5.0, seconds=4500.0))["verdict"] == "fits"


def test_models_that_are_wanted_one_after_the_other_do_not_outgrow_a_card() -> None:
    """Long turns, each alone."""
    made = scene(need_gib=78, every_s=20.0, seconds=4500.0)
    turns = tuple(replace(one, model=NAMES[int(one.at // 90) % 3]) for one in made.load)
    assert said_of(replace(made, load=turns))["verdict"] in ("tune", "fits")
