"""The log ring keeps the newest lines, cleans them, and waits for nobody."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time

from greenroom.host import logs
from greenroom.host.logs import LogRing


def test_lines_are_whole_however_the_bytes_come():
    """Chunks cut anywhere, also inside a character, give the same lines; the unfinished one is kept back."""
    text = "erste Zeile äöü\nzweite\r\ndritte".encode()
    for size in (1, 2, 3, 7, 100):
        ring = LogRing("a")
        for at in range(0, len(text), size):
            ring.feed(text[at : at + size])
        assert ring.tail(10) == ["erste Zeile äöü", "zweite"]
        ring.flush()
        assert ring.tail(10) == ["erste Zeile äöü", "zweite", "dritte"]


def test_only_the_newest_lines_are_kept():
    """Older ones fall out; `tail` gives the newest, oldest first."""
    ring = LogRing("a", lines_max=3)
    ring.feed(b"1\n2\n3\n4\n5\n")
    assert ring.tail(2) == ["4", "5"]
    assert ring.tail(100) == ["3", "4", "5"]
    assert ring.tail(0) == []
    assert ring.lines_seen == 5


def test_escapes_controls_and_bad_bytes_are_cleaned():
    """Colours, window titles, cursor moves and NULs go; invalid UTF-8 is replaced."""
    ring = LogRing("a")
    ring.feed(b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07t\x00ab\tc\x08 \xff\xfe \xc2\x9b31m\n")
    assert ring.tail(1) == ["red tab\tc �� 31m"]


def test_an_escape_cut_between_chunks_is_still_removed():
    """Cleaning works on whole lines."""
    ring = LogRing("a")
    for part in (b"\x1b[3", b"1mred\x1b", b"[0m\n"):
        ring.feed(part)
    assert ring.tail(1) == ["red"]


def test_a_long_line_is_cut_and_the_next_one_is_whole():
    """A line without end takes bounded memory."""
    ring = LogRing("a", line_bytes_max=10)
    for _ in range(1000):
        ring.feed(b"x" * 1000)
    ring.feed(b"x\nnext\n" + b"y" * 15 + b"\n")
    assert ring.tail(10) == ["x" * 10 + " …", "next", "y" * 10 + " …"]


def test_secrets_are_masked_wherever_the_chunks_or_the_cut_fall():
    """Not even half a secret is shown."""
    secret = "sk-0123456789"
    for before in range(12):
        ring = LogRing("a", line_bytes_max=10, mask=[secret, "sk-0"])
        line = b"k" * before + secret.encode()
        for at in range(len(line)):
            ring.feed(line[at : at + 1])
        ring.feed(b"z" * 100)
        ring.feed(b"\n")
        (shown,) = ring.tail(1)
        assert "sk-" not in shown
        assert "0123" not in shown


def test_progress_bars_give_lines():
    """A carriage return ends a line, so progress is seen while it happens."""
    ring = LogRing("a")
    ring.feed(b"10%\r20%\r30%")
    assert ring.tail(10) == ["10%", "20%"]


def test_listeners_hear_every_batch_until_they_leave():
    """They are called at once with the clean lines."""
    ring = LogRing("a")
    heard: list[list[str]] = []
    leave = ring.listen(lambda lines: heard.append(list(lines)))
    ring.feed(b"1\n2\n")
    leave()
    leave()
    ring.feed(b"3\n")
    assert heard == [["1", "2"]]


async def test_a_reader_gets_the_tail_and_then_every_line():
    """No gap and no repetition between the two; closing the ring ends the iteration."""
    ring = LogRing("a")
    ring.feed(b"1\n2\n3\n")
    reader = ring.subscribe(tail=2)

    async def follow() -> list[str]:
        return [line async for line in reader]

    async def print_more() -> None:
        ring.feed(b"4\n")
        await asyncio.sleep(0)
        ring.feed(b"5\n")
        ring.close()

    read, _ = await asyncio.wait_for(asyncio.gather(follow(), print_more()), 20)
    assert read == ["2", "3", "4", "5"]


async def test_a_slow_reader_is_told_how_many_lines_it_missed():
    """It gets the newest lines it can hold."""
    ring = LogRing("a")
    reader = ring.subscribe(lines_max=3)
    ring.feed(b"".join(b"%d\n" % number for number in range(100)))
    assert [await anext(reader) for _ in range(4)] == ["[97 lines left out: this reader was too slow]", "97", "98", "99"]
    assert reader.dropped == 97


def test_a_reader_that_was_dropped_costs_nothing():
    """No close needed."""
    ring = LogRing("a")
    ring.subscribe()
    ring.feed(b"1\n")
    assert len(ring._readers) == 0


def test_the_file_holds_the_clean_lines_and_only_its_owner_may_read_it(tmp_path):
    """Secrets are masked there too; an existing file is made private."""
    path = tmp_path / "engine.log"
    path.write_text("before\n")
    path.chmod(0o644)
    ring = LogRing("a", file=path, mask=["secret"])
    ring.feed(b"\x1b[1ma secret\x1b[0m\n")
    ring.close()
    assert path.read_text() == "before\na ***\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_file_rotates_by_size(tmp_path):
    """Two pieces, together at most twice the limit, newest lines in the first."""
    path = tmp_path / "engine.log"
    ring = LogRing("a", file=path, file_bytes_max=1000)
    for number in range(1000):
        ring.feed(b"%04d\n" % number)
    ring.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["engine.log", "engine.log.1"]
    assert all(each.stat().st_size <= 1000 for each in tmp_path.iterdir())
    assert (path.with_name("engine.log.1").read_text() + path.read_text()).splitlines()[-300:] == [f"{n:04d}" for n in range(700, 1000)]
    assert all(each.stat().st_mode & 0o777 == 0o600 for each in tmp_path.iterdir())


def test_a_full_disk_costs_the_file_not_the_log(tmp_path, monkeypatch):
    """ENOSPC is told in one sentence, lines stay in memory, and writing is taken up again when there is room."""
    now = [0.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    ring = LogRing("a", file=tmp_path / "engine.log")
    assert ring.file is not None

    def full(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(logs.os, "write", full)
        ring.feed(b"1\n")
        assert ring.file.settled()
    assert "No space left on device" in ring.file.error
    ring.feed(b"2\n")
    assert ring.file.settled()
    now[0] = logs.FILE_RETRY_S
    ring.feed(b"3\n")
    ring.close()

    assert ring.tail(10) == ["1", "2", "3"]
    assert (tmp_path / "engine.log").read_text() == "3\n"
    assert (ring.file.error, ring.file.lost_bytes) == ("", 4)


def test_a_missing_folder_costs_the_file_only(tmp_path):
    """The log works without it."""
    ring = LogRing("a", file=tmp_path / "none" / "engine.log")
    ring.feed(b"1\n")
    assert ring.tail(1) == ["1"]
    assert ring.file is not None
    assert ring.file.settled()
    assert "No such file" in ring.file.error


def test_a_failing_file_is_told_once(tmp_path, caplog):
    """However many lines it loses."""
    ring = LogRing("a", file=tmp_path / "none" / "engine.log")
    for _ in range(3):
        ring.feed(b"1\n")
    ring.close()
    assert [record.message for record in caplog.records] == [ring.file.error]


def test_a_disk_that_hangs_costs_the_file_not_the_log(tmp_path, monkeypatch):
    """Nobody waits for it: lines are kept in memory, bounded, and an end waits once, for a bounded time."""
    monkeypatch.setattr(logs, "FILE_CLOSE_S_MAX", 0.2)
    monkeypatch.setattr(logs, "FILE_PENDING_BYTES_MAX", 1000)
    go, write, hung = threading.Event(), os.write, threading.Event()

    def hangs(handle: int, data: bytes) -> int:
        hung.set()
        go.wait()
        return write(handle, data)

    monkeypatch.setattr(logs.os, "write", hangs)
    one, other = LogRing("a", file=tmp_path / "a.log"), LogRing("b", file=tmp_path / "b.log")
    try:
        one.feed(b"first\n")
        assert hung.wait(20)
        for number in range(400):
            one.feed(b"%03d\n" % number)
        other.feed(b"other\n")
        assert one.tail(2) == ["398", "399"]
        one.close()
        other.close()
    finally:
        go.set()
    while not one.file.settled():  # it did not wait again for the write that hung
        time.sleep(0.01)
    assert (tmp_path / "a.log").read_text().splitlines() == ["first", *(f"{n:03d}" for n in range(248))]
    assert one.file.lost_bytes == 4 * (400 - 248)
    assert (tmp_path / "b.log").read_text() == "other\n"


def run_of(path, *lines: str, **more) -> LogRing:
    ring = LogRing("a", file=path, **more)
    for line in lines:
        ring.feed(f"{line}\n".encode())
    ring.close()
    return ring


def test_the_history_goes_on_before_this_run(tmp_path):
    """A line of ours parts the runs; what only looks at this run sees nothing of the others; secrets of today are masked in all."""
    path = tmp_path / "engine.log"
    run_of(path, "1", "token t0ken", "3")
    ring = run_of(path, "4", "5", mask=["t0ken"])

    note = f"[greenroom: what is above was printed before greenroom started; older lines are in {path}]"
    assert ring.history(100) == ["1", "token ***", "3", note, "4", "5"]
    assert ring.history(4) == ["3", note, "4", "5"]
    assert [ring.history(n) for n in (3, 2, 0)] == [["4", "5"], ["4", "5"], []]
    assert ring.tail(100) == ["4", "5"]
    assert run_of(path).history(2) == ["5", f"{note}"]


def test_a_first_run_has_no_history_but_its_own(tmp_path):
    """No note where nothing is above it; none where the file is gone or lines of this run lie between."""
    ring = run_of(tmp_path / "engine.log", "1", "2")
    assert (ring.history(10), LogRing("a").history(10)) == (["1", "2"], [])
    later = run_of(tmp_path / "engine.log", "3", "4", "5", lines_max=2)
    assert later.history(10) == ["4", "5"]
    after = run_of(tmp_path / "engine.log", "6")
    (tmp_path / "engine.log").unlink()
    assert after.history(10) == ["6"]


def test_history_is_found_in_both_pieces_of_the_file(tmp_path):
    """Also when the file rotates meanwhile; a line whose beginning is not read is left out."""
    path = tmp_path / "engine.log"
    run_of(path, *(f"{n:04d}" for n in range(30)), file_bytes_max=100)
    ring = LogRing("a", file=path, file_bytes_max=100)
    *shown, note = ring.history(100)
    assert shown == [f"{n:04d}" for n in range(30)]
    ring.feed(b"new!\n" * 10)
    ring.feed(b"new!\n")  # which is one too many for the first piece
    assert ring.file.settled()
    assert ring.history(100) == [*shown[20:], note, *["new!"] * 11]
    ring.feed(b"new!\n" * 20)
    assert ring.file.settled()
    assert ring.history(100) == ["new!"] * 31


def test_of_a_long_history_no_more_is_read_than_was_asked_for(tmp_path):
    """The newest lines, each whole."""
    path = tmp_path / "engine.log"
    run_of(path, *(f"{n:05d} {'x' * 993}" for n in range(500)))
    shown = LogRing("a", file=path).history(101)[:-1]
    assert [line[:5] for line in shown] == [f"{n:05d}" for n in range(500 - len(shown), 500)]
    assert 0 < len(shown) * 1000 <= 100 * logs.EARLIER_LINE_BYTES
    assert {len(line) for line in shown} == {999}
