"""The ledger on disk: all that happened comes back, and no fault of the disk reaches who serves."""

from __future__ import annotations

import logging
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.core.facts import Admit, Model, Outcome, Refuse, RequestArrived, RequestFinished, Setup, SetupChanged, Tell, Ticked
from greenroom.ledger import codec, schema, store
from greenroom.ledger.chronicle import Chronicle
from greenroom.ledger.packs import Pack
from greenroom.ledger.reads import Unreadable
from greenroom.ledger.rows import RequestRow, TellRow, TransitionRow
from greenroom.ledger.store import Ledger, Limits
from greenroom.proxy.record import Record
from tests.ledger.runs import run

SETUP = Setup((), (Model("a", ("gpu0",)), Model("b", ("gpu0",))))


@pytest.fixture
def opened() -> Iterator[Callable[..., Ledger]]:
    """Opens ledgers and closes them at the end."""
    made: list[Ledger] = []

    def make(path: Path | None, setup: Setup = SETUP, **more: Any) -> Ledger:
        ledger = Ledger(path, **{"gather_s": 0.01, "retry_s": 0.05, **more})
        ledger.boot(setup, "1.0")
        made.append(ledger)
        return ledger

    yield make
    for ledger in made:
        ledger.close()


def record(request: int, outcome: str = "ok", model: str = "a", status: int = 200) -> Record:
    return Record(model, "chat", "POST", "/v1/chat", "key-1", status, outcome, "hot", 9, 99, 0, 0.25, 1.5, 11, 22, request=request)


def serve(ledger: Ledger, request: int, model: str = "a", at: float | None = None) -> None:
    at = time.monotonic() if at is None else at
    ledger.saw(RequestArrived(at, request, model, client="key-1"), [Admit(request, model, 1, "hot")])
    ledger.saw(RequestFinished(at + 1.0, request), [])
    ledger.ended(record(request, model=model))


