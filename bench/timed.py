"""greenroom as it is, and a journal of what its starts, sleeps and wakes were made of.

    python -m bench.timed JOURNAL serve -c greenroom.yaml ...

Each move adds one JSON line to JOURNAL: `{"move", "model", "level", "s", "at", "parts": [[name, seconds], ...]}`.  A part is
a call to the engine by its method and path, a look at the engine's own check, at its device, at its host memory.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TextIO

from greenroom.cli import main
from greenroom.host.calls import Line
from greenroom.shell import crew

PROBE, DEVICE, HOST = "its check", "look at the device", "look at host RAM"
MOVES = ("start", "stop", "sleep", "wake")  # of HostCrew
# Where a part is spent: owner, name, what it is called (None: by the call made).
PARTS: tuple[tuple[Any, str, str | None], ...] = (
    (Line, "ask", None),
    (crew, "probe_once", PROBE),
    (crew.HostCrew, "measure", DEVICE),
    (crew, "held_mib", HOST),
)

Parts = list[tuple[str, float]]
_parts: ContextVar[Parts | None] = ContextVar("parts", default=None)


def timed_move(name: str, move: Callable[..., Any], journal: TextIO) -> Callable[..., Any]:
    @functools.wraps(move)
    async def inner(self: Any, action: Any) -> Any:
        parts: Parts = []
        token, began = _parts.set(parts), time.perf_counter()
        try:
            return await move(self, action)
        finally:
            took_s = time.perf_counter() - began
            _parts.reset(token)
            told = {"move": name, "model": action.model, "level": getattr(action, "level", 0), "s": took_s, "at": time.time()}
            journal.write(json.dumps({**told, "parts": parts}) + "\n")

    return inner


def timed_part(call: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    def note(began: float, args: tuple[Any, ...]) -> None:
        if (parts := _parts.get()) is not None:
            parts.append((name or f"{args[1].method} {args[1].path}", time.perf_counter() - began))

    if inspect.iscoroutinefunction(call):

        @functools.wraps(call)
        async def waited(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return await call(*args, **kwargs)
            finally:
                note(began, args)

        return waited

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            note(began, args)

    return called


def install(journal: TextIO) -> None:
    for move in MOVES:
        setattr(crew.HostCrew, move, timed_move(move, getattr(crew.HostCrew, move), journal))
    for owner, name, called in PARTS:
        setattr(owner, name, timed_part(getattr(owner, name), called))


if __name__ == "__main__":
    install(open(sys.argv.pop(1), "a", buffering=1, encoding="utf-8"))  # noqa: SIM115 (open for as long as it serves)
    sys.argv[0] = "greenroom"
    sys.exit(main())
