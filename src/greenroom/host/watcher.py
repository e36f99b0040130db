"""The process that outlives a killed supervisor just long enough to end its engines.

It reads a pipe that only the supervisor holds open.  When the supervisor is gone, however that came, the
pipe ends; then every process that carries the supervisor's marker, sits in a session the supervisor told of,
or descends from one of those is killed.  Started by `greenroom.host.supervisor`; standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from greenroom.host.proctable import SUPERVISOR_KEY, Entry, descendants, environ_value, send_signal, snapshot

END_S_MAX = 10.0  # how long it tries
PAUSE_S = 0.02


def main(marker: str) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    end_engines(marker.encode(), read_sessions())


def read_sessions() -> set[int]:
    """Follow the supervisor's words (`+SESSION`, `-SESSION`, a line each) until it is gone."""
    sessions: set[int] = set()
    for line in iter(sys.stdin.buffer.readline, b""):
        if line.endswith(b"\n") and line[1:-1].isdigit():  # its last word may be cut short
            (sessions.add if line[:1] == b"+" else sessions.discard)(int(line[1:]))
    return sessions


def end_engines(marker: bytes, sessions: set[int]) -> None:
    seen: set[tuple[int, int]] = set()
    deadline = time.monotonic() + END_S_MAX
    while time.monotonic() < deadline:
        engines = [entry for entry in find(marker, sessions, seen) if entry.live]
        if not engines:
            return
        seen.update(entry.identity for entry in engines)
        for entry in engines:
            send_signal(entry.identity, signal.SIGKILL)
        time.sleep(PAUSE_S)


def find(marker: bytes, sessions: set[int], seen: set[tuple[int, int]]) -> list[Entry]:
    table = snapshot()
    table.pop(os.getpid(), None)
    roots = [
        pid
        for pid, entry in table.items()
        if entry.session in sessions or entry.identity in seen or environ_value(pid, SUPERVISOR_KEY) == marker
    ]
    return [table[pid] for pid in descendants(table, roots) if pid in table]
