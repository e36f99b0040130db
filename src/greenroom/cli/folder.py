"""A folder for as long as a command runs, among the temporary files.  What a killed one left goes when the next one begins."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from greenroom.store.locks import Lock

LOCK: Final = "lock"


@dataclass(frozen=True, slots=True)
class Folder:
    """`lock`: held by whoever works in it.  A child that works on when the command is killed inherits it."""

    path: Path
    lock: Lock


@contextlib.contextmanager
def own_folder(prefix: str) -> Iterator[Folder]:
    sweep(prefix)
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        path = Path(name)
        lock = Lock.attempt(path / f"{LOCK}.new")
        assert lock is not None, f"{path} is new"
        os.rename(path / f"{LOCK}.new", path / LOCK)  # under this name it was never free
        with lock:
            yield Folder(path, lock)


def sweep(prefix: str) -> None:
    """Remove folders of this user whose owners are dead."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or not (path / LOCK).is_file():
        return  # no folder, another user's, or one that is just being made
    lock = Lock.attempt(path / LOCK)
    if lock is None:
        return
    with lock:
        for item in path.iterdir():
            if item.name != LOCK:  # it goes last: without it nobody would dare to go on
                shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
        shutil.rmtree(path)
