"""What can be asked of the ledger, from any thread; never on the event loop.

Lists come newest first, in pages: `next` of one page is the `cursor` of the following.  Times are unix seconds.
Every answer takes well below a second with a million requests; bench/ledger.py says how long.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import starmap
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

from . import packs, schema
from .footprints import is_damaged
from .rows import STARTED, BootRow, EventRow, RequestRow, SampleRow, TellRow, TransitionRow

T = TypeVar("T")
OUTCOMES: Final = ("ok", "client_gone", "engine_broke", "cut", "refused")
EVER: Final = 1e18  # as a time
GAP_REQUESTS_MAX: Final = 50_000  # the newest of a model, looked at for its gaps
PIECES_AT_ONCE: Final = 16
WAITS_MAX: Final = 50_000  # the newest, looked at for percentiles and pairs
PEAKS_A_SPAN: Final = 2  # at least; else samples are looked at one by one
SLACK_S: Final = 5.0  # by which clocks may have been moved while one pack was filled
LONGEST_S: Final = packs.DURATION_S_MAX + SLACK_S  # between the arrivals in one pack, at most
NEXT_MODEL: Final = "SELECT model FROM {} WHERE model > ? ORDER BY model LIMIT 1"
WHOLE_PACKS: Final = (
    "SELECT coalesce(sum(count), 0) FROM packs INDEXED BY packs_model WHERE model = ? AND at >= ? AND at < ? AND since >= ?"
)
PARTS_OF_PACKS: Final = (
    "SELECT columns FROM packs INDEXED BY packs_model WHERE model = ? AND at >= ? AND at < ? AND since < ? AND NOT (since >= ? AND at < ?)"
)
NEWEST_PACKS: Final = (
    "SELECT columns FROM packs INDEXED BY packs_model WHERE model = ? AND at >= ? AND at < ? AND since < ? ORDER BY at DESC"
)
NEWEST_BUT: Final = "SELECT at FROM requests INDEXED BY requests_at WHERE at >= ? AND at < ? ORDER BY at DESC LIMIT 1 OFFSET ?"
IDS_OF: Final = "SELECT min(id), max(id) FROM requests INDEXED BY requests_at WHERE at >= ? AND at < ?"
STORY: Final = f"SELECT id, {schema.TELL_COLUMNS} FROM tells WHERE model = ? AND at < ? ORDER BY at DESC, id DESC LIMIT ?"
SERVED: Final = (
    f"SELECT id & {(1 << schema.RUN_SHIFT) - 1}, at, model, generation, client, priority, '', queue_s, gate_s, load_s, wake_s, "
    "first_byte_s, duration_s, NULL, NULL, start, outcome, 0, '', before "
    "FROM requests NOT INDEXED WHERE id BETWEEN ? AND ? AND at >= ? AND at < ?"
)
PACKS_OF_ALL: Final = "SELECT model, at, columns FROM packs INDEXED BY packs_at WHERE at >= ? AND at < ? AND since < ? ORDER BY at DESC"
OF_NUMBER: Final = "SELECT model, columns FROM packs INDEXED BY packs_number WHERE run = ? AND high >= ? AND low <= ? ORDER BY high"
COUNT: Final = "SELECT count(*) FROM requests INDEXED BY requests_model WHERE model = ? AND outcome = ? AND at >= ? AND at < ?"
DAMAGED: Final = (ValueError, zlib.error)  # raised for a value whose bytes are not as they were written
PERCENTILES: Final = (50.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """`ids` are those of the rows, in their order; `next` "" = these are the last."""

    rows: tuple[T, ...]
    ids: tuple[int, ...] = ()
    next: str = ""


@dataclass(frozen=True, slots=True)
class Waits:
    """How long the admitted and refused requests of one model waited."""

    requests: int
    waited: int  # of these, longer than a millisecond
    total_s: float
    longest_s: float
    percentiles: Mapping[float, float]  # over all requests


@dataclass(frozen=True, slots=True)
class Pair:
    """A model that was served just before another on its device, and how often that one then had to wait long."""

    before: str
    model: str
    slow: int
    total_s: float
    longest_s: float


class Unreadable(Exception):
    """The ledger cannot be read now; one sentence."""


class Reads:
    """Made by the Ledger; `reader` gives a connection, and a lock where it is shared; `doubt` is told of a damaged file.

    Every method may raise Unreadable.
    """

    def __init__(self, reader: Callable[[], tuple[sqlite3.Connection, threading.Lock | None]], doubt: Callable[[], None]) -> None:
        self._reader, self._doubt = reader, doubt

    # ------------------------------------------------------------------ rows

    def requests(
        self,
        since: float | None = None,
        until: float | None = None,
        *,
        model: str | None = None,
        outcome: str | None = None,
        waited_over_s: float | None = None,
        cursor: str = "",
        limit: int = 100,
    ) -> Page[RequestRow]:
        where: list[tuple[str, Any]] = []
        if waited_over_s is not None:
            where.append(("waited_s > ?", waited_over_s))
        if outcome is not None:
            where.append(("outcome = ?", outcome))
        if model is not None:
            where.append(("model = ?", model))
        if waited_over_s is not None:
            index = "INDEXED BY requests_waited"
            where.append((f"waited_s >= {schema.WAITED_S}", None))
        elif model is not None:
            index = "INDEXED BY requests_model"
        elif outcome is not None and outcome != "ok":
            index = "INDEXED BY requests_odd"
            where.append(("outcome <> 'ok'", None))
        else:
            index = "INDEXED BY requests_at"
        span = [*self._window(since, until), *self._after(cursor)]
        if index.endswith("requests_model") and outcome is None:  # each outcome by itself lies in order there
            parts = [[*where, ("outcome = ?", each), *span] for each in OUTCOMES]
        else:
            parts = [[*where, *span]]
        columns = f"id, {schema.REQUEST_COLUMNS}"
        if len(parts) == 1:
            found = self._list("requests", columns, f"{index} ", parts[0], limit + 1)
        else:  # of each the places in the index, and of these the newest
            places = [place for part in parts for place in self._list("requests", "at, id", f"{index} ", part, limit + 1)]
            places.sort(reverse=True)
            found = self._of("requests", columns, [id for _, id in places[: limit + 1]])
        if waited_over_s is None and outcome in (None, "ok"):
            found += self._packed(since, until, model, cursor, limit + 1)
        found.sort(key=lambda row: (row[1], row[0]), reverse=True)
        return _page(found, schema.request_from, limit)

    def served(self, since: float, until: float, *, limit: int) -> tuple[tuple[RequestRow, ...], bool]:
        """Those of a stretch of time, oldest first, and whether only the newest `limit` of them are told.

        For who reads many: `path`, `tokens_in`, `tokens_out`, `status` and `code` are left out.
        """
        with self._db() as db:
            full = db.execute(NEWEST_BUT, (since, until, limit)).fetchone()
            found, low = self._unpacked(db, full[0] if full is not None else since, until, limit)
            ids = db.execute(IDS_OF, (low, until)).fetchone()
            # By their numbers they lie side by side in the file; by their times each would have to be looked up.
            found += starmap(RequestRow, db.execute(SERVED, (*ids, low, until)))
        found.sort(key=attrgetter("at", "request"))
        return tuple(found[-limit:]), low > since or len(found) > limit

    @staticmethod
    def _unpacked(db: sqlite3.Connection, since: float, until: float, limit: int) -> tuple[list[RequestRow], float]:
        """Those in packs since a time which is also told: `since`, or a later one if there are more than `limit`."""
        found: list[RequestRow] = []
        looks_at = limit
        for model, latest, columns in db.execute(PACKS_OF_ALL, (since, until + LONGEST_S, until)):
            if len(found) >= looks_at:  # this pack and those that follow hold nothing newer than `latest`
                if sum(latest < row.at < until for row in found) >= limit:
                    since = latest
                    break
                looks_at += max(packs.MOST, limit // 8)
            pack = packs.unpacked(model, columns)
            for request, at, duration_s, first_byte_s, _, _, generation, client, priority, _, before in zip(*pack.columns, strict=True):
                found.append(
                    RequestRow(
                        request, at, model, generation, client, priority, "", 0.0, 0.0, 0.0, 0.0, first_byte_s, duration_s,
                        None, None, "hot", "ok", 0, "", before,
                    )
                )  # fmt: skip
        return [row for row in found if since <= row.at < until], since

    def _packed(self, since: float | None, until: float | None, model: str | None, cursor: str, limit: int) -> list[list[Any]]:
        """The newest of those in packs, in no order: all that are newer than any that is left out."""
        low = since if since is not None else -EVER
        high = until if until is not None else EVER
        at, number = _place(cursor) if cursor else (high, -1)
        at, number = min((at, number), (high, -1))  # only what lies before is wanted
        with self._db() as db:
            newest_first = db.execute(
                f"SELECT run, model, at, columns FROM packs INDEXED BY {'packs_at' if model is None else 'packs_model'} "
                f"WHERE at >= ? AND at < ? AND since <= ? {'' if model is None else 'AND model = ? '}ORDER BY at DESC",
                (low, at + LONGEST_S, at, *(() if model is None else (model,))),
            )
            found: list[list[Any]] = []
            for run, name, latest, columns in newest_first:
                if len(found) >= limit and latest < found[limit - 1][1]:
                    break
                first = run << schema.RUN_SHIFT
                for values in packs.unpacked(name, columns).values():
                    values[0] += first
                    if values[1] >= low and (values[1], values[0]) < (at, number):
                        found.append(values)
                found.sort(key=_by_time, reverse=True)
                del found[limit:]
        return found

    def request(self, request: int) -> RequestRow | None:
        """By its id in a page, or by its number in the newest run that had it."""
        number = request & (1 << schema.RUN_SHIFT) - 1
        runs = [request >> schema.RUN_SHIFT]
        if not runs[0]:
            runs = [run for (run,) in self._all("SELECT id FROM boots WHERE id = run ORDER BY id DESC")]
        return next((row for run in runs if (row := self._request(run, number)) is not None), None)

    def _request(self, run: int, number: int) -> RequestRow | None:
        found = self._all(f"SELECT id, {schema.REQUEST_COLUMNS} FROM requests WHERE id = ?", run << schema.RUN_SHIFT | number)
        if found:
            return schema.request_from(found[0])
        with self._db() as db:
            for model, columns in db.execute(OF_NUMBER, (run, number, number)):
                pack = packs.unpacked(model, columns)
                if number in pack.columns[packs.REQUEST]:
                    (values,) = pack.values([pack.columns[packs.REQUEST].index(number)])
                    return schema.request_from(values)
        return None

    def transitions(
        self,
        since: float | None = None,
        until: float | None = None,
        *,
        model: str | None = None,
        kind: str | None = None,
        cursor: str = "",
        limit: int = 100,
    ) -> Page[TransitionRow]:
        where = [*_equal(model=model, kind=kind), *self._window(since, until), *self._after(cursor)]
        found = self._list("transitions", f"id, {schema.TRANSITION_COLUMNS}", "", where, limit + 1)
        return _page(found, schema.transition_from, limit)

    def tells(
        self,
        since: float | None = None,
        until: float | None = None,
        *,
        model: str | None = None,
        kind: str | None = None,
        cursor: str = "",
        limit: int = 100,
    ) -> Page[TellRow]:
        where = [*_equal(model=model, kind=kind), *self._window(since, until), *self._after(cursor)]
        return _page(self._list("tells", f"id, {schema.TELL_COLUMNS}", "", where, limit + 1), schema.tell_from, limit)

    def told(self, since: float | None, until: float | None, *, limit: int) -> tuple[TellRow, ...]:
        """The newest sentences, oldest first, and between them each start of the server."""
        where, values = _where([*self._window(since, until), ("id = run", None)])
        starts = self._all(f"SELECT at, version FROM boots {where} ORDER BY at DESC LIMIT ?", *values, limit)
        rows = [TellRow(at, "", STARTED, "info", f"greenroom {version} started") for at, version in starts]
        rows += reversed(self.tells(since, until, limit=limit).rows)
        return tuple(sorted(rows, key=attrgetter("at"))[-limit:])  # which leaves those of one moment in their order

    def stories(self, models: Iterable[str], until: float, *, limit: int) -> dict[str, tuple[TellRow, ...]]:
        """Model -> its newest sentences, oldest first; those of whom nothing was told are left out."""
        found: dict[str, tuple[TellRow, ...]] = {}
        with self._db() as db:
            for model in models:
                if rows := db.execute(STORY, (model, until, limit)).fetchall():
                    found[model] = tuple(map(schema.tell_from, reversed(rows)))
        return found

    def samples(self, since: float, until: float, *, device: str, limit: int = 1000) -> tuple[SampleRow, ...]:
        """Oldest first, for a chart.  Of more than `limit`, the one with the most use of each of so many spans of time.

        Spans of a quarter of an hour and more may begin and end some minutes off.
        """
        columns = f"id, {schema.SAMPLE_COLUMNS}"
        where = "WHERE device = ? AND at >= ? AND at < ?"
        ((count,),) = self._all(f"SELECT count(*) FROM (SELECT 1 FROM samples {where} LIMIT ?)", device, since, until, limit + 1)
        step_s = (until - since) / limit
        if count <= limit:
            found = self._all(f"SELECT {columns} FROM samples {where} ORDER BY at", device, since, until)
        elif step_s >= PEAKS_A_SPAN * schema.PEAK_S:
            found = self._of("samples", columns, self._peaks(since, until, device, step_s))
            found = sorted((row for row in found if since <= row[1] < until), key=_by_time)
        else:
            # Beside max() SQLite takes the other columns from the row that has it.
            peaks = f"SELECT id, max(used_mib) FROM samples {where} GROUP BY CAST((at - ?) / ? AS INTEGER)"
            chosen = f"SELECT {columns} FROM samples WHERE id IN (SELECT id FROM ({peaks})) ORDER BY at"
            found = self._all(chosen, device, since, until, since, step_s)
        return tuple(map(schema.sample_from, found))

    def _peaks(self, since: float, until: float, device: str, step_s: float) -> list[int]:
        """The ids of the samples with the most use, one of each span of time."""
        slots = int(since // schema.PEAK_S), int(until // schema.PEAK_S)
        found: dict[int, tuple[int, int]] = {}
        sql = "SELECT slot, coalesce(used_mib, -1), sample FROM peaks WHERE device = ? AND slot >= ? AND slot <= ?"
        for slot, used_mib, sample in self._all(sql, device, *slots):
            span = int((slot - slots[0]) * schema.PEAK_S // step_s)
            found[span] = max(found.get(span, (-1, 0)), (used_mib, sample))
        return [sample for _, sample in found.values()]

    def events(
        self, since: float | None = None, until: float | None = None, *, run: int | None = None, begins: bool = False
    ) -> Iterator[EventRow]:
        """Oldest first, as they happened, each with its actions; of one run, or of all.  `begins`: also where a scheduler began."""
        low, high, last = since if since is not None else -EVER, until if until is not None else EVER, 0
        if since is not None:
            ((first,),) = self._all("SELECT coalesce(min(id), 1) FROM journal INDEXED BY journal_until WHERE until >= ?", low)
            last = first - 1
        which = "" if run is None else f"AND run = {int(run)} "
        while True:
            pieces = self._all(
                f"SELECT id, offset_s, lines FROM journal WHERE id > ? AND until >= ? AND at < ? {which}ORDER BY id LIMIT ?",
                last,
                low,
                high,
                PIECES_AT_ONCE,
            )
            for piece, offset_s, lines in pieces:
                last = piece
                try:
                    found = [
                        event
                        for event in schema.events_in(lines, offset_s)
                        if low <= event.at < high and (begins or event.kind != schema.BEGAN)
                    ]
                except DAMAGED as exc:
                    raise _damaged(exc) from exc
                yield from found
            if len(pieces) < PIECES_AT_ONCE:
                return

    def boots(self, *, starts: bool = False) -> tuple[BootRow, ...]:
        """Oldest first.  `starts`: only those of server starts, each of which begins a run; its number is the run's."""
        where = "WHERE id = run " if starts else ""
        found = []
        for row in self._all(f"SELECT * FROM boots {where}ORDER BY id"):
            with suppress(*DAMAGED):  # one whose bytes are damaged says nothing, and the others are worth no less
                found.append(schema.boot_from(row))
        return tuple(found)

    # ------------------------------------------------------------------ sums

    def counts(self, since: float | None = None, until: float | None = None) -> dict[str, dict[str, int]]:
        """Model -> outcome -> requests."""
        low, high = since if since is not None else -EVER, until if until is not None else EVER
        found: dict[str, dict[str, int]] = {}
        with self._db() as db:
            for model in self._models(db, "requests"):
                for outcome in OUTCOMES:
                    (count,) = db.execute(COUNT, (model, outcome, low, high)).fetchone()
                    if count:
                        found.setdefault(model, {})[outcome] = count
            for model in self._models(db, "packs"):
                if count := self._packed_count(db, model, low, high):
                    by_outcome = found.setdefault(model, {})
                    by_outcome["ok"] = by_outcome.get("ok", 0) + count
        return found

    @staticmethod
    def _packed_count(db: sqlite3.Connection, model: str, low: float, high: float) -> int:
        (whole,) = db.execute(WHOLE_PACKS, (model, low, high, low)).fetchone()
        parts = db.execute(PARTS_OF_PACKS, (model, low, max(low, high) + LONGEST_S, high, low, high)).fetchall()
        return int(whole) + sum(sum(low <= at < high for at in packs.times(columns)[0]) for (columns,) in parts)

    def waits(
        self, since: float | None = None, until: float | None = None, *, percentiles: Sequence[float] = PERCENTILES
    ) -> dict[str, Waits]:
        """Of each model; a request that was admitted at once waited nothing, and counts.  Of very many, the newest."""
        sql, values = _where([(f"waited_s >= {schema.WAITED_S}", None), *self._window(since, until)])
        index = f"FROM requests INDEXED BY requests_waited {sql} ORDER BY at DESC LIMIT"
        rows = self._all(f"SELECT model, waited_s {index} ?", *values, WAITS_MAX)
        if len(rows) == WAITS_MAX:
            ((since,),) = self._all(f"SELECT at {index} 1 OFFSET ?", *values, WAITS_MAX - 1)
        counts = {model: sum(by.values()) for model, by in self.counts(since, until).items()}
        waited: dict[str, list[float]] = {model: [] for model in counts}
        for model, wait_s in rows:
            waited.setdefault(model, []).append(wait_s)
        found = {}
        for model, sorted_s in waited.items():
            sorted_s.sort()
            count, zeros = max(counts.get(model, 0), len(sorted_s)), max(0, counts.get(model, 0) - len(sorted_s))
            points = {}
            for percent in percentiles:
                rank = min(count - 1, int(count * percent / 100))
                points[percent] = sorted_s[rank - zeros] if rank >= zeros else 0.0
            found[model] = Waits(count, len(sorted_s), sum(sorted_s), sorted_s[-1] if sorted_s else 0.0, points)
        return found

    def pairs(self, since: float | None = None, until: float | None = None, *, slow_s: float = 1.0, limit: int = 50) -> tuple[Pair, ...]:
        """Who was served before whom, where it waited at least `slow_s`; most time waited first.  Of very many, the newest."""
        where = [(f"waited_s >= {schema.WAITED_S}", None), ("waited_s >= ?", slow_s), ("before <> ''", None), *self._window(since, until)]
        sql, values = _where(where)
        found = self._all(
            "SELECT before, model, count(*), sum(waited_s), max(waited_s) FROM (SELECT before, model, waited_s FROM requests "
            f"INDEXED BY requests_waited {sql} ORDER BY at DESC LIMIT ?) GROUP BY before, model ORDER BY 4 DESC LIMIT ?",
            *values,
            WAITS_MAX,
            limit,
        )
        return tuple(Pair(*row) for row in found)

    def gaps(
        self, model: str, since: float | None = None, until: float | None = None, *, least_s: float = 0.0
    ) -> tuple[tuple[float, float], ...]:
        """(when it began, how long it lasted) of each time without a request of this model, oldest first; of its newest requests."""
        spans: list[tuple[float, float]] = []
        for outcome in OUTCOMES:
            where = [("model = ?", model), ("outcome = ?", outcome), *self._window(since, until)]
            spans += self._list("requests", "at, at + duration_s", "INDEXED BY requests_model ", where, GAP_REQUESTS_MAX)
        spans += self._packed_spans(model, since, until)
        spans.sort()
        spans = spans[-GAP_REQUESTS_MAX:]
        found, idle_at = [], spans[0][1] if spans else 0.0
        for at, end in spans:
            if at - idle_at > least_s:
                found.append((idle_at, at - idle_at))
            if end > idle_at:
                idle_at = end
        return tuple(found)

    def is_ledger(self) -> bool:
        """Whether the file is one at all."""
        return len(self._all("SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name IN ('requests', 'boots')")) == 2

    def models(self) -> tuple[str, ...]:
        """Every model that a request asked for."""
        with self._db() as db:
            return tuple(sorted({*self._models(db, "requests"), *self._models(db, "packs")}))

    def _packed_spans(self, model: str, since: float | None, until: float | None) -> list[tuple[float, float]]:
        low, high = since if since is not None else -EVER, until if until is not None else EVER
        spans: list[tuple[float, float]] = []
        with self._db() as db:
            for (columns,) in db.execute(NEWEST_PACKS, (model, low, high + LONGEST_S, high)):
                spans += ((at, at + duration_s) for at, duration_s in zip(*packs.times(columns), strict=True) if low <= at < high)
                if len(spans) >= GAP_REQUESTS_MAX:
                    break
        return spans

    # ------------------------------------------------------------------ how

    @staticmethod
    def _models(db: sqlite3.Connection, table: str) -> list[str]:
        """Every model there, by one step in the index each."""
        found: list[str] = []
        while row := db.execute(NEXT_MODEL.format(table), (found[-1] if found else "",)).fetchone():
            found.append(row[0])
        return found

    @contextmanager
    def _db(self) -> Iterator[sqlite3.Connection]:
        try:
            db, lock = self._reader()
            if lock is not None:
                with lock:
                    yield db
                return
            try:
                yield db
            finally:
                db.close()
        except sqlite3.Error as exc:
            if is_damaged(exc):
                self._doubt()
            raise Unreadable(f"the ledger cannot be read: {exc}") from exc
        except DAMAGED as exc:
            raise _damaged(exc) from exc

    def _all(self, sql: str, *values: Any) -> list[Any]:
        with self._db() as db:
            return db.execute(sql, values).fetchall()

    def _of(self, table: str, columns: str, ids: Sequence[int]) -> list[Any]:
        return self._all(f"SELECT {columns} FROM {table} WHERE id IN (SELECT value FROM json_each(?))", json.dumps(ids))

    def _list(self, table: str, columns: str, index: str, where: list[tuple[str, Any]], limit: int | None) -> list[Any]:
        sql, values = _where(where)
        order = "" if limit is None else "ORDER BY at DESC, id DESC LIMIT ?"
        return self._all(f"SELECT {columns} FROM {table} {index}{sql} {order}", *values, *(() if limit is None else (limit,)))

    @staticmethod
    def _window(since: float | None, until: float | None) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        if since is not None:
            found.append(("at >= ?", since))
        if until is not None:
            found.append(("at < ?", until))
        return found

    @staticmethod
    def _after(cursor: str) -> list[tuple[str, Any]]:
        """Raises ValueError for a cursor that no page gave."""
        if not cursor:
            return []
        return [("(at, id) < (?, ?)", _place(cursor))]


