"""The ledger's file: its tables, and rows to and from them."""

from __future__ import annotations

import json
import sqlite3
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, groupby
from typing import Any, Final, TypeAlias

import msgspec

from greenroom.core.facts import Action, Admit, Event, Outcome, Priority, RequestArrived, RequestFinished

from . import codec
from .rows import BootRow, EventRow, RequestRow, SampleRow, TellRow, TransitionRow

FILE: Final = "journal.sqlite"  # in the state directory
RUN_SHIFT: Final = 32  # a request's id: its run (the boot of its server's start), then its number
PEAK_S: Final = 300
SLOT: Final = f"CAST({{}} / {PEAK_S} AS INTEGER)"  # of a time
WAITED_S: Final = 0.001  # requests that waited less are not in the index of those that waited

# Each statement list leads from the schema of its place to the next one; a new file takes all of them.
STEPS: Final = (
    (
        "CREATE TABLE boots (id INTEGER PRIMARY KEY, run INTEGER NOT NULL, at REAL NOT NULL, clock REAL NOT NULL, version TEXT NOT NULL, "
        "setup BLOB NOT NULL)",
        "CREATE TABLE requests (id INTEGER PRIMARY KEY, at REAL NOT NULL, model TEXT NOT NULL, generation INTEGER NOT NULL, "
        "client TEXT NOT NULL, priority TEXT NOT NULL, path TEXT NOT NULL, queue_s REAL NOT NULL, gate_s REAL NOT NULL, "
        "load_s REAL NOT NULL, wake_s REAL NOT NULL, waited_s REAL NOT NULL, first_byte_s REAL, duration_s REAL NOT NULL, "
        "tokens_in INTEGER, tokens_out INTEGER, start TEXT NOT NULL, outcome TEXT NOT NULL, status INTEGER NOT NULL, "
        "code TEXT NOT NULL, before TEXT NOT NULL)",
        "CREATE INDEX requests_at ON requests (at)",
        "CREATE INDEX requests_model ON requests (model, outcome, at, duration_s)",
        f"CREATE INDEX requests_waited ON requests (at, model, waited_s, before, outcome) WHERE waited_s >= {WAITED_S}",
        "CREATE INDEX requests_odd ON requests (outcome, at) WHERE outcome <> 'ok'",
        "CREATE TABLE transitions (id INTEGER PRIMARY KEY, at REAL NOT NULL, model TEXT NOT NULL, generation INTEGER NOT NULL, "
        "kind TEXT NOT NULL, devices TEXT NOT NULL, took_s REAL NOT NULL, ok INTEGER NOT NULL, level INTEGER NOT NULL, "
        "reason TEXT NOT NULL, cause TEXT NOT NULL, why TEXT NOT NULL, mib TEXT NOT NULL, waiters INTEGER NOT NULL, "
        "evicted_for TEXT NOT NULL, phases TEXT NOT NULL)",
        "CREATE INDEX transitions_at ON transitions (at)",
        "CREATE INDEX transitions_model ON transitions (model, at)",
        "CREATE TABLE tells (id INTEGER PRIMARY KEY, at REAL NOT NULL, model TEXT NOT NULL, kind TEXT NOT NULL, level TEXT NOT NULL, "
        "text TEXT NOT NULL)",
        "CREATE INDEX tells_at ON tells (at)",
        "CREATE INDEX tells_model ON tells (model, at)",
        "CREATE TABLE samples (id INTEGER PRIMARY KEY, at REAL NOT NULL, device TEXT NOT NULL, reserved_mib INTEGER NOT NULL, "
        "used_mib INTEGER, outside_mib INTEGER NOT NULL, own_mib TEXT NOT NULL)",
        "CREATE INDEX samples_at ON samples (at)",
        "CREATE INDEX samples_device ON samples (device, at, used_mib)",
        # Events lie in packed pieces: alone they would take ten times the room.
        "CREATE TABLE journal (id INTEGER PRIMARY KEY, run INTEGER NOT NULL, at REAL NOT NULL, until REAL NOT NULL, "
        "offset_s REAL NOT NULL, count INTEGER NOT NULL, lines BLOB NOT NULL)",
        "CREATE INDEX journal_until ON journal (until)",
    ),
    (),  # the journal may hold lines of many hot events, which an older greenroom could not read
    (
        # See packs.py; `at` and `since` are the latest and the earliest arrival in it, `low` and `high` its numbers.
        "CREATE TABLE packs (id INTEGER PRIMARY KEY, run INTEGER NOT NULL, model TEXT NOT NULL, at REAL NOT NULL, since REAL NOT NULL, "
        "count INTEGER NOT NULL, low INTEGER NOT NULL, high INTEGER NOT NULL, columns BLOB NOT NULL)",
        "CREATE INDEX packs_at ON packs (at, since)",
        "CREATE INDEX packs_model ON packs (model, at, since, count)",
        "CREATE INDEX packs_number ON packs (run, high, low)",
    ),
    (
        # Of each device and PEAK_S the sample with the most use: what a chart of weeks is made of.
        "CREATE TABLE peaks (device TEXT NOT NULL, slot INTEGER NOT NULL, sample INTEGER NOT NULL, used_mib INTEGER, "
        "PRIMARY KEY (device, slot)) WITHOUT ROWID",
        f"INSERT INTO peaks SELECT device, {SLOT.format('at')}, id, max(used_mib) FROM samples GROUP BY 1, 2",
        f"CREATE TRIGGER samples_in AFTER INSERT ON samples BEGIN INSERT INTO peaks VALUES (new.device, {SLOT.format('new.at')}, new.id, "
        "new.used_mib) ON CONFLICT (device, slot) DO UPDATE SET sample = excluded.sample, used_mib = excluded.used_mib "
        "WHERE excluded.used_mib > coalesce(peaks.used_mib, -1); END",
        "CREATE TRIGGER samples_out AFTER DELETE ON samples BEGIN DELETE FROM peaks WHERE device = old.device "
        f"AND slot = {SLOT.format('old.at')} AND sample = old.id; END",
    ),
    # `marks`: the journal of its run has a line wherever a scheduler began; in that of an older greenroom there is none.
    ("ALTER TABLE boots ADD COLUMN marks INTEGER NOT NULL DEFAULT 0",),
)
VERSION: Final = len(STEPS)
PRUNED: Final = ("journal", "samples", "tells", "transitions", "packs", "requests")  # boots are few, and go by themselves

