"""Locks between processes, and files put where they belong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from greenroom.store import placing
from greenroom.store.facts import NoRoom, StoreError
from greenroom.store.locks import Lock, is_held
from greenroom.store.placing import need_room, place, take, write_whole


def attempt(path: Path, *, shared: bool = False) -> Lock:
    lock = Lock.attempt(path, shared=shared)
    assert lock is not None
    return lock


class TestLock:
    def test_one_at_a_time(self, tmp_path: Path):
        with attempt(tmp_path / "x"):
            assert Lock.attempt(tmp_path / "x") is None
            assert Lock.attempt(tmp_path / "x", shared=True) is None
            assert is_held(tmp_path / "x")
        assert not is_held(tmp_path / "x")
        attempt(tmp_path / "x").close()

    def test_many_share(self, tmp_path: Path):
        with attempt(tmp_path / "x", shared=True), attempt(tmp_path / "x", shared=True):
            assert Lock.attempt(tmp_path / "x") is None
            assert not is_held(tmp_path / "x")

    def test_asking_makes_no_file(self, tmp_path: Path):
        assert not is_held(tmp_path / "x")
        assert not (tmp_path / "x").exists()

    def test_a_file_that_its_holder_removed_keeps_nobody_out_and_nobody_in(self, tmp_path: Path):
        """A lock on a removed file is worth nothing: the next one locks the file that is there."""
        first = attempt(tmp_path / "x")
        first.remove()
        with attempt(tmp_path / "x") as second:
            first.close()
            assert is_held(second.path)

    def test_it_ends_with_its_process(self, tmp_path: Path):
        code = (
            "import sys; from pathlib import Path; from greenroom.store.locks import Lock\n"
            "lock = Lock.attempt(Path(sys.argv[1])); print(1, flush=True); input()"
        )
        child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x")], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == b"1\n"
        assert Lock.attempt(tmp_path / "x") is None
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
        attempt(tmp_path / "x").close()

    def test_waiting_has_an_end(self, tmp_path: Path):
        with attempt(tmp_path / "x"), pytest.raises(StoreError, match="another process has held"):
            Lock.wait(tmp_path / "x", seconds_max=0.0)


class TestPlacing:
    def test_a_link_where_that_is_possible(self, tmp_path: Path):
        (tmp_path / "a").write_bytes(b"abc")
        assert place(tmp_path / "a", tmp_path / "b") == "link"
        assert (tmp_path / "b").samefile(tmp_path / "a")

    def test_else_a_copy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """File systems without hard links, without clones, and without copying in the kernel."""

        def refuse(*args: object, **more: object) -> None:
            raise OSError(95, "not supported")

        (tmp_path / "a").write_bytes(os.urandom(100_000))
        monkeypatch.setattr(os, "link", refuse)
        monkeypatch.setattr(placing, "_clone", lambda source, target: False)
        assert place(tmp_path / "a", tmp_path / "b") == "copy"
        monkeypatch.setattr(os, "copy_file_range", refuse)
        assert place(tmp_path / "a", tmp_path / "c") == "copy"
        assert (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes() == (tmp_path / "a").read_bytes()
        assert (tmp_path / "c").stat().st_mode & 0o777 == 0o444

    def test_what_is_there_is_not_overwritten(self, tmp_path: Path):
        for name in "ab":
            (tmp_path / name).write_text(name)
        with pytest.raises(FileExistsError):
            place(tmp_path / "a", tmp_path / "b")
        with pytest.raises(FileExistsError):
            take(tmp_path / "a", tmp_path / "b")
        assert (tmp_path / "b").read_text() == "b"

    def test_a_whole_file_replaces_the_old_one(self, tmp_path: Path):
        for data in (b"1", b"2"):
            write_whole(tmp_path / "x", data)
            assert (tmp_path / "x").read_bytes() == data
        assert os.listdir(tmp_path) == ["x"]

    def test_more_than_any_disk_has(self, tmp_path: Path):
        need_room(tmp_path / "not" / "made" / "yet", 0)
        with pytest.raises(NoRoom, match=r"it needs 1,152,921,504,606,846,976 bytes, .* [\d,]+ free"):
            need_room(tmp_path / "not" / "made" / "yet", 1 << 60)
