"""B11: requests without Content-Length hung or broke small engines."""

import asyncio
import gzip
import hashlib
import json
import time
from pathlib import Path

from .rig import Rig, fake

MIB = 1 << 20
CONTINUE_S_MAX = 0.1
SLACK_S = 4.0
PAUSE_S = 0.1  # between the pieces of a slow body: part of the story


def framing(line: dict) -> list[str]:
    return [name.lower() for name, _ in line["headers"] if name.lower() in ("content-length", "transfer-encoding")]


def memory_peak_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


async def test_a_chunked_body_arrives_with_one_framing_and_every_byte(tmp_path: Path) -> None:
    """In three pieces with the model's name in the last: engines that want a length, or exactly one framing, are served."""
    models = {"length": fake(needs="content-length"), "strict": fake(needs="one-framing")}
    async with Rig(tmp_path, models) as rig:
        for name in models:
            body = json.dumps({"messages": [{"role": "user", "content": "good evening " * 50}], "model": name}).encode()
            cuts = [body[:200], body[200:400], body[400:]]
            exchange = await rig.send("POST", "/v1/chat/completions", headers={"Transfer-Encoding": "chunked"})
            for piece in cuts:
                exchange.writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await exchange.writer.drain()
                await asyncio.sleep(PAUSE_S)
            exchange.writer.write(b"0\r\n\r\n")
            assert (await exchange.rest()).done
            (seen,) = rig.inferences(name)
            assert seen["sha256"] == hashlib.sha256(body).hexdigest()
            assert framing(seen) == ["content-length"]


async def test_a_client_that_asks_before_sending_is_told_to_go_on(tmp_path: Path) -> None:
    """`Expect: 100-continue` is answered before the body is there, also for a model that is not."""
    async with Rig(tmp_path, {"a": fake()}) as rig:
        body = json.dumps({"model": "a"}).encode()
        asked_at = time.monotonic()
        exchange = await rig.send("POST", "/v1/chat/completions", headers={"Expect": "100-continue", "Content-Length": str(len(body))})
        interim = await asyncio.wait_for(exchange.reader.readuntil(b"\r\n\r\n"), 10)
        assert interim.startswith(b"HTTP/1.1 100 ")
        assert time.monotonic() - asked_at < CONTINUE_S_MAX + SLACK_S
        exchange.writer.write(body)
        assert (await exchange.rest()).done
        assert [line["bytes"] for line in rig.inferences("a")] == [len(body)]


async def test_a_body_that_cannot_be_read_starts_no_engine(tmp_path: Path) -> None:
    """Both framings: 400 and the connection is closed.  Compressed: 415.  Empty or no JSON: 400."""
    async with Rig(tmp_path, {"a": fake()}, config={"default_model": "a"}) as rig:
        body = json.dumps({"model": "a"}).encode()
        both = {"Content-Length": str(len(body)), "Transfer-Encoding": "chunked"}
        exchange = await rig.send("POST", "/v1/chat/completions", b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), both)
        reply = await exchange.rest()
        assert (reply.status, reply.headers["connection"]) == (400, "close")
        assert await exchange.reader.read() == b""

        packed = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        reply = await (await rig.send("POST", "/v1/chat/completions", gzip.compress(body), packed)).rest()
        assert (reply.status, reply.error["code"]) == (415, "unsupported_encoding")
        for wrong in (b"", b"   ", b"model=a", b"[1, 2]", b'{"model": "a"'):
            reply = await (await rig.send("POST", "/v1/chat/completions", wrong)).rest()
            assert (reply.status, bool(reply.error["message"])) == (400, True)
        assert rig.starts() == 0


async def test_a_large_body_is_not_held_many_times_over(tmp_path: Path) -> None:
    """25 MiB of JSON with an image inside: served, unchanged, and memory grows by three bodies at most."""
    async with Rig(tmp_path, {"a": fake()}) as rig:
        await rig.warm("a")
        picture = "data:image/png;base64," + "iVBORw0KGgo" * (25 * MIB // 11)
        message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": picture}}]}
        body = json.dumps({"messages": [message], "model": "a"}).encode()
        forget_peak(rig.pid)
        before_kib = memory_peak_kib(rig.pid)
        reply = await (await rig.send("POST", "/v1/chat/completions", body)).rest()
        assert reply.done
        assert rig.inferences("a")[-1]["sha256"] == hashlib.sha256(body).hexdigest()
        grown_kib = memory_peak_kib(rig.pid) - before_kib
        print(f"{len(body) / MIB:.0f} MiB of body: {grown_kib / 1024:.0f} MiB more at the peak")
        assert grown_kib <= 3 * len(body) // 1024
