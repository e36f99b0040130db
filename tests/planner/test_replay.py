"""The journal played again: the same to the last action, or under other settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.sim.engine import World
from bench.sim.loads import Load, catalogue
from bench.sim.rules_greenroom import Greenroom, StrictFifo, as_setup

from greenroom.core.facts import MemoryMeasured, Policy, RequestArrived, Setup
from greenroom.ledger import codec
from greenroom.ledger.rows import EventRow, RequestRow
from greenroom.ledger.schema import BEGAN
from greenroom.planner.faults import BadChange, CannotReplay
from greenroom.planner.replay import Scene, exactly, scene_of, scene_of_trace, setup_of_trace, tried
from greenroom.planner.settings import changed
from greenroom.planner.virtual import Arrival, Truth

from .recorded import OFFSET_S, Recorded, boot_of, through_json

EXACT_SEEDS = range(40)
LAG_S = 0.025  # in the bench's world readiness is seen, and an engine is executed, that much later
SAME = pytest.approx


@pytest.mark.parametrize("first", range(0, len(EXACT_SEEDS), 10))
def test_a_recorded_world_is_replayed_to_the_last_action(first: int) -> None:
    """Faults, reloads, operators, shutdown: admissions and swaps are the recorded ones, through JSON and back."""
    for seed in EXACT_SEEDS[first : first + 10]:
        world = Recorded(seed)
        story = world.play()
        same = exactly([(boot_of(world.setup), world.rows)])
        assert same.difference is None, f"seed {seed}: {same.difference}"
        assert (same.events, same.skipped) == (len(world.rows), {})
        assert same.admissions == story.admitted


def test_the_first_difference_is_named() -> None:
    """Under another policy the scheduler leaves what was recorded, and the event is told."""
    world = Recorded(3)
    world.play()
    other = replace(world.setup, policy=replace(world.setup.policy, patience_s=0.0, hold_floor_s=5.0, hold_prior_s=5.0, hold_cap=5.0))
    found = exactly([(boot_of(other), world.rows)]).difference
    assert found is not None
    assert found.recorded != found.now
    assert found.row is world.rows[found.number]


def test_a_look_at_the_memory_may_come_before_the_first_tick() -> None:
    """A running server measures its devices before it begins."""
    world = Recorded(1)
    world.play()
    first = world.rows[0]
    seen = codec.plain_event(MemoryMeasured(first.clock, world.setup.devices[0].id, 0, {}))
    rows = [replace(first, kind="MemoryMeasured", event=seen, actions=()), *world.rows]

    assert exactly([(boot_of(world.setup), rows)]).runs == 1
    with pytest.raises(CannotReplay, match="no run of the server is kept from its beginning"):
        exactly([(replace(boot_of(world.setup), clock=first.clock - 60.0), rows)])


def test_what_is_not_there_cannot_be_replayed() -> None:
    """No run at all, or one of which the beginning was deleted."""
    world = Recorded(1)
    world.play()
    with pytest.raises(CannotReplay, match="no run"):
        exactly([])
    cut = [row for row in world.rows if row.kind == RequestArrived.__name__]
    with pytest.raises(CannotReplay, match="no run of the server is kept from its beginning"):
        exactly([(boot_of(world.setup), cut)])


def began(setup: Setup) -> EventRow:
    return EventRow(OFFSET_S, 0.0, BEGAN, "", {"at": 0.0, "setup": through_json(codec.plain_setup(setup))}, ())


def test_a_book_that_was_built_anew_is_replayed_anew() -> None:
    """Under the settings that held by then, in the same run."""
    first, second = Recorded(2), Recorded(5)
    admitted = first.play().admitted + second.play().admitted
    rows = [began(first.setup), *first.rows, began(second.setup), *second.rows]
    same = exactly([(replace(boot_of(first.setup), marks=True), rows)])
    assert (same.difference, same.runs, same.cut) == (None, 1, 0)
    assert (same.events, same.admissions) == (len(first.rows) + len(second.rows), admitted)


def test_a_run_without_its_beginning_costs_no_other() -> None:
    """It is left out up to where its book was built anew, and told; a tick that comes first is no beginning where none is marked."""
    first, second = Recorded(2), Recorded(5)
    first.play()
    second.play()
    rest = first.rows[next(n for n, row in enumerate(first.rows) if n and row.kind == "Ticked") :]
    run_1, run_2 = replace(boot_of(first.setup), marks=True), replace(boot_of(second.setup, 2), marks=True)
    whole = exactly([(run_1, rest), (run_2, [began(second.setup), *second.rows])])
    assert (whole.difference, whole.runs, whole.cut, whole.events) == (None, 1, 1, len(second.rows))
    part = exactly([(run_1, [*rest, began(second.setup), *second.rows])])
    assert (part.difference, part.runs, part.cut, part.events) == (None, 1, 1, len(second.rows))
    with pytest.raises(CannotReplay, match="no run of the server is kept from its beginning"):
        exactly([(run_1, rest)])


# ---------------------------------------------------------------------------------------------------- other settings


def steady(load: Load) -> Load:
    """Without jitter: the planner's engines take the same time each time."""
    return replace(load, models=tuple(replace(model, jitter_s=0.0) for model in load.models))


