"""B09: the client hung up and the engine kept generating."""

import asyncio
import json
import time
from pathlib import Path

from .rig import Exchange, Rig, fake, until

GONE_S_MAX = 1.0  # from the hang-up to the engine's end of work
SLACK_S = 3.0  # a machine with more to do than CPUs
ENDLESS = {"stream": "600x0.05"}


async def assert_freed(rig: Rig, gone: int, left_at: float) -> None:
    """The engine noticed in time, nothing is in flight, and the only place is free for the next one."""
    line = await rig.wait_journal("a", "gone", gone)
    assert line["at"] - left_at < GONE_S_MAX + SLACK_S
    deadline = time.monotonic() + 5
    while (await rig.model("a"))["instances"][0]["in_flight"]:
        assert time.monotonic() < deadline, "still in flight"
    reply = await rig.chat("a")
    assert reply.done
    assert reply.took_s < 1 + SLACK_S


async def test_a_hang_up_in_any_phase_frees_the_engine_at_once(tmp_path: Path) -> None:
    """In the middle of a stream, before a whole answer, and before the first byte: the engine's only place is free within a second."""
    async with Rig(tmp_path, {"a": fake(config={"parallel": 1}, parallel=1)}) as rig:
        await rig.warm("a")

        stream = await rig.ask("a", stream=True, fe=ENDLESS)
        await stream.events(5)
        stream.close()
        await assert_freed(rig, 1, time.monotonic())

        for phase in ({"delay": 30}, {"prompt": 30}):
            begun = len(rig.inferences("a"))
            exchange = await rig.ask("a", stream="prompt" in phase, fe=phase)
            await until(lambda begun=begun: len(rig.inferences("a")) > begun, "the engine works")
            exchange.close()
            await assert_freed(rig, 2 if "delay" in phase else 3, time.monotonic())

        assert rig.starts("a") == 1
        assert max(line["at_once"] for line in rig.inferences("a")) == 1


async def test_a_client_that_stays_gets_the_whole_answer(tmp_path: Path) -> None:
    """Half-closed is not gone: streams and whole answers arrive in full.  And no answer stays open: the connection serves again."""
    async with Rig(tmp_path, {"a": fake()}) as rig:
        for stream in (True, False):
            exchange = await rig.ask("a", stream=stream, fe={"stream": "16x0.05", "delay": 0.8})
            exchange.writer.write_eof()
            reply = await exchange.rest()
            assert reply.done
            assert len(reply.tokens) == (16 if stream else 0)

        body = json.dumps({"model": "a", "stream": True}).encode()
        exchange = await rig.send("POST", "/v1/chat/completions", body)
        reader, writer = exchange.reader, exchange.writer
        for _ in range(3):
            await exchange.head()
            async with asyncio.timeout(10):
                while not exchange.reply.complete:
                    await exchange._more()
            assert exchange.reply.done
            writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            exchange = Exchange(rig, reader, writer, time.monotonic())
        assert (await exchange.rest()).done
        assert len(rig.inferences("a")) == 6
        assert rig.journal("a", "gone") == []
