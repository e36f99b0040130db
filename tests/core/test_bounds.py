"""How long a model can wait for its device, and how much of the device's time forced swaps may take.

The bounds are those of the scheduling rules, computed from the load alone.  The weaker variants at the end break them:
so these tests can fail.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from bench.sim.bounds import bound_of
from bench.sim.engine import Phase, Rules, World
from bench.sim.loads import Load, SimModel, SimRequest, six_overloaded, two_overloaded, whole_card
from bench.sim.rules_base import BaseRules, Constants
from bench.sim.rules_greenroom import Greenroom

from greenroom.core.facts import Policy

SEEDS = int(os.environ.get("GREENROOM_BOUND_SEEDS", "40"))
WHOLE_CARD_SEEDS = int(os.environ.get("GREENROOM_WHOLE_CARD_SEEDS", "200"))
STOP_S = 1200.0
STARVED_WITHOUT_GATE = (5, 51, 131)  # the only ones of the first 150


class Watched(Rules):
    """Another policy's rules, with a record of how long each model waited for its device (from `since` to ready)."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.name = rules, rules.name
        self.ready_lag_s, self.exec_s = rules.ready_lag_s, rules.exec_s
        self.waits_s: list[tuple[float, str]] = []

    def fresh(self, world: World) -> Any:
        return self.rules.fresh(world)

    def seen_after_s(self, up_s: float) -> float:
        return self.rules.seen_after_s(up_s)

    def arrived(self, world: World, model: int, request: int) -> None:
        self.rules.arrived(world, model, request)

    def finished(self, world: World, model: int, request: int) -> None:
        self.rules.finished(world, model, request)

    def left(self, world: World, model: int) -> None:
        self.rules.left(world, model)

    def ticked(self, world: World) -> None:
        self.rules.ticked(world)

    def settle(self, world: World) -> None:
        self.rules.settle(world)

    def risen(self, world: World, model: int, took_s: float) -> None:
        self.note(world, model)
        self.rules.risen(world, model, took_s)

    def note(self, world: World, model: int) -> None:
        resident = world.residents[model]
        if resident.queue:
            arrived = world.arrived_at[resident.queue[0]] or 0.0
            self.waits_s.append((world.now - max(arrived, resident.left_at), world.models[model].name))

    def note_unserved(self, world: World) -> None:
        for number, resident in enumerate(world.residents):
            if resident.phase < Phase.READY:
                self.note(world, number)


def random_load(seed: int) -> Load:
    """Two to five models of any size and price; saturating, bursty, rare, open and closed-loop clients."""
    rng = random.Random(f"bounds {seed}")
    count, capacity = rng.randint(2, 5), rng.choice((1000, 1500, 3000))
    sleeps = seed % 2 == 1
    models = []
    for n in range(count):
        up_s = rng.choice((0.5, 2.0, 5.0, 20.0)) * rng.uniform(0.5, 1.5)
        sleep_s = up_s * 0.1 if sleeps else None
        residue = rng.choice((0, 20)) if sleeps else 0
        down_s = rng.choice((0.0, 0.1, 1.0))
        slots = rng.choice((1, 2, 8))
        models.append(SimModel(f"m{n}", rng.randint(200, capacity), up_s, down_s, slots, 0.1 * up_s, sleep_s, up_s * 0.1, residue))
    seconds = rng.choice((20.0, 60.0, 120.0))
    opened: list[SimRequest] = []
    closed: list[SimRequest] = []
    for n in range(count):
        kind, service_s = rng.choice(("hog", "rare", "burst", "agent", "open")), rng.choice((0.05, 0.4, 2.0))
        if kind == "hog":
            for client in range(models[n].slots + 2):
                begin = rng.uniform(0, 1)
                services = [rng.uniform(0.5, 1.5) * service_s for _ in range(int(seconds / service_s))]
                closed += [SimRequest(begin, n, s, f"hog{n} {client}", 0.001) for s in services]
        elif kind == "agent":
            for client in range(rng.randint(1, 3)):
                think_s = rng.choice((0.001, 0.3, 3.0))
                for _ in range(int(seconds / (service_s + think_s))):
                    model, pause_s = rng.randrange(count), rng.expovariate(1 / think_s)
                    closed.append(SimRequest(0.0, model, rng.uniform(0.5, 1.5) * service_s, f"agent{n} {client}", pause_s))
        else:
            rate = min(6.0, {"rare": 0.05, "burst": 3.0, "open": rng.choice((0.5, 0.8 * models[n].slots / service_s))}[kind])
            at = rng.expovariate(rate)
            while at < seconds:
                if kind != "burst" or int(at / 7) % 2 == 0:
                    opened.append(SimRequest(at, n, rng.uniform(0.5, 1.5) * service_s))
                at += rng.expovariate(rate)
    return Load(tuple(models), (*sorted(opened, key=lambda r: r.not_before_s), *closed), (capacity,), until_s=seconds)


