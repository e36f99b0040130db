"""Learned footprints: remembered across restarts, never in the way of serving."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.ledger.footprints import SCHEMA_VERSION, STEPS, Footprints, Key, Learned, LearnedTier

CHAT = Key(files="aa11", engine_version="b4321", launch="ff00", device_kind="H100")
EMBED = Key(files="bb22", engine_version="", launch="ff00", device_kind="ram")
TIERS = (LearnedTier(1, 1210, 15_400, 0.41, 0.83), LearnedTier(2, 1190, 3100, 0.2, 6.5))
LEARNED = Learned(device_mib=4300, host_mib=120, up_s=3.25, down_s=0.4, samples=3, tiers=TIERS)


def test_what_was_learned_survives_a_restart(tmp_path: Path) -> None:
    """All figures come back, and an unknown key is None."""
    first = Footprints(tmp_path / "state" / "ledger.sqlite")
    first.put(CHAT, LEARNED)
    first.put(EMBED, Learned(up_s=0.5))
    first.close()

    second = Footprints(tmp_path / "state" / "ledger.sqlite")

    assert second.get(CHAT) == LEARNED
    assert second.get(EMBED) == Learned(up_s=0.5)
    assert second.get(Key("aa11", "b4322", "ff00", "H100")) is None
    assert second.is_durable
    second.close()


def test_sleep_levels_are_replaced_with_the_rest(tmp_path: Path) -> None:
    """What a later put no longer knows is gone from the disk too."""
    book = Footprints(tmp_path / "ledger.sqlite")
    book.put(CHAT, LEARNED)
    book.put(CHAT, Learned(device_mib=5000, tiers=TIERS[1:]))
    book.close()

    again = Footprints(tmp_path / "ledger.sqlite")
    assert again.get(CHAT) == Learned(device_mib=5000, tiers=TIERS[1:])
    again.close()


def written_by_version_1(path: Path) -> None:
    """A file as the first version left it."""
    db = sqlite3.connect(path)
    db.execute(STEPS[0])
    db.execute("INSERT INTO footprints VALUES ('aa11', 'b4321', 'ff00', 'H100', 4300, 120, 3.25, 0.4, 3, 1.0)")
    db.execute("INSERT INTO footprints VALUES ('bb22', '', 'ff00', 'ram', NULL, NULL, 0.5, NULL, 1, 2.0)")
    db.execute("PRAGMA user_version = 1")
    db.commit()
    db.close()


def test_a_file_of_version_1_is_taken_over_with_all_it_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In place: what was learned stays, sleep levels can be added, and nothing is moved aside."""
    path = tmp_path / "ledger.sqlite"
    written_by_version_1(path)

    with caplog.at_level(logging.WARNING):
        book = Footprints(path)
    old = Learned(4300, 120, 3.25, 0.4, 3)
    assert (book.get(CHAT), book.get(EMBED), book.is_durable, caplog.records) == (old, Learned(up_s=0.5, samples=1), True, [])
    book.put(CHAT, replace(old, tiers=TIERS))
    book.close()

    again = Footprints(path)
    assert (again.get(CHAT), again.get(EMBED)) == (LEARNED, Learned(up_s=0.5, samples=1))
    again.close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    db.close()
    assert not [one for one in tmp_path.iterdir() if "corrupt" in one.name]