def _place(cursor: str) -> tuple[float, int]:
    at, _, row = cursor.partition("~")
    return float(at), int(row)


def _by_time(values: Sequence[Any]) -> tuple[float, int]:
    return values[1], values[0]


def _equal(**values: str | None) -> list[tuple[str, Any]]:
    return [(f"{name} = ?", value) for name, value in values.items() if value is not None]


def _where(where: Sequence[tuple[str, Any]]) -> tuple[str, list[Any]]:
    values: list[Any] = []
    for _, value in where:
        if isinstance(value, tuple):
            values.extend(value)
        elif value is not None:
            values.append(value)
    return ("WHERE " + " AND ".join(condition for condition, _ in where) if where else ""), values


def _page(found: Sequence[Any], make: Callable[[Sequence[Any]], T], limit: int) -> Page[T]:
    kept = found[:limit]
    more = f"{kept[-1][1]!r}~{kept[-1][0]}" if kept and len(found) > limit else ""
    try:
        return Page(tuple(map(make, kept)), tuple(row[0] for row in kept), more)
    except DAMAGED as exc:
        raise _damaged(exc) from exc


def _damaged(fault: Exception) -> Unreadable:
    return Unreadable(f"a part of the ledger is damaged ({fault}): move the file aside, and the next start of the server begins a new one")
