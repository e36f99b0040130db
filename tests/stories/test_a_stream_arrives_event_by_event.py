"""B10: behind a reverse proxy the token stream arrived in lumps."""

import asyncio
import json
import statistics
import time
from pathlib import Path

from .rig import Reply, Rig, fake

LATE_S_MAX = 0.05  # from the engine's write to the client's read, for the median event
LATE_S_WORST = 0.5  # a single one on a starved machine
FIRST_BYTE_S_MAX = 0.2
END = {"lf": b"\n\n", "crlf": b"\r\n\r\n", "ping": b"\n\n"}


def as_written(reply: Reply, dialect: str) -> bytes:
    """The bytes the fake engine wrote, made anew from the values that came through."""
    end = END[dialect]
    ping = b": ping" + end if dialect == "ping" else b""
    events = [ping + b"data: " + json.dumps(json.loads(payload)).encode() + end for payload in reply.tokens]
    return b"".join(events) + b"data: [DONE]" + end


def assert_not_to_be_buffered(reply: Reply) -> None:
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["cache-control"] in ("no-cache", "no-store")
    assert "content-length" not in reply.headers


async def test_each_event_comes_through_at_once_and_unchanged(tmp_path: Path) -> None:
    """Line ends, comments and a 300 KiB event keep their bytes, and no event waits for the next."""
    async with Rig(tmp_path, {dialect: fake(stream="20x0.03", dialect=dialect) for dialect in END}) as rig:
        await rig.warm(*END)
        for dialect in END:
            reply = await rig.chat(dialect, stream=True, fe={"big": 300, "stream": "5x0.01"})
            assert reply.done
            assert_not_to_be_buffered(reply)
            assert reply.body == as_written(reply, dialect)
            assert [len(payload) > 300 * 1024 for payload in reply.tokens] == [False, True, False, False, False]

            reply = await rig.chat(dialect, stream=True)
            sent_at = [json.loads(payload)["sent_at"] for payload in reply.tokens]
            came_at = [at for at, event in reply.arrivals if event.startswith(b"data: {")]
            late_s = [came - sent for came, sent in zip(came_at, sent_at, strict=True)]
            print(f"{dialect}: late by {statistics.median(late_s) * 1000:.1f} ms in the median, {max(late_s) * 1000:.1f} ms at worst")
            assert statistics.median(late_s) < LATE_S_MAX
            assert max(late_s) < LATE_S_WORST


async def test_our_own_event_streams_begin_at_once(tmp_path: Path) -> None:
    """Events and logs: the first byte comes although nothing happens, and proxies are told not to buffer."""
    async with Rig(tmp_path, {"a": fake()}) as rig:
        for target in ("/api/events", "/api/models/a/logs?follow=1"):
            took_s = []
            for _ in range(3):
                asked_at = time.monotonic()
                exchange = await rig.send("GET", target, headers={"Accept": "text/event-stream"})
                reply = await exchange.head()
                async with asyncio.timeout(5):
                    assert await exchange._more()
                took_s.append(time.monotonic() - asked_at)
                assert_not_to_be_buffered(reply)
                exchange.close()
            assert min(took_s) < FIRST_BYTE_S_MAX, target
