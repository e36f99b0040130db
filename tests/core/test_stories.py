"""Field cases that a subprocess cannot show well, played on the scheduler alone in virtual time."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

import greenroom
from greenroom.core.facts import (
    Action,
    Admit,
    Cause,
    Device,
    Done,
    Event,
    Group,
    InstanceReported,
    Model,
    Operation,
    OperatorAsked,
    Refuse,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    SetTimer,
    Setup,
    Start,
    State,
    Stop,
    Tell,
    Ticked,
)
from greenroom.core.scheduler import Scheduler

GPU = "gpu0"
UP_S = 2.0
DOWN_S = 0.2


class Play:
    """A scheduler on one device; the test says what the host reports."""

    def __init__(self, *models: Model, capacity_mib: int = 10_000, groups: tuple[Group, ...] = ()) -> None:
        self.now = 0.0
        self.timer_at: float | None = None
        self.requests = 0
        self.told: list[Tell] = []
        self.scheduler = Scheduler(Setup((Device(GPU, "declared", capacity_mib, measured=False),), models, groups), 0.0)

    def does(self, event: Event) -> list[Action]:
        """What the core orders in answer to an event; timers and tales are kept aside."""
        out: list[Action] = []
        for action in self.scheduler.handle(event):
            if isinstance(action, SetTimer):
                self.timer_at = action.at
            elif isinstance(action, Tell):
                self.told.append(action)
            else:
                out.append(action)
        return out

    def asks(self, model: str) -> list[Action]:
        self.requests += 1
        return self.does(RequestArrived(self.now, self.requests, model))

    def ends(self, request: int) -> list[Action]:
        return self.does(RequestFinished(self.now, request))

    def leaves(self, request: int) -> list[Action]:
        return self.does(RequestCancelled(self.now, request))

    def wishes(self, model: str, operation: Operation) -> list[Action]:
        self.requests += 1
        return self.does(OperatorAsked(self.now, self.requests, model, operation))

    def ready(self, model: str, generation: int = 1) -> list[Action]:
        return self.does(InstanceReported(self.now, model, generation, State.READY, took_s=UP_S))

    def stopped(self, model: str, generation: int = 1) -> list[Action]:
        return self.does(InstanceReported(self.now, model, generation, State.STOPPED, took_s=DOWN_S))

    def waits_until(self, at: float) -> list[tuple[float, Action]]:
        """Let time pass; what the timers on the way ordered, and when."""
        out: list[tuple[float, Action]] = []
        while self.timer_at is not None and self.timer_at <= at:
            self.now, self.timer_at = max(self.now, self.timer_at), None
            out += [(self.now, action) for action in self.does(Ticked(self.now))]
        self.now = at
        return out

    def warms(self, model: str) -> None:
        """Bring a model in by a request that ends."""
        self.asks(model)
        self.now += UP_S
        self.ready(model, self.generation(model))
        self.ends(self.requests)

    def generation(self, model: str) -> int:
        return next(instance.generation for one in self.scheduler.view(self.now).models if one.id == model for instance in one.instances)

    def states(self) -> dict[str, State]:
        return {one.id: one.state for one in self.scheduler.view(self.now).models}

    def serves(self, model: str) -> None:
        """A request, and everything the host does until it has ended: stops and starts succeed at once."""
        todo = self.asks(model)
        mine = self.requests
        for _ in range(100):
            if not todo:
                if self.scheduler.state_of(model) is State.READY and self.served(mine):
                    return
                assert self.timer_at is not None, f"{model} is never served"
                self.now, self.timer_at = max(self.now, self.timer_at), None
                todo = self.does(Ticked(self.now))
                continue
            action = todo.pop(0)
            if isinstance(action, Stop):
                self.now += DOWN_S
                todo += self.stopped(action.model, action.generation)
            elif isinstance(action, Start):
                self.now += UP_S
                todo += self.ready(action.model, action.generation)
            elif isinstance(action, Admit):
                self.admitted.add(action.request)
                todo += self.ends(action.request)
        raise AssertionError("it never comes to rest")

    @property
    def admitted(self) -> set[int]:
        if not hasattr(self, "_admitted"):
            self._admitted: set[int] = set()
        return self._admitted

    def served(self, request: int) -> bool:
        return request in self.admitted


def statuses(actions: list[Action]) -> list[int | str]:
    """Refusals by status, admissions by their word, the rest by type."""
    return [
        action.status if isinstance(action, Refuse) else action.start if isinstance(action, Admit) else type(action).__name__
        for action in actions
    ]


# ------------------------------------------------------------------------------------------------------------------ B07


@pytest.mark.parametrize("warm", [True, False])
def test_the_queue_bound_is_the_same_for_a_cold_and_a_warm_model(warm: bool) -> None:
    """parallel 1, queue 4: of ten at once five are taken and five refused with 429, whether its engine runs or not."""
    play = Play(Model("a", (GPU,), 1000, parallel=1, queue_limit=4))
    if warm:
        play.warms("a")

    answers = [action for _ in range(10) for action in play.asks("a")]

    refused = [action for action in answers if isinstance(action, Refuse)]
    assert [(each.status, each.code) for each in refused] == [(429, "queue_full")] * 5
    assert all(each.retry_after_s is not None and each.retry_after_s >= 1 for each in refused)
    bound = "4 requests wait for a, and no more may: 4 behind those that it serves (queue_limit)"
    bound = bound if warm else "5 requests wait for a, and no more may: 1 that it takes at once (parallel) and 4 more (queue_limit)"
    assert {each.message.partition(";")[0] for each in refused} == {bound}
    assert 5 - warm == play.scheduler.view(play.now).queue_length


def test_a_cold_model_without_a_queue_can_still_be_started() -> None:
    """queue_limit 0 forbids waiting for others, not waiting for the engine."""
    play = Play(Model("a", (GPU,), 1000, parallel=2, queue_limit=0))

    assert [*statuses(play.asks("a")), *statuses(play.asks("a")), *statuses(play.asks("a"))] == ["Start", 429]


def test_a_full_queue_says_when_to_ask_again_as_its_header_does() -> None:
    """One sentence: the bound that is filled, and the time."""
    play = Play(Model("a", (GPU,), 1000, parallel=2, queue_limit=4, up_s=19.0))
    (refused,) = [action for _ in range(7) for action in play.asks("a") if isinstance(action, Refuse)]

    assert refused.retry_after_s == 19.0
    bound = "2 that it takes at once (parallel) and 4 more (queue_limit)"
    assert refused.message == f"6 requests wait for a, and no more may: {bound}; ask again in 19 s"


def test_a_waiting_client_that_leaves_frees_its_place_at_once() -> None:
    """One more is taken for each that left, and never the one who left."""
    play = Play(Model("a", (GPU,), 1000, parallel=1, queue_limit=2))
    play.warms("a")
    assert statuses(play.asks("a")) == ["hot"]
    running = play.requests
    assert play.asks("a") + play.asks("a") == []
    assert statuses(play.asks("a")) == [429]

    assert play.leaves(running + 1) == []
    assert play.asks("a") == []

    assert [running + 2] == [action.request for action in play.ends(running) if isinstance(action, Admit)]


# ------------------------------------------------------------------------------------------------------------------ B08


BIG = Model("big", (GPU,), 9000, ttl_s=10.0, up_s=90.0)
SMALL = Model("small", (GPU,), 3000)


def test_a_load_that_nobody_wants_any_more_is_stopped_for_the_next_one() -> None:
    """The wrong model's start is stopped as soon as the right one is asked for, and the right one starts next."""
    play = Play(BIG, SMALL)
    assert statuses(play.asks("big")) == ["Start"]
    play.now = 2
    orders = play.leaves(1)
    play.now = 3
    orders += play.asks("small")

    assert [(each.model, type(each).__name__) for each in orders if isinstance(each, (Stop, Start))] == [("big", "Stop")]
    play.now = 3.2
    assert [(each.model, each.generation) for each in play.stopped("big") if isinstance(each, Start)] == [("small", 1)]
    play.now = 5.2
    assert [Admit(2, "small", 1, "cold")] == play.ready("small")


