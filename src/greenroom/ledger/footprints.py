"""What models really needed, remembered across restarts: a small SQLite table with a copy in memory.

Reads never touch the disk after the first, and a thread of its own writes: a disk that takes its time delays nobody.
One that is broken, full or read-only costs the memory of the next restart and one warning, nothing else: serving must
not depend on it.  A file that is damaged is moved aside, so that what is learned from then on outlives the next restart
again.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import astuple, dataclass, replace
from pathlib import Path

log = logging.getLogger(__name__)

ROWS_MAX = 4096
BUSY_S_MAX = 0.25  # another process writes: wait this long at most
CLOSE_S_MAX = 3.0  # for what is still to be written
ASIDE_MAX = 3  # damaged files kept: `.corrupt-1` is the newest
DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})

# Each statement leads from the schema of its place to the next one; a new file takes all of them.
STEPS = (
    """
CREATE TABLE footprints (
  files TEXT NOT NULL, engine_version TEXT NOT NULL, launch TEXT NOT NULL, device_kind TEXT NOT NULL,
  device_mib INTEGER, host_mib INTEGER, up_s REAL, down_s REAL, samples INTEGER NOT NULL,
  used_at REAL NOT NULL,
  PRIMARY KEY (files, engine_version, launch, device_kind)
) WITHOUT ROWID
""",
    """
