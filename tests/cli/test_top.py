"""`greenroom top`: the page at several widths, the state put together from messages, and the screen of a live terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from greenroom.cli import text, top, top_page
from greenroom.control.app import make_app
from tests.cli.conftest import Served, served_app
from tests.control.fake import FakeFacade, a_resident, a_sleeper, an_event
from tests.ui import scenes

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text(encoding="utf-8"))
EVIL = "\x1b]0;owned\x07\u202emodel\nrm -rf 模型🎭"
UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b\u202a-\u202e]")


def crowd(now: float) -> dict[str, Any]:
    return scenes.crowd(now, 200, 30)


def drawn(status: dict[str, Any], sentences: Any = (), **options: Any) -> list[str]:
    options = {"width": 120, "now_unix_s": RECORDED["status"]["now"], **options}
    return [line.plain for line in top_page.page(status, sentences, **options)]


def renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {names.get(key, key): renamed(one, names) for key, one in value.items()}
    if isinstance(value, list):
        return [renamed(one, names) for one in value]
    if isinstance(value, str):
        for name, other in names.items():
            value = value.replace(name, other)
    return value


# -------------------------------------------------------------------------------------------------------------- the page


@pytest.mark.parametrize("width", [80, 100, 120, 160, 200])
@pytest.mark.parametrize("height", [None, 10, 24, 50])
@pytest.mark.parametrize("ascii", [False, True])
def test_every_line_fits_the_terminal(width: int, height: int | None, ascii: bool) -> None:
    """And so does their number, also with names that want to be something else."""
    names = {one["id"]: f"{EVIL}{number}" for number, one in enumerate(RECORDED["status"]["models"])} | {"bench0": EVIL}
    pages = [
        drawn(status, RECORDED["events"], width=width, height=height, ascii=ascii, lost=lost, url="http://h:1")
        for status in (
            RECORDED["status"],
            renamed(RECORDED["status"], names),
            *(scene(0.0) for scene in (scenes.hostile, scenes.far, crowd)),
        )
        for lost in ("", f"no connection since 12:00:00: {EVIL}")
    ]
    for lines in pages:
        assert [line for line in lines if text.cells(line) > width or UNSAFE.search(line)] == []
        assert height is None or len(lines) <= height
    if ascii:
        assert all(line.isascii() for line in pages[0] if "…" not in line)


@pytest.mark.parametrize("width", [80, 160])
def test_a_recorded_moment_of_a_swap(width: int) -> None:
    """Who wakes, who waits and the server's reason for it, who sleeps, who is at home, what was said last."""
    lines = drawn(RECORDED["status"], RECORDED["events"], width=width)
    page = "\n".join(lines)
    assert lines[0].startswith("greenroom 0.1.0, up 5 s")
    assert "3 on stage, 1 asleep, 2 at home; 2 requests wait, the oldest" in page
    for one in RECORDED["status"]["queue"]["models"]:
        queue = page.partition("\nQUEUE\n")[2].partition("\n\n")[0]
        assert f"  {one['model']}  {one['waiting']} waiting for " in queue
        assert f"≈ {text.brief(one['eta_s'])} to go" in queue
        assert one["reason"] in " ".join(queue.split())
    stage = page.partition("\nON STAGE\n")[2].partition("\n\n")[0]
    assert re.search(r"  agent-32b +waking \(1\) +0/256 +2 +43\.0 GiB .*\[█*░+\] \d+ % about", stage)
    assert re.search(r"  chat-8b +ready +0/\d+ +0 +14\.5 GiB .*stays \(pinned\)", stage)
    assert ("MEASURED" in stage) == (width == 160)
    assert "gate done › sleep done › wake 3 %" in page
    asleep = page.partition("\nASLEEP\n")[2].partition("\n\n")[0]
    assert re.search(r"  coder-14b +asleep \(1\) +0 +1\.\d GiB +\d+\.\d GiB ", asleep)
    assert page.partition("\nAT HOME")[2].partition("\n\n")[0].count("math-14b ≈ ") == 1
    assert "waking for 2 requests from level 1" in page.partition("\nJUST NOW\n")[2]
    assert "bench0  " in page
    assert f"{text.size(64194 - 35022)} for 1 sleeper" in page


def test_files_on_their_way_and_other_servers_have_a_part_each() -> None:
    """How far each fetch is and who waits for it; who does not answer stands first, with why."""
    lines = drawn(scenes.far(0.0))
    page = "\n".join(lines)
    assert "6 requests wait" not in page
    assert "at home; 4 requests wait, the oldest 9.8 s, 3 wait for files" in page
    fetching = page.partition("\nFETCHING\n")[2].partition("\n\n")[0].splitlines()
    assert fetching == [
        "  gemma-12b  fetching, 34%, about 12 s, 3 waiting, 2.5 GiB of 7.2 GiB, 393 MiB/s",
        "  phi-4  waits for its turn",
    ]
    peers = page.partition("\nPEERS (3)\n")[2].partition("\n\n")[0].splitlines()
    assert peers == [
        "  attic  DOWN for 2 min: no connection within 5 s",
        "  big-box  up for 3 h, 2 in flight: llama-70b, org/model-a",
        "  hosted  up for 3 h, 0 in flight: llama-70b, qwen3-235b, mistral-l, glm-4.6, kimi-k2, gpt-oss-120b",
    ]
    home = page.partition("\nAT HOME")[2].partition("\n\n")[0]
    assert "olmo-7b (not here yet)" in home
    assert "gemma-12b" not in home
    assert "PEERS" not in "\n".join(drawn(scenes.turns(0.0)))


