"""Who leaves so that one model fits."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.entry import Entry
from greenroom.core.facts import Group, Model, Operation, Policy, Sleep, SleepTier, Start, State, Stop
from greenroom.core.placement import Choice, Item, choose, cover

from .rig import GPU, LEVEL_1, LEVEL_2, Rig, gpu, model, names, only, ram

DEVICES = ("gpu0", "gpu1")


def item(name: str, worth: float, **frees: int) -> Item:
    return Item(Entry.of(Model(name, DEVICES, 1), Policy()), worth, frees, 0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, int], list[Item]]:
    count = draw(st.integers(0, 7))
    mib = st.integers(0, 50)
    items = [
        item(f"m{n}", float(draw(st.integers(0, 20))), **{device: size for device in DEVICES if (size := draw(mib))}) for n in range(count)
    ]
    short = {device: size for device in DEVICES if (size := draw(st.integers(0, 120)))}
    return short, items


def frees_enough(short: dict[str, int], items: tuple[Item, ...] | list[Item]) -> bool:
    return all(sum(each.frees.get(device, 0) for each in items) >= mib for device, mib in short.items())


def worth(items: tuple[Item, ...] | list[Item]) -> float:
    return sum(each.worth for each in items)


@given(cases())
def test_the_cover_is_the_cheapest_of_all_subsets(case: tuple[dict[str, int], list[Item]]) -> None:
    """Up to `exact_max` candidates: no subset that frees enough everywhere is worth less; None only when none does."""
    short, items = case
    enough = [subset for count in range(len(items) + 1) for subset in combinations(items, count) if frees_enough(short, subset)]
    found = cover(short, items, exact_max=10)

    assert bool(enough) is (found is not None)
    if found is not None:
        assert frees_enough(short, found)
        assert min(map(worth, enough)) == pytest.approx(worth(found))


@given(cases())
def test_the_quick_cover_frees_enough_and_nobody_leaves_in_vain(case: tuple[dict[str, int], list[Item]]) -> None:
    """Above `exact_max` candidates: still a cover exactly when there is one, and no member of it could stay."""
    short, items = case
    found = cover(short, items, exact_max=0)

    assert (cover(short, items, exact_max=10) is None) is (found is None)
    for each in found or ():
        assert not frees_enough(short, [other for other in found or () if other is not each])


def test_nothing_short_costs_nobody() -> None:
    """No victim where there is room."""
    assert cover({}, [item("a", 1.0, gpu0=10)], 10) == []


def test_of_equal_worth_the_fewest_leave() -> None:
    """Two victims are not taken where one of the same worth does."""
    items = [item("a", 0.0, gpu0=5), item("b", 1.0, gpu0=5), item("c", 1.0, gpu0=10)]

    assert [each.entry.id for each in cover({"gpu0": 10}, items, 10) or ()] == ["c"]


# ------------------------------------------------------------------------------------------------------------ victims


def victims(rig: Rig, name: str, *devices: str, idle_only: bool = True) -> dict[str, int] | None:
    choice = choose(rig.stage, rig.entry(name), devices or (GPU,), idle_only=idle_only)
    return None if choice is None else dict(choice.victims)


def test_who_is_used_least_per_mib_leaves() -> None:
    """Equal sizes and costs: the one with fewer recent requests."""
    rig = Rig(model("often", 5000), model("rare", 5000), model("new", 5000))
    rig.warms("rare")
    for _ in range(3):
        rig.warms("often")

    assert victims(rig, "new") == {"rare": 0}


@pytest.mark.parametrize("how", ["pinned", "busy", "waited for"])
def test_some_are_never_idle_victims(how: str) -> None:
    """A pinned one, one with a request in flight, one with a queue."""
    rig = Rig(model("there", 6000, pinned=how == "pinned", parallel=1), model("new", 6000))
    rig.begins()
    if how == "pinned":
        rig.is_ready("there")
    else:
        rig.holds("there")
    if how == "waited for":
        rig.asks("there")
        rig.falls_silent(1)

    assert victims(rig, "new") is None


def test_a_model_just_come_in_stays_for_min_residency() -> None:
    """Not before it was ready that long, and then at once."""
    rig = Rig(model("there", 6000), model("new", 6000), min_residency_s=10.0)
    rig.warms("there")
    assert victims(rig, "new") is None
    rig.waits(10.0)
    rig.measures(6000, there=6000)

    assert victims(rig, "new") == {"there": 0}


def test_one_who_needs_two_cards_sends_away_what_is_short_on_both() -> None:
    """Victims on each device, and none where there is room."""
    small = [model("a", 6000, "gpu0"), model("b", 6000, "gpu1"), model("c", 3000, "gpu1")]
    both = model("both", 6000, "gpu0", "gpu1", devices_count=2)
    rig = Rig(*small, both, devices=(gpu("gpu0"), gpu("gpu1")))
    for name in "abc":
        rig.warms(name)

    assert victims(rig, "both", "gpu0", "gpu1") == {"a": 0, "b": 0}


def test_one_victim_on_both_cards_frees_both() -> None:
    """A resident over two devices is counted on each and named once, and its lanes are held on both."""
    wide = model("wide", 6000, "gpu0", "gpu1", devices_count=2)
    rig = Rig(wide, model("new", 6000, "gpu0"), devices=(gpu("gpu0"), gpu("gpu1")))
    rig.warms("wide")
    rig.waits(60.0)

    assert names(rig.asks("new"), Stop) == ["wide"]
    assert {device: len(moves) for device, moves in rig.stage.lanes.items()} == {"gpu0": 1, "gpu1": 1}


# ------------------------------------------------------------------------------------------------------------ sleepers


def sleepy(name: str, need_mib: int, *tiers: SleepTier) -> Model:
    return model(name, need_mib, sleep=tiers or (LEVEL_1,))


def put_to_sleep(rig: Rig, name: str) -> None:
    rig.wishes(name, Operation.SLEEP)
    rig.is_asleep(name)
    assert rig.state(name) is State.ASLEEP


def test_a_sleepers_residue_goes_last() -> None:
    """While putting others to sleep makes room, nobody who sleeps is stopped, however cheap."""
    rig = Rig(sleepy("asleep", 4000), sleepy("awake", 6000), model("new", 8000))
    rig.warms("asleep")
    put_to_sleep(rig, "asleep")
    for _ in range(20):
        rig.warms("awake")

    assert victims(rig, "new") == {"awake": 1}


def test_residues_go_when_sleep_alone_makes_no_room() -> None:
    """A model that needs the whole card gets it, from sleepers too."""
    rig = Rig(sleepy("asleep", 4000), sleepy("awake", 6000), model("new", 10_000))
    rig.warms("asleep")
    put_to_sleep(rig, "asleep")
    rig.warms("awake")

    assert victims(rig, "new") == {"asleep": 0, "awake": 0}


def test_a_rival_whose_residue_is_in_the_way_is_stopped() -> None:
    """A group rival must leave anyway; asleep it would still hold what the other one needs."""
    rig = Rig(sleepy("rival", 4000), model("new", 9900), groups=(Group("g", frozenset({"rival", "new"})),))
    rig.warms("rival")

    assert victims(rig, "new") == {"rival": 0}


def test_a_group_rival_leaves_although_there_is_room() -> None:
    """swap: one member at a time."""
    rig = Rig(model("rival", 100), model("new", 100), groups=(Group("g", frozenset({"rival", "new"})),))
    rig.warms("rival")

    assert victims(rig, "new") == {"rival": 0}


def told_of(rig: Rig, name: str, kind: str = "evicted") -> str:
    """The reason in what was told last of a model's going."""
    text = [tell.text for tell in rig.told if (tell.model, tell.kind) == (name, kind)][-1]
    return text.partition(": ")[2].partition(";")[0]


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ((Group("g", frozenset("ab"), exclusive=False),), "b was asked for, and group g holds one model at a time"),
        ((Group("g", frozenset("b")),), "b was asked for, and group g, which it is in, is exclusive"),
        ((Group("g", frozenset("a")),), "b was asked for, and group g, which a is in, is exclusive"),
        ((Group("g", frozenset("a")), Group("h", frozenset("b"))), "b was asked for, and group h, which it is in, is exclusive"),
    ],
)
def test_who_leaves_by_the_rule_of_a_group_is_told_that_rule(groups: tuple[Group, ...], why: str) -> None:
    """Not want of room, of which there is plenty."""
    rig = Rig(model("a", 100), model("b", 100), groups=groups)
    rig.warms("a")
    rig.waits(60)
    orders = rig.asks("b")

    assert [order.reason for order in only(orders, Stop)] == [why]
    assert told_of(rig, "a") == why


