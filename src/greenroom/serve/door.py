"""Between the data plane and the shell: one Visit a request, from its question to its end."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import urlsplit

from greenroom.core.facts import (
    Admit,
    Cut,
    Done,
    Outcome,
    Priority,
    Refuse,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestQuiet,
    State,
)
from greenroom.core.words import misconfigured
from greenroom.engines.base import Engine
from greenroom.proxy.admission import Grant, Refusal, Waiter, Wish
from greenroom.proxy.errors import not_ready
from greenroom.shell.crew import HostCrew, Running
from greenroom.shell.heart import Shell

from .fetching import Fetching

CANCELLED = "cancelled"  # the code of a request that an operator ended ...
CANCELLED_STATUS = 410  # ... and its status: no client library asks again by itself
BEAT_S = 0.25  # a sign of life is noted this often at most
LACKING_LOOK_S = 5.0  # what models lack is looked for so often while nobody asks for them

log = logging.getLogger("greenroom")


class Nobody:
    """Takes the place of the waiter once a visit has ended, so that the two do not keep each other alive."""

    request = 0

    def admitted(self, grant: Grant) -> None:
        """Too late."""

    def refused(self, refusal: Refusal) -> None:
        """Too late."""

    def cut(self, code: str, message: str) -> None:
        """Too late."""


NOBODY = Nobody()


class Visit:
    """A request as the shell sees it (Party) and as the data plane holds it (Ticket)."""

    __slots__ = ("_admitted", "_door", "_ended", "_last_beat", "_model", "_quiet", "_waiter", "_wish_at", "request", "wish")

    def __init__(self, door: Door, request: int, model: str, waiter: Waiter, at: float) -> None:
        self._door = door
        self.request = request
        self._model = model
        self._waiter: Waiter = waiter
        self._wish_at = at
        self.wish: Wish | None = None  # for those who look
        self._admitted = self._ended = self._quiet = False
        self._last_beat = 0.0

    @property
    def model(self) -> str:
        return self._model

    @property
    def in_flight(self) -> bool:
        return self._admitted and not self._ended and not self._quiet

    @property
    def last_beat(self) -> float:
        return self._last_beat

    @property
    def asked_at(self) -> float:
        return self._wish_at

    @property
    def is_admitted(self) -> bool:
        return self._admitted

    @property
    def left_s(self) -> float | None:
        """Until its deadline, from now; None = it has none."""
        if self.wish is None or self.wish.deadline_s is None:
            return None
        return max(0.0, self.wish.deadline_s - (self._door.shell.clock() - self._wish_at))

    @property
    def first_byte_s(self) -> float | None:
        """From its admission, once one has come."""
        found = getattr(self._waiter, "first_byte_s", None)
        return found if isinstance(found, float) else None

    def dismiss(self, message: str) -> bool:
        """By an operator: its client is told so.  False: it has ended already."""
        if self._ended:
            return False
        if self._admitted:
            self._waiter.cut(CANCELLED, message)
            return True
        shell = self._door.shell
        self._leave()
        self.refused(Refuse(self.request, CANCELLED_STATUS, CANCELLED, message))
        shell.post(RequestCancelled(shell.clock(), self.request))
        return True

    def _leave(self) -> None:
        self._door.shell.forget(self.request)
        if self._door.fetching is not None:
            self._door.fetching.leave(self.request)

    # ---- called when its model's files are here

    def go_on(self) -> None:
        if not self._ended:
            self._door.take(self, self.left_s)

    # ---- called by the shell

    def admitted(self, action: Admit) -> None:
        door = self._door
        running = door.crew.running.get(self._model)
        if running is None or running.generation != action.generation:
            door.shell.lost(self.request, "the engine ended just now")
            return
        self._admitted = True
        now = door.shell.clock()
        self._last_beat = now
        if action.start == "hot" and now - self._wish_at < 0.001:
            self._waiter.admitted(running.hot if isinstance(running.hot, Grant) else door.hot_grant(running))
        else:
            self._waiter.admitted(door.grant(running, action.start, int((now - self._wish_at) * 1000)))

    def refused(self, action: Refuse) -> None:
        if self._ended or self._admitted:
            return  # it was cut, and ends as that
        self._ended = True
        self._leave()
        waiter, self._waiter = self._waiter, NOBODY
        waiter.refused(Refusal(action.status, action.code, action.message, action.retry_after_s))

    def cut(self, action: Cut) -> None:
        if self._admitted and not self._ended:
            self._waiter.cut(action.code, action.message)

    def done(self, action: Done) -> None:
        """Requests are never answered by Done."""

    # ---- called by the data plane

    def cancel(self) -> None:
        if not self._ended:
            self._ended = True
            self._waiter = NOBODY
            shell = self._door.shell
            self._leave()
            shell.post(RequestCancelled(shell.clock(), self.request))

    def finish(self, outcome: Outcome, status: int, bytes_out: int, first_byte_s: float | None) -> None:
        if not self._ended:
            self._ended = True
            self._waiter = NOBODY
            shell = self._door.shell
            shell.forget(self.request)
            shell.post(RequestFinished(shell.clock(), self.request, outcome))

    def lost(self, why: str) -> None:
        if not self._ended:
            self._admitted = False
            self._door.shell.lost(self.request, why)

    def quiet(self, is_quiet: bool) -> None:
        shell = self._door.shell
        self._quiet = is_quiet
        self._last_beat = shell.clock()
        shell.post(RequestQuiet(shell.clock(), self.request, is_quiet))

    def alive(self) -> None:
        now = self._door.shell.clock()
        if now - self._last_beat >= BEAT_S:
            self._last_beat = now

    def held(self) -> None:
        self._last_beat = self._door.held_at[self._model] = self._door.shell.clock()

    def progress(self) -> str:
        door = self._door
        fetched = door.fetching.progress(self.request) if door.fetching is not None else ""
        return fetched or door.shell.scheduler.progress(self.request, door.shell.clock())


class Glance:
    """A page's file, asked of an engine that is there anyway.

    The scheduler hears nothing of it: it takes no slot, and whoever leaves a page open keeps no model by that.
    """

    __slots__ = ("_model", "_waiter")

    def __init__(self, model: str, waiter: Waiter) -> None:
        self._model, self._waiter = model, waiter

    def cancel(self) -> None:
        """It never waits."""

    def finish(self, outcome: Outcome, status: int, bytes_out: int, first_byte_s: float | None) -> None:
        self._waiter = NOBODY

    def lost(self, why: str) -> None:
        waiter, self._waiter = self._waiter, NOBODY
        waiter.refused(Refusal(502, "engine_died", f"{self._model} was on its way out when this was asked of it: {why}", 1.0))

    def quiet(self, is_quiet: bool) -> None:
        """It holds nothing up."""

    def alive(self) -> None:
        """Its engine is not watched for it."""

    def held(self) -> None:
        """As little."""

    def progress(self) -> str:
        return ""


class Door:
    """The Admissions of the running server."""

    def __init__(self, shell: Shell, crew: HostCrew) -> None:
        self.shell = shell
        self.crew = crew
        self.changed: Callable[[str, str], None] | None = None  # model, what it lacks now; "" = nothing any more: plan anew
        self.fetching: Fetching | None = None
        self.held_at: dict[str, float] = {}  # model -> when one of its requests was last held back by its client
        self.look: Callable[[str], None] | None = None  # at the store: a model may have come or gone without us

    def ask(self, wish: Wish, waiter: Waiter) -> Visit | Glance:
        if wish.glance:
            return self._glance(wish.model, waiter)
        return self._visit(wish, waiter)

    def _glance(self, model: str, waiter: Waiter) -> Glance:
        glance, running = Glance(model, waiter), self.crew.running.get(model)
        if running is None:
            waiter.refused(not_ready(model))
        else:
            waiter.admitted(running.hot if isinstance(running.hot, Grant) else self.hot_grant(running))
        return glance

    def _visit(self, wish: Wish, waiter: Waiter) -> Visit:
        shell = self.shell
        now = shell.clock()
        request = waiter.request = shell.next_request()
        visit = Visit(self, request, wish.model, waiter, now)
        visit.wish = wish
        self.take(visit, wish.deadline_s)
        return visit

    def take(self, visit: Visit, deadline_s: float | None) -> None:
        """Ask the scheduler, unless the model lacks something: then its files are fetched first, or the request is refused."""
        wish, shell = visit.wish, self.shell
        assert wish is not None
        if self.crew.lacking:
            self._look(wish.model)
            if self.fetching is not None and wish.model in self.fetching.absent:
                shell.parties[visit.request] = visit  # to be seen, and cut
                self.fetching.wait(wish.model, visit, self.crew.stage.engines[wish.model].config.queue_limit)
                return
            if lacking := self.lacks(wish.model):
                shell.forget(visit.request)
                visit.refused(Refuse(visit.request, 503, "misconfigured", misconfigured(wish.model, lacking)))
                return
        priority = Priority.BATCH if wish.batch else None
        shell.ask(visit.request, visit, RequestArrived(shell.clock(), visit.request, wish.model, priority, deadline_s, wish.client))

    def _look(self, model: str) -> None:
        if self.look is not None and model in self.crew.lacking and (self.fetching is None or model not in self.fetching.running):
            self.look(model)

    def is_ready(self, model: str) -> bool:
        return self.shell.scheduler.state_of(model) is State.READY

    def state_of(self, model: str) -> str:
        return self.shell.scheduler.state_of(model).value

    def oldest_beats(self) -> dict[str, float]:
        """Pulse: the longest silent request in flight of each model; open but quiet tunnels may be silent.

        An engine with one thread that writes to a client who does not read answers nobody else meanwhile, so while one
        request is held back the silence of none counts.
        """
        beats: dict[str, float] = {}
        for visit in self.shell.parties.values():
            if isinstance(visit, Visit) and visit.in_flight:
                beats[visit.model] = min(visit.last_beat, beats.get(visit.model, visit.last_beat))
        return {model: max(beat, self.held_at.get(model, beat)) for model, beat in beats.items()}

    def hot_grant(self, running: Running) -> Grant:
        """What nearly every request gets, made once an engine."""
        base, secrets = base_path(running.engine), secret_headers(running.engine)
        running.hot = made = Grant(running.model, running.host, running.port, running.generation, "hot", 0, base, secrets)
        return made

    def grant(self, running: Running, start: str, waited_ms: int) -> Grant:
        hot = running.hot if isinstance(running.hot, Grant) else self.hot_grant(running)
        return replace(hot, start=start, waited_ms=waited_ms)

    def lacks(self, model: str) -> str:
        """What keeps it from being started, "" = nothing; what it lacked is looked for again, for files and programs come and go."""
        known = self.crew.lacking.get(model)
        if known is None or model in self.crew.running:
            return ""
        engine = self.crew.stage.engines[model]
        lacking = engine.config.misconfigured or engine.missing()
        self._note(model, known, lacking)
        return lacking

    async def watch(self) -> None:
        """What was lacking may come while nobody asks: what is told of the model follows, and one that is pinned comes in."""
        while True:
            await asyncio.sleep(LACKING_LOOK_S)
            try:
                await self.look_around()
            except Exception:  # one bad look must not be the last one
                log.exception("what models lack could not be looked for")

    async def look_around(self) -> None:
        for model, known in list(self.crew.lacking.items()):
            engine = self.crew.stage.engines[model]
            if engine.config.misconfigured:
                continue  # only a reload or a fetch puts that right
            lacking = await asyncio.to_thread(engine.missing)
            if self.crew.lacking.get(model) == known and self._note(model, known, lacking):
                return  # planned anew, with a look at all of them

    def _note(self, model: str, known: str, lacking: str) -> bool:
        """Whether all was planned anew: not for every byte that a file has grown by meanwhile."""
        if without_figures(lacking) == without_figures(known):
            return False
        before = self.crew.lacking
        if self.changed is not None:
            self.changed(model, lacking)  # where this fails, nothing is noted, and the next look tries again
        if self.crew.lacking is before:  # a new plan comes with a look of its own
            before[model] = lacking
            if not lacking:
                del before[model]
        return True


def without_figures(sentence: str) -> str:
    return re.sub(r"\d[\d,.]*", "#", sentence)


def base_path(engine: Engine) -> str:
    return urlsplit(engine.config.proxy.replace("${PORT}", "0")).path.rstrip("/")


def secret_headers(engine: Engine) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in engine.readiness().headers)