def test_of_ram_engines_hold_what_was_measured_of_them() -> None:
    """The rest of what is used there belongs to other programs: it is no engine's."""
    ram = scenes.device("ram", "host RAM", 10, 0, 0, 4, 700, kind="ram")
    models = [scenes.resident(name, "ram", 2, measured) for name, measured in (("a", 1.0), ("b", 0.5), ("c", None))]
    assert top_page.own_mib(ram, models) == 1536
    assert top_page.own_mib(ram, []) is None
    assert top_page.own_mib({**ram, "kind": "gpu"}, models) == 700 * 1024


def test_the_bar_tells_measured_reserved_outside_free_and_headroom() -> None:
    """Together the whole device; nothing of it is lost to rounding."""
    one = scenes.device("gpu0", "H100", 100, 10, 10, 40, 30)
    assert top_page.shares(one, [], 50) == (10, 10, 5, 20, 5)
    assert top_page.shares(scenes.device("g", "", 100, 10, 0, 40, None), [], 50) == (0, 20, 0, 25, 5)
    assert top_page.shares(scenes.device("g", "", 100, 0, 90, 40, 200), [], 50) == (20, 0, 30, 0, 0)  # overbooked by others
    for width in range(8, 91):
        assert sum(top_page.shares(one, [], width)) == width


def test_an_empty_server_is_a_page_too() -> None:
    """No device, no model, nothing said."""
    facade_less = {"version": "1.2.3", "uptime_s": 5.0, "devices": [], "models": [], "queue": {"length": 0, "oldest_s": 0.0}}
    (line,) = drawn(facade_less)
    assert line.startswith("greenroom 1.2.3, up 5 s - 0 on stage, 0 asleep, 0 at home; nobody waits")


def test_the_headline_and_what_does_not_fit() -> None:
    """The worst advice stands on top; who is not shown is counted."""
    status = scenes.turns(0.0)
    assert drawn(status)[1] == "! gpu0 loses 38 % of its time to swaps"
    assert any(line.startswith("  legacy-13b  tries again in 32 s: out of memory") for line in drawn(status))
    page = "\n".join(drawn(scenes.crowd(0.0, 200, 30), height=40))
    hidden, shown = re.search(r"… and (\d+) more", page), page.partition("ON STAGE\n")[2].partition("\n\n")[0]
    assert hidden is not None
    assert int(hidden[1]) + len(shown.splitlines()) - 2 == 30


# ------------------------------------------------------------------------------------------------------------- the state


def test_the_state_is_put_together_from_messages() -> None:
    """A snapshot, then what changed; ages count on from the moment each was told; sentences are kept once."""
    now = [0.0]
    state = top.State(lambda: now[0])
    snapshot = {"kind": "snapshot", **scenes.turns(0.0)}
    assert state.take(snapshot)
    now[0] = 10.0
    told = next(one for one in snapshot["models"] if one["id"] == "sql-7b")
    other = scenes.model("new", "stopped")
    assert state.take({"kind": "status", "uptime_s": 7.0, "models": [other], "removed": ["draft-3b"]})
    assert state.take(an_event(1, "ready"))
    assert state.take(an_event(1, "ready"))
    assert state.take({"kind": "status", "uptime_s": 7.0, "peers": [dict(scenes.PEERS[2])]})
    now[0] = 12.0
    status = state.status()
    models = {one["id"]: one for one in status["models"]}
    assert ("draft-3b" in models, "new" in models, status["uptime_s"]) == (False, True, 9.0)
    assert models["sql-7b"]["instances"][0]["idle_s"] == told["instances"][0]["idle_s"] + 12.0
    assert models["sql-7b"]["next"]["in_s"] == 60.0
    assert models["vision-11b"]["instances"][0]["expected_s"] == 0.0
    assert status["queue"]["models"][1]["requests"][0]["age_s"] == 19.0
    assert len(state.sentences) == 1
    assert [(one["id"], one["since_s"], one["last_error_s"]) for one in status["peers"]] == [("attic", 97.0, 5.0)]
    assert not state.take({"kind": "dropped", "count": 3, "level": "warning", "text": "3 events were dropped"})


# -------------------------------------------------------------------------------------------------------------- commands


def test_top_as_json_is_one_status(served: Served) -> None:
    """And ends."""
    served.facade.models = {"chat": a_resident("chat")}
    result = served.run("top", "--json")
    assert (result.exit_code, json.loads(result.output)["models"][0]["id"]) == (0, "chat")


