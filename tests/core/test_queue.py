"""The requests that wait for one model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.queue import ModelQueue, Waiting


def a_queue(*requests: int) -> ModelQueue:
    queue = ModelQueue()
    for request in requests:
        queue.add(Waiting(request, float(request)))
    return queue


def test_they_leave_in_the_order_they_came() -> None:
    """First in, first out."""
    queue = a_queue(1, 2, 3)

    assert [queue.pop_first().request for _ in range(3)] == [1, 2, 3]


def test_one_that_comes_back_stands_before_all_that_arrived_after_it() -> None:
    """Its first arrival counts, not its return."""
    queue = a_queue(1, 3, 4)
    queue.add(Waiting(2, 2.0, retried=True), front=True)

    assert [item.request for item in queue.drain()] == [1, 2, 3, 4]


def test_ghosts_are_no_clients() -> None:
    """They keep the queue alive and are counted apart."""
    queue = a_queue(1)
    queue.add(Waiting(-1, 2.0, ghost=True, quiet_ghost=True))
    assert (len(queue), queue.clients, queue.ghostly, queue.only_quiet) == (2, 1, True, False)
    queue.remove(1)

    assert (len(queue), queue.clients, queue.ghostly, queue.only_quiet) == (1, 0, True, True)


def test_a_ghost_that_may_evict_is_not_quiet() -> None:
    """A pinned model's start or an operator's load is wanted like a client's request."""
    queue = ModelQueue()
    queue.add(Waiting(-1, 0.0, ghost=True))

    assert (queue.ghostly, queue.only_quiet) == (True, False)


def test_removing_somebody_unknown_gives_nothing() -> None:
    """None, and nothing is forgotten."""
    queue = a_queue(1)

    assert (queue.remove(7), len(queue), queue.weight) == (None, 1, 1.0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.sampled_from((0.25, 1.0))), max_size=40))
def test_the_sums_are_what_a_walk_would_give(script: list[tuple[bool, int, float]]) -> None:
    """Weight and ages, kept without a walk, whatever comes and goes."""
    queue: ModelQueue = ModelQueue()
    kept: dict[int, Waiting] = {}
    for at, (comes, request, weight) in enumerate(script):
        if comes and request not in kept:
            kept[request] = Waiting(request, float(at), weight, ghost=request == 0)
            queue.add(kept[request])
        elif not comes:
            assert kept.pop(request, None) == queue.remove(request)
    now = 100.0

    assert list(kept) == [item.request for item in list(queue._items.values())]
    assert sum(item.weight for item in kept.values()) == pytest.approx(queue.weight)
    assert sum(item.weight * (now - item.arrived_at) for item in kept.values()) == pytest.approx(queue.age_sum(now))
    assert sum(not item.ghost for item in kept.values()) == queue.clients