def test_a_migration_that_breaks_off_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk half-way: this run learns in memory, the next one migrates."""
    path = tmp_path / "ledger.sqlite"
    written_by_version_1(path)
    monkeypatch.setattr("greenroom.ledger.footprints.STEPS", (*STEPS, "CREATE TABLE nothing"))
    monkeypatch.setattr("greenroom.ledger.footprints.SCHEMA_VERSION", SCHEMA_VERSION + 1)
    book = Footprints(path)
    assert not book.is_durable
    book.close()
    monkeypatch.undo()

    again = Footprints(path)
    assert (again.get(CHAT), again.is_durable) == (Learned(4300, 120, 3.25, 0.4, 3), True)
    again.close()


def test_the_newest_figures_win(tmp_path: Path) -> None:
    """A second put of the same key replaces the row."""
    book = Footprints(tmp_path / "ledger.sqlite")
    book.put(CHAT, LEARNED)
    book.put(CHAT, Learned(device_mib=5000, samples=4))
    book.close()

    again = Footprints(tmp_path / "ledger.sqlite")
    assert again.get(CHAT) == Learned(device_mib=5000, samples=4)
    assert len(again) == 1
    again.close()


def test_the_file_is_private(tmp_path: Path) -> None:
    """Nobody else reads which models are used: 0600 in a 0700 folder."""
    book = Footprints(tmp_path / "state" / "ledger.sqlite")
    book.put(CHAT, LEARNED)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "state").iterdir()}
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    assert set(modes.values()) == {0o600}
    book.close()


def test_rows_are_bounded_and_the_least_used_leaves(tmp_path: Path) -> None:
    """With room for three, the fourth key pushes out the one not used for longest, on disk as well."""
    book = Footprints(tmp_path / "ledger.sqlite", rows_max=3)
    keys = [Key(f"f{n}", "", "l", "ram") for n in range(4)]
    for key in keys[:3]:
        book.put(key, LEARNED)
    assert book.get(keys[0]) == LEARNED  # used: stays
    book.put(keys[3], LEARNED)
    book.close()

    again = Footprints(tmp_path / "ledger.sqlite")
    assert [again.get(key) is not None for key in keys] == [True, False, True, True]
    again.close()


def test_a_file_with_too_many_rows_is_cut_to_the_newest(tmp_path: Path) -> None:
    """A lower limit than the run before keeps the newest rows."""
    ticks = iter(range(100))
    book = Footprints(tmp_path / "ledger.sqlite", clock=lambda: float(next(ticks)))
    keys = [Key(f"f{n}", "", "l", "ram") for n in range(5)]
    for key in keys:
        book.put(key, LEARNED)
    book.close()

    again = Footprints(tmp_path / "ledger.sqlite", rows_max=2)
    assert [again.get(key) is not None for key in keys] == [False, False, False, True, True]
    again.close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        assert db.execute("SELECT count(*) FROM footprints").fetchone() == (2,)
        assert db.execute("SELECT count(*) FROM tiers").fetchone() == (4,)
    db.close()


def test_without_a_path_it_lives_in_memory() -> None:
    """`None` is a lawful path: nothing is written, everything else works."""
    book = Footprints(None)
    book.put(CHAT, LEARNED)
    assert book.get(CHAT) == LEARNED
    assert not book.is_durable
    book.close()


def no_database(path: Path, word: bytes = b"") -> None:
    path.write_bytes(b"this is no database, however often one reads it\n" * 200 + word)


def torn_page(path: Path) -> None:
    """A right header, and rubbish where the rows are."""
    book = Footprints(path)
    for n in range(200):
        book.put(Key(f"f{n}", "", "l", "ram"), LEARNED)
    book.close()
    content = bytearray(path.read_bytes())
    content[4096 : 2 * 4096] = b"\xa5" * 4096
    path.write_bytes(content)


def folder_in_the_way(folder: Path) -> Path:
    path = folder / "ledger.sqlite"
    path.mkdir()
    return path


def file_as_parent(folder: Path) -> Path:
    (folder / "state").write_text("a file")
    return folder / "state" / "ledger.sqlite"


def newer_schema(folder: Path) -> Path:
    path = folder / "ledger.sqlite"
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    return path


@pytest.mark.parametrize("spoil", [folder_in_the_way, file_as_parent, newer_schema])
def test_a_file_that_cannot_be_used_costs_one_warning_and_no_service(
    spoil: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Figures are kept in memory, the warning says what to do, and the file is left as it was."""
    assert callable(spoil)
    path = spoil(tmp_path)
    before = path.read_bytes() if path.is_file() else None

    with caplog.at_level(logging.WARNING):
        book = Footprints(path)
        book.put(CHAT, LEARNED)
        book.put(EMBED, LEARNED)

    assert book.get(CHAT) == LEARNED
    assert not book.is_durable
    assert len(caplog.records) == 1
    assert "kept in memory only" in caplog.text
    assert str(path) in caplog.text
    assert (path.read_bytes() if path.is_file() else None) == before
    book.close()


