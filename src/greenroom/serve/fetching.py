"""Models that are not in the store yet: one fetch each, and the requests that wait for it.

A fetch is no transition of the scheduler: nothing is booked before its files are here and tell what they need.  When they
are, the configuration that holds is planned anew with them, and those who waited are asked for like anybody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from greenroom.config.model import PullConfig
from greenroom.core.facts import Refuse, Tell
from greenroom.store.facts import Progress, Reference, StoreError

log = logging.getLogger("greenroom")

AT_ONCE_MAX = 2  # fetches; others wait for their turn
WAIT_S_MAX = 1800.0  # a request waits for a fetch at most so long; the fetch goes on
LOOK_S_MIN = 0.01  # at those who wait
RETRY_S = 15.0  # after one that failed; for models that are wanted without being asked for twice as long each time ...
AGAIN_S_MAX = 600.0  # ... and this at most: a network that comes after us is no reason to stay without
RETRY_AFTER_S_MAX = 600.0


@dataclass(frozen=True, slots=True)
class Image:
    """A container's image that is not here: fetched by its runtime, before any room is booked for who needs it."""

    runtime: str
    name: str
    limit_s: float = field(default=WAIT_S_MAX, compare=False)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Files:
    """A model's files that are not here, and how they are to be fetched: one that is told otherwise is another fetch."""

    reference: Reference
    options: PullConfig = field(default_factory=PullConfig)

    def __str__(self) -> str:
        return str(self.reference)


Needed = Files | Image
Pull = Callable[[Needed, Callable[[Progress], None]], Awaitable[object]]


class Waiting(Protocol):
    """A request that waits for a model's files."""

    request: int

    @property
    def left_s(self) -> float | None:
        """Until its deadline; None = it has none."""

    def refused(self, action: Refuse) -> None: ...

    def go_on(self) -> None:
        """Ask the scheduler now."""


@dataclass(slots=True)
class Fetch:
    """One model on its way."""

    model: str
    reference: Needed
    since: float
    task: asyncio.Task[Any] | None = None
    progress: Progress | None = None
    waiting: dict[int, tuple[float, Waiting]] = field(default_factory=dict)  # request -> until when, who
    more: asyncio.Event = field(default_factory=asyncio.Event)  # one more waits
    done: asyncio.Event = field(default_factory=asyncio.Event)
    has_turn: bool = False
    asked: bool = False  # by a request or an operator's load; else it is only wanted, by a pin or a preload
    why: str = ""  # how it failed

    def text(self) -> str:
        """`fetching its files, 34 %, about 12 s`"""
        told = self.progress
        if told is None and not self.has_turn:
            return f"waiting for its turn to be fetched ({AT_ONCE_MAX} models at once)"
        if told is None or told.total <= 0:
            return f"fetching its image {self.reference}" if isinstance(self.reference, Image) else "fetching its files"
        left = f", about {math.ceil(told.eta_s)} s" if told.eta_s is not None else ""
        return f"{told.stage} its files, {told.done / told.total:.0%}{left}"

    def plain(self) -> dict[str, Any]:
        told = self.progress
        return {
            "reference": str(self.reference),
            "stage": told.stage if told is not None else "resolving" if self.has_turn else "queued",
            "done_bytes": told.done if told is not None else 0,
            "total_bytes": told.total if told is not None else None,
            "bytes_per_s": round(told.rate) if told is not None else None,
            "eta_s": None if told is None or told.eta_s is None else round(told.eta_s, 1),
            "waiting": len(self.waiting),
        }


