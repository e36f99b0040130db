"""What the kernel says of running processes: one cheap pass over /proc, and signals that cannot hit a stranger.

Only the standard library, and little of it: the watcher process imports this too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

Identity: TypeAlias = tuple[int, int]  # pid and kernel start time in ticks: a reused pid has another start time

ENVIRON_BYTES_MAX = 2 * 1024 * 1024  # the kernel's own limit for arguments and environment together
SUPERVISOR_KEY = b"GREENROOM_SUPERVISOR"  # whose engine: state directory and run
INSTANCE_KEY = b"GREENROOM_INSTANCE"  # which engine


class Entry(NamedTuple):
    """One process as /proc/PID/stat shows it."""

    pid: int
    ppid: int
    group: int
    session: int
    state: str
    threads: int
    started_ticks: int

    @property
    def identity(self) -> Identity:
        return self.pid, self.started_ticks

    @property
    def live(self) -> bool:
        # A process whose first thread ended while others run on shows as a zombie too.
        return self.state not in "ZX" or self.threads > 1


def read_entry(pid: int) -> Entry | None:
    """The process `pid` now; None when there is none."""
    raw = read_small(f"/proc/{pid}/stat", 1024)
    # The name in brackets may itself hold spaces and brackets, so the fields are counted from the last bracket.
    fields = raw[raw.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    return Entry(pid, int(fields[1]), int(fields[2]), int(fields[3]), chr(fields[0][0]), int(fields[17]), int(fields[19]))


def snapshot() -> dict[int, Entry]:
    """All processes that can be seen, by pid (about 10 us each)."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (entry := read_entry(int(name))) is not None:
            table[entry.pid] = entry
    return table


def environ_value(pid: int, key: bytes) -> bytes | None:
    """The value of `key` in the environment `pid` was started with; None when it has none or may not be read."""
    for item in read_small(f"/proc/{pid}/environ", ENVIRON_BYTES_MAX).split(b"\0"):
        name, _, value = item.partition(b"=")
        if name == key:
            return value
    return None


def descendants(table: Mapping[int, Entry], roots: Iterable[int]) -> set[int]:
    """`roots` and every process below them."""
    children: dict[int, list[int]] = {}
    for entry in table.values():
        children.setdefault(entry.ppid, []).append(entry.pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting.extend(children.get(pid, ()))
    return found


def send_signal(identity: Identity, signum: int) -> bool:
    """Signal exactly that process; False when it is gone or not ours to signal."""
    pid, started_ticks = identity
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:  # a kernel or a sandbox without pidfds
        handle = None
    try:
        entry = read_entry(pid)  # after the handle is held: the pid cannot change hands any more
        if entry is None or entry.started_ticks != started_ticks:
            return False
        if handle is None:
            os.kill(pid, signum)
        else:
            signal.pidfd_send_signal(handle, signum)
        return True
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if handle is not None:
            os.close(handle)


def read_small(path: str, bytes_max: int) -> bytes:
    """A file of /proc, b"" when it is gone or closed to us."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        parts = []
        while bytes_max > 0 and (part := os.read(handle, min(bytes_max, 65536))):
            parts.append(part)
            bytes_max -= len(part)
        return b"".join(parts)
    except OSError:  # it ended while we read
        return b""
    finally:
        os.close(handle)
