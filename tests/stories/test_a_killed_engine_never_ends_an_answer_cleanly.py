"""An engine that dies in the middle of an answer must never look as if the answer were complete."""

import os
import signal
from pathlib import Path

from .rig import Rig, fake


async def test_a_stream_whose_engine_was_killed_ends_with_an_error_event(tmp_path: Path) -> None:
    """kill -9 after three events: an error event, then the connection is cut; the next request gets a fresh engine."""
    async with Rig(tmp_path, {"a": fake(stream="200x0.05")}) as rig:
        exchange = await rig.ask("a", stream=True)
        await exchange.events(3)
        os.kill(rig.journal("a", "start")[0]["pid"], signal.SIGKILL)
        reply = await exchange.rest()

        assert (reply.status, reply.complete, b"[DONE]" in reply.data) == (200, False, False)
        assert len(reply.tokens) >= 3
        assert reply.error["message"]
        assert reply.error["code"]
        again = await rig.chat("a", stream=True, fe={"stream": "3x0.01"})
        assert again.done
        assert rig.starts("a") == 2


async def test_a_body_whose_engine_died_is_cut(tmp_path: Path) -> None:
    """Half of a JSON answer with its full length promised: the connection ends early, as it must."""
    async with Rig(tmp_path, {"a": fake(body=100_000)}, may_abort=True) as rig:
        reply = await rig.chat("a", fe={"fail": "die_mid"})

        assert (reply.status, reply.complete) == (200, False)
        assert 0 < len(reply.body) < int(reply.headers["content-length"])
        assert (await rig.chat("a")).done