def test_a_load_that_goes_on_for_nobody_is_idle_from_its_end() -> None:
    """Nobody else asks: no request is admitted for the one who left, and the ttl counts from the end of the load."""
    play = Play(BIG)
    play.asks("big")
    play.now = 2
    orders = play.leaves(1)
    if any(isinstance(order, Stop) for order in orders):
        return  # given up at once: also a right answer
    play.now = 90
    assert play.ready("big") == []

    assert [(at, type(order).__name__) for at, order in play.waits_until(101)] == [(100.0, "Stop")]


def test_a_load_goes_on_for_the_one_who_stays() -> None:
    """Two wait, one leaves: no stop, and the other one is admitted."""
    play = Play(BIG, SMALL)
    play.asks("big")
    play.asks("big")
    play.now = 2
    assert play.leaves(1) == []
    play.now = 90

    assert [Admit(2, "big", 1, "cold")] == play.ready("big")


# ------------------------------------------------------------------------------------------------------------------ B19


def test_a_load_or_an_answer_longer_than_the_ttl_is_not_idle_time() -> None:
    """ttl 10, a load of 15, an answer of 25, a stream that is silent for 60: it leaves 10 after the last end, not before."""
    play = Play(Model("a", (GPU,), 1000, ttl_s=10.0))
    play.asks("a")
    assert play.waits_until(15) == []
    play.ready("a")
    assert play.waits_until(40) == []
    play.ends(1)
    assert play.waits_until(48) == []
    play.asks("a")
    assert play.waits_until(108) == []
    play.ends(2)

    assert [(at, type(order).__name__) for at, order in play.waits_until(125)] == [(118.0, "Stop")]


