"""What operators see and do: the Facade of the running server."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import logging
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from greenroom import __version__
from greenroom.config.model import ModelConfig
from greenroom.control.facade import InstanceExtra, Result
from greenroom.core.facts import Admit, Cut, Done, Model, Operation, OperatorAsked, Refuse, Tell
from greenroom.core.views import View
from greenroom.host.logs import LogRing
from greenroom.ledger.metrics import Metrics, Page
from greenroom.ledger.rows import STARTED, TellRow
from greenroom.ledger.store import Ledger
from greenroom.shell.crew import HostCrew
from greenroom.shell.heart import Shell

from . import engine_metrics
from .accounts import Accounts
from .fetching import Fetching
from .lookout import Lookout, rounded
from .peers import PeersShown
from .wiring import Plan

EVENTS_KEPT = 512  # for a late or returning subscriber
STORY_KEPT = 64  # sentences of each model
# The phase under way, by the one that ended last; servers listen early or late.
NEXT_PHASE = {"": "spawn", "spawn": "weights", "listen": "weights", "weights": "compile", "compile": "graphs", "graphs": "first answer"}
SUBSCRIBER_EVENTS_MAX = 1024  # not yet read by one subscriber; more are dropped and counted
WAIT_S_MAX = 3600.0


class Call:
    """An operator's wish under way (a Party of the shell)."""

    def __init__(self) -> None:
        self.result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    def admitted(self, action: Admit) -> None:
        """Wishes are never admitted."""

    def cut(self, action: Cut) -> None:
        """Wishes are never cut."""

    def refused(self, action: Refuse) -> None:
        if not self.result.done():
            self.result.set_result(Result(action.status, action.message, action.code, action.retry_after_s))

    def done(self, action: Done) -> None:
        if not self.result.done():
            self.result.set_result(Result(200, action.message))


class Subscriber:
    """One reader of events, with a bounded backlog."""

    def __init__(self) -> None:
        self._items: deque[dict[str, Any]] = deque(maxlen=SUBSCRIBER_EVENTS_MAX)
        self._dropped = 0
        self._some = asyncio.Event()

    def put(self, item: dict[str, Any]) -> None:
        if len(self._items) == SUBSCRIBER_EVENTS_MAX:
            self._dropped += 1
        self._items.append(item)
        self._some.set()

    async def next(self) -> dict[str, Any]:
        while True:
            if self._dropped:
                count, self._dropped = self._dropped, 0
                return {
                    "kind": "dropped",
                    "count": count,
                    "at": time.time(),
                    "model": "",
                    "level": "warning",
                    "text": f"{count} events dropped: read too slowly",
                }
            if self._items:
                return self._items.popleft()
            self._some.clear()
            await self._some.wait()


class EventFeed:
    """Everything the core tells, numbered, for any number of readers."""

    def __init__(self, clock: Callable[[], float], last: int = 0) -> None:
        """`last`: numbers go on after it; one that grows from start to start lets a reader resume across a restart."""
        self._clock = clock
        self._recent: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        self._readers: set[Subscriber] = set()
        self._stories: dict[str, deque[dict[str, Any]]] = {}
        self._last = last
        self.began_at = time.time()

    def recall(self, told: Sequence[TellRow], stories: Mapping[str, Sequence[TellRow]]) -> None:
        """What was told before this start, of all and of each model, and that this is one.

        It has no numbers: whoever resumes is not told it again.
        """
        self._last += 1
        started = {"id": self._last, **plain_event(self.began_at, "", STARTED, "info", f"greenroom {__version__} started")}
        self._recent = deque([*map(plain_tell, told), started, *self._recent], maxlen=EVENTS_KEPT)
        for model, rows in stories.items():
            self._stories[model] = deque([*map(plain_tell, rows), started, *self._stories.get(model, ())], maxlen=STORY_KEPT)

    def tell(self, tell: Tell) -> None:
        self._last += 1
        at = time.time() - max(0.0, self._clock() - tell.at)
        item = {"id": self._last, **plain_event(at, tell.model, tell.kind, tell.level, tell.text)}
        self._recent.append(item)
        story = self._stories.get(tell.model)
        if story is None:
            story = self._stories[tell.model] = deque(maxlen=STORY_KEPT)
        story.append(item)
        for reader in self._readers:
            reader.put(item)

    def story(self, model: str) -> Sequence[dict[str, Any]]:
        """What was told of one model, oldest first."""
        return list(self._stories.get(model, ()))

    def recent(self, limit: int) -> list[dict[str, Any]]:
        return list(self._recent)[-limit:] if limit > 0 else []

    async def follow(self) -> AsyncIterator[dict[str, Any]]:
        reader = Subscriber()
        self._readers.add(reader)
        try:
            while True:
                yield await reader.next()
        finally:
            self._readers.discard(reader)


