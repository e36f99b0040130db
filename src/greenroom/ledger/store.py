"""The ledger's writer: takes what happens from the event loop, writes it in a thread of its own.

    ledger = Ledger(path)
    ledger.boot(setup, version)
    shell.hooks.append(ledger.saw)          # each costs the loop a microsecond
    ledger.ended(record)                    # the data plane's word about a request that ended
    ledger.find.requests(model="a")         # any thread, see `reads`

Nothing of the disk is ever waited for by who calls.  What cannot be written stays in memory, bounded, and is written
once it can be; what cannot even be taken in is dropped and counted.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Final, Protocol

from greenroom.core.facts import Action, Admit, Event, Outcome, RequestArrived, RequestFinished, Setup

from . import codec, schema
from .chronicle import Book, Chronicle, Row
from .footprints import is_damaged, move_aside
from .reads import Reads
from .rows import RequestRow, SampleRow, TellRow, TransitionRow

log = logging.getLogger(__name__)

SLICE: Final = 256  # of what was taken in, between two breaths of the writer: the loop shall never wait long for the interpreter
BREATH_S: Final = 0.0002
GATHER_S: Final = 1.0  # so long things come together before they are written
JOIN_S: Final = 5.0  # the two words about a request's end come within this, or it is written with one
PIECE_EVENTS: Final = 1024  # of the journal, packed together ...
PIECE_S: Final = 5.0  # ... or as many as came in this time
BUSY_S: Final = 2.0  # another process writes: wait this long, then it counts as a fault
RETRY_S: Final = 15.0  # a disk that failed is tried again after this
PRUNE_EVERY_S: Final = 300.0
PRUNE_STEP: Final = 5000  # rows deleted at once
VACUUM_PAGES: Final = 10_000  # given back to the disk at once
PRUNE_SHARE: Final = 0.05  # of each table, the oldest first, while the file is too large
OFFSET_SLACK_S: Final = 0.1  # a wall clock that is off by less is not followed
CLOSE_S: Final = 3.0
WAL_MIB_MAX: Final = 16
_OK: Final = Outcome.OK


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept."""

    days: float = 30.0
    rows: int = 2_000_000  # of each kind; of events, pieces
    mib: int = 1024
    queued: int = 100_000  # taken in and not yet looked at
    unwritten: int = 8_192  # rows of each kind in memory while the disk cannot be written
    unjoined: int = 8_192  # requests of which one half is missing