REQUEST_COLUMNS: Final = (
    "at, model, generation, client, priority, path, queue_s, gate_s, load_s, wake_s, first_byte_s, duration_s, tokens_in, tokens_out, "
    "start, outcome, status, code, before"
)
TRANSITION_COLUMNS: Final = "at, model, generation, kind, devices, took_s, ok, level, reason, cause, why, mib, waiters, evicted_for, phases"
TELL_COLUMNS: Final = "at, model, kind, level, text"
SAMPLE_COLUMNS: Final = "at, device, reserved_mib, used_mib, outside_mib, own_mib"

INSERTS: Final[Mapping[str, tuple[str, int]]] = {  # table -> how a row goes in, and of how many values
    "boots": ("INSERT INTO boots VALUES ", 7),
    "requests": (f"INSERT OR REPLACE INTO requests (id, {REQUEST_COLUMNS}, waited_s) VALUES ", 21),
    "transitions": (f"INSERT INTO transitions ({TRANSITION_COLUMNS}) VALUES ", 15),
    "tells": (f"INSERT INTO tells ({TELL_COLUMNS}) VALUES ", 5),
    "samples": (f"INSERT INTO samples ({SAMPLE_COLUMNS}) VALUES ", 6),
    "journal": ("INSERT INTO journal (run, at, until, offset_s, count, lines) VALUES ", 6),
    "packs": ("INSERT INTO packs (run, model, at, since, count, low, high, columns) VALUES ", 8),
}
ROWS_AT_ONCE: Final = 64  # in one statement
REQUEST_VALUES: Final = 20  # of `request_values`


