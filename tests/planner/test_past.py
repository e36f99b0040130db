"""What is no ledger, or a damaged one, is told in a sentence; what is whole in it is read."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from greenroom.core.facts import Admit, Device, Model, Outcome, RequestArrived, RequestFinished, Setup, SetupChanged, Ticked
from greenroom.ledger import schema, store
from greenroom.ledger.store import Ledger, Limits
from greenroom.planner.faults import CannotReplay
from greenroom.planner.past import Past
from greenroom.planner.replay import exactly
from greenroom.proxy.record import Record
from tests.ledger.runs import run

SETUP = Setup((Device("gpu0", "gpu", 1000),), (Model("a", ("gpu0",), 300),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger with two sets of settings and a request."""
    ledger = Ledger(tmp_path / "journal.sqlite", clock=lambda: 50.0, wall=lambda: 1000.0)
    ledger.boot(SETUP, "first")
    ledger.boot(SETUP, "second")
    ledger.saw(RequestArrived(50.0, 1, "a"), [Admit(1, "a", 1, "cold")])
    ledger.saw(RequestFinished(50.5, 1, Outcome.OK), [])
    ledger.ended(Record("a", "chat", "POST", "/v1/chat/completions", "k", 200, "ok", "cold", 9, 9, 0, 0.1, 0.5, request=1))
    assert ledger.flush(30.0)
    ledger.close()
    return tmp_path / "journal.sqlite"


def damage(path: Path, sql: str, *values: object) -> None:
    with sqlite3.connect(path) as db:
        assert db.execute(sql, values).rowcount
    db.close()


def test_a_whole_one_is_read(path: Path) -> None:
    assert [row.request for row in Past.at(path).stretch(100.0, 1010.0).requests] == [1]


def test_rows_that_lie_in_the_future_are_found(path: Path) -> None:
    """A clock that was set back: the last stretch before the newest row is looked at."""
    seen = Past.at(path).stretch(100.0, 500.0)
    assert ([row.request for row in seen.requests], seen.within[0] > 900) == ([1], True)


def test_settings_whose_bytes_are_damaged_cost_only_themselves(path: Path) -> None:
    damage(path, "UPDATE boots SET setup = ? WHERE id = 2", b"\x78\x9crubbish")
    assert Past.at(path).stretch(100.0, 1010.0).setup.models[0].id == "a"
    damage(path, "UPDATE boots SET setup = ? WHERE id = 1", b"\x00")
    with pytest.raises(CannotReplay, match="knows no settings"):
        Past.at(path).stretch(100.0, 1010.0)


@pytest.mark.parametrize("lines", [b"\x78\x9crubbish", b"\xc1"])
def test_a_damaged_journal_is_told(path: Path, lines: bytes) -> None:
    damage(path, "UPDATE journal SET lines = ?", lines)
    ((_, events),) = Past.at(path).runs()
    with pytest.raises(CannotReplay, match="is damaged"):
        list(events)


def recorded(path: Path, *seeds: int) -> None:
    """One run of a server whose book was built anew before each world but the first."""
    ledger = Ledger(path, clock=lambda: 0.0, wall=lambda: 1e9, limits=Limits(queued=1_000_000))
    for place, seed in enumerate(seeds):
        told = run(seed)
        ledger.boot(told.setup, "1", why="started over" if place else "")
        for event, actions in told.steps:
            ledger.saw(event, actions)
            if isinstance(event, SetupChanged):
                ledger.boot(event.setup, "1")
    ledger.close(30.0)


def test_what_was_written_replays_exactly_also_after_the_book_was_built_anew(tmp_path: Path) -> None:
    recorded(tmp_path / "journal.sqlite", 2, 5)
    same = exactly(Past.at(tmp_path / "journal.sqlite").runs())
    assert (same.difference, same.runs, same.cut) == (None, 1, 0)
    assert same.events == len(run(2).steps) + len(run(5).steps)


def test_a_run_whose_oldest_piece_was_deleted_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PIECE_EVENTS", 64)
    path = tmp_path / "journal.sqlite"
    recorded(path, 2)
    recorded(path, 5)
    damage(path, "DELETE FROM journal WHERE id = (SELECT min(id) FROM journal)")
    same = exactly(Past.at(path).runs())
    assert (same.difference, same.runs, same.cut) == (None, 1, 1)
    assert same.events == len(run(5).steps)


def test_a_ledger_of_an_older_greenroom_is_read_as_it_is(path: Path) -> None:
    """It may be the file of a server that has not been started since: nobody has brought it up to date."""
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE boots DROP COLUMN marks")
    db.close()
    damage(path, "UPDATE journal SET lines = ?", schema.packed([schema.line_of(Ticked(50.0), [])]))
    ((boot, events),) = Past.at(path).runs()
    assert (boot.marks, {row.kind for row in events}) == (False, {"Ticked"})
    assert Past.at(path).setup().models[0].id == "a"


def test_what_is_no_ledger_is_told_with_the_name_of_the_one_that_is(tmp_path: Path) -> None:
    """The state directory holds another database, too."""
    other = tmp_path / "ledger.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE models (a)")
    db.close()
    for wrong, words in (
        (other, "is no ledger: .* as journal.sqlite"),
        (tmp_path, "is a folder: name the journal.sqlite"),
        (tmp_path / "x", "no ledger at"),
    ):
        with pytest.raises(CannotReplay, match=words):
            Past.at(wrong)
