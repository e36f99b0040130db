"""No question reads the ledger from end to end: each finds its rows by an index, and pages cost the same however much there is."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.ledger import MODELS, NOW, SETUP, SPAN_S, make_rows, questions

from greenroom.core.facts import Admit, RequestArrived, RequestFinished
from greenroom.ledger.reads import Reads
from greenroom.ledger.store import Ledger
from greenroom.proxy.record import Record

SMALL, LARGE = 5_000, 20_000
STEPS_EACH = 100  # of the database's machine, between two looks
SUMS = ("counts", "waits", "pairs", "gaps", "samples", "waited over")  # they look at all that they sum up, in an index
LONG = ("thousand", "all of them")  # lists that are longer than the small ledger's


class Watched:
    """A ledger's file whose reading is watched: what is asked of it, and how many steps its answers take."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked: list[str] = []
        self.steps = 0
        self.find = Reads(self._reader, lambda: None)
        self.ledger = Ledger(path)  # for `questions`
        self.ledger.find = self.find

    def _reader(self) -> tuple[sqlite3.Connection, None]:
        db = sqlite3.connect(self.path, isolation_level=None)
        db.set_trace_callback(self.asked.append)
        db.set_progress_handler(self._step, STEPS_EACH)
        return db, None

    def _step(self) -> int:
        self.steps += STEPS_EACH
        return 0

    def plans(self) -> list[tuple[str, str]]:
        """(what was asked, a line of how it is found)."""
        with sqlite3.connect(self.path) as db:
            return [(sql, line) for sql in self.asked for *_, line in db.execute(f"EXPLAIN QUERY PLAN {sql}")]


def made(path: Path, count: int) -> Watched:
    make_rows(path, count)
    ledger = Ledger(path)
    ledger.boot(SETUP)
    for n in range(1, 2001):  # and some in packs
        at = -60.0 + n / 100
        ledger.saw(RequestArrived(at, n, MODELS[n % 3], client="k"), [Admit(n, MODELS[n % 3], 1, "hot")])
        ledger.saw(RequestFinished(at + 0.001, n), [])
        ledger.ended(Record(MODELS[n % 3], "chat", "POST", "/v1", "k", 200, "ok", "hot", 1, 1, 0, 0.1, 0.1, 1, 1, n))
    ledger.close()
    return Watched(path)


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Watched, Watched]]:
    folder = tmp_path_factory.mktemp("reads")
    both = made(folder / "small.sqlite", SMALL), made(folder / "large.sqlite", LARGE)
    yield both
    for watched in both:
        watched.ledger.close()


def asked_of(watched: Watched) -> dict[str, Callable[[], Any]]:
    find = watched.find
    return {
        **questions(watched.ledger),
        "events of an hour": lambda: list(find.events(NOW - 3600.0, NOW)),
        "requests of a model that nobody asked for": lambda: find.requests(model="nobody"),
        "boots": find.boots,
        "what was told, with the starts": lambda: find.told(None, NOW, limit=50),
        "stories": lambda: find.stories(find.models(), NOW, limit=5),
        "a request that never was": lambda: find.request(4_000_000_000),
    }


def is_scan(sql: str, line: str) -> bool:
    """Whether a table is read as a whole: without an index, or along one with rows passed over that do not fit.

    What `requests_waited` passes over stands in the index itself.
    """
    if not line.startswith("SCAN") or line.startswith(("SCAN boots", "SCAN (", "SCAN json_each")):
        return False
    if "COVERING INDEX" in line or line.endswith(" INDEX requests_waited"):
        return False
    return " INDEX " not in line or "WHERE" in sql


def test_every_question_finds_its_rows_by_an_index(ledgers: tuple[Watched, Watched]) -> None:
    """No table of many rows is read as a whole; only `boots`, which are few."""
    large = ledgers[1]
    seen = 0
    for name, ask in asked_of(large).items():
        large.asked.clear()
        ask()
        for sql, line in large.plans():
            seen += 1
            assert not is_scan(sql, line), f"{name}: {line}: {sql}"
            assert "AUTOMATIC" not in line, f"{name}: {line}: {sql}"
    assert seen > 40


def test_pages_cost_the_same_however_much_there_is(ledgers: tuple[Watched, Watched]) -> None:
    """Four times the rows: no more steps for a page, a request, a model's list.  Sums grow, and look into indexes only."""
    for name in asked_of(ledgers[0]):
        steps = []
        for watched in ledgers:
            ask = asked_of(watched)[name]
            watched.steps = 0
            ask()
            steps.append(watched.steps)
        if not any(word in name for word in (*SUMS, *LONG)):
            assert steps[1] < 1.5 * steps[0] + 2000, f"{name}: {steps}"


def test_charts_of_weeks_keep_their_peaks(tmp_path: Path) -> None:
    """Also where samples are kept for each five minutes only."""
    path = tmp_path / "journal.sqlite"
    make_rows(path, 1000)
    db = sqlite3.connect(path)
    (begin,) = db.execute("SELECT min(at) FROM samples").fetchone()
    rows = ((begin + 60.0 * n, "gpu1", 0, 77_777 if n == 4000 else n % 1000, 0, "{}") for n in range(20 * 1440))
    db.executemany("INSERT INTO samples (at, device, reserved_mib, used_mib, outside_mib, own_mib) VALUES (?, ?, ?, ?, ?, ?)", rows)
    db.commit()
    db.close()
    watched = Watched(path)
    found = watched.find.samples(NOW - SPAN_S, NOW, device="gpu1", limit=100)
    assert 60 <= len(found) <= 101
    assert [row.at for row in found] == sorted(row.at for row in found)
    assert max(row.used_mib or 0 for row in found) == 77_777
    assert watched.steps < 200_000
    assert watched.find.samples(NOW - SPAN_S, NOW, device="gpu2") == ()
    watched.ledger.close()
