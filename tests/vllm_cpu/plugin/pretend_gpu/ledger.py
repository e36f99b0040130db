"""The memory of a pretend GPU: a folder with one file per process, named by its pid, that says how many bytes it holds.

A file `outside` counts as another program's memory: a test writes it to make room scarce.  Standard library only: the
plugin books here inside vLLM, and the tests read the same folder from their own environment.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class NoRoomError(Exception):
    """The device has less free memory than was asked for."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} bytes wanted, {free} free")
        self.wanted, self.free = wanted, free


@dataclass(frozen=True)
class Ledger:
    """The book of one pretend GPU of `total` bytes."""

    folder: Path
    total: int

    @classmethod
    def from_environment(cls) -> Ledger:
        return cls(Path(os.environ["PRETEND_GPU_LEDGER"]), int(os.environ["PRETEND_GPU_BYTES"]))

    def held(self) -> dict[int, int]:
        """Bytes of each living process."""
        return {int(path.name): _number(path) for path in self.folder.iterdir() if path.name.isdigit() and _is_alive(path.name)}

    @property
    def outside(self) -> int:
        """Bytes of the pretend other program."""
        return _number(self.folder / "outside")

    def set_outside(self, count: int) -> None:
        with self._locked():
            _replace(self.folder / "outside", count)

    @property
    def free(self) -> int:
        return max(0, self.total - self.outside - sum(self.held().values()))

    def take(self, count: int) -> None:
        """Book for this process.  Raises NoRoomError."""
        with self._locked():
            if count > (free := self.free):
                raise NoRoomError(count, free)
            self._book(count)

    def give(self, count: int) -> None:
        """Take back from this process's booking."""
        with self._locked():
            self._book(-count)

    def _book(self, change: int) -> None:
        own = self.folder / str(os.getpid())
        _replace(own, _number(own) + change)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0


def _replace(path: Path, number: int) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(str(number))
    new.replace(path)


def _is_alive(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
