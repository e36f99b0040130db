"""The process that outlives a killed supervisor just long enough to end its engines.

It reads a pipe that only the supervisor holds open.  When the supervisor is gone, however that came, the
pipe ends; then every process that carries the supervisor's marker, sits in a session the supervisor told of,
or descends from one of those is killed, and what ends its containers is run.  Started by
`greenroom.host.supervisor`; standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

from greenroom.host.proctable import SUPERVISOR_KEY, Entry, descendants, environ_value, send_signal, snapshot

END_S_MAX = 10.0  # how long it tries
PAUSE_S = 0.02
COMMAND_S_MAX = 10.0  # each of the commands that end a container
REAP_S = 1.0  # after KILL


def main(marker: str) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    sessions, guarded = read_words()
    end_engines(marker.encode(), sessions)
    end_containers(guarded.values())


class Guarded:
    """What ends one container: commands to be run one after the other, and their environment."""

    def __init__(self, word: bytes) -> None:
        told = json.loads(word)
        self.name: str = told["name"]
        self.commands: Sequence[Sequence[str]] = told["commands"]
        self.env: dict[str, str] = told["env"]


def read_words() -> tuple[set[int], dict[str, Guarded]]:
    """Follow the supervisor's words until it is gone, a line each: `+SESSION`, `-SESSION`, `*JSON` and `/NAME` (see Guarded)."""
    sessions: set[int] = set()
    guarded: dict[str, Guarded] = {}
    for line in iter(sys.stdin.buffer.readline, b""):
        if not line.endswith(b"\n"):
            break  # its last word was cut short
        sign, word = line[:1], line[1:-1]
        if sign == b"*":
            each = Guarded(word)
            guarded[each.name] = each
        elif sign == b"/":
            guarded.pop(word.decode(), None)
        elif word.isdigit():
            (sessions.add if sign == b"+" else sessions.discard)(int(word))
    return sessions, guarded


def end_containers(guarded: Iterable[Guarded]) -> None:
    """All of them at once, each by its commands in their order."""
    left = [(each, list(each.commands)) for each in guarded]
    while left := [(each, commands) for each, commands in left if commands]:
        deadline = time.monotonic() + COMMAND_S_MAX
        running = [child for each, commands in left if (child := _start(commands.pop(0), each.env)) is not None]
        for child in running:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)  # a rootless podman works in a child of its own
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(REAP_S)


def _start(argv: Sequence[str], env: dict[str, str]) -> subprocess.Popen[bytes] | None:
    try:
        nowhere = subprocess.DEVNULL
        return subprocess.Popen(argv, env=env, stdin=nowhere, stdout=nowhere, stderr=nowhere, process_group=0)
    except OSError:
        return None


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