def until(true: Callable[[], Any], within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def numbers(ledger: Ledger) -> list[int]:
    assert ledger.flush(10.0)
    return sorted(row.request for row in ledger.find.requests(limit=100_000).rows)


# ------------------------------------------------------------------ what comes back


def test_a_run_comes_back_after_a_restart(tmp_path: Path, opened: Callable[..., Ledger]) -> None:
    """Every event with its actions, the settings, and as many rows of each kind as the run made."""
    told, path = run(3), tmp_path / "state" / "journal.sqlite"
    first = opened(path, told.setup)
    for event, actions in told.steps:
        first.saw(event, actions)
    first.close()

    second = opened(path, told.setup)
    second.flush()
    (start, _) = second.find.boots(starts=True)
    assert (start.version, codec.setup_from(start.setup)) == ("1.0", told.setup)
    found = list(second.find.events(run=start.boot))
    assert [codec.event_from(row.event) for row in found] == [event for event, _ in told.steps]
    assert [codec.actions_from(row.actions) for row in found] == [actions for _, actions in told.steps]
    assert numbers(second) == sorted(told.arrivals)
    assert len(second.find.tells(limit=100_000).rows) == len(told.said(Tell))
    assert second.find.transitions(limit=10_000).rows
    assert sum(sum(by.values()) for by in second.find.counts().values()) == len(told.arrivals)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert second.is_durable


@pytest.mark.parametrize("seed", range(8))
def test_a_run_gives_the_rows_that_a_chronicle_gives(seed: int, tmp_path: Path, opened: Callable[..., Ledger]) -> None:
    """Though hot requests take a shorter way to the file than all else; and all events in their order."""
    told, path, frozen = run(seed), tmp_path / "journal.sqlite", {"wall": lambda: 1e9, "clock": lambda: 0.0}
    chronicle = Chronicle(told.setup, 1e9)
    wanted = [row for event, actions in told.steps for row in chronicle.feed(event, actions)]
    first = opened(path, told.setup, **frozen)
    for event, actions in told.steps:
        first.saw(event, actions)
    first.close()
    find = opened(path, told.setup, **frozen).find
    assert [(codec.event_from(row.event), codec.actions_from(row.actions)) for row in find.events()] == list(told.steps)
    found = {row.request: row for row in find.requests(limit=100_000).rows}
    assert found == {row.request: row for row in wanted if isinstance(row, RequestRow)}
    assert sorted(find.transitions(limit=100_000).rows, key=str) == sorted(
        (row for row in wanted if isinstance(row, TransitionRow)), key=str
    )


def test_both_words_about_a_request_become_one_row(opened: Callable[..., Ledger]) -> None:
    """In whatever order they come."""
    ledger, at = opened(None), time.monotonic()
    serve(ledger, 1)
    ledger.saw(RequestArrived(at, 2, "b"), [])
    ledger.ended(record(2, "refused", "b", 503))
    ledger.saw(Ticked(at + 0.5), [Refuse(2, 503, "no_room", "no")])
    ledger.flush()
    other, one = ledger.find.requests().rows
    if one.request != 1:
        one, other = other, one
    assert (one.path, one.status, one.first_byte_s, one.tokens_in, one.tokens_out, one.client) == ("/v1/chat", 200, 0.25, 11, 22, "key-1")
    assert (one.outcome, one.duration_s, one.generation) == ("ok", pytest.approx(1.0), 1)
    assert (other.outcome, other.status, other.code, other.path, other.queue_s) == (
        "refused",
        503,
        "no_room",
        "/v1/chat",
        pytest.approx(0.5),
    )


def test_what_the_core_was_never_asked_is_remembered_all_the_same(monkeypatch: pytest.MonkeyPatch, opened: Callable[..., Ledger]) -> None:
    """Refused before it got there, or its end lost in a book that was built anew; but not what named no model."""
    monkeypatch.setattr(store, "JOIN_S", 0.05)
    ledger, at = opened(None), time.monotonic()
    ledger.ended(record(7, "refused", status=503))
    ledger.ended(record(0, "refused", "", 404))
    ledger.saw(RequestArrived(at, 8, "b"), [Admit(8, "b", 1, "hot")])
    ledger.boot(SETUP, why="started over")
    ledger.ended(record(8, "cut", "b", 503))
    ledger.saw(RequestArrived(at, 9, "b"), [Refuse(9, 429, "queue_full", "full")])  # nobody records it
    until(lambda: len(ledger.find.requests().rows) == 3)
    found = {row.request: row for row in ledger.find.requests().rows}
    assert (found[7].outcome, found[7].status, found[7].model, found[7].duration_s) == ("refused", 503, "a", 1.5)
    assert (found[8].outcome, found[8].generation, found[8].start) == ("cut", 1, "hot")
    assert (found[9].outcome, found[9].code, found[9].path) == ("refused", "queue_full", "")


def test_numbers_that_begin_again_are_other_requests(tmp_path: Path, opened: Callable[..., Ledger]) -> None:
    path = tmp_path / "journal.sqlite"
    for model in ("a", "b"):
        ledger = opened(path)
        serve(ledger, 1, model)
        ledger.close()
    ledger = opened(path)
    page = ledger.find.requests()
    assert [row.model for row in page.rows] == ["b", "a"]
    newest = ledger.find.request(1)
    assert newest is not None
    assert newest.model == "b"
    assert [ledger.find.request(one) for one in page.ids] == list(page.rows)
    assert ledger.find.request(2) is None


def test_a_reload_is_a_boot_of_the_same_run(opened: Callable[..., Ledger]) -> None:
    ledger = opened(None)
    ledger.saw(SetupChanged(time.monotonic(), SETUP), [])
    ledger.boot(SETUP, "1.0")
    ledger.flush()
    assert len(ledger.find.boots()) == 2
    assert len(ledger.find.boots(starts=True)) == 1


def test_the_journal_tells_where_a_scheduler_began(opened: Callable[..., Ledger]) -> None:
    """At the start, and where the book was built anew, with the settings that held by then; a reload is no beginning."""
    ledger, later = opened(None), Setup((), (Model("c", ("gpu0",)),))
    ledger.saw(Ticked(1.0), [])
    ledger.boot(SETUP, "1.0")
    ledger.saw(Ticked(2.0), [])
    ledger.boot(later, "1.0", why="started over")
    ledger.saw(Ticked(3.0), [])
    assert ledger.flush()
    found = list(ledger.find.events(begins=True))
    assert [row.kind for row in found] == [schema.BEGAN, "Ticked", "Ticked", schema.BEGAN, "Ticked"]
    assert [codec.setup_from(row.event["setup"]) for row in found if row.kind == schema.BEGAN] == [SETUP, later]
    assert [row.clock for row in ledger.find.events()] == [1.0, 2.0, 3.0]
    assert [row.marks for row in ledger.find.boots()] == [True, True, True]


def test_a_ledger_knows_its_own_run(tmp_path: Path, opened: Callable[..., Ledger]) -> None:
    """Once it is written; in memory it has another number than on the disk, and each goes with what is read there."""
    path = tmp_path / "state" / "journal.sqlite"
    first = opened(path, gather_s=600.0)
    assert first.run == 0
    serve(first, 1)
    assert (numbers(first), first.run) == ([1], 1)
    first.close()
    path.parent.rename(tmp_path / "away")
    path.parent.write_text("in the way")
    second = opened(path)
    serve(second, 1)
    assert (numbers(second), second.run) == ([1], 1)
    path.parent.unlink()
    (tmp_path / "away").rename(path.parent)
    until(lambda: second.is_durable)
    assert (numbers(second), second.run) == ([1, 1], 2)
    assert sorted(id >> schema.RUN_SHIFT for id in second.find.requests().ids) == [1, 2]


def test_lists_come_in_pages(opened: Callable[..., Ledger]) -> None:
    """Newest first, each row once, whatever is asked for; also where many came at the same moment."""
    ledger, at = opened(None), time.monotonic()
    for n in range(1, 101):
        serve(ledger, n, "ab"[n % 2], at + n // 10)
    ledger.flush()
    for asked in ({}, {"model": "a"}, {"outcome": "ok"}, {"model": "b", "outcome": "ok"}):
        seen, cursor = [], ""
        while True:
            page = ledger.find.requests(**asked, cursor=cursor, limit=7)  # type: ignore[arg-type]
            seen += [row.request for row in page.rows]
            cursor = page.next
            if not cursor:
                break
        assert seen == sorted(seen, reverse=True)
        assert len(seen) == (50 if "model" in asked else 100)
    with pytest.raises(ValueError, match="float"):
        ledger.find.requests(cursor="nonsense~1")


def test_a_text_that_is_no_text_leaves_a_hole_and_nothing_else(opened: Callable[..., Ledger]) -> None:
    ledger, at = opened(None), time.monotonic()
    ledger.saw(RequestArrived(at, 1, "a", client="\ud800"), [])
    ledger.saw(Ticked(at), [])
    assert ledger.flush()
    assert [row.kind for row in ledger.find.events()] == ["Lost", "Ticked"]


# ------------------------------------------------------------------ sums


def test_sums_of_a_small_ledger(opened: Callable[..., Ledger]) -> None:
    """Counts, percentiles over all requests, who waits after whom, and the gaps of a model."""
    ledger, at = opened(None), time.monotonic()
    offset = time.time() - at
    for n in range(10):
        serve(ledger, n + 1, "a", at + 10.0 * n)
    rows = [
        RequestRow(100 + n, at + offset + n, "b", 1, "c", "interactive", "/", queue_s=float(n), duration_s=n + 0.5, before="a" if n else "")
        for n in range(5)
    ]
    for row in rows:
        ledger._batch["requests"].append(schema.request_values(row))
    ledger.flush()
    assert ledger.find.counts() == {"a": {"ok": 10}, "b": {"ok": 5}}
    assert ledger.find.counts(since=at + offset + 15.0) == {"a": {"ok": 8}}
    waits = ledger.find.waits(percentiles=(0, 50, 99))
    assert (waits["a"].requests, waits["a"].waited, waits["a"].percentiles[99]) == (10, 0, 0.0)
    assert (waits["b"].waited, waits["b"].longest_s, waits["b"].total_s, waits["b"].percentiles) == (
        4,
        4.0,
        10.0,
        {0: 0.0, 50: 2.0, 99: 4.0},
    )
    (pair,) = ledger.find.pairs(slow_s=2.0)
    assert (pair.before, pair.model, pair.slow, pair.longest_s) == ("a", "b", 3, 4.0)
    gaps = ledger.find.gaps("a")
    assert [round(gap_s, 3) for _, gap_s in gaps] == [9.0] * 9
    assert ledger.find.gaps("nobody") == ()
    assert ledger.find.models() == ("a", "b")
    waited = ledger.find.requests(waited_over_s=2.5)
    assert [row.queue_s for row in waited.rows] == [4.0, 3.0]


def test_charts_of_memory_keep_their_peaks(opened: Callable[..., Ledger]) -> None:
    ledger = opened(None)
    for n in range(1000):
        sample = store.SampleRow(1000.0 + n, "gpu0", 5, 9999 if n == 517 else 10, 0, {"a": n})
        ledger._put(sample)
    ledger.flush()
    found = ledger.find.samples(1000.0, 2000.0, device="gpu0", limit=10)
    assert len(found) == 10
    assert [row.at for row in found] == sorted(row.at for row in found)
    assert max(found, key=lambda row: row.used_mib or 0).own_mib == {"a": 517}
    assert len(ledger.find.samples(1000.0, 1005.0, device="gpu0")) == 5


# ------------------------------------------------------------------ faults


def test_a_place_that_is_no_folder_costs_one_warning_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, opened: Callable[..., Ledger]
) -> None:
    """Meanwhile it is read from memory; once the disk is there, everything is on it."""
    place = tmp_path / "state"
    place.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        ledger = opened(place / "journal.sqlite")
        for n in range(1, 6):
            serve(ledger, n)
            ledger.flush()
        assert not ledger.is_durable
        assert numbers(ledger) == [1, 2, 3, 4, 5]
        assert len(caplog.messages) == 1
        assert "kept in memory only" in caplog.text
        place.unlink()
        until(lambda: ledger.is_durable)
    assert "can be written again" in caplog.messages[-1]
    serve(ledger, 6)
    assert numbers(ledger) == [1, 2, 3, 4, 5, 6]
    assert len(ledger.find.boots()) == 1
    assert len(list(ledger.find.events())) == 12


def test_memory_in_place_of_a_disk_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture, opened: Callable[..., Ledger]) -> None:
    place = tmp_path / "state"
    place.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        ledger = opened(place / "journal.sqlite", limits=Limits(unwritten=20))
        for n in range(1, 101):
            serve(ledger, n)
        assert numbers(ledger) == list(range(81, 101))
        place.unlink()
        until(lambda: ledger.is_durable)
    assert "80 rows were lost" in caplog.text
    assert numbers(ledger) == list(range(81, 101))