def test_nothing_that_decides_reads_the_wall_clock() -> None:
    """A wall clock that jumps by an hour changes nothing: idle times, back-off and time-outs know the monotonic one only."""
    source = Path(greenroom.__file__).parent
    deciding = [path for folder in ("core", "shell", "host", "proxy") for path in (source / folder).rglob("*.py")]
    wall = re.compile(r"\btime\.(time|time_ns|localtime|gmtime)\(|datetime\.(now|utcnow)")

    assert {path.name: found for path in deciding if (found := wall.findall(path.read_text()))} == {}
    assert len(deciding) > 20


# ------------------------------------------------------------------------------------------------------------------ B21


def test_the_memory_of_an_engine_that_cannot_be_killed_stays_booked() -> None:
    """Nobody is started into it: who needs that room hears so at once, who fits beside it is served, and the wish is answered."""
    play = Play(Model("a", (GPU,), 8000), Model("b", (GPU,), 8000), Model("c", (GPU,), 1500))
    play.warms("a")
    assert statuses(play.wishes("a", Operation.UNLOAD)) == ["Stop"]
    wish = play.requests
    play.now += 7
    why = "pid 4711 does not end even after SIGKILL"
    said = play.does(InstanceReported(play.now, "a", 1, State.STOPPED, cause=Cause.UNKILLABLE, why=why))

    assert [(wish, 503, "unkillable")] == [(each.request, each.status, each.code) for each in said if isinstance(each, Refuse)]
    assert play.scheduler.view(play.now).devices[0].reserved_mib == 8000
    again = play.asks("a")
    assert [(each.status, each.code) for each in again if isinstance(each, Refuse)] == [(503, "unkillable")]
    refused = play.asks("b")
    assert statuses(refused) == [503]
    assert isinstance(refused[0], Refuse)
    assert "held by a, which does not end" in refused[0].message
    assert statuses(play.asks("c")) == ["Start"]


def test_an_unkillable_engine_that_dies_after_all_gives_its_room_back() -> None:
    """The late report frees the book, and both models can be served again."""
    play = Play(Model("a", (GPU,), 8000), Model("b", (GPU,), 8000))
    play.warms("a")
    play.wishes("a", Operation.UNLOAD)
    play.does(InstanceReported(play.now + 7, "a", 1, State.STOPPED, cause=Cause.UNKILLABLE, why="it does not end"))
    play.now += 60
    play.stopped("a")

    assert play.scheduler.view(play.now).devices[0].reserved_mib == 0
    play.serves("b")
    assert State.READY is play.scheduler.state_of("b")


# ------------------------------------------------------------------------------------------------------------------ B57


def pinned_play() -> Play:
    play = Play(Model("main", (GPU,), 8000, pinned=True), Model("x", (GPU,), 4000), Model("y", (GPU,), 1500))
    orders = play.scheduler.start()
    assert [order.model for order in orders if isinstance(order, Start)] == ["main"]
    play.now = UP_S
    play.ready("main")
    return play


