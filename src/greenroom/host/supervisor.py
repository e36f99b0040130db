"""This supervisor's mark on its engines, the watcher that ends them when it is killed, and leftovers of earlier ones."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import greenroom
from greenroom.host.exits import wait_exited
from greenroom.host.proctable import (
    INSTANCE_KEY,
    SUPERVISOR_KEY,
    Entry,
    Identity,
    descendants,
    environ_value,
    read_entry,
    send_signal,
    snapshot,
)

CLOSE_S_MAX = 5.0
CLOSE_BUSY_S_MAX = 1.0  # with containers that it has to end


class Supervisor:
    """One run of greenroom on one state directory.  `marker` goes into the environment of everything it starts."""

    def __init__(self, state_dir: Path) -> None:
        own = read_entry(os.getpid())
        self.home = home_of(state_dir)
        # With the run in it, the watcher of a killed supervisor cannot end the engines of the one that follows.
        self.marker = f"{self.home}.{os.getpid()}-{own.started_ticks if own else 0}"
        self._sessions: set[int] = set()
        self._guarded: dict[str, str] = {}
        self._watcher: subprocess.Popen[bytes] | None = None

    def add(self, session: int) -> None:
        """Tell the watcher of an engine; it is started again if somebody ended it."""
        self._sessions.add(session)
        self._tell(f"+{session}\n")

    def remove(self, session: int) -> None:
        self._sessions.discard(session)
        self._tell(f"-{session}\n")

    def guard(self, name: str, commands: Sequence[Sequence[str]], env: Mapping[str, str]) -> None:
        """Tell the watcher what ends a container: these commands, in their order."""
        word = json.dumps({"name": name, "commands": [list(argv) for argv in commands], "env": dict(env)})
        self._guarded[name] = word
        self._tell(f"*{word}\n")

    def unguard(self, name: str) -> None:
        if self._guarded.pop(name, None) is not None:
            self._tell(f"/{name}\n")

    @property
    def guarded(self) -> frozenset[str]:
        """Names of the containers that the watcher ends."""
        return frozenset(self._guarded)

    @property
    def watcher_pid(self) -> int | None:
        return None if self._watcher is None or self._watcher.poll() is not None else self._watcher.pid

    def watch(self) -> None:
        """Start the watcher; the engines known so far are in its care."""
        self._forget()
        root = str(Path(greenroom.__file__).parent.parent)
        code = f"import sys; sys.path.insert(0, {root!r}); from greenroom.host.watcher import main; main({self.marker!r})"
        watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},  # not the marker of a supervisor that may have started this one
            cwd="/",
            start_new_session=True,  # Ctrl-C in the terminal must not reach it
            bufsize=0,
        )
        self._watcher = watcher
        for session in self._sessions:
            self._write(watcher, f"+{session}\n")
        for word in self._guarded.values():
            self._write(watcher, f"*{word}\n")

    async def close(self) -> None:
        """End the watcher.  Engines still there are killed by it; with containers still there it goes on without us for a while."""
        watcher, self._watcher = self._watcher, None
        if watcher is None or watcher.stdin is None:
            return
        watcher.stdin.close()
        limit_s = CLOSE_BUSY_S_MAX if self._guarded else CLOSE_S_MAX
        if (entry := read_entry(watcher.pid)) is not None and not await wait_exited([entry.identity], limit_s):
            if self._guarded:
                watcher.returncode = 0  # nobody waits for it: it asks a runtime that hangs
                return
            watcher.kill()
        watcher.wait()

    def _tell(self, word: str) -> None:
        if self._watcher is None:
            return
        if self._watcher.poll() is not None or not self._write(self._watcher, word):
            self.watch()

    def _write(self, watcher: subprocess.Popen[bytes], word: str) -> bool:
        try:
            assert watcher.stdin is not None
            watcher.stdin.write(word.encode())
            return True
        except BrokenPipeError:
            return False

    def _forget(self) -> None:
        if self._watcher is not None and self._watcher.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._watcher.stdin.close()
            self._watcher.wait()


def home_of(state_dir: Path) -> str:
    """What marks of one state directory have in common."""
    return hashlib.sha256(os.fsencode(state_dir.resolve())).hexdigest()[:16]


def start_watcher(state_dir: Path) -> Supervisor:
    """Mark this process as the supervisor of `state_dir` and start its watcher.  Call once; `await close()` at the end."""
    supervisor = Supervisor(state_dir)
    supervisor.watch()
    return supervisor


# ------------------------------------------------------------------------------------------- engines of earlier runs


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process that an earlier supervisor of this state directory started and did not end."""

    pid: int
    started_ticks: int
    token: str  # the instance it belonged to; "" when only its session says so
    supervisor: str  # the marker it carries, or that of its session

    @property
    def identity(self) -> Identity:
        return self.pid, self.started_ticks


def leftovers(supervisor: Supervisor) -> list[Leftover]:
    """Processes with the mark of an earlier run on this state directory, and all that shares a session with them or descends from them.

    A recorded pid is never trusted: only the mark counts, and signals go to pid and start time together.
    """
    table = snapshot()
    marked = {pid: mark for pid in table if (mark := _mark(pid)) and mark.startswith(supervisor.home + ".") and mark != supervisor.marker}
    kept = _own_line(table)
    # An engine that rewrote its title may have overwritten its environment; its session still tells.
    by_session = {
        table[pid].session: mark for pid, mark in marked.items() if table[pid].session not in {table[own].session for own in kept}
    }
    roots = set(marked) | {entry.pid for entry in table.values() if entry.session in by_session}
    found = (descendants(table, roots - kept) - kept) & set(table)
    return [
        Leftover(pid, table[pid].started_ticks, _token(pid), marked.get(pid) or by_session.get(table[pid].session, ""))
        for pid in sorted(found)
        if table[pid].live
    ]


async def end_leftovers(supervisor: Supervisor, *, grace_s: float = 1.0, kill_s_max: float = 5.0) -> tuple[list[Leftover], list[Leftover]]:
    """End what earlier runs left: TERM, `grace_s`, KILL.  Returns (what was found, what is still there)."""
    found = leftovers(supervisor)
    remaining = found
    deadline = time.monotonic() + grace_s + kill_s_max
    signum, wait_s = int(signal.SIGTERM), grace_s
    while remaining and time.monotonic() < deadline:
        _signal_all(remaining, signum)
        await wait_exited([each.identity for each in remaining], wait_s)
        remaining = leftovers(supervisor)
        signum, wait_s = int(signal.SIGKILL), 0.25
    return found, remaining


def _signal_all(processes: Sequence[Leftover], signum: int) -> None:
    for each in processes:
        send_signal(each.identity, signum)


def _mark(pid: int) -> str:
    return (environ_value(pid, SUPERVISOR_KEY) or b"").decode("ascii", "replace")


def _token(pid: int) -> str:
    return (environ_value(pid, INSTANCE_KEY) or b"").decode("utf-8", "replace")


def _own_line(table: dict[int, Entry]) -> set[int]:
    """This process and its ancestors: a greenroom started from inside an engine carries a mark itself."""
    line: set[int] = set()
    pid = os.getpid()
    while pid in table and pid not in line:
        line.add(pid)
        pid = table[pid].ppid
    return line
