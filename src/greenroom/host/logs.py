"""What engines print: the newest lines in memory, all of it in a file that rotates, readers that may be slow.

An engine must never wait for its log.  So nothing here waits either: lines are cut, old ones fall out, a slow
reader misses some and is told how many, files are written by a thread of their own, and a full disk or one that hangs costs
the file, not the service.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

log = logging.getLogger(__name__)

LINES_MAX = 1000
LINE_BYTES_MAX = 4096
FILE_BYTES_MAX = 10 * 1024 * 1024  # then it becomes NAME.1, and the older NAME.1 goes
FILE_RETRY_S = 5.0  # after a failed write (disk full, ...)
FILE_PENDING_BYTES_MAX = 4 * 1024 * 1024  # of one file, while the disk takes its time
FILE_CLOSE_S_MAX = 2.0  # for a disk to take what is left
READER_LINES_MAX = 1000
EARLIER_LINE_BYTES = 512  # of a line of an earlier run, reckoned with: so much of the file is read for each
CUT = " …"

_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
_CONTROLS = bytes(code for code in (*range(32), 127) if code not in b"\t\n")
_C1 = dict.fromkeys(range(0x80, 0xA0))  # some terminals obey these too


class _Scribe:
    """Writes what waits for any log file.  One thread: they lie on the same disk."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._files: dict[LogFile, None] = {}  # something waits for them, in order
        self._busy = False
        self.failing: weakref.WeakSet[LogFile] = weakref.WeakSet()  # the disk did not take their lines; touched by the thread alone
        self._rounds = 0
        self._hung_in = -1  # the round that was waited for in vain
        self._thread: threading.Thread | None = None

    def put(self, file: LogFile) -> None:
        with self._moved:
            self._files[file] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="logs", daemon=True)
                self._thread.start()
            self._moved.notify_all()

    def settled(self, timeout_s: float) -> bool:
        """Wait until nothing waits any more; not again for the same write of a disk that hangs."""
        with self._moved:
            if self._moved.wait_for(lambda: not self._files and not self._busy, 0.0 if self._hung_in == self._rounds else timeout_s):
                return True
            self._hung_in = self._rounds
            return False

    def _work(self) -> None:
        while True:
            with self._moved:
                self._busy = False
                self._moved.notify_all()
                self._moved.wait_for(lambda: self._files)
                file = next(iter(self._files))
                del self._files[file]
                self._busy = True
                self._rounds += 1
            file.write_out()
            del file  # who has let go of it has: nothing is kept for the next round


_scribe = _Scribe()