def scene_like(load: Load) -> Scene:
    last: dict[str, int] = {}
    arrivals = []
    for number, request in enumerate(load.requests):
        before = last.get(request.client, -1) if request.client else -1
        think_s = load.requests[before].think_s if before >= 0 else 0.0
        arrivals.append(
            Arrival(request.not_before_s, load.models[request.model].name, request.service_s, request.client or "", None, before, think_s)
        )
        if request.client:
            last[request.client] = number
    setup = as_setup(load, Policy())
    truths = {
        model.id: Truth(model.up_s + LAG_S, model.down_s, None, tuple(replace(tier, wake_s=tier.wake_s + LAG_S) for tier in model.sleep))
        for model in setup.models
    }
    return Scene(setup, tuple(arrivals), truths, 900.0)


CLOSED = ("agents6", "hog")  # the bench's world ends those at a fixed time
LOADS = [work for work in catalogue(seconds=600) if work.kind in ("trace", "mix", "sleep") and not work.name.startswith(CLOSED)]


@pytest.mark.parametrize("work", LOADS, ids=lambda work: work.name)
def test_the_planners_engines_are_those_of_the_bench(work: object) -> None:
    """Strict arrival order and greenroom's rules come to the bench's figures, request by request."""
    load = steady(work.make(0))  # type: ignore[attr-defined]
    for rules, policy in ((StrictFifo(), "fifo"), (Greenroom(), "greenroom")):
        result = World(load, rules).run().result()
        trial = tried(scene_like(load), policy=policy)
        assert trial.figures.switches == result.switches
        assert sorted(row.waited_s for row in trial.requests) == SAME(sorted(result.waits_s), abs=1e-6)


def test_strict_arrival_order_is_as_bad_as_it_was_measured() -> None:
    """Two alternating clients: a start for every request, and 45 s for what greenroom does in 12."""
    load = next(work for work in LOADS if work.name == "trace a2").make(0)
    result = World(load, StrictFifo()).run().result()
    assert (result.switches, result.makespan_s) == (20, SAME(45.54, abs=0.01))


def test_what_was_recorded_becomes_the_load_that_other_settings_meet() -> None:
    """Replayed under the same settings it comes to the same; with room for both, nobody leaves."""
    load = steady(next(work for work in LOADS if work.name == "trace b").make(0))
    first = tried(scene_like(load))
    scene = scene_of(as_setup(load, Policy()), first.requests, first.transitions)
    again = tried(scene)
    assert again.figures.plain() == first.figures.plain() | {"hours": SAME(first.figures.hours, rel=1e-3)}
    roomy = tried(scene, ["device.gpu0.memory=8GiB"])
    assert (roomy.figures.switches, roomy.figures.evictions) == (4, 0)
    assert roomy.figures.mean_s < first.figures.mean_s