def test_a_damaged_file_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture, opened: Callable[..., Ledger]) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"these are no rows " * 500)
    with caplog.at_level(logging.WARNING):
        ledger = opened(path)
        serve(ledger, 1)
        assert numbers(ledger) == [1]
    assert ledger.is_durable
    assert "was damaged" in caplog.text
    assert (tmp_path / "journal.sqlite.corrupt-1").read_bytes().startswith(b"these are no rows")


def test_a_file_that_is_damaged_while_it_runs(tmp_path: Path, opened: Callable[..., Ledger]) -> None:
    """The new one holds the settings of this run too, so that it can be replayed."""
    path = tmp_path / "journal.sqlite"
    ledger = opened(path)
    serve(ledger, 1)
    ledger.flush()
    connection = ledger._disk._db
    assert connection is not None
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        file.write(b"\0" * 8192)
    with pytest.raises(Unreadable):
        ledger.find.requests()
    serve(ledger, 2)
    assert numbers(ledger) == [2]
    assert len(ledger.find.boots(starts=True)) == 1
    assert ledger.is_durable


def test_a_file_of_a_newer_greenroom_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture, opened: Callable[..., Ledger]) -> None:
    path = tmp_path / "journal.sqlite"
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    db.close()
    with caplog.at_level(logging.WARNING):
        ledger = opened(path)
        serve(ledger, 1)
        assert numbers(ledger) == [1]
    assert not ledger.is_durable
    assert "newer greenroom" in caplog.text
    assert sqlite3.connect(path).execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