def plain_event(at: float, model: str, kind: str, level: str, text: str) -> dict[str, Any]:
    return {"at": at, "kind": kind, "model": model, "level": level, "text": text}


def plain_tell(row: TellRow) -> dict[str, Any]:
    return plain_event(row.at, row.model, row.kind, row.level, row.text)


class Desk(Lookout):
    """The Facade."""

    version = __version__

    def __init__(
        self,
        shell: Shell,
        crew: HostCrew,
        plan: Plan,
        feed: EventFeed,
        own_log: LogRing,
        accounts: Accounts | None = None,
        ledger: Ledger | None = None,
        ledger_path: Path | None = None,
    ) -> None:
        self.plan = plan  # replaced on reload
        self.fetching: Fetching | None = None
        self.peers: PeersShown | None = None
        self.lacks: Callable[[str], str] | None = None  # looks again for what a model lacks
        self._accounts = accounts or Accounts()
        self._metrics, self._ledger = Metrics(), ledger
        if ledger is not None:
            ledger.listeners.append(self._metrics)
        self._shell, self._crew, self._feed, self._own_log = shell, crew, feed, own_log
        self._began_at = shell.clock()
        self._known_of: Plan | None = None
        self._known: dict[str, tuple[ModelConfig, Model]] = {}  # of that plan
        self.look_out(ledger_path)

    async def recall(self) -> None:
        """What the ledger knows of the time before this start."""
        ledger, until, models = self._ledger, self._feed.began_at, [model.id for model in self.plan.config.models]
        past: tuple[Sequence[TellRow], Mapping[str, Sequence[TellRow]]] = (), {}
        if ledger is not None:
            find = ledger.find
            past = await self._read(
                lambda: (find.told(None, until, limit=EVENTS_KEPT), find.stories(models, until, limit=STORY_KEPT)), past
            )
        self._feed.recall(*past)

    def uptime_s(self) -> float:
        return self._shell.clock() - self._began_at

    def view(self) -> View:
        return self._shell.scheduler.view(self._shell.clock())

    def peers_status(self) -> list[dict[str, Any]]:
        return self.peers.status() if self.peers is not None else []

    def extra(self, model: str) -> InstanceExtra:
        running = self._crew.running.get(model)
        if running is None:
            return InstanceExtra(None, None)
        phases = running.phases.ended_s if running.phases is not None else {}
        last = max(phases, key=lambda name: phases[name], default="")
        return InstanceExtra(running.process.pid, running.port, NEXT_PHASE.get(last, "") if running.phases is not None else "")

    def static(self, model: str) -> dict[str, Any]:
        if self._known_of is not self.plan:
            self._known_of = self.plan
            self._known = {one.id: (one, other) for one, other in zip(self.plan.config.models, self.plan.setup.models, strict=True)}
        if model not in self._known:
            return {}
        config, lowered = self._known[model]
        estimate = self.plan.estimates.get(model)
        return {
            "aliases": list(config.aliases),
            "engine": self.plan.stage.engines[model].kind,
            "name": config.name,
            "description": config.description,
            "ttl_s": config.ttl_s,
            "ttl_auto": config.ttl_auto,
            "ttl_auto_s": rounded(self._shell.scheduler.stay_s(model)),
            "sleep_after_s": config.sleep_after_s,
            "parallel": lowered.parallel,
            "queue_limit": config.queue_limit,
            "priority": config.priority,
            "devices": list(lowered.devices),
            "estimate": estimate.detail if estimate is not None else "",
            "missing": self.plan.missing.get(model, ""),
            "reference": config.reference,
            "absent": self.fetching is not None and model in self.fetching.absent,
            "fetch": self._fetch_of(model),
            "fetch_error": self.fetching.failed[model][1] if self.fetching is not None and model in self.fetching.failed else "",
            "requests": self._accounts.of(model),
        }

    def resolve(self, name: str) -> str | None:
        return self.plan.catalog.names.get(name)

    def near(self, name: str) -> Sequence[str]:
        far = (model for peer in self.peers_status() for model in peer["models"])
        return difflib.get_close_matches(name, list(dict.fromkeys((*self.plan.catalog.names, *far))), n=3, cutoff=0.5)

    async def operate(self, model: str, operation: Operation, *, force: bool, level: int | None, wait_s: float) -> Result:
        words = ""
        if self.fetching is not None and model in self.fetching.absent:
            if operation is Operation.UNLOAD:
                words = self._stopped(self.fetching, model)
            elif (result := await self._fetched(self.fetching, model, operation, wait_s)) is not None:
                return result
        if self.lacks is not None and operation in (Operation.LOAD, Operation.PIN):
            self.lacks(model)
        call, request = Call(), self._shell.next_request()
        self._shell.ask(request, call, OperatorAsked(self._shell.clock(), request, model, operation, force, level))
        if not call.result.done() and wait_s > 0:
            await asyncio.wait({call.result}, timeout=min(wait_s, WAIT_S_MAX))
        if call.result.done():
            result = call.result.result()
            words = words or self._fetched_for_pin(model, operation, result.message)
            return replace(result, message=words) if words and result.status == 200 else result
        state = self._shell.scheduler.state_of(model)
        return Result(202, f"{operation.value} of {model} is under way ({state.value})")

    def _stopped(self, fetching: Fetching, model: str) -> str:
        """What an unload did to the fetch; "" when an engine of it runs, as it was before its reference changed."""
        stopped = fetching.stop(model)
        if model in self._crew.running:
            return ""
        return f"the fetch of {model} was stopped; what has come is kept" if stopped else f"{model} is not loaded, and not here"

    def _fetched_for_pin(self, model: str, operation: Operation, message: str) -> str:
        """A pin brings its model's files as well."""
        if operation is not Operation.PIN:
            return ""
        if self.fetching is not None and model in self.fetching.running:
            return f"{message}, its files are fetched, and it is loaded when they are here"
        lowered = next((one for one in self.plan.setup.models if one.id == model), None)
        if lowered is None or not lowered.misconfigured or model in self._crew.running:
            return ""
        return f"{message}, and cannot start: {lowered.misconfigured}"

    async def _fetched(self, fetching: Fetching, model: str, operation: Operation, wait_s: float) -> Result | None:
        """What an operator's wish does to a model whose files are not here; None = go on."""
        if operation in (Operation.PIN, Operation.UNPIN):
            return None  # what is pinned is wanted, and fetched
        if operation is not Operation.LOAD:
            if model in self._crew.running:  # as it was before its reference changed
                return None
            return Result(409, f"the files of {model} are not here yet: load it, or ask it something", "absent")
        fetch = fetching.start(model, asked=True)
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, WAIT_S_MAX)):
                    await fetch.done.wait()
        if not fetch.done.is_set():
            return Result(202, f"{model}: {fetch.text()}")
        return Result(503, f"{model} could not be fetched: {fetch.why}", "fetch_failed") if fetch.why else None

    def present(self, model: str) -> tuple[str, Sequence[str]]:
        """Of one whose files are on their way or could not be fetched, that is what there is to say."""
        if self.fetching is not None and model in self.fetching.absent:
            if (fetch := self.fetching.running.get(model)) is not None:
                count = len(fetch.waiting)
                who = f"; {count} {'request waits' if count == 1 else 'requests wait'} for it" if count else ""
                return f"Stopped, and {fetch.text()}{who}.", ()
            if model in self.fetching.failed:
                retry_s = self.fetching.retry_s(model)
                then = f"the next request{f' in {retry_s:.0f} s or later' if retry_s >= 1 else ''} tries again"
                again = "that is tried again" if self.fetching.comes_back(model) else then
                return f"Stopped: its files could not be fetched ({self.fetching.failed[model][1]}); {again}.", ()
        return super().present(model)

    def _fetch_of(self, model: str) -> dict[str, Any] | None:
        fetch = self.fetching.running.get(model) if self.fetching is not None else None
        return {**fetch.plain(), "since_s": rounded(self._shell.clock() - fetch.since)} if fetch is not None else None

    def why(self, model: str) -> Sequence[tuple[float, str]]:
        offset = time.time() - self._shell.clock()
        return [(at + offset, text) for at, text in self._shell.scheduler.story(model)]

    def story(self, model: str) -> Sequence[dict[str, Any]]:
        told = [
            {"at": round(one["at"], 3), "text": one["text"], "cause": one["kind"], "refs": self._named(model, one["text"])}
            for one in self._feed.story(model)
        ]
        return told or [{"at": round(at, 3), "text": text, "cause": "", "refs": self._named(model, text)} for at, text in self.why(model)]

    def _named(self, model: str, text: str) -> list[str]:
        """The other models that a sentence names."""
        ids = self.plan.catalog.models
        words = (word.strip(",;:.()") for word in text.split())
        return list(dict.fromkeys(word for word in words if word != model and word in ids))

    def log_tail(self, model: str, lines: int) -> Sequence[str]:
        return (self._own_log if not model else self._crew.ring_of(model)).history(lines)

    async def log_follow(self, model: str) -> AsyncIterator[str]:
        ring = self._own_log if not model else self._crew.ring_of(model)
        async for line in ring.subscribe():
            yield line

    def events(self) -> AsyncIterator[dict[str, Any]]:
        return self._feed.follow()

    def recent(self, limit: int) -> Sequence[dict[str, Any]]:
        return self._feed.recent(limit)

    async def metrics(self, *, engines: bool) -> str:
        view, dropped = self.view(), self._ledger.dropped if self._ledger is not None else 0
        page, uptime_s = Page(), self.uptime_s()
        for _ in self._metrics.fill(page, view, version=self.version, uptime_s=uptime_s, requests=self._accounts.of, dropped=dropped):
            await asyncio.sleep(0)  # requests are not kept waiting for figures
        text = page.text() + (self.peers.metrics(self._accounts) if self.peers is not None else "")
        return text + await engine_metrics.gather(view, self._crew.running.get) if engines else text


class RingHandler(logging.Handler):
    """greenroom's own log, also kept for `logs`; made in the event loop, whose the ring is: what other threads say is brought there."""

    def __init__(self, ring: LogRing) -> None:
        super().__init__()
        self._ring = ring
        self._home = threading.get_ident()
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = (self.format(record) + "\n").encode(errors="replace")
            if threading.get_ident() == self._home or self._loop.is_closed():
                self._ring.feed(line)
            else:
                self._loop.call_soon_threadsafe(self._ring.feed, line)
        except Exception:
            self.handleError(record)


def masked(text: str, secrets: Sequence[str]) -> str:
    """`text` without any of the secrets."""
    return re.sub("|".join(re.escape(secret) for secret in secrets), "***", text) if secrets else text
