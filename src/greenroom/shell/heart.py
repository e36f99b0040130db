"""Inbox -> Scheduler -> actions -> tasks -> events.

`create_task` appears in this module only.  Every job of the crew ends as exactly one event (or None when
somebody else reports for it) and never raises; a job that does raise is a bug and is reported as the end of
its instance, so that the book stays true.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

from greenroom.core.facts import (
    Action,
    Admit,
    Cause,
    Cut,
    Done,
    Event,
    InstanceReported,
    Operation,
    OperatorAsked,
    Refuse,
    RequestArrived,
    RequestLost,
    SetTimer,
    Setup,
    SetupChanged,
    ShutdownAsked,
    Sleep,
    Start,
    State,
    Stop,
    Tell,
    Ticked,
    Verify,
    Wake,
)
from greenroom.core.scheduler import Scheduler

log = logging.getLogger("greenroom")

Transition: TypeAlias = Start | Stop | Sleep | Wake | Verify
Job: TypeAlias = Coroutine[Any, Any, InstanceReported | None]

JOURNAL_KEPT = 48  # events with their actions, for the story of a broken invariant; more would only cool the cache
TIMER_MIN_S = 0.001


class Party(Protocol):
    """Whoever asked: a request's front end or an operator's call.  Called on the loop's thread, must not raise."""

    def admitted(self, action: Admit) -> None: ...

    def refused(self, action: Refuse) -> None: ...

    def cut(self, action: Cut) -> None: ...

    def done(self, action: Done) -> None: ...


class Crew(Protocol):
    """Carries out transitions; see `greenroom.shell.crew`."""

    async def start(self, action: Start) -> InstanceReported | None: ...

    async def stop(self, action: Stop) -> InstanceReported | None: ...

    async def sleep(self, action: Sleep) -> InstanceReported | None: ...

    async def wake(self, action: Wake) -> InstanceReported | None: ...

    async def verify(self, action: Verify) -> InstanceReported | None: ...

    async def watch(self, model: str, generation: int) -> InstanceReported | None:
        """Wait until a ready engine ends by itself; None when it was stopped by order."""

    async def end_all(self) -> None: ...