def test_a_file_that_another_process_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Callable[..., Ledger]) -> None:
    monkeypatch.setattr(store, "BUSY_S", 0.05)
    path = tmp_path / "journal.sqlite"
    ledger = opened(path)
    serve(ledger, 1)
    ledger.flush()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sqlite3,sys; d=sqlite3.connect(sys.argv[1]); d.execute('BEGIN IMMEDIATE'); print(flush=True); input()",
            path,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    serve(ledger, 2)
    assert numbers(ledger) == [1, 2]
    assert not ledger.is_durable
    holder.communicate(b"\n")
    until(lambda: ledger.is_durable)
    assert numbers(ledger) == [1, 2]
    assert ledger.find.request(1) is not None


FULL = """
import logging, resource, sys, time
from tests.ledger.test_store import SETUP, Ledger, serve
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
ledger = Ledger(sys.argv[1], gather_s=0.01, retry_s=0.05)
ledger.boot(SETUP)
serve(ledger, 1)
assert ledger.flush() and ledger.is_durable
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, -1))
for n in range(2, 2002):
    serve(ledger, n)
assert ledger.flush(20.0) and not ledger.is_durable
assert len(ledger.find.requests(limit=9999).rows) == 2001
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
end = time.monotonic() + 20.0
while not ledger.is_durable:
    assert time.monotonic() < end
    time.sleep(0.02)
found = sorted(row.request for row in ledger.find.requests(limit=9999).rows)
assert found == list(range(1, 2002)), found[:5]
ledger.close()
"""