CREATE TABLE tiers (
  files TEXT NOT NULL, engine_version TEXT NOT NULL, launch TEXT NOT NULL, device_kind TEXT NOT NULL,
  level INTEGER NOT NULL, residue_mib INTEGER NOT NULL, host_mib INTEGER NOT NULL, sleep_s REAL NOT NULL, wake_s REAL NOT NULL,
  PRIMARY KEY (files, engine_version, launch, device_kind, level)
) WITHOUT ROWID
""",
)
SCHEMA_VERSION = len(STEPS)


@dataclass(frozen=True, slots=True)
class Key:
    """What makes two launches comparable."""

    files: str  # digest of the model files (path, size, modification time)
    engine_version: str  # "" when the engine did not tell
    launch: str  # digest of the command and environment that matter
    device_kind: str  # gpu name, mig profile, ram ...


@dataclass(frozen=True, slots=True)
class LearnedTier:
    """What a sleep level was measured to cost."""

    level: int
    residue_mib: int  # per device, while asleep
    host_mib: int  # host RAM, while asleep
    sleep_s: float
    wake_s: float


@dataclass(frozen=True, slots=True)
class Learned:
    """Measured figures; None = not measured yet."""

    device_mib: int | None = None  # per device, when ready and having served
    host_mib: int | None = None
    up_s: float | None = None  # cold start
    down_s: float | None = None  # stop, until the memory was back
    samples: int = 0  # starts that went into it
    tiers: tuple[LearnedTier, ...] = ()  # sleep levels that were used, by level


class Footprints:
    """Learned figures by key; `path` None keeps them in memory only.  Safe to call from several threads."""

    def __init__(self, path: str | os.PathLike[str] | None, rows_max: int = ROWS_MAX, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(path) if path is not None else None
        self._rows_max = rows_max
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[Key, Learned] = OrderedDict()  # least recently used first
        self._news = threading.Condition(self._lock)
        self._unwritten: dict[Key, tuple[Learned, float] | None] = {}  # with when it was learned; None = to be deleted
        self._is_writing = self._is_closing = False
        self._writer: threading.Thread | None = None
        self._db: sqlite3.Connection | None = None  # the writer's, once there is one
        self._warned = False
        self._began_anew = False
        if self._path is not None:
            self._open_or_warn(self._path)

    def get(self, key: Key) -> Learned | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def put(self, key: Key, learned: Learned) -> None:
        """Remember `learned` in place of what was known; the least recently used row leaves when there are too many."""
        with self._lock:
            self._known[key] = learned
            self._known.move_to_end(key)
            gone = [self._known.popitem(last=False)[0] for _ in range(len(self._known) - self._rows_max)]
            if self._path is None or self._is_closing:
                return
            self._unwritten |= {**dict.fromkeys(gone), key: (learned, self._clock())}
            if self._writer is None:
                self._writer = threading.Thread(target=self._work, name="footprints", daemon=True)
                self._writer.start()
            self._news.notify_all()

    def flush(self, timeout_s: float = CLOSE_S_MAX) -> bool:
        """Wait until all that was put is written, or could not be; False: not in time."""
        with self._lock:
            return self._news.wait_for(lambda: not self._unwritten and not self._is_writing, timeout_s)

    def close(self) -> None:
        """Write what is left, for a bounded time."""
        if not self.flush():
            log.warning("%s could not be written in %g s; the last figures are lost", self._path, CLOSE_S_MAX)
        with self._lock:
            self._is_closing = True
            self._news.notify_all()
        if self._writer is not None:
            self._writer.join(CLOSE_S_MAX)
            if self._writer.is_alive():
                return  # the disk hangs, and its connection is in use
        if self._db is not None:
            self._db.close()
            self._db = None

    def __len__(self) -> int:
        return len(self._known)

    @property
    def is_durable(self) -> bool:
        """False when this run's figures will be forgotten."""
        return self._db is not None and not self._warned

    def _work(self) -> None:
        """The writer's thread."""
        while True:
            with self._lock:
                self._is_writing = False
                self._news.notify_all()
                self._news.wait_for(lambda: bool(self._unwritten) or self._is_closing)
                batch, self._unwritten = self._unwritten, {}
                if not batch:
                    return
                self._is_writing = True
            try:
                self._write(batch)
            except sqlite3.Error as fault:
                if not self._begin_anew(fault):
                    self._warn("be written", fault)  # tried again with the next figure: a full disk may be freed

    def _open_or_warn(self, path: Path) -> None:
        try:
            self._known = self._open(path)
        except (sqlite3.Error, OSError) as fault:
            if not self._begin_anew(fault):
                self._warn("be used", fault)

    def _begin_anew(self, fault: Exception) -> bool:
        """Move a damaged file aside and write what is known to a new one; False: not damaged, or not possible.

        Once in a run: a disk that damages the new file as well will do so again.
        """
        path = self._path
        if path is None or self._began_anew or not is_damaged(fault):
            return False
        self._began_anew = True
        if self._db is not None:
            self._db.close()
            self._db = None
        with self._lock:
            known: dict[Key, tuple[Learned, float] | None] = {key: (learned, self._clock()) for key, learned in self._known.items()}
        try:
            aside = move_aside(path)
            self._open(path)
            self._write(known)
        except (sqlite3.Error, OSError) as second:
            self._warn("be used", second)
            return True
        log.warning("%s was damaged (%s): it is %s now, and a new one was begun. What it held is learned again", path, fault, aside)
        return True

    def _warn(self, what: str, fault: Exception) -> None:
        """Once: every further figure would say the same."""
        if not self._warned:
            log.warning(
                "%s cannot %s (%s): learned memory needs and start times are kept in memory only, until the next restart. "
                "Free or repair the disk, or move the file away to begin a new one",
                self._path,
                what,
                fault,
            )
        self._warned = True

    def _open(self, path: Path) -> OrderedDict[Key, Learned]:
        """What it holds, least recently used first."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(path, timeout=BUSY_S_MAX, isolation_level=None, check_same_thread=False)
        try:
            refuse_newer(db)
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            migrate(db)
            found = self._load(db)
        except BaseException:
            db.close()
            raise
        self._db = db
        return found

    def _load(self, db: sqlite3.Connection) -> OrderedDict[Key, Learned]:
        """The newest rows; what is beyond the limit is deleted."""
        tiers: defaultdict[Key, tuple[LearnedTier, ...]] = defaultdict(tuple)
        with closing(db.execute(SELECT_TIERS)) as rows:
            for row in rows:
                tiers[Key(*row[:4])] += (LearnedTier(*row[4:]),)
        with closing(db.execute(SELECT)) as rows:
            found = [(key := Key(*row[:4]), replace(Learned(*row[4:]), tiers=tiers[key])) for row in rows]
        for key, _ in found[self._rows_max :]:
            delete(db, key)
        return OrderedDict(reversed(found[: self._rows_max]))

    def _write(self, batch: Mapping[Key, tuple[Learned, float] | None]) -> None:
        db = self._db
        if db is None:
            return
        db.execute("BEGIN IMMEDIATE")
        try:
            for key, found in batch.items():
                delete(db, key)
                if found is None:
                    continue
                learned, at = found
                figures = (learned.device_mib, learned.host_mib, learned.up_s, learned.down_s, learned.samples)
                db.execute(INSERT, (*astuple(key), *figures, at))
                db.executemany(INSERT_TIER, [(*astuple(key), *astuple(tier)) for tier in learned.tiers])
        except BaseException:
            db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")


SELECT = (
    "SELECT files, engine_version, launch, device_kind, device_mib, host_mib, up_s, down_s, samples FROM footprints ORDER BY used_at DESC"
)
SELECT_TIERS = "SELECT files, engine_version, launch, device_kind, level, residue_mib, host_mib, sleep_s, wake_s FROM tiers ORDER BY level"
INSERT = "INSERT INTO footprints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
INSERT_TIER = "INSERT INTO tiers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
WHERE = "WHERE files = ? AND engine_version = ? AND launch = ? AND device_kind = ?"


def delete(db: sqlite3.Connection, key: Key) -> None:
    for table in ("footprints", "tiers"):
        db.execute(f"DELETE FROM {table} {WHERE}", astuple(key))


def is_damaged(fault: Exception) -> bool:
    """Whether SQLite found bytes that no database has; not: a full disk, a lock, a newer schema."""
    return isinstance(fault, sqlite3.DatabaseError) and getattr(fault, "sqlite_errorcode", 0) & 0xFF in DAMAGED


def move_aside(path: Path) -> Path:
    """`path` and its journal become `.corrupt-1`, after the older ones made room; the oldest is lost.  Raises OSError."""
    for number in range(ASIDE_MAX, 0, -1):
        newer = path if number == 1 else corrupt_name(path, number - 1)
        for suffix in ("", "-wal"):  # a journal left behind would be played into the new file
            source, target = Path(f"{newer}{suffix}"), Path(f"{corrupt_name(path, number)}{suffix}")
            if source.exists():
                os.replace(source, target)
            else:
                target.unlink(missing_ok=True)
    Path(f"{path}-shm").unlink(missing_ok=True)
    return corrupt_name(path, 1)


def corrupt_name(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.corrupt-{number}")


def refuse_newer(db: sqlite3.Connection) -> None:
    """Raises sqlite3.DatabaseError, before anything is changed, for a file written by a newer greenroom."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise sqlite3.DatabaseError(f"it was written by a newer greenroom: schema {version}, this one reads {SCHEMA_VERSION}")


def migrate(db: sqlite3.Connection) -> None:
    """Bring the file to SCHEMA_VERSION; one transaction, as two processes may open a new file at once."""
    db.execute("BEGIN IMMEDIATE")
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version < SCHEMA_VERSION:
        for step in STEPS[version:]:
            db.execute(step)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.execute("COMMIT")