def test_a_request_that_would_need_a_pinned_models_room_is_refused_at_once() -> None:
    """A code of its own that names who holds the room; the pinned model is not touched; what fits joins it."""
    play = pinned_play()

    refused = play.asks("x")
    assert statuses(refused) == [503]
    assert isinstance(refused[0], Refuse)
    assert (refused[0].code, "main" in refused[0].message, "pinned" in refused[0].message) == ("no_room", True, True)
    assert statuses(play.asks("y")) == ["Start"]
    assert State.READY is play.scheduler.state_of("main")


def test_an_operator_may_unload_a_pinned_model_and_it_stays_away() -> None:
    """It is stopped, the room goes to whoever asks, and nobody brings it back by itself."""
    play = pinned_play()
    assert statuses(play.wishes("main", Operation.UNLOAD)) == ["Stop"]
    wish = play.requests
    assert [Done(wish, "main is stopped")] == play.stopped("main")
    assert [order.model for order in play.asks("x") if isinstance(order, Start)] == ["x"]
    assert play.waits_until(3600) == []
    assert State.STOPPED is play.scheduler.state_of("main")


@pytest.mark.parametrize("order", list(itertools.permutations(("main", "p", "q"))))
def test_with_groups_the_residents_depend_on_the_last_request_alone(order: tuple[str, ...]) -> None:
    """An exclusive group beside another one, in every order: the last model asked for is the only one there."""
    models = [Model(name, (GPU,), 1000) for name in ("main", "p", "q")]
    play = Play(*models, groups=(Group("solo", frozenset({"main"})), Group("rest", frozenset({"p", "q"}))))
    for name in order:
        play.serves(name)

    assert [order[-1]] == [name for name, state in play.states().items() if state is not State.STOPPED]


@pytest.mark.parametrize("order", list(itertools.permutations(("main", "p", "q"))))
def test_an_exclusive_group_excludes_whoever_came_first(order: tuple[str, ...]) -> None:
    """`rest` neither swaps nor excludes, `solo` does: they are never there together, whichever loads last."""
    models = [Model(name, (GPU,), 1000) for name in ("main", "p", "q")]
    rest = Group("rest", frozenset({"p", "q"}), swap=False, exclusive=False)
    play = Play(*models, groups=(Group("solo", frozenset({"main"})), rest))
    for name in order:
        play.serves(name)

    there = {name for name, state in play.states().items() if state is not State.STOPPED}
    last_of_rest = set(itertools.takewhile(lambda name: name != "main", reversed(order)))
    assert ({"main"} if order[-1] == "main" else last_of_rest) == there


def test_a_pinned_model_that_came_back_after_an_unload_is_pinned_again() -> None:
    """Unloaded by an operator, then asked for by a client: what may not be beside it hears so at once, it never waits for ever."""
    models = Model("main", (GPU,), 8000, pinned=True), Model("rival", (GPU,), 1000), Model("x", (GPU,), 4000)
    play = Play(*models, groups=(Group("solo", frozenset({"rival"})),))
    play.scheduler.start()
    play.now = UP_S
    play.ready("main")
    play.wishes("main", Operation.UNLOAD)
    play.stopped("main")
    play.serves("main")

    assert statuses(play.asks("rival")) == [503]
    assert statuses(play.asks("x")) == [503]


def test_who_waits_when_a_pinned_rival_comes_back_is_refused() -> None:
    """A request that was taken while the pinned model was away is answered when that one is there again."""
    models = Model("main", (GPU,), 1000, pinned=True), Model("rival", (GPU,), 1000)
    play = Play(*models, groups=(Group("solo", frozenset({"rival"})),))
    play.scheduler.start()
    play.now = UP_S
    play.ready("main")
    play.wishes("main", Operation.UNLOAD)
    answers = play.asks("main") + play.asks("rival") + play.stopped("main")
    assert [order.model for order in answers if isinstance(order, Start)] == ["main"]
    play.now += UP_S
    answers += play.ready("main", 2)
    answers += play.ends(play.requests - 1)
    answers += [action for _, action in play.waits_until(play.now + 60)]

    assert [(action.request, action.status) for action in answers if isinstance(action, Refuse)] == [(play.requests, 503)]
