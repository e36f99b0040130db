"""What the host tests share: launches of the fake engines, and looking at what is left."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

from greenroom.engines.base import Launch
from greenroom.host.logs import LogRing
from greenroom.host.ports import free_port
from greenroom.host.processes import Process, spawn, stop
from greenroom.host.proctable import read_entry
from greenroom.host.supervisor import Supervisor

FAKES = Path(__file__).parent.parent / "fakes"
PYTHON = (sys.executable, "-I", "-S")
PATIENCE_S = 20.0  # for what must happen at once, on a busy machine


def engine_argv(port: int, *knobs: str) -> tuple[str, ...]:
    return (*PYTHON, str(FAKES / "host_engine.py"), str(port), *knobs)


def daemon_argv(port: int, how: str = "plain", *knobs: str) -> tuple[str, ...]:
    return (*PYTHON, str(FAKES / "host_daemon.py"), how, *engine_argv(port, *knobs))


def python_argv(code: str) -> tuple[str, ...]:
    return (*PYTHON, "-c", code)


def a_launch(argv: tuple[str, ...], port: int = 0, **rest: object) -> Launch:
    return Launch(argv=argv, env={}, host="127.0.0.1", port=port, **rest)  # type: ignore[arg-type]


def a_port() -> int:
    return free_port(None, ())


@asynccontextmanager
async def running(launch: Launch, *, log: LogRing | None = None, supervisor: Supervisor | None = None) -> AsyncIterator[Process]:
    """A process of that launch, ended whatever the test does."""
    process = await spawn(launch, token=uuid4().hex, log=log or LogRing("engine"), supervisor=supervisor)
    try:
        yield process
    finally:
        await stop(process, grace_s=0.0, on_signal=lambda _: None)


async def until(true: Callable[[], bool], what: str) -> None:
    """Look again and again; fail with `what` after PATIENCE_S."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not true():  # noqa: ASYNC110 - other processes do not tell
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never so: {what}") from None


async def printed(log: LogRing, text: str) -> str:
    """The first line that holds `text`, once it is there."""
    await until(lambda: any(text in line for line in log.tail(1000)), f"the engine prints {text!r}; it printed {log.tail(20)}")
    return next(line for line in log.tail(1000) if text in line)


def lives(pid: int) -> bool:
    entry = read_entry(pid)
    return entry is not None and entry.live


@functools.cache
def children_before() -> frozenset[int]:
    """Children that other tests of this process keep (a browser's driver), as of the beginning of a module of this folder."""
    own = os.getpid()
    entries = map(read_entry, map(int, filter(str.isdigit, os.listdir("/proc"))))
    return frozenset(entry.pid for entry in entries if entry is not None and entry.ppid == own)


def children_of_ours() -> list[str]:
    """What is left of our children, zombies included."""
    own = os.getpid()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        entry = read_entry(int(name))
        if entry is not None and entry.ppid == own and entry.pid not in children_before():
            found.append(f"{entry.pid} {entry.state}")
    return found