class Fetching:
    """`landed`: called when one has come, to read the configuration again."""

    def __init__(
        self,
        pull: Pull,
        landed: Callable[[str], None],
        tell: Callable[[Tell], None],
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        clock: Callable[[], float],
    ) -> None:
        self._pull, self._landed, self._tell, self._spawn, self._clock = pull, landed, tell, spawn, clock
        self._turn = asyncio.Semaphore(AT_ONCE_MAX)
        self._closed = False
        self.absent: Mapping[str, Needed] = {}
        self.running: dict[str, Fetch] = {}
        self.failed: dict[str, tuple[float, str]] = {}  # model -> when, why
        self._wanted: frozenset[str] = frozenset()
        self._held: set[str] = set()  # stopped by an operator: being wanted does not begin it again
        self._again: dict[str, asyncio.Task[Any]] = {}  # model -> who will try again
        self._tries: dict[str, int] = {}

    def take(self, absent: Mapping[str, Needed]) -> None:
        """A configuration was read: what it does not name any more is not fetched any more, and who waited is asked for."""
        before, self.absent = self.absent, absent
        self.failed = {model: told for model, told in self.failed.items() if model in absent and absent[model] == before.get(model)}
        self._held = {model for model in self._held if model in absent and absent[model] == before.get(model)}
        for model, fetch in list(self.running.items()):
            if absent.get(model) != fetch.reference:
                self._end(fetch)

    # ------------------------------------------------------------------ requests

    def wait(self, model: str, waiting: Waiting, queue_limit: int) -> None:
        """Have `waiting` wait for a model that is absent; it is refused, or goes on, in its time."""
        refusal = self._refusal(model, waiting, queue_limit)
        if refusal is not None:
            waiting.refused(refusal)
            return
        fetch = self.start(model, asked=True)
        left_s = waiting.left_s
        fetch.waiting[waiting.request] = (self._clock() + (WAIT_S_MAX if left_s is None else min(WAIT_S_MAX, left_s)), waiting)
        fetch.more.set()

    def _refusal(self, model: str, waiting: Waiting, queue_limit: int) -> Refuse | None:
        fetch = self.running.get(model)
        if self._closed:
            return Refuse(waiting.request, 503, "shutting_down", "greenroom is shutting down")
        if fetch is None and (left_s := self.retry_s(model)) > 0:
            said = f"{model} could not be fetched: {self.failed[model][1]}"
            return Refuse(waiting.request, 503, "fetch_failed", said, math.ceil(left_s))
        if fetch is not None and len(fetch.waiting) >= queue_limit:
            said = f"{model} is {fetch.text()} and {len(fetch.waiting)} requests wait for it, as many as its queue_limit takes"
            return Refuse(waiting.request, 429, "queue_full", said, self._retry_after_s(fetch))
        # Where it cannot be said how long it takes, the request waits until its deadline: somebody has to begin the fetch.
        eta_s = fetch.progress.eta_s if fetch is not None and fetch.progress is not None else None
        if fetch is not None and eta_s is not None and waiting.left_s is not None and eta_s > waiting.left_s:
            return self._too_late(fetch, waiting.request)
        return None

    def _too_late(self, fetch: Fetch, request: int) -> Refuse:
        said = f"{fetch.model} is not here before the deadline of this request: it is {fetch.text()}"
        return Refuse(request, 503, "deadline", said, self._retry_after_s(fetch))

    @staticmethod
    def _retry_after_s(fetch: Fetch | None) -> float:
        eta_s = fetch.progress.eta_s if fetch is not None and fetch.progress is not None else None
        return min(RETRY_AFTER_S_MAX, max(1.0, math.ceil(eta_s))) if eta_s is not None else RETRY_S

    def leave(self, request: int) -> None:
        """A request has gone; the fetch goes on, for the next one."""
        for fetch in self.running.values():
            fetch.waiting.pop(request, None)

    def progress(self, request: int) -> str:
        """What one that waits here is told; "" when it does not."""
        return next((fetch.text() for fetch in self.running.values() if request in fetch.waiting), "")

    # ------------------------------------------------------------------ fetches

    def start(self, model: str, *, asked: bool) -> Fetch:
        """The fetch of a model that is absent, begun now if need be."""
        self._held.discard(model)
        fetch = self.running.get(model)
        if fetch is None and self._closed:
            fetch = Fetch(model, self.absent[model], self._clock(), why="greenroom is shutting down")
            fetch.done.set()
        elif fetch is None:
            fetch = self.running[model] = Fetch(model, self.absent[model], self._clock())
            self._tell(Tell(self._clock(), model, "fetching", f"fetching {fetch.reference}"))
            fetch.task = self._spawn(self._run(fetch))
        fetch.asked = fetch.asked or asked
        return fetch

    def want(self, models: frozenset[str]) -> None:
        """Those that are to be here without being asked for: fetched now, and again when that fails; no others any more."""
        self._wanted = models
        for fetch in [fetch for model, fetch in self.running.items() if model not in models and not fetch.asked]:
            self._end(fetch)
            said = "fetch stopped: it is not to be loaded without being asked for any more; what has come is kept"
            self._tell(Tell(self._clock(), fetch.model, "fetch_stopped", said))
        for model in models & self.absent.keys() - self._held:
            if self.retry_s(model) <= 0:
                self.start(model, asked=False)
            else:
                self._try_again(model)

    def comes_back(self, model: str) -> bool:
        """Whether a fetch that failed is tried again by itself."""
        return model in self._wanted and model not in self._held

    def _try_again(self, model: str) -> None:
        if self.comes_back(model) and model not in self._again:
            tries = self._tries[model] = self._tries.get(model, 0) + 1
            self._again[model] = self._spawn(self._later(model, min(AGAIN_S_MAX, RETRY_S * 2 ** (tries - 1))))

    async def _later(self, model: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        del self._again[model]
        if self.comes_back(model) and model in self.absent:
            self.start(model, asked=False)

    def retry_s(self, model: str) -> float:
        """Until it may be tried again."""
        return self.failed[model][0] + RETRY_S - self._clock() if model in self.failed else 0.0

    def stop(self, model: str) -> bool:
        """By an operator.  What has come is kept, and taken up by the next fetch."""
        self._held.add(model)
        fetch = self.running.get(model)
        if fetch is None:
            return False
        why = "the fetch was stopped by an operator"
        self._end(fetch, why)
        self.failed[model] = (self._clock(), why)  # a client that asks again at once does not undo it
        self._tell(Tell(self._clock(), model, "fetch_stopped", "fetch stopped by an operator; what has come is kept"))
        return True

    def close(self) -> None:
        self._closed = True
        for fetch in list(self.running.values()):
            self._end(fetch, "greenroom is shutting down")

    def _end(self, fetch: Fetch, why: str = "") -> None:
        """`why` "": those who wait are asked for anew, under the configuration that holds now."""
        self.running.pop(fetch.model, None)
        if fetch.task is not None:
            fetch.task.cancel()
        fetch.why = why
        self._let_go(fetch)

    def _let_go(self, fetch: Fetch) -> None:
        waiting, fetch.waiting = list(fetch.waiting.values()), {}
        for _, one in waiting:
            if fetch.why:
                retry = None if self._closed else RETRY_S
                one.refused(Refuse(one.request, 503, "fetch_failed", f"{fetch.model} could not be fetched: {fetch.why}", retry))
            else:
                one.go_on()
        fetch.done.set()

    async def _run(self, fetch: Fetch) -> None:
        impatience = self._spawn(self._impatience(fetch))
        try:
            while (other := self._before(fetch)) is not None:
                await other.done.wait()  # what it fetches may be all that is needed: then this one is ended
            async with self._turn:
                fetch.has_turn = True
                await self._pull(fetch.reference, lambda told: self._told(fetch.reference, told))
            self._came(fetch)
        except StoreError as fault:
            self._fail(fetch, str(fault))
        except OSError as fault:
            log.warning("the fetch of %s failed", fetch.reference, exc_info=True)
            self._fail(fetch, f"{fault.strerror or fault}; look at the log")
        except Exception as fault:  # a bug: nobody may wait for it for ever
            log.exception("the fetch of %s raised", fetch.reference)
            self._fail(fetch, f"inner fault: {fault}")
        finally:
            impatience.cancel()

    def _before(self, fetch: Fetch) -> Fetch | None:
        """An earlier fetch of the same files, for another model."""
        other = next((one for one in self.running.values() if one.reference == fetch.reference), fetch)
        return other if other is not fetch else None

    def _told(self, reference: Needed, progress: Progress) -> None:
        for fetch in self.running.values():
            if fetch.reference == reference:
                fetch.progress = progress

    def _came(self, fetch: Fetch) -> None:
        del self.running[fetch.model]
        # Noted first, and struck out when it is found: whoever asked for it again would have it fetched again, for ever.
        why = f"{fetch.reference} was fetched, and still it is not here"
        self.failed[fetch.model] = (self._clock(), why)
        self._landed(fetch.model)
        if self.absent.get(fetch.model) == fetch.reference:
            raise StoreError(why)
        self._tries.pop(fetch.model, None)
        took_s = self._clock() - fetch.since
        self._tell(Tell(self._clock(), fetch.model, "fetched", f"fetched {fetch.reference} in {took_s:.0f} s"))
        self._let_go(fetch)

    def _fail(self, fetch: Fetch, why: str) -> None:
        if self.running.get(fetch.model) is fetch:
            del self.running[fetch.model]
        fetch.why = why
        self.failed[fetch.model] = (self._clock(), why)
        self._tell(Tell(self._clock(), fetch.model, "fetch_failed", f"could not be fetched: {why}", "warning"))
        self._try_again(fetch.model)
        self._let_go(fetch)

    async def _impatience(self, fetch: Fetch) -> None:
        """Whoever has waited too long is told to come back."""
        while True:
            now = self._clock()
            fetch.more.clear()
            for request, (until, one) in list(fetch.waiting.items()):
                if until <= now:
                    del fetch.waiting[request]
                    one.refused(self._too_late(fetch, request) if one.left_s is not None else self._too_long(fetch, request))
            soonest = min((until for until, _ in fetch.waiting.values()), default=now + WAIT_S_MAX)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(LOOK_S_MIN, soonest - now)):
                    await fetch.more.wait()

    def _too_long(self, fetch: Fetch, request: int) -> Refuse:
        said = f"{fetch.model} is still {fetch.text()}; {WAIT_S_MAX:g} s is the longest a request waits for that"
        return Refuse(request, 503, "fetch_timeout", said, self._retry_after_s(fetch))