def test_a_full_disk_that_is_freed(tmp_path: Path) -> None:
    """Nothing is lost: what came meanwhile is written when there is room."""
    done = subprocess.run([sys.executable, "-c", FULL, tmp_path / "journal.sqlite"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("kept in memory only") == 1
    assert done.stdout.count("can be written again") == 1


def test_a_disk_that_hangs_delays_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, opened: Callable[..., Ledger]
) -> None:
    """What is too much is dropped and counted, told once, and the journal says where."""
    gate, real = threading.Event(), store._Disk.write

    def slow(disk: Any, *args: Any) -> None:
        gate.wait(20.0)
        real(disk, *args)

    monkeypatch.setattr(store._Disk, "write", slow)
    ledger = opened(tmp_path / "journal.sqlite", limits=Limits(queued=60))
    with caplog.at_level(logging.WARNING):
        serve(ledger, 1)
        until(lambda: not ledger._queue and not ledger._hot)
        began = time.perf_counter()
        for n in range(2, 2002):
            serve(ledger, n)
        took_s = time.perf_counter() - began
        assert took_s < 2.0
        assert 3000 < ledger.dropped < 6000
        gate.set()
        assert ledger.flush(10.0)
        serve(ledger, 9999)
        kept = numbers(ledger)
        assert 9999 in kept
    assert len([text for text in caplog.messages if "too slow" in text]) == 1
    events = list(ledger.find.events())
    lost = [row.event["count"] for row in events if row.kind == "Lost"]
    assert sum(lost) == ledger.dropped
    assert sum(lost) + (len(events) - len(lost)) + len(kept) == 3 * 2002  # two events of each, and its end


def test_closing_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    monkeypatch.setattr(store._Disk, "write", lambda *args: gate.wait(20.0))
    ledger = Ledger(tmp_path / "journal.sqlite", gather_s=0.01)
    serve(ledger, 1)
    began = time.monotonic()
    ledger.close(0.2)
    assert time.monotonic() - began < 2.0
    assert "could not be written" in caplog.text
    gate.set()
    ledger._thread.join()


def test_a_fault_of_our_own_costs_rows_and_not_the_writer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, opened: Callable[..., Ledger]
) -> None:
    ledger = opened(None)
    with monkeypatch.context() as broken:
        broken.setattr(Pack, "values", lambda *args: 1 / 0)
        serve(ledger, 1)
        ledger.flush()
    serve(ledger, 2)
    assert numbers(ledger) == [2]
    assert "inner fault" in caplog.text