def test_a_client_that_waits_for_its_answers_is_a_closed_loop() -> None:
    """Its next request follows the answer; one that asks without waiting depends on nobody."""

    def row(at: float, client: str, duration_s: float = 2.0) -> RequestRow:
        return RequestRow(int(at * 10), at, "m1", 1, client, "interactive", "", queue_s=1.0, duration_s=duration_s, start="hot")

    setup = setup_of_trace("time,model\n0,m1\n")
    rows = [row(0.0, "loop"), row(2.5, "loop"), row(100.0, "loop"), row(0.1, "open"), row(0.2, "open"), row(5.0, "open")]
    load = scene_of(setup, rows, ()).load
    found = {(one.client, one.after >= 0, round(one.think_s, 3)) for one in load}
    assert found == {("loop", False, 0.0), ("loop", True, 0.5), ("loop", False, 95.5), ("open", False, 0.0)}
    assert all(one.service_s == SAME(1.0) for one in load)


def test_a_trace_needs_times_and_models_only() -> None:
    """Service times are taken where they are given."""
    text = "time,model,service_s\n10,a,0.5\n11,b,\n"
    scene = scene_of_trace(setup_of_trace(text), text)
    assert [(one.at, one.model, one.service_s) for one in scene.load] == [(0.0, "a", 0.5), (1.0, "b", 1.0)]
    assert tried(scene).figures.switches == 2
    with pytest.raises(CannotReplay, match="line 2"):
        scene_of_trace(setup_of_trace(text), "when,model\n1,a\n")
    with pytest.raises(CannotReplay, match="no model 'c'"):
        scene_of_trace(setup_of_trace(text), "time,model\n1,c\n")
    for odd in ("nan,a,1", "inf,a,1", "1,a,-2", "1,a,nan"):
        with pytest.raises(CannotReplay, match="line 2 is no arrival"):
            scene_of_trace(setup_of_trace(text), f"time,model,service_s\n{odd}\n")


# ---------------------------------------------------------------------------------------------------- --set


SETUP = setup_of_trace("time,model\n0,a\n0,org/b.v2\n")


def test_settings_are_changed_by_path() -> None:
    """Names may hold dots and slashes; sizes and durations are written as in the configuration."""
    made = changed(
        SETUP,
        ["device.gpu0.memory=48GiB", "models.org/b.v2.ttl=5m", "models.a.memory=512MiB", "models.a.pin=true", "scheduling.patience_s=2s"],
    )
    a, b = made.models
    assert (made.devices[0].capacity_mib, b.ttl_s, a.need_mib, a.pinned, made.policy.patience_s) == (48 * 1024, 300.0, 512, True, 2.0)
    assert changed(SETUP, ["models.a.ttl=auto"]).models[0].ttl_auto
    assert changed(SETUP, ["models.a.ttl=60"]).models[0].ttl_s == 60.0
    assert changed(SETUP, ["scheduling.early_sleep_s=off"]).policy.early_sleep_s is None


def test_a_model_is_found_by_what_else_it_is_called() -> None:
    """As everywhere else."""
    setup = replace(SETUP, models=tuple(replace(model, aliases=(f"{model.id}-alias",)) for model in SETUP.models))
    made = changed(setup, ["models.org/b.v2-alias.ttl=60"])
    assert [model.ttl_s == 60.0 for model in made.models] == [False, True]


def test_a_device_that_is_not_there_is_added() -> None:
    """Models that may use any GPU may use it too."""
    made = changed(SETUP, ["device.gpu1.memory=24GiB"])
    assert [device.id for device in made.devices] == ["gpu0", "gpu1"]
    assert made.models[0].devices == ("gpu0", "gpu1")
    assert changed(made, ["models.a.device=gpu1"]).models[0].devices == ("gpu1",)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("x", "is no change"),
        ("models.a=1", "names no key"),
        ("models.c.ttl=1", "no model 'c'"),
        ("models.a.tll=1", "Did you mean 'ttl'?"),
        ("models.a.ttl=soon", "is not a duration"),
        ("device.gpu0.memory=48", "models.a|unit"),
        ("device.gpu9.headroom=1GiB", "give it memory first"),
        ("models.a.pin=maybe", "neither true nor false"),
        ("scheduling.patience=1", "Did you mean 'patience_s'?"),
        ("scheduling.lanes=two", "no number"),
        ("models.a.device=gpu7", "cannot be tried"),
    ],
)
def test_a_change_that_cannot_be_made_is_told(change: str, says: str) -> None:
    """In one sentence."""
    with pytest.raises(BadChange, match=says):
        changed(SETUP, [change])