class Shell:
    """Owns the scheduler, the parties that wait, and all tasks."""

    def __init__(self, setup: Setup, crew: Crew, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.crew = crew
        self.setup = setup
        self.scheduler = Scheduler(setup, clock())
        self.parties: dict[int, Party] = {}
        self.journal: deque[tuple[Event, Sequence[Action]]] = deque(maxlen=JOURNAL_KEPT)
        self.hooks: list[Callable[[Event, Sequence[Action]], None]] = []  # told of every event with its actions
        self.tellers: list[Callable[[Tell], None]] = []
        self._inbox: deque[Event] = deque()
        self._handling = False
        self._latest_at = clock()  # the moment of the latest event handled
        self._recovering = False
        self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._last_request = 0
        self._down = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._doers: dict[type[Any], Callable[[Any], None]] = {
            Admit: self._admit,
            Refuse: self._refuse,
            Cut: self._cut,
            Done: self._done,
            Start: lambda action: self._run(self._start(action), action),
            Stop: lambda action: self._run(crew.stop(action), action),
            Sleep: lambda action: self._run(crew.sleep(action), action),
            Wake: lambda action: self._run(crew.wake(action), action),
            Verify: lambda action: self._run(crew.verify(action), action),
            SetTimer: self._set_timer,
            Tell: self._tell,
        }

    # ------------------------------------------------------------------ events in

    def begin(self) -> None:
        """Bring in pinned and preloaded models."""
        self.post(Ticked(self.clock()))

    def next_request(self) -> int:
        self._last_request += 1
        return self._last_request

    def ask(self, request: int, party: Party, event: RequestArrived | OperatorAsked) -> None:
        self.parties[request] = party
        if self._recovering:
            self._refuse(Refuse(request, 503, "recovering", "greenroom is recovering from an inner fault; ask again in a moment", 2.0))
            return
        self.post(event)

    def lost(self, request: int, why: str) -> None:
        """Like any event, but the party goes on waiting."""
        self.post(RequestLost(self.clock(), request, why))

    @property
    def latest_at(self) -> float:
        """The moment of the latest event handled."""
        return self._latest_at

    def forget(self, request: int) -> None:
        self.parties.pop(request, None)

    def post(self, event: Event) -> None:
        """Handle an event now, or after the one that is being handled."""
        if self._handling:
            self._inbox.append(event)
            return
        self._handling = True
        try:
            self._handle(event)
            while self._inbox:
                self._handle(self._inbox.popleft())
        finally:
            self._handling = False

    def _handle(self, event: Event) -> None:
        if self._recovering:
            return
        # A word may be a moment older than what was handled while it was on its way; the book's time never runs backwards.
        if event.at < self._latest_at:
            event = replace(event, at=self._latest_at)
        self._latest_at = event.at
        try:
            actions = self.scheduler.handle(event)
        except Exception:  # a broken invariant: never go on with a false book
            log.exception("an invariant of the scheduler is broken; all engines are ended and the book is built anew")
            self._dump_journal(event)
            self._recover()
            return
        self.journal.append((event, actions))
        if self.hooks:
            for hook in self.hooks:
                hook(event, actions)
        doers = self._doers
        for action in actions:
            try:
                doers[type(action)](action)
            except Exception:  # whoever is told must not keep the next action from being carried out
                log.exception("%s could not be carried out", type(action).__name__)
        if self._closing and not self._down.is_set() and self.scheduler.is_down():
            self._down.set()

    # ------------------------------------------------------------------ actions out

    def _admit(self, action: Admit) -> None:
        party = self.parties.get(action.request)
        if party is not None:
            party.admitted(action)

    def _cut(self, action: Cut) -> None:
        party = self.parties.get(action.request)
        if party is not None:
            party.cut(action)

    def _refuse(self, action: Refuse) -> None:
        party = self.parties.pop(action.request, None)
        if party is not None:
            party.refused(action)

    def _done(self, action: Done) -> None:
        party = self.parties.pop(action.request, None)
        if party is not None:
            party.done(action)

    def say(self, told: Tell) -> None:
        """Something that happened outside the scheduler, told like what happens in it."""
        self._tell(told)

    def _tell(self, action: Tell) -> None:
        log.log(logging.WARNING if action.level == "warning" else logging.INFO, "%s: %s", action.model, action.text)
        for teller in self.tellers:
            teller(action)

    def _set_timer(self, action: SetTimer) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(TIMER_MIN_S, action.at - self.clock())
        self._timer = self._loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.post(Ticked(self.clock()))

    async def _start(self, action: Start) -> InstanceReported | None:
        report = await self.crew.start(action)
        if report is not None and report.state is State.READY:
            self._run(self.crew.watch(action.model, action.generation), action, "watch")
        return report

    def _run(self, job: Job, action: Transition, what: str = "") -> None:
        self.spawn(self._ends_as_event(job, action, what or type(action).__name__.lower()))

    async def _ends_as_event(self, job: Job, action: Transition, what: str) -> None:
        scheduler = self.scheduler
        try:
            report = await job
        except Exception as exc:  # a bug of the crew: the engine is ended and reported gone, so that the book stays true
            log.exception("%s of %s raised", what, action.model)
            report = await self._end_broken(action, f"inner fault during {what}: {exc}")
        if report is not None and self.scheduler is scheduler:  # a word meant for an earlier book says nothing to this one
            self.post(report)

    async def _end_broken(self, action: Transition, why: str) -> InstanceReported:
        if not isinstance(action, Stop):
            try:
                await self.crew.stop(Stop(action.model, action.generation, why))
            except Exception:
                log.exception("stop of %s raised too", action.model)
        return InstanceReported(self.clock(), action.model, action.generation, State.STOPPED, cause=Cause.EXITED, why=why)

    def spawn(self, job: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """The only place where tasks are made; each is kept until it ends and its fault is logged."""
        task = self._loop.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("a task failed", exc_info=fault)

    # ------------------------------------------------------------------ ends

    async def shut_down(self, grace_s: float) -> None:
        """Refuse what waits, let requests in flight end for `grace_s`, then cut them; return when every engine is gone."""
        self._closing = True
        self.post(ShutdownAsked(self.clock()))
        if not self._down.is_set() and not self.scheduler.is_down():
            try:
                async with asyncio.timeout(grace_s):
                    await self._down.wait()
            except TimeoutError:
                self.post(ShutdownAsked(self.clock(), force=True))
                try:
                    async with asyncio.timeout(grace_s):
                        await self._down.wait()
                except TimeoutError:
                    log.warning("engines did not end in time; they are killed")
        await self.crew.end_all()
        await self.close()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reload(self, setup: Setup) -> None:
        self.setup = setup
        self.post(SetupChanged(self.clock(), setup))

    # ------------------------------------------------------------------ a broken invariant

    def _recover(self) -> None:
        self._recovering = True
        for request, party in list(self.parties.items()):
            message = "greenroom met an inner fault and starts over; ask again in a moment"
            party.cut(Cut(request, "inner_fault", message))
            if self.parties.pop(request, None) is not None:
                party.refused(Refuse(request, 503, "inner_fault", message, 2.0))
        self._inbox.clear()
        self.spawn(self._start_over())

    async def _start_over(self) -> None:
        await self.crew.end_all()
        if self._closing:
            self._down.set()  # nothing is started again
            return
        pins = self.scheduler.overruled_pins
        self.scheduler = Scheduler(self.setup, self.clock())
        self._recovering = False
        self.begin()
        for model, is_pinned in pins.items():  # nobody waits for the answer
            self.post(OperatorAsked(self.clock(), self.next_request(), model, Operation.PIN if is_pinned else Operation.UNPIN))

    def _dump_journal(self, event: Event) -> None:
        for past, actions in list(self.journal):
            log.error("journal: %s -> %s", past, [action for action in actions if not isinstance(action, Tell)])
        log.error("journal: %s -> (broke)", event)
