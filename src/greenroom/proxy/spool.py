"""Bodies that are too large for memory: one anonymous temporary file each, under one common cap."""

from __future__ import annotations

import errno
import tempfile
from typing import IO

from .admission import Refusal
from .limits import MIB, Stats


class SpoolError(Exception):
    """A body could not be kept; `refusal` says why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Spool:
    """Hands out files and counts their bytes.

    The files have no name (or lose it at once), so nothing stays behind however the process ends.
    Writes are not awaited: they go to the page cache, a read's worth (256 KiB) at a time.
    """

    __slots__ = ("bytes_max", "directory", "stats")

    def __init__(self, mib_max: int, directory: str | None, stats: Stats) -> None:
        self.bytes_max = mib_max * MIB
        self.directory = directory
        self.stats = stats

    def open(self) -> SpoolFile:
        try:
            file = tempfile.TemporaryFile(dir=self.directory, buffering=0)  # noqa: SIM115
        except OSError as exc:
            raise SpoolError(_no_room(exc)) from exc
        self.stats.spool_files_now += 1
        return SpoolFile(self, file)


class SpoolFile:
    """One body; `size` bytes so far."""

    __slots__ = ("file", "size", "spool")

    def __init__(self, spool: Spool, file: IO[bytes]) -> None:
        self.spool = spool
        self.file: IO[bytes] | None = file
        self.size = 0

    def append(self, data: bytes | bytearray) -> None:
        """SpoolError when the common cap or the disk is full."""
        spool = self.spool
        assert self.file is not None
        if spool.stats.spool_bytes_now + len(data) > spool.bytes_max:
            raise SpoolError(
                Refusal(
                    507,
                    "spool_full",
                    f"Uploads under way already hold {spool.stats.spool_bytes_now // MIB} of {spool.bytes_max // MIB} MiB "
                    "(limits.spool_mib_max): send this one again when they are done.",
                )
            )
        view = memoryview(data)
        try:
            while view:
                view = view[self.file.write(view) :]
        except OSError as exc:
            raise SpoolError(_no_room(exc)) from exc
        self.size += len(data)
        spool.stats.spool_bytes_now += len(data)

    def read(self, offset: int, count: int) -> bytes:
        assert self.file is not None
        self.file.seek(offset)
        return self.file.read(count)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None
            self.spool.stats.spool_bytes_now -= self.size
            self.spool.stats.spool_files_now -= 1


def _no_room(exc: OSError) -> Refusal:
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refusal(507, "spool_full", "The temporary directory is full, so this upload cannot be kept: free space there or set TMPDIR.")
    return Refusal(507, "spool_failed", f"This upload cannot be kept in the temporary directory: {exc.strerror}.")


class Patched:
    """A body with one stretch replaced, without touching the file; read in order."""

    __slots__ = ("end", "file", "put", "size", "start")

    def __init__(self, file: SpoolFile, start: int, end: int, put: bytes) -> None:
        self.file = file
        self.start = start
        self.end = end
        self.put = put
        self.size = file.size - (end - start) + len(put)

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes at `offset` of the patched body; fewer only at a seam or at the end."""
        if offset < self.start:
            return self.file.read(offset, min(count, self.start - offset))
        inside = offset - self.start
        if inside < len(self.put):
            return self.put[inside : inside + count]
        return self.file.read(self.end + inside - len(self.put), count)
