"""The ledger's writer: takes what happens on the event loop, writes it in a thread of its own.

    ledger = Ledger(path)
    ledger.boot(setup, version)
    shell.hooks.append(ledger.saw)          # each costs the loop a microsecond
    ledger.ended(record)                    # the data plane's word about a request that ended
    ledger.find.requests(model="a")         # any thread, see `reads`

Rows are made where things happen, on the loop, in about a microsecond for each word about a hot request; the thread only
writes, once a second.  Nothing of the disk is ever waited for by who calls.  What cannot be written stays in memory,
bounded, and is written once it can be; what cannot even be taken in is dropped and counted.

Whoever kills the process (SIGKILL, power) loses the requests of the last second or two, and of the journal, where little
happens, up to PIECE_S more.  A clean end loses nothing.
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

from . import codec, packs, schema
from .chronicle import Book, Chronicle, Hot, Row
from .footprints import is_damaged, move_aside
from .packs import Pack, Packed
from .reads import Reads
from .rows import RequestRow, SampleRow, TellRow, TransitionRow

log = logging.getLogger(__name__)

SLICE: Final = 256  # of what was taken in, between two breaths of the writer: the loop shall never wait long for the interpreter
BREATH_S: Final = 0.0002
GATHER_S: Final = 1.0  # so long things come together before they are written
JOIN_S: Final = 5.0  # the two words about a request's end come within this, or it is written with one
SEAL_VALUES: Final = 3 * 512  # of hot events, three each: so many are packed at once
ALL: Final = 1 << 60
DENSE: Final = 8  # hot events and requests that take the room of one other entry
KINDS_MAX: Final = 256  # of hot events, told apart at a time
PIECE_EVENTS: Final = 4096  # of the journal, packed together ...
PIECE_S: Final = 5.0  # ... or as many as came in this time ...
PIECE_LEAST: Final = 256  # ... or in less, where there are so many
BUSY_S: Final = 2.0  # another process writes: wait this long, then it counts as a fault
RETRY_S: Final = 15.0  # a disk that failed is tried again after this
PRUNE_EVERY_S: Final = 300.0
PRUNE_STEP: Final = 5000  # rows deleted at once
VACUUM_PAGES: Final = 10_000  # given back to the disk at once
PRUNE_SHARE: Final = 0.05  # of each table, the oldest first, while the file is too large
OFFSET_SLACK_S: Final = 0.1  # a wall clock that is off by less is not followed
CLOSE_S: Final = 3.0
WAL_MIB_MAX: Final = 16
MANY_IN_ONE: Final = {"packs": packs.LEAST, "journal": 4}  # in memory, rows of these count for so many
_OK: Final = Outcome.OK


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept."""

    days: float = 30.0
    rows: int = 2_000_000  # of each kind; of events, pieces; of requests in packs, packs
    size_bytes: int = 1 << 30
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

    def packed(self, pack: Pack) -> None:
        """Many requests that were admitted at once and ended well."""

    def moved(self, row: TransitionRow) -> None: ...


@dataclass(frozen=True, slots=True)
class _Hot:
    """Hot events, `at` and `until`; one of them has a text that is none: then as they are."""

    at: float
    until: float
    count: int
    columns: schema.HotColumns | None
    kinds: Sequence[Any] = ()
    events: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class _Seen:
    event: Event
    actions: Sequence[Action]
    rows: Sequence[Row | list[Any]]  # what it completed


@dataclass(frozen=True, slots=True)
class _Half:
    """One or both of the two words about a request's end."""

    row: list[Any] | None  # the core's
    record: Told | None
    at: float = 0.0  # when the record came, where it is alone


@dataclass(frozen=True, slots=True)
class _Boot:
    at: float
    setup: Setup
    version: str
    rows: Sequence[Row | list[Any]]  # what it put an end to
    begins: bool  # with a scheduler that knows nothing yet


@dataclass(frozen=True, slots=True)
class _Flush:
    done: threading.Event


