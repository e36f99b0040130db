"""The oracles of the rig can fail: each of them is shown the fault it is there for."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from .rig import Reply, Rig, fake, queued_s

SSE = {"content-type": "text/event-stream"}
TOKEN = (0.0, b'data: {"choices": []}')
DONE = (0.0, b"data: [DONE]")
ERROR = (0.0, b'data: {"error": {"message": "the engine ended", "code": "engine_broke"}}')


@pytest.mark.parametrize(
    ("reply", "is_fault"),
    [
        (Reply(200, SSE, complete=True, arrivals=[TOKEN, DONE]), False),
        (Reply(200, SSE, complete=True, arrivals=[TOKEN]), True),  # a clean end without its marker
        (Reply(200, SSE, complete=False, arrivals=[TOKEN]), True),  # cut without a word
        (Reply(200, SSE, complete=False, arrivals=[TOKEN, ERROR]), False),
        (Reply(200, SSE, complete=True, arrivals=[TOKEN, ERROR]), True),  # an error, and then as if all were well
        (Reply(200, {}, body=b"{}", complete=True), False),
        (Reply(200, {}, body=b"{", complete=False), True),
        (Reply(503, {}, body=b'{"error": {"message": "no room", "code": "no_room"}}', complete=True), False),
        (Reply(500, {}, body=b"Internal Server Error", complete=True), True),
        (Reply(0, {}), True),  # no answer at all
    ],
)
def test_an_answer_is_whole_or_an_explicit_error(reply: Reply, is_fault: bool) -> None:
    """O2."""
    assert bool(reply.fault()) == is_fault


def claim(**facts: Any) -> dict[str, Any]:
    return {"at": 1.0, "event": "claim", "model": "a", "pid": 1, "start": 1, "mib": 100, "total_mib": 100, "twins": [], **facts}


@pytest.mark.parametrize(("line", "oracle"), [(claim(total_mib=10_001), "O1"), (claim(twins=[2]), "O3")])
def test_engines_beyond_the_budget_or_twice_are_noticed(tmp_path: Path, line: dict[str, Any], oracle: str) -> None:
    """O1 and O3."""
    rig = Rig(tmp_path, {})
    rig.journal_path.write_text(json.dumps(claim()) + "\n")
    rig.check()
    rig.journal_path.write_text(json.dumps(line) + "\n")

    with pytest.raises(AssertionError, match=oracle):
        rig.check()


def test_sleepers_beyond_the_host_budget_are_noticed(tmp_path: Path) -> None:
    """O1, for RAM."""
    rig = Rig(tmp_path, {}, host_budget_mib=48_000)
    rig.journal_path.write_text(json.dumps(claim(host_mib=8_000, total_host_mib=48_000)) + "\n")
    rig.check()
    rig.journal_path.write_text(json.dumps(claim(host_mib=20_000, total_host_mib=60_000)) + "\n")

    with pytest.raises(AssertionError, match="host RAM"):
        rig.check()


@pytest.mark.parametrize(
    "line",
    [
        {"event": "sleep_begin", "level": 1, "mode": "wait", "in_flight": 1},
        {"event": "asleep_request", "number": 7},
        {"event": "crash", "why": "CUDA error"},
    ],
)
def test_work_for_a_sleeper_is_noticed(tmp_path: Path, line: dict[str, Any]) -> None:
    """O5."""
    rig = Rig(tmp_path, {})
    well = {"event": "sleep_begin", "level": 1, "mode": "wait", "in_flight": 0}
    rig.journal_path.write_text(json.dumps(claim(**well)) + "\n")
    rig.check()
    rig.journal_path.write_text(json.dumps(claim(**line)) + "\n")

    with pytest.raises(AssertionError, match="O5"):
        rig.check()


@pytest.mark.parametrize("stream", [False, True])
def test_garbage_that_reached_a_client_is_noticed(tmp_path: Path, stream: bool) -> None:
    """O5."""

    def reply(text: str) -> Reply:
        if stream:
            chunk = {"choices": [{"delta": {"content": text}}]}
            return Reply(200, SSE, complete=True, arrivals=[(0.0, b"data: " + json.dumps(chunk).encode()), DONE])
        return Reply(200, {}, body=json.dumps({"choices": [{"message": {"content": text}}]}).encode(), complete=True)

    rig = Rig(tmp_path, {})
    rig.replies = [reply(" lamp voice")]
    rig.check()
    rig.replies = [reply(" ! !")]

    with pytest.raises(AssertionError, match="O5"):
        rig.check()


def test_a_forgotten_file_is_noticed(tmp_path: Path) -> None:
    """O4."""
    rig = Rig(tmp_path, {})
    (rig.tmp_dir / "spool").touch()

    with pytest.raises(AssertionError, match="O4"):
        rig.check()


def test_a_slow_status_is_noticed(tmp_path: Path) -> None:
    """O6: more than 2 of 100 late, or one very late."""
    rig = Rig(tmp_path, {})
    rig.latencies_s = [0.01] * 98 + [0.3] * 2
    rig.check()
    rig.latencies_s = [0.01] * 97 + [0.3] * 3
    with pytest.raises(AssertionError, match="O6"):
        rig.check()
    rig.latencies_s = [0.01] * 99 + [2.0]
    with pytest.raises(AssertionError, match="O6"):
        rig.check()


async def test_a_server_that_stands_still_is_noticed_and_a_machine_that_is_busy_is_not(tmp_path: Path) -> None:
    """O6 counts what the server took, without the time it stood in line for a CPU."""
    async with Rig(tmp_path, {"a": fake()}) as rig:
        for _ in range(3):
            await rig.status()
        rig.notify(signal.SIGSTOP)
        await asyncio.sleep(0.6)  # the fault itself
        rig.notify(signal.SIGCONT)
        await rig.status()
        rig._end_polls()
        assert max(rig.latencies_s) > 0.4
        rig.latencies_s.clear()

    assert queued_s(f"/proc/{os.getpid()}") >= 0.0
    assert queued_s("/proc/none") == 0.0
