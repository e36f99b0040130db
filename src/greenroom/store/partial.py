"""A blob that is being fetched: written in any order, resumed after any end, verified before it counts.

`NAME.part` has the bytes, `NAME.journal` a line for each range that was written (offset, length, CRC-32), `NAME.about` what it
belongs to.  A line may reach the disk before its bytes do; so the bytes are compared with it when a fetch is resumed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from .facts import Damaged, NoRoom, StoreError
from .locks import Lock
from .placing import FULL, READ_ONLY, no_room, sync_folder

RECORD_BYTES = 4 << 20  # at most so much is fetched again after a kill
READ_BYTES = 1 << 20
SYNC_BYTES = 32 << 20  # brought to the disk on the way, so that little is left for the end
HANDED_MAX = 16  # pieces, of up to RECORD_BYTES each, that wait in memory to be hashed
HASH_BYTES = 4 << 20  # at once: each step costs a change of threads, and these bytes are still in memory
JOURNAL_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class About:
    """What a partial blob belongs to."""

    reference: str
    file: str
    size: int
    digest: str = ""  # "" = not known before it is here


class Partial:
    """The one process that fetches this blob holds this.

    Ranges may be filled by several threads, each by one at a time, and `advance` may run beside them; `finish`, `discard` and
    `close` come when all of that has ended.
    """

    def __init__(self, base: Path, lock: Lock, about: About) -> None:
        self.about = about
        self._lock = lock
        self._base = base
        self._spans: list[tuple[int, int]] = []  # sorted, disjoint, not touching: [begin, end)
        self._recording = threading.Lock()
        self._hash = hashlib.sha256()
        self._read = memoryview(bytearray(HASH_BYTES if about.size > HASH_BYTES else about.size))
        self._hashed = 0  # bytes from the start that are in `_hash`
        self._hashing = threading.Lock()
        self._handed: list[memoryview] = []  # written behind those, and kept in memory until they are hashed, too
        self._front: int | None = 0  # the end of what was handed over; None = the file is being read for the hash
        self._handing = threading.Lock()
        self._synced = 0  # of `_hashed`, so much was brought to the disk already
        self._unsynced: OSError | None = None  # what became of that: the system tells it once, so it is kept for `finish`
        self._fault: NoRoom | None = None  # after it nothing is written any more
        self._removed = False
        self._fd = -1
        self._journal = -1
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return self.about.size

    @property
    def done(self) -> int:
        """Bytes that are here."""
        return sum(end - begin for begin, end in self._here())

    def _here(self) -> list[tuple[int, int]]:
        with self._recording:
            return list(self._spans)

    def missing(self, length_max: int = 1 << 62) -> list[tuple[int, int]]:
        """What is not here yet: (offset, length), in order, each at most `length_max` long."""
        gaps, at = [], 0
        for begin, end in [*self._here(), (self.size, self.size)]:
            while at < begin:
                length = min(length_max, begin - at)
                gaps.append((at, length))
                at += length
            at = end
        return gaps

    @contextlib.contextmanager
    def filling(self, offset: int, length: int) -> Iterator[Filler]:
        """Write a range from its start on; what was written counts, also when the connection breaks before its end."""
        filler = Filler(self, offset, offset + length)
        try:
            yield filler
        finally:
            filler.close()

    def finish(self, target: Path) -> str:
        """Verify the whole and make it `target`; its digest.

        Raises StoreError when bytes are missing, Damaged when they are not what the digest says (all are dropped then), NoRoom.
        """
        if self.missing():
            raise StoreError(f"{self.about.file} is not whole: {self.size - self.done:,} of {self.size:,} bytes are missing")
        self.advance()
        digest = f"sha256:{self._hash.hexdigest()}"
        if self.about.digest and digest != self.about.digest:
            self.discard()
            raise Damaged(
                f"{self.about.file} of {self.about.reference} is damaged: {self.about.digest} was promised, {digest} came; "
                "it was thrown away: pull again, or do not trust where it comes from"
            )
        try:
            if self._unsynced is not None:
                raise self._unsynced
            os.fchmod(self._fd, READ_ONLY)
            os.fsync(self._fd)
        except OSError as exc:
            self._full(exc)
        self._path("part").rename(target)
        sync_folder(target.parent)
        self._remove()
        self.close()
        return digest

    def advance(self) -> int:
        """Take what is here from the start on into the hash; bytes hashed.  Worth calling beside a fetch: then `finish` is quick."""
        while self._hash_some():
            if self._hashed - self._synced >= SYNC_BYTES:
                self._synced = self._hashed
                self._sync()
        return self._hashed

    def _sync(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as exc:
            self._unsynced = exc

    def _hash_some(self) -> bool:
        spans = self._here()
        with self._hashing:
            with self._handing:
                handed, self._handed = self._handed, []
                if not handed:
                    self._front = None
            for data in handed:
                self._hash.update(data)
                self._hashed += len(data)
            if handed:
                return True
            try:
                return self._hash_of_file(spans)
            finally:
                self._front = self._hashed

    def _hash_of_file(self, spans: list[tuple[int, int]]) -> bool:
        if self._fault or not spans or spans[0][0] > 0 or self._hashed >= spans[0][1]:
            return False
        count = os.preadv(self._fd, [self._read[: spans[0][1] - self._hashed]], self._hashed)
        if not count:
            raise StoreError(f"{self._path('part')} was cut by another program: pull again")
        self._hash.update(self._read[:count])
        self._hashed += count
        return True

    def _hand_over(self, offset: int, data: memoryview) -> None:
        """Bytes that were just written: if they are the next to be hashed, they need not be read from the file for that."""
        with self._handing:
            front = self._front
            if front == offset and data.readonly and len(self._handed) < HANDED_MAX:
                self._handed.append(data)
                self._front = offset + len(data)
                return
        if offset < max(front or 0, self._hashed):  # written again: what was hashed there is not true any more
            with self._hashing, self._handing:
                self._hash, self._hashed, self._handed, self._front = hashlib.sha256(), 0, [], 0

    def discard(self) -> None:
        """Drop everything that is here, and the lock."""
        self._remove()
        self.close()

    def close(self) -> None:
        """Let go of it; what is here stays, to be resumed."""
        for fd in (self._fd, self._journal):
            if fd >= 0:
                os.close(fd)
        self._fd = self._journal = -1
        self._lock.close()

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _path(self, ending: str) -> Path:
        return self._base.with_name(f"{self._base.name}.{ending}")

    def _open(self) -> None:
        about = json.dumps(asdict(self.about)).encode()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(self._path("part"), flags, 0o600)
            self._journal = os.open(self._path("journal"), flags | os.O_APPEND, 0o600)
            self._spans = self._verified()
            self._path("about").write_bytes(about)
        except OSError as exc:
            self._full(exc)

    def _verified(self) -> list[tuple[int, int]]:
        """The ranges that the journal tells and the bytes confirm; those from the start on are hashed on the way."""
        spans: list[tuple[int, int]] = []
        for offset, length, checksum in sorted(read_journal(self._path("journal"), self.size)):
            next_, crc = self._hash.copy() if offset == self._hashed else None, 0
            for at in range(offset, offset + length, READ_BYTES):
                data = os.pread(self._fd, min(READ_BYTES, offset + length - at), at)
                crc = zlib.crc32(data, crc)
                if next_ is not None:
                    next_.update(data)
            if crc != checksum:
                continue
            _add(spans, offset, offset + length)
            if next_ is not None:
                self._hash, self._hashed = next_, offset + length
                self._front = self._hashed
        return spans

    def _record(self, offset: int, length: int, crc: int) -> None:
        try:
            os.write(self._journal, f"{offset} {length} {crc:08x}\n".encode())
        except OSError as exc:
            self._full(exc)
        with self._recording:
            _add(self._spans, offset, offset + length)

    def _write(self, offset: int, data: memoryview) -> None:
        if self._fault is not None:
            raise self._fault
        if self._fd < 0:
            raise StoreError(f"{self.about.file} is not being fetched any more")
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], offset + done)
        except OSError as exc:
            self._full(exc)
        self._hand_over(offset, data)

    def _full(self, exc: OSError) -> None:
        """A full disk takes the part with it: otherwise nothing could be written there any more."""
        if exc.errno not in FULL:
            raise exc
        if self._fault is None:
            self._fault = no_room(self._base.parent, self.size - self.done)
            self._remove()
            # Other threads may be writing, and their descriptor must not become another file's: what lies behind it goes now.
            for fd in (self._fd, self._journal):
                if fd >= 0:
                    os.ftruncate(fd, 0)
        raise self._fault from exc

    def _remove(self) -> None:
        if not self._removed:  # once: after that the names may be another process's
            self._removed = True
            remove_parts(self._base)
            self._lock.remove()


class Filler:
    """One range that is being written."""

    def __init__(self, partial: Partial, offset: int, end: int) -> None:
        self._partial = partial
        self._begin = self._at = offset  # what lies between them is written and not yet recorded
        self._end = end
        self._crc = 0

    @property
    def at(self) -> int:
        """Where the next byte goes."""
        return self._at

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """The next bytes; raises Damaged when more come than were asked for, NoRoom when the disk is full."""
        view = memoryview(data).cast("B")
        if self._at + len(view) > self._end:
            raise Damaged(f"more bytes came for {self._partial.about.file} than were asked for: where it comes from is broken")
        while view:
            piece = view[: RECORD_BYTES - (self._at - self._begin)]
            self._partial._write(self._at, piece)
            self._crc = zlib.crc32(piece, self._crc)
            self._at += len(piece)
            view = view[len(piece) :]
            if self._at - self._begin >= RECORD_BYTES:
                self.record()

    def record(self) -> None:
        """Note what was written, so that it is not fetched again."""
        if self._at > self._begin and self._partial._journal >= 0 and self._partial._fault is None:
            self._partial._record(self._begin, self._at - self._begin, self._crc)
            self._begin, self._crc = self._at, 0

    close = record


def read_journal(path: Path, size: int) -> list[tuple[int, int, int]]:
    """(offset, length, CRC-32) of each line that is whole and lies inside `size` bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(JOURNAL_BYTES_MAX)
    except OSError:
        return []
    records = []
    for line in data.split(b"\n")[:-1]:  # behind the last newline: cut off by a kill
        words = line.split(b" ")
        try:
            offset, length, crc = int(words[0]), int(words[1]), int(words[2], 16)
        except (ValueError, IndexError):
            continue
        if offset >= 0 and 0 < length <= size - offset:
            records.append((offset, length, crc))
    return records


def recorded_bytes(path: Path, size: int) -> int:
    """How much a journal says is here; not compared with the bytes."""
    spans: list[tuple[int, int]] = []
    for offset, length, _ in sorted(read_journal(path, size)):
        _add(spans, offset, offset + length)
    return sum(end - begin for begin, end in spans)


def remove_parts(base: Path) -> None:
    for ending in ("part", "journal", "about"):
        base.with_name(f"{base.name}.{ending}").unlink(missing_ok=True)


def _add(spans: list[tuple[int, int]], begin: int, end: int) -> None:
    """Add a range to sorted disjoint ranges, in place."""
    before = [span for span in spans if span[1] < begin]
    after = [span for span in spans if span[0] > end]
    touching = spans[len(before) : len(spans) - len(after)]
    begin = min([begin, *(span[0] for span in touching)])
    end = max([end, *(span[1] for span in touching)])
    spans[:] = [*before, (begin, end), *after]
