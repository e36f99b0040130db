"""Blobs that are being fetched: resumed after any end, and never believed before they are verified."""

from __future__ import annotations

import contextlib
import errno
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.store import partial as partial_module
from greenroom.store.facts import Damaged, StoreError
from greenroom.store.locks import Lock
from greenroom.store.partial import RECORD_BYTES, About, Partial, _add, recorded_bytes

from .models import digest

DATA = random.Random(1).randbytes(10 << 20)


def open_partial(folder: Path, data: bytes = DATA, told: str | None = None) -> Partial:
    lock = Lock.attempt(folder / "x.lock")
    assert lock is not None
    return Partial(folder / "x", lock, About("oci://h/m:v1", "m.gguf", len(data), digest(data) if told is None else told))


def fill(partial: Partial, offset: int, length: int, data: bytes = DATA, piece: int = 100_000) -> None:
    with partial.filling(offset, length) as filler:
        for at in range(offset, offset + length, piece):
            filler.write(data[at : min(at + piece, offset + length)])


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestWhole:
    def test_in_one_go(self, tmp_path: Path):
        with open_partial(tmp_path) as partial:
            fill(partial, 0, len(DATA))
            assert partial.finish(tmp_path / "blob") == digest(DATA)
        assert (tmp_path / "blob").read_bytes() == DATA
        assert (tmp_path / "blob").stat().st_mode & 0o777 == 0o444
        assert left(tmp_path) == ["blob"]

    def test_ranges_in_any_order(self, tmp_path: Path):
        with open_partial(tmp_path) as partial:
            ranges = partial.missing(1 << 20)
            random.Random(2).shuffle(ranges)
            for offset, length in ranges:
                fill(partial, offset, length)
            partial.finish(tmp_path / "blob")
        assert (tmp_path / "blob").read_bytes() == DATA

    def test_without_a_digest_it_is_told(self, tmp_path: Path):
        with open_partial(tmp_path, told="") as partial:
            fill(partial, 0, len(DATA))
            assert partial.finish(tmp_path / "blob") == digest(DATA)

    def test_nothing_at_all(self, tmp_path: Path):
        with open_partial(tmp_path, b"") as partial:
            assert partial.missing() == []
            partial.finish(tmp_path / "blob")
        assert (tmp_path / "blob").read_bytes() == b""

    def test_a_range_that_is_written_twice_counts_as_last_written(self, tmp_path: Path):
        with open_partial(tmp_path) as partial:
            fill(partial, 0, 1 << 20, bytes(1 << 20))
            fill(partial, 0, len(DATA))
            partial.finish(tmp_path / "blob")
        assert (tmp_path / "blob").read_bytes() == DATA


class TestBroken:
    def test_a_wrong_digest_leaves_nothing(self, tmp_path: Path):
        with open_partial(tmp_path, told="sha256:" + "0" * 64) as partial:
            fill(partial, 0, len(DATA))
            with pytest.raises(Damaged, match="thrown away"):
                partial.finish(tmp_path / "blob")
        assert left(tmp_path) == []

    def test_what_is_not_whole_is_not_finished(self, tmp_path: Path):
        with open_partial(tmp_path) as partial:
            fill(partial, 0, 1000)
            with pytest.raises(StoreError, match="not whole"):
                partial.finish(tmp_path / "blob")
        assert not (tmp_path / "blob").exists()

    def test_more_than_was_asked_for_is_refused(self, tmp_path: Path):
        """An endless stream ends at the first byte too many."""
        with open_partial(tmp_path) as partial, partial.filling(0, 1000) as filler:
            filler.write(bytes(1000))
            with pytest.raises(Damaged, match="more bytes"):
                filler.write(b"x")


