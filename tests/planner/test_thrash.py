"""Who takes turns, what it costs, and whether the way out that is advised leads out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from greenroom.core.facts import Device, Group, Model, Setup
from greenroom.ledger.rows import RequestRow, SampleRow
from greenroom.planner.advice import advice
from greenroom.planner.figures import figures_of, length_s, regrets_of, swaps_of
from greenroom.planner.replay import Scene, Trial, scene_of, tried
from greenroom.planner.settings import changed
from greenroom.planner.thrash import Fix, follows, sentence, slow_requests, thrashing
from greenroom.planner.virtual import Arrival, Play, Truth
from greenroom.planner.ways_out import candidates, fixed

GIB = 1024
HOUR_S = 3600.0
AGENT = Model("agent", ("gpu0",), 44 * GIB, base_mib=44 * GIB, up_s=9.0, down_s=1.0)
CODER = Model("coder", ("gpu0",), 40 * GIB, base_mib=40 * GIB, up_s=6.0, down_s=1.0)
SMALL = Model("small", ("gpu0",), 2 * GIB, base_mib=2 * GIB, up_s=2.0, down_s=0.2)
COMMANDS = {
    "agent": ["vllm", "serve", "/m/agent", "--gpu-memory-utilization", "0.55"],
    "coder": ["llama-server", "--model", "/m/c.gguf", "--ctx-size", "32768"],
}


def setup_of(*models: Model, memory_mib: int = 80 * GIB, groups: tuple[Group, ...] = ()) -> Setup:
    return Setup((Device("gpu0", "gpu", memory_mib, 2 * GIB, measured=False),), models, groups)


def scene_with(setup: Setup, load: Sequence[Arrival], seconds: float = HOUR_S) -> Scene:
    truths = {model.id: replace(Truth.of(model), need_mib=None) for model in setup.models}
    return Scene(setup, tuple(sorted(load, key=lambda one: one.at)), truths, seconds)


def alternating(seed: int = 1, *, seconds: float = HOUR_S) -> list[Arrival]:
    """One asks for the agent, the other for the coder, in turn; a small model is asked beside them."""
    rng, load, at = random.Random(seed), [], 0.0
    while at < seconds:
        for name, service_s in (("agent", 2.0), ("coder", 1.5)):
            load.append(Arrival(at, name, service_s))
            load.append(Arrival(at + 3.0, "small", 0.1))
            at += rng.uniform(10.0, 18.0)
    return load


def the_hour() -> tuple[Scene, Trial]:
    scene = scene_with(setup_of(AGENT, CODER, SMALL), alternating())
    return scene, tried(scene)


def moving_truth_s(scene: Scene) -> float:
    """Seconds in which an engine started or stopped, from the events themselves."""
    begun: dict[str, float] = {}
    spans: list[tuple[float, float]] = []

    def hear(event: object, actions: object) -> None:
        if type(event).__name__ == "InstanceReported" and event.model in begun:  # type: ignore[attr-defined]
            spans.append((begun.pop(event.model), event.at))  # type: ignore[attr-defined]
        for action in actions:  # type: ignore[attr-defined]
            if type(action).__name__ in ("Start", "Stop"):
                begun[action.model] = event.at  # type: ignore[attr-defined]

    Play(scene.setup, scene.load, scene.truths, hear=[hear]).run()
    return length_s(spans)


def test_two_models_that_alternate_are_named_with_what_it_costs() -> None:
    """The pair, not the small one beside it; the cost within a tenth of the truth."""
    scene, trial = the_hour()
    found = thrashing(scene.setup, trial.requests, trial.transitions)
    assert [one.models for one in found] == [("agent", "coder")]
    one = found[0]
    assert one.device == "gpu0"
    assert one.cost_s_h == pytest.approx(moving_truth_s(scene), rel=0.1)
    assert one.swaps_h == pytest.approx(trial.figures.switches, rel=0.05)
    assert one.short_mib == 8 * GIB  # the small one stays beside them
    assert one.regret > 0.5 * one.swaps
    assert one.slow > 0.9 * one.slow_total > 0
    assert one.waited_s_h == pytest.approx(sum(row.waited_s for row in trial.requests if row.start == "cold"), rel=0.05)
    assert "agent and coder take turns on gpu0" in sentence(one)
    assert "8.0 GiB more would hold both" in sentence(one)


@pytest.mark.parametrize(("seconds", "is_told_per_hour"), [(180.0, False), (590.0, False), (610.0, True)])
def test_less_than_ten_minutes_are_counted_and_not_made_an_hour(seconds: float, is_told_per_hour: bool) -> None:
    """83 swaps in 80 s are not 3724 an hour."""
    scene = scene_with(setup_of(AGENT, CODER, SMALL), alternating(seconds=seconds), seconds)
    trial = tried(scene)
    (one,) = thrashing(scene.setup, trial.requests, trial.transitions, (0.0, seconds))
    told, _ = fixed(one, scene_of(scene.setup, trial.requests, trial.transitions, (0.0, seconds)))
    plain = told.plain()
    assert plain["seconds"] == seconds
    assert plain["swaps"] == one.swaps >= 4
    assert (" an hour" in plain["text"]) == is_told_per_hour
    assert (f"{one.swaps} swaps in " in plain["text"]) == (not is_told_per_hour)
    rates = [plain[name] for name in ("swaps_h", "switching_s_h", "draining_s_h", "waited_requests_h", "waited_s_h")]
    rates += [fix["swaps_h"] for fix in plain["fixes"]]
    assert all((rate is not None) == is_told_per_hour for rate in rates)
    assert all(fix["swaps"] is not None for fix in plain["fixes"])


def test_following_the_advice_ends_it() -> None:
    """What is suggested is done to the settings, and the same hour is played with them: at least four fifths of the swaps are gone."""
    scene, trial = the_hour()
    (one,) = thrashing(scene.setup, trial.requests, trial.transitions)
    told, _ = fixed(one, scene_of(scene.setup, trial.requests, trial.transitions), commands=COMMANDS)
    best = next(fix for fix in told.fixes if fix.suggested)
    assert best.kind == "cut"
    after = tried(replace(scene, setup=changed(scene.setup, best.changes)))
    assert after.figures.switches <= 0.2 * trial.figures.switches
    assert best.swaps_h == pytest.approx(after.figures.switches, abs=2.0)
    assert best.diff[-1] == "+    cmd: vllm serve /m/agent --gpu-memory-utilization 0.44"


def fixes_of(scene: Scene, **more: object) -> dict[str, Fix]:
    trial = tried(scene)
    (one,) = thrashing(scene.setup, trial.requests, trial.transitions)
    told, _ = fixed(one, scene_of(scene.setup, trial.requests, trial.transitions), **more)  # type: ignore[arg-type]
    assert sum(fix.suggested for fix in told.fixes) <= 1
    return {fix.kind: fix for fix in told.fixes}


def test_each_way_out_is_tried_before_it_is_told() -> None:
    """With its swaps an hour and its waits; a pin says whom it locks out."""
    fixes = fixes_of(the_hour()[0], commands=COMMANDS)
    assert set(fixes) == {"cut", "sleep", "turns", "second_gpu", "pin"}
    assert "48 GiB card" in fixes["second_gpu"].text
    assert fixes["second_gpu"].swaps_h == pytest.approx(3.0, abs=1.0)
    assert fixes["pin"].refused > 100
    assert "would be refused" in fixes["pin"].effect
    assert fixes["sleep"].diff[-1].endswith("--enable-sleep-mode")
    assert not fixes["turns"].suggested


def test_a_context_is_cut_by_what_that_frees() -> None:
    """The largest one that is small enough, with the MiB that it gives back; where none is, that is said."""
    steps = [(28672, 1200), (24576, 3000), (20480, 7000), (16384, 9000)]
    (one,) = thrashing((scene := the_hour()[0]).setup, (trial := tried(scene)).requests, trial.transitions)
    argv = {"coder": ["llama-server", "--model", "/m/c c.gguf", "-c", "32768", "--port", "${PORT}"]}
    found = candidates(one, scene, argv, {"coder": steps})
    (cut,) = [fix for fix in found if fix.kind == "cut" and "coder" in fix.text]
    assert one.short_mib is not None
    assert 3000 < one.short_mib + 64 < 9000
    tokens, freed = next(step for step in steps if step[1] >= one.short_mib + 64)
    assert f"from 32768 to {tokens}, which frees {freed / 1024:.1f} GiB" in cut.text
    assert cut.changes == (f"models.coder.memory={CODER.need_mib - freed}MiB",)
    assert cut.diff[-1] == f"+    cmd: llama-server --model '/m/c c.gguf' -c {tokens} --port ${{PORT}}"

    found = candidates(one, scene, argv, {"coder": steps[:2]})
    (cut,) = [fix for fix in found if fix.kind == "cut" and "coder" in fix.text]
    assert "a context alone does not do it (24576 tokens free 2.9 GiB)" in cut.text


def test_a_budget_below_what_the_device_has_is_raised() -> None:
    """The cheapest way out: a cap in the configuration was the only reason.  Where the device has no more, it is not offered."""

    def capped(total_mib: int) -> Scene:
        card = Device("ram", "ram", 80 * GIB, 2 * GIB, total_mib, measured=False)
        models = tuple(replace(model, devices=("ram",)) for model in (AGENT, CODER, SMALL))
        return scene_with(Setup((card,), models), alternating(seconds=1200.0), 1200.0)

    fixes = fixes_of(capped(128 * GIB))
    assert fixes["budget"].suggested
    assert fixes["budget"].text == "Raise the budget of ram from 80.0 GiB to 88.1 GiB (it has 128.0 GiB): both stay"
    assert fixes["budget"].changes == ("device.ram.memory=90176MiB",)
    assert "second_gpu" not in fixes, "what runs on the CPU is not moved by a card"
    assert "budget" not in fixes_of(capped(81 * GIB))


def test_who_was_there_before_the_record_begins_needs_room_as_well() -> None:
    """Nothing tells that it was started: its first request met it ready."""
    scene, trial = the_hour()
    whole = thrashing(scene.setup, trial.requests, trial.transitions)[0]
    cut = [row for row in trial.transitions if row.model != "small"]
    first = min((row for row in trial.requests if row.model == "small"), key=lambda row: row.at)
    later = [row for row in trial.requests if row is not first]
    (one,) = thrashing(scene.setup, later, cut)
    assert one.short_mib == whole.short_mib == 8 * GIB


def test_a_group_that_keeps_apart_what_would_fit_is_the_fix() -> None:
    """There is room for both; only a group says no."""
    group = Group("big", frozenset(("agent", "coder")), exclusive=False)
    setup = setup_of(AGENT, replace(CODER, need_mib=20 * GIB), SMALL, groups=(group,))
    fixes = fixes_of(scene_with(setup, alternating(seconds=1200.0), 1200.0))
    assert fixes["group"].suggested
    assert fixes["group"].diff == (" groups:", "   big:", "-    swap: true", "+    swap: false")


def test_models_of_unknown_size_are_declared_as_they_were_measured() -> None:
    """They take the whole device each, although both would fit."""
    setup = setup_of(replace(AGENT, need_mib=None), replace(CODER, need_mib=None))
    load = [one for one in alternating(seconds=1200.0) if one.model != "small"]
    samples = [SampleRow(1.0, "gpu0", 0, 0, 0, {"agent": 30 * GIB, "coder": 20 * GIB})]
    fixes = fixes_of(scene_with(setup, load, 1200.0), samples=samples)
    assert fixes["declare"].suggested
    assert fixes["declare"].changes == ("models.agent.memory=32257MiB", "models.coder.memory=21505MiB")


# ---------------------------------------------------------------------------------------------------- what is none


def slow_alone() -> Scene:
    """One model, more asked of it than it can do: minutes of waiting, and no swap at all."""
    rng = random.Random(2)
    load = [Arrival(rng.uniform(0.0, HOUR_S), "agent", 20.0) for _ in range(1500)]
    return scene_with(setup_of(replace(AGENT, parallel=8), CODER), load)


def slow_starts() -> Scene:
    """Stopped when idle, so that every hour or so somebody waits a minute for it: a matter of its ttl."""
    agent, coder = replace(AGENT, up_s=60.0, ttl_s=60.0), replace(CODER, up_s=60.0, ttl_s=60.0)
    load = [Arrival(n * 300.0, name, 2.0) for n in range(12) for name in ("agent", "coder")[n % 2 : n % 2 + 1]]
    return scene_with(setup_of(agent, coder), load)


def rare_turns() -> Scene:
    """One switch every ten minutes."""
    load = [Arrival(n * 600.0 + k * 20.0, ("agent", "coder")[n % 2], 2.0) for n in range(12) for k in range(20)]
    return scene_with(setup_of(AGENT, CODER), load, 7200.0)


def side_by_side() -> Scene:
    """They alternate on every request, and both are there."""
    return scene_with(setup_of(AGENT, replace(CODER, need_mib=20 * GIB), SMALL), alternating())


@pytest.mark.parametrize("make", [slow_alone, slow_starts, rare_turns, side_by_side])
def test_slow_is_not_thrashing(make: object) -> None:
    """Whatever else is wrong with it."""
    scene = make()  # type: ignore[operator]
    trial = tried(scene)
    assert thrashing(scene.setup, trial.requests, trial.transitions) == []
    said = advice(scene.setup, trial.requests, trial.transitions)
    assert said["thrash"] == []
    assert said["replayed"] is False


def test_slow_for_want_of_slots_is_told_as_that() -> None:
    """The model is there all the time; its slots are not."""
    scene = slow_alone()
    trial = tried(scene)
    assert trial.figures.mean_s > 10.0
    said = advice(scene.setup, trial.requests, trial.transitions)
    assert said["outgrown"]["verdict"] == "capacity"
    assert "replica" in said["outgrown"]["next_step"]
    assert said["headline"]["severity"] == "warn"


# ---------------------------------------------------------------------------------------------------- the signals


def test_three_that_take_turns_are_one_circle() -> None:
    """Each leaves for the next, none for the one before."""
    models = [replace(AGENT, id=name, need_mib=50 * GIB, up_s=4.0) for name in ("a", "b", "c")]
    load = [Arrival(n * 12.0, "abc"[n % 3], 1.0) for n in range(100)]
    scene = scene_with(setup_of(*models), load, 1200.0)
    trial = tried(scene)
    (one,) = thrashing(scene.setup, trial.requests, trial.transitions)
    assert sorted(one.models) == ["a", "b", "c"]


def test_the_spike_after_another_model_is_told() -> None:
    """Requests of the coder that followed the agent, against those that followed its own."""
    own = [RequestRow(n, float(n), "coder", 1, "", "", "", start="hot") for n in range(10)]
    rows = [*own, *(replace(row, load_s=8.0, before="agent", start="cold") for row in own)]
    (one,) = follows(rows)
    assert (one.model, one.before, one.count, one.mean_s, one.others_mean_s) == ("coder", "agent", 10, 8.0, 0.0)
    assert len(slow_requests(rows)) == 10


def test_a_swap_is_put_together_from_its_rows() -> None:
    """Who came, who left for it, how long each took, who waited."""
    _, trial = the_hour()
    swap = next(swap for swap in swaps_of(trial.requests, trial.transitions) if swap.model == "coder" and swap.out)
    assert (swap.out, swap.kind, swap.waiters) == (("agent",), "start", 1)
    assert (swap.leave_s, swap.rise_s, swap.drain_s) == (pytest.approx(1.0), pytest.approx(6.0), pytest.approx(0.0))
    assert regrets_of(trial.requests, swaps_of(trial.requests, trial.transitions))


def test_figures_of_nothing_are_nothing() -> None:
    """An empty window breaks nothing."""
    assert figures_of([], []).requests == 0
    said = advice(setup_of(AGENT), [], [])
    assert (said["thrash"], said["ttl"], said["headline"]) == ([], [], None)
