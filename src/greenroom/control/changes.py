"""The state as messages for those who follow it: a snapshot first, then what changed, a few times a second at most.

What changed is worked out once for all readers, and only while there are any.  Figures that only age (seconds since,
seconds left) do not count as changes: readers count on from `now`, and hear them anew once a second while something moves.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from greenroom.control import render, sse
from greenroom.control.facade import Facade

KEPT = 64  # messages for readers that look a moment later
ANEW_S = 1.0  # what moves is told again after this
LOOK_S_MAX = 5.0  # also where nothing happened: figures age, files appear
COST_SHARE = 0.05  # of the loop's time, at most, for working out changes

AGING = frozenset(
    ("since_s", "idle_s", "oldest_s", "eta_s", "expected_s", "backoff_s", "retry_in_s", "in_s", "served_s", "fraction", "age_s")
) | {"last_error_s"}
MOVING = frozenset({"starting", "waking", "draining", "going_to_sleep", "stopping"})


def still(value: Any) -> Any:
    """Without what only ages."""
    if isinstance(value, dict):
        return {name: still(one) for name, one in value.items() if name not in AGING}
    return [still(one) for one in value] if isinstance(value, list) else value


class Changes:
    def __init__(self, facade: Facade, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._facade, self._every_s, self._clock = facade, every_s, clock
        self._log: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._number = 0
        self._pause_s = every_s
        self._looked_at = self._anew_at = -1e9
        self._stamp: object = None
        self._moves = False
        self._devices: dict[str, Any] = {}
        self._models: dict[str, Any] = {}
        self._rest: dict[str, Any] = {}

    def snapshot(self) -> bytes:
        """Everything, seen by all: whatever is told afterwards differs from this, or from what came after it."""
        return sse.event({"kind": "snapshot", **self._take()})

    async def follow(self) -> AsyncIterator[bytes]:
        self._look()  # what changes is told from here on
        seen = self._number
        while True:
            await asyncio.sleep(self._pause_s)
            self._look()
            if self._log and self._log[0][0] > seen + 1:  # more happened than is kept
                seen = self._number
                yield self.snapshot()
            for number, message in list(self._log):
                if number > seen:
                    seen = number
                    yield message

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked_at < 0.8 * self._pause_s:
            return  # another reader has just looked
        stamp = self._facade.stamp()
        is_due = self._moves and now - self._anew_at >= ANEW_S
        if stamp == self._stamp and now - self._looked_at < LOOK_S_MAX and not is_due:
            return
        self._take()

    def _take(self) -> dict[str, Any]:
        """The status now; what differs from the last one is told to all who follow."""
        now = self._clock()
        self._looked_at, self._stamp = now, self._facade.stamp()
        status = render.status(self._facade)
        if gone := self._devices.keys() - {one["id"] for one in status["devices"]}:  # a reload took it: everything is told anew
            for id in gone:
                del self._devices[id]
            self._number += 1
            self._log.append((self._number, sse.event({"kind": "snapshot", **status})))
        moving = any(one["state"] in MOVING or one.get("fetch") for one in status["models"])
        self._moves = moving or bool(status["queue"]["length"]) or any(one["in_flight"] for one in status["peers"])
        change = self._change(status, anew=now - self._anew_at >= ANEW_S)
        if change:
            self._number += 1
            told = {"kind": "status", "now": status["now"], "uptime_s": status["uptime_s"], "boot_id": status["boot_id"], **change}
            self._log.append((self._number, sse.event(told)))
        self._pause_s = max(self._every_s, (self._clock() - now) / COST_SHARE)
        return status

    def _change(self, status: dict[str, Any], *, anew: bool) -> dict[str, Any]:
        """Of a status, what differs from the last one; `anew`: also what moves."""
        if anew:
            self._anew_at = self._clock()
        devices, models = {one["id"]: one for one in status["devices"]}, {one["id"]: one for one in status["models"]}
        found: dict[str, Any] = {}
        if changed := self._differ(self._devices, devices):
            found["devices"] = changed
        changed = self._differ(self._models, models)
        told = {one["id"] for one in changed}
        if anew:
            changed += [one for id, one in models.items() if id not in told and (one["queued"] or one["state"] in MOVING)]
        if changed:
            found["models"] = changed
        if gone := [id for id in self._models if id not in models]:
            found["removed"] = gone
            for id in gone:
                del self._models[id]
        for name in ("queue", "advice", "thrash", "peers"):
            same = still(status[name])
            if self._rest.get(name) != same or (anew and name == "queue" and status["queue"]["length"]):
                self._rest[name] = same
                found[name] = status[name]
        return found

    @staticmethod
    def _differ(known: dict[str, Any], now: dict[str, Any]) -> list[Any]:
        changed = []
        for id, one in now.items():
            same = still(one)
            if known.get(id) != same:
                known[id] = same
                changed.append(one)
        return changed