class TestResumed:
    def test_what_came_before_the_connection_broke_counts(self, tmp_path: Path):
        with contextlib.suppress(ConnectionError), open_partial(tmp_path) as partial, partial.filling(0, len(DATA)) as filler:
            filler.write(DATA[:5_000_000])
            raise ConnectionError
        with open_partial(tmp_path) as partial:
            assert partial.missing() == [(5_000_000, len(DATA) - 5_000_000)]
            fill(partial, *partial.missing()[0])
            partial.finish(tmp_path / "blob")
        assert (tmp_path / "blob").read_bytes() == DATA

    def test_after_a_kill_at_most_one_record_is_fetched_again(self, tmp_path: Path):
        """A kill runs no clean-up: what was recorded on the way is there."""
        partial = open_partial(tmp_path)
        filler_ = partial.filling(0, len(DATA))
        filler = filler_.__enter__()
        filler.write(DATA[:-1])
        partial._lock.close()
        with open_partial(tmp_path) as again:
            assert len(DATA) - again.done <= RECORD_BYTES
        partial.close()

    def test_bytes_that_never_reached_the_disk_are_fetched_again(self, tmp_path: Path):
        """After a power cut a record may be there without its bytes: they are compared, not believed."""
        with open_partial(tmp_path) as partial:
            fill(partial, 0, 9 << 20)
        with (tmp_path / "x.part").open("r+b") as file:
            file.seek(5 << 20)
            file.write(bytes(4096))
        with open_partial(tmp_path) as partial:
            assert partial.missing(1 << 30)[0] == (RECORD_BYTES, RECORD_BYTES)
            for offset, length in partial.missing():
                fill(partial, offset, length)
            partial.finish(tmp_path / "blob")
        assert (tmp_path / "blob").read_bytes() == DATA

    @pytest.mark.parametrize("tail", [b"0 4194304 ", b"garbage\n", b"-5 10 0\n", b"0 99999999999 0\n", b"\xff\xfe\n", b"1 0 0\n"])
    def test_a_torn_journal_is_read_as_far_as_it_goes(self, tmp_path: Path, tail: bytes):
        with open_partial(tmp_path) as partial:
            fill(partial, 0, 4 << 20)
        with (tmp_path / "x.journal").open("ab") as file:
            file.write(tail)
        assert recorded_bytes(tmp_path / "x.journal", len(DATA)) == 4 << 20
        with open_partial(tmp_path) as partial:
            assert partial.done == 4 << 20

    def test_one_process_at_a_time(self, tmp_path: Path):
        with open_partial(tmp_path):
            assert Lock.attempt(tmp_path / "x.lock") is None
        lock = Lock.attempt(tmp_path / "x.lock")
        assert lock is not None
        lock.close()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=12))
def test_ranges_add_up(ranges: list[tuple[int, int]]):
    """Sorted, disjoint, not touching; exactly the bytes that were added."""
    spans: list[tuple[int, int]] = []
    for begin, length in ranges:
        _add(spans, begin, begin + length)
    assert all(left[1] < right[0] for left, right in pairwise(spans))
    assert {byte for begin, end in spans for byte in range(begin, end)} == {
        byte for begin, length in ranges for byte in range(begin, begin + length)
    }


@given(st.lists(st.tuples(st.sampled_from(("next", "again", "hash")), st.integers(0, 40), st.integers(1, 12)), max_size=30))
def test_the_hash_is_right_however_writing_and_hashing_take_turns(turns: list[tuple[str, int, int]]):
    """Pieces in a row, pieces ahead, pieces that come again with other bytes (a connection broke), and hashing in between."""
    data, wrong = DATA[:40_000], bytes(40_000)
    with tempfile.TemporaryDirectory() as name, open_partial(Path(name), data) as partial:
        at = 0
        for kind, place, length in turns:
            if kind == "hash":
                partial.advance()
                continue
            begin = min(at if kind == "next" else place * 1000, len(data))
            end = min(begin + length * 1000, len(data))
            fill(partial, begin, end - begin, wrong if place % 3 == 0 else data, 3000)
            at = end if kind == "next" else at
        fill(partial, 0, len(data), data, 7000)
        assert partial.finish(Path(name) / "blob") == digest(data)
        assert (Path(name) / "blob").read_bytes() == data


def test_a_disk_that_failed_on_the_way_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The system says once that bytes did not reach the disk; whoever asks again hears nothing of it."""
    monkeypatch.setattr(partial_module, "SYNC_BYTES", 1 << 20)
    broken = [OSError(errno.EIO, "Input/output error")]

    def sync(fd: int) -> None:
        if broken:
            raise broken.pop()

    monkeypatch.setattr("os.fdatasync", sync)
    with open_partial(tmp_path) as partial:
        fill(partial, 0, len(DATA))
        with pytest.raises(OSError, match="Input/output error"):
            partial.finish(tmp_path / "blob")
    assert not broken
    assert "blob" not in left(tmp_path)


def test_threads_that_write_while_another_one_hashes(tmp_path: Path):
    """As a pull by several connections does; the digest is right whatever comes first."""
    with open_partial(tmp_path) as partial, ThreadPoolExecutor(5) as threads:
        writing = [threads.submit(fill, partial, offset, length, DATA, 50_000) for offset, length in partial.missing(700_000)]
        while not all(one.done() for one in writing):
            threads.submit(partial.advance).result()
        for one in writing:
            one.result()
        assert partial.missing() == []
        assert partial.finish(tmp_path / "blob") == digest(DATA)
    assert (tmp_path / "blob").read_bytes() == DATA