class Ledger:
    """`path` None keeps everything in memory.  `saw`, `ended` and `boot` are called on one thread, the rest on any."""

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
        self._put_count = self._got_count = 0  # entries put into the queue, and taken out of it
        self._some, self._hurry = threading.Event(), threading.Event()
        self._woken = False  # as `_some`, for a tenth of the time that it takes to ask that
        self._closing = False
        self._room = self.limits.queued  # none while it is closing
        self._lock = threading.Lock()  # held for all but the words about hot requests
        self._chronicle = Chronicle(Setup((), ()), wall() - clock(), request_row=_values)
        # Of hot requests only bare values are kept, one after the other in lists that stay the same: the collector need not
        # look at them, what is gone from the cache soon is little, and they are packed by the hundred.  Lists grow by single
        # operations of the interpreter, which needs no lock; they are cut with it.
        self._hot: list[Any] = []  # at, request, number of its kind of each event
        self._kinds: dict[tuple[str, str, str | None, int] | str, int] = {_OK.value: 0}
        self._well: dict[str, list[Any]] = {}  # model -> packs.FIELDS of each that ended well
        self._last: tuple[int, Hot, float, str] | None = None  # ended for the core just now; its record comes next
        self._records: dict[int, tuple[Told, float]] = {}  # of the data plane, waiting for the core
        self._halves: dict[int, tuple[list[Any], float]] = {}  # of the core, waiting for the record
        self._disk = _Disk(Path(path) if path is not None else None, self.limits)
        self.find = Reads(self._disk.reader, self._disk.doubted.set)
        self._parts: list[bytes | schema.HotColumns] = []  # of the journal's next piece
        self._parts_from = self._parts_until = 0.0
        self._parts_count = 0  # events in them
        self._batch: defaultdict[str, list[Any]] = defaultdict(list)
        self._now = clock()  # when what waited was last looked at
        self._dropped_seen = 0
        self._failed = False
        self._began = False
        self._pruned_at = clock()
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ called on the loop

    def saw(self, event: Event, actions: Sequence[Action], book: Book | None = None) -> None:
        """A hook of the shell.  `book`: what is booked after it, where that is known."""
        kind = event.__class__
        if kind is RequestArrived:
            arrived: Any = event
            if len(actions) == 1 and arrived.deadline_s is None and book is None:
                admit = actions[0]
                at, request, model, client, priority = arrived.at, arrived.request, arrived.model, arrived.client, arrived.priority
                if admit.__class__ is Admit and admit.start == "hot" and admit.request == request and admit.model == model:
                    level = None if priority is None else priority.value
                    generation = admit.generation
                    hot, number = self._hot, self._kinds.get((model, client, level, generation))
                    if number is None:
                        number = self._new_kind((model, client, level, generation))
                    hot.extend((at, request, number))
                    if len(hot) >= SEAL_VALUES:
                        self._seal_full()
                    self._chronicle.hot_arrival(at, request, model, client, level, generation)
                    if not self._woken:
                        self._wake()
                    return
        elif kind is RequestFinished and not actions and book is None:
            finished: Any = event
            at, request, outcome = finished.at, finished.request, finished.outcome
            one = self._chronicle.hot.pop(request, None)
            if one is not None:
                told = "ok" if outcome is _OK else outcome.value
                number = 0 if outcome is _OK else self._new_kind(told)
                self._hot.extend((at, request, number))
                if self._last is not None:
                    self._settle_last()
                self._last = (request, one, at, told)
                if not self._woken:
                    self._wake()
                return
        self._saw(event, actions, book)

    def ended(self, record: Told) -> None:
        """The data plane's word about a request; one without a number was never asked for, and is not remembered."""
        request = record.request
        if not request:
            return
        last = self._last
        if last is not None and last[0] == request:
            self._last = None
            _, one, at, outcome = last
            began_at, track, _, client, generation, before, _ = one
            took_s = at - began_at
            if outcome == "ok" and record.status == packs.STATUS and took_s < packs.DURATION_S_MAX:
                model = track.model
                well = self._well.get(model)
                if well is None:
                    well = self._well[model] = []
                well.extend(
                    (
                        request, began_at + self._chronicle.offset_s, took_s, record.first_byte_s, record.tokens_in, record.tokens_out,
                        generation, client or record.client, one[2], record.path, before,
                    )
                )  # fmt: skip
                if len(well) >= packs.MOST * packs.WIDTH:
                    self._pack_full(model)
                if not self._woken:
                    self._wake()
                return
            self._put_in(_Half(self._chronicle.hot_row(*last), record))
        else:
            self._put_in(_Half(None, record, self._clock()))

    def boot(self, setup: Setup, version: str = "", *, why: str = "") -> None:
        """These settings hold from now on: at the start, before a reload, and (with `why`) when the book is built anew."""
        at = self._clock()
        self._settle_last()
        with self._lock:
            self._seal(self._free())
            rows = self._chronicle.restart(at, why) if why else []
            self._chronicle.take(setup)
            begins, self._began = bool(why) or not self._began, True
            self._put_count += 1
            self._queue.append(_Boot(at, setup, version, rows, begins))  # however long the queue is: nothing is read without it
        self._wake()

    def _saw(self, event: Event, actions: Sequence[Action], book: Book | None) -> None:
        if self._last is not None:
            self._settle_last()
        rows: Sequence[Row | list[Any]] = ()
        with self._lock:
            self._seal(self._free())
            try:
                rows = self._chronicle.feed(event, actions, book)
            except Exception as bug:  # of ours: it costs rows, never the server
                self._fault(bug)
        self._put_in(_Seen(event, actions, rows))

    def _put_in(self, item: object) -> None:
        with self._lock:
            if self._free() < 1:
                self.dropped += 1
                return
            self._put_count += 1
            self._queue.append(item)
        if not self._woken:
            self._wake()

    def _seal_full(self) -> None:
        with self._lock:
            self._seal(self._free())

    def _pack_full(self, model: str) -> None:
        with self._lock:
            self._pack(model, self._free())

    def _free(self) -> int:
        """Entries that may still be taken in before the writer has looked at some."""
        return max(0, self._room - (self._put_count - self._got_count))

    def _new_kind(self, kind: tuple[str, str, str | None, int] | str) -> int:
        """The number of a kind of event; the first one is that of good ends."""
        number = self._kinds.get(kind)
        if number is None:
            if len(self._kinds) >= KINDS_MAX:
                with self._lock:
                    self._seal(self._free())
                    self._kinds.clear()
                    self._kinds[_OK.value] = 0
            number = self._kinds[kind] = len(self._kinds)
        return number

    def _settle_last(self) -> None:
        """No record came for the request that ended last: it may still come."""
        last, self._last = self._last, None
        if last is not None:
            self._put_in(_Half(self._chronicle.hot_row(*last), None))

    def _wake(self) -> None:
        self._woken = True
        self._some.set()

    # ------------------------------------------------------------------ called on any thread

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until everything taken in is written (or kept in memory, where it cannot be); False: not in time.

        Never on the loop, nor while it takes anything in.
        """
        done = _Flush(threading.Event())
        self._settle_last()
        with self._lock:
            self._put_count += 1
            self._queue.append(done)
        self._hurry.set()
        self._some.set()
        return done.done.wait(timeout_s)

    def keep(self, limits: Limits) -> None:
        """From the next pruning on, so much."""
        self._disk.keep(limits)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what is left, for a bounded time.  Nothing is taken in any more."""
        self._settle_last()
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

    @property
    def run(self) -> int:
        """This server's run, which is part of its requests' ids in what is read; 0 = nothing of it is written yet.

        Not for keeping: what was in memory may get another number once the disk can be written.
        """
        return self._disk.run

    # ------------------------------------------------------------------ on either side

    def _seal(self, most: int) -> None:
        """Hot events so far get their place in the queue, `most` of them; the lock is held.

        What is made of them here is small.  Made later, by the writer, it would cost more: by then they have left the
        processor's cache.
        """
        events = self._hot[:]
        if not events:
            return
        del self._hot[: len(events)]
        count = min(len(events) // 3, most * DENSE)
        self.dropped += len(events) // 3 - count
        if not count:
            return
        del events[3 * count :]
        kinds = tuple(self._kinds)
        try:
            item = _Hot(events[0], events[-3], count, schema.hot_columns(kinds, events))
        except (TypeError, ValueError, OverflowError):
            item = _Hot(events[0], events[-3], count, None, kinds, events)
        self._put_count += ceil(count / DENSE)
        self._queue.append(item)

    def _pack(self, model: str, most: int) -> None:
        """As `_seal`, for the requests of this model that ended well: as a pack where they are many."""
        flat = self._well[model][:]
        if not flat:
            return
        del self._well[model][: len(flat)]
        count = min(len(flat) // packs.WIDTH, most * DENSE)
        self.dropped += len(flat) // packs.WIDTH - count
        if not count:
            return
        self._put_count += ceil(count / DENSE)
        pack = Pack.of(model, flat[: count * packs.WIDTH])
        try:
            self._queue.append(pack.packed() if count >= packs.LEAST else pack)
        except UnicodeError:  # one of them has a text that is no text
            self._queue.append(pack)

    def _fault(self, bug: Exception) -> None:
        if not self._failed:
            log.error("the ledger met an inner fault; some rows are lost", exc_info=bug)
        self._failed = True

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
        if self._halves or self._records or self._parts:
            return self._gather_s
        return PRUNE_EVERY_S if self._disk.is_durable else self._retry_s

    def _round(self, *, last: bool = False) -> None:
        waiting: list[_Flush] = []
        try:
            with self._lock:
                self._seal(ALL)
            for model in list(self._well):
                with self._lock:
                    self._pack(model, ALL)
            self._drain(waiting)
            now = self._clock()
            self._join_late(now, last=last)
            if self._parts and (last or waiting or self._is_piece_due(now)):
                self._piece()
            self._write()
            if now - self._pruned_at >= PRUNE_EVERY_S:
                self._pruned_at = now
                self._disk.prune(self._wall())
        except Exception as bug:  # of ours: it costs rows, never the server
            self._batch.clear()
            self._fault(bug)
        for one in waiting:
            one.done.set()

    def _is_piece_due(self, now: float) -> bool:
        return self._parts_count >= PIECE_LEAST or self._parts_until - self._parts_from >= PIECE_S or now - self._parts_until >= PIECE_S

    def _drain(self, waiting: list[_Flush]) -> None:
        queue = self._queue
        self._now = self._clock()
        offset_s = self._wall() - self._now
        is_off = abs(offset_s - self._chronicle.offset_s) > OFFSET_SLACK_S
        for taken in range(len(queue)):
            item = queue.popleft()
            self._got_count += _weight(item)
            if isinstance(item, _Hot):
                self._hot_part(item)
            elif isinstance(item, Packed):
                self._batch["packs"].append(item)
            elif isinstance(item, Pack):
                self._batch["requests"] += item.values()
            elif isinstance(item, _Seen):
                self._part(_line_or_hole(item.event, item.actions), item.event.at)
                for row in item.rows:
                    self._put(row)
            elif isinstance(item, _Half):
                self._half(item)
            elif isinstance(item, _Boot):
                self._booted(item)
            elif isinstance(item, _Flush):
                waiting.append(item)
            if taken % SLICE == SLICE - 1:
                self._breathe()
        if self.dropped != self._dropped_seen:
            self._lost(self._clock(), self.dropped - self._dropped_seen)
        if is_off:
            self._piece()
            self._chronicle.offset_s = offset_s

    def _breathe(self) -> None:
        if not self._closing:
            time.sleep(BREATH_S)

    def _part(self, part: bytes | schema.HotColumns, at: float, until: float | None = None, count: int = 1) -> None:
        """The next of the journal's piece."""
        if not self._parts:
            self._parts_from = at
        self._parts_until = at if until is None else until
        self._parts.append(part)
        self._parts_count += count
        if self._parts_count >= PIECE_EVENTS:
            self._piece()

    def _hot_part(self, item: _Hot) -> None:
        if item.columns is not None:
            self._part(item.columns, item.at, item.until, item.count)
            return
        for event, actions in schema.hot_events(item.kinds, item.events):
            self._part(_line_or_hole(event, actions), event.at)

    def _piece(self) -> None:
        """Pack the journal's parts."""
        if self._parts:
            offset_s = self._chronicle.offset_s
            piece = (self._parts_from + offset_s, self._parts_until + offset_s, offset_s, self._parts_count, schema.packed(self._parts))
            self._batch["journal"].append(piece)
            self._parts, self._parts_count = [], 0

    def _lost(self, at: float, count: int) -> None:
        """Words were dropped: the journal has a hole."""
        if not self._dropped_seen:
            log.warning("the ledger was too slow for what happened, %d entries are not in it; requests are not affected (told once)", count)
        self._dropped_seen += count
        self._part(schema.lost_line(at, count), at)

    def _booted(self, boot: _Boot) -> None:
        for row in boot.rows:
            self._put(row)
        setup = codec.plain_setup(boot.setup)
        self._piece()
        self._batch["boots"].append((boot.at + self._chronicle.offset_s, boot.at, boot.version, schema.packed_setup(setup)))
        if boot.begins:
            self._part(schema.began_line(boot.at, setup), boot.at)

    # ------------------------------------------------------------------ the two halves of a request

    def _put(self, row: Row | list[Any]) -> None:
        if isinstance(row, list):
            self._half(_Half(row, None))
        elif isinstance(row, TransitionRow):
            self._batch["transitions"].append(schema.transition_values(row))
            for listener in self.listeners:
                listener.moved(row)
        elif isinstance(row, TellRow):
            self._batch["tells"].append(schema.tell_values(row))
        elif isinstance(row, SampleRow):
            self._batch["samples"].append(schema.sample_values(row))

    def _half(self, half: _Half) -> None:
        """Words about a request that ended: the core's, the data plane's, or both."""
        row, record = half.row, half.record
        if row is None:
            assert record is not None
            if (known := self._halves.pop(record.request, None)) is not None:
                row = known[0]
            elif len(self._records) < self.limits.unjoined:
                self._records[record.request] = (record, half.at)
                return
            else:
                self._alone(record, half.at)
                return
        elif record is None and self._records and (told := self._records.pop(row[0], None)) is not None:
            record = told[0]
        if record is not None:
            join(row, record)
        elif len(self._halves) < self.limits.unjoined:
            self._halves[row[0]] = (row, self._now)
            return
        self._batch["requests"].append(row)

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
        with self._lock:
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
        for packed in batch.get("packs", ()) if self.listeners else ():
            pack = packed.pack()
            for listener in self.listeners:
                listener.packed(pack)
        self._disk.write(batch, self._retry_s)


def _weight(item: object) -> int:
    """Entries of the queue that this one counts for."""
    if isinstance(item, _Hot | Packed):
        return ceil(item.count / DENSE)
    return ceil(len(item) / DENSE) if isinstance(item, Pack) else 1


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


Batch = Mapping[str, Sequence[Any]]  # table -> rows; of packs, Packed


def _unpacked(batch: Batch) -> Batch:
    """The same with rows in place of packs."""
    if "packs" not in batch:
        return batch
    requests = [*batch.get("requests", ()), *(values for packed in batch["packs"] for values in packed.pack().values())]
    return {**{table: rows for table, rows in batch.items() if table != "packs"}, "requests": requests}


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

    def keep(self, limits: Limits) -> None:
        self._limits = limits

    @property
    def is_durable(self) -> bool:
        return self._memory is None

    @property
    def run(self) -> int:
        return self._run if self._memory is None else self._memory_run

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
                schema.insert(db, "boots", [(self._run, self._run, *self._boot, True)])
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
                schema.insert(db, "boots", [(boot, run, *values, True)])
            for table, rows in batch.items():
                if table == "requests":
                    schema.insert_requests(db, list(rows), run)
                elif table == "journal":
                    schema.insert(db, table, [(run, *row) for row in rows])
                elif table == "packs":
                    schema.insert(db, table, [(run, *packed.values()) for packed in rows])
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
                    rows = old.execute(f"SELECT * FROM {table} ORDER BY id DESC LIMIT ?", (self._kept(table),)).fetchall()
                    if rows:
                        memory.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
            except sqlite3.Error:
                pass  # then without them
        self._memory = memory

    def _remember(self, batch: Batch) -> None:
        memory = self._memory
        assert memory is not None
        batch = _unpacked(batch)
        if self.path is not None:
            for table, rows in batch.items():
                most = self._kept(table)
                kept = self._unwritten.setdefault(table, deque(maxlen=most))
                self._lost += max(0, len(kept) + len(rows) - most)
                kept.extend(rows)
        with self._lock:
            self._memory_run = self._insert(memory, batch, self._memory_run)
            for table in batch:
                memory.execute(
                    f"DELETE FROM {table} WHERE id IN (SELECT id FROM {table} ORDER BY id DESC LIMIT -1 OFFSET ?)",
                    (self._kept(table),),
                )

    def _kept(self, table: str) -> int:
        """Rows of this table in memory; some are large."""
        return max(1, self._limits.unwritten // MANY_IN_ONE.get(table, 1))

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
            while self._bytes(db) > self._limits.size_bytes:
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