def worst_share(load: Load, rules: Rules, seed: int) -> float:
    """The longest wait of any model for its device, as a share of the bound."""
    watched = Watched(rules)
    world = World(load, watched, seed=seed)
    world.run(STOP_S)
    watched.note_unserved(world)
    return max((wait for wait, _ in watched.waits_s), default=0.0) / bound_of(load, Policy()).wait_s


def worst_wait_s(load: Load, rules: Rules, stop_s: float, model: int) -> float:
    """The longest wait of any request of one model; one never served waits until the end."""
    world = World(load, rules, seed=1).run(stop_s)
    waits = []
    for number, request in enumerate(load.requests):
        arrived, begun = world.arrived_at[number], world.begun_at[number]
        if request.model == model and arrived is not None:
            waits.append((world.now if begun is None else begun) - arrived)
    return max(waits)


@pytest.mark.timeout(3600)
def test_no_model_waits_longer_for_its_device_than_the_bound() -> None:
    """late + (D + U) + n (Q + D + U), whatever the load."""
    shares = {seed: worst_share(random_load(seed), Greenroom(), seed) for seed in range(SEEDS)}

    assert {seed: share for seed, share in shares.items() if share > 1.0} == {}
    assert max(shares.values()) < 0.75, "the bound is not tight, so coming near it means that something changed"


@pytest.mark.timeout(3600)
def test_sleepers_residues_never_starve_a_model_that_needs_the_whole_card() -> None:
    """Each request of it is served within the bound, whatever the others leave there while they sleep."""
    shares = {}
    for seed in range(WHOLE_CARD_SEEDS):
        load = whole_card(seed)
        shares[seed] = worst_wait_s(load, Greenroom(), STOP_S, 0) / bound_of(load, Policy()).wait_s

    assert {seed: share for seed, share in shares.items() if share > 1.0} == {}


@pytest.mark.timeout(600)
def test_without_the_gate_the_bound_breaks() -> None:
    """Proof that the test above can fail: rules that only ever take idle victims starve somebody."""
    for seed in STARVED_WITHOUT_GATE:
        assert worst_share(random_load(seed), BaseRules(Constants(gate=False)), seed) > 1.0
        assert worst_share(random_load(seed), Greenroom(), seed) < 1.0


def test_the_rules_as_written_twice_agree() -> None:
    """The small re-implementation used as a base elsewhere makes the same decisions as the scheduler."""
    for seed in range(0, 20, 2):
        load = random_load(seed)
        ours = World(load, Greenroom(), seed=seed).run(STOP_S).result()
        base = World(load, BaseRules(), seed=seed).run(STOP_S).result()

        assert sum(ours.waits_s) == pytest.approx(sum(base.waits_s), rel=0.25, abs=5.0), f"seed {seed}"


def test_a_rare_model_is_served_beside_two_overloaded_ones() -> None:
    """Order among late models goes by the time since they last left, not by the age of the oldest request."""
    load, rare = two_overloaded(), 2

    assert worst_wait_s(load, Greenroom(), 400, rare) < 40
    assert worst_wait_s(load, BaseRules(Constants(by_request_age=True)), 400, rare) > 100, "the case no longer tells them apart"


@pytest.mark.timeout(600)
def test_a_big_rare_model_is_served_beside_six_overloaded_small_ones() -> None:
    """A late model claims its memory: without the claim the small ones refill it for ever."""
    load, rare, seconds = six_overloaded(seconds=300), 0, 300

    assert worst_wait_s(load, Greenroom(), seconds, rare) < 200
    assert worst_wait_s(load, BaseRules(Constants(claim=False)), seconds, rare) > 250, "the case no longer tells them apart"


def saturated(seed: int) -> tuple[Load, float]:
    """Every model wants the whole device all the time; (load, quantum factor)."""
    rng = random.Random(f"saturated {seed}")
    factor = rng.choice((0.5, 1.0, 2.0, 4.0))
    models = tuple(
        SimModel(f"m{n}", 1000, rng.choice((0.3, 1.0, 3.0)) * rng.uniform(0.5, 1.5), rng.choice((0.0, 0.5)), rng.choice((1, 4)))
        for n in range(rng.randint(2, 4))
    )
    requests = []
    for n, model in enumerate(models):
        service_s = rng.choice((0.1, 0.4, 1.5))
        for client in range(model.slots + 1):
            requests += [SimRequest(0, n, rng.uniform(0.5, 1.5) * service_s, f"{n} {client}", 0.001) for _ in range(int(140 / service_s))]
    return Load(models, tuple(requests), (1500,), until_s=120), factor


def test_forced_swaps_take_at_most_their_share_of_the_device() -> None:
    """Under saturation each swap follows k times its price of residency: the share is at most 1 / (1 + k)."""
    shares = {}
    for seed in range(12):
        load, factor = saturated(seed)
        world = World(load, Greenroom(Policy(quantum_factor=factor)), seed=seed).run(120)
        first_s = max(m.up_s for m in load.models)  # the first load replaces nobody
        if world.switches > 3:
            shares[seed] = (world.moving_s - first_s) / (world.now - first_s) * (1 + factor)

    assert len(shares) >= 6
    assert max(shares.values()) <= 1.0