class LogFile:
    """A file only its owner may read, in at most two pieces of `bytes_max`.  A failing disk is forgiven and tried again later.

    `write` and `close` are for one thread, and the disk is another's: what it has not taken yet waits in memory, bounded.
    """

    def __init__(self, path: Path, bytes_max: int = FILE_BYTES_MAX) -> None:
        self.path = path
        self.bytes_max = bytes_max
        self.error = ""  # the last failure, one sentence; "" = writing works
        self.lost_bytes = 0
        self._lock = threading.Lock()  # for what both threads touch
        self._pending: list[bytes] = []
        self._pending_bytes = 0  # in `_pending`, and being written
        self._closing = False
        self._disk = threading.Lock()  # held while the pieces change their places
        self._handle: int | None = None
        self._size = 0
        self._retry_at = 0.0
        self._before = path.stat().st_size if path.is_file() else 0  # what an earlier run left
        self._rotations = 0

    def write(self, text: bytes) -> None:
        """Hand it over to be written; waits for nothing."""
        with self._lock:
            if self._pending_bytes + len(text) > FILE_PENDING_BYTES_MAX:
                self.lost_bytes += len(text)
                return
            self._pending.append(text)
            self._pending_bytes += len(text)
            self._closing = False
        _scribe.put(self)

    def write_out(self) -> None:
        """What waits, to the disk (the thread that writes calls this)."""
        with self._lock:
            texts, self._pending = self._pending, []
            closing = self._closing
        for text in texts:
            lost = self._written(text)
            with self._lock:
                self._pending_bytes -= len(text)
                self.lost_bytes += lost
        if closing:
            self._let_go()
            _scribe.failing.discard(self)

    def _written(self, text: bytes) -> int:
        """Bytes of it that are lost."""
        if self.error and time.monotonic() < self._retry_at:
            return len(text)
        try:
            if self._size + len(text) > self.bytes_max and self._size:
                self._rotate()
            handle = self._open()
            self._size += os.write(handle, text)
            self.error = ""
            _scribe.failing.discard(self)
        except OSError as exc:
            self.error = f"{self.path}: {exc.strerror}; log lines are kept in memory only. Free some space or set another state directory."
            if not _scribe.failing:  # the first of all: the disk is told of, not each of its files
                log.warning("%s", self.error)
            _scribe.failing.add(self)
            self._retry_at = time.monotonic() + FILE_RETRY_S
            return len(text)
        return 0

    def settled(self) -> bool:
        """Wait until the disk has what was written so far, of this file and of all others; False: it takes longer than FILE_CLOSE_S_MAX."""
        return _scribe.settled(FILE_CLOSE_S_MAX)

    def earlier(self, bytes_max: int) -> bytes:
        """The end of what earlier runs wrote, whole lines; b"" where nothing of it is left or can be read."""
        older = self._older()
        found, is_cut = b"", False
        with self._disk:
            pieces = [(self.path, self._before), (older, self.bytes_max)] if not self._rotations else [(older, self._before)]
            for path, end in pieces if self._rotations < 2 else ():
                with suppress(OSError):
                    part, is_cut = end_of(path, end, bytes_max - len(found))
                    found = part + found
                if is_cut:
                    break
        return found.partition(b"\n")[2] if is_cut else found

    def close(self) -> None:
        """Bring what is left to the disk, for a bounded time, and let go of it."""
        with self._lock:
            self._closing = True
        _scribe.put(self)
        self.settled()

    def _let_go(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _open(self) -> int:
        if self._handle is None:
            self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.fchmod(self._handle, 0o600)  # it may have been there before, with another mode
            self._size = os.fstat(self._handle).st_size
        return self._handle

    def _rotate(self) -> None:
        self._let_go()
        self._size = 0
        with self._disk:
            self.path.replace(self._older())
            self._rotations += 1

    def _older(self) -> Path:
        return self.path.with_name(self.path.name + ".1")


class LogReader:
    """One follower: an endless iterator of lines.  When it is too slow the oldest lines are dropped and counted."""

    def __init__(self, first: Sequence[str], lines_max: int) -> None:
        self.dropped = 0  # in all
        self._lines: deque[str] = deque(first, lines_max)
        self._untold = 0
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> LogReader:
        return self

    async def __anext__(self) -> str:
        """The next line, or a note in brackets where lines are missing."""
        while not self._lines:
            if self._closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._untold:
            untold, self._untold = self._untold, 0
            return f"[{untold} lines left out: this reader was too slow]"
        return self._lines.popleft()

    def push(self, lines: Sequence[str]) -> None:
        assert self._lines.maxlen is not None
        if (over := len(self._lines) + len(lines) - self._lines.maxlen) > 0:
            self.dropped += over
            self._untold += over
        self._lines.extend(lines)
        self._wake()

    def close(self) -> None:
        """End the iteration once the lines held are read."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class LogRing:
    """The newest lines of one engine.

    `mask`: secrets, shown as ***.  `hint`: whether a line says that the engine is about ready (asked by `probes`).
    Lines are text without escape sequences and control characters, bad bytes replaced, cut at `line_bytes_max`.
    A carriage return ends a line too (progress bars).
    """

    def __init__(
        self,
        name: str,
        *,
        lines_max: int = LINES_MAX,
        line_bytes_max: int = LINE_BYTES_MAX,
        mask: Sequence[str] = (),
        file: Path | None = None,
        file_bytes_max: int = FILE_BYTES_MAX,
        hint: Callable[[str], bool] | None = None,
    ) -> None:
        self.name = name
        self.hint = hint
        self.line_bytes_max = line_bytes_max
        self.file = None if file is None else LogFile(file, file_bytes_max)
        self.lines_seen = 0
        self.left_out = 0  # lines of a flood that were never looked at
        self._lines: deque[str] = deque(maxlen=lines_max)
        self._part = b""  # the line that has not ended yet, raw
        self._skipping = False  # inside the rest of a line that was cut
        self._readers: weakref.WeakSet[LogReader] = weakref.WeakSet()
        self._listeners: list[Callable[[Sequence[str]], None]] = []
        self.mask(mask)

    def mask(self, secrets: Sequence[str]) -> None:
        """From now on show these as *** (in place of those given before)."""
        self._secrets = sorted((secret.encode() for secret in secrets if secret), key=len, reverse=True)
        # A secret that starts before the cut must be seen whole, or its first half would be shown.
        self._part_bytes_max = self.line_bytes_max + max(map(len, self._secrets), default=0)

    @property
    def secrets(self) -> tuple[str, ...]:
        """What is shown as ***."""
        return tuple(secret.decode() for secret in self._secrets)

    def masked(self, text: str) -> str:
        """What else the engine said, with its secrets shown as in its log."""
        for secret in self._secrets:
            text = text.replace(secret.decode(), "***")
        return text

    def feed(self, chunk: bytes) -> None:
        """Take what the engine printed; any bytes, cut anywhere."""
        if self._skipping:
            end = _first_end(chunk)
            if end < 0:
                return
            chunk, self._skipping = chunk[end + 1 :], False
        data = self._part + chunk if self._part else chunk
        held = b"\r" if data.endswith(b"\r") else b""  # perhaps the first half of a line end
        if b"\r" in data:
            data = data[: len(data) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        whole, newline, part = data.rpartition(b"\n")
        self._part = part + held
        if newline:
            self._take(whole)
        if len(self._part) > self._part_bytes_max:
            self._take(self._part[: self._part_bytes_max], cut=True)
            self._part, self._skipping = b"", True

    def flush(self) -> None:
        """The engine has ended: an unfinished last line is a line too."""
        part, self._part, self._skipping = self._part.rstrip(b"\r"), b"", False
        if part:
            self._take(part)

    def note(self, text: str) -> None:
        """Add a line of our own."""
        self.flush()
        self._publish([text])

    def leave_out(self, lines: int) -> None:
        """Lines of a flood that were thrown away unread."""
        self.left_out += lines
        self.note(f"[{lines} lines left out: printed faster than they can be kept]")

    def tail(self, n: int) -> list[str]:
        """The newest `n` lines, oldest first."""
        return list(islice(self._lines, max(0, len(self._lines) - n), None))

    def history(self, n: int) -> list[str]:
        """The newest `n` lines, oldest first, also those that the file holds of earlier runs; a line of ours parts them from this run's."""
        lines = self.tail(n)
        wanted = min(n - len(lines) - 1, LINES_MAX)
        if self.file is None or wanted <= 0 or self.lines_seen > len(lines):
            return lines
        old = LogRing(self.name, lines_max=wanted, line_bytes_max=self.line_bytes_max, mask=self.secrets)
        old.feed(self.file.earlier(wanted * EARLIER_LINE_BYTES))
        old.flush()
        if not old.lines_seen:
            return lines
        return [
            *old.tail(wanted),
            f"[greenroom: what is above was printed before greenroom started; older lines are in {self.file.path}]",
            *lines,
        ]

    def subscribe(self, *, tail: int = 0, lines_max: int = READER_LINES_MAX) -> LogReader:
        """Follow the log from here, after the newest `tail` lines.  Dropping the reader is enough to end it."""
        reader = LogReader(self.tail(tail), lines_max)
        self._readers.add(reader)
        return reader

    def listen(self, callback: Callable[[Sequence[str]], None]) -> Callable[[], None]:
        """Call `callback` with every batch of new lines, at once; returns what ends that."""
        self._listeners.append(callback)
        return lambda: self._listeners.remove(callback) if callback in self._listeners else None

    def close(self) -> None:
        """Write what is left and end all readers."""
        self.flush()
        for reader in tuple(self._readers):
            reader.close()
        if self.file is not None:
            self.file.close()

    def _take(self, raw: bytes, *, cut: bool = False) -> None:
        if b"\x1b" in raw:
            raw = _ESCAPES.sub(b"", raw)
        raw = raw.translate(None, _CONTROLS)
        for secret in self._secrets:
            raw = raw.replace(secret, b"***")
        text = raw.decode("utf-8", "replace")
        if not text.isascii():
            text = text.translate(_C1)
        lines = text.split("\n")
        if cut or max(map(len, lines)) > self.line_bytes_max:
            lines = list(self._cut(lines, cut))
        self._publish(lines)

    def _cut(self, lines: Sequence[str], cut: bool) -> Iterator[str]:
        for line in lines:
            yield line[: self.line_bytes_max] + CUT if cut or len(line) > self.line_bytes_max else line

    def _publish(self, lines: Sequence[str]) -> None:
        self.lines_seen += len(lines)
        self._lines.extend(lines)
        if self.file is not None:
            self.file.write(("\n".join(lines) + "\n").encode("utf-8", "replace"))
        for reader in tuple(self._readers):
            reader.push(lines)
        for listener in tuple(self._listeners):
            listener(lines)


def end_of(path: Path, end: int, bytes_max: int) -> tuple[bytes, bool]:
    """The last bytes before `end`, and whether the file holds more before them."""
    with path.open("rb") as file:
        end = min(end, file.seek(0, os.SEEK_END))
        begin = max(0, end - bytes_max)
        file.seek(begin)
        return file.read(end - begin), begin > 0


def _first_end(chunk: bytes) -> int:
    ends = [end for end in (chunk.find(b"\n"), chunk.find(b"\r")) if end >= 0]
    return min(ends, default=-1)
