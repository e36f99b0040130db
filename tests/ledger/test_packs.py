"""Packs of requests are told from rows by nobody who asks."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from greenroom.core.facts import Admit, Model, Outcome, RequestArrived, RequestFinished, Setup
from greenroom.ledger import packs, schema
from greenroom.ledger.metrics import Metrics
from greenroom.ledger.packs import Pack
from greenroom.ledger.rows import RequestRow
from greenroom.ledger.store import Ledger
from greenroom.proxy.record import Record

SETUP = Setup((), (Model("a", ("gpu0",)), Model("b", ("gpu0",)), Model("c", ("gpu1",))))
COUNT = 3000
BEGAN = 1_700_000_000.0
CLOCK: dict[str, Any] = {"clock": lambda: 0.0, "wall": lambda: BEGAN}


def serve(ledger: Ledger, count: int = COUNT, seed: int = 1, first: int = 1) -> None:
    """So many requests of several models and clients, a few of which end badly; up to four at a time run beside each other."""
    rng = random.Random(seed)
    running: list[tuple[int, str, str]] = []
    at = 0.0
    for n in range(first, first + count):
        at += rng.choice((0.0, rng.expovariate(20.0)))
        model, client = rng.choices("abc", (90, 9, 1))[0], f"key-{rng.randint(1, 3)}"
        ledger.saw(RequestArrived(at, n, model, client=client), [Admit(n, model, 1 + n // 1000, "hot")])
        running.append((n, model, client))
        while len(running) > (rng.randint(0, 4) if n < first + count - 1 else 0):
            at += rng.expovariate(50.0)
            number, model, client = running.pop(rng.randrange(len(running)))
            outcome = rng.choices((Outcome.OK, Outcome.CLIENT_GONE, Outcome.ENGINE_BROKE), (98, 1, 1))[0]
            ledger.saw(RequestFinished(at, number, outcome), [])
            counts = rng.choice(((None, None), (rng.randint(1, 9000), rng.randint(1, 900)), (5_000_000_000, None)))
            first_byte_s = rng.choice((None, rng.expovariate(2.0), 0.25))
            status = 500 if rng.random() < 0.01 else 200
            ledger.ended(
                Record(
                    model, "chat", "POST", f"/v1/{n % 3}", client, status, outcome.value, "hot", 1, 2, 0, first_byte_s, 0.5, *counts, number
                )
            )


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ledger, Ledger]]:
    """The same requests, packed in a file and as rows in memory."""
    packed, rows = Ledger(tmp_path_factory.mktemp("packs") / "journal.sqlite", gather_s=3600.0, **CLOCK), Ledger(None, **CLOCK)
    for ledger in (packed, rows):
        ledger.boot(SETUP)
        for part in range(4):  # so that packs of several rounds lie beside each other
            serve(ledger, COUNT // 4, part, 1 + part * (COUNT // 4))
            assert ledger.flush(30.0)
    yield packed, rows
    for ledger in (packed, rows):
        ledger.close()


def pages(ledger: Ledger, limit: int, **asked: Any) -> list[RequestRow]:
    found: list[RequestRow] = []
    cursor = ""
    while True:
        page = ledger.find.requests(limit=limit, cursor=cursor, **asked)
        found += page.rows
        cursor = page.next
        if not cursor:
            return found


def test_most_of_a_flood_is_packed(both: tuple[Ledger, Ledger]) -> None:
    packed, _ = both
    assert packed._disk._db is not None
    (count,) = packed._disk._db.execute("SELECT sum(count) FROM packs").fetchone()
    (rows,) = packed._disk._db.execute("SELECT count(*) FROM requests").fetchone()
    assert count + rows == COUNT
    assert count > 0.9 * COUNT


@pytest.mark.parametrize("limit", [1, 7, 100, 1000, 10_000])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"model": "a"},
        {"model": "c"},
        {"model": "nobody"},
        {"outcome": "ok"},
        {"outcome": "client_gone"},
        {"model": "b", "outcome": "ok"},
        {"since": BEGAN + 3.0, "until": BEGAN + 8.5},
        {"model": "a", "until": BEGAN + 8.5},
        {"waited_over_s": 0.0},
        {"waited_over_s": 1.0},
    ],
)
def test_pages_hold_the_same(both: tuple[Ledger, Ledger], limit: int, asked: dict[str, Any]) -> None:
    """Whatever is asked for, in pages of any size: each request once, in the same order."""
    packed, rows = both
    if limit == 1:
        asked = {**asked, "since": BEGAN + 3.0, "until": BEGAN + 5.0}
    found = pages(packed, limit, **asked)
    assert found == pages(rows, limit, **asked)
    if asked == {}:
        assert len(found) == COUNT


@pytest.mark.parametrize("limit", [1, 100, 300, COUNT // 2, COUNT, 10 * COUNT])
@pytest.mark.parametrize(("since", "until"), [(BEGAN - 1.0, BEGAN + 1000.0), (BEGAN + 3.0, BEGAN + 8.5), (BEGAN + 8.5, BEGAN + 3.0)])
def test_those_of_a_stretch_are_what_the_pages_hold(both: tuple[Ledger, Ledger], limit: int, since: float, until: float) -> None:
    """In one go, oldest first: all of them, or the newest; the fields that nobody counts with are left out."""
    left_out: dict[str, Any] = {"path": "", "tokens_in": None, "tokens_out": None, "status": 0, "code": ""}
    for ledger in both:
        all_ = sorted(pages(ledger, 10_000, since=since, until=until), key=lambda row: (row.at, row.request))
        found, was_cut = ledger.find.served(since, until, limit=limit)
        assert list(found) == [replace(row, **left_out) for row in all_][-limit:]
        assert was_cut == (len(all_) > limit)


def test_sums_are_the_same(both: tuple[Ledger, Ledger]) -> None:
    packed, rows = both
    for since, until in ((None, None), (BEGAN + 2.5, None), (None, BEGAN + 7.5), (BEGAN + 2.5, BEGAN + 7.5), (BEGAN + 9.0, BEGAN + 1.0)):
        assert packed.find.counts(since, until) == rows.find.counts(since, until)
        assert packed.find.waits(since, until) == rows.find.waits(since, until)
        for model in "abc":
            assert packed.find.gaps(model, since, until, least_s=0.01) == rows.find.gaps(model, since, until, least_s=0.01)
    assert packed.find.models() == rows.find.models() == ("a", "b", "c")


def test_each_is_found_by_its_number_and_by_its_id(both: tuple[Ledger, Ledger]) -> None:
    packed, rows = both
    page = packed.find.requests(limit=500)
    assert [packed.find.request(id) for id in page.ids[::50]] == list(page.rows[::50])
    for number in range(1, COUNT, 97):
        assert packed.find.request(number) == rows.find.request(number) is not None
    assert packed.find.request(COUNT + 1) is None


def test_events_are_the_same(both: tuple[Ledger, Ledger]) -> None:
    packed, rows = both
    assert list(packed.find.events()) == list(rows.find.events())
    assert len(list(packed.find.events())) == 2 * COUNT


def test_metrics_count_the_same() -> None:
    """Of a pack as of its rows one by one."""
    rng = random.Random(3)
    flat: list[Any] = []
    for n in range(500):
        told = rng.choice(((None, None), (7, None), (rng.randint(1, 99), rng.randint(1, 99))))
        flat += (n, 1.0 + n, 0.5, rng.choice((None, 0.25, rng.expovariate(1.0))), *told, 1, "key", "batch", "/v1", "")
    pack = Pack.of("a", flat)
    assert len(pack) == 500
    whole, single = Metrics(), Metrics()
    whole.packed(pack)
    single.ended(list(pack.values()))
    assert whole._tallies == single._tallies
    assert whole._first_byte.counts == single._first_byte.counts
    assert whole._first_byte.total == pytest.approx(single._first_byte.total)
    assert [one.counts for one in whole._waits.values()] == [one.counts for one in single._waits.values()]


@pytest.mark.parametrize("values", [[None, None], [1, 2**40], [2**31 - 1, 0]])
def test_counts_of_any_size_come_back(values: Sequence[Any]) -> None:
    row = [[1, 2], [1.5, 2.5], [0.1, 0.2], [None, 0.5], values, values, [1, 1], ["k", "ü"], ["batch", "batch"], ["/", "/"], ["", "b"]]
    pack = Pack("a", tuple(row))
    again = pack.packed().pack()
    assert list(again.values()) == list(pack.values())
    assert list(map(list, packs.times(pack.packed().columns))) == [[1.5, 2.5], [0.1, 0.2]]


def test_old_packs_leave(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "journal.sqlite", **CLOCK)
    ledger.boot(SETUP)
    serve(ledger, 500)
    assert ledger.flush(30.0)
    ledger._disk.prune(BEGAN + 31 * 86400)
    assert ledger.find.requests().rows == ()
    ledger.close()


def test_a_ledger_of_the_step_before_is_brought_up_to_date(tmp_path: Path) -> None:
    """What is in it stays, and the journal's old pieces are still read."""
    path = tmp_path / "journal.sqlite"
    db = sqlite3.connect(path, isolation_level=None)
    for step in schema.STEPS[:2]:
        for statement in step:
            db.execute(statement)
    db.execute("PRAGMA user_version = 2")
    schema.insert_requests(db, [schema.request_values(RequestRow(5, 7.0, "a", 1, "k", "interactive", "/"))], 1)
    old = b'["Hot",[["a","k",null,1],"ok"],[1.0,5,0,2.0,5,1]]'
    schema.insert(db, "journal", [(1, 1.0, 2.0, 0.0, 2, schema.zlib.compress(old, 1))])
    db.execute("INSERT INTO boots VALUES (1, 1, 1.0, 1.0, '0', ?)", (schema.packed_setup({}),))
    db.close()
    ledger = Ledger(path)
    ledger.boot(SETUP)
    assert ledger.flush(30.0)
    assert [(row.version, row.marks) for row in ledger.find.boots()] == [("0", False), ("", True)]
    assert [row.request for row in ledger.find.requests().rows] == [5]
    assert [row.kind for row in ledger.find.events()] == ["RequestArrived", "RequestFinished"]
    ledger.close()


KILLED = """
import sys, time
from tests.ledger.test_packs import SETUP, Ledger, serve
ledger = Ledger(sys.argv[1])
ledger.boot(SETUP)
serve(ledger, 2000)
print(flush=True)
time.sleep(60)
"""


def test_who_is_killed_loses_the_last_moments_only(tmp_path: Path) -> None:
    """The rows of a second ago are on the disk, and the file is whole."""
    path = tmp_path / "journal.sqlite"
    with subprocess.Popen([sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        end = time.monotonic() + 30.0
        ledger = Ledger(path)
        try:
            while len(ledger.find.requests(limit=9999).rows) < 2000:
                assert time.monotonic() < end
                time.sleep(0.05)
        finally:
            child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert len(ledger.find.requests(limit=9999).rows) == 2000
    ledger.close()