def test_a_fault_of_our_own_on_the_loop_costs_rows_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, opened: Callable[..., Ledger]
) -> None:
    ledger, at = opened(None), time.monotonic()
    with monkeypatch.context() as broken:
        broken.setattr(ledger._chronicle, "feed", lambda *args: 1 / 0)
        ledger.saw(RequestArrived(at, 1, "a"), [])
    serve(ledger, 2)
    assert numbers(ledger) == [2]
    assert "inner fault" in caplog.text
    assert [row.kind for row in ledger.find.events()] == ["RequestArrived", "RequestArrived", "RequestFinished"]


def test_who_reads_a_ledger_that_is_closed_is_told_so(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "journal.sqlite")
    ledger.close()
    with pytest.raises(Unreadable, match="not open"):
        ledger.find.requests()


# ------------------------------------------------------------------ how much is kept


def test_what_is_old_or_too_much_is_deleted(tmp_path: Path, opened: Callable[..., Ledger]) -> None:
    ledger = opened(tmp_path / "journal.sqlite", limits=Limits(days=1.0, rows=50))
    now = time.time()
    for n in range(200):
        ledger._put(TellRow(now - 2 * 86400 + n, "a", "ready", "info", "old"))
    for n in range(80):
        ledger._put(TellRow(now - 100 + n, "a", "ready", "info", f"new {n}"))
    ledger.flush()
    ledger._disk.prune(now)
    rows = ledger.find.tells(limit=1000).rows
    assert [row.text for row in rows] == [f"new {n}" for n in range(79, 29, -1)]
    assert len(ledger.find.boots()) == 1


def test_how_much_is_kept_can_be_changed_while_it_runs(tmp_path: Path, opened: Callable[..., Ledger]) -> None:
    ledger = opened(tmp_path / "journal.sqlite", limits=Limits(days=30.0))
    now = time.time()
    for age_days in (20, 5, 1):
        ledger._put(TellRow(now - age_days * 86400, "a", "ready", "info", f"{age_days} days ago"))
    ledger.flush()
    ledger._disk.prune(now)
    assert len(ledger.find.tells().rows) == 3
    ledger.keep(Limits(days=10.0))
    ledger._disk.prune(now)
    assert [row.text for row in ledger.find.tells().rows] == ["1 days ago", "5 days ago"]


def test_a_file_that_is_too_large_loses_its_oldest_rows(tmp_path: Path, opened: Callable[..., Ledger]) -> None:
    path = tmp_path / "journal.sqlite"
    ledger = opened(path, limits=Limits(size_bytes=1 << 20))
    for n in range(6000):
        ledger._put(TellRow(1000.0 + n, "a", "ready", "info", f"{n} " + "x" * 400))
    ledger.flush()
    ledger._disk.prune(1000.0)
    rows = ledger.find.tells(limit=10_000).rows
    assert 1000 < len(rows) < 3000
    assert [int(row.text.split()[0]) for row in rows] == list(range(5999, 5999 - len(rows), -1))
    connection = ledger._disk._db
    assert connection is not None
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert path.stat().st_size < 1.3 * 2**20


def test_the_loop_pays_microseconds(opened: Callable[..., Ledger]) -> None:
    """For each word about a request; what is made of it is the writer's work."""
    ledger = opened(None, gather_s=5.0)
    ledger.flush()
    costs = []
    for n in range(5):
        began = time.thread_time()
        for k in range(200):
            serve(ledger, 1000 * n + k)
        costs.append((time.thread_time() - began) / 200)
    assert min(costs) < 3 * 15e-6
    assert Outcome.OK == "ok"