def test_each_victim_is_told_its_own_cause() -> None:
    """One goes by a rule, the other for its room; a sleeper breaks no rule, and goes for its room alone."""
    group = Group("g", frozenset({"rival", "new", "nap"}), exclusive=False)
    rig = Rig(sleepy("nap", 4000), model("rival", 100), model("other", 8000), model("new", 9900), groups=(group,))
    rig.warms("nap")
    rig.wishes("nap", Operation.SLEEP)
    rig.is_asleep("nap")
    for name in ("rival", "other"):
        rig.warms(name)
    rig.waits(60)
    rig.asks("new")

    assert told_of(rig, "rival") == "new was asked for, and group g holds one model at a time"
    assert (told_of(rig, "other"), told_of(rig, "nap")) == ("new needed 9.7 GiB", "new needed 9.7 GiB")


def test_a_wait_for_a_rival_is_explained_by_the_rule() -> None:
    """While the rival serves, and while it leaves."""
    rig = Rig(model("a", 100), model("b", 100), groups=(Group("g", frozenset("ab")),), quantum_factor=0.1, patience_s=0.1)
    request = rig.holds("a")
    rig.asks("b")
    assert rig.scheduler.queue(rig.now)[0].reason.startswith("Group g holds one model at a time. ")
    rig.waits(60)
    assert "finishes 1 request first, then stops: group g holds one model at a time." in rig.scheduler.queue(rig.now)[0].reason
    rig.ends(request)

    assert rig.scheduler.queue(rig.now)[0].reason == "a stops: group g holds one model at a time."
    assert rig.scheduler.present("a", rig.now) == ("Stopping: b was asked for, and group g holds one model at a time.", ("b",))