class Told(Protocol):
    """What the ledger reads of the data plane's record."""

    @property
    def request(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def client(self) -> str: ...
    @property
    def status(self) -> int: ...
    @property
    def outcome(self) -> str: ...
    @property
    def first_byte_s(self) -> float | None: ...
    @property
    def took_s(self) -> float: ...
    @property
    def tokens_in(self) -> int | None: ...
    @property
    def tokens_out(self) -> int | None: ...
    @property
    def start(self) -> str: ...
    @property
    def peer(self) -> str: ...


class Listener(Protocol):
    """Whoever wants to know of rows as they come."""

    def ended(self, requests: Sequence[Sequence[Any]]) -> None:
        """Values that RequestRows are made from: a row for each would cost more than all else here."""

    def moved(self, row: TransitionRow) -> None: ...


@dataclass(frozen=True, slots=True)
class _Seen:
    event: Event
    actions: Sequence[Action]
    book: Book | None


@dataclass(frozen=True, slots=True)
class _Boot:
    at: float
    setup: Setup
    version: str
    why: str  # of a book that was built anew; "" = a start or a reload


@dataclass(frozen=True, slots=True)
class _Flush:
    done: threading.Event


class Ledger:
    """`path` None keeps everything in memory.  `saw` and `ended` are called on one thread, the rest on any."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        gather_s: float = GATHER_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self.limits = limits or Limits()
        self.dropped = 0  # taken in by nobody, because the writer was too far behind
        self.listeners: list[Listener] = []  # told of what is written, on the writer's thread
        self._clock, self._wall, self._gather_s, self._retry_s = clock, wall, gather_s, retry_s
        self._queue: deque[object] = deque()
        self._some, self._hurry = threading.Event(), threading.Event()
        self._room = self.limits.queued  # none while it is closing
        self._woken = False  # as `_some`, for a tenth of the time that it takes to ask that
        self._closing = False
        self._disk = _Disk(Path(path) if path is not None else None, self.limits)
        self.find = Reads(self._disk.reader, self._disk.doubted.set)
        self._chronicle = Chronicle(Setup((), ()), wall() - clock(), request_row=_values)
        self._halves: dict[int, tuple[list[Any], float]] = {}  # of the core, waiting for the record
        self._records: dict[int, tuple[Told, float]] = {}  # of the data plane, waiting for the core
        self._lines: list[bytes] = []
        self._lines_from = self._lines_until = 0.0
        self._lines_count = 0  # events in them
        self._hot: list[Any] = []  # events of hot requests, one after the other, that are no line yet
        self._hot_kinds: dict[tuple[str, str, str | None, int] | str, int] = {}
        self._batch: defaultdict[str, list[Sequence[Any]]] = defaultdict(list)
        self._now = clock()  # when what waited was last looked at
        self._dropped_seen = 0
        self._failed = False
        self._pruned_at = clock()
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ called on the loop

    def saw(self, event: Event, actions: Sequence[Action], book: Book | None = None) -> None:
        """A hook of the shell.  `book`: what is booked after it, where that is known."""
        queue = self._queue
        if len(queue) >= self._room:
            self.dropped += 1
            return
        # Of the two events of a hot request only bare values are kept: what the collector need not look at, and what is
        # gone from the cache soon is little.
        kind = event.__class__
        if kind is RequestArrived:
            assert isinstance(event, RequestArrived)
            if len(actions) == 1 and book is None and event.deadline_s is None:
                admit = actions[0]
                if admit.__class__ is Admit and admit.start == "hot" and admit.request == event.request and admit.model == event.model:
                    priority = event.priority.value if event.priority is not None else None
                    queue.append((event.at, event.request, event.model, event.client, priority, admit.generation))
                    if not self._woken:
                        self._wake()
                    return
        elif kind is RequestFinished and not actions and book is None:
            assert isinstance(event, RequestFinished)
            queue.append((event.at, event.request, "ok" if event.outcome is _OK else event.outcome.value))
            if not self._woken:
                self._wake()
            return
        queue.append(_Seen(event, actions, book))
        if not self._woken:
            self._wake()

    def ended(self, record: Told) -> None:
        """The data plane's word about a request; one without a number was never asked for, and is not remembered."""
        if record.request:
            if len(self._queue) >= self._room:
                self.dropped += 1
                return
            self._queue.append((record, self._clock()))
            if not self._woken:
                self._wake()

    def boot(self, setup: Setup, version: str = "", *, why: str = "") -> None:
        """These settings hold from now on: at the start, before a reload, and (with `why`) when the book is built anew."""
        self._queue.append(_Boot(self._clock(), setup, version, why))  # however long the queue is: nothing is read without it
        self._wake()

    def _wake(self) -> None:
        self._woken = True
        self._some.set()

    # ------------------------------------------------------------------ called on any thread

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until everything taken in is written (or kept in memory, where it cannot be); False: not in time.  Never on the loop."""
        done = _Flush(threading.Event())
        self._queue.append(done)
        self._hurry.set()
        self._some.set()
        return done.done.wait(timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what is left, for a bounded time."""
        self._closing, self._room = True, 0
        self._hurry.set()
        self._some.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("%s could not be written in %g s; its last rows are lost", self._disk.path, timeout_s)

    @property
    def is_durable(self) -> bool:
        """False while rows are kept in memory only."""
        return self._disk.is_durable

    # ------------------------------------------------------------------ the writer's thread

    def _work(self) -> None:
        self._disk.open()
        while not self._closing:
            if self._some.wait(self._rest_s()) and not self._closing:
                self._hurry.wait(self._gather_s)
            self._hurry.clear()
            self._some.clear()
            self._woken = False  # before the queue is looked at: whoever comes later says so again
            self._round()
        self._round(last=True)
        self._disk.close()

    def _rest_s(self) -> float:
        """How long nothing is due if nothing comes."""
        if self._halves or self._records or self._lines or self._hot:
            return self._gather_s
        return PRUNE_EVERY_S if self._disk.is_durable else self._retry_s

    def _round(self, *, last: bool = False) -> None:
        waiting: list[_Flush] = []
        try:
            self._drain(waiting)
            now = self._clock()
            self._join_late(now, last=last)
            if (self._lines or self._hot) and (
                last or waiting or self._lines_until - self._lines_from >= PIECE_S or now - self._lines_until >= PIECE_S
            ):
                self._piece()
            self._write()
            if now - self._pruned_at >= PRUNE_EVERY_S:
                self._pruned_at = now
                self._disk.prune(self._wall())
        except Exception:  # a bug of ours costs rows, never the server
            self._batch.clear()
            if not self._failed:
                log.exception("the ledger met an inner fault; some rows are lost")
            self._failed = True
        for one in waiting:
            one.done.set()

    def _drain(self, waiting: list[_Flush]) -> None:
        queue = self._queue
        self._now = self._clock()
        offset_s = self._wall() - self._now
        if abs(offset_s - self._chronicle.offset_s) > OFFSET_SLACK_S:
            self._piece()
            self._chronicle.offset_s = offset_s
        for taken in range(len(queue)):
            item = queue.popleft()
            if isinstance(item, tuple):
                if (size := len(item)) == 2:
                    self._joined(*item)
                elif size == 3:
                    at, request, kind = item
                    self._hot_event(at, request, kind)
                    row = self._chronicle.hot_end(at, request, kind)
                    if row is not None:
                        self._half(row)
                else:
                    self._hot_event(item[0], item[1], item[2:])
                    self._chronicle.hot_arrival(*item)
            elif isinstance(item, _Seen):
                self._event(item.event, item.actions, item.book)
            elif isinstance(item, _Boot):
                self._booted(item)
            elif isinstance(item, _Flush):
                waiting.append(item)
            if taken % SLICE == SLICE - 1 and not self._closing:
                time.sleep(BREATH_S)
        if self.dropped != self._dropped_seen:
            self._lost(self._clock(), self.dropped - self._dropped_seen)

    def _event(self, event: Event, actions: Sequence[Action], book: Book | None) -> None:
        self._line(_line_or_hole(event, actions), event.at)
        for row in self._chronicle.feed(event, actions, book):
            self._put(row)

    def _line(self, line: bytes, at: float) -> None:
        if self._hot:
            self._hot_line()
        self._lines.append(line)
        self._counted(at)

    def _hot_event(self, at: float, request: int, kind: tuple[str, str, str | None, int] | str) -> None:
        kinds = self._hot_kinds
        self._hot += (at, request, kinds.setdefault(kind, len(kinds)))
        self._counted(at)

    def _counted(self, at: float) -> None:
        """One more event is in the journal's lines."""
        if not self._lines_count:
            self._lines_from = at
        self._lines_until = at
        self._lines_count += 1
        if self._lines_count >= PIECE_EVENTS:
            self._piece()

    def _hot_line(self) -> None:
        kinds, events = list(self._hot_kinds), self._hot
        self._hot, self._hot_kinds = [], {}
        try:
            self._lines.append(schema.hot_line(kinds, events))
        except (TypeError, ValueError, UnicodeError):  # one of them has a text that is no text
            for event, actions in schema.hot_events(kinds, events):
                self._lines.append(_line_or_hole(event, actions))

    def _piece(self) -> None:
        """Pack the journal's lines."""
        if self._hot:
            self._hot_line()
        if self._lines:
            offset_s = self._chronicle.offset_s
            piece = (
                self._lines_from + offset_s,
                self._lines_until + offset_s,
                offset_s,
                self._lines_count,
                schema.packed_lines(self._lines),
            )
            self._batch["journal"].append(piece)
            self._lines, self._lines_count = [], 0

    def _lost(self, at: float, count: int) -> None:
        """Events were dropped: what is known of the running requests and transitions is not true any more."""
        if not self._dropped_seen:
            log.warning("the ledger was too slow for what happened, %d entries are not in it; requests are not affected (told once)", count)
        self._dropped_seen += count
        self._line(schema.lost_line(at, count), at)
        for row in self._chronicle.restart(at, "what became of it was not recorded", forget=True):
            self._put(row)

    def _booted(self, boot: _Boot) -> None:
        if boot.why:
            for row in self._chronicle.restart(boot.at, boot.why):
                self._put(row)
        self._chronicle.take(boot.setup)
        values = (boot.at + self._chronicle.offset_s, boot.at, boot.version, schema.packed_setup(codec.plain_setup(boot.setup)))
        self._piece()
        self._batch["boots"].append(values)

    # ------------------------------------------------------------------ the two halves of a request

    def _put(self, row: Row | list[Any]) -> None:
        if isinstance(row, list):
            self._half(row)
        elif isinstance(row, TransitionRow):
            self._batch["transitions"].append(schema.transition_values(row))
            for listener in self.listeners:
                listener.moved(row)
        elif isinstance(row, TellRow):
            self._batch["tells"].append(schema.tell_values(row))
        elif isinstance(row, SampleRow):
            self._batch["samples"].append(schema.sample_values(row))

    def _half(self, row: list[Any]) -> None:
        """The core's word about a request that ended."""
        ended = self._records.pop(row[0], None) if self._records else None
        if ended is not None:
            join(row, ended[0])
            self._batch["requests"].append(row)
        elif len(self._halves) < self.limits.unjoined:
            self._halves[row[0]] = (row, self._now)
        else:
            self._batch["requests"].append(row)

    def _joined(self, record: Told, at: float) -> None:
        half = self._halves.pop(record.request, None)
        if half is not None:
            join(half[0], record)
            self._batch["requests"].append(half[0])
        elif len(self._records) < self.limits.unjoined:
            self._records[record.request] = (record, at)
        else:
            self._alone(record, at)

    def _join_late(self, now: float, *, last: bool) -> None:
        """Who has waited long enough for the other half is written without it; the oldest come first."""
        for request, (row, since) in list(self._halves.items()):
            if not last and now - since < JOIN_S:
                break
            del self._halves[request]
            self._batch["requests"].append(row)
        for request, (record, at) in list(self._records.items()):
            if not last and now - at < JOIN_S:
                break
            del self._records[request]
            self._alone(record, at)

    def _alone(self, record: Told, at: float) -> None:
        """The core never told its end, or never knew it: refused before it was asked, or its book was built anew."""
        row = self._chronicle.abandon(record.request, at, record.outcome)
        if row is None:
            began_at = at - record.took_s + self._chronicle.offset_s
            took_s, outcome = record.took_s, record.outcome
            row = schema.request_values(
                RequestRow(record.request, began_at, record.model, 0, record.client, "interactive", "", duration_s=took_s, outcome=outcome)
            )
        join(row, record)
        self._batch["requests"].append(row)

    # ------------------------------------------------------------------ writing

    def _write(self) -> None:
        batch, self._batch = self._batch, defaultdict(list)
        if requests := batch.get("requests"):
            for listener in self.listeners:
                listener.ended(requests)
        self._disk.write(batch, self._retry_s)


def join(values: list[Any], record: Told) -> None:
    """Add to the core's half what only the data plane knows."""
    if not values[schema.CLIENT]:
        values[schema.CLIENT] = record.client
    values[schema.PATH] = record.path
    if record.status:
        values[schema.STATUS] = record.status
    values[schema.FIRST_BYTE_S] = record.first_byte_s
    values[schema.TOKENS_IN], values[schema.TOKENS_OUT] = record.tokens_in, record.tokens_out
    if record.peer:  # the core refused it, or never heard of it
        values[schema.START], values[schema.OUTCOME], values[schema.CODE] = record.start, record.outcome, f"peer:{record.peer}"


def _line_or_hole(event: Event, actions: Sequence[Action]) -> bytes:
    try:
        return schema.line_of(event, actions)
    except (TypeError, ValueError, UnicodeError):  # a text that is no text: the journal has a hole, and nothing else
        return schema.lost_line(event.at, 1)


def _values(*values: Any) -> list[Any]:
    return list(values)


Batch = Mapping[str, Sequence[Sequence[Any]]]


class _Disk:
    """The file, or memory in its place.  `reader` is called on any thread, all else on the writer's."""

    def __init__(self, path: Path | None, limits: Limits) -> None:
        self.path = path
        self._limits = limits
        self._lock = threading.Lock()  # for the connection in memory, which readers share
        self._db: sqlite3.Connection | None = None  # the file
        self._memory: sqlite3.Connection | None = None  # in its place
        self._unwritten: dict[str, deque[Sequence[Any]]] = {}
        self._lost = 0
        self._tried_at = 0.0
        self._began_anew = False
        self._opened = threading.Event()
        self.doubted = threading.Event()  # a reader found damage
        self._run = 0  # the boot of this server's start, as the file numbers it; 0 = none yet
        self._memory_run = 0
        self._boot: Sequence[Any] = ()  # the latest, for a file that does not have it

    @property
    def is_durable(self) -> bool:
        return self._memory is None

    def open(self) -> None:
        try:
            self._open()
        finally:
            self._opened.set()

    def _open(self) -> None:
        if self.path is None:
            self._go_on_in_memory()
            return
        try:
            self._connect(self.path)
        except (sqlite3.Error, OSError) as fault:
            if not self._begin_anew(fault):
                self._degrade(fault, {})

    def close(self) -> None:
        for db in (self._db, self._memory):
            if db is not None:
                with self._lock:
                    db.close()
        self._db = self._memory = None

    def write(self, batch: Batch, retry_s: float) -> None:
        if self._memory is not None:
            self._remember(batch)
            if self.path is None or time.monotonic() - self._tried_at < retry_s:
                return
            self._recover()
            return
        if not batch or self._db is None:
            return
        try:
            if self.doubted.is_set():
                self._look_anew(self._db)
            self._run = self._insert(self._db, batch, self._run)
        except (sqlite3.Error, OSError) as fault:
            if self._begin_anew(fault):
                self.write(batch, retry_s)
            else:
                self._degrade(fault, batch)

    def _connect(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA auto_vacuum=INCREMENTAL")  # of a new file only
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute(f"PRAGMA journal_size_limit={WAL_MIB_MAX << 20}")
            schema.migrate(db)
            if self._run and not db.execute("SELECT 1 FROM boots WHERE id = ?", (self._run,)).fetchone():
                schema.insert(db, "boots", [(self._run, self._run, *self._boot)])
        except BaseException:
            db.close()
            raise
        self._db = db

    def _look_anew(self, db: sqlite3.Connection) -> None:
        """Whether a reader was right; raises sqlite3.DatabaseError if so."""
        self.doubted.clear()
        if self._began_anew:
            return  # looking takes long, and a second new file would not help
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # what is only in our own pages would look well
        with closing(sqlite3.connect(f"{self.path}", timeout=BUSY_S)) as fresh:
            (found,) = fresh.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            fault = sqlite3.DatabaseError(found)
            fault.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise fault

    # ------------------------------------------------------------------ inserting

    def _insert(self, db: sqlite3.Connection, batch: Batch, run: int) -> int:
        """All of it or nothing; returns the run."""
        db.execute("BEGIN IMMEDIATE")
        try:
            for values in batch.get("boots", ()):
                (latest,) = db.execute("SELECT coalesce(max(id), 0) FROM boots").fetchone()
                boot = max(latest, run) + 1
                run = run or boot
                self._boot = values
                schema.insert(db, "boots", [(boot, run, *values)])
            for table, rows in batch.items():
                if table == "requests":
                    schema.insert_requests(db, list(rows), run)
                elif table == "journal":
                    schema.insert(db, table, [(run, *row) for row in rows])
                elif table != "boots":
                    schema.insert(db, table, list(rows))
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        return run

    # ------------------------------------------------------------------ a disk that fails

    def _begin_anew(self, fault: Exception) -> bool:
        """Move a damaged file aside and begin a new one; once in a run."""
        path = self.path
        if path is None or self._began_anew or not is_damaged(fault):
            return False
        self._began_anew = True
        if self._db is not None:
            self._db.close()
            self._db = None
        try:
            aside = move_aside(path)
            self._connect(path)
        except (sqlite3.Error, OSError):
            return False
        log.warning("%s was damaged (%s): it is %s now, and a new one was begun", path, fault, aside)
        return True

    def _degrade(self, fault: Exception, batch: Batch) -> None:
        log.warning(
            "%s cannot be written (%s): what happens is kept in memory only, the last %d rows of each kind, and is written once it can be. "
            "Free or repair the disk, or move the file away",
            self.path,
            fault,
            self._limits.unwritten,
        )
        old, self._db = self._db, None
        self._go_on_in_memory(old)
        if old is not None:
            old.close()
        self._remember(batch)
        self._tried_at = time.monotonic()

    def _go_on_in_memory(self, old: sqlite3.Connection | None = None) -> None:
        """With the latest rows of the file, as far as it can be read."""
        self._memory_run = self._run
        memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        schema.migrate(memory)
        if old is not None:
            try:
                for table in schema.INSERTS:
                    rows = old.execute(f"SELECT * FROM {table} ORDER BY id DESC LIMIT ?", (self._limits.unwritten,)).fetchall()
                    if rows:
                        memory.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
            except sqlite3.Error:
                pass  # then without them
        self._memory = memory

    def _remember(self, batch: Batch) -> None:
        memory = self._memory
        assert memory is not None
        if self.path is not None:
            for table, rows in batch.items():
                kept = self._unwritten.setdefault(table, deque(maxlen=self._limits.unwritten))
                self._lost += max(0, len(kept) + len(rows) - self._limits.unwritten)
                kept.extend(rows)
        with self._lock:
            self._memory_run = self._insert(memory, batch, self._memory_run)
            for table in batch:
                memory.execute(
                    f"DELETE FROM {table} WHERE id IN (SELECT id FROM {table} ORDER BY id DESC LIMIT -1 OFFSET ?)",
                    (self._limits.unwritten,),
                )

    def _recover(self) -> None:
        """Try the disk again, with all that was kept for it."""
        assert self.path is not None
        self._tried_at = time.monotonic()
        try:
            self._connect(self.path)
            assert self._db is not None
            self._run = self._insert(self._db, self._unwritten, self._run)
        except (sqlite3.Error, OSError):
            if self._db is not None:
                self._db.close()
                self._db = None
            return
        gone = f", {self._lost} rows were lost" if self._lost else ""
        self._unwritten, self._lost = {}, 0
        log.warning("%s can be written again%s", self.path, gone)  # whoever sees that it is durable finds that told
        memory, self._memory = self._memory, None
        if memory is not None:
            with self._lock:
                memory.close()

    # ------------------------------------------------------------------ reading

    def reader(self) -> tuple[sqlite3.Connection, threading.Lock | None]:
        """A connection to read from; with a lock, it is shared and stays open, else it is the caller's to close."""
        self._opened.wait(CLOSE_S)
        memory = self._memory
        if memory is not None:
            return memory, self._lock
        if self._db is None or self.path is None:
            raise sqlite3.OperationalError("it is not open")
        db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA query_only=1")
        return db, None

    # ------------------------------------------------------------------ pruning

    def prune(self, now: float) -> None:
        """Delete what is too old, too much or too large, in small steps."""
        db = self._db
        if db is None:
            return
        try:
            for table in schema.PRUNED:
                while self._delete(db, table, "at < ?", now - self._limits.days * 86400) == PRUNE_STEP:
                    time.sleep(BREATH_S)
                (count,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
                self._delete_oldest(db, table, count - self._limits.rows)
            db.execute("DELETE FROM boots WHERE at < ? AND id < (SELECT max(id) FROM boots)", (now - self._limits.days * 86400,))
            while self._bytes(db) > self._limits.mib << 20:
                counts = {table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in schema.PRUNED}
                if not any(counts.values()):
                    break
                for table, count in counts.items():
                    self._delete_oldest(db, table, ceil(count * PRUNE_SHARE))
            db.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")  # `execute` would give back one page
        except sqlite3.Error as fault:
            log.info("%s could not be pruned: %s", self.path, fault)  # tried again in a while; a fault that lasts shows at the next row

    def _delete_oldest(self, db: sqlite3.Connection, table: str, count: int) -> None:
        while count > 0:
            deleted = self._delete(db, table, "1", limit=min(count, PRUNE_STEP))
            if not deleted:
                return
            count -= deleted
            time.sleep(BREATH_S)

    @staticmethod
    def _delete(db: sqlite3.Connection, table: str, where: str, *values: float, limit: int = PRUNE_STEP) -> int:
        by = "until" if table == "journal" else "at"
        return db.execute(
            f"DELETE FROM {table} WHERE id IN (SELECT id FROM {table} WHERE {where} ORDER BY {by} LIMIT ?)", (*values, limit)
        ).rowcount

    @staticmethod
    def _bytes(db: sqlite3.Connection) -> int:
        """Of the pages in use."""
        one = {name: int(db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count", "page_size")}
        return (one["page_count"] - one["freelist_count"]) * one["page_size"]