@pytest.mark.parametrize("spoil", [no_database, torn_page])
def test_a_damaged_file_is_moved_aside_and_a_new_one_begun(
    spoil: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning that names both files; what is learned from then on survives the next restart."""
    path = tmp_path / "ledger.sqlite"
    spoil(path)
    Path(f"{path}-wal").write_bytes(b"journal")
    before = path.read_bytes()

    with caplog.at_level(logging.WARNING):
        book = Footprints(path)
        book.put(CHAT, LEARNED)
    durable = book.is_durable
    book.close()
    again = Footprints(path)

    assert durable
    assert len(caplog.records) == 1
    assert f"{path} was damaged" in caplog.text
    assert f"it is {path}.corrupt-1 now" in caplog.text
    assert Path(f"{path}.corrupt-1").read_bytes() == before
    assert (again.get(CHAT), len(again)) == (LEARNED, 1)
    again.close()


def test_at_most_three_damaged_files_are_kept(tmp_path: Path) -> None:
    """The newest is `.corrupt-1`; the oldest leaves."""
    path = tmp_path / "ledger.sqlite"
    for n in range(5):
        no_database(path, b"%d" % n)
        Footprints(path).close()

    kept = {one.name: one.read_bytes()[-1:] for one in tmp_path.iterdir() if "corrupt" in one.name}
    assert kept == {"ledger.sqlite.corrupt-1": b"4", "ledger.sqlite.corrupt-2": b"3", "ledger.sqlite.corrupt-3": b"2"}


def test_a_file_that_is_damaged_while_in_use_is_replaced_with_all_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The new file holds what memory holds; a second damage in one run is only warned about."""
    path = tmp_path / "ledger.sqlite"
    book = Footprints(path)
    book.put(CHAT, LEARNED)
    write, failing = Footprints._write, [True]

    def fail_once(self: Footprints, batch: Mapping[Key, tuple[Learned, float] | None]) -> None:
        if failing.pop() if failing else False:
            fault = sqlite3.DatabaseError("database disk image is malformed")
            fault.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise fault
        write(self, batch)

    assert book.flush()
    monkeypatch.setattr(Footprints, "_write", fail_once)
    with caplog.at_level(logging.WARNING):
        book.put(EMBED, LEARNED)
        assert book.flush()
        assert (len(caplog.records), book.is_durable) == (1, True)
        failing.append(True)
        book.put(EMBED, LEARNED)
        assert book.flush()
        assert (len(caplog.records), book.is_durable) == (2, False)
    book.close()

    assert [one.name for one in tmp_path.iterdir() if "corrupt" in one.name] == ["ledger.sqlite.corrupt-1"]
    again = Footprints(path)
    assert (again.get(CHAT), again.get(EMBED)) == (LEARNED, LEARNED)
    again.close()


def test_a_disk_that_fails_later_is_warned_about_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While another process holds the file, figures stay in memory; the next ones are written again."""
    book = Footprints(tmp_path / "ledger.sqlite")
    other = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            book.put(CHAT, LEARNED)
            assert book.flush()
    assert len(caplog.records) == 1
    assert not book.is_durable
    other.execute("ROLLBACK")
    other.close()
    book.put(EMBED, LEARNED)
    book.close()

    again = Footprints(tmp_path / "ledger.sqlite")
    assert again.get(EMBED) == LEARNED
    assert again.get(CHAT) is None
    again.close()


def test_a_disk_that_takes_its_time_delays_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are known at once, and written when the disk comes to it; meanwhile the newest of each model is enough."""
    path = tmp_path / "ledger.sqlite"
    book, may_write, write, batches = Footprints(path), threading.Event(), Footprints._write, []

    def slow(self: Footprints, batch: Mapping[Key, tuple[Learned, float] | None]) -> None:
        assert may_write.wait(30)
        batches.append(len(batch))
        write(self, batch)

    monkeypatch.setattr(Footprints, "_write", slow)
    book.put(CHAT, replace(LEARNED, samples=0))
    for samples in range(1, 100):
        book.put(EMBED, replace(LEARNED, samples=samples))
    assert book.get(EMBED) == replace(LEARNED, samples=99)
    assert not book.flush(0.01)
    may_write.set()
    assert book.flush(30)
    assert sum(batches) <= 3
    book.close()
    again = Footprints(path)
    assert (again.get(CHAT), again.get(EMBED)) == (replace(LEARNED, samples=0), replace(LEARNED, samples=99))
    again.close()


def test_a_read_only_file_system_degrades_to_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No permission to write is no reason not to serve."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("greenroom.ledger.footprints.os.open", refuse)
    book = Footprints(tmp_path / "ledger.sqlite")
    monkeypatch.undo()
    book.put(CHAT, LEARNED)
    assert book.get(CHAT) == LEARNED
    assert not book.is_durable
    book.close()


def test_two_processes_opening_a_new_file_agree(tmp_path: Path) -> None:
    """The schema is made once; both can write."""
    one, two = Footprints(tmp_path / "ledger.sqlite"), Footprints(tmp_path / "ledger.sqlite")
    one.put(CHAT, LEARNED)
    two.put(EMBED, LEARNED)
    one.close()
    two.close()
    again = Footprints(tmp_path / "ledger.sqlite")
    assert (again.get(CHAT), again.get(EMBED)) == (LEARNED, LEARNED)
    again.close()
