"""What models would become on a cluster: from demand and footprints, and only where the signal is there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.facts import Device, Model, Setup
from greenroom.ledger.rows import RequestRow
from greenroom.planner.graduate import Future, demand, gpus_for, graduation

GIB = 1024
HOUR = 3600.0
OUTGROWN = {"verdict": "outgrown", "text": "gpu0 has outgrown one card"}


def row(at: float, service_s: float, model: str = "a", waited_s: float = 0.0, start: str = "hot") -> RequestRow:
    return RequestRow(0, at, model, 1, "", "interactive", "/v1/x", queue_s=waited_s, duration_s=waited_s + service_s, start=start)


def setup(*models: Model, gib: int = 80) -> Setup:
    return Setup((Device("gpu0", "gpu", gib * GIB), Device("ram", "ram", 64 * GIB)), models)


def model(name: str = "a", gib: int | None = 40, **more: object) -> Model:
    return Model(name, ("gpu0",), None if gib is None else gib * GIB, need_source="measured", **more)  # type: ignore[arg-type]


def only(rows: Sequence[RequestRow], one: Model, gpu_gib: int | None = None) -> Future:
    found = graduation(setup(one), rows, (0.0, HOUR), OUTGROWN, gpu_mib=None if gpu_gib is None else gpu_gib * GIB)
    return found.futures[0]


def test_replicas_follow_the_work_at_the_peak_and_not_the_waiting() -> None:
    """Ten in flight on slots of four take four replicas with room to spare; that they waited as long again changes nothing."""
    rows = [row(float(at), 10.0, waited_s=waited) for at in range(3600) for waited in (0.0,)]
    slow = [row(one.at, 10.0, waited_s=10.0) for one in rows]
    served, waited = only(rows, model(parallel=4)), only(slow, model(parallel=4))

    assert served.peak == pytest.approx(10.0, abs=0.2)
    assert served.replicas == waited.replicas == 4
    assert (served.becomes, served.gpus, served.held) == ("pool", 1, 4)


def test_refused_requests_count_as_work_that_was_wanted() -> None:
    """With what the others took."""
    rows = [row(float(at), 10.0) for at in range(0, 3600, 2)] + [row(float(at), 0.0, start="") for at in range(1, 3600, 2)]
    assert demand(rows, (0.0, HOUR))[0] == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize(
    ("need_gib", "devices", "gpu_gib", "gpus"),
    [
        (40, 1, 80, 1),
        (70, 1, 80, 1),
        (79, 1, 80, 1),
        (40, 1, 24, 2),
        (70, 2, 80, 2),
        (140, 1, 24, 8),
        (30, 2, 80, 1),
        (40, 2, 80, 2),
        (60, 4, 80, 4),
    ],
)
def test_gpus_of_a_replica_follow_its_footprint_on_gpus_of_that_size(need_gib: int, devices: int, gpu_gib: int, gpus: int) -> None:
    """In powers of two; the need is that of one device."""
    one = model(gib=need_gib, devices_count=devices)
    assert gpus_for(need_gib * GIB * devices, one, gpu_gib * GIB) == gpus


def test_each_model_has_the_future_that_fits_it() -> None:
    """Busy, occasional, small, on the CPU, never asked."""
    models = (model("busy"), model("rare"), model("small", 3), Model("cpu", ("ram",), GIB), model("unused"))
    rows = [row(float(at), 20.0, "busy") for at in range(0, 3600, 60)] + [
        row(100.0, 20.0, "rare"),
        row(5.0, 1.0, "small"),
        row(9.0, 1.0, "cpu"),
    ]
    found = graduation(setup(*models), rows, (0.0, HOUR), OUTGROWN)

    assert {one.model: one.becomes for one in found.futures} == {
        "busy": "pool",
        "rare": "zero",
        "small": "stay",
        "cpu": "stay",
        "unused": "stay",
    }
    assert (found.gpus_now, found.gpus_held, found.gpus_at_most) == (1, 1, 2)
    assert "1 GPU held all the time, up to 2, in place of 1" in found.text
    said = {one.model: one.why for one in found.futures}
    assert said["small"].startswith("it fills 4% of a GPU")
    other = graduation(setup(*models), rows, (0.0, HOUR), OUTGROWN, poolable=frozenset({"rare"}))
    assert [one.becomes for one in other.futures] == ["stay", "zero", "stay", "stay", "stay"]


@pytest.mark.parametrize(
    ("verdict", "ready"), [("outgrown", True), ("capacity", True), ("tune", False), ("fits", False), ("unknown", False)]
)
def test_the_signal_is_outgrowns_and_nobody_elses(verdict: str, ready: bool) -> None:
    """Whatever the demand."""
    rows = [row(float(at), 10.0) for at in range(3600)]
    found = graduation(setup(model()), rows, (0.0, HOUR), {"verdict": verdict, "text": "so it is"})
    assert found.ready is ready
    assert found.text.startswith("so it is. A cluster" if ready else "Not now: so it is.")


@given(st.lists(st.tuples(st.floats(0, 3599), st.floats(0.01, 600)), max_size=60))
def test_demand_is_bounded_by_what_was_asked(asked: list[tuple[float, float]]) -> None:
    """No more than all at once, and more work never takes fewer replicas."""
    rows = [row(at, service) for at, service in asked]
    mean, peak, busy = demand(rows, (0.0, HOUR))
    assert 0 <= peak <= len(rows) + 1e-6
    assert 0 <= busy <= 1 + 600 / HOUR
    assert mean == pytest.approx(sum(service for _, service in asked) / HOUR)
    copies = [only(rows[:count], model(parallel=1)).replicas for count in range(0, len(rows) + 1, 15)]
    assert all(one <= other for one, other in pairwise(copies))