def test_top_without_a_terminal_is_one_page(served: Served) -> None:
    """As wide as COLUMNS says."""
    served.facade.models = {"chat": a_resident("chat"), "nap": a_sleeper("nap")}
    served.facade.past = [an_event(1, "evicted: embed needed 300 MiB")]
    result = served.run("top", COLUMNS="80")
    assert result.exit_code == 0
    assert "ON STAGE" in result.output
    assert "evicted: embed needed 300 MiB" in result.output
    assert max(map(text.cells, result.output.splitlines())) <= 80


class Terminal:
    """`greenroom top` on a pseudo-terminal of 100 by 40."""

    def __init__(self, url: str, **env: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "GREENROOM_API_KEY")}
        environment = {**clean, "GREENROOM_URL": url, "TERM": "xterm", "PYTHONIOENCODING": "utf-8", **env}
        command = [sys.executable, "-c", "from greenroom.cli import main; main()", "top"]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        os.set_blocking(self._ours, False)
        self.seen = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def read(self) -> bool:
        """False: the other end is closed."""
        try:
            piece = os.read(self._ours, 65536)
        except BlockingIOError:
            time.sleep(0.02)
            return True
        except OSError:
            return False
        self.seen += piece
        return bool(piece)

    def wait_for(self, words: str) -> None:
        """From here on; what stood there before does not count."""
        begin, end = len(self.seen), time.monotonic() + 30
        while words.encode() not in self.seen[begin:]:
            is_there = self.read() and time.monotonic() < end
            assert is_there, f"never saw {words!r}: {self.seen[-3000:].decode(errors='replace')}"

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.ended()

    def ended(self) -> int:
        end = time.monotonic() + 30
        while self.read():
            assert time.monotonic() < end
        return self.process.wait(10)


def test_top_redraws_when_something_changes_and_ends_quietly(served: Served) -> None:
    """Told by events, without asking for the status; Ctrl-C gives the screen and the cursor back."""
    served.facade.models = {"chat": a_resident("chat")}
    with Terminal(served.url) as terminal:
        terminal.wait_for("chat")
        served.call(lambda: served.facade.models.update(late=a_sleeper("late")))
        terminal.wait_for("late")
        served.call(lambda: served.facade.publish(an_event(7, "evicted: embed needed 300 MiB")))
        terminal.wait_for("evicted: embed")
        assert terminal.interrupt() == 130
    words = terminal.seen.decode()
    assert "Traceback" not in words
    assert words.rindex("\x1b[?25h") > words.rindex("\x1b[?25l")
    assert words.rindex("\x1b[?1049l") > words.rindex("\x1b[?1049h")


Gate = Callable[[bool], None]


@pytest.fixture
def guarded() -> Iterator[tuple[Served, Gate, list[str]]]:
    """A server that wants a key, can be closed and opened again, and remembers what was asked of it."""
    facade, closed, paths = FakeFacade(a_resident("chat")), [False], list[str]()
    app = make_app(facade)

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        paths.append(request.path)
        if closed[0]:
            return web.json_response({"error": {"message": "the curtain is down"}}, status=503)
        if request.headers.get("Authorization") != "Bearer s3cret-key":
            return web.json_response({"error": {"message": "no"}}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    app.middlewares.append(guard)
    for served in served_app(app, facade):

        def gate(is_closed: bool, served: Served = served) -> None:
            closed[0] = is_closed
            if is_closed:
                served.call(lambda: [transport.abort() for transport in transports(served.runner)])

        yield served, gate, paths


def transports(runner: web.AppRunner) -> list[Any]:
    assert runner.server is not None
    return [one.transport for one in runner.server.connections if getattr(one, "transport", None) is not None]


def test_top_says_that_the_server_went_away_and_comes_back(guarded: tuple[Served, Gate, list[str]]) -> None:
    """With a key; what was known stays on the screen; one stream at a time, and no other route is asked."""
    served, gate, paths = guarded
    with Terminal(served.url, GREENROOM_API_KEY="s3cret-key") as terminal:
        terminal.wait_for("chat")
        gate(True)
        terminal.wait_for("no connection since")
        terminal.wait_for("chat")
        gate(False)
        served.call(lambda: served.facade.models.update(back=a_resident("back")))
        terminal.wait_for("back")
        assert terminal.interrupt() == 130
    assert set(paths) == {"/api/events"}
    assert len(paths) <= 8
    assert "s3cret" not in terminal.seen.decode()


def test_top_without_a_server_or_a_key_ends_with_one_sentence(guarded: tuple[Served, Gate, list[str]]) -> None:
    """No screen is opened for it."""
    served, _, _ = guarded
    for url, words in ((served.url, "asks for an API key and none was given"), ("http://127.0.0.1:9", "no greenroom answers")):
        with Terminal(url) as terminal:
            assert terminal.ended() == 1
        screen = terminal.seen.decode()
        assert words in screen
        assert "\x1b[?1049h" not in screen