def insert(db: sqlite3.Connection, table: str, rows: Sequence[Sequence[Any]]) -> None:
    """Many rows by one statement: between two statements the interpreter is fought for, and the event loop has to wait."""
    head, width = INSERTS[table]
    marks = f"({', '.join('?' * width)})"
    many = max(1, min(ROWS_AT_ONCE, db.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER) // width))
    for first in range(0, len(rows), many):
        some = rows[first : first + many]
        db.execute(head + ", ".join([marks] * len(some)), list(chain.from_iterable(some)))


def insert_requests(db: sqlite3.Connection, rows: Sequence[Sequence[Any]], run: int) -> None:
    """Values as of `request_values`; what follows from them the database works out: a copy of each row costs more than that."""
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[first : first + ROWS_AT_ONCE]
        db.execute(_requests_in(len(some), run), list(chain.from_iterable(some)))


@lru_cache(2 * ROWS_AT_ONCE)
def _requests_in(count: int, run: int) -> str:
    width, marks = REQUEST_VALUES, []
    for first in range(0, count * width, width):
        waits = " + ".join(f"?{first + 1 + place}" for place in range(QUEUE_S, WAKE_S + 1))
        marks.append(f"({run << RUN_SHIFT} + ?, {', '.join('?' * (width - 1))}, {waits})")
    return INSERTS["requests"][0] + ", ".join(marks)


def migrate(db: sqlite3.Connection) -> None:
    """Bring the file to VERSION; raises sqlite3.DatabaseError, before anything is changed, for one of a newer greenroom."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise sqlite3.DatabaseError(f"it was written by a newer greenroom: schema {version}, this one reads {VERSION}")
    db.execute("BEGIN IMMEDIATE")
    (version,) = db.execute("PRAGMA user_version").fetchone()
    for step in STEPS[version:]:
        for statement in step:
            db.execute(statement)
    db.execute(f"PRAGMA user_version = {VERSION}")
    db.execute("COMMIT")


# ------------------------------------------------------------------ rows out of values, values out of rows


CLIENT, PATH, QUEUE_S, WAKE_S, FIRST_BYTE_S, TOKENS_IN, TOKENS_OUT, STATUS = 4, 6, 7, 10, 11, 13, 14, 17  # of a request's values
START, OUTCOME, CODE = 15, 16, 18


def request_values(row: RequestRow) -> list[Any]:
    """As a RequestRow is made from; its number first: which run it belongs to is known where it is written."""
    return [
        row.request, row.at, row.model, row.generation, row.client, row.priority, row.path, row.queue_s, row.gate_s, row.load_s, row.wake_s,
        row.first_byte_s, row.duration_s, row.tokens_in, row.tokens_out, row.start, row.outcome, row.status, row.code, row.before,
    ]  # fmt: skip


def request_from(found: Sequence[Any]) -> RequestRow:
    number, at, model, generation, client, priority, path, *rest = found
    return RequestRow(number & (1 << RUN_SHIFT) - 1, at, model, generation, client, priority, path, *rest)


def transition_values(row: TransitionRow) -> tuple[Any, ...]:
    return (
        row.at, row.model, row.generation, row.kind, _packed(row.devices), row.took_s, row.ok, row.level, row.reason, row.cause, row.why,
        _packed(row.mib), row.waiters, row.evicted_for, _packed(row.phases),
    )  # fmt: skip


def transition_from(found: Sequence[Any]) -> TransitionRow:
    _, at, model, generation, kind, devices, took_s, ok, level, reason, cause, why, mib, waiters, evicted_for, phases = found
    return TransitionRow(
        at, model, generation, kind, tuple(json.loads(devices)), took_s, bool(ok), level, reason, cause, why, json.loads(mib), waiters,
        evicted_for, json.loads(phases),
    )  # fmt: skip


def tell_values(row: TellRow) -> tuple[Any, ...]:
    return (row.at, row.model, row.kind, row.level, row.text)


def tell_from(found: Sequence[Any]) -> TellRow:
    return TellRow(*found[1:])


def sample_values(row: SampleRow) -> tuple[Any, ...]:
    return (row.at, row.device, row.reserved_mib, row.used_mib, row.outside_mib, _packed(row.own_mib))


def sample_from(found: Sequence[Any]) -> SampleRow:
    _, at, device, reserved_mib, used_mib, outside_mib, own_mib = found
    return SampleRow(at, device, reserved_mib, used_mib, outside_mib, json.loads(own_mib))


def boot_from(found: Sequence[Any]) -> BootRow:
    """All columns, as far as the file has them: one that no server has opened since is as an older greenroom left it."""
    boot, _, at, clock, version, setup, *marks = found
    return BootRow(boot, at, clock, version, json.loads(zlib.decompress(setup)), any(marks))


def packed_setup(setup: Mapping[str, Any]) -> bytes:
    return zlib.compress(msgspec.json.encode(setup))


def _packed(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False) if value else ("[]" if isinstance(value, tuple) else "{}")


# ------------------------------------------------------------------ the journal's lines

HOT: Final = "Hot"
BEGAN: Final = "Began"
ZLIB_HEAD: Final = b"\x78"  # msgpack's lists begin otherwise
HOT_CODES: Final = "dII"  # of `at`, request, number of its kind
HotColumns: TypeAlias = tuple[list[Any], bytes, bytes, bytes]
_encode: Final = msgspec.json.Encoder().encode


def line_of(event: Event, actions: Iterable[Action]) -> bytes:
    """One event with its actions; what msgspec writes by itself, so that it costs next to nothing."""
    return _encode((type(event).__name__, event, [(type(action).__name__, action) for action in actions]))


def lost_line(at: float, count: int) -> bytes:
    """Stands where events could not be kept."""
    return _encode(("Lost", {"at": at, "count": count}, []))


def began_line(at: float, setup: Mapping[str, Any]) -> bytes:
    """Stands before the first event of a scheduler that knows nothing yet: of a server start, or of a book built anew."""
    return _encode((BEGAN, {"at": at, "setup": setup}, []))


def hot_columns(kinds: Sequence[Sequence[Any] | str], events: Sequence[Any]) -> HotColumns:
    """Many events of hot requests, given as `at, request, number of its kind` each, one after the other.

    A kind is (model, client, priority, generation) of an arrival that was admitted at once, or the outcome of an end that
    led to nothing.  Raises UnicodeError for a text that is none.
    """
    for text in {text for kind in kinds for text in (kind if not isinstance(kind, str) else (kind,)) if isinstance(text, str)}:
        text.encode()
    ats, requests, numbers = (array(code, events[place::3]).tobytes() for place, code in enumerate(HOT_CODES))
    return list(kinds), ats, requests, numbers


def hot_events(kinds: Sequence[Sequence[Any] | str], events: Sequence[Any]) -> Iterator[tuple[Event, tuple[Action, ...]]]:
    """What such a line stands for."""
    told = iter(events)
    for at, request, number in zip(told, told, told, strict=True):
        kind = kinds[number]
        if isinstance(kind, str):
            yield RequestFinished(at, request, Outcome(kind)), ()
        else:
            model, client, priority, generation = kind
            arrived = RequestArrived(at, request, model, Priority(priority) if priority is not None else None, None, client)
            yield arrived, (Admit(request, model, generation, "hot"),)


def events_from_line(line: bytes, offset_s: float) -> Iterator[EventRow]:
    kind, event, actions = msgspec.json.decode(line)
    if kind != HOT:
        yield _event_from(kind, event, actions, offset_s)
    else:
        yield from _plain_events(hot_events(event, actions), offset_s)


def _plain_events(events: Iterable[tuple[Event, tuple[Action, ...]]], offset_s: float) -> Iterator[EventRow]:
    for one, answers in events:
        plain = msgspec.to_builtins(one)
        yield _event_from(type(one).__name__, plain, [(type(answer).__name__, msgspec.to_builtins(answer)) for answer in answers], offset_s)


def _event_from(kind: str, event: dict[str, Any], actions: Iterable[tuple[str, dict[str, Any]]], offset_s: float) -> EventRow:
    clock = event.get("at", 0.0)
    told = tuple({codec.TYPE: name, **action} for name, action in actions)
    return EventRow(clock + offset_s, clock, kind, event.get("model", ""), {codec.TYPE: kind, **event}, told)


def packed(parts: Iterable[bytes | HotColumns]) -> bytes:
    """Lines and hot events in their order, as one piece of the journal.  What is in columns is dense as it is."""
    found: list[bytes | HotColumns] = []
    for are_lines, group in groupby(parts, lambda part: isinstance(part, bytes)):
        some: list[Any] = list(group)
        found += [zlib.compress(b"\n".join(some), 1)] if are_lines else some
    return msgspec.msgpack.encode(found)


def events_in(piece: bytes, offset_s: float) -> Iterator[EventRow]:
    """Those of a piece of the journal, also of one that an older greenroom wrote: lines only, and nothing around them."""
    for part in [piece] if piece.startswith(ZLIB_HEAD) else msgspec.msgpack.decode(piece):
        if isinstance(part, bytes):
            for line in zlib.decompress(part).split(b"\n"):
                yield from events_from_line(line, offset_s)
        else:
            kinds, *columns = part
            told = (array(code, column) for code, column in zip(HOT_CODES, columns, strict=True))
            yield from _plain_events(hot_events(kinds, list(chain.from_iterable(zip(*told, strict=True)))), offset_s)
