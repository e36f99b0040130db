"""The ledger of a running or a stopped server, read and never written."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from greenroom.core.facts import Setup
from greenroom.ledger import codec
from greenroom.ledger.reads import Page, Reads, Unreadable
from greenroom.ledger.rows import BootRow, EventRow, RequestRow, SampleRow, TellRow, TransitionRow
from greenroom.ledger.schema import FILE

from .faults import CannotReplay
from .figures import Span, stretch
from .sizes import sized

BUSY_S = 2.0
PAGE = 10_000
ROWS_MAX = 200_000  # of each kind: the newest ones
SAMPLES_MAX = 1000  # of each device

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece of the past: the settings at its end, with needs as they were known by then, and its rows, oldest first."""

    setup: Setup
    within: Span
    requests: tuple[RequestRow, ...]
    transitions: tuple[TransitionRow, ...]
    samples: tuple[SampleRow, ...]
    cut: bool = False  # there was more than is looked at


class Past:
    """Raises CannotReplay where there is nothing, or nothing readable."""

    def __init__(self, find: Reads) -> None:
        self._find = find

    @classmethod
    def at(cls, path: Path) -> Past:
        if path.is_dir():
            raise CannotReplay(f"{path} is a folder: name the {FILE} in it, or give the folder with --state-dir")
        if not path.is_file():
            raise CannotReplay(f"there is no ledger at {path}: greenroom has not run with this state directory")

        def reader() -> tuple[sqlite3.Connection, threading.Lock | None]:
            db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S, isolation_level=None)
            return db, None

        found = cls(Reads(reader, lambda: None))  # a damaged file is the server's to mend
        if not found._told(found._find.is_ledger):
            raise CannotReplay(f"{path} is no ledger: a server keeps its own as {FILE} in its state directory")
        return found

    def runs(self) -> Iterator[tuple[BootRow, Iterable[EventRow]]]:
        """Every start of the server with its events, and where a scheduler began among them."""
        for boot in self._told(lambda: self._find.boots(starts=True)):
            yield boot, self._events(boot.boot)

    def _events(self, run: int) -> Iterator[EventRow]:
        try:
            yield from self._find.events(run=run, begins=True)
        except Unreadable as fault:
            raise CannotReplay(str(fault)) from fault

    def setup(self) -> Setup:
        """The settings that held last."""
        return self._held(None)[0]

    def _held(self, until: float | None) -> tuple[Setup, float]:
        """The settings that held at that time, and since when they did."""
        boots = [boot for boot in self._told(self._find.boots) if until is None or boot.at <= until]
        if not boots:
            raise CannotReplay("the ledger knows no settings: no run of the server is recorded in it")
        try:
            return codec.setup_from(boots[-1].setup), boots[-1].at
        except ValueError as fault:
            raise CannotReplay(str(fault)) from fault

    def told(self, since: float, limit: int) -> tuple[TellRow, ...]:
        """The newest sentences since then, oldest first, with the starts of the server."""
        return self._told(lambda: self._find.told(since, None, limit=limit))

    def stretch(self, seconds: float, now: float) -> Stretch:
        """The last `seconds` before `now`; where nothing happened in them, the last before the last thing that did."""
        until = now
        if not self._told(lambda: self._find.requests(now - seconds, now, limit=1)).rows:
            newest = self._told(lambda: self._find.requests(limit=1)).rows
            if not newest:
                raise CannotReplay("the ledger holds no request yet")
            until = newest[0].at + newest[0].duration_s + 1e-3
        since = until - seconds
        requests, some = self._told(lambda: self._find.served(since, until, limit=ROWS_MAX))
        transitions, more = self._all(lambda cursor: self._find.transitions(since, until, cursor=cursor, limit=PAGE))
        setup, held_since = self._held(until)
        samples = [
            row
            for device in setup.devices
            for row in self._told(lambda id=device.id: self._find.samples(since, until, device=id, limit=SAMPLES_MAX))  # type: ignore[misc]
        ]
        first, last = stretch(requests, transitions)
        setup = sized(setup, held_since, transitions, samples)
        return Stretch(setup, (max(since, first), max(last, first + 1e-3)), requests, transitions, tuple(samples), some or more)

    def _all(self, page: Callable[[str], Page[T]]) -> tuple[tuple[T, ...], bool]:
        rows: list[T] = []
        cursor = ""
        while len(rows) < ROWS_MAX:
            found = self._told(lambda at=cursor: page(at))  # type: ignore[misc]
            rows.extend(found.rows)
            cursor = found.next
            if not cursor:
                return tuple(reversed(rows)), False
        return tuple(reversed(rows)), True

    @staticmethod
    def _told(read: Callable[[], T]) -> T:
        try:
            return read()
        except Unreadable as fault:
            raise CannotReplay(str(fault)) from fault
