"""Locks between processes: `flock` on small files.  They end with the process that holds them, however it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from .facts import StoreError

POLL_S = 0.02
WAIT_S_MAX = 60.0  # for locks that are held for moments only
DENIED = (errno.EWOULDBLOCK, errno.EACCES)


class Lock:
    """A held lock; ends by `close`, as a context manager, or with the process."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd: int | None = fd

    @classmethod
    def attempt(cls, path: Path, *, shared: bool = False) -> Lock | None:
        """The lock, or None when another one holds it (also in this process)."""
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                # Whoever held it may have removed the file: then a lock on it keeps nobody out.
                if os.fstat(fd).st_ino == path.stat().st_ino:
                    return cls(path, fd)
            except FileNotFoundError:
                pass
            except OSError as exc:
                os.close(fd)
                if exc.errno in DENIED:
                    return None
                raise
            os.close(fd)

    @classmethod
    def wait(cls, path: Path, *, shared: bool = False, seconds_max: float = WAIT_S_MAX) -> Lock:
        """The lock as soon as it is free; raises StoreError when it is not in time."""
        until = time.monotonic() + seconds_max
        while True:
            lock = cls.attempt(path, shared=shared)
            if lock is not None:
                return lock
            if time.monotonic() > until:
                raise StoreError(f"another process has held {path} for {seconds_max:.0f} s: end it, or wait")
            time.sleep(POLL_S)

    def fileno(self) -> int:
        """To be handed on: the lock is held until the last one who has it ends."""
        assert self._fd is not None, f"the lock {self.path} was let go"
        return self._fd

    def remove(self) -> None:
        """Take the file away, still held, so that nobody waits on it."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def is_held(path: Path) -> bool:
    """True while a process holds a lock on this file alone; never makes the file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as exc:
        return exc.errno in DENIED
    finally:
        os.close(fd)
    return False