def test_a_busy_rival_is_no_idle_victim() -> None:
    """It may be gated, never taken as idle."""
    rig = Rig(model("rival", 100), model("new", 100), groups=(Group("g", frozenset({"rival", "new"})),))
    rig.holds("rival")

    assert (victims(rig, "new"), victims(rig, "new", idle_only=False)) == (None, {"rival": 0})


def test_a_victim_falls_to_the_level_that_wakes_fastest() -> None:
    """Level 1 while host RAM has room for its copy."""
    rig = Rig(sleepy("there", 8000, LEVEL_1, LEVEL_2), model("new", 8000), devices=(gpu(), ram(4000)))
    rig.warms("there")

    assert victims(rig, "new") == {"there": 1}


def test_without_host_ram_a_victim_falls_further() -> None:
    """Level 2 where only that fits; without any level it is stopped."""
    both = Rig(sleepy("there", 8000, LEVEL_1, LEVEL_2), model("new", 8000), devices=(gpu(), ram(1000)))
    one = Rig(sleepy("there", 8000, LEVEL_1), model("new", 8000), devices=(gpu(), ram(1000)))
    for rig in (both, one):
        rig.warms("there")

    assert (victims(both, "new"), victims(one, "new")) == ({"there": 2}, {"there": 0})


def test_two_victims_do_not_share_the_same_host_ram() -> None:
    """RAM for one copy: the one worth more keeps level 1, the other falls further."""
    models = [sleepy("a", 4000, LEVEL_1, LEVEL_2), sleepy("b", 4000, LEVEL_1, LEVEL_2), model("new", 9000)]
    rig = Rig(*models, devices=(gpu(), ram(4000)))
    rig.warms("a")
    for _ in range(4):
        rig.warms("b")

    assert victims(rig, "new") == {"a": 2, "b": 1}


def test_host_ram_taken_between_the_choice_and_the_end_of_the_gate_is_not_promised_twice() -> None:
    """Two gates on two cards chose level 1 for the same RAM: the second victim falls further."""
    models = [sleepy("a", 8000, LEVEL_1, LEVEL_2), model("x", 8000)]
    others = [Model("b", ("gpu1",), 8000, sleep=(LEVEL_1, LEVEL_2), up_s=2.0), Model("y", ("gpu1",), 8000, up_s=2.0)]
    rig = Rig(*models, *others, devices=(gpu("gpu0"), gpu("gpu1"), ram(4000)))
    first, second = rig.holds("a"), rig.holds("b")
    rig.asks("x")
    rig.asks("y")
    rig.waits(60.0)
    assert [rig.state("a"), rig.state("b")] == [State.DRAINING] * 2

    orders = [*rig.ends(first), *rig.ends(second)]

    assert [(each.model, each.level) for each in only(orders, Sleep)] == [("a", 1), ("b", 2)]
    assert rig.stage.book.pools["ram"].free_mib >= 0


def test_a_choice_of_nobody_is_worth_nothing() -> None:
    """Room for all: an empty choice, not None."""
    rig = Rig(model("a"), model("b"))
    rig.warms("a")

    assert Choice() == choose(rig.stage, rig.entry("b"), (GPU,), idle_only=True)
    assert names(rig.asks("b"), Start) == ["b"]
