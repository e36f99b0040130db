"""Putting an engine to sleep and waking it, as its dialect says: calls in order, then what it says, then what it answers.

A 2xx is only a word.  Whether it sleeps is asked, what it gave back is measured (by the crew), and whether it still
answers as before is compared.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from greenroom.engines.base import AsleepCheck, Call, Canary, Readiness, SleepRecipe
from greenroom.engines.oom import ran_out
from greenroom.host.calls import Line, Reply, Unanswered, pick

NOT_KNOWN = frozenset({404, 405, 501})
CHECK_S_MAX = 5.0  # one question whether it sleeps
CHECK_POLL_S = 0.02
SETTLE_S_MAX = 10.0  # after the calls, until it says the same
CANARY_S_MAX = 60.0
NUMBERS_TOLERANCE = 1e-3  # relative; kernels may add in another order
SHOWN_CHARS_MAX = 40


class Trouble(Exception):
    """It did not get there.  `why` is one clause; `no_room`: for want of device memory."""

    def __init__(self, why: str, *, no_room: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.no_room = no_room


@dataclass(frozen=True, slots=True)
class Recorded:
    """A canary with the answer of the engine as it was started."""

    canary: Canary
    answer: Any


@dataclass(slots=True)
class Sleeper:
    """One engine as far as its sleep goes; `heard` gives its newest log lines."""

    line: Line
    control: Line  # for its sleep routes, which may want another key
    readiness: Readiness
    heard: Callable[[], Sequence[str]]
    version: tuple[int, ...] = ()
    recorded: Recorded | None = None
    awaited: str = ""  # what a sleep or a wake under way waits for, one clause

    # ------------------------------------------------------------------ after its start

    async def learn_version(self, call: Call | None) -> None:
        if call is None:
            return
        try:
            reply = await self.line.ask(call, CHECK_S_MAX)
        except Unanswered:
            return
        told = pick(reply.json(), "version") if reply.ok else None
        self.version = numbers_of(told) if isinstance(told, str) else ()

    async def record(self, canaries: Sequence[Canary]) -> str:
        """Remember how it answers the first canary it knows; a clause that says why not, else ""."""
        why = "the engine answers none of the questions known here"
        for canary in canaries:
            try:
                reply = await self.line.ask(Call(canary.path, "POST", canary.body), CANARY_S_MAX)
            except Unanswered as exc:
                return str(exc)
            answer = pick(reply.json(), canary.pick) if reply.ok else None
            if is_empty(answer):
                why = f"POST {canary.path} answers {reply.status} {reply.text(120)}"
                continue
            self.recorded = Recorded(canary, answer)
            return ""
        return why

    # ------------------------------------------------------------------ the two ways

    async def fall_asleep(self, recipe: SleepRecipe, limit_s: float) -> None:
        """Raises Trouble: it may be awake, asleep or in between, and must be ended."""
        await self._follow(recipe.sleep, recipe, limit_s, asleep=True)

    async def wake_up(self, recipe: SleepRecipe, limit_s: float, *, compare: bool) -> None:
        """Awake, answering its check, and answering as before where that is compared.  Raises Trouble."""
        await self._follow(recipe.wake, recipe, limit_s, asleep=False)
        if compare and self.recorded is not None:
            await self._compare(self.recorded, limit_s)

    async def says_asleep(self, recipe: SleepRecipe) -> bool:
        """Whether it says that it (still) sleeps; False also when it cannot be asked."""
        return recipe.check is not None and await self._sleeps_surely(self.control, recipe.check)

    async def is_dozing(self, check: AsleepCheck) -> bool:
        """Whether it has fallen asleep by itself; the question does not wake it."""
        return await self._sleeps_surely(self.line, check)

    async def warm_up(self, limit_s: float) -> str:
        """The operator's own request, so that the first user finds it warm; what came of it, for the log."""
        path = self.readiness.warmup_path
        if path is None:
            return ""
        self.awaited = f"the warm-up POST {path} was not answered"
        try:
            reply = await self.line.ask(Call(path, "POST", self.readiness.warmup_body), limit_s)
        except Unanswered as exc:
            raise Trouble(f"its warm-up request {exc}") from None
        return f"warm-up POST {path} answered {reply.status}"

    # ------------------------------------------------------------------ inside

    async def _follow(self, calls: Sequence[Call], recipe: SleepRecipe, limit_s: float, *, asleep: bool) -> None:
        deadline = asyncio.get_running_loop().time() + limit_s
        for call in calls:
            reply = await self._made(call, deadline)
            if not reply.ok and not (call.optional and reply.status in NOT_KNOWN):
                said = reply.text()
                lines = [*self.heard(), *reply.body[: 64 * 1024].decode("utf-8", "replace").splitlines()[:200]]
                raise Trouble(f"{call.method} {call.path} answered {reply.status} {said}".rstrip(), no_room=ran_out(lines))
        if recipe.check is None:
            return
        until = min(deadline, asyncio.get_running_loop().time() + SETTLE_S_MAX)
        unmoved = (
            f"every call was answered with success, but GET {recipe.check.path} still says that it is {'awake' if asleep else 'asleep'}"
        )
        while True:
            try:
                if await self._sleeps(self.control, recipe.check) is asleep:
                    return
            except Unanswered as exc:
                raise Trouble(str(exc)) from None
            self.awaited = unmoved
            if asyncio.get_running_loop().time() >= until:
                raise Trouble(unmoved)
            await asyncio.sleep(CHECK_POLL_S)

    async def _made(self, call: Call, deadline: float) -> Reply:
        left_s = deadline - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise Trouble("it took longer than its time limit")
        self.awaited = f"{call.method} {call.path} was not answered"
        try:
            return await self.control.ask(call, left_s)
        except Unanswered as exc:
            raise Trouble(str(exc), no_room=ran_out(self.heard())) from None

    async def _sleeps_surely(self, line: Line, check: AsleepCheck) -> bool:
        """False also when it cannot be asked."""
        try:
            return await self._sleeps(line, check)
        except (Trouble, Unanswered):
            return False

    async def _sleeps(self, line: Line, check: AsleepCheck) -> bool:
        reply = await line.ask(Call(check.path, "GET"), CHECK_S_MAX)
        if not reply.ok:
            raise Trouble(f"GET {check.path} answered {reply.status} {reply.text()}".rstrip())
        return bool(pick(reply.json(), check.field) == check.value)

    async def _compare(self, recorded: Recorded, limit_s: float) -> None:
        canary = recorded.canary
        self.awaited = f"the canary POST {canary.path} was not answered"
        try:
            reply = await self.line.ask(Call(canary.path, "POST", canary.body), min(limit_s, CANARY_S_MAX))
        except Unanswered as exc:
            raise Trouble(f"after its wake, {exc}") from None
        if not reply.ok:
            raise Trouble(
                f"after its wake, POST {canary.path} answered {reply.status} {reply.text()}".rstrip(), no_room=ran_out(self.heard())
            )
        answer = pick(reply.json(), canary.pick)
        if not alike(answer, recorded.answer):
            raise Trouble(
                f"it answers differently since its wake: {shown(answer)} instead of {shown(recorded.answer)} to POST {canary.path}"
            )


def numbers_of(version: str) -> tuple[int, ...]:
    """(0, 32, 0) of "0.32.0+cpu"; () of what is no version."""
    found: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)


def is_empty(answer: Any) -> bool:
    """Whether it, or a part of it, was not found: compared, it would be like any other answer."""
    return answer is None or answer in ("", []) or (isinstance(answer, list) and any(part is None for part in answer))


def alike(one: Any, other: Any) -> bool:
    """The same text; numbers alike but for rounding."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=NUMBERS_TOLERANCE, abs_tol=NUMBERS_TOLERANCE)
    return bool(one == other)


def shown(answer: Any) -> str:
    text = repr(answer)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}..."
